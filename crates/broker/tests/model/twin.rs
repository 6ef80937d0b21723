//! What a server should do, in memory and without concurrency.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::support::random::Random;

/// Time passes in multiples of this, and every window lies between two multiples.
pub const STEP_SECONDS: i64 = 1000;
/// Under no group, and under one.
pub const GROUPS: [&str; 2] = ["__QUEUE_MODE__", "readers"];
const RETRY_LIMIT: i32 = 1;
const LEASE_SECONDS: i64 = 1500;
const CLEANUP_SECONDS: i64 = 86_400;
const SIDECAR_SECONDS_MIN: i64 = 900;

/// What a queue is configured to; 0 is off.
pub struct Policy {
    all: i64,
    completed: i64,
    max_wait: i64,
    dedup: i64,
    files_letters: bool,
}

pub const POLICIES: [(&str, Policy); 5] = [
    ("kept", Policy { all: 0, completed: 0, max_wait: 0, dedup: 3500, files_letters: true }),
    ("timed", Policy { all: 4500, completed: 0, max_wait: 0, dedup: 0, files_letters: true }),
    ("read", Policy { all: 0, completed: 2500, max_wait: 0, dedup: 2500, files_letters: false }),
    ("both", Policy { all: 9500, completed: 1500, max_wait: 0, dedup: 1500, files_letters: true }),
    ("waiting", Policy { all: 0, completed: 0, max_wait: 5500, dedup: 6500, files_letters: false }),
];

