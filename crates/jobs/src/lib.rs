//! Durable background jobs in your own process, on PostgreSQL or SQLite.
//!
//! # What is deleted by default, and how to stop it
//!
//! Nothing: rows stay until you delete them. [`limits`] names the windows of the stock policy, which belongs to the
//! worker.
//!
//! # What is here
//!
//! Storages ([`postgres`], [`sqlite`]) with their schema, enqueueing with deduplication, and what a
//! worker needs of a storage: claims, and the outcomes that only the owner of a claim may write. The worker that runs
//! jobs, and the retention that comes with it, are not part of the crate.

#![deny(missing_docs, unreachable_pub)]
#![cfg_attr(
    not(any(feature = "postgres", feature = "sqlite")),
    allow(dead_code, unused_imports, reason = "much is read by the built-in storages alone")
)]

mod enqueue;
mod error;
mod forward;
mod job;
pub mod limits;
mod outcome;
mod storage;
mod unique;

pub use enqueue::{EnqueueOptions, Enqueued, NewJob};
pub use error::Error;
pub use forward::Forwarding;
pub use job::{Claim, Determinism, DispatchToken, Job, JobId, JobStatus, TerminalStatus};
pub use limits::{JobType, QueueName, WorkerId};
pub use outcome::{ClaimRequest, Completion, DeadLetterReason, Failure, QueueShare, Reclaim, Reclaimed};
#[cfg(feature = "postgres")]
pub use storage::postgres::{self, PostgresStorage};
#[cfg(feature = "sqlite")]
pub use storage::sqlite::{self, SqliteStorage};
pub use storage::{BatchCompletion, Migrated, Storage, WindowedEnqueue};
