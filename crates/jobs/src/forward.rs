//! A decorator that passes everything on: the base of those that watch, slow down or break a storage.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;

use crate::control::PurgeStatus;
use crate::enqueue::{Enqueued, NewJob};
use crate::error::Error;
use crate::fan_out::FanOutStore;
use crate::job::{Claim, Job, JobId};
use crate::limits::QueueName;
use crate::list::ListStore;
use crate::outcome::{ClaimRequest, Completion, DeadLetterReason, Failure, Reclaim, Reclaimed};
use crate::schedule::ScheduleStore;
use crate::storage::{
    BatchCompletion, CheckpointStore, DeadLetterStore, GateStore, LeaseStore, Migrated, OwnershipStore,
    RetentionPlanStore, RetentionStore, SignalRetentionStore, SignalStore, Storage, TimerStore, UniqueLockStore,
    WakeStore, WindowedEnqueue,
};

/// A storage that passes every call and every capability on to another one.
///
/// A decorator of your own holds one of these and forwards what it does not change. An accessor that it forgets to
/// forward turns that capability off: with retention forgotten, nothing is ever deleted.
#[derive(Clone)]
pub struct Forwarding {
    inner: Arc<dyn Storage>,
}

impl Forwarding {
    /// Passes on to `inner`.
    pub fn new(inner: Arc<dyn Storage>) -> Self {
        Self { inner }
    }
}

#[async_trait]
impl Storage for Forwarding {
    async fn migrate(&self) -> Result<Migrated, Error> {
        self.inner.migrate().await
    }

    async fn now(&self) -> Result<Timestamp, Error> {
        self.inner.now().await
    }

    async fn job(&self, id: JobId) -> Result<Option<Job>, Error> {
        self.inner.job(id).await
    }

    async fn enqueue(&self, job: &NewJob) -> Result<JobId, Error> {
        self.inner.enqueue(job).await
    }

    async fn enqueue_batch(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, Error> {
        self.inner.enqueue_batch(jobs).await
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Vec<Job>, Error> {
        self.inner.claim(request).await
    }

    async fn heartbeat(&self, claim: &Claim, lease: Duration) -> Result<(), Error> {
        self.inner.heartbeat(claim, lease).await
    }

    async fn complete(&self, completion: &Completion) -> Result<(), Error> {
        self.inner.complete(completion).await
    }

    async fn retry(&self, claim: &Claim, failure: &Failure, delay: Duration) -> Result<(), Error> {
        self.inner.retry(claim, failure, delay).await
    }

    async fn fail(&self, claim: &Claim, failure: &Failure, reason: DeadLetterReason) -> Result<(), Error> {
        self.inner.fail(claim, failure, reason).await
    }

    async fn release(&self, claim: &Claim) -> Result<(), Error> {
        self.inner.release(claim).await
    }

    async fn reclaim(&self, reclaim: &Reclaim) -> Result<Vec<Reclaimed>, Error> {
        self.inner.reclaim(reclaim).await
    }

    async fn cancel(&self, id: JobId) -> Result<u64, Error> {
        self.inner.cancel(id).await
    }

    async fn pause(&self, id: JobId) -> Result<(), Error> {
        self.inner.pause(id).await
    }

    async fn resume(&self, id: JobId) -> Result<(), Error> {
        self.inner.resume(id).await
    }

    async fn requeue(&self, id: JobId) -> Result<(), Error> {
        self.inner.requeue(id).await
    }

    async fn delete(&self, id: JobId) -> Result<(), Error> {
        self.inner.delete(id).await
    }

    async fn delete_workflow(&self, root: JobId) -> Result<u64, Error> {
        self.inner.delete_workflow(root).await
    }

    async fn purge(&self, queue: &QueueName, status: PurgeStatus, limit: u32) -> Result<u64, Error> {
        self.inner.purge(queue, status, limit).await
    }

    async fn pause_queue(&self, queue: &QueueName, by: &str) -> Result<(), Error> {
        self.inner.pause_queue(queue, by).await
    }

    async fn resume_queue(&self, queue: &QueueName) -> Result<(), Error> {
        self.inner.resume_queue(queue).await
    }

    async fn paused_queues(&self) -> Result<Vec<QueueName>, Error> {
        self.inner.paused_queues().await
    }

    fn dead_letters(&self) -> Option<&dyn DeadLetterStore> {
        self.inner.dead_letters()
    }

    fn batch_completion(&self) -> Option<&dyn BatchCompletion> {
        self.inner.batch_completion()
    }

    fn deletes_checkpoints(&self) -> bool {
        self.inner.deletes_checkpoints()
    }

    fn fan_outs(&self) -> Option<&dyn FanOutStore> {
        self.inner.fan_outs()
    }

    fn schedules(&self) -> Option<&dyn ScheduleStore> {
        self.inner.schedules()
    }

    fn lists(&self) -> Option<&dyn ListStore> {
        self.inner.lists()
    }

    fn retention(&self) -> Option<&dyn RetentionStore> {
        self.inner.retention()
    }

    fn signal_retention(&self) -> Option<&dyn SignalRetentionStore> {
        self.inner.signal_retention()
    }

    fn retention_plan(&self) -> Option<&dyn RetentionPlanStore> {
        self.inner.retention_plan()
    }

    fn unique_locks(&self) -> Option<&dyn UniqueLockStore> {
        self.inner.unique_locks()
    }

    fn windowed_enqueue(&self) -> Option<&dyn WindowedEnqueue> {
        self.inner.windowed_enqueue()
    }

    fn checkpoints(&self) -> Option<&dyn CheckpointStore> {
        self.inner.checkpoints()
    }

    fn signals(&self) -> Option<&dyn SignalStore> {
        self.inner.signals()
    }

    fn timers(&self) -> Option<&dyn TimerStore> {
        self.inner.timers()
    }

    fn ownership(&self) -> Option<&dyn OwnershipStore> {
        self.inner.ownership()
    }

    fn leases(&self) -> Option<&dyn LeaseStore> {
        self.inner.leases()
    }

    fn wake(&self) -> Option<&dyn WakeStore> {
        self.inner.wake()
    }

    fn gates(&self) -> Option<&dyn GateStore> {
        self.inner.gates()
    }
}
