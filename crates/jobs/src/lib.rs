//! Durable background jobs in your own process, on PostgreSQL or SQLite.
//!
//! # What is deleted by default, and how to stop it
//!
//! A [`Worker`] that is given no retention setting deletes, for good and without asking:
//!
//! | rows | go this long after they ended |
//! |---|---|
//! | completed jobs | 30 days |
//! | failed and cancelled jobs | 90 days |
//! | consumed signals | 7 days |
//!
//! Checkpoints and signals of a deleted job go with it. `Worker::builder(&queue).retention(Retention::disabled())` stops all of it,
//! [`Retention::custom`] sets windows of your own (one that you leave out is off, and keeps that kind for ever), and
//! [`retention::plan`] says beforehand what would go. A job stays past its window while an unfinished job of its
//! workflow, or a deduplication window that has not passed, needs it. Passed deduplication windows are swept every
//! hour whatever the policy is; [`UniqueLockSweep::disabled`] stops that.
//!
//! # A job from beginning to end
//!
//! ```
//! # #[cfg(feature = "sqlite")]
//! # async fn example(path: &std::path::Path) -> Result<(), Box<dyn std::error::Error>> {
//! use ebbtide_jobs::{Ctx, Queue, SqliteStorage, Worker};
//! use tokio_util::sync::CancellationToken;
//!
//! let queue = Queue::new(SqliteStorage::open(path)?);
//! queue.migrate().await?;
//! queue.register("greet", |_: Ctx, name: String| async move { Ok(format!("hello {name}")) })?;
//!
//! let id = queue.enqueue("greet", &"world").send().await?.id();
//!
//! let worker = Worker::builder(&queue).build()?;
//! let shutdown = CancellationToken::new();
//! let running = tokio::spawn({
//!     let shutdown = shutdown.clone();
//!     async move { worker.run(shutdown).await }
//! });
//! # while !queue.status(id).await?.is_terminal() { tokio::task::yield_now().await }
//! # assert_eq!(queue.result::<String>(id).await?, "hello world");
//! shutdown.cancel();
//! running.await??;
//! # Ok(())
//! # }
//! # #[cfg(feature = "sqlite")]
//! # {
//! # let dir = tempfile::tempdir().unwrap();
//! # let runtime = tokio::runtime::Runtime::new().unwrap();
//! # runtime.block_on(example(&dir.path().join("jobs.db"))).unwrap();
//! # }
//! ```
//!
//! A job runs **at least once**: should its process die, another worker runs it again. What a handler does in
//! [`Ctx::step`] or [`Ctx::call`] is recorded and not repeated by a later run. [`Ctx::wait_signal`] and [`Ctx::sleep`]
//! let a job wait without occupying a worker.
//!
//! # What is here
//!
//! [`Queue`] enqueues (with deduplication, in batches, and in a transaction of your own), sends signals, and is what an
//! operator acts on; [`Worker`] runs jobs; [`Ctx`] is what a handler sees; [`retention`] decides what is deleted.
//! Storages ([`postgres`], [`sqlite`]) bring their own schema. With [`PayloadCodec`] payloads are stored encrypted.

//! Guides by topic are in `docs/jobs/` of the repository.

#![deny(missing_docs, unreachable_pub)]
#![cfg_attr(
    not(any(feature = "postgres", feature = "sqlite")),
    allow(dead_code, unused_imports, reason = "much is read by the built-in storages alone")
)]

mod backoff;
mod codec;
mod control;
mod ctx;
mod enqueue;
mod error;
mod event;
mod fan_out;
mod forward;
mod gate;
mod hooks;
mod job;
mod job_error;
pub mod limits;
mod list;
mod outcome;
mod queue;
mod registry;
pub mod retention;
mod schedule;
mod shape;
mod storage;
mod unique;
mod wake;
mod worker;

pub use backoff::{Backoff, ExponentialBackoff, RetryConfig};
pub use codec::{IdentityCodec, PayloadCodec, SecretBox};
pub use control::{DeadLetterFilter, PurgeStatus};
pub use ctx::{Ctx, DEFAULT_VERSION, FanOutError, FanOutResults, SubJob, SubJobFailure};
pub use enqueue::{EnqueueOptions, Enqueued, NewJob, TxEnqueuer};
pub use error::Error;
pub use event::{Event, EventStream, JobRef, ReclaimReason};
pub use fan_out::{
    ChildOutcome, FAN_OUT_CHECKPOINT, FanOut, FanOutId, FanOutOutcome, FanOutScan, FanOutStatus, FanOutStore,
    FanOutStrategy, Joined, Settled, WAITS_FOR_CHILDREN,
};
pub use forward::Forwarding;
pub use gate::{Cap, RateLimit, Rated};
pub use hooks::{BoxFuture, Draft, Hooks, Next};
pub use job::{Claim, Determinism, DispatchToken, Job, JobId, JobStatus, TerminalStatus};
pub use job_error::JobError;
pub use limits::{JobType, QueueName, WorkerId};
pub use list::{BulkReport, JobFilter, ListStore, Page, QueueCounts, UniqueLock, delete_all, requeue_all};
pub use outcome::{ClaimRequest, Completion, DeadLetterReason, Failure, QueueShare, Reclaim, Reclaimed};
pub use queue::{BatchEntry, DeadLetters, EnqueueBuilder, JobDef, JobHandle, PauseMode, Queue, QueueBuilder};
pub use registry::HandlerOptions;
pub use retention::{Retention, UniqueLockSweep};
pub use schedule::{Fire, Schedule, ScheduleState, ScheduleStore, Scheduled, ScheduledJob, Scheduler};
#[cfg(feature = "postgres")]
pub use storage::postgres::{self, PostgresStorage};
#[cfg(feature = "sqlite")]
pub use storage::sqlite::{self, SqliteStorage};
pub use storage::{
    BatchCompletion, Checkpoint, CheckpointStore, DeadLetterStore, GateStore, KindPlan, LeaseStore, Migrated,
    OwnershipStore, Protection, Received, RetentionPlanStore, RetentionStore, SignalRetentionStore, SignalStore, Slept,
    Storage, StoredError, TimerStore, UniqueLockStore, Until, WakeStore, WindowedEnqueue, Woken, connect,
};
pub use wake::{Subscription, WakeHub};
pub use worker::{QueueOptions, Worker, WorkerBuilder, WorkerHealth};

/// The programs of the guides, compiled with the documentation tests.
#[cfg(all(doctest, feature = "postgres", feature = "sqlite"))]
mod guides {
    #[doc = include_str!("../../../docs/jobs/deduplication.md")]
    mod deduplication {}
    #[doc = include_str!("../../../docs/jobs/encryption.md")]
    mod encryption {}
    #[doc = include_str!("../../../docs/jobs/fan-out.md")]
    mod fan_out {}
    #[doc = include_str!("../../../docs/jobs/operating.md")]
    mod operating {}
    #[doc = include_str!("../../../docs/jobs/retention.md")]
    mod retention {}
    #[doc = include_str!("../../../docs/jobs/running.md")]
    mod running {}
    #[doc = include_str!("../../../docs/jobs/schedules.md")]
    mod schedules {}
    #[doc = include_str!("../../../docs/jobs/steps.md")]
    mod steps {}
    #[doc = include_str!("../../../docs/jobs/transactions.md")]
    mod transactions {}
    #[doc = include_str!("../../../docs/jobs/waiting.md")]
    mod waiting {}
}
