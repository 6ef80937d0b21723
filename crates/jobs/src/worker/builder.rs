//! What a worker is told before it starts.

use std::sync::Arc;
use std::time::Duration;

use super::Worker;
use super::engine::{Config, Engine};
use super::gate::{Bucket, Gates};
use crate::backoff::{Backoff, ExponentialBackoff, RetryConfig};
use crate::error::Error;
use crate::gate::{Cap, RateLimit};
use crate::limits::{
    BACKOFF_MAX, CLAIM_BATCH, CLAIM_BATCH_MAX, COMPLETION_BATCH, COMPLETION_BATCH_MAX, COMPLETION_DELAY_MAX,
    CONCURRENCY, CONCURRENCY_MAX, DRAIN_TIMEOUT, FAN_OUT_STALE_AGE, LEASE, OWNERSHIP_AUDIT_INTERVAL, POLL_INTERVAL,
    POLL_INTERVAL_MIN, QueueName, REAPER_INTERVAL, REAPER_INTERVAL_MIN, RECOVERY_INTERVAL, STALE_AGE, WorkerId,
};
use crate::queue::Queue;
use crate::retention::{Retention, UniqueLockSweep};

/// How a worker treats one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "options do nothing until a worker has them"]
pub struct QueueOptions {
    concurrency: Option<u32>,
}

impl QueueOptions {
    /// So many jobs of the queue at once, at least 1 and at most 1000.
    pub fn concurrency(jobs: u32) -> Self {
        Self { concurrency: Some(jobs.clamp(1, CONCURRENCY_MAX)) }
    }
}

/// A worker that is being configured. Made by [`Worker::builder`].
///
/// **The default deletes history**: see [`WorkerBuilder::retention`].
#[must_use = "a builder does nothing until it is built"]
pub struct WorkerBuilder {
    queue: Queue,
    id: WorkerId,
    lanes: Vec<(String, QueueOptions)>,
    config: Config,
    retention: Retention,
    unique_locks: UniqueLockSweep,
    caps: Vec<Cap>,
    rates: Vec<RateLimit>,
    queue_rates: Vec<(String, f64, u32)>,
}

impl WorkerBuilder {
    pub(super) fn new(queue: Queue) -> Self {
        let config = Config {
            concurrency: CONCURRENCY,
            poll_interval: POLL_INTERVAL,
            claim_batch: CLAIM_BATCH,
            drain_timeout: DRAIN_TIMEOUT,
            lease: LEASE,
            stale_age: STALE_AGE,
            stale_interval: REAPER_INTERVAL,
            audit_interval: Some(OWNERSHIP_AUDIT_INTERVAL),
            recovery_interval: RECOVERY_INTERVAL,
            fan_out_stale_age: FAN_OUT_STALE_AGE,
            fires_schedules: true,
            backoff: Arc::new(ExponentialBackoff::default()),
            backoff_max: BACKOFF_MAX,
            storage_retry: RetryConfig::storage(),
            dequeue_retry: RetryConfig::dequeue(),
            completion_batch: COMPLETION_BATCH,
            completion_delay: Duration::ZERO,
        };
        Self {
            queue,
            id: WorkerId::random(),
            lanes: Vec::new(),
            config,
            retention: Retention::stock(),
            unique_locks: UniqueLockSweep::stock(),
            caps: Vec::new(),
            rates: Vec::new(),
            queue_rates: Vec::new(),
        }
    }

    /// The name under which it claims jobs. Default: a random one, which no other worker has.
    pub fn id(mut self, id: WorkerId) -> Self {
        self.id = id;
        self
    }

    /// Serves this queue, besides those named before. Default: the queue `default`.
    pub fn queue(mut self, name: impl Into<String>, options: QueueOptions) -> Self {
        self.lanes.push((name.into(), options));
        self
    }

