//! Jobs in one SQLite file: times are microseconds since 1970, ids are 16 bytes.

mod checkpoints;
mod claim;
mod control;
mod dead_letters;
mod enqueue;
mod fan_out;
mod fleet;
mod gate;
mod list;
mod migrate;
mod retention;
mod row;
mod schedule;
mod threads;
mod waits;

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;

pub use self::checkpoints::save_checkpoint_in;
pub use self::enqueue::enqueue_in;
pub use self::retention::RETENTION_CHOICE;
use self::threads::{Readers, Writer};
use crate::control::PurgeStatus;
use crate::enqueue::{Enqueued, NewJob};
use crate::error::Error;
use crate::fan_out::FanOutStore;
use crate::job::{Claim, Job, JobId};
use crate::limits::{QueueName, WorkerId, check_text};
use crate::list::ListStore;
use crate::outcome::{ClaimRequest, Completion, DeadLetterReason, Failure, Reclaim, Reclaimed};
use crate::schedule::ScheduleStore;
use crate::storage::{
    BatchCompletion, Checkpoint, CheckpointStore, DeadLetterStore, GateStore, LeaseStore, Migrated, OwnershipStore,
    Received, RetentionPlanStore, RetentionStore, SignalRetentionStore, SignalStore, Slept, Storage, TimerStore,
    UniqueLockStore, Until, WakeStore, WindowedEnqueue, Woken,
};
use crate::wake::{Subscription, WakeHub};

/// Jobs in a SQLite file. Cheap to clone: clones share the connections.
///
/// All writes go through one thread, which puts what arrives together into one transaction. The file may be used by
/// several processes; each waits up to 5 seconds for the others.
#[derive(Clone)]
pub struct SqliteStorage {
    writer: Writer,
    readers: Readers,
    hub: WakeHub,
}

impl SqliteStorage {
    /// Opens the file, which is made if it is not there.
    ///
    /// # Errors
    /// [`Error::Storage`] if it cannot be opened or is no database.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let writer = Writer::start(path.as_ref())?;
        Ok(Self { writer, readers: Readers::new(path.as_ref()), hub: WakeHub::new() })
    }
}

#[async_trait]
impl Storage for SqliteStorage {
    async fn migrate(&self) -> Result<Migrated, Error> {
        self.writer.run(migrate::migrate).await
    }

    async fn now(&self) -> Result<Timestamp, Error> {
        self.readers.run(|db| row::time(row::now(db)?)).await
    }

    async fn job(&self, id: JobId) -> Result<Option<Job>, Error> {
        self.readers.run(move |db| row::find(db, id)).await
    }

    async fn enqueue(&self, job: &NewJob) -> Result<JobId, Error> {
        if job.is_windowed() {
            return Err(Error::StorageNoUniqueLocks);
        }
        let job = job.clone();
        self.writer.run(move |db| enqueue::enqueue(db, &job)).await.map(Enqueued::id)
    }

