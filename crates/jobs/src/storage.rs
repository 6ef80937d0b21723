//! What a storage has to do, and what it may do besides.

#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod fragment;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod migration;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;

use async_trait::async_trait;
use jiff::Timestamp;

use crate::enqueue::{Enqueued, NewJob};
use crate::error::Error;
use crate::job::{Job, JobId};

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
