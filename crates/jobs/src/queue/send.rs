//! Jobs and signals on their way into the database.

use std::marker::PhantomData;
use std::sync::PoisonError;
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use tracing::{Instrument as _, info_span, warn};

use super::Queue;
use crate::codec;
use crate::ctx::check_signal_name;
use crate::enqueue::{EnqueueOptions, Enqueued, NewJob, TxEnqueuer};
use crate::error::Error;
use crate::event::Event;
use crate::hooks::{Draft, through};
use crate::job::{Determinism, JobId};
use crate::limits::SIGNAL_PAYLOAD_BYTES_MAX;

/// One job that is about to be enqueued. It does nothing until it is sent.
#[must_use = "a job is enqueued once it is sent"]
pub struct EnqueueBuilder {
    queue: Queue,
    draft: Result<Draft, Error>,
    is_remote: bool,
    is_typed: bool,
}

macro_rules! options {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*);)*) => {
        $(
            $(#[$doc])*
            pub fn $name(self, $($argument: $type),*) -> Self {
                self.with(|options| options.$name($($argument),*))
            }
        )*
    };
}

impl EnqueueBuilder {
    fn with(mut self, change: impl FnOnce(EnqueueOptions) -> EnqueueOptions) -> Self {
        self.draft = self.draft.map(|draft| Draft { options: change(draft.options), ..draft });
        self
    }

    /// Replaces all options.
    pub fn options(self, options: EnqueueOptions) -> Self {
        self.with(|_| options)
    }

    /// Allows a type for which this process has no handler, and arguments that its handler cannot read.
    pub fn remote(mut self) -> Self {
        self.is_remote = true;
        self
    }

    options! {
        /// The queue. Default: `default`.
        queue(name: impl Into<String>);
        /// Higher goes first within a queue. Default: 0.
        priority(priority: i32);
        /// Retries after the first run; 0 runs exactly once. Default: 2. More than 100 means 100.
        retries(retries: u32);
        /// Not before this much time has passed on the database's clock.
        delay(delay: Duration);
        /// Not before this time; a time in the past means at once.
        at(at: Timestamp);
        /// Limit of one run; zero means none. Default: the handler's, which has none by default.
        timeout(timeout: Duration);
        /// Free text that tells customers apart. It is no part of any deduplication.
        tenant(tenant: impl Into<String>);
        /// Adds one label.
        meta(key: impl Into<String>, value: impl Into<String>);
        /// How strictly a replayed run is checked. Default: the queue's.
        determinism(determinism: Determinism);
        /// Refuses the job with [`Error::DuplicateJob`] while another one with this key has not finished.
        unique(key: impl Into<String>);
        /// Deduplicates by `key` within the queue and type until `window` has passed, however the job ends. A long
        /// window keeps the job's row from retention that long.
        idempotency_key(key: impl Into<String>, window: Duration);
        /// Deduplicates by the arguments within the queue and type until `window` has passed, however the job ends. A
        /// long window keeps the job's row from retention that long.
        unique_for(window: Duration);
        /// Lets this job take the window over from one that failed or was cancelled.
        take_over_failed();
        /// The span of the caller, serialised, for whoever runs the job.
        trace_context(context: Vec<u8>);
    }

    /// The job, checked, for a transaction of the caller's own.
    ///
    /// # Errors
    /// As [`EnqueueBuilder::send`], but for duplicates.
    pub fn build(self) -> Result<NewJob, Error> {
        let layers = self.queue.0.enqueue_layers.read().unwrap_or_else(PoisonError::into_inner).clone();
        let draft = self.draft?;
        let given = draft.args.clone();
        let Draft { job_type, args, options } = through(&layers, draft)?;
        if !self.is_remote {
            let handler = self.queue.handler(&job_type).ok_or_else(|| Error::HandlerNotFound(job_type.clone()))?;
            if !self.is_typed || args != given {
                handler
                    .handler
                    .check(&args)
                    .map_err(|reason| Error::JobArgsMismatch { job_type: job_type.clone(), reason })?;
            }
        }
        let options = options.or_determinism(self.queue.0.determinism);
        let mut job = NewJob::of_json(&job_type, args, options)?;
        job.args = codec::encode(self.queue.codec(), job.args)?;
        Ok(job)
    }

    /// Enqueues the job.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the option; [`Error::HandlerNotFound`] and [`Error::JobArgsMismatch`] unless it is
    /// [`EnqueueBuilder::remote`]; [`Error::DuplicateJob`] if an unfinished job has the unique key;
    /// [`Error::StorageNoUniqueLocks`] if the storage keeps no deduplication windows. Nothing is written then.
    pub async fn send(self) -> Result<Enqueued, Error> {
        let queue = self.queue.clone();
        let job = self.build()?;
        let span = info_span!(target: "jobs", "job.enqueue", job_type = %job.job_type(), queue = %job.queue());
        let storage = queue.storage();
        let enqueued = async {
            if job.is_windowed() {
                storage.windowed_enqueue().ok_or(Error::StorageNoUniqueLocks)?.enqueue_windowed(&job).await
            } else {
                storage.enqueue(&job).await.map(Enqueued::New)
            }
        };
        let enqueued = enqueued.instrument(span).await?;
        if enqueued.is_new() {
            queue.announce(job.queue());
        }
        Ok(enqueued)
    }

