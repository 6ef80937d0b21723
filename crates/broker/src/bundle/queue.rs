//! Who waits for which partition, and what the next bundle takes.

use std::collections::VecDeque;

use hashbrown::{HashMap, HashSet};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::{Answer, Message};
use crate::id::{HASH_BYTES, PartitionName};
use crate::segment::hash;
use std::sync::Arc;

/// Partitions in one commit.
const BUNDLE_PARTITIONS_MAX: usize = 256;
/// Bytes in one commit, before compression. A group is never split, so one alone may be larger.
const BUNDLE_BYTES_MAX: usize = 4 << 20;
/// Messages that different requests may put into one segment. A group alone may be larger.
const SEGMENT_MESSAGES_MAX: usize = 10_000;
/// While a lane is busy, this much must be ready for another to start: below, one larger commit is cheaper.
const LANE_BYTES: usize = 256 << 10;

/// A group that waits to be stored.
pub(super) struct Waiting {
    pub(super) messages: Vec<Message>,
    pub(super) bytes: usize,
    pub(super) reply: oneshot::Sender<Answer>,
    /// Counts its bytes as waiting until it is answered.
    pub(super) _room: Arc<OwnedSemaphorePermit>,
}

#[derive(Default)]
struct Partition {
    waiting: VecDeque<Waiting>,
    is_in_flight: bool,
}

/// Partitions with groups that wait, and lanes that carry them.
#[derive(Default)]
pub(super) struct Queue {
    partitions: HashMap<PartitionName, Partition>,
    /// Those with something waiting and nothing in flight, the longest ready first.
    ready: VecDeque<PartitionName>,
    ready_bytes: usize,
    /// Lanes that run.
    pub(super) busy: usize,
    /// Of these, lanes whose flush takes long.
    pub(super) slow: usize,
}

/// Groups of one partition that go into one segment.
pub(super) struct Taken {
    pub(super) name: PartitionName,
    pub(super) groups: Vec<Waiting>,
}

impl Queue {
    pub(super) fn add(&mut self, name: PartitionName, group: Waiting) {
        let bytes = group.bytes;
        let partition = self.partitions.entry(name.clone()).or_default();
        let becomes_ready = partition.waiting.is_empty() && !partition.is_in_flight;
        if !partition.is_in_flight {
            self.ready_bytes += bytes;
        }
        partition.waiting.push_back(group);
        if becomes_ready {
            self.ready.push_back(name);
        }
    }

    pub(super) fn wants_lane(&self, lanes_max: usize) -> bool {
        assert!(self.slow <= self.busy, "a slow lane is a busy one");
        !self.ready.is_empty() && self.busy < lanes_max && self.busy - self.slow < 1 + self.ready_bytes / LANE_BYTES
    }

    /// The next bundle; empty if nothing is ready. What it takes is in flight until [`Queue::land`].
    pub(super) fn take(&mut self) -> Vec<Taken> {
        let mut taken = Vec::new();
        let mut bytes = 0;
        while taken.len() < BUNDLE_PARTITIONS_MAX && bytes < BUNDLE_BYTES_MAX {
            let Some(name) = self.ready.pop_front() else { break };
            let partition = self.partitions.get_mut(&name).expect("ready partitions exist");
            partition.is_in_flight = true;
            self.ready_bytes -= partition.waiting.iter().map(|group| group.bytes).sum::<usize>();
            let groups = partition.take_segment(BUNDLE_BYTES_MAX - bytes);
            bytes += groups.iter().map(|group| group.bytes).sum::<usize>();
            taken.push(Taken { name, groups });
        }
        taken
    }

    /// A partition's flush has ended.
    pub(super) fn land(&mut self, name: &PartitionName) {
        let partition = self.partitions.get_mut(name).expect("in flight partitions exist");
        partition.is_in_flight = false;
        if partition.waiting.is_empty() {
            self.partitions.remove(name);
        } else {
            self.ready_bytes += partition.waiting.iter().map(|group| group.bytes).sum::<usize>();
            self.ready.push_back(name.clone());
        }
    }
}

impl Partition {
    /// Takes groups, at least one. Stops before a group that repeats a transaction id: whether the
    /// second is a duplicate depends on the queue's window, so the database is asked, in a later call. Messages that
    /// have their ids already travel alone: those ids may be older than the ones in front.
    fn take_segment(&mut self, bytes_max: usize) -> Vec<Waiting> {
        let first = self.waiting.pop_front().expect("a ready partition has a group");
        let (mut bytes, mut messages) = (first.bytes, first.messages.len());
        let mut groups = vec![first];
        if self.waiting.is_empty() || has_ids(&groups[0]) {
            return groups;
        }
        let mut seen: HashSet<[u8; HASH_BYTES]> = transaction_ids(&groups[0]).map(hash).collect();
        while let Some(next) = self.waiting.front() {
            let is_full = bytes + next.bytes > bytes_max || messages + next.messages.len() > SEGMENT_MESSAGES_MAX;
            if is_full || has_ids(next) || transaction_ids(next).any(|id| seen.contains(&hash(id))) {
                break;
            }
            seen.extend(transaction_ids(next).map(hash));
            bytes += next.bytes;
            messages += next.messages.len();
            groups.push(self.waiting.pop_front().expect("just seen"));
        }
        groups
    }
}

