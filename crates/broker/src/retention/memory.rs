//! What a leader remembers from cycle to cycle. All of it may be lost: a new leader begins anew.

use std::collections::HashMap;

use jiff::Timestamp;
use uuid::Uuid;

use crate::db::retention::{Awake, Learnt, Quiet, Work};
use crate::id::{PartitionId, QueueId};

/// Queues whose quiet is remembered. When more are known, all are asked anew.
const QUIET_MAX: usize = 100_000;
/// Failing partitions that are remembered. Beyond them one is tried in every cycle.
const FAILING_MAX: usize = 10_000;
/// Cycles that a partition rests after its step has failed again and again.
const REST_MAX: u64 = 64;

#[derive(Debug)]
pub(super) struct Memory {
    /// The queue that had the last turn; the next cycle begins behind it.
    pub(super) behind: QueueId,
    /// The queues in which nothing is due for a while.
    pub(super) quiet: HashMap<QueueId, Quiet>,
    pub(super) failing: Failing,
    pub(super) walk: Walk,
}

impl Default for Memory {
    fn default() -> Self {
        Self { behind: QueueId(Uuid::nil()), quiet: HashMap::new(), failing: Failing::default(), walk: Walk::default() }
    }
}

impl Memory {
    /// Takes in what was learnt about queues, and returns those in which something may be due.
    pub(super) fn awake(&mut self, learnt: &[Learnt], as_of: Timestamp) -> Awake {
        if QUIET_MAX < self.quiet.len() {
            self.quiet.clear();
        }
        for Learnt { queue_id, quiet, .. } in learnt {
            if as_of < quiet.until {
                self.quiet.insert(*queue_id, *quiet);
            } else {
                self.quiet.remove(queue_id);
            }
        }
        let due = |is_due: fn(&Learnt) -> bool| {
            learnt.iter().filter(|queue| is_due(queue)).map(|queue| queue.queue_id).collect()
        };
        Awake {
            live: due(|queue| queue.live_due),
            held: due(|queue| queue.held_due),
            txns: due(|queue| queue.txns_due),
        }
    }

    /// Gives the queues behind those of `works` the next turn.
    pub(super) fn begin_behind(&mut self, works: &[Work]) {
        let in_turn = works.iter().filter(|work| !work.is_reopened).map(|work| work.queue_id);
        // Queues take turns by id, from behind the last one on and then from the first.
        if let Some(last) = in_turn.max_by_key(|id| (id.0 <= self.behind.0, id.0)) {
            self.behind = last;
        }
    }
}

/// Partitions whose step failed. They rest for ever more cycles, so that they take no place from others.
#[derive(Debug, Default)]
pub(super) struct Failing {
    cycle: u64,
    partitions: HashMap<PartitionId, Rest>,
}

#[derive(Debug)]
struct Rest {
    cycles: u64,
    until: u64,
}

impl Failing {
    /// Begins a cycle, and returns the partitions that rest in it.
    pub(super) fn resting(&mut self) -> Vec<PartitionId> {
        self.cycle += 1;
        let cycle = self.cycle;
        self.partitions.iter().filter(|(_, rest)| cycle < rest.until).map(|(id, _)| *id).collect()
    }

    pub(super) fn note(&mut self, partition_id: PartitionId, has_failed: bool) {
        if !has_failed {
            // One phase may succeed where another has just failed.
            let in_this_cycle = |rest: &Rest| self.cycle < rest.until;
            if self.partitions.get(&partition_id).is_some_and(|rest| !in_this_cycle(rest)) {
                self.partitions.remove(&partition_id);
            }
            return;
        }
        let cycles = self.partitions.get(&partition_id).map_or(1, |rest| (2 * rest.cycles).min(REST_MAX));
        if self.partitions.len() < FAILING_MAX || self.partitions.contains_key(&partition_id) {
            self.partitions.insert(partition_id, Rest { cycles, until: self.cycle + cycles });
        }
    }
}

/// A walk over the stamps of all partitions, a page a cycle.
#[derive(Debug, Default)]
pub(super) struct Walk {
    after: Option<PartitionId>,
    scanned: u64,
    repaired: u64,
}

/// What a walk came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) scanned: u64,
    pub(super) repaired: u64,
}

impl Walk {
    pub(super) fn start(&mut self) {
        *self = Self { after: Some(PartitionId(Uuid::nil())), scanned: 0, repaired: 0 };
    }

    /// Behind which partition the next page begins; `None` if no walk is under way.
    pub(super) fn position(&self) -> Option<PartitionId> {
        self.after
    }

    pub(super) fn count(&mut self, repaired: bool) {
        self.repaired += u64::from(repaired);
    }

    /// Ends a page, and with `last` none the walk.
    pub(super) fn advance(&mut self, scanned: u64, last: Option<PartitionId>) {
        self.scanned += scanned;
        self.after = last;
    }

    /// What a walk that has ended came to; told once.
    pub(super) fn ended(&mut self) -> Option<Round> {
        let is_told = self.after.is_some() || self.scanned == 0;
        (!is_told)
            .then(|| Round { scanned: std::mem::take(&mut self.scanned), repaired: std::mem::take(&mut self.repaired) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_rests_twice_as_long_each_time() {
        let mut failing = Failing::default();
        let id = PartitionId(Uuid::from_u128(7));
        let mut tried = Vec::new();
        for cycle in 1..=200_u64 {
            if failing.resting().is_empty() {
                tried.push(cycle);
                failing.note(id, true);
            }
        }
        assert_eq!(tried, [1, 2, 4, 8, 16, 32, 64, 128, 192], "one cycle, then 2, 4, ... at most 64");
        while !failing.resting().is_empty() {}
        failing.note(id, false);
        failing.resting();
        failing.note(id, true);
        assert_eq!(failing.resting(), [], "a success forgets the failures before it");
    }

    #[test]
    fn a_failure_outlives_the_success_of_another_phase() {
        let mut failing = Failing::default();
        let id = PartitionId(Uuid::from_u128(7));
        failing.resting();
        failing.note(id, true);
        failing.resting();
        failing.note(id, true);
        failing.note(id, false);
        assert_eq!(failing.resting(), [id]);
    }

    #[test]
    fn no_more_failures_are_remembered_than_fit() {
        let mut failing = Failing::default();
        failing.resting();
        for n in 0..2 * FAILING_MAX as u128 {
            failing.note(PartitionId(Uuid::from_u128(n)), true);
        }
        assert_eq!(failing.partitions.len(), FAILING_MAX);
    }

    #[test]
    fn a_walk_is_told_once() {
        let mut walk = Walk::default();
        assert_eq!((walk.position(), walk.ended()), (None, None));
        walk.start();
        walk.count(true);
        walk.count(false);
        walk.advance(5, Some(PartitionId(Uuid::from_u128(5))));
        assert_eq!(walk.ended(), None);
        walk.advance(2, None);
        assert_eq!(walk.ended(), Some(Round { scanned: 7, repaired: 1 }));
        assert_eq!(walk.ended(), None);
    }
}
