//! Jobs in PostgreSQL 15 and newer, in the schema `ebbtide_jobs`.

mod claim;
mod control;
mod dead_letters;
mod enqueue;
mod migrate;
mod retention;
mod row;
mod session;

use std::time::Duration;

use async_trait::async_trait;
use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod, Timeouts};
use jiff::Timestamp;
use tokio_postgres::NoTls;
use tokio_postgres::types::Type;

pub use self::enqueue::enqueue_in;
pub use self::retention::RETENTION_CHOICE;
use self::session::{Session, Sql as _};
use crate::control::PurgeStatus;
use crate::enqueue::{Enqueued, NewJob};
use crate::error::Error;
use crate::job::{Claim, Job, JobId};
use crate::limits::{QueueName, check_text};
use crate::outcome::{ClaimRequest, Completion, DeadLetterReason, Failure, Reclaim, Reclaimed};
use crate::storage::{
    BatchCompletion, DeadLetterStore, Migrated, RetentionPlanStore, RetentionStore, SignalRetentionStore, Storage,
    UniqueLockStore, WindowedEnqueue,
};

/// How long a caller waits for a connection of the pool before it gets an error.
const POOL_WAIT: Duration = Duration::from_secs(30);

/// How statements are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Statements {
    /// Prepared once per connection. The fastest; needs sessions of its own.
    Prepared,
    /// Sent whole each time: safe behind a pooler that shares sessions between transactions.
    Unnamed,
}

/// Jobs in PostgreSQL. Cheap to clone: clones share the pool.
#[derive(Clone, Debug)]
pub struct PostgresStorage {
    pool: Pool,
    statements: Statements,
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
        let manager = Manager::from_config(config, NoTls, ManagerConfig { recycling_method: RecyclingMethod::Fast });
        let wait = Some(POOL_WAIT);
        let pool = Pool::builder(manager)
            .max_size(connections.max(1))
            .runtime(deadpool_postgres::Runtime::Tokio1)
            .timeouts(Timeouts { wait, create: wait, recycle: wait })
            .build()
            .map_err(Error::storage)?;
        Ok(Self::from_pool(pool))
    }

    /// Uses a pool that the program has already.
    pub fn from_pool(pool: Pool) -> Self {
        Self { pool, statements: Statements::Prepared }
    }

    /// How statements are sent. Default: [`Statements::Prepared`].
    #[must_use]
    pub fn statements(mut self, statements: Statements) -> Self {
        self.statements = statements;
        self
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
        let done = claim::complete(&self.session().await?, std::slice::from_ref(completion)).await?;
        if done == [true] { Ok(()) } else { Err(Error::JobNotOwned(completion.claim.job_id)) }
    }

    async fn retry(&self, claim: &Claim, failure: &Failure, delay: Duration) -> Result<(), Error> {
        claim::retry(&self.session().await?, claim, failure, delay).await
    }

    async fn fail(&self, claim: &Claim, failure: &Failure, reason: DeadLetterReason) -> Result<(), Error> {
        claim::fail(&self.session().await?, claim, failure, reason).await
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
        claim::complete(&self.session().await?, completions).await
    }
}
