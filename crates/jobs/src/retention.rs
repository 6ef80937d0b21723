//! What is deleted without being asked for, when, and how to stop it.

mod pass;
mod plan;
mod policy;
mod sweeper;
mod ticker;

pub use pass::{CONSUMED_SIGNALS, EXPIRED_LOCKS, run_once, run_unique_locks_once};
pub use plan::{Plan, plan};
pub use policy::{Retention, UniqueLockSweep};
pub use sweeper::{RetentionSweeper, UniqueLockSweeper};
pub use ticker::{SweepTicker, Ticker};
