//! The face of the library: handlers, enqueueing, signals, and what an operator does.

mod control;
mod send;

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::codec::{IdentityCodec, PayloadCodec, decode, decode_text};
use crate::ctx::Ctx;
use crate::error::Error;
use crate::event::{Event, EventStream, Events};
use crate::hooks::{Answer, BoxFuture, Draft, EnqueueLayer, ExecutionLayer, HookTable, Hooks, Next};
use crate::job::{Determinism, Job, JobId, JobStatus};
use crate::job_error::JobError;
use crate::limits::{QueueName, READY_TIMEOUT};
use crate::registry::{HandlerOptions, Registered, Registry};
use crate::schedule::{Schedule, ScheduledJob};
use crate::storage::{Migrated, Storage};

pub use self::control::{DeadLetters, JobHandle, PauseMode};
pub use self::send::{BatchEntry, EnqueueBuilder, JobDef};

type ErrorHandler = Arc<dyn Fn(&Job, &JobError) + Send + Sync>;
type Classifier = Arc<dyn Fn(&JobError) -> bool + Send + Sync>;

/// Jobs of one storage, and the handlers that this process has for them. Cheap to clone.
#[derive(Clone)]
pub struct Queue(Arc<Shared>);

struct Shared {
    storage: Arc<dyn Storage>,
    codec: Arc<dyn PayloadCodec>,
    determinism: Determinism,
    error_handler: Option<ErrorHandler>,
    is_failure: Option<Classifier>,
    handlers: Registry,
    hooks: HookTable,
    events: Events,
    enqueue_layers: RwLock<Arc<[EnqueueLayer]>>,
    execution_layers: RwLock<Arc<[ExecutionLayer]>>,
    schedules: RwLock<Vec<ScheduledJob>>,
}

/// A queue whose defaults are changed. Made by [`Queue::builder`].
#[must_use = "a builder does nothing until it is built"]
pub struct QueueBuilder {
    storage: Arc<dyn Storage>,
    codec: Arc<dyn PayloadCodec>,
    determinism: Determinism,
    error_handler: Option<ErrorHandler>,
    is_failure: Option<Classifier>,
}

impl QueueBuilder {
    /// How payloads are stored. Default: as they are. Every program that uses the storage needs the same.
    pub fn codec(mut self, codec: impl PayloadCodec) -> Self {
        self.codec = Arc::new(codec);
        self
    }

    /// How strictly replays of jobs are checked that name no mode. Default: [`Determinism::Explicit`].
    pub fn determinism(mut self, determinism: Determinism) -> Self {
        self.determinism = determinism;
        self
    }

    /// Called for every failed run, before its outcome is written.
    pub fn error_handler(mut self, handler: impl Fn(&Job, &JobError) + Send + Sync + 'static) -> Self {
        self.error_handler = Some(Arc::new(handler));
        self
    }

    /// Which errors are failures. One for which it answers false completes the job, without a result. Suspensions,
    /// lost claims, panics and passed timeouts are never asked about. Default: all errors are failures.
    pub fn is_failure(mut self, is_failure: impl Fn(&JobError) -> bool + Send + Sync + 'static) -> Self {
        self.is_failure = Some(Arc::new(is_failure));
        self
    }

    /// The queue.
    pub fn build(self) -> Queue {
        let Self { storage, codec, determinism, error_handler, is_failure } = self;
        Queue(Arc::new(Shared {
            storage,
            codec,
            determinism,
            error_handler,
            is_failure,
            handlers: Registry::default(),
            hooks: HookTable::default(),
            events: Events::default(),
            enqueue_layers: RwLock::new(Arc::new([])),
            execution_layers: RwLock::new(Arc::new([])),
            schedules: RwLock::default(),
        }))
    }
}

impl Queue {
    /// The jobs of this storage, with the defaults of [`QueueBuilder`].
    pub fn new(storage: impl Storage) -> Self {
        Self::builder(Arc::new(storage)).build()
    }

    /// As [`Queue::new`], with other defaults or a storage that is shared.
    pub fn builder(storage: Arc<dyn Storage>) -> QueueBuilder {
        QueueBuilder {
            storage,
            codec: Arc::new(IdentityCodec),
            determinism: Determinism::Explicit,
            error_handler: None,
            is_failure: None,
        }
    }

    /// Brings the schema to this release's version. To be called once at the start of a program.
    ///
    /// # Errors
    /// As [`Storage::migrate`].
    pub async fn migrate(&self) -> Result<Migrated, Error> {
        self.0.storage.migrate().await
    }

