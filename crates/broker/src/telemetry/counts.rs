//! The counters themselves: bounded, addable, and the columns that they are written to.

use std::collections::HashMap;
use std::hash::Hash;

use serde_json::{Value, json};

use super::QUEUES_MAX;
use crate::id::PartitionId;

#[derive(Default)]
pub(super) struct Counts {
    pub(super) worker: Worker,
    queues: HashMap<String, Queue>,
    /// Acknowledgements name a partition; the flush looks its queue up.
    partitions: HashMap<PartitionId, Queue>,
}

/// How old messages were when they were delivered.
#[derive(Clone, Copy, Default)]
pub(super) struct Lag {
    count: u64,
    sum_ms: u64,
    max_ms: u64,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Worker {
    pub(super) push_requests: u64,
    pub(super) pop_requests: u64,
    pub(super) ack_requests: u64,
    pub(super) transactions: u64,
    pub(super) push_messages: u64,
    pub(super) pop_messages: u64,
    pub(super) ack_done: u64,
    pub(super) ack_failed: u64,
    pub(super) lag: Lag,
    pub(super) db_errors: u64,
    pub(super) dead_letters: u64,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Queue {
    pub(super) push_requests: u64,
    pub(super) push_messages: u64,
    pub(super) pop_messages: u64,
    pub(super) pop_empty: u64,
    pub(super) ack_requests: u64,
    pub(super) ack_done: u64,
    pub(super) ack_failed: u64,
    pub(super) transactions: u64,
    pub(super) lag: Lag,
}

impl Lag {
    /// `None` when the age is not known.
    pub(super) fn add(&mut self, lag_ms: Option<u64>, messages: u64) {
        let Some(lag_ms) = lag_ms.filter(|_| messages > 0) else { return };
        self.count += messages;
        self.sum_ms = self.sum_ms.saturating_add(lag_ms.saturating_mul(messages));
        self.max_ms = self.max_ms.max(lag_ms);
    }

    fn absorb(&mut self, other: Self) {
        let Self { count, sum_ms, max_ms } = other;
        self.count += count;
        self.sum_ms = self.sum_ms.saturating_add(sum_ms);
        self.max_ms = self.max_ms.max(max_ms);
    }
}

impl Worker {
    /// Columns of `queen.worker_metrics`.
    pub(super) fn columns(&self) -> Value {
        let requests = self.push_requests + self.pop_requests + self.ack_requests + self.transactions;
        json!({
            "jobs_done": requests,
            "push_request_count": self.push_requests,
            "pop_request_count": self.pop_requests,
            "ack_request_count": self.ack_requests,
            "transaction_count": self.transactions,
            "push_message_count": self.push_messages,
            "pop_message_count": self.pop_messages,
            "ack_message_count": self.ack_done + self.ack_failed,
            "ack_success_count": self.ack_done,
            "ack_failed_count": self.ack_failed,
            "lag_count": self.lag.count,
            "avg_lag_ms": self.lag.sum_ms.checked_div(self.lag.count).unwrap_or(0),
            "max_lag_ms": self.lag.max_ms,
            "db_error_count": self.db_errors,
            "dlq_count": self.dead_letters,
        })
    }

    pub(super) fn absorb(&mut self, other: Self) {
        let Self {
            push_requests,
            pop_requests,
            ack_requests,
            transactions,
            push_messages,
            pop_messages,
            ack_done,
            ack_failed,
            lag,
            db_errors,
            dead_letters,
        } = other;
        self.push_requests += push_requests;
        self.pop_requests += pop_requests;
        self.ack_requests += ack_requests;
        self.transactions += transactions;
        self.push_messages += push_messages;
        self.pop_messages += pop_messages;
        self.ack_done += ack_done;
        self.ack_failed += ack_failed;
        self.lag.absorb(lag);
        self.db_errors += db_errors;
        self.dead_letters += dead_letters;
    }
}

impl Queue {
    fn columns(&self, queue: Option<&str>, partition: Option<PartitionId>) -> Value {
        json!({
            "queue": queue,
            "partition": partition.map(|id| id.0),
            "push_request_count": self.push_requests,
            "push_message_count": self.push_messages,
            "pop_count": self.pop_messages,
            "pop_empty_count": self.pop_empty,
            "ack_request_count": self.ack_requests,
            "ack_success_count": self.ack_done,
            "ack_failed_count": self.ack_failed,
            "transaction_count": self.transactions,
            "lag_count": self.lag.count,
            "lag_sum_ms": self.lag.sum_ms,
            "max_lag_ms": self.lag.max_ms,
        })
    }

    fn absorb(&mut self, other: Self) {
        let Self {
            push_requests,
            push_messages,
            pop_messages,
            pop_empty,
            ack_requests,
            ack_done,
            ack_failed,
            transactions,
            lag,
        } = other;
        self.push_requests += push_requests;
        self.push_messages += push_messages;
        self.pop_messages += pop_messages;
        self.pop_empty += pop_empty;
        self.ack_requests += ack_requests;
        self.ack_done += ack_done;
        self.ack_failed += ack_failed;
        self.transactions += transactions;
        self.lag.absorb(lag);
    }
}

/// The entry of `key`, made if there is room for it.
fn entry<K: Eq + Hash>(map: &mut HashMap<K, Queue>, key: K) -> Option<&mut Queue> {
    if map.len() >= QUEUES_MAX && !map.contains_key(&key) {
        metrics::counter!("ebbtide_telemetry_untracked_total").increment(1);
        return None;
    }
    Some(map.entry(key).or_default())
}

impl Counts {
    pub(super) fn queue(&mut self, name: &str, count: impl FnOnce(&mut Queue)) {
        if let Some(queue) = self.queues.get_mut(name) {
            count(queue);
        } else if let Some(queue) = entry(&mut self.queues, name.to_owned()) {
            count(queue);
        }
    }

    pub(super) fn partition(&mut self, id: PartitionId, count: impl FnOnce(&mut Queue)) {
        if let Some(queue) = entry(&mut self.partitions, id) {
            count(queue);
        }
    }

    /// Takes back what could not be flushed.
    pub(super) fn absorb(&mut self, other: Self) {
        let Self { worker, queues, partitions } = other;
        self.worker.absorb(worker);
        for (name, counts) in queues {
            self.queue(&name, |queue| queue.absorb(counts));
        }
        for (id, counts) in partitions {
            self.partition(id, |queue| queue.absorb(counts));
        }
    }

    /// Moves at most `most` queues or partitions out, as elements of `flush_queue_metrics_v1`.
    pub(super) fn take_queues(&mut self, most: usize) -> (Self, Vec<Value>) {
        let names: Vec<String> = self.queues.keys().take(most).cloned().collect();
        let ids: Vec<PartitionId> = self.partitions.keys().take(most - names.len()).copied().collect();
        let mut taken = Self::default();
        taken.queues.extend(names.iter().filter_map(|name| self.queues.remove_entry(name)));
        taken.partitions.extend(ids.iter().filter_map(|id| self.partitions.remove_entry(id)));
        let by_name = taken.queues.iter().map(|(name, counts)| counts.columns(Some(name), None));
        let by_id = taken.partitions.iter().map(|(id, counts)| counts.columns(None, Some(*id)));
        let elements = by_name.chain(by_id).collect();
        (taken, elements)
    }
}