    /// Jobs at once in each queue that has no number of its own. Default: 10; at least 1 and at most 1000.
    pub fn concurrency(mut self, jobs: u32) -> Self {
        self.config.concurrency = jobs.clamp(1, CONCURRENCY_MAX);
        self
    }

    /// Time between two polls of an idle queue. Default: 100 ms, which zero means as well; at least 50 ms. While the
    /// storage tells the worker of new jobs, an idle one polls once a second at most.
    pub fn poll_interval(mut self, interval: Duration) -> Self {
        self.config.poll_interval = if interval.is_zero() { POLL_INTERVAL } else { interval.max(POLL_INTERVAL_MIN) };
        self
    }

    /// Most jobs in one claim. Default: 50; at least 1 and at most 1000.
    pub fn dequeue_batch_size(mut self, jobs: u32) -> Self {
        self.config.claim_batch = jobs.clamp(1, CLAIM_BATCH_MAX);
        self
    }

    /// How long a stopping worker waits for its handlers. Default: 30 seconds. Those that are left are stopped, and
    /// have 5 seconds more.
    pub fn drain_timeout(mut self, timeout: Duration) -> Self {
        self.config.drain_timeout = timeout;
        self
    }

    /// How long a claim lasts without a heartbeat. Default: 45 minutes, which zero means as well.
    pub fn lock_duration(mut self, lease: Duration) -> Self {
        self.config.lease = if lease.is_zero() { LEASE } else { lease };
        self
    }

    /// Age without a sign of life after which any running job is taken from its worker. Default: 45 minutes, which
    /// zero means as well. A third of it, at most 2 minutes, lies between two heartbeats.
    pub fn stale_lock_age(mut self, age: Duration) -> Self {
        self.config.stale_age = if age.is_zero() { STALE_AGE } else { age };
        self
    }

    /// Time between two looks for jobs of lost workers. Default: 5 minutes, which zero means as well; at least 1
    /// second.
    pub fn stale_lock_interval(mut self, interval: Duration) -> Self {
        self.config.stale_interval =
            if interval.is_zero() { REAPER_INTERVAL } else { interval.max(REAPER_INTERVAL_MIN) };
        self
    }

    /// Time between two looks whether the worker still owns what it runs. Default: 5 seconds; zero never looks, and a
    /// cancelled job is then stopped only by its heartbeats.
    pub fn ownership_audit_interval(mut self, interval: Duration) -> Self {
        self.config.audit_interval = (!interval.is_zero()).then_some(interval);
        self
    }

    /// Time between two looks for waiting jobs whose time has come. Default: 5 seconds, which zero means as well; at
    /// least 50 ms. One worker of a fleet looks for all.
    pub fn ready_promote_interval(mut self, interval: Duration) -> Self {
        self.config.recovery_interval =
            if interval.is_zero() { RECOVERY_INTERVAL } else { interval.max(POLL_INTERVAL_MIN) };
        self
    }

    /// Whether it fires the schedules of its queue. Default: yes.
    pub fn scheduler(mut self, fires: bool) -> Self {
        self.config.fires_schedules = fires;
        self
    }

    /// Age after which a fan-out without all of its children counts as left behind by a lost process. Default: 2
    /// minutes, which zero means as well.
    pub fn fan_out_recovery_stale_age(mut self, age: Duration) -> Self {
        self.config.fan_out_stale_age = if age.is_zero() { FAN_OUT_STALE_AGE } else { age };
        self
    }

    /// The wait between runs of a job whose handler names none. Default: [`ExponentialBackoff`].
    pub fn backoff(mut self, backoff: impl Backoff) -> Self {
        self.config.backoff = Arc::new(backoff);
        self
    }

    /// The longest wait that a policy may ask for. Default: 1 minute. [`JobError::retry_after`](crate::JobError) is
    /// not limited by it.
    pub fn max_retry_backoff(mut self, most: Duration) -> Self {
        self.config.backoff_max = most;
        self
    }

