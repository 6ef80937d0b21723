//! Children of a job: started together, and joined by their results.

use std::error::Error as StdError;
use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Ctx;
use super::call::{Replay, parse};
use crate::codec::{decode, decode_text};
use crate::enqueue::EnqueueOptions;
use crate::error::Error;
use crate::fan_out::{ChildOutcome, FAN_OUT_CHECKPOINT, FanOut, FanOutId, FanOutOutcome, FanOutStatus, Joined};
use crate::job::{JobId, JobStatus};
use crate::job_error::JobError;
use crate::queue::BatchEntry;

/// A child that is about to be started.
#[derive(Debug)]
#[must_use = "a child does nothing until its fan-out starts"]
pub struct SubJob(BatchEntry);

impl SubJob {
    /// A child of type `name`, with the defaults of every job.
    pub fn new(name: impl Into<String>, args: &impl Serialize) -> Self {
        Self(BatchEntry::new(name, args))
    }

    /// Replaces all options. What the fan-out sets counts before them; a child takes no deduplication.
    pub fn options(self, options: EnqueueOptions) -> Self {
        Self(self.0.options(options))
    }

    /// Allows a type for which this process has no handler.
    pub fn remote(self) -> Self {
        Self(self.0.remote())
    }
}

/// A child that did not complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubJobFailure {
    /// Its place among the children, from 0.
    pub index: u32,
    /// The child.
    pub id: JobId,
    /// Failed or cancelled; anything else if the join was decided without it.
    pub status: JobStatus,
    /// Its last error.
    pub error: String,
}

/// A join that failed. It is found in the handler's error with [`JobError::downcast_ref`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FanOutError {
    /// The children that did not complete.
    pub failures: Vec<SubJobFailure>,
    /// How many children there were.
    pub total: u32,
}

impl fmt::Display for FanOutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let failed = self.failures.iter().filter(|failure| failure.status.is_terminal());
        let (count, first) = (failed.clone().count(), failed.clone().next());
        write!(f, "{count} of {} children did not complete", self.total)?;
        match first {
            Some(first) => write!(f, "; the first was {}: {}", first.index, first.error),
            None => Ok(()),
        }
    }
}

impl StdError for FanOutError {}

/// The children of a decided fan-out, by their place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FanOutResults<T> {
    outcomes: Vec<Result<T, SubJobFailure>>,
}

impl<T> FanOutResults<T> {
    /// Each child's result or failure, in the order in which they were started.
    pub fn outcomes(&self) -> &[Result<T, SubJobFailure>] {
        &self.outcomes
    }

    /// The results of those that completed, in order.
    pub fn values(self) -> Vec<T> {
        self.outcomes.into_iter().filter_map(Result::ok).collect()
    }

    /// The results, and the failures.
    pub fn partition(self) -> (Vec<T>, Vec<SubJobFailure>) {
        let mut failures = Vec::new();
        let mut values = Vec::new();
        for outcome in self.outcomes {
            match outcome {
                Ok(value) => values.push(value),
                Err(failure) => failures.push(failure),
            }
        }
        (values, failures)
    }

    /// Whether every child completed.
    pub fn all_succeeded(&self) -> bool {
        self.outcomes.iter().all(Result::is_ok)
    }

    /// How many children completed.
    pub fn success_count(&self) -> usize {
        self.outcomes.iter().filter(|outcome| outcome.is_ok()).count()
    }
}

impl Ctx {
    /// Starts children and waits until they are decided, as `fan_out` says. While it waits the job occupies no
    /// worker. The children, the record of them and the wait are written in one transaction: a crash leaves all or
    /// nothing. Without children it answers at once.
    ///
    /// # Errors
    /// A suspension, which has to be passed on; a [`FanOutError`] without retries if the join failed;
    /// [`Error::SubJobIncomplete`] without retries if a child's row is gone; [`Error::Invalid`] for more than 10,000
    /// children.
    pub async fn fan_out<T: DeserializeOwned>(
        &self, children: Vec<SubJob>, fan_out: FanOut,
    ) -> Result<FanOutResults<T>, JobError> {
        let store = self.0.queue.storage().fan_outs().ok_or(Error::Unsupported("fan-outs"))?;
        if children.is_empty() {
            return Ok(FanOutResults { outcomes: Vec::new() });
        }
        let is_ours = |record: &crate::storage::Checkpoint| record.call_type == FAN_OUT_CHECKPOINT;
        let record = match self.replay(is_ours, FAN_OUT_CHECKPOINT).await? {
            Replay::Recorded(record) => record,
            Replay::Fresh(index) => {
                let entries = children.into_iter().map(|child| child.0).collect();
                let jobs = self.0.queue.batch(entries)?;
                let queues: std::collections::BTreeSet<_> =
                    jobs.iter().map(|job| fan_out.queue_of(job).clone()).collect();
                store.start(&self.0.claim, index, &fan_out, &jobs).await?;
                queues.iter().for_each(|queue| self.0.queue.announce(queue));
                return Err(self.suspended());
            }
        };
        let id: FanOutId = FanOutId::of_record(record.result.as_deref())?;
        match store.join(&self.0.claim, id).await? {
            Joined::Decided(outcome) => self.joined(outcome),
            Joined::Suspended => Err(self.suspended()),
        }
    }

    fn joined<T: DeserializeOwned>(&self, outcome: FanOutOutcome) -> Result<FanOutResults<T>, JobError> {
        if let Some(index) = outcome.missing() {
            return Err(Error::SubJobIncomplete { index }.into());
        }
        let is_failed = outcome.status != FanOutStatus::Completed;
        let total = outcome.total;
        let mut outcomes = Vec::with_capacity(outcome.children.len());
        for child in outcome.children {
            outcomes.push(match child.status {
                JobStatus::Completed if !is_failed => Ok(self.value(&child)?),
                JobStatus::Completed => continue,
                _ => Err(self.failure(child)),
            });
        }
        if is_failed {
            let failures = outcomes.into_iter().filter_map(Result::<T, _>::err).collect();
            return Err(JobError::no_retry(FanOutError { failures, total }));
        }
        Ok(FanOutResults { outcomes })
    }

    fn value<T: DeserializeOwned>(&self, child: &ChildOutcome) -> Result<T, JobError> {
        let stored = child.result.as_deref().unwrap_or(b"null");
        parse(child.job_type.as_str(), &decode(self.0.queue.codec(), stored)?)
    }

    fn failure(&self, child: ChildOutcome) -> SubJobFailure {
        let error = child.error.map(|error| decode_text(self.0.queue.codec(), &error)).unwrap_or_default();
        SubJobFailure { index: child.index, id: child.id, status: child.status, error }
    }
}
