//! Durable background jobs in your own process, on PostgreSQL or SQLite.
//!
//! # What is deleted by default, and how to stop it
//!
//! A [`RetentionSweeper`](retention::RetentionSweeper) with the stock policy deletes, for good and without asking:
//!
//! | rows | go this long after they ended |
//! |---|---|
//! | completed jobs | 30 days |
//! | failed and cancelled jobs | 90 days |
//! | consumed signals | 7 days |
//!
//! Checkpoints and signals of a deleted job go with it. [`Retention::disabled`] stops all of it, [`Retention::custom`]
//! sets windows of your own (one that you leave out is off, and keeps that kind for ever), and
//! [`retention::plan`] says beforehand what would go. A job stays past its window while an unfinished job of its
//! workflow, or a deduplication window that has not passed, needs it. Passed deduplication windows are swept every
//! hour whatever the policy is; [`UniqueLockSweep::disabled`] stops that.
//!
//! # What is here
//!
//! Storages ([`postgres`], [`sqlite`]) with their schema; enqueueing with deduplication; what a worker needs of a
//! storage (claims, and the outcomes that only the owner of a claim may write); what an operator does (cancel, pause, requeue,
//! delete, purge, dead letters); and [`retention`], whose loops are
//! plain futures. There is no worker in the crate: whoever runs jobs spawns those loops.

#![deny(missing_docs, unreachable_pub)]
#![cfg_attr(
    not(any(feature = "postgres", feature = "sqlite")),
    allow(dead_code, unused_imports, reason = "much is read by the built-in storages alone")
)]

mod control;
mod enqueue;
mod error;
mod forward;
mod job;
pub mod limits;
mod outcome;
pub mod retention;
mod storage;
mod unique;

pub use control::{DeadLetterFilter, PurgeStatus};
pub use enqueue::{EnqueueOptions, Enqueued, NewJob};
pub use error::Error;
pub use forward::Forwarding;
pub use job::{Claim, Determinism, DispatchToken, Job, JobId, JobStatus, TerminalStatus};
pub use limits::{JobType, QueueName, WorkerId};
pub use outcome::{ClaimRequest, Completion, DeadLetterReason, Failure, QueueShare, Reclaim, Reclaimed};
pub use retention::{Retention, UniqueLockSweep};
#[cfg(feature = "postgres")]
pub use storage::postgres::{self, PostgresStorage};
#[cfg(feature = "sqlite")]
pub use storage::sqlite::{self, SqliteStorage};
pub use storage::{
    BatchCompletion, DeadLetterStore, KindPlan, Migrated, Protection, RetentionPlanStore, RetentionStore,
    SignalRetentionStore, Storage, UniqueLockStore, WindowedEnqueue,
};
