//! How fast durable jobs are enqueued, picked up and run, on each storage.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use ebbtide_jobs::{
    BatchEntry, Ctx, PostgresStorage, PurgeStatus, Queue, QueueName, Retention, SqliteStorage, Storage, Worker,
};
use ebbtide_sweep::pause;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::report::{Case, Report};
use super::{Database, Place};

/// Jobs of one enqueued batch.
const BATCH: u64 = 1000;
/// Callers that enqueue one job at a time.
const CALLERS: u64 = 8;
/// Jobs that an idle worker picks up, one after the other.
const PICK_UPS: u64 = 200;
/// Connections of a PostgreSQL storage.
const CONNECTIONS: usize = 24;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    Postgres,
    Sqlite,
}

#[derive(Args, Clone)]
pub(super) struct Options {
    /// Storages to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["postgres", "sqlite"])]
    storage: Vec<Kind>,
    /// Jobs of one measurement.
    #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(u32).range(1000..=10_000_000))]
    jobs: u32,
    /// Workers that run them, in this process.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=32))]
    workers: u32,
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=20))]
    runs: u32,
    #[command(flatten)]
    pub(super) place: Place,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(super) json: bool,
}

pub(super) async fn measure_in(options: &Options, database: &Database) -> anyhow::Result<Report> {
    let mut report = Report::default();
    report.setting("jobs", options.jobs);
    report.setting("workers", options.workers);
    report.setting("runs", options.runs);
    for kind in &options.storage {
        let mut case = Case::new(if *kind == Kind::Postgres { "postgres" } else { "sqlite" });
        for run in 0..options.runs {
            let folder = std::env::temp_dir().join(format!("ebbtide-bench-jobs-{}-{run}", std::process::id()));
            let storage: Arc<dyn Storage> = match kind {
                Kind::Postgres => Arc::new(PostgresStorage::connect(&database.url, CONNECTIONS)?),
                Kind::Sqlite => {
                    std::fs::create_dir(&folder).with_context(|| format!("making {}", folder.display()))?;
                    Arc::new(SqliteStorage::open(folder.join("jobs.db"))?)
                }
            };
            let measured = measure_run(options, storage, &mut case).await;
            if *kind == Kind::Sqlite {
                std::fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
            }
            measured?;
        }
        let reached =
            |name, least: f64, case: &Case| (format!("{name} at {least:.0} a second"), least <= case.median(name));
        let least = if *kind == Kind::Postgres { 15_000.0 } else { 10_000.0 };
        for (text, met) in [reached("run, batched", least, &case), reached("enqueue in batches", 50_000.0, &case)] {
            case.reach(text, met);
        }
        report.add(case);
    }
    report
        .note("each job is claimed, run and completed with an outcome of its own; all commits are durable".to_owned());
    Ok(report)
}

/// Handlers that do nothing but count, and say when the last one is written.
struct Counter {
    completed: AtomicU64,
    wanted: AtomicU64,
    reached: Notify,
    /// When the job that carries a number began.
    began: Mutex<Option<Instant>>,
}

impl Counter {
    fn expect(&self, more: u64) {
        self.wanted.store(self.completed.load(Ordering::Acquire) + more, Ordering::Release);
    }
}

