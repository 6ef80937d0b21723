//! What an operator does with jobs and queues.

use super::Queue;
use crate::codec::{decode, decode_text};
use crate::control::{DeadLetterFilter, PurgeStatus};
use crate::error::Error;
use crate::event::Event;
use crate::job::{Job, JobId, JobStatus};
use crate::limits::{JobType, PURGE_BATCH, QueueName};

/// What becomes of running handlers when something is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PauseMode {
    /// They run to their end.
    Graceful,
    /// They are stopped. A running job that is paused like this is cancelled; a paused worker gives its jobs back.
    Aggressive,
}

/// One job, to be acted on. Made by [`Queue::job`].
pub struct JobHandle<'a> {
    queue: &'a Queue,
    id: JobId,
}

impl JobHandle<'_> {
    /// Puts a pending or waiting job aside. A running one is cancelled if `mode` is aggressive.
    ///
    /// # Errors
    /// [`Error::JobNotFound`], [`Error::JobAlreadyPaused`], [`Error::JobNotPausable`].
    pub async fn pause(&self, mode: PauseMode) -> Result<(), Error> {
        match self.queue.storage().pause(self.id).await {
            Err(Error::JobNotPausable { status: JobStatus::Running, .. }) if mode == PauseMode::Aggressive => {
                self.cancel().await.map(|_| ())
            }
            Ok(()) => {
                self.queue.emit(|| Event::JobPaused(self.id));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Stops the job and everything unfinished below it. Answers how many jobs that were; 0 if it was cancelled
    /// before. A worker that runs one of them stops its handler within about 5 seconds.
    ///
    /// # Errors
    /// [`Error::JobNotFound`], [`Error::JobNotCancellable`] if it completed or failed.
    pub async fn cancel(&self) -> Result<u64, Error> {
        let cancelled = self.queue.storage().cancel(self.id).await?;
        if 0 < cancelled {
            self.queue.emit(|| Event::JobCancelled(self.id));
        }
        Ok(cancelled)
    }

    /// Puts a paused job back to what it was.
    ///
    /// # Errors
    /// [`Error::JobNotFound`], [`Error::JobNotPaused`].
    pub async fn resume(&self) -> Result<(), Error> {
        self.queue.storage().resume(self.id).await?;
        self.queue.emit(|| Event::JobResumed(self.id));
        self.queue.announce_job(self.id).await;
        Ok(())
    }

    /// Whether the job is paused.
    ///
    /// # Errors
    /// [`Error::JobNotFound`].
    pub async fn is_paused(&self) -> Result<bool, Error> {
        Ok(self.queue.status(self.id).await? == JobStatus::Paused)
    }
}

/// A listing of jobs that failed for good. Made by [`Queue::dead_letters`].
#[must_use = "a listing does nothing until it is asked for"]
pub struct DeadLetters<'a> {
    queue: &'a Queue,
    filter: DeadLetterFilter,
}

impl DeadLetters<'_> {
    /// Those of one queue.
    pub fn queue(mut self, queue: QueueName) -> Self {
        self.filter = self.filter.queue(queue);
        self
    }

    /// Those of one type.
    pub fn job_type(mut self, job_type: JobType) -> Self {
        self.filter = self.filter.job_type(job_type);
        self
    }

    /// Most rows of the answer. Default: 50; at most 1000.
    pub fn limit(mut self, rows: u32) -> Self {
        self.filter = self.filter.limit(rows);
        self
    }

    /// Rows to pass over first.
    pub fn offset(mut self, rows: u64) -> Self {
        self.filter = self.filter.offset(rows);
        self
    }

    /// One page, newest first, with plain arguments and error texts.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the storage lists none; [`Error::PayloadDecode`] if the codec cannot read one.
    pub async fn list(self) -> Result<Vec<Job>, Error> {
        let store = self.queue.storage().dead_letters().ok_or(Error::Unsupported("dead letters"))?;
        let mut jobs = store.list(&self.filter).await?;
        for job in &mut jobs {
            job.args = decode(self.queue.codec(), &job.args)?;
            job.last_error = job.last_error.take().map(|error| decode_text(self.queue.codec(), &error));
        }
        Ok(jobs)
    }

    /// How many there are, whatever the page.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the storage lists none.
    pub async fn count(self) -> Result<u64, Error> {
        let store = self.queue.storage().dead_letters().ok_or(Error::Unsupported("dead letters"))?;
        store.count(&self.filter).await
    }
}

