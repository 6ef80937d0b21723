//! One tick: pass after pass of each kind until a pass comes back short.

use std::sync::Mutex;
use std::time::Duration;

use ebbtide_sweep::{Batch, PhaseReport, Report, StepOutcome, drain, pause};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::policy::{Retention, UniqueLockSweep};
use super::ticker::random_up_to;
use crate::error::Error;
use crate::job::TerminalStatus;
use crate::limits::{PASS_ATTEMPTS, PASS_LENGTH_MAX, PASS_RETRY_STEP};
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
            let pass = |rows| store.delete_terminal_older_than(status, window, rows);
            report.push(phase(status.as_str(), rows_max, cancel, pass).await);
        }
    }
    if let (Some(store), Some(window)) = (storage.signal_retention(), policy.consumed_signals_after) {
        let pass = |rows| store.delete_consumed_older_than(window, rows);
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
        report.push(phase(EXPIRED_LOCKS, rows_max, cancel, |rows| store.delete_expired(rows)).await);
    }
    report
}

/// The batch halves when a pass loses against another transaction, is cut when a pass takes long, and grows back.
async fn phase<F, Fut>(kind: &'static str, rows_max: u32, cancel: &CancellationToken, pass: F) -> PhaseReport<Error>
where
    F: Fn(u32) -> Fut,
    Fut: Future<Output = Result<u64, Error>>,
{
    let mut phase = PhaseReport::start(kind);
    let batch = Batch::new(i32::try_from(rows_max).unwrap_or(i32::MAX).max(1), PASS_LENGTH_MAX);
    let batch = Mutex::new(batch);
    let drained = drain(cancel, || async {
        let started = Instant::now();
        let (rows, outcome) = with_retries(cancel, &batch, &pass).await;
        let elapsed = started.elapsed();
        record(kind, &outcome, elapsed);
        if let Ok(deleted) = &outcome {
            lock(&batch).took(*deleted, elapsed);
        }
        // A short pass has seen all there was. A full one may have been the last, which only the next one can tell.
        outcome.map(|deleted| StepOutcome { deleted, done: deleted < u64::from(rows) })
    });
    phase.record(drained.await);
    phase
}

fn lock(batch: &Mutex<Batch>) -> std::sync::MutexGuard<'_, Batch> {
    batch.lock().expect("no holder panics")
}

/// Repeats a pass that lost against another transaction; what it had done is undone, so it counts from nothing.
/// Answers the batch of the last attempt as well.
async fn with_retries<F, Fut>(cancel: &CancellationToken, batch: &Mutex<Batch>, pass: &F) -> (u32, Result<u64, Error>)
where
    F: Fn(u32) -> Fut,
    Fut: Future<Output = Result<u64, Error>>,
{
    let mut attempt = 1;
    loop {
        let rows = lock(batch).rows().unsigned_abs();
        match pass(rows).await {
            Err(error) if error.is_busy() && attempt < PASS_ATTEMPTS => {
                lock(batch).timed_out();
                let wait = PASS_RETRY_STEP * attempt;
                if !pause(wait + random_up_to(wait / 2), cancel).await {
                    return (rows, Err(error));
                }
                attempt += 1;
            }
            outcome => return (rows, outcome),
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
