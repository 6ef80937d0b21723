//! Runs jobs: claims them, calls their handlers, writes the outcomes, and keeps the store in order.

mod builder;
mod claim;
mod complete;
mod engine;
mod execute;
mod gate;
mod meter;
mod recover;
mod watch;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

pub use self::builder::{QueueOptions, WorkerBuilder};
use self::engine::{Engine, Stop};
use crate::error::Error;
use crate::event::Event;
use crate::limits::{COMPLETION_BATCH_MAX, DRAIN_GRACE, WorkerId};
use crate::outcome::Completion;
use crate::queue::{PauseMode, Queue};
use crate::retention::Retention;
use crate::schedule::Scheduler;

/// Runs jobs of one storage in this process. Cheap to clone; the clones are one worker.
///
/// **By default a worker deletes history.** Without a retention setting it deletes completed jobs after 30 days,
/// failed and cancelled ones after 90 and consumed signals after 7, for good and with all that hangs off them;
/// [`WorkerBuilder::retention`] changes that, and [`Retention::disabled`] stops it.
///
/// A job runs at least once: should the process die, another worker runs it again. Only steps that were recorded are
/// not repeated.
#[derive(Clone)]
pub struct Worker {
    engine: Arc<Engine>,
}

/// What a worker is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerHealth {
    /// Whether it runs.
    pub is_started: bool,
    /// Whether it claims nothing because it was paused.
    pub is_paused: bool,
    /// Jobs that it has claimed and not let go of.
    pub running: usize,
    /// What it deletes in the background.
    pub retention: Retention,
}

/// A finished run whose completion is to be written with others.
struct Completed {
    completion: Completion,
    ended: engine::Ended,
}

impl Worker {
    /// A worker for the handlers of `queue`, to be configured.
    pub fn builder(queue: &Queue) -> WorkerBuilder {
        WorkerBuilder::new(queue.clone())
    }

    fn of(engine: Engine) -> Self {
        Self { engine: Arc::new(engine) }
    }

    /// The name under which it claims jobs.
    pub fn id(&self) -> &WorkerId {
        &self.engine.id
    }

    /// What it is doing.
    pub fn health(&self) -> WorkerHealth {
        WorkerHealth {
            is_started: self.engine.is_started.load(Ordering::Acquire),
            is_paused: self.engine.is_paused(),
            running: self.engine.running(),
            retention: self.engine.retention.effective(),
        }
    }

    /// Claims nothing until it is resumed. Aggressive also stops the handlers and gives their jobs back, with their
    /// attempts not counted.
    pub fn pause(&self, mode: PauseMode) {
        self.engine.is_paused.store(true, Ordering::Release);
        if mode == PauseMode::Aggressive {
            self.engine.stop_all(Stop::Release);
        }
        self.engine.queue.emit(|| Event::WorkerPaused);
    }

    /// Claims jobs again.
    pub fn resume(&self) {
        self.engine.is_paused.store(false, Ordering::Release);
        self.engine.changed.notify_one();
        self.engine.queue.emit(|| Event::WorkerResumed);
    }

    /// Runs jobs until `shutdown` is cancelled. It then claims no more, waits for the handlers as long as the drain
    /// time-out allows, stops those that are left and gives their jobs back, without counting the attempt.
    ///
    /// Let it come to its end. Dropped in the middle it stops its handlers at once, and their jobs wait until their
    /// leases are found stale.
    ///
    /// # Errors
    /// [`Error::WorkerAlreadyStarted`] if it runs already, [`Error::Unsupported`] if it has schedules or limits of the
    /// fleet and its storage cannot keep them.
    pub async fn run(&self, shutdown: CancellationToken) -> Result<(), Error> {
        let engine = &self.engine;
        if engine.is_started.swap(true, Ordering::AcqRel) {
            return Err(Error::WorkerAlreadyStarted);
        }
        let _started = Started(engine);
        let scheduler = self.scheduler()?;
        if engine.gates.need_storage() && engine.queue.storage().gates().is_none() {
            return Err(Error::Unsupported("concurrency caps and rate limits"));
        }
        self.announce();
        let background = CancellationToken::new();
        let handlers_end = CancellationToken::new();
        // Dropped in the middle, nothing goes on behind the caller's back.
        let _ends_background = background.clone().drop_guard();
        let _ends_handlers = handlers_end.clone().drop_guard();
        let (loops, handlers) = (TaskTracker::new(), TaskTracker::new());
        self.start_loops(&loops, &background);
        if let Some(scheduler) = scheduler {
            self.start(&loops, &background, |engine, end| fire_schedules(engine, end, scheduler));
        }
        let (done, finished) = mpsc::channel(COMPLETION_BATCH_MAX as usize);
        let writer = tokio::spawn(complete::write_completions(engine.clone(), finished));
        let pool = claim::Pool { handlers: &handlers, done: &done, end: &handlers_end };
        claim::claim_until(engine, &shutdown, &pool).await;
        handlers.close();
        self.drain(&handlers).await;
        drop(done);
        // Every handler has let go of its end: the writer ends after what it has.
        if timeout_at(Instant::now() + DRAIN_GRACE, writer).await.is_err() {
            warn!(target: "jobs", worker = %engine.id.as_str(), "completions were not all written before the end");
        }
        engine.afterwards.close();
        let freed = timeout_at(Instant::now() + DRAIN_GRACE, engine.afterwards.wait()).await.is_ok();
        engine.afterwards.reopen();
        background.cancel();
        loops.close();
        if !freed {
            warn!(target: "jobs", worker = %engine.id.as_str(), "slots were not all freed; they end by themselves");
        }
        if timeout_at(Instant::now() + DRAIN_GRACE, loops.wait()).await.is_err() {
            warn!(target: "jobs", worker = %engine.id.as_str(), "a background loop did not end in time");
        }
        info!(target: "jobs", worker = %engine.id.as_str(), "worker stopped");
        Ok(())
    }