    /// How often writes about a job are repeated. Default: [`RetryConfig::storage`].
    pub fn storage_retry(mut self, retry: RetryConfig) -> Self {
        self.config.storage_retry = retry;
        self
    }

    /// How often a claim is repeated. Default: [`RetryConfig::dequeue`].
    pub fn dequeue_retry(mut self, retry: RetryConfig) -> Self {
        self.config.dequeue_retry = retry;
        self
    }

    /// Most completions in one transaction, at least 1 and at most 4096, and how long the first of them waits for
    /// others, at most 5 seconds. Each job has its own outcome all the same. Default: 100, and no wait: what finishes
    /// while one transaction is written shares the next. 1 writes each by itself.
    pub fn batch_completion(mut self, jobs: u32, wait: Duration) -> Self {
        self.config.completion_batch = jobs.clamp(1, COMPLETION_BATCH_MAX);
        self.config.completion_delay = wait.min(COMPLETION_DELAY_MAX);
        self
    }

    /// Adds a limit of jobs at once that all workers share which have it. A job that is refused waits, and the attempt
    /// does not count.
    pub fn concurrency_cap(mut self, cap: Cap) -> Self {
        self.caps.push(cap);
        self
    }

    /// Adds a limit of jobs a second that all workers share which have it.
    pub fn rate_limit(mut self, limit: RateLimit) -> Self {
        self.rates.push(limit);
        self
    }

    /// Limits the jobs of one queue on this worker alone: so many a second, and at most `burst`, at least 1, at once
    /// after a pause.
    pub fn queue_rate_limit(mut self, queue: impl Into<String>, per_second: f64, burst: u32) -> Self {
        self.queue_rates.push((queue.into(), per_second, burst));
        self
    }

    /// What is deleted in the background. Default: [`Retention::stock`], which deletes completed jobs after 30 days,
    /// failed and cancelled ones after 90 and consumed signals after 7, for good. A policy replaces the one before it
    /// whole: a window that it leaves out is off.
    pub fn retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// The sweep of passed deduplication windows. Default: [`UniqueLockSweep::stock`]. The last one given counts.
    pub fn unique_lock_sweep(mut self, sweep: UniqueLockSweep) -> Self {
        self.unique_locks = sweep;
        self
    }

    /// The worker.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a queue's name is none, or is named twice; if a limit has no name or a rate that is none.
    pub fn build(self) -> Result<Worker, Error> {
        let Self { queue, id, lanes, config, retention, unique_locks, caps, rates, queue_rates } = self;
        let gates = gates(caps, rates, queue_rates)?;
        let mut checked: Vec<(QueueName, u32)> = Vec::new();
        for (name, options) in lanes {
            let name = QueueName::new(name)?;
            if checked.iter().any(|(known, _)| *known == name) {
                return Err(Error::invalid("queue", "is named once"));
            }
            checked.push((name, options.concurrency.unwrap_or(config.concurrency)));
        }
        if checked.is_empty() {
            checked.push((QueueName::default_queue(), config.concurrency));
        }
        Ok(Worker::of(Engine::new(queue, id, checked, config, retention, unique_locks, gates)))
    }
}

fn gates(caps: Vec<Cap>, rates: Vec<RateLimit>, queue_rates: Vec<(String, f64, u32)>) -> Result<Gates, Error> {
    caps.iter().try_for_each(Cap::check)?;
    rates.iter().try_for_each(RateLimit::check)?;
    let mut buckets: Vec<Bucket> = Vec::new();
    for (name, per_second, burst) in queue_rates {
        let name = QueueName::new(name)?;
        RateLimit::new(name.as_str(), per_second).check()?;
        // The last one given for a queue counts.
        buckets.retain(|bucket| bucket.queue != name);
        buckets.push(Bucket::new(name, per_second, burst));
    }
    Ok(Gates { buckets, caps, rates, ..Gates::default() })
}