fn transaction_ids(group: &Waiting) -> impl Iterator<Item = &str> {
    group.messages.iter().filter_map(|message| message.transaction_id.as_deref())
}

fn has_ids(group: &Waiting) -> bool {
    group.messages.iter().any(|message| message.id.is_some())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use tokio::sync::Semaphore;

    use super::*;

    fn group(ids: &[&str], payload_bytes: usize) -> Waiting {
        let payload = Bytes::from(vec![b' '; payload_bytes]);
        let message = |id: &&str| Message {
            id: None,
            transaction_id: Some((*id).to_owned()),
            trace_id: None,
            producer: None,
            payload: payload.clone(),
        };
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().expect("free");
        Waiting {
            messages: ids.iter().map(message).collect(),
            bytes: ids.len() * payload_bytes,
            reply: oneshot::channel().0,
            _room: Arc::new(permit),
        }
    }

    fn name(partition: &str) -> PartitionName {
        PartitionName::new("q", partition)
    }

    #[test]
    fn groups_of_one_partition_share_a_segment_and_one_flight() {
        let mut queue = Queue::default();
        queue.add(name("1"), group(&["a"], 10));
        queue.add(name("2"), group(&["a"], 10));
        queue.add(name("1"), group(&["b", "c"], 10));
        let taken = queue.take();
        assert_eq!(
            taken.iter().map(|t| (t.name.partition(), t.groups.len())).collect::<Vec<_>>(),
            [("1", 2), ("2", 1)]
        );
        queue.add(name("1"), group(&["d"], 10));
        assert!(queue.take().is_empty(), "partition 1 is in flight");
        queue.land(&name("1"));
        assert_eq!(queue.take().len(), 1);
        queue.land(&name("1"));
        queue.land(&name("2"));
        assert!(queue.partitions.is_empty());
        assert_eq!(queue.ready_bytes, 0);
    }

    #[test]
    fn a_repeated_transaction_id_waits_for_the_next_segment() {
        let mut queue = Queue::default();
        for ids in [["a", "b"], ["c", "b"], ["d", "e"]] {
            queue.add(name("1"), group(&ids, 10));
        }
        assert_eq!(queue.take()[0].groups.len(), 1);
        queue.land(&name("1"));
        assert_eq!(queue.take()[0].groups.len(), 2, "in order");
    }

    #[test]
    fn messages_with_ids_of_their_own_travel_alone() {
        let mut queue = Queue::default();
        let mut with_ids = group(&["b"], 10);
        with_ids.messages[0].id = Some(uuid::Uuid::now_v7());
        for each in [group(&["a"], 10), with_ids, group(&["c"], 10), group(&["d"], 10)] {
            queue.add(name("1"), each);
        }
        for expected in [1, 1, 2] {
            assert_eq!(queue.take()[0].groups.len(), expected);
            queue.land(&name("1"));
        }
    }

    #[test]
    fn a_bundle_is_bounded_but_takes_at_least_one_group() {
        let mut queue = Queue::default();
        for partition in 0..300 {
            queue.add(name(&partition.to_string()), group(&["a"], 10));
        }
        assert_eq!(queue.take().len(), BUNDLE_PARTITIONS_MAX);
        assert_eq!(queue.take().len(), 300 - BUNDLE_PARTITIONS_MAX);
        queue.add(name("large"), group(&["a"], 3 * BUNDLE_BYTES_MAX));
        queue.add(name("large"), group(&["b"], 10));
        queue.add(name("small"), group(&["a"], 10));
        let taken = queue.take();
        assert_eq!((taken.len(), taken[0].groups.len()), (1, 1));
    }

    #[test]
    fn another_lane_starts_for_bulk_or_when_the_first_is_slow() {
        let mut queue = Queue::default();
        assert!(!queue.wants_lane(2), "nothing is ready");
        queue.add(name("1"), group(&["a"], 10));
        assert!(queue.wants_lane(2));
        queue.busy = 1;
        assert!(!queue.wants_lane(2));
        queue.slow = 1;
        assert!(queue.wants_lane(2));
        assert!(!queue.wants_lane(1), "no more lanes than allowed");
        queue.slow = 0;
        queue.add(name("2"), group(&["a"], LANE_BYTES));
        assert!(queue.wants_lane(2));
    }
}
