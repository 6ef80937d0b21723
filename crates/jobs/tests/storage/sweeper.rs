//! The loops of a worker: what they say, when they tick, and what a storage without a capability makes of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use ebbtide_jobs::retention::{RetentionSweeper, Ticker, UniqueLockSweeper, run_once};
use ebbtide_jobs::{
    Claim, ClaimRequest, Completion, DeadLetterReason, Enqueued, Error, Failure, Forwarding, Job, JobId, JobStatus,
    Migrated, NewJob, PurgeStatus, QueueName, Reclaim, Reclaimed, Retention, RetentionStore, SignalRetentionStore,
    Storage, TerminalStatus, UniqueLockStore, UniqueLockSweep,
};
use jiff::Timestamp;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::Level;

use crate::log::Log;
use crate::rows::Row;
use crate::support::{DAY, Store};

const ENABLED: &str = "INFO jobs: retention GC enabled completed_after=720h0m0s failed_after=2160h0m0s \
    consumed_signals_after=168h0m0s disable_hint=\"disable with Retention::disabled()\"";
const DISABLED: &str = "WARN jobs: retention is disabled; completed/failed/cancelled job rows and consumed signals \
    accumulate forever";

/// Ticks when the test says so, and tells it when the tick before is over.
struct ByHand {
    go: mpsc::Receiver<()>,
    idle: mpsc::Sender<()>,
}

impl ByHand {
    fn new() -> (Self, mpsc::Sender<()>, mpsc::Receiver<()>) {
        let ((go, from_test), (idle, to_test)) = (mpsc::channel(1), mpsc::channel(1));
        (Self { go: from_test, idle }, go, to_test)
    }
}

impl Ticker for ByHand {
    async fn next(&mut self, cancel: &CancellationToken) -> bool {
        let _ = self.idle.send(()).await;
        tokio::select! {
            () = cancel.cancelled() => false,
            go = self.go.recv() => go.is_some(),
        }
    }
}

/// Runs the loop for so many ticks.
async fn ticks(sweeper: &RetentionSweeper, ticks: usize) {
    let (ticker, go, mut idle) = ByHand::new();
    let cancel = CancellationToken::new();
    let by_hand = async {
        for _ in 0..ticks {
            if idle.recv().await.is_none() {
                return;
            }
            go.send(()).await.expect("the loop is there");
        }
        let _ = idle.recv().await;
        cancel.cancel();
    };
    tokio::join!(sweeper.run_with(ticker, &cancel), by_hand);
}

/// A storage in which single capabilities are missing or broken.
struct Partial {
    all: Forwarding,
    has_jobs: bool,
    has_signals: bool,
    has_locks: bool,
    deletes_checkpoints: bool,
    /// Passes over completed jobs that fail before one succeeds, and whether as busy.
    failures: AtomicU32,
    is_busy: bool,
    passes: AtomicU32,
}

impl Partial {
    fn of(t: &Store) -> Self {
        Self {
            all: Forwarding::new(t.storage.clone()),
            has_jobs: true,
            has_signals: true,
            has_locks: true,
            deletes_checkpoints: true,
            failures: AtomicU32::new(0),
            is_busy: false,
            passes: AtomicU32::new(0),
        }
    }
}

#[async_trait]
impl RetentionStore for Partial {
    async fn delete_terminal_older_than(
        &self, status: TerminalStatus, age: Duration, limit: u32,
    ) -> Result<u64, Error> {
        if status == TerminalStatus::Completed {
            self.passes.fetch_add(1, Ordering::Relaxed);
            let left = self.failures.load(Ordering::Relaxed);
            if 0 < left {
                self.failures.store(left - 1, Ordering::Relaxed);
                return Err(if self.is_busy { Error::Busy("again".into()) } else { Error::storage("broken") });
            }
        }
        self.all.retention().unwrap().delete_terminal_older_than(status, age, limit).await
    }

