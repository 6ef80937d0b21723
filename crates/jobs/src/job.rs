//! A job, its identity, and the statuses between which it may move.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use jiff::Timestamp;
use uuid::Uuid;

use crate::error::Error;
use crate::fan_out::FanOutId;
use crate::limits::{JobType, QueueName, WorkerId};

/// The identity of a job: a UUID of version 7, so that ids made later sort later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(Uuid);

impl JobId {
    /// An id that no other job has.
    #[allow(clippy::new_without_default, reason = "an identity has no default")]
    pub fn new() -> Self {
        Self(Uuid::now_v7())
    }

    /// The id as a UUID; `None` for the all-zero one, which never names a job.
    pub fn from_uuid(uuid: Uuid) -> Option<Self> {
        (!uuid.is_nil()).then_some(Self(uuid))
    }

    /// The UUID.
    pub fn as_uuid(&self) -> Uuid {
        self.0
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for JobId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let uuid = Uuid::parse_str(text).ok().and_then(Self::from_uuid);
        uuid.ok_or(Error::invalid("job id", "is a UUID other than the all-zero one"))
    }
}

/// Tells two runs of one job apart, on the same worker too: every claim makes a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DispatchToken(pub(crate) Uuid);

/// What a job is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum JobStatus {
    /// Waits for a worker, and for its time if it has one.
    Pending,
    /// A worker has claimed it.
    Running,
    /// Suspended until a signal, a time or its children wake it.
    Waiting,
    /// Put aside by an operator.
    Paused,
    /// Accepted from other writers, and treated as unfinished. Never written: a retry is pending with a later time.
    Retrying,
    /// Finished with success.
    Completed,
    /// Finished without success: dead-lettered.
    Failed,
    /// Stopped by somebody.
    Cancelled,
}

impl JobStatus {
    /// Every status, in the order of a job's life.
    pub const ALL: [Self; 8] = [
        Self::Pending,
        Self::Running,
        Self::Waiting,
        Self::Paused,
        Self::Retrying,
        Self::Completed,
        Self::Failed,
        Self::Cancelled,
    ];

    /// Its name in the database.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Paused => "paused",
            Self::Retrying => "retrying",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// The three from which a job goes nowhere by itself: completed, failed, cancelled.
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }

    /// Whether a job may move from this status to `next` in one step.
    pub const fn may_become(self, next: Self) -> bool {
        use JobStatus::{Cancelled, Completed, Failed, Paused, Pending, Running, Waiting};
        matches!(
            (self, next),
            (Pending, Running | Paused | Cancelled)
                | (Running, Completed | Failed | Pending | Waiting | Cancelled)
                | (Waiting, Pending | Paused | Cancelled)
                | (Paused, Pending | Waiting | Cancelled)
                | (Failed | Cancelled, Pending)
        )
    }
}

impl fmt::Display for JobStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for JobStatus {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|status| status.as_str() == name);
        found.ok_or(Error::invalid("status", "is one of the eight statuses of a job"))
    }
}

/// A status in which retention may delete a job: no other one can be written here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TerminalStatus {
    /// Finished with success.
    Completed,
    /// Finished without success.
    Failed,
    /// Stopped by somebody.
    Cancelled,
}

impl TerminalStatus {
    /// All three, in the order in which a tick visits them.
    pub const ALL: [Self; 3] = [Self::Completed, Self::Failed, Self::Cancelled];

    /// Its name in the database.
    pub const fn as_str(self) -> &'static str {
        JobStatus::as_str(self.status())
    }

    /// The same, as a status.
    pub const fn status(self) -> JobStatus {
        match self {
            Self::Completed => JobStatus::Completed,
            Self::Failed => JobStatus::Failed,
            Self::Cancelled => JobStatus::Cancelled,
        }
    }
}

/// How strictly a replayed run has to ask for the same steps again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Determinism {
    /// A step that does not match its record fails the job. The default.
    Explicit,
    /// As explicit, and records that were not asked for fail the job too.
    Strict,
    /// A record that does not match is dropped with a warning, and the step runs again.
    BestEffort,
}

impl Determinism {
    /// Its number in the database.
    pub const fn as_i32(self) -> i32 {
        match self {
            Self::Explicit => 0,
            Self::Strict => 1,
            Self::BestEffort => 2,
        }
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn from_i32(number: i32) -> Result<Self, Error> {
        match number {
            0 => Ok(Self::Explicit),
            1 => Ok(Self::Strict),
            2 => Ok(Self::BestEffort),
            other => Err(Error::Corrupt(format!("determinism {other}"))),
        }
    }
}

/// The right to write a job's outcome, gained by claiming it: over as soon as anybody else claims the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The job.
    pub job_id: JobId,
    /// Who claimed it.
    pub worker: WorkerId,
    /// Which of the claims on the job this is.
    pub token: DispatchToken,
}

