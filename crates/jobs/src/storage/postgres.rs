//! Jobs in PostgreSQL 15 and newer, in the schema `ebbtide_jobs`.

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
mod session;
mod waits;
mod wake;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod, Timeouts};
use jiff::Timestamp;
use tokio_postgres::NoTls;
use tokio_postgres::types::Type;
use tracing::debug;

pub use self::checkpoints::save_checkpoint_in;
pub use self::enqueue::enqueue_in;
pub use self::retention::RETENTION_CHOICE;
use self::session::{Session, Sql as _};
use self::wake::Wake;
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
use crate::wake::Subscription;

/// How long a caller waits for a connection of the pool before it gets an error.
const POOL_WAIT: Duration = Duration::from_secs(30);
/// Failed fan-outs of which one failing job cancels the remaining children.
const FAIL_SETTLES_MAX: u32 = 4;

/// How statements are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Statements {
    /// Prepared once per connection. The fastest; needs sessions of its own.
    Prepared,
    /// Sent whole each time: safe behind a pooler that shares sessions between transactions.
    Unnamed,
}

/// Jobs in PostgreSQL. Cheap to clone: clones share the pool.
#[derive(Clone)]
pub struct PostgresStorage {
    pool: Pool,
    statements: Statements,
    wake: Arc<Wake>,
}

impl PostgresStorage {
    /// Opens a pool of at most `connections` (at least 1) without TLS; nothing is connected yet. For TLS make a pool
    /// of your own and use [`PostgresStorage::from_pool`].
    ///
    /// # Errors
    /// [`Error::Storage`] if `url` is no PostgreSQL URL.
    pub fn connect(url: &str, connections: usize) -> Result<Self, Error> {
        let mut config: tokio_postgres::Config = url.parse().map_err(Error::storage)?;
        if config.get_application_name().is_none() {
            config.application_name("ebbtide-jobs");
        }
        let mut listen = config.clone();
        listen.application_name("ebbtide-jobs-wake");
        let manager = Manager::from_config(config, NoTls, ManagerConfig { recycling_method: RecyclingMethod::Fast });
        let wait = Some(POOL_WAIT);
        let pool = Pool::builder(manager)
            .max_size(connections.max(1))
            .runtime(deadpool_postgres::Runtime::Tokio1)
            .timeouts(Timeouts { wait, create: wait, recycle: wait })
            .build()
            .map_err(Error::storage)?;
        let wake = Arc::new(Wake::new(Some(listen)));
        Ok(Self { pool, statements: Statements::Prepared, wake })
    }

    /// Uses a pool that the program has already. Workers of other processes are told of new jobs only with
    /// [`PostgresStorage::direct`]; without it they find them by polling.
    pub fn from_pool(pool: Pool) -> Self {
        Self { pool, statements: Statements::Prepared, wake: Arc::new(Wake::new(None)) }
    }

    /// How statements are sent. Default: [`Statements::Prepared`].
    #[must_use]
    pub fn statements(mut self, statements: Statements) -> Self {
        self.statements = statements;
        self
    }

    /// Where a session of its own can be had, for LISTEN and NOTIFY: the server itself and no pooler that shares
    /// sessions between transactions. Default: the address of [`PostgresStorage::connect`]. No TLS.
    ///
    /// # Errors
    /// [`Error::Storage`] if `url` is no PostgreSQL URL.
    pub fn direct(mut self, url: &str) -> Result<Self, Error> {
        let mut config: tokio_postgres::Config = url.parse().map_err(Error::storage)?;
        if config.get_application_name().is_none() {
            config.application_name("ebbtide-jobs-wake");
        }
        self.wake = Arc::new(Wake::new(Some(config)));
        Ok(self)
    }

    async fn session(&self) -> Result<Session, Error> {
        let object = self.pool.get().await.map_err(session::pool_error)?;
        Ok(Session::new(object, self.statements))
    }
}

#[async_trait]
impl Storage for PostgresStorage {
    async fn migrate(&self) -> Result<Migrated, Error> {
        migrate::migrate(&mut self.session().await?).await
    }

