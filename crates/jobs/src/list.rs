//! What an operator looks at: jobs page by page, queues with their counts, and deduplication windows.

use std::collections::BTreeMap;

use async_trait::async_trait;
use jiff::Timestamp;

use crate::error::Error;
use crate::job::{Job, JobId, JobStatus};
use crate::limits::{BULK_IDS_MAX, JOBS_PAGE, JOBS_PAGE_MAX, JobType, QueueName, SEARCH_BYTES_MAX};
use crate::storage::Storage;

/// Which jobs to list: all of them, until a filter is added. The latest id comes first, which for ids of this library
/// is the latest job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a filter does nothing until it is asked with"]
pub struct JobFilter {
    pub(crate) status: Option<JobStatus>,
    pub(crate) queue: Option<QueueName>,
    pub(crate) job_type: Option<JobType>,
    pub(crate) tenant: Option<String>,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) search: Option<String>,
    pub(crate) since: Option<Timestamp>,
    pub(crate) until: Option<Timestamp>,
    pub(crate) root: Option<JobId>,
    pub(crate) before: Option<JobId>,
    pub(crate) limit: u32,
}

impl JobFilter {
    /// All jobs, 50 at a time.
    pub fn all() -> Self {
        Self {
            status: None,
            queue: None,
            job_type: None,
            tenant: None,
            metadata: BTreeMap::new(),
            search: None,
            since: None,
            until: None,
            root: None,
            before: None,
            limit: JOBS_PAGE,
        }
    }

    /// Those of one status.
    pub fn status(mut self, status: JobStatus) -> Self {
        self.status = Some(status);
        self
    }

    /// Those of one queue.
    pub fn queue(mut self, queue: QueueName) -> Self {
        self.queue = Some(queue);
        self
    }

    /// Those of one type.
    pub fn job_type(mut self, job_type: JobType) -> Self {
        self.job_type = Some(job_type);
        self
    }

    /// Those of one tenant.
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.tenant = Some(tenant.into());
        self
    }

    /// Those with this label, and with every other one that is asked for.
    pub fn meta(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    /// Those whose type, queue, unique key or last error holds this text.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is longer than 256 bytes or holds a NUL.
    pub fn search(mut self, text: impl Into<String>) -> Result<Self, Error> {
        let text = text.into();
        if SEARCH_BYTES_MAX < text.len() || text.contains('\0') {
            return Err(Error::invalid("search", "is at most 256 bytes long and holds no NUL character"));
        }
        self.search = Some(text);
        Ok(self)
    }

    /// Those enqueued at this time or later.
    pub fn since(mut self, time: Timestamp) -> Self {
        self.since = Some(time);
        self
    }

    /// Those enqueued before this time.
    pub fn until(mut self, time: Timestamp) -> Self {
        self.until = Some(time);
        self
    }

    /// Those of one workflow, its root left out.
    pub fn root(mut self, root: JobId) -> Self {
        self.root = Some(root);
        self
    }

    /// Those after this one in the order of the list: the next page begins after [`Page::next`].
    pub fn after(mut self, last: JobId) -> Self {
        self.before = Some(last);
        self
    }

    /// Most rows of the answer. Default: 50, which zero means as well; at most 100.
    pub fn limit(mut self, rows: u32) -> Self {
        self.limit = if rows == 0 { JOBS_PAGE } else { rows.min(JOBS_PAGE_MAX) };
        self
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn page(&self, mut jobs: Vec<Job>) -> Page {
        let has_more = self.limit as usize <= jobs.len();
        jobs.truncate(self.limit as usize);
        let next = jobs.last().map(|job| job.id).filter(|_| has_more);
        Page { jobs, next }
    }
}

/// One page of a list.
#[derive(Clone, Debug, PartialEq)]
pub struct Page {
    /// The jobs.
    pub jobs: Vec<Job>,
    /// The job after which the next page begins; `None` if this one was short.
    pub next: Option<JobId>,
}

/// A queue and what stands in it. Finished jobs are not counted, but for dead letters, so that this costs what is
/// unfinished and not the history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueCounts {
    /// The queue.
    pub queue: QueueName,
    /// Jobs that no worker has claimed, those of the future included.
    pub pending: u64,
    /// Jobs that run.
    pub running: u64,
    /// Suspended jobs.
    pub waiting: u64,
    /// Jobs that were put aside.
    pub paused: u64,
    /// Jobs that failed for good and are still kept.
    pub dead: u64,
    /// When the oldest pending job was due, or will be.
    pub oldest_due: Option<Timestamp>,
    /// Whether the queue was paused.
    pub is_paused: bool,
}

