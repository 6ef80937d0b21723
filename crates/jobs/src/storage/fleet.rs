//! What workers ask of a storage so as to agree with each other.

use std::time::Duration;

use async_trait::async_trait;

use crate::error::Error;
use crate::job::{Claim, JobId};
use crate::limits::{QueueName, WorkerId};
use crate::wake::Subscription;

/// The capability to say which claims were lost.
#[async_trait]
pub trait OwnershipStore: Send + Sync {
    /// Those of the claimed jobs that were cancelled or deleted, or that another claim has. A job that has ended or
    /// waits is not among them: its own worker did that.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    async fn lost(&self, claims: &[Claim]) -> Result<Vec<JobId>, Error>;
}

/// The capability to let one worker of a fleet do something for all of them.
#[async_trait]
pub trait LeaseStore: Send + Sync {
    /// Takes or renews the lease of that name, for `length` from here on the storage's clock. False if another owner
    /// has it.
    ///
    /// # Errors
    /// If the storage failed.
    async fn acquire(&self, name: &str, owner: &WorkerId, length: Duration) -> Result<bool, Error>;

    /// Lets go of the lease, if this owner has it.
    ///
    /// # Errors
    /// If the storage failed; the lease then ends by itself.
    async fn release(&self, name: &str, owner: &WorkerId) -> Result<(), Error>;
}

/// The capability to tell idle workers that there is work. A hint: losing one costs a poll's wait and no job.
pub trait WakeStore: Send + Sync {
    /// Says, without waiting, that a job of the queue is due. To be called after the commit.
    fn announce(&self, queue: &QueueName);

    /// A subscription to what is announced about these queues from here on.
    fn subscribe(&self, queues: &[QueueName]) -> Subscription;

    /// Whether a subscription is told at this moment what other processes announce. If not, a worker has to poll
    /// more often.
    fn reaches_other_processes(&self) -> bool;
}