impl Queue {
    /// One job, to be paused, resumed or cancelled.
    pub fn job(&self, id: JobId) -> JobHandle<'_> {
        JobHandle { queue: self, id }
    }

    /// Jobs that failed for good, until retention or a requeue takes them out of the listing.
    pub fn dead_letters(&self) -> DeadLetters<'_> {
        DeadLetters { queue: self, filter: DeadLetterFilter::all() }
    }

    async fn announce_job(&self, id: JobId) {
        // A hint: should the look fail, the next poll finds the job.
        if let Ok(Some(job)) = self.storage().job(id).await {
            self.announce(&job.queue);
        }
    }

    /// Runs a failed or cancelled job again from nothing: its checkpoints, its result and everything below it are
    /// deleted. Its own deduplication window stays. False if it is in another status.
    ///
    /// # Errors
    /// [`Error::JobNotFound`], [`Error::CannotRequeueSubJob`], [`Error::DuplicateJob`].
    pub async fn requeue(&self, id: JobId) -> Result<bool, Error> {
        match self.storage().requeue(id).await {
            Ok(()) => {
                self.announce_job(id).await;
                Ok(true)
            }
            Err(Error::JobNotRequeueable { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Cancels a child of a workflow, with everything below it.
    ///
    /// # Errors
    /// As [`JobHandle::cancel`].
    pub async fn cancel_sub_job(&self, id: JobId) -> Result<u64, Error> {
        self.job(id).cancel().await
    }

    /// Hands out no more jobs of a queue, on any worker, until it is resumed. Runs go on.
    ///
    /// # Errors
    /// If the storage failed.
    pub async fn pause_queue(&self, queue: &QueueName, by: &str) -> Result<(), Error> {
        self.storage().pause_queue(queue, by).await?;
        self.emit(|| Event::QueuePaused(queue.clone()));
        Ok(())
    }

    /// Hands out jobs of a queue again.
    ///
    /// # Errors
    /// If the storage failed.
    pub async fn resume_queue(&self, queue: &QueueName) -> Result<(), Error> {
        self.storage().resume_queue(queue).await?;
        self.emit(|| Event::QueueResumed(queue.clone()));
        self.announce(queue);
        Ok(())
    }

    /// Whether a queue is paused.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    pub async fn is_queue_paused(&self, queue: &QueueName) -> Result<bool, Error> {
        Ok(self.paused_queues().await?.contains(queue))
    }

    /// The paused queues, by name.
    ///
    /// # Errors
    /// If the storage cannot be asked.
    pub async fn paused_queues(&self) -> Result<Vec<QueueName>, Error> {
        self.storage().paused_queues().await
    }

    /// Deletes one job for good, with all that hangs off it. Its deduplication window is free from here on.
    ///
    /// # Errors
    /// [`Error::JobNotFound`], [`Error::JobHasChildren`], [`Error::JobHasPendingParent`].
    pub async fn delete_job(&self, id: JobId) -> Result<(), Error> {
        self.storage().delete(id).await
    }

    /// Deletes a job and everything below it for good, whatever they are doing. Answers how many jobs went.
    ///
    /// # Errors
    /// [`Error::JobNotFound`], [`Error::JobHasPendingParent`], [`Error::SubtreeTooDeep`].
    pub async fn delete_workflow(&self, root: JobId) -> Result<u64, Error> {
        self.storage().delete_workflow(root).await
    }

    /// Deletes the jobs of one queue and status for good, in steps of 1000, until none is left that may go. Answers
    /// how many went.
    ///
    /// # Errors
    /// If the storage failed; what earlier steps deleted stays deleted.
    pub async fn purge(&self, queue: &QueueName, status: PurgeStatus) -> Result<u64, Error> {
        let mut purged = 0;
        loop {
            match self.storage().purge(queue, status, PURGE_BATCH).await? {
                0 => return Ok(purged),
                deleted => purged += deleted,
            }
        }
    }
}
