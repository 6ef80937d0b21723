//! The five phases of a cycle, in order, the walk that keeps their work list true, and what has nothing to do with
//! partitions.

use std::collections::HashSet;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::Mutex;
use std::time::Duration;

use ebbtide_sweep::{Drained, End, HeldBack, PhaseReport, Report, StepOutcome, drain};
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{FuturesUnordered, StreamExt};
use jiff::Timestamp;
use metrics::counter;
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;

use super::Settings;
use super::memory::{Memory, Walk};
use super::pacing::{Kind, Pacing, Watch, count_held_back};
use crate::db::due::{held, log_stamps_repair_v1, log_stamps_walk_v1};
use crate::db::kv::kv_sweep_step_v1;
use crate::db::retention::{
    MetricsPurged, Shortened, Work, WorkList, cleanup_worker_metrics_v1, days_before, log_evict_max_wait_step_v1,
    log_partition_cleanup_step_v1, log_retention_step_v1, log_txns_purge_step_v1, open_cycle, purge_system_metrics,
    quiet, work_list,
};
use crate::db::space::{flush_statistics, write_as_it_goes};
use crate::error::Error;
use crate::id::{PartitionId, QueueId};

/// The phases by the name under which they are reported and counted.
pub mod phase {
    pub const OPEN: &str = "open";
    pub const PLAN: &str = "plan";
    pub const RETENTION: &str = "retention";
    pub const TXNS: &str = "txns";
    pub const EVICTION: &str = "eviction";
    pub const CLEANUP: &str = "cleanup";
    pub const METRICS: &str = "metrics";
    pub const STAMPS: &str = "stamps";
    pub const KV: &str = "kv";
    /// Why phase 1 kept partitions whose first segment is old enough for rule 2.
    pub const UNREAD: &str = "not read by every consumer group";
}

/// Partitions whose steps stand in line at the same time.
const PIPELINE_MAX: usize = 8;
/// Partitions whose stamps one cycle looks at while a walk is under way.
const WALK_ROWS: i32 = 5000;
/// Held partitions are counted up to here: a number for a graph is not worth reading more rows.
const HELD_MAX: i64 = 100_000;
const STATEMENT_WAIT_MIN: Duration = Duration::from_secs(30);
const STATEMENT_WAIT_MAX: Duration = Duration::from_secs(900);

/// What a cycle did.
#[derive(Debug)]
pub struct Swept {
    pub report: Report<Error>,
    /// The queues that had something due in phase 1. By id: names repeat across tenants.
    pub queues: HashSet<QueueId>,
    /// Whether more was due than one cycle takes on.
    pub is_full: bool,
    /// Partitions in which rule 2 waits for a consumer group, if this cycle counted them.
    pub held: Option<u64>,
    /// How long each reason kept steps from running.
    pub held_back: HeldBack,
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

/// Which of the slower tasks a cycle takes on as well.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slow {
    pub(super) cleanup: bool,
    pub(super) walk: bool,
    pub(super) kv: bool,
}

/// Runs the phases on the leader's session, where one step runs after the other, and watches meanwhile what they do
/// to the database.
///
/// A step that fails starves nothing: the first error of each phase is kept, and what follows goes on.
/// Only a broken connection or a cancelled token ends the cycle.
pub(super) async fn run(
    db: &Client, settings: &Settings, leader: &mut Leader, slow: Slow, cancel: &CancellationToken,
) -> Swept {
    let mut swept = Swept {
        report: Report::start(),
        queues: HashSet::new(),
        is_full: false,
        held: None,
        held_back: Vec::new(),
        metrics: MetricsSummary::default(),
        as_of: None,
    };
    let Leader { memory, pacing, watch } = leader;
    let statement_wait = settings.interval.clamp(STATEMENT_WAIT_MIN, STATEMENT_WAIT_MAX);
    let statement_ms = u64::try_from(statement_wait.as_millis()).expect("at most 900 s");
    let lock_ms = u64::try_from(settings.lock_wait.as_millis()).expect("a few seconds");
    match open_cycle(db, None, lock_ms, statement_ms).await {
        Ok((as_of, backend)) => {
            let cycle = Cycle { db, settings, pacing, cancel, as_of, is_gentle: Mutex::new(None) };
            let flow = tokio::select! {
                flow = cycle.phases(memory, slow, &mut swept) => flow,
                () = watch.run(&pacing.throttle, backend, cancel) => unreachable!("it watches until it is dropped"),
            };
            if flow.is_continue() {
                swept.as_of = Some(as_of);
            }
            if swept.report.anything_went() && settings.vacuum {
                // Late counts make a late vacuum, and nothing worse.
                let _ = flush_statistics(db).await;
            }
        }
        Err(error) => {
            let mut phase = PhaseReport::start(phase::OPEN);
            phase.fail(error);
            swept.report.push(phase);
        }
    }
    swept.held_back = count_held_back(&pacing.throttle);
    swept
}

