//! The metrics of runs, by type and queue. Handles are made once, so that a run allocates nothing for them.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use metrics::{Counter, Histogram};

use crate::job::Job;
use crate::limits::{JobType, QueueName};

/// Pairs of type and queue that have metrics of their own. Others, of which there is no honest use, share one.
const METERS_MAX: usize = 1000;

pub(super) struct Meter {
    started: Counter,
    pub(super) completed: Counter,
    pub(super) failed: Counter,
    pub(super) retried: Counter,
    wait: Histogram,
    run: Histogram,
}

impl Meter {
    fn new(job_type: &str, queue: &str) -> Self {
        let labels = || [("type", job_type.to_owned()), ("queue", queue.to_owned())];
        Self {
            started: metrics::counter!("jobs.started", &labels()),
            completed: metrics::counter!("jobs.completed", &labels()),
            failed: metrics::counter!("jobs.failed", &labels()),
            retried: metrics::counter!("jobs.retried", &labels()),
            wait: metrics::histogram!("jobs.wait.duration", &labels()),
            run: metrics::histogram!("jobs.run.duration", &labels()),
        }
    }

    /// Counts a run, and how long its job was due before. Both times are of the database's clock.
    pub(super) fn started(&self, job: &Job) {
        self.started.increment(1);
        if let Some(started_at) = job.started_at {
            let due = job.run_at.unwrap_or(job.created_at);
            match Duration::try_from(started_at.duration_since(due)) {
                Ok(wait) => self.wait.record(wait.as_secs_f64()),
                Err(_) => metrics::counter!("jobs.clock_skew_dropped").increment(1),
            }
        }
    }

    pub(super) fn ran(&self, elapsed: Duration) {
        self.run.record(elapsed.as_secs_f64());
    }
}

#[derive(Default)]
pub(super) struct Meters(RwLock<HashMap<JobType, HashMap<QueueName, Arc<Meter>>>>);

impl Meters {
    pub(super) fn of(&self, job: &Job) -> Arc<Meter> {
        {
            let meters = self.0.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(meter) = meters.get(&job.job_type).and_then(|queues| queues.get(&job.queue)) {
                return meter.clone();
            }
        }
        let mut meters = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if METERS_MAX <= meters.values().map(HashMap::len).sum() {
            return Arc::new(Meter::new("other", "other"));
        }
        let queues = meters.entry(job.job_type.clone()).or_default();
        let meter = || Arc::new(Meter::new(job.job_type.as_str(), job.queue.as_str()));
        queues.entry(job.queue.clone()).or_insert_with(meter).clone()
    }
}
