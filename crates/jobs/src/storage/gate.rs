//! What limits of a whole fleet need of a storage.

use std::time::Duration;

use async_trait::async_trait;

use crate::error::Error;
use crate::gate::Rated;
use crate::job::Claim;

/// The capability to count jobs of a whole fleet.
#[async_trait]
pub trait GateStore: Send + Sync {
    /// Takes one of `limit` slots of this name for a claimed job, for `ttl`. False if all are taken by other jobs; a
    /// slot whose time is over is not.
    ///
    /// # Errors
    /// If the storage failed; no slot is taken then.
    async fn take_slot(&self, name: &str, limit: u32, claim: &Claim, ttl: Duration) -> Result<bool, Error>;

    /// Lets go of the slots of a job, if this worker took them.
    ///
    /// # Errors
    /// If the storage failed; the slots then end by themselves.
    async fn free_slots(&self, claim: &Claim) -> Result<(), Error>;

    /// Makes the slots of a job last `ttl` from here, if this worker took them.
    ///
    /// # Errors
    /// If the storage failed.
    async fn renew_slots(&self, claim: &Claim, ttl: Duration) -> Result<(), Error>;

    /// Deletes at most `limit` slots whose time is over. Answers how many.
    ///
    /// # Errors
    /// If the storage failed; none is deleted then.
    async fn sweep_slots(&self, limit: u32) -> Result<u64, Error>;

    /// Counts one job in the present span of `seconds` of this name, unless it has `limit` already. Earlier spans of
    /// the name are deleted.
    ///
    /// # Errors
    /// If the storage failed; nothing is counted then.
    async fn take_rate(&self, name: &str, limit: i64, seconds: u32) -> Result<Rated, Error>;

    /// Takes back one job from a span.
    ///
    /// # Errors
    /// If the storage failed.
    async fn refund_rate(&self, name: &str, span: i64) -> Result<(), Error>;

    /// Gives a claimed job back that was not run: it is pending again after `delay`, and the attempt does not count.
    ///
    /// # Errors
    /// [`Error::JobNotOwned`] if the claim is over; nothing is written then.
    async fn put_back(&self, claim: &Claim, delay: Duration) -> Result<(), Error>;
}
