//! What a storage has to do, and what it may do besides.

mod connect;
mod fleet;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod fragment;
mod gate;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod migration;
#[cfg(feature = "postgres")]
pub mod postgres;
pub(crate) mod run;
#[cfg(feature = "sqlite")]
pub mod sqlite;

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;

pub use self::connect::connect;
pub use self::fleet::{LeaseStore, OwnershipStore, WakeStore};
pub use self::gate::GateStore;
pub use self::run::{Checkpoint, CheckpointStore, Received, SignalStore, Slept, StoredError, TimerStore, Until, Woken};
use crate::control::{DeadLetterFilter, PurgeStatus};
use crate::enqueue::{Enqueued, NewJob};
use crate::error::Error;
use crate::fan_out::FanOutStore;
use crate::job::{Claim, Job, JobId, TerminalStatus};
use crate::limits::QueueName;
use crate::list::ListStore;
use crate::outcome::{ClaimRequest, Completion, DeadLetterReason, Failure, Reclaim, Reclaimed};
use crate::schedule::ScheduleStore;

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

    /// Cancels an unfinished job and everything unfinished below it, in one transaction. Answers how many jobs that
    /// were; 0 if it was cancelled before. A worker that runs one of them loses its claim.
    ///
    /// # Errors
    /// [`Error::JobNotFound`], [`Error::JobNotCancellable`] if it completed or failed, [`Error::SubtreeTooDeep`].
    async fn cancel(&self, id: JobId) -> Result<u64, Error>;

    /// Puts a pending or waiting job aside.
    ///
    /// # Errors
    /// [`Error::JobNotFound`], [`Error::JobAlreadyPaused`], [`Error::JobNotPausable`] in any other status.
    async fn pause(&self, id: JobId) -> Result<(), Error>;

    /// Puts a paused job back to what it was.
    ///
    /// # Errors
    /// [`Error::JobNotFound`], [`Error::JobNotPaused`].
    async fn resume(&self, id: JobId) -> Result<(), Error>;

    /// Runs a failed or cancelled job again from nothing: its checkpoints, its result and everything below it are
    /// deleted, the deduplication windows below included; its own stays. Consumed signals stay consumed.
    ///
    /// # Errors
    /// [`Error::JobNotFound`], [`Error::JobNotRequeueable`] in another status, [`Error::CannotRequeueSubJob`] for a
    /// child, [`Error::DuplicateJob`] if an unfinished job has its unique key.
    async fn requeue(&self, id: JobId) -> Result<(), Error>;

    /// Deletes one job for good, with all that hangs off it. Its deduplication window is free from here on.
    ///
    /// # Errors
    /// [`Error::JobNotFound`], [`Error::JobHasChildren`], [`Error::JobHasPendingParent`].
    async fn delete(&self, id: JobId) -> Result<(), Error>;

    /// Deletes a job and everything below it for good, whatever they are doing, with all that hangs off them. Their
    /// deduplication windows are free from here on. Answers how many jobs went.
    ///
    /// # Errors
    /// [`Error::JobNotFound`], [`Error::JobHasPendingParent`], [`Error::SubtreeTooDeep`].
    async fn delete_workflow(&self, root: JobId) -> Result<u64, Error>;

    /// Deletes at most `limit` jobs of one queue and status for good, as [`Storage::delete`] would; those that it
    /// would refuse, or that another transaction has locked, stay. Answers how many went. Repeat until none did:
    /// parents become deletable once their children are gone.
    ///
    /// # Errors
    /// If the storage failed; nothing is deleted then.
    async fn purge(&self, queue: &QueueName, status: PurgeStatus, limit: u32) -> Result<u64, Error>;

    /// Hands out no more jobs of a queue, on any worker, until it is resumed. Runs go on. `by` is kept for whoever
    /// looks.
    ///
    /// # Errors
    /// If the storage failed.
    async fn pause_queue(&self, queue: &QueueName, by: &str) -> Result<(), Error>;

    /// Hands out jobs of a queue again.
    ///
    /// # Errors
    /// If the storage failed.
    async fn resume_queue(&self, queue: &QueueName) -> Result<(), Error>;

    /// The paused queues, by name.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    async fn paused_queues(&self) -> Result<Vec<QueueName>, Error>;

    /// Completing many jobs in one transaction.
    fn batch_completion(&self) -> Option<&dyn BatchCompletion> {
        None
    }

    /// Whether a completion deletes the job's checkpoints when it is asked to. Default: no.
    fn deletes_checkpoints(&self) -> bool {
        false
    }

    /// The listing of jobs that failed for good.
    fn dead_letters(&self) -> Option<&dyn DeadLetterStore> {
        None
    }

    /// Starting children and joining them.
    fn fan_outs(&self) -> Option<&dyn FanOutStore> {
        None
    }

    /// Jobs that are enqueued by the clock.
    fn schedules(&self) -> Option<&dyn ScheduleStore> {
        None
    }

    /// Lists of jobs, queues and deduplication windows.
    fn lists(&self) -> Option<&dyn ListStore> {
        None
    }

    /// Deletion of finished jobs. Without it they stay for ever.
    fn retention(&self) -> Option<&dyn RetentionStore> {
        None
    }

    /// Deletion of consumed signals. Without it they stay as long as their jobs.
    fn signal_retention(&self) -> Option<&dyn SignalRetentionStore> {
        None
    }

    /// Saying beforehand what retention would delete.
    fn retention_plan(&self) -> Option<&dyn RetentionPlanStore> {
        None
    }

    /// Deletion of deduplication windows that have passed. Without it their table grows.
    fn unique_locks(&self) -> Option<&dyn UniqueLockStore> {
        None
    }

    /// Deduplication in a window of time.
    fn windowed_enqueue(&self) -> Option<&dyn WindowedEnqueue> {
        None
    }

    /// Records of finished steps. Without it every attempt starts from nothing.
    fn checkpoints(&self) -> Option<&dyn CheckpointStore> {
        None
    }

    /// Signals to jobs.
    fn signals(&self) -> Option<&dyn SignalStore> {
        None
    }

    /// Waits for a time.
    fn timers(&self) -> Option<&dyn TimerStore> {
        None
    }

    /// Saying which claims were lost. Without it a cancelled run goes on until its heartbeat is refused.
    fn ownership(&self) -> Option<&dyn OwnershipStore> {
        None
    }

    /// Letting one worker do something for the fleet. Without it every worker does it.
    fn leases(&self) -> Option<&dyn LeaseStore> {
        None
    }

    /// Limits of a whole fleet. A worker that has some does not start without it.
    fn gates(&self) -> Option<&dyn GateStore> {
        None
    }

    /// Telling idle workers that there is work. Without it they poll.
    fn wake(&self) -> Option<&dyn WakeStore> {
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

/// The capability to list jobs that failed for good. Retention and requeueing take them out of it.
#[async_trait]
pub trait DeadLetterStore: Send + Sync {
    /// The dead letters that match, newest first, at most one page of them.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    async fn list(&self, filter: &DeadLetterFilter) -> Result<Vec<Job>, Error>;

    /// How many match, whatever the page.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    async fn count(&self, filter: &DeadLetterFilter) -> Result<u64, Error>;
}

/// The capability to delete finished jobs. What it deletes is gone for good.
///
/// Every method is one pass: one transaction that chooses at most `limit` jobs, oldest end first, and deletes them
/// with their fan-outs, checkpoints, signals and passed windows. A job stays while an unfinished job has it as parent
/// or root, while a fan-out of its own is undecided, while the unfinished parent of a fan-out has yet to collect it,
/// and while a deduplication window that has not passed names it. Such jobs do not count against `limit`. Jobs that
/// another transaction has locked are passed over.
#[async_trait]
pub trait RetentionStore: Send + Sync {
    /// Deletes jobs that finished in this way more than `age` ago. Answers how many jobs went; their side rows do
    /// not count. An age or a limit of zero deletes nothing, as does an age that reaches before all time.
    ///
    /// # Errors
    /// If the storage failed; the pass has then deleted nothing.
    async fn delete_terminal_older_than(&self, status: TerminalStatus, age: Duration, limit: u32)
    -> Result<u64, Error>;

    /// Deletes jobs that finished in this way before `cutoff`; one that finished exactly then stays.
    ///
    /// # Errors
    /// If the storage failed; the pass has then deleted nothing.
    async fn delete_terminal_before(&self, status: TerminalStatus, cutoff: Timestamp, limit: u32)
    -> Result<u64, Error>;

    /// Makes the space that deleted rows took usable for new ones, after a tick that deleted. A storage that does so
    /// by itself has nothing to do here. Nothing waits for it, and it gives nothing back to the file system.
    ///
    /// # Errors
    /// If the storage failed; the space is then used later.
    async fn reclaim(&self) -> Result<(), Error> {
        Ok(())
    }
}

/// The capability to delete consumed signals. Signals that nobody has consumed are never touched by it.
#[async_trait]
pub trait SignalRetentionStore: Send + Sync {
    /// Deletes at most `limit` signals consumed more than `age` ago, whatever their job is doing. Answers how many.
    /// An age or a limit of zero deletes nothing, as does an age that reaches before all time.
    ///
    /// # Errors
    /// If the storage failed; the pass has then deleted nothing.
    async fn delete_consumed_older_than(&self, age: Duration, limit: u32) -> Result<u64, Error>;

    /// Deletes at most `limit` signals consumed before `cutoff`; one consumed exactly then stays.
    ///
    /// # Errors
    /// If the storage failed; the pass has then deleted nothing.
    async fn delete_consumed_before(&self, cutoff: Timestamp, limit: u32) -> Result<u64, Error>;
}

/// The capability to delete deduplication windows that have passed. No job is touched by it.
#[async_trait]
pub trait UniqueLockStore: Send + Sync {
    /// Deletes at most `limit` windows that have passed, the longest past first. Answers how many.
    ///
    /// # Errors
    /// If the storage failed; the pass has then deleted nothing.
    async fn delete_expired(&self, limit: u32) -> Result<u64, Error>;
}

/// The capability to say what retention would delete. It reads and writes nothing.
#[async_trait]
pub trait RetentionPlanStore: Send + Sync {
    /// Finished jobs of one status past `age`: how many would go, and how many stay for which reason. Nothing is
    /// counted without an age, or with one that reaches before all time.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    async fn plan_terminal(&self, status: TerminalStatus, age: Duration) -> Result<KindPlan, Error>;

    /// Signals consumed more than `age` ago.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    async fn plan_consumed(&self, age: Duration) -> Result<u64, Error>;

    /// Deduplication windows that have passed.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    async fn plan_expired(&self) -> Result<u64, Error>;
}

/// Why a finished job past its window stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protection {
    /// An unfinished job has it as its parent.
    LiveChild,
    /// An unfinished job has it as the root of its workflow.
    LiveDescendant,
    /// A fan-out of its own is not decided.
    PendingFanOut,
    /// The unfinished parent has yet to collect its result.
    Uncollected,
    /// A deduplication window that has not passed names it.
    LiveWindow,
}

impl Protection {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::LiveChild, Self::LiveDescendant, Self::PendingFanOut, Self::Uncollected, Self::LiveWindow];

    /// Its name in logs, metrics and reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::LiveChild => "live_child",
            Self::LiveDescendant => "live_descendant",
            Self::PendingFanOut => "pending_fan_out",
            Self::Uncollected => "uncollected",
            Self::LiveWindow => "live_window",
        }
    }
}

/// What the next tick would do with the finished jobs of one status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KindPlan {
    /// Jobs that would go.
    pub due: u64,
    /// Jobs past their window that stay.
    pub kept: u64,
    /// How many of those each protection holds, in the order of [`Protection::ALL`]; one job may have several.
    pub by: [u64; 5],
    /// When the last of the deduplication windows that hold one has passed.
    pub held_until: Option<Timestamp>,
}

impl KindPlan {
    /// How many jobs past their window `protection` holds.
    pub fn kept_by(&self, protection: Protection) -> u64 {
        Protection::ALL.iter().zip(self.by).find(|(other, _)| **other == protection).map_or(0, |(_, count)| count)
    }
}
