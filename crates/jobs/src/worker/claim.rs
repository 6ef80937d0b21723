//! The loop that claims: as much as there is room for, at once while there is more, and seldom when there is nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ebbtide_sweep::{LineLimit, pause};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::warn;

use super::Completed;
use super::engine::Engine;
use super::execute::execute;
use crate::ctx::repeated;
use crate::job::Job;
use crate::limits::POLL_INTERVAL_TOLD;
use crate::outcome::{ClaimRequest, QueueShare};
use crate::wake::Subscription;

const LINE_GAP: Duration = Duration::from_secs(30);

/// Where claimed jobs run.
pub(super) struct Pool<'a> {
    pub(super) handlers: &'a TaskTracker,
    pub(super) done: &'a mpsc::Sender<Completed>,
    /// Stops every handler at once.
    pub(super) end: &'a CancellationToken,
}

pub(super) async fn claim_until(engine: &Arc<Engine>, stop: &CancellationToken, pool: &Pool<'_>) {
    let queues: Vec<_> = engine.lanes.iter().map(|lane| lane.queue.clone()).collect();
    let told = engine.queue.storage().wake().map(|wake| wake.subscribe(&queues));
    let shares = queues.into_iter().map(|queue| QueueShare { queue, limit: 0 }).collect();
    let mut request = ClaimRequest { worker: engine.id.clone(), shares, lease: engine.config.lease };
    let mut first = 0;
    let mut lines = LineLimit::new(LINE_GAP);
    while !stop.is_cancelled() {
        if let Some(rest) = engine.gates.rest() {
            pause(rest, stop).await;
            continue;
        }
        let asked = if engine.is_paused() { 0 } else { fill(engine, &mut request, first) };
        first = (first + 1) % engine.lanes.len();
        if asked == 0 {
            tokio::select! {
                () = stop.cancelled() => {}
                () = engine.changed.notified() => {}
            }
            continue;
        }
        // Not cancelled in the middle: what it claims would be stranded until its lease is found stale.
        let claimed = repeated(&engine.config.dequeue_retry, || engine.queue.storage().claim(&request)).await;
        match claimed {
            Ok(jobs) => {
                note(engine, &request, &jobs);
                start(engine, jobs, stop, pool);
            }
            Err(error) => {
                if let Some(suppressed) = lines.admit() {
                    warn!(target: "jobs", %error, suppressed, "no jobs could be claimed");
                }
                engine.lanes.iter().for_each(|lane| lane.has_more.store(false, Ordering::Relaxed));
            }
        }
        rest(engine, told.as_ref(), stop).await;
    }
}

/// Asks for what there is room for, at most one batch in all; whose turn is first changes.
fn fill(engine: &Engine, request: &mut ClaimRequest, first: usize) -> u32 {
    let mut left = engine.config.claim_batch;
    let lanes = engine.lanes.len();
    for step in 0..lanes {
        let at = (first + step) % lanes;
        let lane = &engine.lanes[at];
        let free = lane.concurrency.saturating_sub(lane.running.load(Ordering::Acquire));
        request.shares[at].limit = free.min(left);
        left -= request.shares[at].limit;
    }
    engine.config.claim_batch - left
}

/// Remembers which lanes may have more.
fn note(engine: &Engine, request: &ClaimRequest, jobs: &[Job]) {
    for (lane, share) in engine.lanes.iter().zip(&request.shares) {
        if 0 < share.limit {
            let got = jobs.iter().filter(|job| job.queue == lane.queue).count();
            lane.has_more.store(share.limit as usize <= got, Ordering::Relaxed);
        }
    }
}

fn start(engine: &Arc<Engine>, jobs: Vec<Job>, stop: &CancellationToken, pool: &Pool<'_>) {
    let is_bounced = stop.is_cancelled() || engine.is_paused();
    for job in jobs {
        let Some(claim) = job.claim() else { continue };
        if is_bounced {
            let reason = if stop.is_cancelled() { "shutdown" } else { "paused" };
            metrics::counter!("jobs.dequeue.released", "reason" => reason).increment(1);
            let engine = engine.clone();
            pool.handlers.spawn(async move { engine.release(&claim).await });
            continue;
        }
        let place = engine.occupy(engine.lane_of(&job.queue));
        let (active, registration) = engine.register(&claim, pool.end);
        pool.handlers.spawn(execute(engine.clone(), job, active, registration, place, pool.done.clone()));
    }
}

/// Returns at once while a lane has more and room for it; else when something may have changed.
async fn rest(engine: &Engine, told: Option<&Subscription>, stop: &CancellationToken) {
    let has_more = |lane: &super::engine::Lane| lane.has_more.load(Ordering::Relaxed);
    let has_room = |lane: &super::engine::Lane| lane.running.load(Ordering::Acquire) < lane.concurrency;
    if engine.lanes.iter().any(|lane| has_more(lane) && has_room(lane)) {
        return;
    }
    let is_told = engine.queue.storage().wake().is_some_and(|wake| wake.reaches_other_processes());
    let poll = engine.config.poll_interval;
    let poll = if is_told { poll.max(POLL_INTERVAL_TOLD) } else { poll };
    let waits_for_room = engine.lanes.iter().any(has_more);
    tokio::select! {
        _ = pause(poll, stop) => {}
        () = async { told.expect("checked").told().await }, if told.is_some() => {}
        () = engine.changed.notified(), if waits_for_room => {}
    }
}
