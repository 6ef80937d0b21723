//! A job that is about to be enqueued: every option checked, nothing written yet.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;

use crate::error::Error;
use crate::job::{Determinism, JobId};
use crate::limits::{
    ARGS_BYTES_MAX, ENQUEUE_BATCH_MAX, JobType, METADATA_BYTES_MAX, QueueName, RETRIES, RETRIES_MAX, check_text,
    saturating_micros,
};
use crate::unique::{Scope, Window};

/// What became of an enqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enqueued {
    /// A job was written; this is its id.
    New(JobId),
    /// Nothing was written; this job holds the window or, in a batch, the unique key.
    Duplicate(JobId),
}

impl Enqueued {
    /// The job that does the work, whichever call wrote it.
    pub fn id(self) -> JobId {
        match self {
            Self::New(id) | Self::Duplicate(id) => id,
        }
    }

    /// Whether this call wrote the job.
    pub fn is_new(self) -> bool {
        matches!(self, Self::New(_))
    }
}

/// A transaction of the caller's own, in which jobs are enqueued: they are there once it commits.
pub trait TxEnqueuer {
    /// Enqueues one job, with every rule of deduplication.
    fn enqueue_job(&self, job: &NewJob) -> impl Future<Output = Result<Enqueued, Error>>;

    /// Enqueues all of the jobs, or none.
    fn enqueue_jobs(&self, jobs: &[NewJob]) -> impl Future<Output = Result<Vec<Enqueued>, Error>>;
}

/// When a job is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    Now,
    /// Added to the database's clock by the inserting statement.
    After(Duration),
    At(Timestamp),
}

/// The options of one enqueue. What is left out has the default that its method names.
///
/// Nothing is checked here: [`NewJob::new`] checks all of it at once.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until a job is made with them"]
pub struct EnqueueOptions {
    queue: Option<String>,
    priority: i32,
    retries: u32,
    due: Due,
    timeout: Option<Duration>,
    tenant: String,
    metadata: BTreeMap<String, String>,
    determinism: Option<Determinism>,
    unique_key: Option<String>,
    window: Option<Window>,
    takes_over: bool,
    trace_context: Option<Vec<u8>>,
}

impl EnqueueOptions {
    /// The defaults: queue `default`, priority 0, 2 retries, due at once, no deduplication.
    #[allow(clippy::new_without_default, reason = "the defaults are named by what they are, not implied")]
    pub fn new() -> Self {
        Self {
            queue: None,
            priority: 0,
            retries: RETRIES,
            due: Due::Now,
            timeout: None,
            tenant: String::new(),
            metadata: BTreeMap::new(),
            determinism: None,
            unique_key: None,
            window: None,
            takes_over: false,
            trace_context: None,
        }
    }

    /// The queue. Default: `default`.
    pub fn queue(mut self, name: impl Into<String>) -> Self {
        self.queue = Some(name.into());
        self
    }

    /// Higher goes first within a queue. Default: 0.
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Retries after the first run; 0 runs exactly once. Default: 2. More than 100 means 100.
    pub fn retries(mut self, retries: u32) -> Self {
        self.retries = retries.min(RETRIES_MAX);
        self
    }

    /// Not before this much time has passed on the database's clock. Replaces an earlier [`EnqueueOptions::at`].
    pub fn delay(mut self, delay: Duration) -> Self {
        self.due = if delay.is_zero() { Due::Now } else { Due::After(delay) };
        self
    }

    /// Not before this time; a time in the past means at once. Replaces an earlier [`EnqueueOptions::delay`].
    pub fn at(mut self, at: Timestamp) -> Self {
        self.due = Due::At(at);
        self
    }

    /// Limit of one run; zero means none. Default: none.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = (!timeout.is_zero()).then_some(timeout);
        self
    }

    /// Free text that tells customers apart. It is no part of any deduplication.
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.tenant = tenant.into();
        self
    }

    /// Replaces all labels.
    pub fn metadata(mut self, metadata: BTreeMap<String, String>) -> Self {
        self.metadata = metadata;
        self
    }

    /// Adds one label.
    pub fn meta(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    /// How strictly a replayed run is checked. Default: [`Determinism::Explicit`].
    pub fn determinism(mut self, determinism: Determinism) -> Self {
        self.determinism = Some(determinism);
        self
    }

    /// The mode of jobs that name none.
    pub(crate) fn or_determinism(mut self, determinism: Determinism) -> Self {
        self.determinism.get_or_insert(determinism);
        self
    }

    /// Refuses the job with [`Error::DuplicateJob`] while another one with this key has not finished.
    pub fn unique(mut self, key: impl Into<String>) -> Self {
        self.unique_key = Some(key.into());
        self
    }

    /// Deduplicates by `key` within the queue and type until `window` has passed since the accepted enqueue,
    /// however that job ends. Replaces an earlier [`EnqueueOptions::unique_for`].
    ///
    /// The window keeps the job's row from retention: a long one keeps it that long.
    pub fn idempotency_key(mut self, key: impl Into<String>, window: Duration) -> Self {
        self.window = Some(Window { key: Some(key.into()), length: window });
        self
    }

    /// Deduplicates by the arguments within the queue and type until `window` has passed since the accepted
    /// enqueue, however that job ends. Replaces an earlier [`EnqueueOptions::idempotency_key`].
    ///
    /// The window keeps the job's row from retention: a long one keeps it that long.
    pub fn unique_for(mut self, window: Duration) -> Self {
        self.window = Some(Window { key: None, length: window });
        self
    }

    /// Lets this job take the window over from one that failed or was cancelled, with a fresh length. The earlier
    /// job is then no longer kept from retention. Default: a window holds until it has passed.
    pub fn take_over_failed(mut self) -> Self {
        self.takes_over = true;
        self
    }

    /// The span of the caller, serialised, for whoever runs the job.
    pub fn trace_context(mut self, context: Vec<u8>) -> Self {
        self.trace_context = Some(context);
        self
    }
}

