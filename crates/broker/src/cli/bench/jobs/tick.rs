//! One tick of retention over many finished jobs, and what it does to enqueues beside it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::ensure;
use ebbtide_jobs::retention::run_once;
use ebbtide_jobs::{Queue, Retention};
use ebbtide_sweep::pause;
use hdrhistogram::Histogram;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{CALLERS, QUEUE, rate};
use crate::cli::bench::load::latency;
use crate::cli::bench::report::Case;
use crate::db::bench::jobs as db;

/// Enqueues a second beside the tick, whatever their answers take.
const STEADY_PER_SECOND: f64 = 400.0;
/// How long enqueues are measured without the tick.
const WITHOUT: Duration = Duration::from_secs(10);

/// The tick over a quarter of the jobs and over all of them, with nobody else at work; then over all beside enqueues.
pub(super) async fn measure(
    client: &tokio_postgres::Client, queue: &Queue, jobs: u64, case: &mut Case,
) -> anyhow::Result<()> {
    let few = alone(client, queue, jobs / 4).await?;
    let all = alone(client, queue, jobs).await?;
    case.record("tick over a quarter of the expired jobs", "jobs/s", few);
    case.record("tick over the expired jobs", "jobs/s", all);
    case.record(super::TICK_ROWS, "rows/s", 2.0 * all);
    case.record("time a job, all against a quarter", "", few / all);
    let enough = Arc::new(AtomicBool::new(false));
    let without = steady(queue, WITHOUT, &enough).await?;
    db::build_finished(client, QUEUE, i64::try_from(jobs)?).await?;
    let beside = tokio::spawn({
        let (queue, enough) = (queue.clone(), enough.clone());
        async move { steady(&queue, Duration::MAX, &enough).await }
    });
    let deleted = tick(queue, jobs).await;
    enough.store(true, Ordering::Relaxed);
    let with = beside.await??;
    case.record("tick beside enqueues", "jobs/s", deleted?);
    let at = |late: &Histogram<u64>| late.value_at_quantile(0.99) as f64 / 1000.0;
    case.record("enqueue p99, without a tick", "ms", at(&without));
    case.record("enqueue p99, beside a tick", "ms", at(&with));
    case.record(super::TICK_P99, "", at(&with) / at(&without));
    Ok(())
}

async fn alone(client: &tokio_postgres::Client, queue: &Queue, jobs: u64) -> anyhow::Result<f64> {
    db::build_finished(client, QUEUE, i64::try_from(jobs)?).await?;
    tick(queue, jobs).await
}

async fn tick(queue: &Queue, jobs: u64) -> anyhow::Result<f64> {
    let started = Instant::now();
    let report = run_once(queue.storage(), &Retention::stock(), &CancellationToken::new()).await;
    let rate = rate(jobs, started);
    if let Some(error) = report.first_error() {
        anyhow::bail!("the tick failed: {error}");
    }
    let deleted = report.deleted("completed");
    ensure!(deleted == jobs, "the tick deleted {deleted} jobs of {jobs}");
    Ok(rate)
}

/// Enqueues at a fixed rate for `length` or until `enough`: how late each answer came, from when it was due.
async fn steady(queue: &Queue, length: Duration, enough: &Arc<AtomicBool>) -> anyhow::Result<Histogram<u64>> {
    let (turns, started) = (Arc::new(AtomicU64::new(0)), Instant::now());
    let callers = (0..CALLERS).map(|_| {
        let (queue, turns, enough) = (queue.clone(), turns.clone(), enough.clone());
        tokio::spawn(async move {
            let (never, mut late) = (CancellationToken::new(), latency());
            loop {
                let turn = turns.fetch_add(1, Ordering::Relaxed);
                let due = Duration::from_secs_f64(turn as f64 / STEADY_PER_SECOND);
                if length <= due || enough.load(Ordering::Relaxed) {
                    return anyhow::Ok(late);
                }
                pause(due.saturating_sub(started.elapsed()), &never).await;
                queue.enqueue("noop", &turn).queue(QUEUE).send().await?;
                let waited = started.elapsed().saturating_sub(due);
                late.saturating_record(u64::try_from(waited.as_micros()).unwrap_or(u64::MAX));
            }
        })
    });
    let mut late = latency();
    for caller in callers.collect::<Vec<_>>() {
        late.add(&caller.await??)?;
    }
    Ok(late)
}
