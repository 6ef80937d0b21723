//! When jobs are enqueued by the clock, and the loop that does it once for the whole fleet.

mod rule;
mod scheduler;

use async_trait::async_trait;
use jiff::Timestamp;

pub use self::rule::Schedule;
pub use self::scheduler::{Scheduled, Scheduler};
use crate::enqueue::NewJob;
use crate::error::Error;
use crate::job::JobId;
use crate::limits::check_text;

/// A job that is enqueued whenever its schedule says so.
#[derive(Clone, Debug)]
pub struct ScheduledJob {
    pub(crate) name: String,
    pub(crate) schedule: Schedule,
    pub(crate) job: NewJob,
}

impl ScheduledJob {
    /// Enqueues a copy of `job` at each time of `schedule`. Workers that carry a schedule of the same name are one
    /// fleet: each time is fired by one of them. A time that comes while the copy's unique key or deduplication window
    /// is taken is skipped.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the name is empty, longer than 255 characters, or holds a NUL.
    pub fn new(name: impl Into<String>, schedule: Schedule, job: NewJob) -> Result<Self, Error> {
        let name = name.into();
        check_text("schedule", &name)?;
        if name.is_empty() {
            return Err(Error::invalid("schedule", "is not empty"));
        }
        Ok(Self { name, schedule, job })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its times.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }
}

/// A schedule as the storage holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduleState {
    /// Its name.
    pub name: String,
    /// Its times, as [`Schedule`] prints them; empty if a program of an older release wrote the row.
    pub rule: String,
    /// The type of the jobs.
    pub job_type: String,
    /// The queue of the jobs.
    pub queue: String,
    /// The last time that was taken, whether it was fired or skipped; the first look at the schedule before any was.
    pub last_fire_at: Timestamp,
    /// The last time that enqueued a job.
    pub last_fired_at: Option<Timestamp>,
    /// The next time.
    pub next_fire_at: Option<Timestamp>,
    /// Whether it was put aside.
    pub is_paused: bool,
}

/// What became of one time of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fire {
    /// The job was enqueued.
    Fired(JobId),
    /// The time was taken, and no job was enqueued: this one holds its unique key or its window.
    Skipped(JobId),
    /// Nothing was done: another worker took this time or a later one, the schedule is paused or was deleted, or the
    /// storage's clock has not come to it.
    NotTaken,
}

/// The capability to fire schedules once for a whole fleet.
#[async_trait]
pub trait ScheduleStore: Send + Sync {
    /// Makes a schedule known, or tells its new times. At the first sight of it, and when its times have changed, it
    /// begins on the storage's clock: no earlier time is fired.
    ///
    /// # Errors
    /// If the storage failed.
    async fn register(&self, job: &ScheduledJob) -> Result<ScheduleState, Error>;

    /// Takes the time `at` if nobody took it, and enqueues the job, in one transaction. `next` is kept for whoever
    /// looks.
    ///
    /// # Errors
    /// If the storage failed; the time is not taken then.
    async fn fire(&self, name: &str, at: Timestamp, next: Option<Timestamp>, job: &NewJob) -> Result<Fire, Error>;

    /// The schedules, by name.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    async fn list(&self) -> Result<Vec<ScheduleState>, Error>;

    /// Puts a schedule aside on all workers, or takes it up again. Times that come while it is paused are lost: it
    /// goes on with the first time after it was taken up. False if there is none of this name.
    ///
    /// # Errors
    /// If the storage failed.
    async fn set_paused(&self, name: &str, is_paused: bool) -> Result<bool, Error>;

    /// Forgets a schedule. A worker that carries it stops firing it, and makes it known again when it starts anew.
    /// False if there is none of this name.
    ///
    /// # Errors
    /// If the storage failed.
    async fn delete(&self, name: &str) -> Result<bool, Error>;
}
