//! What a server knows of its spool and of the database, without asking either.

use hashbrown::HashMap;

/// Queues whose backlog is counted one by one. Beyond, every queue counts as having one until the spool is empty.
const QUEUES_MAX: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct State {
    /// Records of each queue that are not replayed.
    queues: HashMap<String, usize>,
    has_more_queues: bool,
    records: usize,
    pub(super) messages: usize,
    /// Messages that the database refused for good.
    pub(super) failed: usize,
    /// The database did not answer when it was last tried.
    pub(super) is_away: bool,
    /// Somebody had trouble with the database: to be looked into.
    pub(super) is_suspect: bool,
    /// Push maintenance.
    pub(super) is_paused: bool,
    /// Why the replay does not get on, although the database answers.
    pub(super) held: Option<String>,
}

impl State {
    /// Whether a push must look at more than the database.
    pub(super) fn is_engaged(&self) -> bool {
        self.is_away || self.is_paused || 0 < self.records
    }

    pub(super) fn has_backlog(&self) -> bool {
        0 < self.records
    }

    /// Whether records of `queue` wait to be replayed.
    pub(super) fn is_behind(&self, queue: &str) -> bool {
        0 < self.records && (self.has_more_queues || self.queues.contains_key(queue))
    }

    pub(super) fn add(&mut self, queue: &str, messages: usize) {
        self.records += 1;
        self.messages += messages;
        if let Some(count) = self.queues.get_mut(queue) {
            *count += 1;
        } else if self.queues.len() < QUEUES_MAX {
            self.queues.insert(queue.to_owned(), 1);
        } else {
            self.has_more_queues = true;
        }
    }

    pub(super) fn remove(&mut self, queue: &str, messages: usize) {
        self.records = self.records.saturating_sub(1);
        self.messages = self.messages.saturating_sub(messages);
        if self.records == 0 {
            self.queues.clear();
            self.has_more_queues = false;
            self.messages = 0;
        } else if let Some(count) = self.queues.get_mut(queue) {
            *count -= 1;
            if *count == 0 {
                self.queues.remove(queue);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_behind_until_its_last_record_is_replayed() {
        let mut state = State::default();
        for (queue, messages) in [("a", 2), ("b", 1), ("a", 3)] {
            state.add(queue, messages);
        }
        assert_eq!((state.messages, state.is_behind("a"), state.is_behind("c")), (6, true, false));
        state.remove("a", 2);
        assert!(state.is_behind("a"));
        state.remove("a", 3);
        assert!(!state.is_behind("a") && state.is_behind("b") && state.is_engaged());
        state.remove("b", 1);
        assert_eq!((state.messages, state.is_engaged()), (0, false));
    }

    #[test]
    fn more_queues_than_are_counted_are_all_behind() {
        let mut state = State::default();
        for n in 0..=QUEUES_MAX {
            state.add(&n.to_string(), 1);
        }
        assert!(state.is_behind("any"));
        for n in 0..=QUEUES_MAX {
            assert!(state.is_behind("any"), "{n}");
            state.remove(&n.to_string(), 1);
        }
        assert!(!state.is_behind("any") && state.queues.is_empty());
    }
}
