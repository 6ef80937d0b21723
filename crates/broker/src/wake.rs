//! Wakes waiting pops when there may be something for them.
//!
//! A wake-up is a hint, never a fact: a woken pop looks again, and a timer makes every pop look
//! now and then anyway. So a hint may be lost with a server, and must be cheap: whoever calls
//! [`Wake::pushed`] after a commit waits for nothing.

mod peers;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use peers::Outbox;

/// Pops that may be parked at once in one server. More are told to come back.
pub const PARKED_MAX: usize = 20_000;

/// What a parked pop waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Any partition of a queue.
    Queue(String),
    /// One partition of a queue.
    Partition { queue: String, partition: String },
    /// Any queue that matches a filter. Which ones do is the database's knowledge, so every
    /// touched queue wakes it.
    Discovery { namespace: String, task: String },
}

/// The parked pops of one server. Cheap to clone.
#[derive(Clone, Default)]
pub struct Wake {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    parked: Parked,
    closed: AtomicBool,
    lines: Mutex<Lines>,
    outbox: Outbox,
    told: Notify,
    notices: AtomicU64,
    idle: AtomicUsize,
}

#[derive(Default)]
struct Parked(AtomicUsize);

/// Waiters of one interest and one group, oldest first. Only those that nobody has woken yet are in it.
type Line = BTreeMap<u64, Arc<Notify>>;
type Groups = HashMap<String, Line>;

#[derive(Default)]
struct Lines {
    last_ticket: u64,
    queues: HashMap<String, QueueLines>,
    discovery: HashMap<(String, String), Groups>,
}

#[derive(Default)]
struct QueueLines {
    any: Groups,
    partitions: HashMap<String, Groups>,
}

impl Wake {
    /// A server that tells no other server anything until [`Wake::listen`] runs.
    pub fn new() -> Self {
        Self::default()
    }

    /// A partition of `queue` has new messages, committed. In each group one parked pop looks again.
    pub fn pushed(&self, queue: &str, partition: &str) {
        self.shared.outbox.add(queue);
        if self.parked() == 0 {
            return;
        }
        let mut lines = self.lines();
        if let Some(lines) = lines.queues.get_mut(queue) {
            wake_each(&mut lines.any, 1);
            if let Some(groups) = lines.partitions.get_mut(partition) {
                wake_each(groups, 1);
            }
        }
        for groups in lines.discovery.values_mut() {
            wake_each(groups, 1);
        }
    }

    /// A lease of `group` in `queue` ended: what it held may be taken by another pop of that group.
    pub fn released(&self, queue: &str, partition: &str, group: &str) {
        self.shared.outbox.add_released(queue, group);
        if self.parked() == 0 {
            return;
        }
        let mut lines = self.lines();
        if let Some(lines) = lines.queues.get_mut(queue) {
            wake_line(lines.any.get_mut(group), 1);
            wake_line(lines.partitions.get_mut(partition).and_then(|groups| groups.get_mut(group)), 1);
        }
        for groups in lines.discovery.values_mut() {
            wake_line(groups.get_mut(group), 1);
        }
    }

    /// Cursors of `group` in `queue` were set elsewhere or deleted: as many parked pops of that group as
    /// `partitions` look again.
    pub fn moved(&self, queue: &str, group: &str, partitions: usize) {
        self.shared.outbox.add(queue);
        if self.parked() == 0 {
            return;
        }
        let mut lines = self.lines();
        if let Some(lines) = lines.queues.get_mut(queue) {
            wake_line(lines.any.get_mut(group), partitions);
            for groups in lines.partitions.values_mut() {
                wake_line(groups.get_mut(group), 1);
            }
        }
        for groups in lines.discovery.values_mut() {
            wake_line(groups.get_mut(group), partitions);
        }
    }