/// A job as the storage holds it.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Identity.
    pub id: JobId,
    /// The name of its handler.
    pub job_type: JobType,
    /// Arguments: JSON, byte for byte as they were enqueued.
    pub args: Vec<u8>,
    /// Its queue.
    pub queue: QueueName,
    /// Free text that tells customers apart; empty if unused.
    pub tenant: String,
    /// Free labels.
    pub metadata: BTreeMap<String, String>,
    /// Higher goes first.
    pub priority: i32,
    /// What it is doing.
    pub status: JobStatus,
    /// What it did before it was paused.
    pub previous_status: Option<JobStatus>,
    /// Started runs that count.
    pub attempt: u32,
    /// Retries after the first run.
    pub max_retries: u32,
    /// Limit of one run.
    pub timeout: Option<Duration>,
    /// How strictly a replay is checked.
    pub determinism: Determinism,
    /// The latest failure.
    pub last_error: Option<String>,
    /// When it failed for good.
    pub dead_lettered_at: Option<Timestamp>,
    /// Why it failed for good.
    pub dead_letter_reason: Option<String>,
    /// Not before this; the deadline of a wait while waiting.
    pub run_at: Option<Timestamp>,
    /// When the latest run started.
    pub started_at: Option<Timestamp>,
    /// When it finished, in whatever way. Retention counts from here.
    pub completed_at: Option<Timestamp>,
    /// When it was enqueued.
    pub created_at: Timestamp,
    /// When it was last written.
    pub updated_at: Timestamp,
    /// The worker of the latest run, if it has not let go.
    pub locked_by: Option<String>,
    /// The end of that worker's lease.
    pub locked_until: Option<Timestamp>,
    /// That worker's latest sign of life.
    pub last_heartbeat_at: Option<Timestamp>,
    /// Which claim is in force.
    pub dispatch_token: Option<DispatchToken>,
    /// The key that no second unfinished job may have.
    pub unique_key: Option<String>,
    /// The job that started it.
    pub parent_job_id: Option<JobId>,
    /// The job at the top of its workflow.
    pub root_job_id: Option<JobId>,
    /// The fan-out that started it.
    pub fan_out_id: Option<FanOutId>,
    /// Its place among the children of that fan-out, from 0.
    pub fan_out_index: u32,
    /// The name of the signal it waits for, if known.
    pub waiting_signal_name: Option<String>,
    /// What it returned.
    pub result: Option<Vec<u8>>,
    /// Span of whoever enqueued it, serialised.
    pub trace_context: Option<Vec<u8>>,
}

/// Labels as they are stored. Another program may have written values that are no strings: those are kept as JSON,
/// since a job that cannot be read would hold up every claim that meets it.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn metadata_from_storage(json: Option<&str>) -> BTreeMap<String, String> {
    use serde_json::Value;
    let Some(Ok(Value::Object(labels))) = json.map(serde_json::from_str) else {
        return BTreeMap::new();
    };
    let text = |value| if let Value::String(text) = value { text } else { value.to_string() };
    labels.into_iter().map(|(key, value)| (key, text(value))).collect()
}

impl Job {
    /// The claim in force; `None` unless the job is running.
    pub fn claim(&self) -> Option<Claim> {
        let (Some(worker), Some(token), JobStatus::Running) = (&self.locked_by, self.dispatch_token, self.status)
        else {
            return None;
        };
        Some(Claim { job_id: self.id, worker: WorkerId::new(worker.clone()).ok()?, token })
    }

    /// Whether a failure of the present run may be followed by another run.
    pub fn has_retries_left(&self) -> bool {
        self.attempt <= self.max_retries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_version_7_in_order_and_never_nil() {
        let (a, b) = (JobId::new(), JobId::new());
        assert_eq!(a.as_uuid().get_version_num(), 7);
        assert!(a < b);
        assert_eq!(a.to_string().parse::<JobId>().unwrap(), a);
        assert!(Uuid::nil().to_string().parse::<JobId>().is_err());
        assert!("x".parse::<JobId>().is_err());
    }

    #[test]
    fn terminal_statuses_are_exactly_three() {
        let terminal: Vec<_> = JobStatus::ALL.into_iter().filter(|status| status.is_terminal()).collect();
        assert_eq!(terminal, TerminalStatus::ALL.map(TerminalStatus::status));
        for status in JobStatus::ALL {
            assert_eq!(status.as_str().parse::<JobStatus>().unwrap(), status);
        }
    }

    #[test]
    fn only_failed_and_cancelled_leave_a_terminal_status_and_only_to_pending() {
        for from in JobStatus::ALL.into_iter().filter(|status| status.is_terminal()) {
            for to in JobStatus::ALL {
                let legal = from != JobStatus::Completed && to == JobStatus::Pending;
                assert_eq!(from.may_become(to), legal, "{from} to {to}");
            }
        }
    }

    #[test]
    fn nothing_becomes_retrying() {
        assert!(JobStatus::ALL.into_iter().all(|from| !from.may_become(JobStatus::Retrying)));
    }
}