/// What a leader carries from cycle to cycle.
pub(super) struct Leader {
    pub(super) memory: Memory,
    pub(super) pacing: Pacing,
    pub(super) watch: Watch,
}

struct Cycle<'a> {
    db: &'a Client,
    settings: &'a Settings,
    pacing: &'a Pacing,
    cancel: &'a CancellationToken,
    as_of: Timestamp,
    /// Whether the session writes to disk as it goes, as far as this cycle has said.
    is_gentle: Mutex<Option<bool>>,
}

impl Cycle<'_> {
    async fn phases(&self, memory: &mut Memory, slow: Slow, swept: &mut Swept) -> ControlFlow<()> {
        let WorkList { works, is_full } = self.plan(memory, swept).await?;
        swept.is_full = is_full;
        memory.begin_behind(&works);

        let mut phase = PhaseReport::start(phase::RETENTION);
        let flow = self.retain(&works, memory, &mut phase, &mut swept.queues).await;
        if slow.cleanup && flow.is_continue() {
            swept.held = self.count_held(&mut phase).await;
        }
        swept.report.push(phase);
        flow?;

        let mut phase = PhaseReport::start(phase::TXNS);
        let flow = self.purge_txns(&works, memory, &mut phase).await;
        swept.report.push(phase);
        flow?;

        let mut phase = PhaseReport::start(phase::EVICTION);
        let flow = self.evict(&works, memory, &mut phase).await;
        swept.report.push(phase);
        flow?;

        if let Some(days) = self.settings.cleanup_days
            && slow.cleanup
        {
            let mut phase = PhaseReport::start(phase::CLEANUP);
            let flow = self.clean_up(&mut phase, days).await;
            swept.report.push(phase);
            flow?;
        }

        let mut phase = PhaseReport::start_minor(phase::METRICS);
        swept.metrics = self.purge_metrics(&mut phase).await;
        swept.report.push(phase);

        if slow.walk {
            let mut phase = PhaseReport::start_minor(phase::STAMPS);
            self.walk(&mut memory.walk, &mut phase).await;
            swept.report.push(phase);
        }

        if slow.kv && self.settings.kv_interval.is_some() {
            let mut phase = PhaseReport::start(phase::KV);
            let flow = self.sweep_kv(&mut phase).await;
            swept.report.push(phase);
            flow?;
        }
        ControlFlow::Continue(())
    }

    /// Values that have expired. Last, so that nothing of it holds up the phases that deal with messages.
    async fn sweep_kv(&self, phase: &mut PhaseReport<Error>) -> ControlFlow<()> {
        let step = || kv_sweep_step_v1(self.db, Some(self.as_of), self.settings.rows_max);
        record(phase, drain(self.cancel, step).await)
    }

    /// What is due. Without it the phases that need no list still run.
    async fn plan(&self, memory: &mut Memory, swept: &mut Swept) -> ControlFlow<(), WorkList> {
        match self.try_plan(memory).await {
            Ok(list) => ControlFlow::Continue(list),
            Err(error) => {
                let mut phase = PhaseReport::start(phase::PLAN);
                let flow = fail(&mut phase, error);
                swept.report.push(phase);
                flow.map_continue(|()| WorkList::default())
            }
        }
    }

    async fn try_plan(&self, memory: &mut Memory) -> Result<WorkList, Error> {
        let known = memory.quiet.iter().map(|(id, quiet)| (*id, *quiet));
        let learnt = quiet(self.db, Some(self.as_of), known).await?;
        let awake = memory.awake(&learnt, self.as_of);
        let except = memory.failing.resting();
        work_list(self.db, Some(self.as_of), &awake, memory.behind, &except, self.settings.due_max).await
    }

    /// Phase 1: rules 1 and 2.
    async fn retain(
        &self, works: &[Work], memory: &mut Memory, phase: &mut PhaseReport<Error>, queues: &mut HashSet<QueueId>,
    ) -> ControlFlow<()> {
        let due = || works.iter().filter(|work| work.rules_due);
        let has_cutoff = |work: &&Work| work.all_cutoff.is_some() || work.completed_cutoff.is_some();
        queues.extend(due().filter(has_cutoff).map(|work| work.queue_id));
        let drains = due().map(|work| {
            self.drain(Kind::Retention, work.partition_id, async |rows| {
                let (all, completed) = (work.all_cutoff, work.completed_cutoff);
                let step = log_retention_step_v1(self.db, work.partition_id, all, completed, rows).await?;
                Ok(counted(phase::RETENTION, step))
            })
        });
        side_by_side(drains, memory, phase).await
    }

    /// Phase 2: the sidecars.
    async fn purge_txns(&self, works: &[Work], memory: &mut Memory, phase: &mut PhaseReport<Error>) -> ControlFlow<()> {
        let drains = works.iter().filter(|work| work.txns_due).map(|work| {
            self.drain(Kind::Txns, work.partition_id, |rows| {
                log_txns_purge_step_v1(self.db, work.partition_id, Some(work.txns_cutoff), rows)
            })
        });
        side_by_side(drains, memory, phase).await
    }

    /// Phase 3: what has waited longer than its queue allows.
    async fn evict(&self, works: &[Work], memory: &mut Memory, phase: &mut PhaseReport<Error>) -> ControlFlow<()> {
        let drains = works.iter().filter(|work| work.max_wait_due).map(|work| {
            self.drain(Kind::Eviction, work.partition_id, async |rows| {
                let step = log_evict_max_wait_step_v1(self.db, work.partition_id, work.max_wait_cutoff, rows).await?;
                Ok(counted(phase::EVICTION, step))
            })
        });
        side_by_side(drains, memory, phase).await
    }

    /// The steps of one partition, each when its time has come.
    fn drain<'a, Fut>(
        &'a self, kind: Kind, partition_id: PartitionId, step: impl Fn(i32) -> Fut + Send + Sync + 'a,
    ) -> Draining<'a>
    where
        Fut: Future<Output = Result<StepOutcome, Error>> + Send + 'a,
    {
        async move {
            self.be_gentle().await;
            let drained = drain(self.cancel, || self.pacing.step(kind, self.cancel, &step)).await;
            (partition_id, drained)
        }
        .boxed()
    }

    /// Spares the disk while others are at work, and only then.
    async fn be_gentle(&self) {
        let is_shared = self.pacing.throttle.duty() < 1.0;
        let said = self.is_gentle.lock().expect("no holder panics").replace(is_shared);
        if said != Some(is_shared) {
            // The steps that follow do their work without it, and meet a broken connection themselves.
            let _ = write_as_it_goes(self.db, is_shared).await;
        }
    }

    /// How many partitions rule 2 keeps although they are old enough.
    async fn count_held(&self, phase: &mut PhaseReport<Error>) -> Option<u64> {
        match held(self.db, HELD_MAX).await {
            Ok(held) => {
                if 0 < held {
                    phase.keep(phase::UNREAD, held);
                }
                Some(held)
            }
            Err(error) => {
                phase.fail(error);
                None
            }
        }
    }

    /// One page of the walk over all stamps. It repairs what rows were deleted by hand, or by a restore.
    async fn walk(&self, walk: &mut Walk, phase: &mut PhaseReport<Error>) {
        let Some(after) = walk.position() else { return };
        let walked = match log_stamps_walk_v1(self.db, after, WALK_ROWS).await {
            Ok(walked) => walked,
            Err(error) => return phase.fail(error),
        };
        for &partition_id in &walked.wrong {
            if self.cancel.is_cancelled() {
                return;
            }
            match log_stamps_repair_v1(self.db, partition_id).await {
                Ok(repaired) => walk.count(repaired),
                Err(error) => phase.fail(error),
            }
        }
        walk.advance(walked.scanned, walked.last);
    }

    /// Phase 4: empty partitions. After the phases that empty them, so that they can go in the same cycle.
    async fn clean_up(&self, phase: &mut PhaseReport<Error>, days: i32) -> ControlFlow<()> {
        let cutoff = match days_before(self.db, self.as_of, days).await {
            Ok(cutoff) => cutoff,
            Err(error) => return fail(phase, error),
        };
        let step = |rows| log_partition_cleanup_step_v1(self.db, Some(cutoff), rows);
        record(phase, drain(self.cancel, || self.pacing.step(Kind::Cleanup, self.cancel, step)).await)
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

/// Counts what groups will not find any more.
fn counted(phase: &'static str, Shortened { outcome, skipped }: Shortened) -> StepOutcome {
    if 0 < skipped {
        counter!("ebbtide_retention_skipped_offsets_total", "phase" => phase).increment(skipped);
    }
    outcome
}

type Draining<'a> = BoxFuture<'a, (PartitionId, Drained<Error>)>;

/// Runs drains of several partitions side by side: the steps stand in line in the database, which runs one after the
/// other, so that none waits for the network and no two locks are ever held.
async fn side_by_side<'a>(
    mut drains: impl Iterator<Item = Draining<'a>>, memory: &mut Memory, phase: &mut PhaseReport<Error>,
) -> ControlFlow<()> {
    let mut running = FuturesUnordered::new();
    let mut flow = ControlFlow::Continue(());
    loop {
        while running.len() < PIPELINE_MAX && flow.is_continue() {
            let Some(drain) = drains.next() else { break };
            running.push(drain);
        }
        // Those that run are waited for whatever happened: a step must not be dropped while it is under way.
        let Some((partition_id, drained)) = running.next().await else { return flow };
        // A failure is that partition's alone, which then rests for some cycles.
        memory.failing.note(partition_id, matches!(drained.end, End::Failed(_)));
        if record(phase, drained).is_break() {
            flow = ControlFlow::Break(());
        }
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