    /// A lease of `group` in `queue` ended on another server, which does not say in which partition.
    fn released_elsewhere(&self, queue: &str, group: &str) {
        let mut lines = self.lines();
        if let Some(lines) = lines.queues.get_mut(queue) {
            wake_line(lines.any.get_mut(group), 1);
            for groups in lines.partitions.values_mut() {
                wake_line(groups.get_mut(group), 1);
            }
        }
        for groups in lines.discovery.values_mut() {
            wake_line(groups.get_mut(group), 1);
        }
    }

    /// Something that all servers obey was changed here.
    pub fn switched(&self) {
        self.shared.outbox.add_switched();
    }

    /// Ends when another server has changed such a thing, or may have.
    pub async fn told(&self) {
        self.shared.told.notified().await;
    }

    /// How many notices of other servers have woken something, or would have.
    pub fn notices(&self) -> u64 {
        self.shared.notices.load(Ordering::Relaxed)
    }

    /// Another server pushed to `partitions` partitions of `queue`; it does not say which.
    fn pushed_elsewhere(&self, queue: &str, partitions: usize) {
        let mut lines = self.lines();
        if let Some(lines) = lines.queues.get_mut(queue) {
            lines.wake(partitions);
        }
        for groups in lines.discovery.values_mut() {
            wake_each(groups, partitions);
        }
    }

    /// Notices were missed, or there were too many to name.
    fn anything_elsewhere(&self) {
        let mut lines = self.lines();
        for queue in lines.queues.values_mut() {
            queue.wake(1);
        }
        for groups in lines.discovery.values_mut() {
            wake_each(groups, 1);
        }
    }

