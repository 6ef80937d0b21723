//! Steps: each runs once, and a replay answers with what it returned.

use std::sync::atomic::Ordering;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::warn;

use super::{Ctx, lock};
use crate::codec;
use crate::error::Error;
use crate::hooks::Answer;
use crate::job::Determinism;
use crate::job_error::{JobError, Kind};
use crate::limits::{JobType, RESULT_BYTES_MAX, sanitize_error};
use crate::shape::shape_of;
use crate::storage::{Checkpoint, StoredError};

/// What is known of the next step.
pub(super) enum Replay {
    /// It ran before.
    Recorded(Checkpoint),
    /// It has not.
    Fresh(i32),
}

impl Ctx {
    /// Runs the handler that is registered under `name` as a step of this job, once: its result is recorded, and
    /// every later run of the job answers with the record. The step has calls of its own if it makes any.
    ///
    /// A failure that says [`JobError::no_retry`] is recorded as well; after any other one the step runs again with
    /// the next run. A step may run more than once if the process dies between its end and the record: make what it
    /// does elsewhere idempotent.
    ///
    /// # Errors
    /// The step's failure; a failure without retries if another step was recorded here, or the record holds another
    /// type. Pass it on: it may be a suspension.
    pub async fn call<A, T>(&self, name: &str, args: A) -> Result<T, JobError>
    where
        A: Serialize,
        T: DeserializeOwned,
    {
        let step = self.0.queue.handler(name).ok_or_else(|| Error::HandlerNotFound(name.to_owned()))?;
        let args = serde_json::to_vec(&args).map_err(JobError::no_retry)?;
        let ctx = self.clone();
        self.recorded(name, async move { step.handler.run(ctx, &args).await }).await
    }

    /// Runs `step` once, as [`Ctx::call`] does with a registered handler.
    ///
    /// # Errors
    /// As [`Ctx::call`]; [`Error::Invalid`] if `name` is no name.
    pub async fn step<T, F, Fut>(&self, name: &str, step: F) -> Result<T, JobError>
    where
        T: Serialize + DeserializeOwned,
        F: FnOnce() -> Fut,
        Fut: Future<Output = Result<T, JobError>>,
    {
        JobType::new(name)?;
        let run = async { serde_json::to_vec(&step().await?).map_err(JobError::no_retry) };
        self.recorded(name, run).await
    }

    async fn recorded<T: DeserializeOwned>(
        &self, name: &str, run: impl Future<Output = Answer>,
    ) -> Result<T, JobError> {
        let shape = shape_of::<T>();
        let index = match self.replay(|record| record.call_type == name, name).await? {
            Replay::Recorded(record) => return self.answer(&record, &shape),
            Replay::Fresh(index) => index,
        };
        let mut record = Checkpoint {
            call_index: index,
            call_type: name.to_owned(),
            result: None,
            error: None,
            span_end: 0,
            result_shape: shape,
        };
        let outcome = run.await;
        record.span_end = self.0.next_index.load(Ordering::Relaxed);
        match outcome {
            Ok(result) if RESULT_BYTES_MAX < result.len() => {
                Err(JobError::no_retry(format!("the result of step {name} is larger than 1 MiB")))
            }
            Ok(result) => {
                record.result = Some(codec::encode(self.0.queue.codec(), result.clone())?);
                self.save(record).await?;
                parse(name, &result)
            }
            Err(error) if error.kind() == Kind::NoRetry => {
                record.error = Some(self.stored(&error));
                self.save(record).await?;
                Err(error)
            }
            Err(error) => Err(error),
        }
    }

    fn stored(&self, error: &JobError) -> StoredError {
        let text = codec::encode_text(self.0.queue.codec(), &sanitize_error(&error.to_string()));
        let cause = error.key().map(str::to_owned);
        let kind = if cause.is_some() { "sentinel" } else { "no_retry" };
        StoredError { text, kind: kind.to_owned(), cause, delay: None }
    }

    /// Takes the next place of the run, and what is recorded there of a step that `is_wanted` accepts.
    pub(super) async fn replay(&self, is_wanted: impl Fn(&Checkpoint) -> bool, name: &str) -> Result<Replay, JobError> {
        let index = self.next_index();
        let records = self.records().await?;
        let (found, other) = {
            let records = lock(records);
            let found = records.at(index).iter().find(|record| is_wanted(record)).cloned();
            let other = records.at(index).first().map(|record| record.call_type.clone());
            (found, other)
        };
        if let Some(record) = found {
            let end = record.span_end.max(index + 1);
            lock(records).replayed.push((index, end));
            self.0.next_index.fetch_max(end, Ordering::Relaxed);
            return Ok(Replay::Recorded(record));
        }
        if let Some(other) = other {
            self.mismatch(index, name, &other).await?;
        }
        Ok(Replay::Fresh(index))
    }

    /// Another step is recorded here than the one that the run asks for.
    async fn mismatch(&self, index: i32, wanted: &str, recorded: &str) -> Result<(), JobError> {
        if self.0.job.determinism != Determinism::BestEffort {
            let text = format!("the run asks for {wanted} at step {index}, where {recorded} is recorded");
            return Err(Error::Determinism(text).into());
        }
        warn!(
            target: "jobs",
            job_id = %self.0.job.id, index, wanted, recorded,
            "a record does not match and is dropped; the step runs again"
        );
        self.store()?.forget(&self.0.claim, index, recorded).await?;
        let records = self.records().await?;
        lock(records).by_index.remove(&index);
        Ok(())
    }

    fn answer<T: DeserializeOwned>(&self, record: &Checkpoint, shape: &str) -> Result<T, JobError> {
        if let Some(error) = &record.error {
            let text = codec::decode_text(self.0.queue.codec(), &error.text);
            return Err(JobError::replayed(text, error.cause.clone()));
        }
        let name = &record.call_type;
        // An empty fingerprint is of another writer, and unknown.
        if !record.result_shape.is_empty() && record.result_shape != shape {
            let text = format!("the record of step {name} holds another type than the one asked for");
            return Err(Error::Determinism(text).into());
        }
        let stored = record.result.as_deref().unwrap_or(b"null");
        parse(name, &codec::decode(self.0.queue.codec(), stored)?)
    }
}

pub(super) fn parse<T: DeserializeOwned>(name: &str, json: &[u8]) -> Result<T, JobError> {
    serde_json::from_slice(json).map_err(|error| Error::PayloadDecode(format!("{name}: {error}")).into())
}
