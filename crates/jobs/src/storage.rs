//! What a storage has to do, and what it may do besides.

#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod fragment;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod migration;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;

use crate::enqueue::{Enqueued, NewJob};
use crate::error::Error;
use crate::job::{Claim, Job, JobId};
use crate::outcome::{ClaimRequest, Completion, DeadLetterReason, Failure, Reclaim, Reclaimed};

/// What an installation of the schema did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migrated {
    /// Migrations applied; 0 if all were there.
    pub applied: usize,
    /// The schema's version after it.
    pub version: i64,
}

/// Where jobs are kept.
///
/// The methods without a default are what every storage can do. Everything else is a capability: an accessor that
/// answers `None` unless the storage overrides it, so that a capability added later breaks no storage that exists.
/// Nothing looks behind the trait for a concrete type, hence a decorator must forward every accessor;
/// [`Forwarding`](crate::Forwarding) does.
///
/// Ages and delays are judged by the storage's own clock, never by the caller's.
#[async_trait]
pub trait Storage: Send + Sync + 'static {
    /// Brings the schema to this release's version. Doing it twice changes nothing.
    ///
    /// # Errors
    /// [`Error::SchemaTooNew`] if a newer release was here, [`Error::SchemaEdited`] if a migration's text differs.
    async fn migrate(&self) -> Result<Migrated, Error>;

    /// The storage's clock. An answer also proves that the storage can be reached.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    async fn now(&self) -> Result<Timestamp, Error>;

    /// The job with this id, whatever it is doing; `None` if there is none.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    async fn job(&self, id: JobId) -> Result<Option<Job>, Error>;

    /// Puts one job into its queue. A job with a deduplication window goes to [`Storage::windowed_enqueue`] instead.
    ///
    /// # Errors
    /// [`Error::DuplicateJob`] if an unfinished job has the same unique key, [`Error::StorageNoUniqueLocks`] if the
    /// job has a deduplication window; nothing is written then.
    async fn enqueue(&self, job: &NewJob) -> Result<JobId, Error>;

    /// Puts all of the jobs into their queues, or none of them. Answers in the order of the jobs; one whose unique
    /// key is taken, by an earlier one of the batch too, writes nothing and answers with the holder's id.
    ///
    /// # Errors
    /// [`Error::BatchWindowedDedup`] if one of them has a deduplication window.
    async fn enqueue_batch(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, Error>;

    /// Hands out due jobs of queues that are not paused, each with a claim of its own.
    ///
    /// # Errors
    /// If the storage failed; nothing is claimed then.
    async fn claim(&self, request: &ClaimRequest) -> Result<Vec<Job>, Error>;

    /// Says that the owner lives, and makes its lease `lease` long from here.
    ///
    /// # Errors
    /// [`Error::JobNotOwned`] if the claim is over.
    async fn heartbeat(&self, claim: &Claim, lease: Duration) -> Result<(), Error>;

    /// Ends a run with success.
    ///
    /// # Errors
    /// [`Error::JobNotOwned`] if the claim is over; nothing is written or deleted then.
    async fn complete(&self, completion: &Completion) -> Result<(), Error>;

    /// Ends a run with a failure after which the job runs again, `delay` from here on the storage's clock.
    ///
    /// # Errors
    /// [`Error::JobNotOwned`] if the claim is over; nothing is written then.
    async fn retry(&self, claim: &Claim, failure: &Failure, delay: Duration) -> Result<(), Error>;

    /// Ends a run with a failure for good: the job is dead-lettered.
    ///
    /// # Errors
    /// [`Error::JobNotOwned`] if the claim is over; nothing is written then.
    async fn fail(&self, claim: &Claim, failure: &Failure, reason: DeadLetterReason) -> Result<(), Error>;

    /// Gives a job back that was not really run: it is pending again, and the attempt does not count.
    ///
    /// # Errors
    /// [`Error::JobNotOwned`] if the claim is over; nothing is written then.
    async fn release(&self, claim: &Claim) -> Result<(), Error>;

    /// Takes jobs from workers that give no sign of life, at most one batch, the longest silent first. The lost run
    /// counts as an attempt.
    ///
    /// # Errors
    /// If the storage failed; nothing is taken then.
    async fn reclaim(&self, reclaim: &Reclaim) -> Result<Vec<Reclaimed>, Error>;

    /// Completing many jobs in one transaction.
    fn batch_completion(&self) -> Option<&dyn BatchCompletion> {
        None
    }

    /// Whether a completion deletes the job's checkpoints when it is asked to. Default: no.
    fn deletes_checkpoints(&self) -> bool {
        false
    }

    /// Deduplication in a window of time.
    fn windowed_enqueue(&self) -> Option<&dyn WindowedEnqueue> {
        None
    }
}

/// The capability to deduplicate in a window of time.
#[async_trait]
pub trait WindowedEnqueue: Send + Sync {
    /// Puts one job into its queue, unless its window is taken. A job without a window is simply enqueued.
    ///
    /// # Errors
    /// [`Error::DuplicateJob`] if an unfinished job has the same unique key; the window is left as it was.
    async fn enqueue_windowed(&self, job: &NewJob) -> Result<Enqueued, Error>;
}

/// The capability to complete many jobs in one transaction.
#[async_trait]
pub trait BatchCompletion: Send + Sync {
    /// Ends each of the runs with success. Answers in the order of the completions, false where the claim is over;
    /// those write and delete nothing.
    ///
    /// # Errors
    /// If the storage failed; none is completed then.
    async fn complete_batch(&self, completions: &[Completion]) -> Result<Vec<bool>, Error>;
}
