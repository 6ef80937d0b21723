//! What a worker does with jobs, and what handlers see: one suite, run on PostgreSQL and on SQLite.
#![allow(clippy::unwrap_used, reason = "a case fails at the line that was wrong")]
#![allow(dead_code, unreachable_pub, reason = "the support module is shared by suites that use parts of it")]

#[path = "support/log.rs"]
mod log;
#[path = "support/rig.rs"]
mod rig;
#[path = "support/rows.rs"]
mod rows;
#[macro_use]
#[path = "support/store.rs"]
mod support;

#[path = "worker/around.rs"]
mod around;
#[path = "worker/fan_out.rs"]
mod fan_out;
#[path = "worker/gates.rs"]
mod gates;
#[path = "worker/outcomes.rs"]
mod outcomes;
#[path = "worker/ownership.rs"]
mod ownership;
#[path = "worker/signals.rs"]
mod signals;
#[path = "worker/steps.rs"]
mod steps;
#[path = "worker/stopping.rs"]
mod stopping;
#[path = "worker/wake.rs"]
mod wake;
