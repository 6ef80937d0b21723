//! What a running handler asks of a storage: records of its steps, signals, and waits.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;

use crate::error::Error;
use crate::job::{Claim, JobId};
use crate::limits::QueueName;

/// The name under which a sleeping job waits: no signal can have it.
pub(crate) const WAITS_FOR_TIME: &str = "_sleep";
/// Records of a sleep.
pub(crate) const SLEEP: &str = "_sleep";
/// Records of a signal that was received; its name follows.
pub(crate) const SIGNAL: &str = "signal:";
/// Records of the deadline of a wait; the signal's name follows.
pub(crate) const SIGNAL_TIMEOUT: &str = "signaltimeout:";
/// Records of a look at a signal; its name follows.
pub(crate) const SIGNAL_PEEK: &str = "signalpeek:";
/// Records of signals that were taken all at once; their name follows.
pub(crate) const SIGNAL_DRAIN: &str = "signaldrain:";
/// The kind of a deadline's record once the wait is over.
pub(crate) const ELAPSED: &str = "elapsed";
/// Most signals that one drain takes.
pub(crate) const DRAIN_MAX: i64 = 1000;

/// The failure of a step that is not to be run again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredError {
    /// The text.
    pub text: String,
    /// `no_retry`, `retry_after` or `sentinel`.
    pub kind: String,
    /// The stable key of a `sentinel`.
    pub cause: Option<String>,
    /// The wait of a `retry_after`.
    pub delay: Option<Duration>,
}

/// The record of a finished step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its place in the run, counted from 0; −1 for phases and versions.
    pub call_index: i32,
    /// Its name.
    pub call_type: String,
    /// What it returned, as stored.
    pub result: Option<Vec<u8>>,
    /// How it failed for good.
    pub error: Option<StoredError>,
    /// The place after it and everything that it called.
    pub span_end: i32,
    /// The structure of the result's type; empty if unknown.
    pub result_shape: String,
}

/// The capability to record steps. Without it every attempt starts from nothing.
#[async_trait]
pub trait CheckpointStore: Send + Sync {
    /// The records of a job, by place.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    async fn load(&self, job: JobId) -> Result<Vec<Checkpoint>, Error>;

    /// Writes a record, over one of the same place and name.
    ///
    /// # Errors
    /// [`Error::JobNotOwned`] if the claim is over; nothing is written then.
    async fn save(&self, claim: &Claim, checkpoint: &Checkpoint) -> Result<(), Error>;

    /// Deletes the record of one place and name.
    ///
    /// # Errors
    /// [`Error::JobNotOwned`] if the claim is over; nothing is deleted then.
    async fn forget(&self, claim: &Claim, call_index: i32, call_type: &str) -> Result<(), Error>;
}

/// What became of a wait for a signal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received {
    /// The oldest pending signal was consumed; its payload as it was sent.
    Signal(Vec<u8>),
    /// The deadline passed before one was sent.
    TimedOut,
    /// There is none: the job waits, and the claim is over.
    Suspended,
}

/// The capability to send signals to jobs.
#[async_trait]
pub trait SignalStore: Send + Sync {
    /// Stores a pending signal, whatever the job is doing.
    ///
    /// # Errors
    /// [`Error::JobNotFound`] if there is no such job, or it is deleted at this moment; nothing is stored then.
    async fn send(&self, job: JobId, name: &str, payload: &[u8]) -> Result<(), Error>;

    /// Makes a job pending that waits for this signal, or for one whose name is not known. Answers its queue;
    /// `None` if it did not wait for it.
    ///
    /// # Errors
    /// If the storage failed; the job is then woken by [`TimerStore::wake_signalled`].
    async fn wake(&self, job: JobId, name: &str) -> Result<Option<QueueName>, Error>;

