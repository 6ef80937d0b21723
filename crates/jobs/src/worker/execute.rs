//! One run: the handler within its time, and the outcome that is written for it.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tracing::{Instrument as _, error, info_span, warn};

use super::Completed;
use super::engine::{Active, Ended, Engine, Place, Registration, Stop};
use crate::codec;
use crate::ctx::{Ctx, Run, repeated};
use crate::error::Error;
use crate::event::{Event, JobRef};
use crate::hooks::{Answer, Next};
use crate::job::{Claim, Job};
use crate::job_error::{JobError, Kind};
use crate::limits::sanitize_error;
use crate::outcome::{Completion, DeadLetterReason, Failure};

pub(super) fn job_ref(job: &Job) -> JobRef {
    JobRef { id: job.id, job_type: job.job_type.clone(), queue: job.queue.clone(), attempt: job.attempt }
}

/// How a handler ended.
enum End {
    Answered(Answer),
    TimedOut(Duration),
    Panicked(String),
    Stopped,
}

pub(super) async fn execute(
    engine: Arc<Engine>, job: Job, active: Arc<Active>, registration: Registration, place: Place,
    done: mpsc::Sender<Completed>,
) {
    let span = info_span!(
        target: "jobs", "job.process",
        job_type = %job.job_type, queue = %job.queue, job_id = %job.id, attempt = job.attempt,
        trace_context = job.trace_context.as_deref().and_then(|bytes| std::str::from_utf8(bytes).ok()),
    );
    let work = async {
        let _admission = match engine.admit(&job, &active.claim, &active.stop).await {
            Ok(admission) => admission,
            Err(bounce) => return engine.bounce(&active.claim, bounce).await,
        };
        active.has_slots.store(!engine.gates.caps.is_empty(), Ordering::Relaxed);
        let meter = engine.meters.of(&job);
        meter.started(&job);
        let retry = engine.config.storage_retry;
        let run = Arc::new(Run::new(job, active.claim.clone(), engine.queue.clone(), retry, active.stop.clone()));
        let end = handle(&engine, &run, &active).await;
        // What was being recorded has happened, whatever became of the handler.
        run.settle().await;
        meter.ran(active.since.elapsed());
        let ended = Ended { job: Arc::new(run.job.clone()), meter, _registered: registration };
        let disposed = engine.dispose(&run, &active, end, ended).await;
        if let Some(completed) = disposed {
            // The lane's place is given up only now: completions that wait are bounded by what is on the way.
            let _ = done.send(completed).await;
        }
    };
    work.instrument(span).await;
    drop(place);
}

