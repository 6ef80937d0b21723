//! What every storage must do: one suite, run on PostgreSQL and on SQLite.
#![allow(clippy::unwrap_used, reason = "a case fails at the line that was wrong")]
#![allow(dead_code, unreachable_pub, reason = "the support module is shared by suites that use parts of it")]

#[macro_use]
#[path = "support/store.rs"]
mod support;
#[path = "support/log.rs"]
mod log;
#[path = "support/rows.rs"]
mod rows;

#[path = "storage/claim.rs"]
mod claim;
#[path = "storage/control.rs"]
mod control;
#[path = "storage/dead_letters.rs"]
mod dead_letters;
#[path = "storage/enqueue.rs"]
mod enqueue;
#[path = "storage/fan_out.rs"]
mod fan_out;
#[path = "storage/fan_out_recovery.rs"]
mod fan_out_recovery;
#[path = "storage/list.rs"]
mod list;
#[path = "storage/outcome.rs"]
mod outcome;
#[path = "storage/plan.rs"]
mod plan;
#[path = "storage/protection.rs"]
mod protection;
#[path = "storage/retention.rs"]
mod retention;
#[path = "storage/schedule.rs"]
mod schedule;
#[path = "storage/schema.rs"]
mod schema;
#[path = "storage/sweeper.rs"]
mod sweeper;
#[path = "storage/tick.rs"]
mod tick;
#[path = "storage/transaction.rs"]
mod transaction;
#[path = "storage/unique.rs"]
mod unique;