    /// Registers a pop before it looks, so that nothing committed after its look can escape it.
    /// `None` if [`PARKED_MAX`] are registered.
    pub fn wait(&self, interest: Interest, group: &str) -> Option<Waiter> {
        let count = &self.shared.parked.0;
        let admitted = count.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < PARKED_MAX).then_some(n + 1));
        admitted.ok()?;
        let mut lines = self.lines();
        lines.last_ticket += 1;
        let ticket = lines.last_ticket;
        drop(lines);
        let waiter =
            Waiter { wake: self.clone(), interest, group: group.to_owned(), ticket, notify: Arc::new(Notify::new()) };
        waiter.stand_in_line();
        Some(waiter)
    }

    /// The server stops: every parked pop ends its wait and none begins another.
    pub fn close(&self) {
        self.shared.closed.store(true, Ordering::Release);
        let mut lines = self.lines();
        for queue in lines.queues.values_mut() {
            queue.wake(usize::MAX);
        }
        for groups in lines.discovery.values_mut() {
            wake_each(groups, usize::MAX);
        }
    }

    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }

    /// How many pops are parked, or looking between two parkings.
    pub fn parked(&self) -> usize {
        self.shared.parked.0.load(Ordering::Acquire)
    }

    /// How many pops wait for each queue, of at most `most` queues. Those that look by namespace or task wait for none.
    pub fn parked_by_queue(&self, most: usize) -> Vec<(String, usize)> {
        let lines = self.lines();
        let waiting = |groups: &Groups| groups.values().map(Line::len).sum::<usize>();
        let count = |lines: &QueueLines| waiting(&lines.any) + lines.partitions.values().map(waiting).sum::<usize>();
        let counted = lines.queues.iter().map(|(queue, lines)| (queue.clone(), count(lines)));
        counted.filter(|(_, parked)| 0 < *parked).take(most).collect()
    }

    /// How many of them have looked and wait.
    pub fn idle(&self) -> usize {
        self.shared.idle.load(Ordering::Acquire)
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        // Every change under the lock is complete in itself, so a panic elsewhere leaves nothing half done.
        self.shared.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QueueLines {
    fn wake(&mut self, partitions: usize) {
        wake_each(&mut self.any, partitions);
        for groups in self.partitions.values_mut() {
            wake_each(groups, partitions);
        }
    }

    fn is_empty(&self) -> bool {
        self.any.is_empty() && self.partitions.is_empty()
    }
}

impl Lines {
    fn groups_mut(&mut self, interest: &Interest) -> &mut Groups {
        match interest {
            Interest::Queue(queue) => &mut self.queues.entry(queue.clone()).or_default().any,
            Interest::Partition { queue, partition } => {
                let queue = self.queues.entry(queue.clone()).or_default();
                queue.partitions.entry(partition.clone()).or_default()
            }
            Interest::Discovery { namespace, task } => {
                self.discovery.entry((namespace.clone(), task.clone())).or_default()
            }
        }
    }

    /// Forgets what has no waiter left, so that names of queues long gone do not stay.
    fn forget_empty(&mut self, interest: &Interest, group: &str) {
        let groups = self.groups_mut(interest);
        if groups.get(group).is_some_and(Line::is_empty) {
            groups.remove(group);
        }
        if !groups.is_empty() {
            return;
        }
        match interest {
            Interest::Queue(queue) | Interest::Partition { queue, .. } => {
                let Some(lines) = self.queues.get_mut(queue) else { return };
                if let Interest::Partition { partition, .. } = interest {
                    lines.partitions.remove(partition);
                }
                if lines.is_empty() {
                    self.queues.remove(queue);
                }
            }
            Interest::Discovery { namespace, task } => {
                self.discovery.remove(&(namespace.clone(), task.clone()));
            }
        }
    }
}

fn wake_each(groups: &mut Groups, count: usize) {
    for line in groups.values_mut() {
        wake_line(Some(line), count);
    }
}

/// Wakes the `count` that have waited longest. More would only look at the same messages.
fn wake_line(line: Option<&mut Line>, count: usize) {
    let Some(line) = line else { return };
    for _ in 0..count {
        let Some((_, notify)) = line.pop_first() else { return };
        notify.notify_one();
    }
}

/// A place in line. Dropped, it is given up; a wake-up it did not use goes to the next.
pub struct Waiter {
    wake: Wake,
    interest: Interest,
    group: String,
    ticket: u64,
    notify: Arc<Notify>,
}

impl Waiter {
    /// Ends when there may be something new since the last call, or since the registration.
    /// On return the waiter stands in line again, so the look that follows misses nothing.
    pub async fn woken(&mut self) {
        let idle = Idle::begin(&self.wake.shared.idle);
        self.notify.notified().await;
        drop(idle);
        self.stand_in_line();
    }

    fn stand_in_line(&self) {
        let mut lines = self.wake.lines();
        let groups = lines.groups_mut(&self.interest);
        groups.entry(self.group.clone()).or_default().insert(self.ticket, self.notify.clone());
    }
}

/// A waiter that has looked and waits.
struct Idle<'a>(&'a AtomicUsize);

impl<'a> Idle<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count)
    }
}

