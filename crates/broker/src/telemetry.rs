//! Counts what this server does, by worker and by queue, until the counts are flushed to the database.

mod counts;
mod flush;
mod measure;
mod process;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use tokio::time::Instant;

use crate::id::PartitionId;
use counts::Counts;
pub use flush::{Flusher, Identity, QUEUES_MAX};
pub use measure::{measure_until, measured_all};
pub use process::Usage;

/// A kind of request that is counted on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    Push,
    Pop,
    Ack,
    Transaction,
}

/// The counts since the last flush. Counting is a hash look-up under a lock that nobody holds for long.
#[derive(Default)]
pub struct Telemetry {
    counts: Mutex<Counts>,
    clock: Mutex<Option<DatabaseClock>>,
    requests: AtomicU64,
    messages: AtomicU64,
}

/// What the server has done since it started.
#[derive(Clone, Copy, Debug)]
pub struct Lifetime {
    pub requests: u64,
    /// Messages stored or delivered.
    pub messages: u64,
}

/// What the database's clock said, and when: between flushes it is the process's clock that runs on.
#[derive(Clone, Copy)]
struct DatabaseClock {
    said: Timestamp,
    heard: Instant,
}

impl Telemetry {
    pub fn new() -> Self {
        Self::default()
    }

    /// Called for every request by what measures them, so handlers do not.
    pub fn answered(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    pub fn lifetime(&self) -> Lifetime {
        let [requests, messages] = [&self.requests, &self.messages].map(|count| count.load(Ordering::Relaxed));
        Lifetime { requests, messages }
    }

    /// Called for those requests that are counted by kind.
    pub fn requested(&self, request: Request) {
        let worker = &mut self.counts().worker;
        *match request {
            Request::Push => &mut worker.push_requests,
            Request::Pop => &mut worker.pop_requests,
            Request::Ack => &mut worker.ack_requests,
            Request::Transaction => &mut worker.transactions,
        } += 1;
    }

    /// One request stored `messages` in `queue`.
    pub fn pushed(&self, queue: &str, messages: u64) {
        self.messages.fetch_add(messages, Ordering::Relaxed);
        let mut counts = self.counts();
        counts.worker.push_messages += messages;
        counts.queue(queue, |counts| {
            counts.push_requests += 1;
            counts.push_messages += messages;
        });
    }

    /// `messages` of `queue`, stored at `created_at`, were delivered.
    pub fn popped(&self, queue: &str, messages: u64, created_at: Timestamp) {
        self.messages.fetch_add(messages, Ordering::Relaxed);
        let lag_ms = self.age_ms(created_at);
        let mut counts = self.counts();
        counts.worker.pop_messages += messages;
        counts.worker.lag.add(lag_ms, messages);
        counts.queue(queue, |counts| {
            counts.pop_messages += messages;
            counts.lag.add(lag_ms, messages);
        });
    }

    /// A pop of `queue` found nothing.
    pub fn popped_nothing(&self, queue: &str) {
        self.counts().queue(queue, |counts| counts.pop_empty += 1);
    }

    /// One request acknowledged messages of a partition: so many done, so many failed or refused.
    pub fn acked(&self, partition: PartitionId, done: u64, failed: u64) {
        let mut counts = self.counts();
        counts.worker.ack_done += done;
        counts.worker.ack_failed += failed;
        counts.partition(partition, |counts| {
            counts.ack_requests += 1;
            counts.ack_done += done;
            counts.ack_failed += failed;
        });
    }

    /// A transaction touched `queue`.
    pub fn transacted(&self, queue: &str) {
        self.counts().queue(queue, |counts| counts.transactions += 1);
    }

    pub fn dead_lettered(&self, messages: u64) {
        self.counts().worker.dead_letters += messages;
    }

    /// The server failed a request: nearly always the database did.
    pub fn failed(&self) {
        self.counts().worker.db_errors += 1;
    }

    /// `None` until a flush has heard the database's clock.
    fn age_ms(&self, created_at: Timestamp) -> Option<u64> {
        let clock = (*self.clock.lock().unwrap_or_else(PoisonError::into_inner))?;
        let age = clock
            .said
            .duration_since(created_at)
            .saturating_add(jiff::SignedDuration::try_from(clock.heard.elapsed()).unwrap_or(jiff::SignedDuration::MAX));
        Some(u64::try_from(age.as_millis()).unwrap_or(0))
    }

    fn heard(&self, said: Timestamp) {
        let clock = DatabaseClock { said, heard: Instant::now() };
        *self.clock.lock().unwrap_or_else(PoisonError::into_inner) = Some(clock);
    }

    /// Counts stay usable whatever panicked while it held them: each is a number of its own.
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