    fn scheduler(&self) -> Result<Option<Scheduler>, Error> {
        let schedules = self.engine.queue.schedules();
        if schedules.is_empty() || !self.engine.config.fires_schedules {
            return Ok(None);
        }
        Scheduler::new(self.engine.queue.shared_storage(), schedules).map(Some)
    }

    /// Waits for the handlers, and stops those that take too long.
    async fn drain(&self, handlers: &TaskTracker) {
        let until = Instant::now() + self.engine.config.drain_timeout;
        if timeout_at(until, handlers.wait()).await.is_ok() {
            return;
        }
        self.engine.stop_all(Stop::Release);
        if timeout_at(Instant::now() + DRAIN_GRACE, handlers.wait()).await.is_err() {
            let left = self.engine.running();
            warn!(target: "jobs", worker = %self.engine.id.as_str(), left, "handlers did not end in time; their jobs \
                wait until their leases are found stale");
        }
    }

    fn announce(&self) {
        self.engine.retention.announce();
        let storage = self.engine.queue.storage();
        let missing: Vec<&str> = [
            ("batch_completion", storage.batch_completion().is_none()),
            ("checkpoints", storage.checkpoints().is_none()),
            ("signals", storage.signals().is_none()),
            ("timers", storage.timers().is_none()),
            ("ownership", storage.ownership().is_none()),
            ("leases", storage.leases().is_none()),
            ("wake", storage.wake().is_none()),
        ]
        .into_iter()
        .filter_map(|(name, is_missing)| is_missing.then_some(name))
        .collect();
        if !missing.is_empty() && !self.engine.is_announced.swap(true, Ordering::AcqRel) {
            info!(target: "jobs", missing = missing.join(","), "the storage lacks capabilities");
        }
        let queues: Vec<&str> = self.engine.lanes.iter().map(|lane| lane.queue.as_str()).collect();
        info!(target: "jobs", worker = %self.engine.id.as_str(), queues = queues.join(","), "worker started");
    }

    fn start_loops(&self, loops: &TaskTracker, end: &CancellationToken) {
        self.start(loops, end, watch::heartbeats);
        self.start(loops, end, watch::audits);
        self.start(loops, end, recover::reap);
        self.start(loops, end, recover::wake);
        self.start(loops, end, gate::sweep_slots);
        self.start(loops, end, |engine, end| async move { engine.retention.run(&end).await });
        self.start(loops, end, |engine, end| async move { engine.unique_locks.run(&end).await });
    }

    fn start<F, Fut>(&self, loops: &TaskTracker, end: &CancellationToken, run: F)
    where
        F: FnOnce(Arc<Engine>, CancellationToken) -> Fut,
        Fut: Future<Output = ()> + Send + 'static,
    {
        loops.spawn(run(self.engine.clone(), end.clone()));
    }
}

async fn fire_schedules(engine: Arc<Engine>, end: CancellationToken, mut scheduler: Scheduler) {
    scheduler.run(&end, |taken| engine.queue.announce(&taken.queue)).await;
}

/// Lets the worker be started again, however its run ends.
struct Started<'a>(&'a Engine);

impl Drop for Started<'_> {
    fn drop(&mut self) {
        self.0.is_started.store(false, Ordering::Release);
    }
}

/// Time between two heartbeats: three of them fit before a job is found stale.
fn heartbeat_period(stale_age: Duration) -> Duration {
    use crate::limits::{HEARTBEAT_MAX, HEARTBEAT_MIN};
    (stale_age / 3).clamp(HEARTBEAT_MIN, HEARTBEAT_MAX)
}
