//! Tells the other servers of one database which queues were pushed to, at most a hundred times a second.
//!
//! NOTIFY takes a lock that orders commits in the whole database, so it never runs in a transaction
//! that pushes: what was touched is collected, and a connection of its own sends it.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::mpsc::{self, Receiver};
use tokio::time::{Instant, timeout_at};
use tokio_postgres::{AsyncMessage, Client};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use uuid::Uuid;

use super::Wake;
use crate::db::{Sql, Target};
use crate::error::Error;

const CHANNEL: &str = "ebbtide_wake";
/// PostgreSQL refuses a payload of 8,000 bytes or more.
const PAYLOAD_BYTES_MAX: usize = 7_900;
/// Pause between two notices; what is touched meanwhile shares the next one.
const PAUSE: Duration = Duration::from_millis(10);
/// Notices received and not yet acted upon. Past it they are dropped and everything is woken.
const INBOX_MAX: usize = 256;
const RECONNECT_FIRST: Duration = Duration::from_millis(100);
const RECONNECT_LONGEST: Duration = Duration::from_secs(10);
const LOG_EVERY: Duration = Duration::from_secs(60);
/// Instead of names: there were too many.
const EVERYTHING: &str = "*";
/// Something that all servers obey was changed.
const SWITCHED: &str = "!";
/// In the place of a count: a lease ended. Group and queue follow, with a separator that no name holds.
const RELEASED: &str = "r";
const SEPARATOR: char = '\u{1f}';

/// What the other servers have not been told yet.
#[derive(Default)]
pub(super) struct Outbox {
    open: AtomicBool,
    pending: Mutex<Pending>,
    filled: Notify,
}

#[derive(Default)]
struct Pending {
    /// Pushes by queue; about as many partitions.
    queues: HashMap<String, usize>,
    /// Group and queue of the leases that ended.
    released: HashSet<String>,
    has_switched: bool,
    bytes: usize,
    overflowed: bool,
}

impl Outbox {
    /// Cheap, and never waits for the connection.
    pub(super) fn add(&self, queue: &str) {
        self.change(|pending| pending.add(queue));
    }

    pub(super) fn add_released(&self, queue: &str, group: &str) {
        self.change(|pending| pending.add_released(queue, group));
    }

    pub(super) fn add_switched(&self) {
        self.change(|pending| pending.has_switched = true);
    }

    fn change(&self, change: impl FnOnce(&mut Pending)) {
        if !self.open.load(Ordering::Relaxed) {
            return;
        }
        change(&mut self.pending.lock().unwrap_or_else(PoisonError::into_inner));
        self.filled.notify_one();
    }

