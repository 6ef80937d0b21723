//! Waits for what others send to the job.

use std::time::Duration;

use serde::de::DeserializeOwned;

use super::call::{Replay, parse};
use super::{Ctx, lock};
use crate::codec;
use crate::error::Error;
use crate::job_error::JobError;
use crate::limits::check_text;
use crate::storage::run::{ELAPSED, SIGNAL, SIGNAL_DRAIN, SIGNAL_PEEK, SIGNAL_TIMEOUT, unpack};
use crate::storage::{Checkpoint, Received, SignalStore};

/// A record's name has a prefix before the signal's.
const SIGNAL_CHARS_MAX: usize = 240;

/// A name that a signal may have.
pub(crate) fn check_name(name: &str) -> Result<(), Error> {
    check_text("signal", name)?;
    if name.is_empty() || name.starts_with('_') || SIGNAL_CHARS_MAX < name.chars().count() {
        return Err(Error::invalid(
            "signal",
            "is not empty, does not start with '_', and is at most 240 characters long",
        ));
    }
    Ok(())
}

impl Ctx {
    fn signals(&self) -> Result<&dyn SignalStore, JobError> {
        let signals = self.0.queue.storage().signals();
        signals.ok_or_else(|| JobError::from(Error::Unsupported("signals")))
    }

    /// Consumes the oldest pending signal of the name, or lets the job wait for one. While it waits it occupies no
    /// worker.
    ///
    /// # Errors
    /// A suspension, which has to be passed on; [`Error::PayloadDecode`], without retries, for a payload of another
    /// type.
    pub async fn wait_signal<T: DeserializeOwned>(&self, name: &str) -> Result<T, JobError> {
        match self.wait(name, None).await? {
            Some(payload) => self.payload(name, &payload),
            // Without a deadline there is none to pass.
            None => Err(Error::Corrupt("a wait without a deadline timed out".to_owned()).into()),
        }
    }

    /// As [`Ctx::wait_signal`], and `None` once `timeout` has passed since the first call, on the database's clock. A
    /// signal that is sent later stays pending. A job that waits is woken within about 5 seconds of its deadline.
    ///
    /// # Errors
    /// As [`Ctx::wait_signal`].
    pub async fn wait_signal_timeout<T: DeserializeOwned>(
        &self, name: &str, timeout: Duration,
    ) -> Result<Option<T>, JobError> {
        match self.wait(name, Some(timeout)).await? {
            Some(payload) => self.payload(name, &payload).map(Some),
            None => Ok(None),
        }
    }

    async fn wait(&self, name: &str, timeout: Option<Duration>) -> Result<Option<Vec<u8>>, JobError> {
        check_name(name)?;
        let (received, timed) = (format!("{SIGNAL}{name}"), format!("{SIGNAL_TIMEOUT}{name}"));
        let is_over =
            |record: &Checkpoint| record.call_type == received || (record.call_type == timed && is_elapsed(record));
        let index = match self.next_place(&[&received, &timed], is_over).await? {
            Replay::Recorded(record) if record.call_type == received => {
                return Ok(Some(record.result.unwrap_or_default()));
            }
            Replay::Recorded(_) => return Ok(None),
            Replay::Fresh(index) => index,
        };
        match self.signals()?.receive(&self.0.claim, index, name, timeout).await? {
            Received::Signal(payload) => Ok(Some(payload)),
            Received::TimedOut => Ok(None),
            Received::Suspended => Err(self.suspended()),
        }
    }

    /// The next place, where a record of one of the names may stand that is not over yet.
    pub(super) async fn next_place(
        &self, names: &[&str], is_over: impl Fn(&Checkpoint) -> bool,
    ) -> Result<Replay, JobError> {
        let is_ours = |record: &Checkpoint| names.contains(&record.call_type.as_str());
        match self.replay(is_ours, names[0]).await? {
            Replay::Fresh(index) => Ok(Replay::Fresh(index)),
            Replay::Recorded(record) => {
                let index = record.call_index;
                let records = self.records().await?;
                let over = lock(records).at(index).iter().find(|record| is_over(record)).cloned();
                Ok(over.map_or(Replay::Fresh(index), Replay::Recorded))
            }
        }
    }

    fn payload<T: DeserializeOwned>(&self, name: &str, stored: &[u8]) -> Result<T, JobError> {
        let plain = codec::decode(self.0.queue.codec(), stored)?;
        parse(name, if plain.is_empty() { b"null" } else { &plain })
    }

    /// The payload of the oldest pending signal of the name, which stays pending; `None` if there is none. What it
    /// saw is recorded, so that a replay sees the same.
    ///
    /// # Errors
    /// [`Error::PayloadDecode`], without retries, for a payload of another type.
    pub async fn check_signal<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, JobError> {
        check_name(name)?;
        let call_type = format!("{SIGNAL_PEEK}{name}");
        let seen = match self.replay(|record| record.call_type == call_type, &call_type).await? {
            Replay::Recorded(record) => record.result,
            Replay::Fresh(index) => {
                let seen = self.signals()?.peek(self.0.job.id, name).await?;
                let result_shape = String::new();
                let (result, span_end) = (seen.clone(), index + 1);
                let record = Checkpoint { call_index: index, call_type, result, error: None, span_end, result_shape };
                self.save(record).await?;
                seen
            }
        };
        seen.map(|payload| self.payload(name, &payload)).transpose()
    }

    /// Consumes the pending signals of the name, oldest first and at most 1000; more stay pending for the next call.
    /// It never waits, and an empty answer is recorded too.
    ///
    /// # Errors
    /// [`Error::PayloadDecode`], without retries, for a payload of another type.
    pub async fn drain_signals<T: DeserializeOwned>(&self, name: &str) -> Result<Vec<T>, JobError> {
        check_name(name)?;
        let call_type = format!("{SIGNAL_DRAIN}{name}");
        let payloads = match self.replay(|record| record.call_type == call_type, &call_type).await? {
            Replay::Recorded(record) => unpack(record.result.as_deref().unwrap_or_default())?,
            Replay::Fresh(index) => self.signals()?.drain(&self.0.claim, index, name).await?,
        };
        payloads.iter().map(|payload| self.payload(name, payload)).collect()
    }
}

pub(super) fn is_elapsed(record: &Checkpoint) -> bool {
    record.error.as_ref().is_some_and(|error| error.kind == ELAPSED)
}