    async fn delete_terminal_before(
        &self, status: TerminalStatus, cutoff: Timestamp, limit: u32,
    ) -> Result<u64, Error> {
        self.all.retention().unwrap().delete_terminal_before(status, cutoff, limit).await
    }
}

#[async_trait]
impl Storage for Partial {
    async fn migrate(&self) -> Result<Migrated, Error> {
        self.all.migrate().await
    }
    async fn now(&self) -> Result<Timestamp, Error> {
        self.all.now().await
    }
    async fn job(&self, id: JobId) -> Result<Option<Job>, Error> {
        self.all.job(id).await
    }
    async fn enqueue(&self, job: &NewJob) -> Result<JobId, Error> {
        self.all.enqueue(job).await
    }
    async fn enqueue_batch(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, Error> {
        self.all.enqueue_batch(jobs).await
    }
    async fn claim(&self, request: &ClaimRequest) -> Result<Vec<Job>, Error> {
        self.all.claim(request).await
    }
    async fn heartbeat(&self, claim: &Claim, lease: Duration) -> Result<(), Error> {
        self.all.heartbeat(claim, lease).await
    }
    async fn complete(&self, completion: &Completion) -> Result<(), Error> {
        self.all.complete(completion).await
    }
    async fn retry(&self, claim: &Claim, failure: &Failure, delay: Duration) -> Result<(), Error> {
        self.all.retry(claim, failure, delay).await
    }
    async fn fail(&self, claim: &Claim, failure: &Failure, reason: DeadLetterReason) -> Result<(), Error> {
        self.all.fail(claim, failure, reason).await
    }
    async fn release(&self, claim: &Claim) -> Result<(), Error> {
        self.all.release(claim).await
    }
    async fn reclaim(&self, reclaim: &Reclaim) -> Result<Vec<Reclaimed>, Error> {
        self.all.reclaim(reclaim).await
    }
    async fn cancel(&self, id: JobId) -> Result<u64, Error> {
        self.all.cancel(id).await
    }
    async fn pause(&self, id: JobId) -> Result<(), Error> {
        self.all.pause(id).await
    }
    async fn resume(&self, id: JobId) -> Result<(), Error> {
        self.all.resume(id).await
    }
    async fn requeue(&self, id: JobId) -> Result<(), Error> {
        self.all.requeue(id).await
    }
    async fn delete(&self, id: JobId) -> Result<(), Error> {
        self.all.delete(id).await
    }
    async fn delete_workflow(&self, root: JobId) -> Result<u64, Error> {
        self.all.delete_workflow(root).await
    }
    async fn purge(&self, queue: &QueueName, status: PurgeStatus, limit: u32) -> Result<u64, Error> {
        self.all.purge(queue, status, limit).await
    }
    async fn pause_queue(&self, queue: &QueueName, by: &str) -> Result<(), Error> {
        self.all.pause_queue(queue, by).await
    }
    async fn resume_queue(&self, queue: &QueueName) -> Result<(), Error> {
        self.all.resume_queue(queue).await
    }
    async fn paused_queues(&self) -> Result<Vec<QueueName>, Error> {
        self.all.paused_queues().await
    }
    fn deletes_checkpoints(&self) -> bool {
        self.deletes_checkpoints
    }
    fn retention(&self) -> Option<&dyn RetentionStore> {
        self.has_jobs.then_some(self)
    }
    fn signal_retention(&self) -> Option<&dyn SignalRetentionStore> {
        if self.has_signals { self.all.signal_retention() } else { None }
    }
    fn unique_locks(&self) -> Option<&dyn UniqueLockStore> {
        if self.has_locks { self.all.unique_locks() } else { None }
    }
}

async fn the_stock_policy_sweeps_and_says_so_once(t: Store) {
    let (log, _guard) = Log::start(Level::INFO);
    Row::completed().ended(&t, DAY * 31).put(&t).await;
    let sweeper = RetentionSweeper::new(t.storage.clone(), Retention::stock());
    ticks(&sweeper, 1).await;
    assert!(t.jobs().await.is_empty());
    ticks(&sweeper, 2).await;
    sweeper.announce();
    assert_eq!(log.lines(), [ENABLED], "no line for a successful tick either");
}

async fn a_tick_is_one_debug_line(t: Store) {
    let (log, _guard) = Log::start(Level::DEBUG);
    Row::completed().ended(&t, DAY * 31).put(&t).await;
    ticks(&RetentionSweeper::new(t.storage.clone(), Retention::stock()), 1).await;
    let lines = log.lines();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[1].starts_with("DEBUG jobs: retention tick completed=1 failed=0 cancelled=0 consumed_signals=0"));
}

