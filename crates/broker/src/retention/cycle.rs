//! The five phases of a cycle, in order.

use std::collections::HashSet;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::Mutex;
use std::time::Duration;

use ebbtide_sweep::{Drained, End, PhaseReport, Report, StepOutcome, drain};
use jiff::Timestamp;
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::Settings;
use crate::db::retention::{
    MetricsPurged, PAGE_ROWS, Probe, Work, cleanup_worker_metrics_v1, days_before, log_evict_max_wait_step_v1,
    log_partition_cleanup_step_v1, log_retention_step_v1, log_txns_purge_step_v1, open_cycle, purge_system_metrics,
    work_list,
};
use crate::error::Error;
use crate::id::{PartitionId, QueueId};

/// The phases by the name under which they are reported and counted.
pub mod phase {
    pub const OPEN: &str = "open";
    pub const RETENTION: &str = "retention";
    pub const TXNS: &str = "txns";
    pub const EVICTION: &str = "eviction";
    pub const CLEANUP: &str = "cleanup";
    pub const METRICS: &str = "metrics";
    /// Why phase 1 kept partitions whose first segment is old enough for rule 2.
    pub const UNREAD: &str = "not read by every consumer group";
}

const STATEMENT_WAIT_MIN: Duration = Duration::from_secs(30);
const STATEMENT_WAIT_MAX: Duration = Duration::from_secs(900);

/// What a cycle did.
#[derive(Debug)]
pub struct Swept {
    pub report: Report<Error>,
    /// The queues that had a cutoff in phase 1. By id: names repeat across tenants.
    pub queues: HashSet<QueueId>,
    pub metrics: MetricsSummary,
    /// The cycle's clock; `None` if the cycle did not get that far.
    pub as_of: Option<Timestamp>,
}

/// What phase 5 deleted, table by table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetricsSummary {
    pub workers: u64,
    pub lag: u64,
    pub parked: u64,
    pub history: u64,
    pub system: u64,
}

impl MetricsSummary {
    fn add(&mut self, purged: MetricsPurged) -> StepOutcome {
        let MetricsPurged { workers, lag, parked, history, done } = purged;
        self.workers += workers;
        self.lag += lag;
        self.parked += parked;
        self.history += history;
        StepOutcome { deleted: workers + lag + parked + history, done }
    }
}

impl fmt::Display for MetricsSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { workers, lag, parked, history, system } = self;
        write!(f, "worker {workers}, lag {lag}, parked {parked}, history {history}, system {system}")
    }
}

/// Runs the phases on the leader's session, one step after the other.
///
/// A step that fails starves nothing: the first error of each phase is kept, and what follows goes on.
/// Only a broken connection or a cancelled token ends the cycle. `as_of` replaces the database's now.
pub(super) async fn run(
    db: &Client, settings: &Settings, cleanup_due: bool, as_of: Option<Timestamp>, cancel: &CancellationToken,
) -> Swept {
    let mut swept =
        Swept { report: Report::start(), queues: HashSet::new(), metrics: MetricsSummary::default(), as_of: None };
    let statement_wait = settings.interval.clamp(STATEMENT_WAIT_MIN, STATEMENT_WAIT_MAX);
    let statement_ms = u64::try_from(statement_wait.as_millis()).expect("at most 900 s");
    let lock_ms = u64::try_from(settings.lock_wait.as_millis()).expect("a few seconds");
    match open_cycle(db, as_of, lock_ms, statement_ms).await {
        Ok(as_of) => {
            let cycle = Cycle { db, settings, cancel, as_of };
            if cycle.phases(cleanup_due, &mut swept).await.is_continue() {
                swept.as_of = Some(as_of);
            }
        }
        Err(error) => {
            let mut phase = PhaseReport::start(phase::OPEN);
            phase.fail(error);
            swept.report.push(phase);
        }
    }
    swept
}

struct Cycle<'a> {
    db: &'a Client,
    settings: &'a Settings,
    cancel: &'a CancellationToken,
    as_of: Timestamp,
}

