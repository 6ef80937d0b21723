//! How fast durable jobs are enqueued, picked up, run and deleted, on each storage.

mod control;
mod tick;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use ebbtide_jobs::{
    BatchEntry, Ctx, EnqueueOptions, PostgresStorage, PurgeStatus, Queue, QueueName, QueueOptions, Retention,
    SqliteStorage, Storage, Worker, WorkerBuilder,
};
use ebbtide_sweep::pause;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::report::{Case, Report};
use super::{Database, Place};
use crate::db::bench::{self, jobs as db};

/// The queue of all jobs measured.
const QUEUE: &str = "ebbtide-bench";
/// Jobs of one enqueued batch.
const BATCH: u64 = 1000;
/// Callers that enqueue one job at a time.
const CALLERS: u64 = 8;
/// Workers that claim one job at a time.
const SINGLE_WORKERS: u32 = 8;
/// Jobs that an idle worker picks up, one after the other.
const PICK_UPS: u64 = 200;
/// Connections of a PostgreSQL storage.
const CONNECTIONS: usize = 24;
/// How long an idle worker is watched. Sessions tell PostgreSQL of their commits within ten seconds.
const IDLE: Duration = Duration::from_secs(12);

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
    /// Finished jobs with a checkpoint each, that one tick of retention deletes on PostgreSQL. 0 leaves that out.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(0..=10_000_000))]
    expired: u32,
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
    report.setting("expired jobs", options.expired);
    let client = database.target.connect("ebbtide-bench").await?;
    report.program(bench::server_version(&client).await?);
    let (mut postgres, mut sqlite) = (Case::new("postgres"), Case::new("sqlite"));
    let has = |kind: Kind| options.storage.contains(&kind);
    // First, while this process has held nothing yet.
    if has(Kind::Postgres) {
        let storage = PostgresStorage::connect(&database.url, CONNECTIONS)?;
        storage.migrate().await?;
        idle(Arc::new(storage), &client, &mut postgres).await?;
    }
    for run in 0..options.runs {
        if has(Kind::Postgres) {
            db::create(&client).await?;
            let storage = Arc::new(PostgresStorage::connect(&database.url, CONNECTIONS)?);
            measure_postgres(options, storage, database, &client, &mut postgres).await?;
            bench::remove(&client).await?;
        }
        if has(Kind::Sqlite) {
            let folder = std::env::temp_dir().join(format!("ebbtide-bench-jobs-{}-{run}", std::process::id()));
            std::fs::create_dir(&folder).with_context(|| format!("making {}", folder.display()))?;
            let measured = async {
                let bench = Bench::new(Arc::new(SqliteStorage::open(folder.join("jobs.db"))?)).await?;
                bench.measure(options, None, &mut sqlite).await
            }
            .await;
            std::fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
            measured?;
        }
    }
    if has(Kind::Postgres) {
        report.add(judged(postgres, 15_000.0, options));
    }
    if has(Kind::Sqlite) {
        report.add(judged(sqlite, 10_000.0, options));
    }
    report
        .note("each job is claimed, run and completed with an outcome of its own; all commits are durable".to_owned());
    Ok(report)
}