impl Drop for Idle<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut lines = self.wake.lines();
        let line = lines.groups_mut(&self.interest).entry(self.group.clone()).or_default();
        if line.remove(&self.ticket).is_none() {
            wake_line(Some(line), 1);
        }
        lines.forget_empty(&self.interest, &self.group);
        drop(lines);
        self.wake.shared.parked.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn queue(name: &str) -> Interest {
        Interest::Queue(name.to_owned())
    }

    fn is_woken(waiter: &mut Waiter) -> bool {
        waiter.woken().now_or_never().is_some()
    }

    #[test]
    fn a_push_wakes_one_waiter_of_each_group_and_no_other_queue() {
        let wake = Wake::new();
        let mut a1 = wake.wait(queue("q"), "a").expect("room");
        let mut a2 = wake.wait(queue("q"), "a").expect("room");
        let mut b = wake.wait(queue("q"), "b").expect("room");
        let mut other = wake.wait(queue("r"), "a").expect("room");
        wake.pushed("q", "p");
        assert!(is_woken(&mut a1) && is_woken(&mut b));
        assert!(!is_woken(&mut a2) && !is_woken(&mut other));
    }

    #[test]
    fn a_push_between_registration_and_waiting_is_not_lost() {
        let wake = Wake::new();
        let mut waiter = wake.wait(queue("q"), "g").expect("room");
        wake.pushed("q", "p");
        assert!(is_woken(&mut waiter), "pushed during the first look");
        wake.pushed("q", "p");
        assert!(is_woken(&mut waiter), "pushed during the second look");
        assert!(!is_woken(&mut waiter), "each wake-up counts once");
    }

    #[test]
    fn a_waiter_that_leaves_passes_its_wake_up_on() {
        let wake = Wake::new();
        let first = wake.wait(queue("q"), "g").expect("room");
        let mut second = wake.wait(queue("q"), "g").expect("room");
        wake.pushed("q", "p");
        drop(first);
        assert!(is_woken(&mut second));
        drop(second);
        assert_eq!(wake.parked(), 0);
        assert!(wake.lines().queues.is_empty(), "nothing is remembered");
    }

    #[test]
    fn a_partition_waiter_does_not_use_up_another_partitions_wake_up() {
        let wake = Wake::new();
        let only = |partition: &str| Interest::Partition { queue: "q".to_owned(), partition: partition.to_owned() };
        let mut p = wake.wait(only("p"), "g").expect("room");
        let mut r = wake.wait(only("r"), "g").expect("room");
        let mut any = wake.wait(queue("q"), "g").expect("room");
        wake.pushed("q", "r");
        assert!(is_woken(&mut r) && is_woken(&mut any));
        assert!(!is_woken(&mut p));
        wake.pushed_elsewhere("q", 1);
        assert!(is_woken(&mut p), "another server does not name the partition");
    }

    #[test]
    fn discovery_is_woken_by_every_queue() {
        let wake = Wake::new();
        let filter = Interest::Discovery { namespace: "n".to_owned(), task: String::new() };
        let mut waiter = wake.wait(filter, "g").expect("room");
        wake.pushed("anything", "p");
        assert!(is_woken(&mut waiter));
        wake.released("anything", "p", "g");
        assert!(is_woken(&mut waiter));
        wake.released("anything", "p", "another");
        assert!(!is_woken(&mut waiter));
    }

    #[test]
    fn moved_cursors_wake_as_many_of_their_group_as_there_are_partitions() {
        let wake = Wake::new();
        let only = Interest::Partition { queue: "q".to_owned(), partition: "p".to_owned() };
        let mut waiters = [queue("q"), queue("q"), queue("q"), only].map(|what| wake.wait(what, "g").expect("room"));
        let mut others =
            [(queue("q"), "another"), (queue("r"), "g")].map(|(what, group)| wake.wait(what, group).expect("room"));
        wake.moved("q", "g", 2);
        assert_eq!(waiters.each_mut().map(is_woken), [true, true, false, true]);
        assert_eq!(others.each_mut().map(is_woken), [false, false]);
    }

    #[test]
    fn parked_pops_are_counted_by_queue() {
        let wake = Wake::new();
        let only = Interest::Partition { queue: "q".to_owned(), partition: "p".to_owned() };
        let filter = Interest::Discovery { namespace: "n".to_owned(), task: String::new() };
        let held = [(queue("q"), "a"), (only, "a"), (queue("q"), "b"), (filter, "a")]
            .map(|(what, group)| wake.wait(what, group).expect("room"));
        assert_eq!(wake.parked_by_queue(10), [("q".to_owned(), 3)]);
        assert_eq!(wake.parked_by_queue(0), []);
        drop(held);
        assert_eq!(wake.parked_by_queue(10), []);
    }

    #[test]
    fn parking_is_bounded() {
        let wake = Wake::new();
        let all: Vec<Waiter> = (0..PARKED_MAX).map(|_| wake.wait(queue("q"), "g").expect("room")).collect();
        assert!(wake.wait(queue("q"), "g").is_none());
        drop(all);
        assert!(wake.wait(queue("q"), "g").is_some());
    }
}