async fn a_policy_that_is_off_warns_once_and_never_ticks(t: Store) {
    for policy in [Retention::disabled(), Retention::custom(), Retention::stock().completed_after(Duration::ZERO)] {
        let (log, _guard) = Log::start(Level::INFO);
        let old = Row::completed().ended(&t, DAY * 3650).put(&t).await;
        let is_on = policy.is_enabled();
        let sweeper = RetentionSweeper::new(t.storage.clone(), policy);
        ticks(&sweeper, 2).await;
        ticks(&sweeper, 2).await;
        if is_on {
            assert_eq!(log.lines(), [ENABLED.replace("720h0m0s", "0s")]);
        } else {
            assert_eq!(log.lines(), [DISABLED]);
        }
        assert!(t.jobs().await.contains(&old));
    }
}

async fn every_worker_says_it_for_itself_and_once_from_many_threads(t: Store) {
    let (log, _guard) = Log::start(Level::INFO);
    let sweepers = [Retention::stock(), Retention::disabled(), Retention::stock()]
        .map(|policy| RetentionSweeper::new(t.storage.clone(), policy));
    for sweeper in &sweepers {
        std::thread::scope(|scope| {
            for _ in 0..8 {
                // A subscriber belongs to a thread.
                let log = log.clone();
                scope.spawn(move || {
                    let subscriber =
                        tracing_subscriber::fmt().with_ansi(false).without_time().with_writer(log).finish();
                    tracing::subscriber::with_default(subscriber, || sweeper.announce());
                });
            }
        });
    }
    assert_eq!(log.lines(), [ENABLED, DISABLED, ENABLED]);
}

async fn checkpoint_deletion_alone_is_off_and_still_in_force(t: Store) {
    let (log, _guard) = Log::start(Level::INFO);
    let policy = Retention::custom().delete_checkpoints_on_complete();
    let sweeper = RetentionSweeper::new(t.storage.clone(), policy);
    sweeper.announce();
    assert_eq!(log.lines(), [DISABLED]);
    assert!(sweeper.effective().deletes_checkpoints_on_complete());
}

async fn a_storage_without_checkpoint_deletion_warns_once(t: Store) {
    let (log, _guard) = Log::start(Level::INFO);
    let storage = Arc::new(Partial { deletes_checkpoints: false, ..Partial::of(&t) });
    let sweeper = RetentionSweeper::new(storage, Retention::stock().delete_checkpoints_on_complete());
    sweeper.announce();
    sweeper.announce();
    let lines = log.lines();
    assert_eq!((lines.len(), lines[0].as_str()), (2, ENABLED));
    assert!(lines[1].starts_with("WARN jobs: the storage does not delete checkpoints"), "{lines:?}");
}

async fn a_storage_without_retention_warns_once_instead(t: Store) {
    let (log, _guard) = Log::start(Level::INFO);
    let old = Row::completed().ended(&t, DAY * 3650).put(&t).await;
    let storage = Arc::new(Partial { has_jobs: false, has_signals: false, ..Partial::of(&t) });
    let sweeper = RetentionSweeper::new(storage, Retention::stock());
    ticks(&sweeper, 2).await;
    ticks(&sweeper, 2).await;
    let lines = log.lines();
    assert_eq!(lines, ["WARN jobs: the storage does not support retention; nothing is deleted by age"]);
    assert!(!sweeper.effective().is_enabled());
    assert_eq!(t.jobs().await, [old].into());
}

