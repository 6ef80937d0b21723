//! The deletion engine: it knows time and batches, and knows no table.
//!
//! - [`drain`] repeats one bounded step until nothing is left to delete.
//! - [`LeaderGate`] lets one process at a time run a cycle; `AdvisoryGate` (feature `postgres`) elects it
//!   with a session advisory lock.
//! - [`run_every`] and [`Pace`] start the cycles; [`Every`] gives a phase a slower clock of its own.
//! - [`Batch`] fits the size of steps to how long they hold a lock; [`Throttle`] spaces them by what they do to
//!   whoever else uses the database.
//! - [`Report`] says what a cycle deleted, what it kept and why.
//!
//! A sweep is cancelled by its token and stops between two steps. Dropping its future is safe, never
//! clean: a step in flight may or may not have committed, and a leader's session is closed with it.

#![deny(missing_docs, unreachable_pub)]

mod batch;
mod drain;
mod gate;
mod pace;
mod report;
mod throttle;

pub use batch::Batch;
pub use drain::{Drained, End, StepOutcome, drain};
#[cfg(feature = "postgres")]
pub use gate::advisory::{AdvisoryGate, AdvisorySession, ConnectError, Connected, GateError};
pub use gate::{LeaderGate, Led};
pub use pace::{Every, LineLimit, Pace, pause, run_every};
pub use report::{PhaseReport, Report};
pub use throttle::{HeldBack, Pressure, Throttle};
