//! What a worker asks a storage for, and what it reports back about a job that it has claimed.

use std::cmp::Reverse;
use std::fmt;
use std::time::Duration;

use crate::error::Error;
use crate::job::{Claim, Job, JobId};
use crate::limits::{
    JobType, QueueName, REAPER_BATCH, REAPER_MARGIN, RESULT_BYTES_MAX, STALE_AGE, WorkerId, sanitize_error,
};

/// How many jobs of one queue a worker can take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueShare {
    /// The queue.
    pub queue: QueueName,
    /// Most jobs of it; 0 takes none.
    pub limit: u32,
}

/// A request for due jobs. Never more than the sum of the shares is handed out, and no other row is locked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRequest {
    /// Who asks.
    pub worker: WorkerId,
    /// The queues, each once. Within a queue the order is priority, highest first, then due time, then id.
    pub shares: Vec<QueueShare>,
    /// How long the claim lasts without a heartbeat.
    pub lease: Duration,
}

/// The order in which jobs are handed out: priority, highest first, then due time, then id.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn in_order(mut jobs: Vec<Job>) -> Vec<Job> {
    jobs.sort_by_key(|job| (Reverse(job.priority), job.run_at.unwrap_or(job.created_at), job.id));
    jobs
}

/// The successful end of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    pub(crate) claim: Claim,
    pub(crate) result: Option<Vec<u8>>,
    pub(crate) delete_checkpoints: bool,
}

impl Completion {
    /// Ends the run that `claim` gave the right to, with what the job returned.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the result is larger than 1 MiB.
    pub fn new(claim: Claim, result: Option<Vec<u8>>) -> Result<Self, Error> {
        if result.as_ref().is_some_and(|result| RESULT_BYTES_MAX < result.len()) {
            return Err(Error::invalid("result", "is at most 1 MiB"));
        }
        Ok(Self { claim, result, delete_checkpoints: false })
    }

    /// Deletes the job's checkpoints in the transaction that completes it. Default: they stay.
    #[must_use]
    pub fn delete_checkpoints(mut self, delete: bool) -> Self {
        self.delete_checkpoints = delete;
        self
    }

    /// The right under which it is written.
    pub fn claim(&self) -> &Claim {
        &self.claim
    }

    /// What the job returned.
    pub fn result(&self) -> Option<&[u8]> {
        self.result.as_deref()
    }

    /// Whether the job's checkpoints go with it.
    pub fn deletes_checkpoints(&self) -> bool {
        self.delete_checkpoints
    }
}

/// Why a job failed for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeadLetterReason {
    /// The last allowed run failed.
    AttemptsExhausted,
    /// The error said that another run is of no use.
    NotRetryable,
    /// Its workers were lost again and again.
    WorkerLost,
}

impl DeadLetterReason {
    /// Its name in the database.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AttemptsExhausted => "attempts_exhausted",
            Self::NotRetryable => "not_retryable",
            Self::WorkerLost => "worker_lost",
        }
    }
}

impl fmt::Display for DeadLetterReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A failed run: its error text, without control characters and obvious secrets, at most 4096 characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub(crate) error: String,
}

impl Failure {
    /// Sanitises `error`.
    pub fn new(error: &str) -> Self {
        Self { error: sanitize_error(error) }
    }

    /// A text that is sanitised already, and perhaps encoded.
    pub(crate) fn stored(error: String) -> Self {
        Self { error }
    }

    /// The text as it is stored.
    pub fn error(&self) -> &str {
        &self.error
    }
}

/// A look for running jobs whose worker gives no sign of life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reclaim {
    pub(crate) age: Duration,
    pub(crate) margin: u32,
    pub(crate) limit: u32,
}

impl Reclaim {
    /// Jobs without a sign of life for longer than `age`; zero means the default of 45 minutes, never "all of them".
    pub fn older_than(age: Duration) -> Self {
        Self { age: if age.is_zero() { STALE_AGE } else { age }, margin: REAPER_MARGIN, limit: REAPER_BATCH }
    }

    /// Lost runs beyond the allowed ones after which a job is dead-lettered instead of run again. Default: 3.
    #[must_use]
    pub fn margin(mut self, runs: u32) -> Self {
        self.margin = runs;
        self
    }

    /// Most jobs in one transaction, at least 1 and at most 100, the default.
    #[must_use]
    pub fn limit(mut self, jobs: u32) -> Self {
        self.limit = jobs.clamp(1, REAPER_BATCH);
        self
    }
}

/// A job that was taken from a lost worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reclaimed {
    /// The job.
    pub id: JobId,
    /// The name of its handler.
    pub job_type: JobType,
    /// Its queue.
    pub queue: QueueName,
    /// Runs started so far, the lost ones included.
    pub attempt: u32,
    /// Whether it was dead-lettered; otherwise it is pending again.
    pub is_dead: bool,
}
