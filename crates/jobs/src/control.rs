//! What an operator asks for: which jobs to purge, and which dead letters to list.

use std::collections::BTreeMap;

use crate::job::JobStatus;
use crate::limits::{DEAD_LETTERS_PAGE, DEAD_LETTERS_PAGE_MAX, JobType, QueueName};

/// A status of which a whole queue can be purged. A running or waiting job cannot be taken away like that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PurgeStatus {
    /// Jobs that no worker has claimed, those of the future included.
    Pending,
    /// Jobs that were put aside.
    Paused,
    /// Jobs that finished with success.
    Completed,
    /// Jobs that failed for good.
    Failed,
    /// Jobs that were stopped.
    Cancelled,
}

impl PurgeStatus {
    /// All five.
    pub const ALL: [Self; 5] = [Self::Pending, Self::Paused, Self::Completed, Self::Failed, Self::Cancelled];

    /// The same, as a status.
    pub const fn status(self) -> JobStatus {
        match self {
            Self::Pending => JobStatus::Pending,
            Self::Paused => JobStatus::Paused,
            Self::Completed => JobStatus::Completed,
            Self::Failed => JobStatus::Failed,
            Self::Cancelled => JobStatus::Cancelled,
        }
    }
}

/// Which dead letters to list: all of them, until a filter is added. Newest first.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a filter does nothing until it is asked with"]
pub struct DeadLetterFilter {
    pub(crate) queue: Option<QueueName>,
    pub(crate) job_type: Option<JobType>,
    pub(crate) tenant: Option<String>,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) search: Option<String>,
    pub(crate) limit: u32,
    pub(crate) offset: u64,
}

impl DeadLetterFilter {
    /// All dead letters, 50 at a time.
    pub fn all() -> Self {
        Self {
            queue: None,
            job_type: None,
            tenant: None,
            metadata: BTreeMap::new(),
            search: None,
            limit: DEAD_LETTERS_PAGE,
            offset: 0,
        }
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

    /// Those whose type, queue or last error holds this text.
    pub fn search(mut self, text: impl Into<String>) -> Self {
        self.search = Some(text.into());
        self
    }

    /// Most rows of the answer. Default: 50, which zero means as well; at most 1000.
    pub fn limit(mut self, rows: u32) -> Self {
        self.limit = if rows == 0 { DEAD_LETTERS_PAGE } else { rows.min(DEAD_LETTERS_PAGE_MAX) };
        self
    }

    /// Rows to pass over first.
    pub fn offset(mut self, rows: u64) -> Self {
        self.offset = rows;
        self
    }
}