async fn half_of_the_capability_does_its_half(t: Store) {
    let (log, _guard) = Log::start(Level::INFO);
    let old = Row::completed().ended(&t, DAY * 3650).put(&t).await;
    t.signal(old, Some(t.ago(DAY * 8))).await;
    let storage = Arc::new(Partial { has_jobs: false, ..Partial::of(&t) });
    ticks(&RetentionSweeper::new(storage, Retention::stock()), 1).await;
    assert_eq!(t.number("select count(*) from @signals").await, 0);
    assert_eq!(t.jobs().await, [old].into());
    assert_eq!(log.lines(), [ENABLED.replace("720h0m0s", "0s").replace("2160h0m0s", "0s")]);
}

async fn a_forwarding_storage_still_deletes_and_sweeps(t: Store) {
    let job = Row::completed().ended(&t, DAY * 31).put(&t).await;
    let kept = Row::completed().put(&t).await;
    t.signal(kept, Some(t.ago(DAY * 8))).await;
    t.window(kept, &t.ago(DAY)).await;
    t.window(job, &t.ago(DAY * 2)).await;
    let storage = Forwarding::new(t.storage.clone());
    assert!(storage.deletes_checkpoints() && storage.batch_completion().is_some());
    assert!(storage.windowed_enqueue().is_some() && storage.retention_plan().is_some());
    let cancel = CancellationToken::new();
    let report = run_once(&storage, &Retention::stock(), &cancel).await;
    assert_eq!((report.deleted("completed"), report.deleted("consumed_signals")), (1, 1));
    let report = ebbtide_jobs::retention::run_unique_locks_once(&storage, &UniqueLockSweep::stock(), &cancel).await;
    assert_eq!(report.deleted("expired_locks"), 1);
    assert_eq!(t.jobs().await, [kept].into());
}

async fn a_kind_that_fails_keeps_no_other_from_its_turn(t: Store) {
    let (log, _guard) = Log::start(Level::INFO);
    let stuck = Row::completed().ended(&t, DAY * 999).put(&t).await;
    Row::new(JobStatus::Failed).ended(&t, DAY * 999).put(&t).await;
    Row::new(JobStatus::Cancelled).ended(&t, DAY * 999).put(&t).await;
    t.signal(stuck, Some(t.ago(DAY * 8))).await;
    let storage = Arc::new(Partial { failures: AtomicU32::new(1), ..Partial::of(&t) });
    let sweeper = RetentionSweeper::new(storage.clone(), Retention::stock());
    ticks(&sweeper, 1).await;
    assert_eq!((t.jobs().await, t.number("select count(*) from @signals").await), ([stuck].into(), 0));
    let lines = log.lines();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[1].starts_with("WARN jobs: finished jobs were not all deleted status=\"completed\""), "{lines:?}");
    assert!(lines[1].contains("broken"), "{lines:?}");
    assert_eq!(storage.passes.load(Ordering::Relaxed), 1, "an error that is not a lost race is not retried");
    ticks(&sweeper, 1).await;
    assert!(t.jobs().await.is_empty(), "the next tick tries again");
}

async fn a_pass_that_lost_a_race_is_retried_five_times(t: Store) {
    for (failures, passes, is_done) in [(4, 5, true), (5, 5, false)] {
        let job = Row::completed().ended(&t, DAY * 31).put(&t).await;
        let storage = Partial { failures: AtomicU32::new(failures), is_busy: true, ..Partial::of(&t) };
        let report = run_once(&storage, &Retention::stock(), &CancellationToken::new()).await;
        assert_eq!(storage.passes.load(Ordering::Relaxed), passes);
        assert_eq!(report.first_error().is_none(), is_done);
        assert_eq!(t.jobs().await.contains(&job), !is_done);
        assert_eq!(report.deleted("completed"), u64::from(is_done));
    }
}