    /// The storage.
    pub fn storage(&self) -> &dyn Storage {
        &*self.0.storage
    }

    pub(crate) fn shared_storage(&self) -> Arc<dyn Storage> {
        self.0.storage.clone()
    }

    pub(crate) fn codec(&self) -> &dyn PayloadCodec {
        &*self.0.codec
    }

    /// Registers what runs jobs of type `name`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is no name, [`Error::HandlerRegistered`] if the name has a handler of other types.
    pub fn register<F, Fut, A, O>(&self, name: &str, handler: F) -> Result<(), Error>
    where
        F: Fn(Ctx, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<O, JobError>> + Send + 'static,
        A: DeserializeOwned + Send + 'static,
        O: Serialize + Send + 'static,
    {
        self.register_with(name, HandlerOptions::new(), handler)
    }

    /// As [`Queue::register`], with options.
    ///
    /// # Errors
    /// As [`Queue::register`].
    pub fn register_with<F, Fut, A, O>(&self, name: &str, options: HandlerOptions, handler: F) -> Result<(), Error>
    where
        F: Fn(Ctx, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<O, JobError>> + Send + 'static,
        A: DeserializeOwned + Send + 'static,
        O: Serialize + Send + 'static,
    {
        self.0.handlers.add(name, options, handler).map(|_| ())
    }

    /// As [`Queue::register`], and answers a handle that knows the types.
    ///
    /// # Errors
    /// As [`Queue::register`].
    pub fn define<A, O, F, Fut>(&self, name: &str, handler: F) -> Result<JobDef<A, O>, Error>
    where
        F: Fn(Ctx, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<O, JobError>> + Send + 'static,
        A: Serialize + DeserializeOwned + Send + 'static,
        O: Serialize + Send + 'static,
    {
        let job_type = self.0.handlers.add(name, HandlerOptions::new(), handler)?;
        Ok(JobDef::new(self.clone(), job_type.as_str(), false))
    }

    /// A handle for jobs that another program runs.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is no name.
    pub fn declare_remote<A: Serialize, O>(&self, name: &str) -> Result<JobDef<A, O>, Error> {
        crate::limits::JobType::new(name)?;
        Ok(JobDef::new(self.clone(), name, true))
    }

    pub(crate) fn handler(&self, name: &str) -> Option<Arc<Registered>> {
        self.0.handlers.find(name)
    }

    /// Enqueues a copy of `job` at each time of `schedule`, from the next start of a worker on. Any number of workers
    /// may carry the schedule: each time is fired once, by the storage's clock. After a downtime one time is made up
    /// for. A time that comes while the copy's unique key or window is taken is skipped.
    ///
    /// ```
    /// # fn example(queue: &ebbtide_jobs::Queue) -> Result<(), ebbtide_jobs::Error> {
    /// use ebbtide_jobs::Schedule;
    /// let at_three = Schedule::daily(3, 0)?.in_zone("Europe/Berlin")?;
    /// queue.schedule("nightly", at_three, queue.enqueue("report", &"yesterday").unique("nightly"))
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if the name is empty, too long or has a schedule here already; as
    /// [`EnqueueBuilder::build`] for the job.
    pub fn schedule(&self, name: impl Into<String>, schedule: Schedule, job: EnqueueBuilder) -> Result<(), Error> {
        let scheduled = ScheduledJob::new(name, schedule, job.build()?)?;
        let mut schedules = self.0.schedules.write().unwrap_or_else(PoisonError::into_inner);
        if schedules.iter().any(|known| known.name() == scheduled.name()) {
            return Err(Error::invalid("schedule", "is named once"));
        }
        schedules.push(scheduled);
        Ok(())
    }

    pub(crate) fn schedules(&self) -> Vec<ScheduledJob> {
        self.0.schedules.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Where hooks around runs are added.
    pub fn hooks(&self) -> Hooks<'_> {
        Hooks(&self.0.hooks)
    }

    pub(crate) fn hook_table(&self) -> &HookTable {
        &self.0.hooks
    }

    /// Adds a layer around every handler. The first one added is the outermost. It gets the run and the way on, and
    /// answers the handler's result as JSON.
    pub fn layer_execution<F, Fut>(&self, layer: F)
    where
        F: Fn(Ctx, Next) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Vec<u8>, JobError>> + Send + 'static,
    {
        let layer: ExecutionLayer =
            Arc::new(move |ctx, next| -> BoxFuture<'static, Answer> { Box::pin(layer(ctx, next)) });
        push(&self.0.execution_layers, layer);
    }

    pub(crate) fn execution_layers(&self) -> Arc<[ExecutionLayer]> {
        self.0.execution_layers.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds a layer that every job passes before it is checked and enqueued. It may change the job or refuse it.
    pub fn layer_enqueue(&self, layer: impl Fn(Draft) -> Result<Draft, Error> + Send + Sync + 'static) {
        push(&self.0.enqueue_layers, Arc::new(layer) as EnqueueLayer);
    }

    /// Events of this process from here on. A subscriber that is 100 behind loses events.
    pub fn events(&self) -> EventStream {
        self.0.events.subscribe()
    }

    /// Tells the subscribers of this process something of the program's own.
    pub fn emit_custom(&self, name: impl Into<String>, payload: serde_json::Value) {
        self.emit(|| Event::Custom { name: name.into(), payload });
    }

    pub(crate) fn emit(&self, event: impl FnOnce() -> Event) {
        self.0.events.emit(event);
    }

    pub(crate) fn failed(&self, job: &Job, error: &JobError) {
        if let Some(handler) = &self.0.error_handler {
            handler(job, error);
        }
    }

    pub(crate) fn is_failure(&self, error: &JobError) -> bool {
        self.0.is_failure.as_ref().is_none_or(|is_failure| is_failure(error))
    }

    /// Says that jobs of a queue are due. Whoever enqueued in a transaction of its own calls it after the commit;
    /// without it the jobs are found by the next poll, within about a second.
    pub fn announce(&self, queue: &QueueName) {
        if let Some(wake) = self.0.storage.wake() {
            wake.announce(queue);
        }
    }

    /// Whether the storage answers within 5 seconds.
    ///
    /// # Errors
    /// What it failed with, or that it did not answer.
    pub async fn ping(&self) -> Result<(), Error> {
        let asked = tokio::time::timeout(READY_TIMEOUT, self.0.storage.now()).await;
        asked.map_err(|_| Error::storage("the storage does not answer"))?.map(|_| ())
    }

    /// The job with this id. Arguments, result and error text are the plain ones.
    ///
    /// # Errors
    /// [`Error::JobNotFound`], [`Error::PayloadDecode`] if the codec cannot read it.
    pub async fn find(&self, id: JobId) -> Result<Job, Error> {
        let mut job = self.0.storage.job(id).await?.ok_or(Error::JobNotFound(id))?;
        job.args = decode(self.codec(), &job.args)?;
        job.result = job.result.as_deref().map(|result| decode(self.codec(), result)).transpose()?;
        job.last_error = job.last_error.map(|error| decode_text(self.codec(), &error));
        Ok(job)
    }

    /// What a job is doing.
    ///
    /// # Errors
    /// [`Error::JobNotFound`].
    pub async fn status(&self, id: JobId) -> Result<JobStatus, Error> {
        self.0.storage.job(id).await?.map(|job| job.status).ok_or(Error::JobNotFound(id))
    }

    /// What a completed job returned.
    ///
    /// # Errors
    /// [`Error::NotCompleted`], [`Error::Failed`], [`Error::Cancelled`], [`Error::NoResult`] if it says nothing,
    /// [`Error::PayloadDecode`] if it is of another type, [`Error::JobNotFound`].
    pub async fn result<T: DeserializeOwned>(&self, id: JobId) -> Result<T, Error> {
        let job = self.find(id).await?;
        match job.status {
            JobStatus::Completed => {}
            JobStatus::Failed => return Err(Error::Failed { id, error: job.last_error.unwrap_or_default() }),
            JobStatus::Cancelled => return Err(Error::Cancelled(id)),
            status => return Err(Error::NotCompleted { id, status }),
        }
        let result = job.result.ok_or(Error::NoResult(id))?;
        serde_json::from_slice(&result).map_err(|error| Error::PayloadDecode(error.to_string()))
    }

    /// The longest that [`Queue::ping`] waits.
    pub const READY_TIMEOUT: Duration = READY_TIMEOUT;
}

fn push<T: ?Sized>(layers: &RwLock<Arc<[Arc<T>]>>, layer: Arc<T>) {
    let mut layers = layers.write().unwrap_or_else(PoisonError::into_inner);
    *layers = layers.iter().cloned().chain([layer]).collect();
}
