//! Signs of life of the worker's runs, and the look whether it still owns them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ebbtide_sweep::{LineLimit, Pace};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::engine::{Active, Engine, Stop};
use super::heartbeat_period;
use crate::error::Error;
use crate::event::{Event, ReclaimReason};
use crate::job::Claim;

/// Refusals in a row after which a handler is stopped.
const STRIKES_MAX: u8 = 3;
const LINE_GAP: Duration = Duration::from_secs(30);

pub(super) async fn heartbeats(engine: Arc<Engine>, end: CancellationToken) {
    let mut pace = Pace::new(heartbeat_period(engine.config.stale_age));
    let mut lines = LineLimit::new(LINE_GAP);
    while let Some(now) = pace.next(&end).await {
        for active in engine.actives() {
            // Short runs end without one.
            if now.saturating_duration_since(active.since) < heartbeat_period(engine.config.stale_age) / 2 {
                continue;
            }
            if let Err(error) = beat(&engine, &active).await
                && let Some(suppressed) = lines.admit()
            {
                warn!(target: "jobs", %error, suppressed, "a heartbeat could not be written");
            }
        }
    }
}

async fn beat(engine: &Engine, active: &Active) -> Result<(), Error> {
    match engine.queue.storage().heartbeat(&active.claim, engine.config.lease).await {
        Ok(()) => {
            active.strikes.store(0, Ordering::Relaxed);
            if let (true, Some(store)) = (active.has_slots.load(Ordering::Relaxed), engine.queue.storage().gates()) {
                store.renew_slots(&active.claim, engine.slot_ttl()).await?;
            }
        }
        Err(Error::JobNotOwned(_)) => {
            let strikes = active.strikes.fetch_add(1, Ordering::Relaxed).saturating_add(1);
            if STRIKES_MAX <= strikes {
                active.stop(Stop::Lost);
            }
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

pub(super) async fn audits(engine: Arc<Engine>, end: CancellationToken) {
    let (Some(interval), Some(store)) = (engine.config.audit_interval, engine.queue.storage().ownership()) else {
        return;
    };
    let mut pace = Pace::new(interval);
    let mut lines = LineLimit::new(LINE_GAP);
    while pace.next(&end).await.is_some() {
        let claims: Vec<Claim> = engine.actives().iter().map(|active| active.claim.clone()).collect();
        if claims.is_empty() {
            continue;
        }
        match store.lost(&claims).await {
            Ok(lost) => lost.into_iter().for_each(|id| lose(&engine, &claims, id)),
            Err(error) => {
                if let Some(suppressed) = lines.admit() {
                    warn!(target: "jobs", %error, suppressed, "the ownership of runs could not be checked");
                }
            }
        }
    }
}

fn lose(engine: &Engine, claims: &[Claim], id: crate::JobId) {
    let Some(active) = engine.active(id) else { return };
    // It may have been claimed again since the question.
    if !claims.contains(&active.claim) {
        return;
    }
    active.stop(Stop::Lost);
    let reason = ReclaimReason::OwnershipAudit;
    metrics::counter!("jobs.leases.reclaimed", "reason" => reason.as_str()).increment(1);
    engine.queue.emit(|| Event::JobReclaimed { id, reason });
}