async fn measure_run(options: &Options, storage: Arc<dyn Storage>, case: &mut Case) -> anyhow::Result<()> {
    let queue = Queue::builder(storage).build();
    queue.migrate().await?;
    let counter = Arc::new(Counter {
        completed: AtomicU64::new(0),
        wanted: AtomicU64::new(u64::MAX),
        reached: Notify::new(),
        began: Mutex::new(None),
    });
    let seen = counter.clone();
    queue.register("noop", move |_: Ctx, _: u64| {
        *seen.began.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        async { Ok(()) }
    })?;
    let seen = counter.clone();
    queue.hooks().on_complete(move |_| {
        if seen.completed.fetch_add(1, Ordering::AcqRel) + 1 == seen.wanted.load(Ordering::Acquire) {
            seen.reached.notify_one();
        }
    });
    let jobs = u64::from(options.jobs);
    case.record("enqueue in batches", "jobs/s", enqueue_batches(&queue, jobs).await?);
    case.record("run, batched", "jobs/s", run(options, &queue, &counter, jobs, 1000).await?);
    let few = (jobs / 5).max(BATCH);
    enqueue_batches(&queue, few).await?;
    case.record("run, each completion by itself", "jobs/s", run(options, &queue, &counter, few, 1).await?);
    case.record("enqueue one by one, 8 callers", "jobs/s", enqueue_singly(&queue, few).await?);
    run(options, &queue, &counter, few / CALLERS * CALLERS, 1000).await?;
    pick_ups(&queue, &counter, case).await?;
    queue.purge(&QueueName::default_queue(), PurgeStatus::Completed).await?;
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "a rate")]
fn rate(jobs: u64, since: Instant) -> f64 {
    jobs as f64 / since.elapsed().as_secs_f64()
}

async fn enqueue_batches(queue: &Queue, jobs: u64) -> anyhow::Result<f64> {
    let started = Instant::now();
    let mut left = jobs;
    while 0 < left {
        let count = left.min(BATCH);
        queue.enqueue_batch((0..count).map(|n| BatchEntry::new("noop", &n)).collect()).await?;
        left -= count;
    }
    Ok(rate(jobs, started))
}

async fn enqueue_singly(queue: &Queue, jobs: u64) -> anyhow::Result<f64> {
    let started = Instant::now();
    let callers = (0..CALLERS).map(|_| {
        let queue = queue.clone();
        tokio::spawn(async move {
            for n in 0..jobs / CALLERS {
                queue.enqueue("noop", &n).send().await?;
            }
            Ok::<_, ebbtide_jobs::Error>(())
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await??;
    }
    Ok(rate(jobs, started))
}

/// Runs what is enqueued, with so many completions at most in one transaction.
async fn run(options: &Options, queue: &Queue, counter: &Counter, jobs: u64, batch: u32) -> anyhow::Result<f64> {
    counter.expect(jobs);
    let stop = CancellationToken::new();
    let started = Instant::now();
    let mut running = Vec::new();
    for _ in 0..options.workers {
        let builder = Worker::builder(queue).concurrency(1000).dequeue_batch_size(1000);
        let worker = builder.batch_completion(batch, Duration::ZERO).retention(Retention::disabled()).build()?;
        let stop = stop.clone();
        running.push(tokio::spawn(async move { worker.run(stop).await }));
    }
    counter.reached.notified().await;
    let rate = rate(jobs, started);
    stop.cancel();
    for worker in running {
        worker.await??;
    }
    Ok(rate)
}

/// From the end of an enqueue to the start of the handler, on an idle worker.
async fn pick_ups(queue: &Queue, counter: &Counter, case: &mut Case) -> anyhow::Result<()> {
    let (stop, worker) = (CancellationToken::new(), Worker::builder(queue).retention(Retention::disabled()).build()?);
    let stops = stop.clone();
    let running = tokio::spawn(async move { worker.run(stops).await });
    pause(Duration::from_secs(1), &stop).await;
    let mut waits = Vec::new();
    for n in 0..PICK_UPS {
        counter.expect(1);
        queue.enqueue("noop", &n).send().await?;
        let enqueued = Instant::now();
        counter.reached.notified().await;
        let began = counter.began.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The handler may have begun before the enqueue was answered.
        waits.push(began.map_or(Duration::ZERO, |began| began.saturating_duration_since(enqueued)));
        pause(Duration::from_millis(5), &stop).await;
    }
    stop.cancel();
    running.await??;
    waits.sort_unstable();
    let at = |percent: usize| waits[waits.len() * percent / 100].as_secs_f64() * 1000.0;
    case.record("pick-up on an idle worker, p50", "ms", at(50));
    case.record("pick-up on an idle worker, p99", "ms", at(99));
    if let Some(kib) = resident_kib() {
        case.record("memory of this process", "MiB", kib / 1024.0);
    }
    Ok(())
}

fn resident_kib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}