/// Says what was reached of what was measured.
fn judged(mut case: Case, run_least: f64, options: &Options) -> Case {
    let least = [
        ("run, batched", run_least, "jobs/s"),
        (ONE_BY_ONE, 4000.0, "jobs/s"),
        ("enqueue in batches", 50_000.0, "jobs/s"),
    ];
    for (name, least, unit) in least {
        let met = least <= case.median(name);
        case.reach(format!("{name} at {least:.0} {unit}"), met);
    }
    let most = [("pick-up on an idle worker, p50", 5.0), ("pick-up on an idle worker, p99", 25.0)];
    for (name, most) in most {
        let met = case.median(name) < most;
        case.reach(format!("{name} under {most:.0} ms"), met);
    }
    if !case.median(SINGLY_RATIO).is_nan() {
        let met = 0.7 <= case.median(SINGLY_RATIO);
        case.reach("enqueue one by one at 0.7 times its control".to_owned(), met);
        let met = case.median(IDLE_COMMITS) <= 1.0;
        case.reach("at most one query a second of an idle worker".to_owned(), met);
        let met = case.median(IDLE_MEMORY) < 20.0;
        case.reach("less than 20 MiB with an idle worker".to_owned(), met);
    }
    if 0 < options.expired && !case.median(TICK_ROWS).is_nan() {
        let met = 200_000.0 <= case.median(TICK_ROWS);
        case.reach("tick at 200,000 rows a second".to_owned(), met);
        let met = case.median(TICK_P99) <= 1.3;
        case.reach("enqueue p99 beside a tick at most 1.3 times".to_owned(), met);
    }
    case
}

const ONE_BY_ONE: &str = "run, claims and completions one by one";
const SINGLY_RATIO: &str = "enqueue one by one, against its control";
const IDLE_COMMITS: &str = "idle worker, commits";
const IDLE_MEMORY: &str = "memory of this process with an idle worker";
const TICK_ROWS: &str = "tick over the expired jobs, with checkpoints";
const TICK_P99: &str = "enqueue p99 beside a tick, against without";

/// What a worker costs that has nothing to do.
async fn idle(storage: Arc<dyn Storage>, client: &tokio_postgres::Client, case: &mut Case) -> anyhow::Result<()> {
    let queue = Queue::builder(storage).build();
    let (stop, worker) = (CancellationToken::new(), worker(&queue).build()?);
    let stops = stop.clone();
    let running = tokio::spawn(async move { worker.run(stops).await });
    // What a worker does once at its start is none of the idling.
    pause(IDLE, &stop).await;
    let (before, _) = bench::work_done(client).await?;
    let started = Instant::now();
    pause(IDLE, &stop).await;
    let (after, _) = bench::work_done(client).await?;
    // Of these two looks one is counted.
    let commits = u64::try_from(after - before).unwrap_or(0).saturating_sub(1);
    case.record(IDLE_COMMITS, "1/s", rate(commits, started));
    if let Some(kib) = resident_kib() {
        case.record(IDLE_MEMORY, "MiB", kib / 1024.0);
    }
    stop.cancel();
    running.await??;
    Ok(())
}

fn worker(queue: &Queue) -> WorkerBuilder {
    Worker::builder(queue).queue(QUEUE, QueueOptions::concurrency(1000)).retention(Retention::disabled())
}

