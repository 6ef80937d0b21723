//! What can go wrong, by what a caller can do about it.

use std::error::Error as StdError;

use crate::job::{JobId, JobStatus};

/// Every failure of the library. [`Error::key`] is stable across releases; the text is not.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value was refused before anything was written.
    #[error("{field} {rule}")]
    Invalid {
        /// The option or argument.
        field: &'static str,
        /// What it has to be like.
        rule: &'static str,
    },
    /// The value cannot be written as JSON.
    #[error("cannot be written as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// An unfinished job holds the unique key; nothing was enqueued.
    #[error("job {holder} holds the unique key and has not finished")]
    DuplicateJob {
        /// The job that holds the key.
        holder: JobId,
    },
    /// A deduplication window without a key or without a length.
    #[error("a deduplication window needs a key and a length above zero")]
    InvalidWindowedDedup,
    /// A batch holds a job with a deduplication window; nothing was enqueued.
    #[error("entry {index} of the batch has a deduplication window, which only a single enqueue takes")]
    BatchWindowedDedup {
        /// Its place in the batch, from 0.
        index: usize,
    },
    /// The storage cannot deduplicate in a window; nothing was enqueued.
    #[error("the storage keeps no deduplication windows")]
    StorageNoUniqueLocks,
    /// The storage lacks what the call needs.
    #[error("the storage does not support {0}")]
    Unsupported(&'static str),
    /// There is no such job, any more perhaps.
    #[error("job {0} not found")]
    JobNotFound(JobId),
    /// The caller's claim on the job is over; nothing was written.
    #[error("job {0} is not owned by this claim any more")]
    JobNotOwned(JobId),
    /// The job has finished otherwise, so that it cannot be cancelled.
    #[error("job {id} is {status} and cannot be cancelled")]
    JobNotCancellable {
        /// The job.
        id: JobId,
        /// Its status.
        status: JobStatus,
    },
    /// Only failed and cancelled jobs can be requeued.
    #[error("job {id} is {status} and cannot be requeued")]
    JobNotRequeueable {
        /// The job.
        id: JobId,
        /// Its status.
        status: JobStatus,
    },
    /// A child of a workflow is run again only by its parent.
    #[error("job {0} belongs to a workflow and cannot be requeued alone")]
    CannotRequeueSubJob(JobId),
    /// The job is paused already.
    #[error("job {0} is paused already")]
    JobAlreadyPaused(JobId),
    /// A job in this status cannot be paused.
    #[error("job {id} is {status} and cannot be paused")]
    JobNotPausable {
        /// The job.
        id: JobId,
        /// Its status.
        status: JobStatus,
    },
    /// Only a paused job can be resumed.
    #[error("job {id} is {status} and not paused")]
    JobNotPaused {
        /// The job.
        id: JobId,
        /// Its status.
        status: JobStatus,
    },
    /// A job with children is deleted only as a whole workflow.
    #[error("job {0} has children; delete the workflow instead")]
    JobHasChildren(JobId),
    /// A child is not deleted while its parent may still collect it.
    #[error("the parent of job {0} has not finished")]
    JobHasPendingParent(JobId),
    /// The workflow is deeper than an operation on all of it follows; nothing was changed.
    #[error("the workflow of job {0} is more than 256 levels deep")]
    SubtreeTooDeep(JobId),
    /// No handler of this name is registered here; nothing was enqueued. A job for another program is enqueued with
    /// [`remote`](crate::EnqueueBuilder::remote).
    #[error("no handler is registered for type {0}")]
    HandlerNotFound(String),
    /// The name has a handler already, with other types.
    #[error("type {0} is registered already")]
    HandlerRegistered(String),
    /// The arguments do not fit the handler that is registered here; nothing was enqueued.
    #[error("the arguments do not fit the handler of type {job_type}: {reason}")]
    JobArgsMismatch {
        /// The type.
        job_type: String,
        /// What the handler could not read.
        reason: String,
    },
    /// This worker runs already.
    #[error("the worker runs already")]
    WorkerAlreadyStarted,
    /// A stored payload cannot be read: another key, or other types than it was written with.
    #[error("a stored payload cannot be read: {0}")]
    PayloadDecode(String),
    /// A replayed run asked for another step than the one that is recorded.
    #[error("{0}")]
    Determinism(String),
    /// A child of a decided fan-out is not there: somebody deleted it.
    #[error("child {index} of the fan-out is not there any more")]
    SubJobIncomplete {
        /// Its place among the children, from 0.
        index: u32,
    },
    /// A phase was saved twice in one run.
    #[error("phase {0} was saved twice in one run")]
    DuplicatePhaseName(String),
    /// The recorded version of a change is outside of what the code can do.
    #[error("change {change} is recorded as version {recorded}, which this code does not support")]
    UnsupportedWorkflowVersion {
        /// The change.
        change: String,
        /// The version that the run started with.
        recorded: i32,
    },
    /// The job has not completed yet.
    #[error("job {id} is {status} and has no result yet")]
    NotCompleted {
        /// The job.
        id: JobId,
        /// Its status.
        status: JobStatus,
    },
    /// The job failed for good.
    #[error("job {id} failed: {error}")]
    Failed {
        /// The job.
        id: JobId,
        /// Its last error.
        error: String,
    },
    /// The job was cancelled.
    #[error("job {0} was cancelled")]
    Cancelled(JobId),
    /// The job completed without a result.
    #[error("job {0} has no result")]
    NoResult(JobId),
    /// There is no such fan-out, any more perhaps.
    #[error("fan-out {0} not found")]
    FanOutNotFound(crate::fan_out::FanOutId),
    /// The database lost this transaction against another one, or was busy. Doing it again may succeed.
    #[error("the database was busy: {0}")]
    Busy(#[source] Box<dyn StdError + Send + Sync>),
    /// A newer release installed the schema; this one must not touch it.
    #[error("schema version {found} is newer than {known}, the newest that this release knows")]
    SchemaTooNew {
        /// The version in the database.
        found: i64,
        /// The newest version of this release.
        known: i64,
    },
    /// A migration was installed with another text than this release carries.
    #[error("migration {0} was installed with another text")]
    SchemaEdited(String),
    /// A row holds what this release cannot read.
    #[error("unreadable row: {0}")]
    Corrupt(String),
    /// The storage failed.
    #[error("storage failed: {0}")]
    Storage(#[source] Box<dyn StdError + Send + Sync>),
}

impl Error {
    pub(crate) fn invalid(field: &'static str, rule: &'static str) -> Self {
        Self::Invalid { field, rule }
    }

    /// A storage's failure, for storages outside this crate.
    pub fn storage(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::Storage(error.into())
    }

    /// Whether it will be the same however often the job runs again.
    pub(crate) fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Invalid { .. }
                | Self::Determinism(_)
                | Self::DuplicatePhaseName(_)
                | Self::SubJobIncomplete { .. }
                | Self::UnsupportedWorkflowVersion { .. }
                | Self::PayloadDecode(_)
                | Self::HandlerNotFound(_)
                | Self::Unsupported(_)
        )
    }

    /// Whether the same call may succeed when it is simply made again.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Busy(_))
    }

    /// A name of the kind of error that stays the same across releases.
    pub fn key(&self) -> &'static str {
        match self {
            Self::Invalid { .. } => "invalid",
            Self::Json(_) => "json",
            Self::DuplicateJob { .. } => "duplicate_job",
            Self::InvalidWindowedDedup => "invalid_windowed_dedup",
            Self::BatchWindowedDedup { .. } => "batch_windowed_dedup",
            Self::StorageNoUniqueLocks => "storage_no_unique_locks",
            Self::Unsupported(_) => "unsupported",
            Self::JobNotFound(_) => "job_not_found",
            Self::JobNotOwned(_) => "job_not_owned",
            Self::JobNotCancellable { .. } => "job_not_cancellable",
            Self::JobNotRequeueable { .. } => "job_not_requeueable",
            Self::CannotRequeueSubJob(_) => "cannot_requeue_sub_job",
            Self::JobAlreadyPaused(_) => "job_already_paused",
            Self::JobNotPausable { .. } => "job_not_pausable",
            Self::JobNotPaused { .. } => "job_not_paused",
            Self::JobHasChildren(_) => "job_has_children",
            Self::JobHasPendingParent(_) => "job_has_pending_parent",
            Self::SubtreeTooDeep(_) => "subtree_too_deep",
            Self::HandlerNotFound(_) => "handler_not_found",
            Self::HandlerRegistered(_) => "handler_registered",
            Self::JobArgsMismatch { .. } => "job_args_mismatch",
            Self::WorkerAlreadyStarted => "worker_already_started",
            Self::PayloadDecode(_) => "payload_decode",
            Self::Determinism(_) => "determinism",
            Self::SubJobIncomplete { .. } => "sub_job_incomplete",
            Self::DuplicatePhaseName(_) => "duplicate_phase_name",
            Self::UnsupportedWorkflowVersion { .. } => "unsupported_workflow_version",
            Self::NotCompleted { .. } => "not_completed",
            Self::Failed { .. } => "failed",
            Self::Cancelled(_) => "cancelled",
            Self::NoResult(_) => "no_result",
            Self::FanOutNotFound(_) => "fan_out_not_found",
            Self::Busy(_) => "busy",
            Self::SchemaTooNew { .. } => "schema_too_new",
            Self::SchemaEdited(_) => "schema_edited",
            Self::Corrupt(_) => "corrupt",
            Self::Storage(_) => "storage",
        }
    }
}