    /// Consumes the oldest pending signal of the name and records it, in one transaction, or suspends the job until
    /// one is sent. With `timeout`, measured from the first call on the storage's clock, a signal that was sent after
    /// the deadline stays pending.
    ///
    /// # Errors
    /// [`Error::JobNotOwned`] if the claim is over; nothing is consumed then.
    async fn receive(
        &self, claim: &Claim, call_index: i32, name: &str, timeout: Option<Duration>,
    ) -> Result<Received, Error>;

    /// The payload of the oldest pending signal of the name, which stays pending.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    async fn peek(&self, job: JobId, name: &str) -> Result<Option<Vec<u8>>, Error>;

    /// Consumes the pending signals of the name, at most 1000 of them, oldest first, and records them, in one
    /// transaction. An empty answer is recorded as well.
    ///
    /// # Errors
    /// [`Error::JobNotOwned`] if the claim is over; nothing is consumed then.
    async fn drain(&self, claim: &Claim, call_index: i32, name: &str) -> Result<Vec<Vec<u8>>, Error>;
}

/// Until when a job sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// This long from the first call, on the storage's clock.
    After(Duration),
    /// This time.
    At(Timestamp),
}

/// What became of a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slept {
    /// It is over.
    Elapsed,
    /// The job waits, and the claim is over.
    Suspended,
}

/// Jobs that were made pending again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Woken {
    /// How many.
    pub jobs: u64,
    /// Their queues, each once.
    pub queues: Vec<QueueName>,
}

/// The capability to suspend a job until a time, and to wake what has waited for long enough.
#[async_trait]
pub trait TimerStore: Send + Sync {
    /// Records a deadline at its first call, and suspends the job until then if it has not come yet, in one
    /// transaction.
    ///
    /// # Errors
    /// [`Error::JobNotOwned`] if the claim is over; nothing is written then.
    async fn sleep(&self, claim: &Claim, call_index: i32, until: Until) -> Result<Slept, Error>;

    /// Wakes at most `limit` jobs whose deadline has come.
    ///
    /// # Errors
    /// If the storage failed; none is woken then.
    async fn wake_due(&self, limit: u32) -> Result<Woken, Error>;

    /// Looks at at most `limit` waiting jobs, by id, after `after`, and wakes those that have a pending signal of the
    /// name that they wait for. Answers the last job that it looked at; `None` when there are no more.
    ///
    /// # Errors
    /// If the storage failed; none is woken then.
    async fn wake_signalled(&self, after: Option<JobId>, limit: u32) -> Result<(Woken, Option<JobId>), Error>;
}

/// Payloads in one value: each is preceded by its length.
pub(crate) fn pack(payloads: &[Vec<u8>]) -> Vec<u8> {
    let mut packed = Vec::with_capacity(payloads.iter().map(|payload| payload.len() + 4).sum());
    for payload in payloads {
        let length = u32::try_from(payload.len()).expect("a payload is at most 1 MiB");
        packed.extend_from_slice(&length.to_be_bytes());
        packed.extend_from_slice(payload);
    }
    packed
}

/// The payloads that were packed into a value.
pub(crate) fn unpack(mut packed: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
    let torn = || Error::Corrupt("a drain's record is torn".to_owned());
    let mut payloads = Vec::new();
    while !packed.is_empty() {
        let (length, rest) = packed.split_first_chunk::<4>().ok_or_else(torn)?;
        let length = u32::from_be_bytes(*length) as usize;
        let (payload, rest) = rest.split_at_checked(length).ok_or_else(torn)?;
        payloads.push(payload.to_vec());
        packed = rest;
    }
    Ok(payloads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_payloads_come_back_and_torn_ones_do_not() {
        for payloads in [vec![], vec![vec![]], vec![b"a".to_vec(), vec![], b"bc".to_vec()]] {
            assert_eq!(unpack(&pack(&payloads)).unwrap(), payloads);
        }
        assert!(unpack(&[0, 0, 0, 2, 1]).is_err());
        assert!(unpack(&[0, 0]).is_err());
    }
}
