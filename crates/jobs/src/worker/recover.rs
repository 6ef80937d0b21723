//! Takes jobs from lost workers, and wakes those whose wait is over.

use std::sync::Arc;
use std::time::Duration;

use ebbtide_sweep::{LineLimit, Pace};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::engine::Engine;
use crate::error::Error;
use crate::event::{Event, ReclaimReason};
use crate::fan_out::FanOutScan;
use crate::job::JobId;
use crate::limits::{REAPER_BATCH, RECOVERY_BATCH, RECOVERY_LEASE};
use crate::outcome::Reclaim;
use crate::storage::{TimerStore, Woken};

/// The lease under which one worker wakes for all.
const LEASE: &str = "fanout-recovery";
/// Batches of one look; what is left then is for the next one.
const ROUNDS_MAX: u32 = 100;
const LINE_GAP: Duration = Duration::from_secs(30);

pub(super) async fn reap(engine: Arc<Engine>, end: CancellationToken) {
    let mut pace = Pace::new(engine.config.stale_interval);
    let mut lines = LineLimit::new(LINE_GAP);
    while pace.next(&end).await.is_some() {
        match reap_once(&engine, &end).await {
            Ok(0) => {}
            Ok(reclaimed) => info!(target: "jobs", reclaimed, "jobs were taken from lost workers"),
            Err(error) => {
                if let Some(suppressed) = lines.admit() {
                    warn!(target: "jobs", %error, suppressed, "jobs of lost workers could not be looked for");
                }
            }
        }
    }
}

async fn reap_once(engine: &Engine, end: &CancellationToken) -> Result<u64, Error> {
    let reclaim = Reclaim::older_than(engine.config.stale_age);
    let mut taken = 0;
    for _ in 0..ROUNDS_MAX {
        let reclaimed = engine.queue.storage().reclaim(&reclaim).await?;
        for job in &reclaimed {
            let reason = ReclaimReason::StaleLock;
            metrics::counter!("jobs.leases.reclaimed", "reason" => reason.as_str()).increment(1);
            engine.queue.hook_table().reclaimed(job);
            engine.queue.emit(|| Event::JobReclaimed { id: job.id, reason });
            engine.queue.announce(&job.queue);
        }
        taken += reclaimed.len() as u64;
        if reclaimed.len() < REAPER_BATCH as usize || end.is_cancelled() {
            break;
        }
    }
    Ok(taken)
}

pub(super) async fn wake(engine: Arc<Engine>, end: CancellationToken) {
    let Some(timers) = engine.queue.storage().timers() else { return };
    let mut pace = Pace::new(engine.config.recovery_interval);
    let mut lines = LineLimit::new(LINE_GAP);
    let mut after = None;
    while pace.next(&end).await.is_some() {
        if !is_ours(&engine).await {
            continue;
        }
        // One look that fails must not keep the other from its turn.
        let due = wake_due(&engine, timers, &end).await;
        let signalled = wake_signalled(&engine, timers, &mut after).await;
        let settled = settle(&engine).await;
        for error in [due.err(), signalled.err()].into_iter().flatten().chain(settled) {
            if let Some(suppressed) = lines.admit() {
                warn!(target: "jobs", %error, suppressed, "waiting jobs could not be looked for");
            }
        }
    }
    let_go(&engine).await;
}

/// Lets another worker look at once. Should it fail, the lease ends by itself.
async fn let_go(engine: &Engine) {
    if let Some(leases) = engine.queue.storage().leases() {
        let _ = leases.release(LEASE, &engine.id).await;
    }
}

/// A lease that cannot be asked for is no reason to wake nobody: two wake-ups of one job are one.
async fn is_ours(engine: &Engine) -> bool {
    match engine.queue.storage().leases() {
        Some(leases) => leases.acquire(LEASE, &engine.id, RECOVERY_LEASE).await.unwrap_or(true),
        None => true,
    }
}

async fn wake_due(engine: &Engine, timers: &dyn TimerStore, end: &CancellationToken) -> Result<(), Error> {
    for _ in 0..ROUNDS_MAX {
        let woken = timers.wake_due(RECOVERY_BATCH).await?;
        announce(engine, &woken);
        if woken.jobs < u64::from(RECOVERY_BATCH) || end.is_cancelled() {
            break;
        }
    }
    Ok(())
}

/// One batch a look, going on where the last one ended: a signal that woke nobody is rare, and waiting jobs are many.
async fn wake_signalled(engine: &Engine, timers: &dyn TimerStore, after: &mut Option<JobId>) -> Result<(), Error> {
    let (woken, last) = timers.wake_signalled(*after, RECOVERY_BATCH).await?;
    announce(engine, &woken);
    *after = last;
    Ok(())
}

/// One batch of each kind a look. The first error, after all kinds had their turn.
async fn settle(engine: &Engine) -> Option<Error> {
    let fan_outs = engine.queue.storage().fan_outs()?;
    let mut first = None;
    for scan in FanOutScan::ALL {
        match fan_outs.settle(scan, engine.config.fan_out_stale_age, RECOVERY_BATCH).await {
            Ok(settled) => settled.woken.iter().for_each(|queue| engine.queue.announce(queue)),
            Err(error) => first = first.or(Some(error)),
        }
    }
    first
}

fn announce(engine: &Engine, woken: &Woken) {
    woken.queues.iter().for_each(|queue| engine.queue.announce(queue));
}