/// A checked job with an id of its own, ready to be written once.
#[derive(Clone, Debug)]
pub struct NewJob {
    pub(crate) id: JobId,
    pub(crate) job_type: JobType,
    pub(crate) args: Vec<u8>,
    pub(crate) queue: QueueName,
    pub(crate) priority: i32,
    pub(crate) max_retries: u32,
    pub(crate) due: Due,
    pub(crate) timeout: Option<Duration>,
    pub(crate) tenant: String,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) determinism: Determinism,
    /// Empty without a key.
    pub(crate) unique_key: String,
    pub(crate) scope: Option<Scope>,
    pub(crate) takes_over: bool,
    pub(crate) trace_context: Option<Vec<u8>>,
}

impl NewJob {
    /// Checks everything and writes the arguments as JSON.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the option, [`Error::InvalidWindowedDedup`] for a window without key or length,
    /// [`Error::Json`] for arguments that are no JSON.
    pub fn new(job_type: &str, args: &impl Serialize, options: EnqueueOptions) -> Result<Self, Error> {
        Self::of_json(job_type, serde_json::to_vec(args)?, options)
    }

    /// As [`NewJob::new`], of arguments that are JSON already. They are kept byte for byte.
    pub(crate) fn of_json(job_type: &str, args: Vec<u8>, options: EnqueueOptions) -> Result<Self, Error> {
        let EnqueueOptions {
            queue,
            priority,
            retries,
            due,
            timeout,
            tenant,
            metadata,
            determinism,
            unique_key,
            window,
            takes_over,
            trace_context,
        } = options;
        let job_type = JobType::new(job_type)?;
        let queue = queue.map_or_else(|| Ok(QueueName::default_queue()), QueueName::new)?;
        if ARGS_BYTES_MAX < args.len() {
            return Err(Error::invalid("args", "are at most 1 MiB of JSON"));
        }
        check_text("tenant", &tenant)?;
        check_metadata(&metadata)?;
        if unique_key.as_deref() == Some("") {
            return Err(Error::invalid("unique key", "is not empty"));
        }
        let unique_key = unique_key.unwrap_or_default();
        check_text("unique key", &unique_key)?;
        let scope = window.map(|window| Scope::new(&queue, &job_type, &args, &window)).transpose()?;
        Ok(Self {
            id: JobId::new(),
            job_type,
            args,
            queue,
            priority,
            max_retries: retries,
            due,
            timeout,
            tenant,
            metadata,
            determinism: determinism.unwrap_or(Determinism::Explicit),
            unique_key,
            scope,
            takes_over,
            trace_context,
        })
    }

    /// The id that the job has once it is written.
    pub fn id(&self) -> JobId {
        self.id
    }

    /// The name of the handler.
    pub fn job_type(&self) -> &JobType {
        &self.job_type
    }

    /// Its queue.
    pub fn queue(&self) -> &QueueName {
        &self.queue
    }

    /// The arguments as they are stored.
    pub fn args(&self) -> &[u8] {
        &self.args
    }

    /// Whether it deduplicates in a window, which only [`Storage::windowed_enqueue`](crate::Storage) takes.
    pub fn is_windowed(&self) -> bool {
        self.scope.is_some()
    }
}

/// The parts of a new job in the form in which SQL takes them.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl NewJob {
    pub(crate) fn delay_us(&self) -> Option<i64> {
        match self.due {
            Due::After(delay) => Some(saturating_micros(delay).max(1)),
            Due::Now | Due::At(_) => None,
        }
    }

    pub(crate) fn run_at(&self) -> Option<Timestamp> {
        match self.due {
            Due::At(at) => Some(at),
            Due::Now | Due::After(_) => None,
        }
    }

    pub(crate) fn timeout_nanos(&self) -> i64 {
        self.timeout.map_or(0, |timeout| i64::try_from(timeout.as_nanos()).unwrap_or(i64::MAX))
    }

    pub(crate) fn max_retries_i32(&self) -> i32 {
        i32::try_from(self.max_retries).expect("retries are clamped to 100")
    }

    /// `None` without labels, so that no index holds empty ones.
    pub(crate) fn metadata_json(&self) -> Option<String> {
        let json = || serde_json::to_string(&self.metadata).expect("a map of strings is JSON");
        (!self.metadata.is_empty()).then(json)
    }
}

fn check_metadata(metadata: &BTreeMap<String, String>) -> Result<(), Error> {
    // The metadata column of PostgreSQL cannot hold a NUL, and no storage may take what another refuses.
    if metadata.iter().any(|(key, value)| key.contains('\0') || value.contains('\0')) {
        return Err(Error::invalid("metadata", "holds no NUL character"));
    }
    if METADATA_BYTES_MAX < serde_json::to_vec(metadata)?.len() {
        return Err(Error::invalid("metadata", "is at most 64 KiB of JSON"));
    }
    Ok(())
}

/// A batch is bounded, and its entries deduplicate by their unique key alone.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn check_batch(jobs: &[NewJob]) -> Result<(), Error> {
    if ENQUEUE_BATCH_MAX < jobs.len() {
        return Err(Error::invalid("batch", "holds at most 10000 jobs"));
    }
    match jobs.iter().position(NewJob::is_windowed) {
        Some(index) => Err(Error::BatchWindowedDedup { index }),
        None => Ok(()),
    }
}
