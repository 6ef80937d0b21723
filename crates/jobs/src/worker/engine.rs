//! What one worker knows: its settings, its lanes, and the runs that it has claimed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::gate::Gates;
use super::meter::{Meter, Meters};
use crate::backoff::{Backoff, RetryConfig};
use crate::job::{Claim, Job, JobId};
use crate::limits::{QueueName, WorkerId};
use crate::queue::Queue;
use crate::retention::{Retention, RetentionSweeper, UniqueLockSweep, UniqueLockSweeper};

/// Settings, checked.
pub(super) struct Config {
    pub(super) concurrency: u32,
    pub(super) poll_interval: Duration,
    pub(super) claim_batch: u32,
    pub(super) drain_timeout: Duration,
    pub(super) lease: Duration,
    pub(super) stale_age: Duration,
    pub(super) stale_interval: Duration,
    pub(super) audit_interval: Option<Duration>,
    pub(super) recovery_interval: Duration,
    pub(super) fan_out_stale_age: Duration,
    pub(super) fires_schedules: bool,
    pub(super) backoff: Arc<dyn Backoff>,
    pub(super) backoff_max: Duration,
    pub(super) storage_retry: RetryConfig,
    pub(super) dequeue_retry: RetryConfig,
    pub(super) completion_batch: u32,
    pub(super) completion_delay: Duration,
}

/// One queue of the worker.
pub(super) struct Lane {
    pub(super) queue: QueueName,
    pub(super) concurrency: u32,
    pub(super) running: AtomicU32,
    /// The last claim got all that it asked for: there may be more.
    pub(super) has_more: AtomicBool,
}

/// Why a handler is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The worker ends or was paused: the job goes back.
    Release,
    /// The claim is over: nothing is written.
    Lost,
}

/// A run that the worker has claimed.
pub(super) struct Active {
    pub(super) claim: Claim,
    pub(super) stop: CancellationToken,
    pub(super) since: Instant,
    pub(super) strikes: AtomicU8,
    /// Whether heartbeats have slots to renew.
    pub(super) has_slots: AtomicBool,
    is_lost: AtomicBool,
}

impl Active {
    pub(super) fn stop(&self, why: Stop) {
        if why == Stop::Lost {
            self.is_lost.store(true, Ordering::Release);
        }
        self.stop.cancel();
    }

    pub(super) fn why(&self) -> Stop {
        if self.is_lost.load(Ordering::Acquire) { Stop::Lost } else { Stop::Release }
    }
}

/// What is still known of a run when its outcome is written.
pub(super) struct Ended {
    pub(super) job: Arc<Job>,
    pub(super) meter: Arc<Meter>,
    pub(super) _registered: Registration,
}

pub(super) struct Engine {
    pub(super) queue: Queue,
    pub(super) id: WorkerId,
    pub(super) lanes: Vec<Lane>,
    pub(super) config: Config,
    pub(super) retention: RetentionSweeper,
    pub(super) unique_locks: UniqueLockSweeper,
    pub(super) meters: Meters,
    pub(super) gates: Gates,
    /// What is still written for runs that have ended.
    pub(super) afterwards: TaskTracker,
    /// A lane has room again, or the worker was resumed.
    pub(super) changed: Notify,
    pub(super) is_started: AtomicBool,
    pub(super) is_announced: AtomicBool,
    pub(super) is_paused: AtomicBool,
    active: Mutex<HashMap<JobId, Arc<Active>>>,
}

impl Engine {
    pub(super) fn new(
        queue: Queue, id: WorkerId, lanes: Vec<(QueueName, u32)>, config: Config, retention: Retention,
        unique_locks: UniqueLockSweep, gates: Gates,
    ) -> Self {
        let lane = |(queue, concurrency)| Lane {
            queue,
            concurrency,
            running: AtomicU32::new(0),
            has_more: AtomicBool::new(false),
        };
        let storage = queue.shared_storage();
        Self {
            retention: RetentionSweeper::new(storage.clone(), retention),
            unique_locks: UniqueLockSweeper::new(storage, unique_locks),
            queue,
            id,
            lanes: lanes.into_iter().map(lane).collect(),
            config,
            meters: Meters::default(),
            gates,
            afterwards: TaskTracker::new(),
            changed: Notify::new(),
            is_started: AtomicBool::new(false),
            is_announced: AtomicBool::new(false),
            is_paused: AtomicBool::new(false),
            active: Mutex::default(),
        }
    }

    pub(super) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Acquire)
    }

    fn runs(&self) -> MutexGuard<'_, HashMap<JobId, Arc<Active>>> {
        self.active.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn running(&self) -> usize {
        self.runs().len()
    }

    /// The runs at this moment.
    pub(super) fn actives(&self) -> Vec<Arc<Active>> {
        self.runs().values().cloned().collect()
    }

    pub(super) fn active(&self, id: JobId) -> Option<Arc<Active>> {
        self.runs().get(&id).cloned()
    }

    pub(super) fn stop_all(&self, why: Stop) {
        self.runs().values().for_each(|active| active.stop(why));
    }

    /// Keeps a claimed job among the runs until the registration is dropped.
    pub(super) fn register(self: &Arc<Self>, claim: &Claim, end: &CancellationToken) -> (Arc<Active>, Registration) {
        let active = Arc::new(Active {
            claim: claim.clone(),
            stop: end.child_token(),
            since: Instant::now(),
            strikes: AtomicU8::new(0),
            has_slots: AtomicBool::new(false),
            is_lost: AtomicBool::new(false),
        });
        self.runs().insert(claim.job_id, active.clone());
        (active.clone(), Registration { engine: self.clone(), active })
    }

    /// Takes a place in a lane until it is dropped.
    pub(super) fn occupy(self: &Arc<Self>, lane: usize) -> Place {
        self.lanes[lane].running.fetch_add(1, Ordering::AcqRel);
        Place { engine: self.clone(), lane }
    }

    pub(super) fn lane_of(&self, queue: &QueueName) -> usize {
        // A claim answers with jobs of the queues that it asked for.
        self.lanes.iter().position(|lane| lane.queue == *queue).unwrap_or(0)
    }
}

pub(super) struct Registration {
    engine: Arc<Engine>,
    active: Arc<Active>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut runs = self.engine.runs();
        // The job may have been claimed again by this very worker.
        if runs.get(&self.active.claim.job_id).is_some_and(|active| Arc::ptr_eq(active, &self.active)) {
            runs.remove(&self.active.claim.job_id);
        }
    }
}

pub(super) struct Place {
    engine: Arc<Engine>,
    lane: usize,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.engine.lanes[self.lane].running.fetch_sub(1, Ordering::AcqRel);
        self.engine.changed.notify_one();
    }
}