/// As on any storage, with the controls in between, and retention.
async fn measure_postgres(
    options: &Options, storage: Arc<dyn Storage>, database: &Database, client: &tokio_postgres::Client, case: &mut Case,
) -> anyhow::Result<()> {
    let bench = Bench::new(storage).await?;
    db::settle(client).await?;
    bench.measure(options, Some(database), case).await?;
    db::settle(client).await?;
    if 0 < options.expired {
        tick::measure(client, &bench.queue, u64::from(options.expired), case).await?;
        bench.queue.purge(&QueueName::new(QUEUE)?, PurgeStatus::Pending).await?;
    }
    Ok(())
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

/// A queue whose jobs are counted.
struct Bench {
    queue: Queue,
    counter: Arc<Counter>,
}

/// Jobs of the measurements that take longer for each.
fn few(jobs: u64) -> u64 {
    (jobs / 5).max(BATCH)
}

impl Bench {
    async fn new(storage: Arc<dyn Storage>) -> anyhow::Result<Self> {
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
        Ok(Self { queue, counter })
    }

    /// Each beside its control, where `database` has one.
    async fn measure(&self, options: &Options, database: Option<&Database>, case: &mut Case) -> anyhow::Result<()> {
        let jobs = u64::from(options.jobs);
        if let Some(database) = database {
            let (inserted, passed) = control::batches(database, jobs).await?;
            case.record("control: bare inserts in batches", "jobs/s", inserted);
            case.record("control: two bare updates in batches", "jobs/s", passed);
        }
        case.record("enqueue in batches", "jobs/s", enqueue_batches(&self.queue, jobs).await?);
        case.record("run, batched", "jobs/s", self.run(jobs, options.workers, 1000, 1000).await?);
        let few = few(jobs);
        enqueue_batches(&self.queue, few).await?;
        let rate = self.run(few, options.workers, 1000, 1).await?;
        case.record("run, each completion by itself", "jobs/s", rate);
        enqueue_batches(&self.queue, few).await?;
        case.record(ONE_BY_ONE, "jobs/s", self.run(few, SINGLE_WORKERS, 1, 1).await?);
        let singly = enqueue_singly(&self.queue, few).await?;
        case.record("enqueue one by one, 8 callers", "jobs/s", singly);
        if let Some(database) = database {
            let bare = control::singly(database, few).await?;
            case.record("control: bare inserts one by one, 8 callers", "jobs/s", bare);
            case.record(SINGLY_RATIO, "", singly / bare);
        }
        self.run(few / CALLERS * CALLERS, options.workers, 1000, 1000).await?;
        self.pick_ups(case).await?;
        self.queue.purge(&QueueName::new(QUEUE)?, PurgeStatus::Completed).await?;
        Ok(())
    }

    /// Runs what is enqueued, with so many claims and completions at most in one transaction.
    async fn run(&self, jobs: u64, workers: u32, claims: u32, completions: u32) -> anyhow::Result<f64> {
        self.counter.expect(jobs);
        let stop = CancellationToken::new();
        let started = Instant::now();
        let mut running = Vec::new();
        for _ in 0..workers {
            let builder = worker(&self.queue).dequeue_batch_size(claims);
            let worker = builder.batch_completion(completions, Duration::ZERO).build()?;
            let stop = stop.clone();
            running.push(tokio::spawn(async move { worker.run(stop).await }));
        }
        self.counter.reached.notified().await;
        let rate = rate(jobs, started);
        stop.cancel();
        for worker in running {
            worker.await??;
        }
        Ok(rate)
    }

    /// From the end of an enqueue to the start of the handler, on an idle worker.
    async fn pick_ups(&self, case: &mut Case) -> anyhow::Result<()> {
        let (stop, worker) = (CancellationToken::new(), worker(&self.queue).build()?);
        let stops = stop.clone();
        let running = tokio::spawn(async move { worker.run(stops).await });
        pause(Duration::from_secs(1), &stop).await;
        let mut waits = Vec::new();
        for n in 0..PICK_UPS {
            self.counter.expect(1);
            self.queue.enqueue("noop", &n).queue(QUEUE).send().await?;
            let enqueued = Instant::now();
            self.counter.reached.notified().await;
            let began = self.counter.began.lock().unwrap_or_else(PoisonError::into_inner).take();
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
        Ok(())
    }
}

#[allow(clippy::cast_precision_loss, reason = "a rate")]
fn rate(jobs: u64, since: Instant) -> f64 {
    jobs as f64 / since.elapsed().as_secs_f64()
}

fn entry(n: u64) -> BatchEntry {
    BatchEntry::new("noop", &n).options(EnqueueOptions::new().queue(QUEUE))
}

async fn enqueue_batches(queue: &Queue, jobs: u64) -> anyhow::Result<f64> {
    let started = Instant::now();
    let mut left = jobs;
    while 0 < left {
        let count = left.min(BATCH);
        queue.enqueue_batch((0..count).map(entry).collect()).await?;
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
                queue.enqueue("noop", &n).queue(QUEUE).send().await?;
            }
            Ok::<_, ebbtide_jobs::Error>(())
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await??;
    }
    Ok(rate(jobs, started))
}

fn resident_kib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}