    fn take(&self) -> Pending {
        std::mem::take(&mut *self.pending.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Pending {
    fn add(&mut self, queue: &str) {
        if self.overflowed {
            return;
        }
        if let Some(count) = self.queues.get_mut(queue) {
            *count += 1;
            return;
        }
        // A line is a count of at most 20 digits, a space, the name and a line feed.
        if self.has_room(queue.len() + 22) {
            self.queues.insert(queue.to_owned(), 1);
        }
    }

    fn add_released(&mut self, queue: &str, group: &str) {
        let lease = format!("{group}{SEPARATOR}{queue}");
        // A line is an `r`, a space, both names with their separator and a line feed.
        if !self.overflowed && !self.released.contains(&lease) && self.has_room(lease.len() + 3) {
            self.released.insert(lease);
        }
    }

    /// Takes so many bytes, or gives up naming anything.
    fn has_room(&mut self, bytes: usize) -> bool {
        self.bytes += bytes;
        let has_room = self.bytes <= PAYLOAD_BYTES_MAX - 64;
        if !has_room {
            *self = Self { overflowed: true, has_switched: self.has_switched, ..Self::default() };
        }
        has_room
    }

    fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.released.is_empty() && !self.overflowed && !self.has_switched
    }

    /// The sender, then a line for each queue. Names hold no line feed.
    fn payload(&self, sender: Uuid) -> String {
        let mut text = sender.simple().to_string();
        if self.overflowed {
            text.push('\n');
            text.push_str(EVERYTHING);
        }
        if self.has_switched {
            text.push('\n');
            text.push_str(SWITCHED);
        }
        for lease in &self.released {
            write!(text, "\n{RELEASED} {lease}").expect("a string takes everything");
        }
        for (queue, count) in &self.queues {
            write!(text, "\n{count} {queue}").expect("a string takes everything");
        }
        assert!(text.len() <= PAYLOAD_BYTES_MAX, "add() keeps it shorter");
        text
    }
}

/// Says that the link is down, at most once a minute.
#[derive(Default)]
struct Complaint {
    last: Option<Instant>,
    is_down: bool,
}

impl Complaint {
    fn down(&mut self, error: &Error) {
        self.is_down = true;
        if self.last.is_none_or(|last| LOG_EVERY <= last.elapsed()) {
            self.last = Some(Instant::now());
            warn!(target: "db", %error, "no link to other servers; waiting pops find their pushes by timer");
        }
    }

    fn up(&mut self) {
        if std::mem::take(&mut self.is_down) {
            info!(target: "db", "linked to other servers");
        }
    }
}

impl Wake {
    /// Links this server with the others on the same database until `stop`. `target` must lead to
    /// PostgreSQL itself: a transaction pooler loses LISTEN.
    ///
    /// Without the link everything works; pops then find what other servers pushed by their timers.
    pub async fn listen(self, target: Target, stop: CancellationToken) {
        let sender = Uuid::now_v7();
        let mut complaint = Complaint::default();
        let mut pause = RECONNECT_FIRST;
        self.shared.outbox.open.store(true, Ordering::Relaxed);
        while !stop.is_cancelled() {
            let linked_at = Instant::now();
            let link = stop.run_until_cancelled(self.link(&target, sender, &mut complaint)).await;
            let Some(Err(error)) = link else { break };
            complaint.down(&error);
            if RECONNECT_LONGEST < linked_at.elapsed() {
                pause = RECONNECT_FIRST;
            }
            let _ = timeout_at(Instant::now() + pause, stop.cancelled()).await;
            pause = (pause * 2).min(RECONNECT_LONGEST);
        }
        self.shared.outbox.open.store(false, Ordering::Relaxed);
    }

    /// Listens and tells until the connection breaks.
    async fn link(&self, target: &Target, sender: Uuid, complaint: &mut Complaint) -> Result<(), Error> {
        let (client, mut inbox) = connect(target).await?;
        client.batch_execute("listen ebbtide_wake").await?;
        complaint.up();
        // Whatever was pushed before the link stood went unnoticed.
        self.anything_elsewhere();
        self.shared.told.notify_one();
        let mut tell = pin!(self.tell(&client, sender));
        loop {
            tokio::select! {
                told = &mut tell => return told,
                notice = inbox.recv() => match notice {
                    Some(payload) => self.heard(&payload, sender),
                    None => return Err(Error::Disconnected),
                },
            }
        }
    }

    async fn tell(&self, client: &Client, sender: Uuid) -> Result<(), Error> {
        loop {
            self.shared.outbox.filled.notified().await;
            let pending = self.shared.outbox.take();
            if pending.is_empty() {
                continue;
            }
            let payload = pending.payload(sender);
            let text = tokio_postgres::types::Type::TEXT;
            let query = "select pg_notify($1, $2)";
            client.rows(query, &[(&CHANNEL, text.clone()), (&payload, text)]).await?;
            tokio::time::sleep_until(Instant::now() + PAUSE).await;
        }
    }

    fn heard(&self, payload: &str, me: Uuid) {
        let mut lines = payload.lines();
        let from = lines.next().and_then(|sender| Uuid::parse_str(sender).ok());
        if from == Some(me) {
            return;
        }
        for line in lines {
            self.shared.notices.fetch_add(1, Ordering::Relaxed);
            match line.split_once(' ') {
                None if line == SWITCHED => self.shared.told.notify_one(),
                _ if self.parked() == 0 => {}
                Some((RELEASED, lease)) => {
                    let (group, queue) = lease.split_once(SEPARATOR).unwrap_or_default();
                    self.released_elsewhere(queue, group);
                }
                Some((count, queue)) => self.pushed_elsewhere(queue, count.parse().unwrap_or(1)),
                None => self.anything_elsewhere(),
            }
        }
    }
}

/// A connection whose notices arrive in the channel, which closes when the connection ends.
async fn connect(target: &Target) -> Result<(Client, Receiver<String>), Error> {
    let mut config = target.config.clone();
    config.application_name("ebbtide-wake");
    let (client, mut connection) = config.connect(target.connector()).await?;
    let (sender, inbox) = mpsc::channel(INBOX_MAX);
    tokio::spawn(async move {
        let mut behind = false;
        while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
            let AsyncMessage::Notification(notice) = message else { continue };
            let payload = if behind { format!("\n{EVERYTHING}") } else { notice.payload().to_owned() };
            behind = sender.try_send(payload).is_err();
        }
    });
    Ok((client, inbox))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wake::Interest;
    use futures_util::FutureExt;

    #[test]
    fn a_notice_names_queues_with_their_counts() {
        let mut pending = Pending::default();
        pending.add("orders");
        pending.add("orders");
        let me = Uuid::now_v7();
        assert_eq!(pending.payload(me), format!("{}\n2 orders", me.simple()));
    }

    #[test]
    fn too_many_names_become_everything_within_the_payload_limit() {
        let mut pending = Pending::default();
        for n in 0..10_000 {
            pending.add(&format!("{n}{}", "x".repeat(250)));
        }
        assert!(pending.queues.is_empty(), "bounded");
        let payload = pending.payload(Uuid::now_v7());
        assert!(payload.ends_with("\n*") && payload.len() < 100, "{payload}");
    }

    #[test]
    fn the_fullest_notice_fits() {
        let mut pending = Pending::default();
        let mut n = 0;
        while !pending.overflowed {
            let before = pending.payload(Uuid::now_v7());
            assert!(before.len() <= PAYLOAD_BYTES_MAX);
            pending.add(&format!("queue-{n}"));
            n += 1;
        }
        assert!(100 < n, "many fit: {n}");
    }

    #[test]
    fn a_notice_wakes_others_and_not_its_sender() {
        let wake = Wake::new();
        let mut waiter = wake.wait(Interest::Queue("orders".to_owned()), "g").expect("room");
        let (me, other) = (Uuid::now_v7(), Uuid::now_v7());
        let mut pending = Pending::default();
        pending.add("orders");
        wake.heard(&pending.payload(me), me);
        assert!(waiter.woken().now_or_never().is_none(), "its own");
        wake.heard(&pending.payload(other), me);
        assert!(waiter.woken().now_or_never().is_some());
        wake.heard(&format!("{}\n{EVERYTHING}", other.simple()), me);
        assert!(waiter.woken().now_or_never().is_some(), "too many to name");
        wake.heard("nonsense", me);
        assert!(waiter.woken().now_or_never().is_none());
    }

    #[test]
    fn a_lease_that_ended_wakes_its_group_only() {
        let wake = Wake::new();
        let queue = Interest::Queue("orders".to_owned());
        let mut of_group = wake.wait(queue.clone(), "g").expect("room");
        let mut of_other = wake.wait(queue, "h").expect("room");
        let mut pending = Pending::default();
        pending.add_released("orders", "g");
        pending.add_released("orders", "g");
        wake.heard(&pending.payload(Uuid::now_v7()), Uuid::now_v7());
        assert!(of_group.woken().now_or_never().is_some());
        assert!(of_other.woken().now_or_never().is_none());
        assert_eq!(wake.notices(), 1, "told once");
    }

    #[test]
    fn a_switch_is_told_however_much_there_is_to_tell() {
        let wake = Wake::new();
        let mut pending = Pending { has_switched: true, ..Pending::default() };
        for n in 0..10_000 {
            pending.add(&n.to_string());
        }
        let payload = pending.payload(Uuid::now_v7());
        assert!(payload.len() <= PAYLOAD_BYTES_MAX);
        wake.heard(&payload, Uuid::now_v7());
        assert!(wake.told().now_or_never().is_some());
    }

    #[test]
    fn an_outbox_without_a_link_keeps_nothing() {
        let outbox = Outbox::default();
        outbox.add("orders");
        assert!(outbox.take().is_empty());
    }
}