impl Policy {
    pub fn options(&self) -> Value {
        json!({
            "leaseTime": LEASE_SECONDS, "retryLimit": RETRY_LIMIT, "deadLetterQueue": self.files_letters,
            "dlqAfterMaxRetries": self.files_letters, "retentionEnabled": 0 < self.all + self.completed,
            "retentionSeconds": self.all, "completedRetentionSeconds": self.completed,
            "maxWaitTimeSeconds": self.max_wait, "dedupWindowSeconds": self.dedup,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Signal {
    Completed,
    Retry,
    Failed,
    Dlq,
}

impl Signal {
    pub fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Retry => "retry",
            Self::Failed => "failed",
            Self::Dlq => "dlq",
        }
    }
}

/// What an acknowledgement shows.
pub struct Lease {
    pub id: String,
    pub partition_id: String,
}

#[derive(Clone)]
struct Segment {
    base: i64,
    ids: Vec<String>,
    stamp: i64,
}

impl Segment {
    fn end(&self) -> i64 {
        self.base + self.ids.len() as i64 - 1
    }
}

#[derive(Default)]
struct Cursor {
    committed: i64,
    batch_end: Option<i64>,
    holder: String,
    failures: i32,
    created: i64,
    acquired: Option<i64>,
    expires: Option<i64>,
}

#[derive(Default)]
struct Partition {
    id: String,
    created: i64,
    written: i64,
    last_offset: i64,
    log_start: i64,
    txns_start: i64,
    segments: Vec<Segment>,
    txns: Vec<Segment>,
    cursors: BTreeMap<&'static str, Cursor>,
    letters: Vec<(&'static str, i64, bool)>,
}

#[derive(Default)]
pub struct Twin {
    pub now: i64,
    pub messages_deleted: i64,
    pub partitions_deleted: i64,
    partitions: BTreeMap<(usize, &'static str), Partition>,
    /// Queues to which the named group has subscribed.
    subscribed: BTreeSet<usize>,
}

impl Twin {
    pub fn push(&mut self, queue: usize, partition: &'static str, ids: &[String]) -> Vec<&'static str> {
        let (now, window) = (self.now, POLICIES[queue].1.dedup);
        let lane = self.partitions.entry((queue, partition)).or_insert_with(|| Partition {
            created: now,
            written: now,
            last_offset: -1,
            ..Partition::default()
        });
        let is_stored =
            |id: &String| 0 < window && lane.txns.iter().any(|t| now - window < t.stamp && t.ids.contains(id));
        let mut fresh: Vec<String> = Vec::new();
        let mut statuses = Vec::new();
        for (at, id) in ids.iter().enumerate() {
            if is_stored(id) || ids[..at].contains(id) {
                statuses.push("duplicate");
            } else {
                fresh.push(id.clone());
                statuses.push("queued");
            }
        }
        if !fresh.is_empty() {
            let segment = Segment { base: lane.last_offset + 1, ids: fresh, stamp: now };
            lane.last_offset = segment.end();
            lane.written = now;
            lane.txns.push(segment.clone());
            lane.segments.push(segment);
        }
        statuses
    }

    /// The transaction ids of the messages that a pop gets.
    pub fn pop(
        &mut self, queue: usize, partition: &'static str, group: &'static str, batch: i64, auto_ack: bool,
    ) -> Vec<String> {
        let now = self.now;
        if !self.partitions.contains_key(&(queue, partition)) {
            return Vec::new();
        }
        self.first_contact(queue, partition, group);
        let lane = self.partitions.get_mut(&(queue, partition)).expect("looked at above");
        let cursor = lane.cursors.get_mut(group).expect("made at first contact");
        let is_leased = cursor.batch_end.is_some() && cursor.expires.is_some_and(|at| now < at);
        if is_leased || lane.last_offset <= cursor.committed {
            return Vec::new();
        }
        let messages =
            lane.segments.iter().flat_map(|s| s.ids.iter().enumerate().map(|(k, id)| (s.base + k as i64, id)));
        let taken: Vec<(i64, &String)> =
            messages.filter(|(offset, _)| cursor.committed < *offset).take(batch as usize).collect();
        let Some(&(last, _)) = taken.last() else {
            if lane.segments.is_empty() {
                cursor.pass(lane.last_offset);
            }
            return Vec::new();
        };
        if auto_ack {
            cursor.pass(last);
        } else {
            cursor.batch_end = Some(last);
            cursor.acquired = Some(now);
            cursor.expires = Some(now + LEASE_SECONDS);
        }
        taken.into_iter().map(|(_, id)| id.clone()).collect()
    }

    /// The named group enters every partition of a queue when it subscribes, and later ones when it first
    /// pops from them. Without a group each partition is entered by itself, at its very beginning.
    fn first_contact(&mut self, queue: usize, partition: &'static str, group: &'static str) {
        let now = self.now;
        let subscribes = group == GROUPS[1] && self.subscribed.insert(queue);
        for ((of, name), lane) in &mut self.partitions {
            if *of == queue && (*name == partition || subscribes) {
                let committed = if group == GROUPS[1] { lane.log_start - 1 } else { -1 };
                lane.cursors.entry(group).or_insert(Cursor { committed, created: now, ..Cursor::default() });
            }
        }
    }

    pub fn lease_is(&mut self, queue: usize, partition: &'static str, group: &str, id: &str) {
        let lane = self.partitions.get_mut(&(queue, partition)).expect("popped from");
        lane.cursors.get_mut(group).expect("popped for").holder = id.to_owned();
    }

    pub fn id_is(&mut self, queue: &str, partition: &str, id: String) {
        for ((of, name), lane) in &mut self.partitions {
            if POLICIES[*of].0 == queue && *name == partition {
                lane.id.clone_from(&id);
            }
        }
    }

    /// Whether each signal is accepted.
    pub fn acknowledge(
        &mut self, queue: usize, partition: &'static str, group: &'static str, lease: &Lease,
        signals: &[(String, Signal)],
    ) -> Vec<bool> {
        let now = self.now;
        let refused = vec![false; signals.len()];
        let Some(lane) = self.partitions.get_mut(&(queue, partition)) else { return refused };
        if lane.id != lease.partition_id {
            return refused;
        }
        let Some(cursor) = lane.cursors.get(group) else { return refused };
        let is_live = cursor.batch_end.is_some() && cursor.expires.is_some_and(|at| now < at);
        if !is_live || cursor.holder != lease.id {
            return refused;
        }
        let (committed, batch_end) = (cursor.committed, cursor.batch_end.expect("live"));
        let place = |id: &String, from: i64, to: i64| {
            let offsets = lane.txns.iter().flat_map(|t| t.ids.iter().enumerate().map(|(k, i)| (t.base + k as i64, i)));
            offsets.filter(|(offset, i)| from <= *offset && *offset <= to && *i == id).map(|(offset, _)| offset).min()
        };
        let live: Vec<Option<i64>> = signals.iter().map(|(id, _)| place(id, committed + 1, batch_end)).collect();
        let accepted = signals.iter().zip(&live).map(|((id, signal), live)| {
            live.is_some() || (*signal == Signal::Completed && place(id, 0, committed).is_some())
        });
        let mut accepted: Vec<bool> = accepted.collect();
        let placed: Vec<(i64, Signal)> =
            live.iter().zip(signals).filter_map(|(at, (_, signal))| at.map(|at| (at, *signal))).collect();
        let filed = lane.settle(group, &placed, POLICIES[queue].1.files_letters);
        for (accepted, (at, (_, signal))) in accepted.iter_mut().zip(live.iter().zip(signals)) {
            let Some(at) = at.filter(|at| *at < lane.log_start && *signal != Signal::Completed) else { continue };
            // It is gone, and comes again in no other way than as a dead letter.
            *accepted = filed == Some(at);
        }
        accepted
    }

    /// Where a cursor is moved to, or `None` if there is none.
    pub fn seek(
        &mut self, queue: usize, partition: &'static str, group: &'static str, random: &mut Random,
    ) -> Option<i64> {
        let lane = self.partitions.get_mut(&(queue, partition))?;
        let cursor = lane.cursors.get_mut(group)?;
        cursor.committed = random.below(lane.last_offset + 2) - 1;
        (cursor.batch_end, cursor.acquired, cursor.expires, cursor.failures) = (None, None, None, 0);
        Some(cursor.committed)
    }

    /// The phases of a cycle, partition by partition.
    pub fn sweep(&mut self) {
        let now = self.now;
        for ((queue, _), lane) in &mut self.partitions {
            let policy = &POLICIES[*queue].1;
            let mut boundary = lane.log_start;
            if 0 < policy.all {
                boundary = boundary.max(lane.fresh_from(now - policy.all));
            }
            let slowest = lane.cursors.values().map(|cursor| cursor.committed + 1).min();
            if let Some(next) = slowest.filter(|next| 0 < policy.completed && lane.log_start < *next) {
                boundary = boundary.max(next.min(lane.fresh_from(now - policy.completed)));
            }
            self.messages_deleted += lane.delete_below(boundary);
            let sidecar = policy.dedup.max(policy.completed).max(SIDECAR_SECONDS_MIN);
            while lane.txns.first().is_some_and(|t| t.stamp < now - sidecar) {
                lane.txns_start = lane.txns.remove(0).end() + 1;
            }
            if 0 < policy.max_wait {
                let boundary = lane.fresh_from(now - policy.max_wait);
                self.messages_deleted += lane.delete_below(boundary);
            }
        }
        let before = self.partitions.len();
        self.partitions.retain(|_, lane| !lane.is_dead(now));
        self.partitions_deleted += (before - self.partitions.len()) as i64;
    }

    /// Every partition in the words in which the database is asked.
    pub fn state(&self) -> BTreeMap<(String, String), String> {
        let state = |lane: &Partition| {
            let ranges =
                |of: &[Segment]| of.iter().map(|s| format!("({},{})", s.base, s.end())).collect::<Vec<_>>().join(" ");
            let cursors: Vec<String> = lane
                .cursors
                .iter()
                .map(|(group, c)| format!("({group},{},{},{})", c.committed, c.batch_end.unwrap_or(-9), c.failures))
                .collect();
            let letter = |(group, offset, whole): &(&str, i64, bool)| {
                format!("({group},{offset},{})", if *whole { "t" } else { "f" })
            };
            let letters: Vec<String> = lane.letters.iter().map(letter).collect();
            format!(
                "last {} start {} txns {} | {} | {} | {} | {}",
                lane.last_offset,
                lane.log_start,
                lane.txns_start,
                ranges(&lane.segments),
                ranges(&lane.txns),
                cursors.join(" "),
                letters.join(" ")
            )
        };
        self.partitions
            .iter()
            .map(|((q, p), lane)| ((POLICIES[*q].0.to_owned(), (*p).to_owned()), state(lane)))
            .collect()
    }
}

impl Cursor {
    /// Past messages that are done with, and without a trace of a lease.
    fn pass(&mut self, last: i64) {
        self.committed = self.committed.max(last);
        (self.batch_end, self.acquired, self.expires, self.failures) = (None, None, None, 0);
    }

    fn release(&mut self, to: i64, failures: i32) {
        self.committed = self.committed.max(to);
        (self.batch_end, self.failures) = (None, failures);
        self.holder.clear();
    }
}

impl Partition {
    /// The message that became a dead letter, if one did.
    fn settle(&mut self, group: &'static str, placed: &[(i64, Signal)], files_letters: bool) -> Option<i64> {
        let cursor = self.cursors.get_mut(group).expect("acknowledged for");
        let done = placed.iter().filter(|(_, s)| *s == Signal::Completed).map(|(at, _)| *at).max();
        let bad = placed.iter().filter(|(_, s)| *s != Signal::Completed).map(|(at, _)| *at).min();
        let to = cursor.committed.max(done.unwrap_or(-1));
        let Some(bad) = bad else {
            if done.is_some() {
                if cursor.committed < to {
                    cursor.failures = 0;
                }
                cursor.committed = to;
                if cursor.batch_end.is_some_and(|end| end <= to) {
                    cursor.release(to, 0);
                }
            }
            return None;
        };
        let to = cursor.committed.max(to.min(bad - 1));
        if cursor.committed < to {
            cursor.failures = 0;
        }
        let worst = placed.iter().filter(|(at, _)| *at == bad).map(|(_, s)| *s).max().expect("it is bad");
        match worst {
            Signal::Retry => cursor.release(to, cursor.failures),
            Signal::Failed if cursor.failures < RETRY_LIMIT => cursor.release(to, cursor.failures + 1),
            Signal::Failed if !files_letters => cursor.release(bad, 0),
            _ => {
                cursor.release(bad, 0);
                let is_whole = self.segments.iter().any(|s| s.base <= bad && bad <= s.end());
                self.letters.push((group, bad, is_whole));
                self.letters.sort_unstable();
                return Some(bad);
            }
        }
        None
    }

    /// The first offset whose segment is no older than a cutoff.
    fn fresh_from(&self, cutoff: i64) -> i64 {
        let fresh = self.segments.iter().find(|s| cutoff <= s.stamp).map(|s| s.base);
        fresh.unwrap_or_else(|| self.segments.last().map_or(self.log_start, |s| s.end() + 1))
    }

    /// Whole segments only; how many messages went.
    fn delete_below(&mut self, boundary: i64) -> i64 {
        let mut messages = 0;
        while self.segments.first().is_some_and(|s| s.end() < boundary) {
            let gone = self.segments.remove(0);
            messages += gone.ids.len() as i64;
            self.log_start = gone.end() + 1;
        }
        messages
    }

    fn is_dead(&self, now: i64) -> bool {
        let cutoff = now - CLEANUP_SECONDS;
        let is_active = |c: &Cursor| {
            let is_live = c.batch_end.is_some() && c.expires.is_none_or(|at| now < at);
            is_live
                || c.expires.is_some_and(|at| cutoff <= at)
                || c.acquired.is_some_and(|at| cutoff <= at)
                || cutoff <= c.created
        };
        self.created < cutoff
            && self.written < cutoff
            && self.segments.is_empty()
            && self.letters.is_empty()
            && !self.cursors.values().any(is_active)
    }
}
