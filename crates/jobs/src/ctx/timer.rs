//! Sleeps that occupy no worker.

use std::time::Duration;

use jiff::Timestamp;

use super::Ctx;
use super::call::Replay;
use super::signal::is_elapsed;
use crate::error::Error;
use crate::job_error::JobError;
use crate::storage::run::SLEEP;
use crate::storage::{Checkpoint, Slept, Until};

impl Ctx {
    /// Lets the job wait for `duration`, from the first call and on the database's clock. It is woken within about 5
    /// seconds after that. No signal wakes it earlier.
    ///
    /// # Errors
    /// A suspension, which has to be passed on.
    pub async fn sleep(&self, duration: Duration) -> Result<(), JobError> {
        self.sleeps(Until::After(duration)).await
    }

    /// Lets the job wait until a time; one in the past has come already.
    ///
    /// # Errors
    /// As [`Ctx::sleep`].
    pub async fn sleep_until(&self, at: Timestamp) -> Result<(), JobError> {
        self.sleeps(Until::At(at)).await
    }

    async fn sleeps(&self, until: Until) -> Result<(), JobError> {
        let is_over = |record: &Checkpoint| is_elapsed(record) || self.has_passed(record);
        let Replay::Fresh(index) = self.next_place(&[SLEEP], is_over).await? else { return Ok(()) };
        let timers = self.0.queue.storage().timers().ok_or(Error::Unsupported("timers"))?;
        match timers.sleep(&self.0.claim, index, until).await? {
            Slept::Elapsed => Ok(()),
            Slept::Suspended => Err(self.suspended()),
        }
    }

    /// Whether the recorded deadline lies before the claim, by the same clock: no need to ask again.
    fn has_passed(&self, record: &Checkpoint) -> bool {
        let text = record.result.as_deref().and_then(|text| std::str::from_utf8(text).ok());
        let deadline = text.and_then(|text| text.parse().ok()).and_then(|us| Timestamp::from_microsecond(us).ok());
        deadline.zip(self.0.job.started_at).is_some_and(|(deadline, started_at)| deadline <= started_at)
    }
}
