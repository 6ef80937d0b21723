//! What a handler sees of its job, and the records of the steps that it has taken.

mod call;
mod fan_out;
mod phase;
mod signal;
mod timer;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::OnceCell;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::backoff::RetryConfig;
use crate::error::Error;
use crate::event::Event;
use crate::job::{Claim, Determinism, Job, JobId};
use crate::job_error::JobError;
use crate::limits::CHECKPOINT_WRITE_BUDGET;
use crate::queue::Queue;
use crate::storage::{Checkpoint, CheckpointStore};

pub use self::fan_out::{FanOutError, FanOutResults, SubJob, SubJobFailure};
pub use self::phase::DEFAULT_VERSION;
pub(crate) use self::signal::check_name as check_signal_name;

/// One run of a job, as its handler sees it. Cheap to clone.
#[derive(Clone)]
pub struct Ctx(pub(crate) Arc<Run>);

/// The state of one run.
pub(crate) struct Run {
    pub(crate) job: Job,
    pub(crate) claim: Claim,
    pub(crate) queue: Queue,
    pub(crate) retry: RetryConfig,
    /// Cancelled when the handler has to stop.
    pub(crate) stop: CancellationToken,
    records: OnceCell<Mutex<Records>>,
    next_index: AtomicI32,
    is_suspended: AtomicBool,
    /// Writes that go on although the handler was stopped.
    writes: TaskTracker,
}

/// The records of earlier runs and of this one.
#[derive(Default)]
struct Records {
    by_index: BTreeMap<i32, Vec<Checkpoint>>,
    /// Those that were there at the start and were asked for, with what they span.
    replayed: Vec<(i32, i32)>,
    saved_phases: BTreeSet<String>,
    /// The highest place of a record from an earlier run.
    last_replayable: i32,
}

impl Records {
    fn at(&self, index: i32) -> &[Checkpoint] {
        self.by_index.get(&index).map_or(&[], Vec::as_slice)
    }

    fn find(&self, index: i32, call_type: &str) -> Option<&Checkpoint> {
        self.at(index).iter().find(|record| record.call_type == call_type)
    }

    fn put(&mut self, record: Checkpoint) {
        let place = self.by_index.entry(record.call_index).or_default();
        place.retain(|known| known.call_type != record.call_type);
        place.push(record);
    }
}

impl Run {
    pub(crate) fn new(job: Job, claim: Claim, queue: Queue, retry: RetryConfig, stop: CancellationToken) -> Self {
        Self {
            job,
            claim,
            queue,
            retry,
            stop,
            records: OnceCell::new(),
            next_index: AtomicI32::new(0),
            is_suspended: AtomicBool::new(false),
            writes: TaskTracker::new(),
        }
    }

    /// Whether the job waits, whatever its handler made of that.
    pub(crate) fn is_suspended(&self) -> bool {
        self.is_suspended.load(Ordering::Relaxed)
    }

    /// Waits for records that are being written, at most as long as they may take.
    pub(crate) async fn settle(&self) {
        self.writes.close();
        if !self.writes.is_empty() {
            // Past it the write has given up as well.
            let _ = timeout(CHECKPOINT_WRITE_BUDGET * 2, self.writes.wait()).await;
        }
    }

    /// Whether a strict run left out a step that an earlier run had recorded.
    pub(crate) fn left_out(&self) -> Option<String> {
        if self.job.determinism != Determinism::Strict {
            return None;
        }
        let records = lock(self.records.get()?);
        let spanned = |index: i32| records.replayed.iter().any(|(from, end)| *from <= index && index < *end);
        let all = records.by_index.iter().filter(|(index, _)| 0 <= **index && **index <= records.last_replayable);
        let mut left = all.filter(|(index, _)| !spanned(**index));
        left.next().map(|(index, found)| {
            let name = found.first().map_or("", |record| record.call_type.as_str());
            format!("the run finished without step {name}, which is recorded at {index}")
        })
    }
}

fn lock(records: &Mutex<Records>) -> MutexGuard<'_, Records> {
    records.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ctx {
    /// The job, as it was when this run began.
    pub fn job(&self) -> &Job {
        &self.0.job
    }

    /// The job's id: the same in every run, and so a good key for what the job does elsewhere.
    pub fn job_id(&self) -> JobId {
        self.0.job.id
    }

    /// The number of this run, from 1.
    pub fn attempt(&self) -> u32 {
        self.0.job.attempt
    }

    /// The right to write about this job, for a transaction of the handler's own.
    pub fn claim(&self) -> &Claim {
        &self.0.claim
    }

    /// The queue that runs the handler, to enqueue more.
    pub fn queue(&self) -> &Queue {
        &self.0.queue
    }

    /// Ready once the handler has to stop: the job was cancelled or is not owned any more, its time is over, or the
    /// worker ends. Shortly after, the handler's future is dropped at its next `await`.
    pub async fn stopped(&self) {
        self.0.stop.cancelled().await;
    }

    fn store(&self) -> Result<&dyn CheckpointStore, JobError> {
        let store = self.0.queue.storage().checkpoints();
        store.ok_or_else(|| JobError::from(Error::Unsupported("checkpoints")))
    }

    /// The records, which are read once a run.
    async fn records(&self) -> Result<&Mutex<Records>, JobError> {
        let load = || async {
            let mut records = Records { last_replayable: -1, ..Records::default() };
            for record in self.store()?.load(self.0.job.id).await? {
                records.last_replayable = records.last_replayable.max(record.call_index);
                records.put(record);
            }
            Ok::<_, JobError>(Mutex::new(records))
        };
        self.0.records.get_or_try_init(load).await
    }

    fn next_index(&self) -> i32 {
        self.0.next_index.fetch_add(1, Ordering::Relaxed)
    }

    /// Says that the job waits: whatever the handler returns now is not its outcome.
    fn suspended(&self) -> JobError {
        self.0.is_suspended.store(true, Ordering::Relaxed);
        JobError::suspended()
    }

    /// Writes a record. The write goes on when the handler is stopped, since what it records has happened.
    async fn save(&self, record: Checkpoint) -> Result<(), JobError> {
        let run = self.0.clone();
        let records = self.records().await?;
        let written = record.clone();
        let write = self.0.writes.spawn(async move {
            let Some(store) = run.queue.storage().checkpoints() else {
                return Err(Error::Unsupported("checkpoints"));
            };
            let write = repeated(&run.retry, || store.save(&run.claim, &written));
            match timeout(CHECKPOINT_WRITE_BUDGET, write).await {
                Ok(done) => done,
                Err(_) => Err(Error::storage("the record was not written in time")),
            }
        });
        write.await.map_err(JobError::new)??;
        let (id, name) = (self.0.job.id, record.call_type.clone());
        lock(records).put(record);
        self.0.queue.emit(|| Event::CheckpointSaved { id, name });
        Ok(())
    }
}

/// Repeats a call to the storage that failed for a reason which may pass.
pub(crate) async fn repeated<T, F, Fut>(config: &RetryConfig, call: F) -> Result<T, Error>
where
    F: Fn() -> Fut,
    Fut: Future<Output = Result<T, Error>>,
{
    let mut attempt = 0;
    loop {
        let outcome = call().await;
        attempt += 1;
        match outcome {
            Err(Error::Busy(_) | Error::Storage(_)) if attempt < config.attempts => {
                let wait: Duration = config.backoff.nth(attempt - 1);
                ebbtide_sweep::pause(wait, &CancellationToken::new()).await;
            }
            outcome => return outcome,
        }
    }
}