impl Cycle<'_> {
    async fn phases(&self, cleanup_due: bool, swept: &mut Swept) -> ControlFlow<()> {
        let mut eviction_due = false;
        let mut phase = PhaseReport::start(phase::RETENTION);
        let flow = self.retain(&mut phase, &mut swept.queues, &mut eviction_due).await;
        swept.report.push(phase);
        flow?;

        let mut phase = PhaseReport::start(phase::TXNS);
        let flow = self.purge_txns(&mut phase).await;
        swept.report.push(phase);
        flow?;

        let mut phase = PhaseReport::start(phase::EVICTION);
        let flow = if eviction_due { self.evict(&mut phase).await } else { ControlFlow::Continue(()) };
        swept.report.push(phase);
        flow?;

        if let Some(days) = self.settings.cleanup_days
            && cleanup_due
        {
            let mut phase = PhaseReport::start(phase::CLEANUP);
            let flow = self.clean_up(&mut phase, days).await;
            swept.report.push(phase);
            flow?;
        }

        let mut phase = PhaseReport::start_minor(phase::METRICS);
        swept.metrics = self.purge_metrics(&mut phase).await;
        swept.report.push(phase);
        ControlFlow::Continue(())
    }

    /// Phase 1: rules 1 and 2. It notes as well whether phase 3 has anything to look for: both read the same rows
    /// by the same clock.
    async fn retain(
        &self, phase: &mut PhaseReport<Error>, queues: &mut HashSet<QueueId>, eviction_due: &mut bool,
    ) -> ControlFlow<()> {
        let mut pages = Pages::new(Probe::Segments);
        while let Some(page) = pages.next(self, phase).await? {
            for work in page {
                *eviction_due |= work.max_wait_due;
                let Work { partition_id, all_cutoff: all, completed_cutoff: completed, .. } = work;
                if all.is_some() || completed.is_some() {
                    queues.insert(work.queue_id);
                }
                if work.all_due || work.completed_read {
                    let step = || log_retention_step_v1(self.db, partition_id, all, completed, self.settings.rows_max);
                    record(phase, drain(self.cancel, step).await)?;
                } else if work.completed_old {
                    phase.keep(phase::UNREAD, 1);
                }
            }
        }
        // A list that broke off says nothing of the partitions behind the break.
        *eviction_due |= 0 < phase.failures;
        ControlFlow::Continue(())
    }

    /// Phase 2: the sidecar of every partition.
    async fn purge_txns(&self, phase: &mut PhaseReport<Error>) -> ControlFlow<()> {
        let mut pages = Pages::new(Probe::Sidecar);
        while let Some(page) = pages.next(self, phase).await? {
            for Work { partition_id, txns_cutoff, .. } in page.into_iter().filter(|work| work.txns_due) {
                let step = || log_txns_purge_step_v1(self.db, partition_id, Some(txns_cutoff), self.settings.rows_max);
                record(phase, drain(self.cancel, step).await)?;
            }
        }
        ControlFlow::Continue(())
    }

    /// Phase 3: what has waited longer than its queue allows.
    async fn evict(&self, phase: &mut PhaseReport<Error>) -> ControlFlow<()> {
        let mut pages = Pages::new(Probe::Segments);
        while let Some(page) = pages.next(self, phase).await? {
            for Work { partition_id, max_wait_cutoff, .. } in page.into_iter().filter(|work| work.max_wait_due) {
                let step =
                    || log_evict_max_wait_step_v1(self.db, partition_id, max_wait_cutoff, self.settings.rows_max);
                record(phase, drain(self.cancel, step).await)?;
            }
        }
        ControlFlow::Continue(())
    }

    /// Phase 4: empty partitions. After the phases that empty them, so that they can go in the same cycle.
    async fn clean_up(&self, phase: &mut PhaseReport<Error>, days: i32) -> ControlFlow<()> {
        let cutoff = match days_before(self.db, self.as_of, days).await {
            Ok(cutoff) => cutoff,
            Err(error) => return fail(phase, error),
        };
        let step = || log_partition_cleanup_step_v1(self.db, Some(cutoff), self.settings.rows_max);
        record(phase, drain(self.cancel, step).await)
    }

    /// Phase 5: metrics and the audit, by age. Its failures do not fail the cycle.
    async fn purge_metrics(&self, phase: &mut PhaseReport<Error>) -> MetricsSummary {
        let (days, rows_max) = (self.settings.metrics_days, self.settings.rows_max);
        let summary = Mutex::new(MetricsSummary::default());
        let step = || async {
            let purged = cleanup_worker_metrics_v1(self.db, days, rows_max).await?;
            Ok(summary.lock().expect("no holder panics").add(purged))
        };
        phase.record(drain(self.cancel, step).await);
        let drained = drain(self.cancel, || purge_system_metrics(self.db, days, rows_max)).await;
        let system = drained.deleted;
        phase.record(drained);
        MetricsSummary { system, ..summary.into_inner().expect("no holder panics") }
    }
}

/// Adds what a drain did. A broken connection or a cancelled token ends the cycle, anything else does not.
fn record(phase: &mut PhaseReport<Error>, drained: Drained<Error>) -> ControlFlow<()> {
    let ends = matches!(drained.end, End::Cancelled | End::Failed(Error::Disconnected));
    phase.record(drained);
    if ends { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

fn fail(phase: &mut PhaseReport<Error>, error: Error) -> ControlFlow<()> {
    let ends = matches!(error, Error::Disconnected);
    phase.fail(error);
    if ends { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

/// The work list in pages, so that the number of partitions does not decide how much memory a cycle takes.
struct Pages {
    probe: Probe,
    /// Where the next page starts; `None` behind the last one.
    from: Option<PartitionId>,
}

impl Pages {
    fn new(probe: Probe) -> Self {
        Self { probe, from: Some(PartitionId(Uuid::nil())) }
    }

    /// A page that cannot be read ends the phase: nothing says where the one after it would start.
    async fn next(&mut self, cycle: &Cycle<'_>, phase: &mut PhaseReport<Error>) -> ControlFlow<(), Option<Vec<Work>>> {
        let Some(from) = self.from else { return ControlFlow::Continue(None) };
        match work_list(cycle.db, Some(cycle.as_of), from, PAGE_ROWS, self.probe).await {
            Ok(page) => {
                let full = page.len() >= usize::try_from(PAGE_ROWS).expect("a small number");
                let after = page.last().filter(|_| full).and_then(|last| last.partition_id.0.as_u128().checked_add(1));
                self.from = after.map(|id| PartitionId(Uuid::from_u128(id)));
                ControlFlow::Continue(Some(page))
            }
            Err(error) => {
                self.from = None;
                match fail(phase, error) {
                    ControlFlow::Break(()) => ControlFlow::Break(()),
                    ControlFlow::Continue(()) => ControlFlow::Continue(None),
                }
            }
        }
    }
}