async fn a_storage_without_the_window_sweep_warns_once_and_the_loop_ends(t: Store) {
    let (log, _guard) = Log::start(Level::INFO);
    let storage = Arc::new(Partial { has_locks: false, ..Partial::of(&t) });
    let sweeper = UniqueLockSweeper::new(storage, UniqueLockSweep::stock());
    sweeper.run(&CancellationToken::new()).await;
    sweeper.run(&CancellationToken::new()).await;
    let lines = log.lines();
    assert_eq!(lines.len(), 1);
    assert!(lines[0].starts_with("WARN jobs: the storage does not sweep deduplication windows"), "{lines:?}");
}

async fn the_window_sweep_says_nothing_and_sweeps(t: Store) {
    let (log, _guard) = Log::start(Level::INFO);
    let job = Row::completed().ended(&t, DAY * 3650).put(&t).await;
    t.window(job, &t.ago(DAY)).await;
    UniqueLockSweeper::new(t.storage.clone(), UniqueLockSweep::disabled()).run(&CancellationToken::new()).await;
    assert_eq!(t.number("select count(*) from @unique_locks").await, 1);
    let sweeper = UniqueLockSweeper::new(t.storage.clone(), UniqueLockSweep::stock());
    let (ticker, go, mut idle) = ByHand::new();
    let cancel = CancellationToken::new();
    let by_hand = async {
        idle.recv().await;
        go.send(()).await.unwrap();
        idle.recv().await;
        cancel.cancel();
    };
    tokio::join!(sweeper.run_with(ticker, &cancel), by_hand);
    assert_eq!((t.number("select count(*) from @unique_locks").await, t.jobs().await), (0, [job].into()));
    assert!(log.lines().is_empty());
}

cases!(
    the_stock_policy_sweeps_and_says_so_once,
    a_tick_is_one_debug_line,
    a_policy_that_is_off_warns_once_and_never_ticks,
    every_worker_says_it_for_itself_and_once_from_many_threads,
    checkpoint_deletion_alone_is_off_and_still_in_force,
    a_storage_without_checkpoint_deletion_warns_once,
    a_storage_without_retention_warns_once_instead,
    half_of_the_capability_does_its_half,
    a_forwarding_storage_still_deletes_and_sweeps,
    a_kind_that_fails_keeps_no_other_from_its_turn,
    a_pass_that_lost_a_race_is_retried_five_times,
    a_storage_without_the_window_sweep_warns_once_and_the_loop_ends,
    the_window_sweep_says_nothing_and_sweeps,
);

/// The counters and gauges of a tick, as an exporter shows them.
#[tokio::test]
async fn a_tick_is_measured() {
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    let t = Store::sqlite().await;
    Row::completed().ended(&t, DAY * 31).put(&t).await;
    let pinned = Row::completed().ended(&t, DAY * 31).put(&t).await;
    t.window(pinned, &t.ahead(DAY)).await;
    let _recording = metrics::set_default_local_recorder(&recorder);
    ticks(&RetentionSweeper::new(t.storage.clone(), Retention::stock()), 1).await;
    let text = handle.render();
    for line in [
        "jobs_retention_deleted{kind=\"completed\"} 1",
        "jobs_retention_deleted{kind=\"consumed_signals\"} 0",
        "jobs_retention_pass_duration_count{kind=\"failed\"} 1",
        "jobs_retention_pinned{by=\"live_window\"} 1",
        "jobs_retention_pinned{by=\"live_child\"} 0",
        "jobs_retention_last_success ",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    assert!(!text.contains("jobs_retention_errors"), "{text}");
}