impl QueueCounts {
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn empty(queue: String) -> Self {
        Self {
            queue: QueueName::from_storage(queue),
            pending: 0,
            running: 0,
            waiting: 0,
            paused: 0,
            dead: 0,
            oldest_due: None,
            is_paused: false,
        }
    }
}

/// A deduplication window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UniqueLock {
    /// The hash of queue, type, and key or arguments.
    pub scope_hash: String,
    /// The job that it names, which may be gone.
    pub job_id: JobId,
    /// When it has passed.
    pub expires_at: Timestamp,
    /// When it was taken.
    pub created_at: Timestamp,
}

/// The capability to list what is there.
#[async_trait]
pub trait ListStore: Send + Sync {
    /// One page of the jobs that match.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    async fn jobs(&self, filter: &JobFilter) -> Result<Page, Error>;

    /// The queues that have unfinished jobs or dead letters, or were paused, by name.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    async fn queues(&self) -> Result<Vec<QueueCounts>, Error>;

    /// At most `limit` deduplication windows, the first to pass first; of one job, if it is named.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    async fn locks(&self, job: Option<JobId>, limit: u32) -> Result<Vec<UniqueLock>, Error>;

    /// Ends a deduplication window before its time: the next enqueue of its scope is a new job, and the job that it
    /// names is no longer kept from retention. False if there is none.
    ///
    /// # Errors
    /// If the storage failed.
    async fn release_lock(&self, scope_hash: &str) -> Result<bool, Error>;
}

/// What a call about many jobs did.
#[derive(Debug, Default)]
pub struct BulkReport {
    /// Jobs with which it succeeded.
    pub done: Vec<JobId>,
    /// Jobs that were left as they are, and why.
    pub skipped: Vec<(JobId, Error)>,
}

/// Requeues each of the jobs, in a transaction of its own.
///
/// # Errors
/// [`Error::Invalid`] for more than 1000 ids; nothing was done then.
pub async fn requeue_all(storage: &dyn Storage, ids: &[JobId]) -> Result<BulkReport, Error> {
    check_bulk(ids)?;
    let mut report = BulkReport::default();
    for id in ids {
        report.push(*id, storage.requeue(*id).await);
    }
    Ok(report)
}

/// Deletes each of the jobs for good, in a transaction of its own.
///
/// # Errors
/// [`Error::Invalid`] for more than 1000 ids; nothing was done then.
pub async fn delete_all(storage: &dyn Storage, ids: &[JobId]) -> Result<BulkReport, Error> {
    check_bulk(ids)?;
    let mut report = BulkReport::default();
    for id in ids {
        report.push(*id, storage.delete(*id).await);
    }
    Ok(report)
}

impl BulkReport {
    fn push(&mut self, id: JobId, outcome: Result<(), Error>) {
        match outcome {
            Ok(()) => self.done.push(id),
            Err(error) => self.skipped.push((id, error)),
        }
    }
}

fn check_bulk(ids: &[JobId]) -> Result<(), Error> {
    if BULK_IDS_MAX < ids.len() {
        return Err(Error::invalid("ids", "are at most 1000"));
    }
    Ok(())
}