    async fn enqueue_batch(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, Error> {
        let jobs = jobs.to_vec();
        self.writer.run(move |db| enqueue::enqueue_batch(db, &jobs)).await
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Vec<Job>, Error> {
        let request = request.clone();
        self.writer.run(move |db| claim::claim(db, &request)).await
    }

    async fn heartbeat(&self, claim: &Claim, lease: Duration) -> Result<(), Error> {
        let claim = claim.clone();
        self.writer.run(move |db| claim::heartbeat(db, &claim, lease)).await
    }

    async fn complete(&self, completion: &Completion) -> Result<(), Error> {
        let completion = completion.clone();
        let id = completion.claim.job_id;
        let done = self.writer.run(move |db| claim::complete(db, &[completion])).await?;
        if done == [true] { Ok(()) } else { Err(Error::JobNotOwned(id)) }
    }

    async fn retry(&self, claim: &Claim, failure: &Failure, delay: Duration) -> Result<(), Error> {
        let (claim, failure) = (claim.clone(), failure.clone());
        self.writer.run(move |db| claim::retry(db, &claim, &failure, delay)).await
    }

    async fn fail(&self, claim: &Claim, failure: &Failure, reason: DeadLetterReason) -> Result<(), Error> {
        let (claim, failure) = (claim.clone(), failure.clone());
        self.writer.run(move |db| claim::fail(db, &claim, &failure, reason)).await
    }

    async fn release(&self, claim: &Claim) -> Result<(), Error> {
        let claim = claim.clone();
        self.writer.run(move |db| claim::release(db, &claim)).await
    }

    async fn reclaim(&self, reclaim: &Reclaim) -> Result<Vec<Reclaimed>, Error> {
        let reclaim = *reclaim;
        self.writer.run(move |db| claim::reclaim(db, &reclaim)).await
    }

    async fn cancel(&self, id: JobId) -> Result<u64, Error> {
        self.writer.run(move |db| control::cancel(db, id)).await
    }

    async fn pause(&self, id: JobId) -> Result<(), Error> {
        self.writer.run(move |db| control::pause(db, id)).await
    }

    async fn resume(&self, id: JobId) -> Result<(), Error> {
        self.writer.run(move |db| control::resume(db, id)).await
    }

    async fn requeue(&self, id: JobId) -> Result<(), Error> {
        self.writer.run(move |db| control::requeue(db, id)).await
    }

    async fn delete(&self, id: JobId) -> Result<(), Error> {
        self.writer.run(move |db| control::delete(db, id)).await
    }

    async fn delete_workflow(&self, root: JobId) -> Result<u64, Error> {
        self.writer.run(move |db| control::delete_workflow(db, root)).await
    }

    async fn purge(&self, queue: &QueueName, status: PurgeStatus, limit: u32) -> Result<u64, Error> {
        let queue = queue.clone();
        self.writer.run(move |db| control::purge(db, &queue, status, limit)).await
    }

    async fn pause_queue(&self, queue: &QueueName, by: &str) -> Result<(), Error> {
        check_text("by", by)?;
        let (queue, by) = (queue.clone(), by.to_owned());
        self.writer.run(move |db| control::set_queue_paused(db, &queue, true, &by)).await
    }

    async fn resume_queue(&self, queue: &QueueName) -> Result<(), Error> {
        let queue = queue.clone();
        self.writer.run(move |db| control::set_queue_paused(db, &queue, false, "")).await
    }

    async fn paused_queues(&self) -> Result<Vec<QueueName>, Error> {
        self.readers.run(control::paused_queues).await
    }

    fn dead_letters(&self) -> Option<&dyn DeadLetterStore> {
        Some(self)
    }

    fn batch_completion(&self) -> Option<&dyn BatchCompletion> {
        Some(self)
    }

    fn deletes_checkpoints(&self) -> bool {
        true
    }

    fn fan_outs(&self) -> Option<&dyn FanOutStore> {
        Some(self)
    }

    fn schedules(&self) -> Option<&dyn ScheduleStore> {
        Some(self)
    }

    fn lists(&self) -> Option<&dyn ListStore> {
        Some(self)
    }

    fn retention(&self) -> Option<&dyn RetentionStore> {
        Some(self)
    }

    fn signal_retention(&self) -> Option<&dyn SignalRetentionStore> {
        Some(self)
    }

    fn retention_plan(&self) -> Option<&dyn RetentionPlanStore> {
        Some(self)
    }

    fn unique_locks(&self) -> Option<&dyn UniqueLockStore> {
        Some(self)
    }

    fn windowed_enqueue(&self) -> Option<&dyn WindowedEnqueue> {
        Some(self)
    }

    fn checkpoints(&self) -> Option<&dyn CheckpointStore> {
        Some(self)
    }

    fn signals(&self) -> Option<&dyn SignalStore> {
        Some(self)
    }

    fn timers(&self) -> Option<&dyn TimerStore> {
        Some(self)
    }

    fn ownership(&self) -> Option<&dyn OwnershipStore> {
        Some(self)
    }

    fn leases(&self) -> Option<&dyn LeaseStore> {
        Some(self)
    }

    fn gates(&self) -> Option<&dyn GateStore> {
        Some(self)
    }

    fn wake(&self) -> Option<&dyn WakeStore> {
        Some(self)
    }
}

#[async_trait]
impl WindowedEnqueue for SqliteStorage {
    async fn enqueue_windowed(&self, job: &NewJob) -> Result<Enqueued, Error> {
        let job = job.clone();
        self.writer.run(move |db| enqueue::enqueue(db, &job)).await
    }
}

#[async_trait]
impl BatchCompletion for SqliteStorage {
    async fn complete_batch(&self, completions: &[Completion]) -> Result<Vec<bool>, Error> {
        let completions = completions.to_vec();
        self.writer.run(move |db| claim::complete(db, &completions)).await
    }
}

#[async_trait]
impl CheckpointStore for SqliteStorage {
    async fn load(&self, job: JobId) -> Result<Vec<Checkpoint>, Error> {
        self.readers.run(move |db| checkpoints::load(db, job)).await
    }

    async fn save(&self, claim: &Claim, checkpoint: &Checkpoint) -> Result<(), Error> {
        let (claim, checkpoint) = (claim.clone(), checkpoint.clone());
        self.writer.run(move |db| checkpoints::save(db, &claim, &checkpoint)).await
    }

    async fn forget(&self, claim: &Claim, call_index: i32, call_type: &str) -> Result<(), Error> {
        let (claim, call_type) = (claim.clone(), call_type.to_owned());
        self.writer.run(move |db| checkpoints::forget(db, &claim, call_index, &call_type)).await
    }
}

#[async_trait]
impl SignalStore for SqliteStorage {
    async fn send(&self, job: JobId, name: &str, payload: &[u8]) -> Result<(), Error> {
        let (name, payload) = (name.to_owned(), payload.to_vec());
        self.writer.run(move |db| waits::send(db, job, &name, &payload)).await
    }

    async fn wake(&self, job: JobId, name: &str) -> Result<Option<QueueName>, Error> {
        let name = name.to_owned();
        self.writer.run(move |db| waits::wake(db, job, &name)).await
    }

    async fn receive(
        &self, claim: &Claim, call_index: i32, name: &str, timeout: Option<Duration>,
    ) -> Result<Received, Error> {
        let (claim, name) = (claim.clone(), name.to_owned());
        self.writer.run(move |db| waits::receive(db, &claim, call_index, &name, timeout)).await
    }

    async fn peek(&self, job: JobId, name: &str) -> Result<Option<Vec<u8>>, Error> {
        let name = name.to_owned();
        self.readers.run(move |db| waits::peek(db, job, &name)).await
    }

    async fn drain(&self, claim: &Claim, call_index: i32, name: &str) -> Result<Vec<Vec<u8>>, Error> {
        let (claim, name) = (claim.clone(), name.to_owned());
        self.writer.run(move |db| waits::drain(db, &claim, call_index, &name)).await
    }
}

#[async_trait]
impl TimerStore for SqliteStorage {
    async fn sleep(&self, claim: &Claim, call_index: i32, until: Until) -> Result<Slept, Error> {
        let claim = claim.clone();
        self.writer.run(move |db| waits::sleep(db, &claim, call_index, until)).await
    }

    async fn wake_due(&self, limit: u32) -> Result<Woken, Error> {
        self.writer.run(move |db| waits::wake_due(db, limit)).await
    }

    async fn wake_signalled(&self, after: Option<JobId>, limit: u32) -> Result<(Woken, Option<JobId>), Error> {
        self.writer.run(move |db| waits::wake_signalled(db, after, limit)).await
    }
}

#[async_trait]
impl OwnershipStore for SqliteStorage {
    async fn lost(&self, claims: &[Claim]) -> Result<Vec<JobId>, Error> {
        let claims = claims.to_vec();
        self.readers.run(move |db| fleet::lost(db, &claims)).await
    }
}

#[async_trait]
impl LeaseStore for SqliteStorage {
    async fn acquire(&self, name: &str, owner: &WorkerId, length: Duration) -> Result<bool, Error> {
        let (name, owner) = (name.to_owned(), owner.clone());
        self.writer.run(move |db| fleet::acquire(db, &name, &owner, length)).await
    }

    async fn release(&self, name: &str, owner: &WorkerId) -> Result<(), Error> {
        let (name, owner) = (name.to_owned(), owner.clone());
        self.writer.run(move |db| fleet::release(db, &name, &owner)).await
    }
}

impl WakeStore for SqliteStorage {
    fn announce(&self, queue: &QueueName) {
        self.hub.tell(queue.as_str());
    }

    fn subscribe(&self, queues: &[QueueName]) -> Subscription {
        self.hub.subscribe(queues)
    }

    fn reaches_other_processes(&self) -> bool {
        false
    }
}
