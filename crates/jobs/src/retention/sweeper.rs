//! The background loops of one worker, and what they say once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ebbtide_sweep::{LineLimit, Report};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::pass::{CONSUMED_SIGNALS, EXPIRED_LOCKS, run_once, run_unique_locks_once};
use super::policy::{Retention, Span, UniqueLockSweep};
use super::ticker::{SweepTicker, Ticker};
use crate::error::Error;
use crate::job::TerminalStatus;
use crate::storage::{Protection, Storage};

/// Least time between two lines about passes that fail.
const LINE_GAP: Duration = Duration::from_secs(30);

/// The retention of one worker: what it announces at start, and the loop that deletes.
pub struct RetentionSweeper {
    storage: Arc<dyn Storage>,
    policy: Retention,
    is_announced: AtomicBool,
}

impl RetentionSweeper {
    /// The retention of `policy` on `storage`.
    pub fn new(storage: Arc<dyn Storage>, policy: Retention) -> Self {
        Self { storage, policy: policy.effective(), is_announced: AtomicBool::new(false) }
    }

    /// The policy in force: as it was given, within the limits, without what the storage cannot carry out.
    pub fn effective(&self) -> Retention {
        self.policy.effective_on(&*self.storage)
    }

    /// Says once what is deleted from here on, or that nothing is. Later calls say nothing, at once from many
    /// threads too. It asks the storage nothing.
    pub fn announce(&self) {
        if self.is_announced.swap(true, Ordering::AcqRel) {
            return;
        }
        self.announce_windows();
        if self.policy.delete_checkpoints && !self.storage.deletes_checkpoints() {
            warn!(target: "jobs", "the storage does not delete checkpoints on completion; they stay with their jobs");
        }
    }

    fn announce_windows(&self) {
        let is_capable = self.storage.retention().is_some() || self.storage.signal_retention().is_some();
        if self.policy.is_enabled() && !is_capable {
            warn!(target: "jobs", "the storage does not support retention; nothing is deleted by age");
            return;
        }
        let policy = self.effective();
        if !policy.is_enabled() {
            warn!(
                target: "jobs",
                "retention is disabled; completed/failed/cancelled job rows and consumed signals accumulate forever"
            );
            return;
        }
        let span = |window: Option<Duration>| Span(window.unwrap_or(Duration::ZERO));
        info!(
            target: "jobs",
            completed_after = %span(policy.completed_after),
            failed_after = %span(policy.failed_after),
            consumed_signals_after = %span(policy.consumed_signals_after),
            disable_hint = "disable with Retention::disabled()",
            "retention GC enabled"
        );
    }

    /// Announces, and ticks at the policy's interval until `cancel` is cancelled. Ends at once if nothing is on.
    pub async fn run(&self, cancel: &CancellationToken) {
        self.run_with(SweepTicker::new(self.policy.interval), cancel).await;
    }

    /// As [`RetentionSweeper::run`], with ticks of the caller's choosing.
    pub async fn run_with(&self, mut ticker: impl Ticker, cancel: &CancellationToken) {
        self.announce();
        if !self.effective().is_enabled() {
            return;
        }
        let mut lines = LineLimit::new(LINE_GAP);
        while ticker.next(cancel).await {
            let report = run_once(&*self.storage, &self.policy, cancel).await;
            log(&report, &mut lines);
            self.reclaim(&report).await;
            self.measure(&report).await;
        }
    }

    /// Lets new rows have the room of those that went.
    async fn reclaim(&self, report: &Report<Error>) {
        let Some(store) = self.storage.retention() else { return };
        if report.anything_went()
            && let Err(error) = store.reclaim().await
        {
            debug!(target: "jobs", %error, "the space of deleted jobs was not reclaimed; the database does it later");
        }
    }

    /// Sets the gauges after a tick that went well. What is left past its window then is what protections hold.
    async fn measure(&self, report: &Report<Error>) {
        if report.first_error().is_some() {
            return;
        }
        if let Ok(now) = self.storage.now().await {
            #[allow(clippy::cast_precision_loss, reason = "a gauge of seconds")]
            metrics::gauge!("jobs.retention.last_success").set(now.as_second() as f64);
        }
        let Ok(plan) = super::plan(&*self.storage, &self.policy).await else { return };
        for protection in Protection::ALL {
            let kinds = TerminalStatus::ALL.into_iter().filter_map(|status| plan.kind(status));
            let pinned: u64 = kinds.map(|kind| kind.kept_by(protection)).sum();
            #[allow(clippy::cast_precision_loss, reason = "a gauge of rows")]
            metrics::gauge!("jobs.retention.pinned", "by" => protection.as_str()).set(pinned as f64);
        }
    }
}

fn log(report: &Report<Error>, lines: &mut LineLimit) {
    let failed = report.phases().iter().filter_map(|phase| Some((phase.name, phase.first_error.as_ref()?)));
    let failed: Vec<(&str, &Error)> = failed.collect();
    if !failed.is_empty()
        && let Some(suppressed) = lines.admit()
    {
        for (kind, error) in failed {
            if kind == CONSUMED_SIGNALS {
                warn!(target: "jobs", %error, suppressed, "consumed signals were not all deleted");
            } else {
                warn!(target: "jobs", status = kind, %error, suppressed, "finished jobs were not all deleted");
            }
        }
    }
    debug!(
        target: "jobs",
        completed = report.deleted("completed"),
        failed = report.deleted("failed"),
        cancelled = report.deleted("cancelled"),
        consumed_signals = report.deleted(CONSUMED_SIGNALS),
        elapsed_ms = u64::try_from(report.elapsed().as_millis()).unwrap_or(u64::MAX),
        "retention tick"
    );
}

/// The sweep of passed deduplication windows of one worker.
pub struct UniqueLockSweeper {
    storage: Arc<dyn Storage>,
    policy: UniqueLockSweep,
    is_warned: AtomicBool,
}

impl UniqueLockSweeper {
    /// The sweep of `policy` on `storage`.
    pub fn new(storage: Arc<dyn Storage>, policy: UniqueLockSweep) -> Self {
        Self { storage, policy: policy.effective(), is_warned: AtomicBool::new(false) }
    }

    /// Ticks at the policy's interval until `cancel` is cancelled. Ends at once if it is disabled, or, with one
    /// warning, if the storage keeps no windows.
    pub async fn run(&self, cancel: &CancellationToken) {
        self.run_with(SweepTicker::new(self.policy.interval), cancel).await;
    }

    /// As [`UniqueLockSweeper::run`], with ticks of the caller's choosing.
    pub async fn run_with(&self, mut ticker: impl Ticker, cancel: &CancellationToken) {
        if !self.policy.is_enabled {
            return;
        }
        if self.storage.unique_locks().is_none() {
            if !self.is_warned.swap(true, Ordering::AcqRel) {
                warn!(target: "jobs", "the storage does not sweep deduplication windows; what it has of them stays");
            }
            return;
        }
        let mut lines = LineLimit::new(LINE_GAP);
        while ticker.next(cancel).await {
            let report = run_unique_locks_once(&*self.storage, &self.policy, cancel).await;
            if let Some(error) = report.first_error()
                && let Some(suppressed) = lines.admit()
            {
                warn!(target: "jobs", %error, suppressed, "passed deduplication windows were not all deleted");
            }
            debug!(target: "jobs", deleted = report.deleted(EXPIRED_LOCKS), "window sweep tick");
        }
    }
}