    /// Enqueues the job in the caller's own transaction: it is there once that commits. Call [`Queue::announce`]
    /// afterwards, or the next poll finds it.
    ///
    /// # Errors
    /// As [`EnqueueBuilder::send`]. A duplicate leaves the transaction usable.
    pub async fn send_in(self, transaction: &impl TxEnqueuer) -> Result<Enqueued, Error> {
        transaction.enqueue_job(&self.build()?).await
    }
}

/// One entry of a batch.
#[derive(Debug)]
#[must_use = "an entry does nothing until its batch is enqueued"]
pub struct BatchEntry {
    draft: Result<Draft, Error>,
    is_remote: bool,
}

impl BatchEntry {
    /// A job of type `name`.
    pub fn new(name: impl Into<String>, args: &impl Serialize) -> Self {
        Self { draft: draft(name, args), is_remote: false }
    }

    /// Replaces all options. A batch takes no deduplication windows.
    pub fn options(mut self, options: EnqueueOptions) -> Self {
        self.draft = self.draft.map(|draft| Draft { options, ..draft });
        self
    }

    /// Allows a type for which this process has no handler.
    pub fn remote(mut self) -> Self {
        self.is_remote = true;
        self
    }
}

fn draft(name: impl Into<String>, args: &impl Serialize) -> Result<Draft, Error> {
    let args = serde_json::to_vec(args)?;
    Ok(Draft { job_type: name.into(), args, options: EnqueueOptions::new() })
}

/// Jobs of one type, with its types.
pub struct JobDef<A, O> {
    queue: Queue,
    name: String,
    is_remote: bool,
    types: PhantomData<fn(A) -> O>,
}

impl<A: Serialize, O> JobDef<A, O> {
    pub(super) fn new(queue: Queue, name: &str, is_remote: bool) -> Self {
        Self { queue, name: name.to_owned(), is_remote, types: PhantomData }
    }

    /// The name of the type.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A job with these arguments, to be sent.
    pub fn enqueue(&self, args: A) -> EnqueueBuilder {
        let draft = draft(&*self.name, &args);
        EnqueueBuilder { queue: self.queue.clone(), draft, is_remote: self.is_remote, is_typed: true }
    }
}

impl Queue {
    /// A job of type `name` with these arguments, to be sent.
    pub fn enqueue(&self, name: impl Into<String>, args: &impl Serialize) -> EnqueueBuilder {
        EnqueueBuilder { queue: self.clone(), draft: draft(name, args), is_remote: false, is_typed: false }
    }

    pub(crate) fn batch(&self, entries: Vec<BatchEntry>) -> Result<Vec<NewJob>, Error> {
        let build = |entry: BatchEntry| {
            let BatchEntry { draft, is_remote } = entry;
            EnqueueBuilder { queue: self.clone(), draft, is_remote, is_typed: false }.build()
        };
        entries.into_iter().map(build).collect()
    }

    /// Enqueues all of the jobs or none, at most 10,000. Answers in their order; one whose unique key is taken, by an
    /// earlier one of the batch too, writes nothing and answers with the holder.
    ///
    /// # Errors
    /// As [`EnqueueBuilder::send`]; [`Error::BatchWindowedDedup`] if one has a deduplication window.
    pub async fn enqueue_batch(&self, entries: Vec<BatchEntry>) -> Result<Vec<Enqueued>, Error> {
        let jobs = self.batch(entries)?;
        let enqueued = self.storage().enqueue_batch(&jobs).await?;
        let mut announced: Vec<_> = jobs.iter().map(NewJob::queue).collect();
        announced.sort_unstable();
        announced.dedup();
        announced.into_iter().for_each(|queue| self.announce(queue));
        Ok(enqueued)
    }

    /// As [`Queue::enqueue_batch`], in the caller's own transaction.
    ///
    /// # Errors
    /// As [`Queue::enqueue_batch`].
    pub async fn enqueue_batch_in(
        &self, transaction: &impl TxEnqueuer, entries: Vec<BatchEntry>,
    ) -> Result<Vec<Enqueued>, Error> {
        transaction.enqueue_jobs(&self.batch(entries)?).await
    }

    /// Sends a signal to a job, whatever the job is doing, and wakes it if it waits for it. Once it is stored the
    /// call succeeds: should the wake-up fail, the workers find the signal within about 5 seconds.
    ///
    /// # Errors
    /// [`Error::JobNotFound`]; [`Error::Invalid`] for a name that is empty, longer than 240 characters or starts with
    /// `_`, and for a payload of more than 1 MiB.
    pub async fn signal(&self, id: JobId, name: &str, payload: &impl Serialize) -> Result<(), Error> {
        check_signal_name(name)?;
        let payload = serde_json::to_vec(payload)?;
        if SIGNAL_PAYLOAD_BYTES_MAX < payload.len() {
            return Err(Error::invalid("payload", "is at most 1 MiB of JSON"));
        }
        let signals = self.storage().signals().ok_or(Error::Unsupported("signals"))?;
        let payload = codec::encode(self.codec(), payload)?;
        signals.send(id, name, &payload).await?;
        self.emit(|| Event::SignalDelivered { id, name: name.to_owned() });
        match signals.wake(id, name).await {
            Ok(Some(queue)) => {
                self.announce(&queue);
                self.emit(|| Event::JobResumedBySignal { id, name: name.to_owned() });
            }
            Ok(None) => {}
            // Reported as an error it would be sent twice.
            Err(error) => warn!(target: "jobs", job_id = %id, %error, "a signal was stored and woke nobody yet"),
        }
        Ok(())
    }
}