    async fn now(&self) -> Result<Timestamp, Error> {
        let rows = self.session().await?.rows("select statement_timestamp()", &[]).await?;
        row::only(&rows)?.try_get(0).map_err(session::error)
    }

    async fn job(&self, id: JobId) -> Result<Option<Job>, Error> {
        let query = concat!("select ", row::columns!(), " from ebbtide_jobs.jobs j where j.id = $1");
        let rows = self.session().await?.rows(query, &[(&id.as_uuid(), Type::UUID)]).await?;
        rows.first().map(row::job).transpose()
    }

    async fn enqueue(&self, job: &NewJob) -> Result<JobId, Error> {
        if job.is_windowed() {
            return Err(Error::StorageNoUniqueLocks);
        }
        enqueue::enqueue(&self.session().await?, job).await.map(Enqueued::id)
    }

    async fn enqueue_batch(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, Error> {
        let mut session = self.session().await?;
        let transaction = session.begin().await?;
        let enqueued = enqueue::enqueue_batch(&transaction, jobs).await?;
        transaction.commit().await?;
        Ok(enqueued)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Vec<Job>, Error> {
        claim::claim(&self.session().await?, request).await
    }

    async fn heartbeat(&self, claim: &Claim, lease: Duration) -> Result<(), Error> {
        claim::heartbeat(&self.session().await?, claim, lease).await
    }

    async fn complete(&self, completion: &Completion) -> Result<(), Error> {
        let done = self.complete_batch(std::slice::from_ref(completion)).await?;
        if done == [true] { Ok(()) } else { Err(Error::JobNotOwned(completion.claim.job_id)) }
    }

    async fn retry(&self, claim: &Claim, failure: &Failure, delay: Duration) -> Result<(), Error> {
        claim::retry(&self.session().await?, claim, failure, delay).await
    }

    async fn fail(&self, claim: &Claim, failure: &Failure, reason: DeadLetterReason) -> Result<(), Error> {
        let mut session = self.session().await?;
        for queue in claim::fail(&session, claim, failure, reason).await? {
            self.wake.announce(&queue);
        }
        // The failure is written; what cannot be done here is left to the recovery.
        if let Err(error) = fan_out::stop_losers(&mut session, FAIL_SETTLES_MAX).await {
            debug!(target: "jobs", %error, "the children of a failed fan-out were not cancelled yet");
        }
        Ok(())
    }

    async fn release(&self, claim: &Claim) -> Result<(), Error> {
        claim::release(&self.session().await?, claim).await
    }

    async fn reclaim(&self, reclaim: &Reclaim) -> Result<Vec<Reclaimed>, Error> {
        claim::reclaim(&self.session().await?, reclaim).await
    }

    async fn cancel(&self, id: JobId) -> Result<u64, Error> {
        control::cancel(&mut self.session().await?, id).await
    }

    async fn pause(&self, id: JobId) -> Result<(), Error> {
        control::pause(&mut self.session().await?, id).await
    }

    async fn resume(&self, id: JobId) -> Result<(), Error> {
        control::resume(&mut self.session().await?, id).await
    }

    async fn requeue(&self, id: JobId) -> Result<(), Error> {
        control::requeue(&mut self.session().await?, id).await
    }

    async fn delete(&self, id: JobId) -> Result<(), Error> {
        control::delete(&mut self.session().await?, id).await
    }

    async fn delete_workflow(&self, root: JobId) -> Result<u64, Error> {
        control::delete_workflow(&mut self.session().await?, root).await
    }

    async fn purge(&self, queue: &QueueName, status: PurgeStatus, limit: u32) -> Result<u64, Error> {
        control::purge(&mut self.session().await?, queue, status, limit).await
    }

    async fn pause_queue(&self, queue: &QueueName, by: &str) -> Result<(), Error> {
        check_text("by", by)?;
        control::set_queue_paused(&self.session().await?, queue, true, by).await
    }

    async fn resume_queue(&self, queue: &QueueName) -> Result<(), Error> {
        control::set_queue_paused(&self.session().await?, queue, false, "").await
    }

    async fn paused_queues(&self) -> Result<Vec<QueueName>, Error> {
        control::paused_queues(&self.session().await?).await
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
impl WindowedEnqueue for PostgresStorage {
    async fn enqueue_windowed(&self, job: &NewJob) -> Result<Enqueued, Error> {
        enqueue::enqueue(&self.session().await?, job).await
    }
}

#[async_trait]
impl BatchCompletion for PostgresStorage {
    async fn complete_batch(&self, completions: &[Completion]) -> Result<Vec<bool>, Error> {
        let (done, woken) = claim::complete(&self.session().await?, completions).await?;
        for queue in woken {
            self.wake.announce(&queue);
        }
        Ok(done)
    }
}

#[async_trait]
impl CheckpointStore for PostgresStorage {
    async fn load(&self, job: JobId) -> Result<Vec<Checkpoint>, Error> {
        checkpoints::load(&self.session().await?, job).await
    }

    async fn save(&self, claim: &Claim, checkpoint: &Checkpoint) -> Result<(), Error> {
        checkpoints::save(&self.session().await?, claim, checkpoint).await
    }

    async fn forget(&self, claim: &Claim, call_index: i32, call_type: &str) -> Result<(), Error> {
        checkpoints::forget(&mut self.session().await?, claim, call_index, call_type).await
    }
}

#[async_trait]
impl SignalStore for PostgresStorage {
    async fn send(&self, job: JobId, name: &str, payload: &[u8]) -> Result<(), Error> {
        waits::send(&self.session().await?, job, name, payload).await
    }

    async fn wake(&self, job: JobId, name: &str) -> Result<Option<QueueName>, Error> {
        waits::wake(&self.session().await?, job, name).await
    }

    async fn receive(
        &self, claim: &Claim, call_index: i32, name: &str, timeout: Option<Duration>,
    ) -> Result<Received, Error> {
        waits::receive(&mut self.session().await?, claim, call_index, name, timeout).await
    }

    async fn peek(&self, job: JobId, name: &str) -> Result<Option<Vec<u8>>, Error> {
        waits::peek(&self.session().await?, job, name).await
    }

    async fn drain(&self, claim: &Claim, call_index: i32, name: &str) -> Result<Vec<Vec<u8>>, Error> {
        waits::drain(&mut self.session().await?, claim, call_index, name).await
    }
}

#[async_trait]
impl TimerStore for PostgresStorage {
    async fn sleep(&self, claim: &Claim, call_index: i32, until: Until) -> Result<Slept, Error> {
        waits::sleep(&mut self.session().await?, claim, call_index, until).await
    }

    async fn wake_due(&self, limit: u32) -> Result<Woken, Error> {
        waits::wake_due(&self.session().await?, limit).await
    }

    async fn wake_signalled(&self, after: Option<JobId>, limit: u32) -> Result<(Woken, Option<JobId>), Error> {
        waits::wake_signalled(&self.session().await?, after, limit).await
    }
}

#[async_trait]
impl OwnershipStore for PostgresStorage {
    async fn lost(&self, claims: &[Claim]) -> Result<Vec<JobId>, Error> {
        fleet::lost(&self.session().await?, claims).await
    }
}

#[async_trait]
impl LeaseStore for PostgresStorage {
    async fn acquire(&self, name: &str, owner: &WorkerId, length: Duration) -> Result<bool, Error> {
        fleet::acquire(&self.session().await?, name, owner, length).await
    }

    async fn release(&self, name: &str, owner: &WorkerId) -> Result<(), Error> {
        fleet::release(&self.session().await?, name, owner).await
    }
}

impl WakeStore for PostgresStorage {
    fn announce(&self, queue: &QueueName) {
        self.wake.announce(queue);
    }

    fn subscribe(&self, queues: &[QueueName]) -> Subscription {
        self.wake.subscribe(queues)
    }

    fn reaches_other_processes(&self) -> bool {
        self.wake.is_listening()
    }
}
