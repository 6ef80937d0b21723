//! One tick: pass after pass of each kind until a pass comes back short.

use std::time::Duration;

use ebbtide_sweep::{PhaseReport, Report, StepOutcome, drain, pause};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::policy::{Retention, UniqueLockSweep};
use super::ticker::random_up_to;
use crate::error::Error;
use crate::job::TerminalStatus;
use crate::limits::{PASS_ATTEMPTS, PASS_RETRY_STEP};
use crate::storage::Storage;

/// The phase of consumed signals in a report; those of jobs have the names of their statuses.
pub const CONSUMED_SIGNALS: &str = "consumed_signals";
/// The phase of passed deduplication windows in a report.
pub const EXPIRED_LOCKS: &str = "expired_locks";

/// One tick of `policy`: completed, failed and cancelled jobs, then consumed signals, each until nothing past its
/// window is left. Kinds without a window, or without a storage that can delete them, are not in the report.
///
/// A pass that fails ends its kind for this tick and keeps no other kind from its turn; the report has the error. A
/// cancelled token ends the tick between two passes.
pub async fn run_once(storage: &dyn Storage, policy: &Retention, cancel: &CancellationToken) -> Report<Error> {
    let policy = policy.effective();
    let rows_max = policy.batch_size;
    let mut report = Report::start();
    if let Some(store) = storage.retention() {
        for status in TerminalStatus::ALL {
            let Some(window) = policy.window(status) else { continue };
            let pass = || store.delete_terminal_older_than(status, window, rows_max);
            report.push(phase(status.as_str(), rows_max, cancel, pass).await);
        }
    }
    if let (Some(store), Some(window)) = (storage.signal_retention(), policy.consumed_signals_after) {
        let pass = || store.delete_consumed_older_than(window, rows_max);
        report.push(phase(CONSUMED_SIGNALS, rows_max, cancel, pass).await);
    }
    report
}

/// One tick of the sweep of passed deduplication windows; nothing if it is disabled or the storage has none.
pub async fn run_unique_locks_once(
    storage: &dyn Storage, policy: &UniqueLockSweep, cancel: &CancellationToken,
) -> Report<Error> {
    let rows_max = policy.effective().batch_size;
    let mut report = Report::start();
    if let (Some(store), true) = (storage.unique_locks(), policy.is_enabled) {
        report.push(phase(EXPIRED_LOCKS, rows_max, cancel, || store.delete_expired(rows_max)).await);
    }
    report
}

async fn phase<F, Fut>(kind: &'static str, rows_max: u32, cancel: &CancellationToken, pass: F) -> PhaseReport<Error>
where
    F: Fn() -> Fut,
    Fut: Future<Output = Result<u64, Error>>,
{
    let mut phase = PhaseReport::start(kind);
    let drained = drain(cancel, || async {
        let started = Instant::now();
        let outcome = with_retries(cancel, &pass).await;
        record(kind, &outcome, started.elapsed());
        // A short pass has seen all there was. A full one may have been the last, which only the next one can tell.
        outcome.map(|deleted| StepOutcome { deleted, done: deleted < u64::from(rows_max) })
    });
    phase.record(drained.await);
    phase
}

/// Repeats a pass that lost against another transaction; what it had done is undone, so it counts from nothing.
async fn with_retries<F, Fut>(cancel: &CancellationToken, pass: &F) -> Result<u64, Error>
where
    F: Fn() -> Fut,
    Fut: Future<Output = Result<u64, Error>>,
{
    let mut attempt = 1;
    loop {
        match pass().await {
            Err(error) if error.is_busy() && attempt < PASS_ATTEMPTS => {
                let wait = PASS_RETRY_STEP * attempt;
                if !pause(wait + random_up_to(wait / 2), cancel).await {
                    return Err(error);
                }
                attempt += 1;
            }
            outcome => return outcome,
        }
    }
}

fn record(kind: &'static str, outcome: &Result<u64, Error>, elapsed: Duration) {
    match (kind, outcome) {
        (EXPIRED_LOCKS, Ok(deleted)) => metrics::counter!("jobs.unique_locks.deleted").increment(*deleted),
        (EXPIRED_LOCKS, Err(_)) => {}
        (kind, Ok(deleted)) => {
            metrics::counter!("jobs.retention.deleted", "kind" => kind).increment(*deleted);
            metrics::histogram!("jobs.retention.pass.duration", "kind" => kind).record(elapsed.as_secs_f64());
        }
        (kind, Err(_)) => metrics::counter!("jobs.retention.errors", "kind" => kind).increment(1),
    }
}