async fn handle(engine: &Engine, run: &Arc<Run>, active: &Active) -> End {
    let queue = &engine.queue;
    let Some(registered) = queue.handler(run.job.job_type.as_str()) else {
        return End::Answered(Err(Error::HandlerNotFound(run.job.job_type.to_string()).into()));
    };
    let args = match codec::decode(queue.codec(), &run.job.args) {
        Ok(args) => args,
        Err(error) => return End::Answered(Err(error.into())),
    };
    queue.hook_table().start(&run.job);
    queue.emit(|| Event::JobStarted(job_ref(&run.job)));
    let limit = run.job.timeout.or(registered.options.timeout);
    let next = Next {
        layers: queue.execution_layers(),
        at: 0,
        handler: Box::new(move |ctx| registered.handler.run(ctx, &args)),
    };
    let ctx = Ctx(run.clone());
    // The handler is called inside, since it may panic before its first await.
    let call = AssertUnwindSafe(async move { next.run(ctx).await }).catch_unwind();
    let limited = async {
        match limit {
            Some(limit) => timeout(limit, call).await.map_err(|_| limit),
            None => Ok(call.await),
        }
    };
    tokio::select! {
        ended = limited => match ended {
            Ok(Ok(answer)) => End::Answered(answer),
            Ok(Err(panic)) => End::Panicked(panic_text(&*panic)),
            Err(limit) => End::TimedOut(limit),
        },
        () = active.stop.cancelled() => End::Stopped,
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("the handler panicked: {}", text.unwrap_or("without a text"))
}

impl Engine {
    /// Writes the outcome of a run. A completion that shall be written with others is answered instead.
    async fn dispose(&self, run: &Run, active: &Active, end: End, ended: Ended) -> Option<Completed> {
        if run.is_suspended() {
            self.queue.hook_table().waiting(&run.job);
            self.queue.emit(|| Event::JobWaiting(job_ref(&run.job)));
            return None;
        }
        let failed = match end {
            End::Answered(Ok(result)) => match run.left_out() {
                None => return self.succeed(run, Some(result), ended).await,
                Some(text) => Error::Determinism(text).into(),
            },
            End::Answered(Err(error)) if !matches!(error.kind(), Kind::Suspended | Kind::Lost) => {
                if error.is_retryable() && !self.queue.is_failure(&error) {
                    return self.succeed(run, None, ended).await;
                }
                error
            }
            End::Answered(Err(_)) => {
                self.unwritten(&run.job, &Error::JobNotOwned(run.job.id));
                return None;
            }
            End::TimedOut(limit) => JobError::new(format!("the run took longer than {limit:?}")),
            End::Panicked(text) => JobError::new(text),
            End::Stopped => {
                if active.why() == Stop::Release {
                    metrics::counter!("jobs.dequeue.released", "reason" => "stopped").increment(1);
                    self.release(&active.claim).await;
                }
                self.queue.hook_table().attempt_end(&run.job);
                return None;
            }
        };
        self.fail_or_retry(run, failed, &ended).await;
        None
    }

    async fn succeed(&self, run: &Run, result: Option<Vec<u8>>, ended: Ended) -> Option<Completed> {
        let encoded = result.map(|result| codec::encode(self.queue.codec(), result)).transpose();
        let completion = encoded.and_then(|result| Completion::new(run.claim.clone(), result));
        let completion = match completion {
            Ok(completion) => {
                completion.delete_checkpoints(self.retention.effective().deletes_checkpoints_on_complete())
            }
            Err(error) => {
                self.fail_or_retry(run, JobError::no_retry(error), &ended).await;
                return None;
            }
        };
        if 1 < self.config.completion_batch && self.queue.storage().batch_completion().is_some() {
            return Some(Completed { completion, ended });
        }
        let storage = self.queue.storage();
        let written = repeated(&self.config.storage_retry, || storage.complete(&completion)).await;
        self.completed(&ended, written);
        None
    }

    /// Tells of a completion once it was written, or was not.
    pub(super) fn completed(&self, ended: &Ended, written: Result<(), Error>) {
        match written {
            Ok(()) => {
                ended.meter.completed.increment(1);
                self.queue.hook_table().complete(&ended.job);
                self.queue.emit(|| Event::JobCompleted(job_ref(&ended.job)));
            }
            Err(error) => self.unwritten(&ended.job, &error),
        }
    }

    async fn fail_or_retry(&self, run: &Run, failed: JobError, ended: &Ended) {
        self.queue.failed(&run.job, &failed);
        let text = codec::encode_text(self.queue.codec(), &sanitize_error(&failed.to_string()));
        let failure = Failure::stored(text);
        let reason = match failed.kind() {
            Kind::NoRetry => Some(DeadLetterReason::NotRetryable),
            _ if !run.job.has_retries_left() => Some(DeadLetterReason::AttemptsExhausted),
            _ => None,
        };
        let (storage, retry) = (self.queue.storage(), &self.config.storage_retry);
        if let Some(reason) = reason {
            match repeated(retry, || storage.fail(&run.claim, &failure, reason)).await {
                Ok(()) => {
                    ended.meter.failed.increment(1);
                    warn!(target: "jobs", job_id = %run.job.id, job_type = %run.job.job_type, %reason, "job failed");
                    self.queue.hook_table().fail(&run.job, &failed);
                    let error = sanitize_error(&failed.to_string());
                    self.queue.emit(|| Event::JobFailed { job: job_ref(&run.job), error });
                }
                Err(error) => self.unwritten(&run.job, &error),
            }
            return;
        }
        let delay = self.delay(run, &failed);
        match repeated(retry, || storage.retry(&run.claim, &failure, delay)).await {
            Ok(()) => {
                ended.meter.retried.increment(1);
                tracing::debug!(target: "jobs", job_id = %run.job.id, attempt = run.job.attempt, "job.retry");
                let failed = self.queue.hook_table().retry(&run.job, failed, delay);
                let error = sanitize_error(&failed.to_string());
                self.queue.emit(|| Event::JobRetrying { job: job_ref(&run.job), error, delay });
            }
            Err(error) => self.unwritten(&run.job, &error),
        }
    }

    /// The wait before the next run: as the error says, else as the handler's policy does, else the worker's.
    fn delay(&self, run: &Run, failed: &JobError) -> Duration {
        if let Kind::RetryAfter(delay) = failed.kind() {
            return delay;
        }
        let own = self.queue.handler(run.job.job_type.as_str()).and_then(|handler| handler.options.backoff.clone());
        let policy = own.as_ref().unwrap_or(&self.config.backoff);
        // A policy that panics must not cost the job its outcome.
        let call = std::panic::catch_unwind(AssertUnwindSafe(|| policy.delay(run.job.attempt, failed)));
        call.unwrap_or(self.config.backoff_max).min(self.config.backoff_max)
    }

    /// Gives a claimed job back.
    pub(super) async fn release(&self, claim: &Claim) {
        let storage = self.queue.storage();
        match repeated(&self.config.storage_retry, || storage.release(claim)).await {
            Ok(()) | Err(Error::JobNotOwned(_)) => {}
            Err(error) => {
                error!(target: "jobs", job_id = %claim.job_id, %error, "a job could not be given back; it waits until \
                    its lease is found stale");
            }
        }
    }

    /// An outcome that is not in the database, and is never told as if it were.
    fn unwritten(&self, job: &Job, error: &Error) {
        if matches!(error, Error::JobNotOwned(_)) {
            warn!(target: "jobs", job_id = %job.id, "the claim was over before the outcome could be written");
        } else {
            error!(target: "jobs", job_id = %job.id, %error, "the outcome of a run could not be written");
        }
        self.queue.hook_table().attempt_end(job);
    }
}
