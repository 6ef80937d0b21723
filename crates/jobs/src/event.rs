//! What happens to jobs, told to whoever listens in this process.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;

use crate::job::JobId;
use crate::limits::{EVENT_BUFFER, JobType, QueueName};

/// Which job an event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobRef {
    /// The job.
    pub id: JobId,
    /// The name of its handler.
    pub job_type: JobType,
    /// Its queue.
    pub queue: QueueName,
    /// Started runs so far.
    pub attempt: u32,
}

/// Why a run was taken from its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReclaimReason {
    /// It gave no sign of life.
    StaleLock,
    /// The database does not assign the job to it any more.
    OwnershipAudit,
}

impl ReclaimReason {
    /// Its name in logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::StaleLock => "stale_lock",
            Self::OwnershipAudit => "ownership_audit",
        }
    }
}

/// Something that happened in this process, after it was written.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// A run began.
    JobStarted(JobRef),
    /// A job completed.
    JobCompleted(JobRef),
    /// A job failed for good.
    JobFailed {
        /// The job.
        job: JobRef,
        /// The text of the error.
        error: String,
    },
    /// A run failed, and the job runs again.
    JobRetrying {
        /// The job.
        job: JobRef,
        /// The text of the error.
        error: String,
        /// How long it waits.
        delay: Duration,
    },
    /// A job waits for a signal, a time or its children.
    JobWaiting(JobRef),
    /// A step was recorded.
    CheckpointSaved {
        /// The job.
        id: JobId,
        /// The step.
        name: String,
    },
    /// A job was put aside.
    JobPaused(JobId),
    /// A job was cancelled, with everything below it.
    JobCancelled(JobId),
    /// A job was put back.
    JobResumed(JobId),
    /// A signal woke a job.
    JobResumedBySignal {
        /// The job.
        id: JobId,
        /// The signal.
        name: String,
    },
    /// A job was taken from a lost worker, or a run of this worker from it.
    JobReclaimed {
        /// The job.
        id: JobId,
        /// Why.
        reason: ReclaimReason,
    },
    /// A signal was stored.
    SignalDelivered {
        /// The job.
        id: JobId,
        /// The signal.
        name: String,
    },
    /// A queue was paused.
    QueuePaused(QueueName),
    /// A queue was resumed.
    QueueResumed(QueueName),
    /// A worker of this process was paused.
    WorkerPaused,
    /// A worker of this process was resumed.
    WorkerResumed,
    /// One that the program made up.
    Custom {
        /// Its name.
        name: String,
        /// Its content.
        payload: serde_json::Value,
    },
}

/// Events from the moment of the subscription on; dropping it ends the subscription.
#[derive(Debug)]
pub struct EventStream {
    events: mpsc::Receiver<Event>,
    dropped: Arc<AtomicU64>,
}

impl EventStream {
    /// Waits for the next event. `None` once the queue is gone.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// The next event, if one is there.
    pub fn try_next(&mut self) -> Option<Event> {
        self.events.try_recv().ok()
    }

    /// Events that this subscription lost because it was 100 behind.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

struct Subscriber {
    events: mpsc::Sender<Event>,
    dropped: Arc<AtomicU64>,
}

/// The subscribers of one process.
#[derive(Default)]
pub(crate) struct Events(Mutex<Vec<Subscriber>>);

impl Events {
    pub(crate) fn subscribe(&self) -> EventStream {
        let (sender, events) = mpsc::channel(EVENT_BUFFER);
        let dropped = Arc::new(AtomicU64::new(0));
        let subscriber = Subscriber { events: sender, dropped: dropped.clone() };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(subscriber);
        EventStream { events, dropped }
    }

    /// Never waits: a subscriber that is too far behind loses the event. It is made only if somebody listens.
    pub(crate) fn emit(&self, event: impl FnOnce() -> Event) {
        let mut subscribers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if subscribers.is_empty() {
            return;
        }
        let event = event();
        subscribers.retain(|subscriber| match subscriber.events.try_send(event.clone()) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Full(_)) => {
                subscriber.dropped.fetch_add(1, Ordering::Relaxed);
                metrics::counter!("jobs.events.dropped").increment(1);
                true
            }
            Err(mpsc::error::TrySendError::Closed(_)) => false,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_subscriber_loses_events_and_holds_up_nobody() {
        let events = Events::default();
        let (mut slow, gone) = (events.subscribe(), events.subscribe());
        drop(gone);
        for _ in 0..EVENT_BUFFER + 3 {
            events.emit(|| Event::WorkerPaused);
        }
        assert_eq!(slow.dropped(), 3);
        assert_eq!(events.0.lock().unwrap().len(), 1, "one that was dropped is still told");
        assert_eq!(std::iter::from_fn(|| slow.try_next()).count(), EVENT_BUFFER);
    }
}
