//! The background deletion: paces cycles, elects their leader, and says what became of them.

mod cycle;
mod memory;
pub mod pacing;
mod vacuum;

use std::time::Duration;

use ebbtide_sweep::{AdvisoryGate, Every, GateError, LeaderGate, Led, LineLimit, Pace, PhaseReport, Report, pause};
use metrics::{counter, gauge, histogram};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use crate::config;
use crate::db::Target;
use crate::error::Error;
use cycle::{Leader, Slow};
pub use cycle::{MetricsSummary, Swept, phase};
use memory::Memory;
use pacing::{Limits, Pacing, Watch};
use vacuum::Vacuums;

/// The session advisory lock that elects the leader, on every server of the database.
pub const LOCK_ID: i64 = 737_001;
/// The window of phase 4 is days, and partitions that are vetoed are looked at each time.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(60);
const CYCLE_ERROR_GAP: Duration = Duration::from_secs(30);
const METRICS_ERROR_GAP: Duration = Duration::from_secs(60);
const LOCK_WAIT: Duration = Duration::from_secs(5);
const RESTART_GAP: Duration = Duration::from_secs(30);
/// How long a network that swallows packets may hold up a cycle.
const NETWORK_WAIT: Duration = Duration::from_secs(30);

/// What a cycle is told.
#[derive(Clone, Debug)]
pub struct Settings {
    /// From cycle start to cycle start.
    pub interval: Duration,
    /// Rows that one step deletes at most: the longest time that a push waits for it.
    pub rows_max: i32,
    /// Days of silence after which an empty partition goes; `None` keeps it for ever.
    pub cleanup_days: Option<i32>,
    /// Age in days at which metrics and the audit of deletions go.
    pub metrics_days: i32,
    /// Partitions that one cycle takes on at most; the others have their turn in the next.
    pub due_max: i32,
    /// From one walk over all stamps to the next; `None` walks once.
    pub walk_interval: Option<Duration>,
    /// From one sweep of expired values to the next; `None` never deletes them.
    pub kv_interval: Option<Duration>,
    /// The longest that a step should hold a partition's lock: its batch is cut until it does not.
    pub lock_hold: Duration,
    /// The share of the time that steps may run while others use the database.
    pub shared_duty: f64,
    /// What else slows steps down.
    pub limits: Limits,
    /// Whether the leader vacuums what it emptied.
    pub vacuum: bool,
    /// How long a step waits for a partition that somebody holds, before its turn passes to the next one.
    pub lock_wait: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(5),
            rows_max: 1000,
            cleanup_days: Some(30),
            metrics_days: 90,
            due_max: 5000,
            walk_interval: Some(Duration::from_secs(86_400)),
            kv_interval: Some(Duration::from_secs(30)),
            lock_hold: Duration::from_millis(10),
            shared_duty: 0.5,
            limits: Limits::default(),
            vacuum: true,
            lock_wait: LOCK_WAIT,
        }
    }
}

impl From<&config::Retention> for Settings {
    fn from(checked: &config::Retention) -> Self {
        Self {
            interval: Duration::from_millis(checked.interval_ms),
            rows_max: checked.rows_max,
            cleanup_days: checked.partition_cleanup_days,
            metrics_days: checked.metrics_retention_days,
            due_max: checked.due_max,
            walk_interval: checked.safety_walk,
            kv_interval: checked.kv_sweep,
            lock_hold: checked.lock_hold,
            shared_duty: checked.shared_duty,
            limits: Limits {
                wal_bytes_per_second: checked.wal_bytes_per_second,
                replication_lag_bytes: checked.replication_lag_bytes,
                snapshot_age: checked.snapshot_age,
            },
            vacuum: checked.vacuum,
            lock_wait: LOCK_WAIT,
        }
    }
}

/// Runs [`run`] in a task of its own. The task ends when `cancel` is cancelled, and before that by nothing: a
/// panic in a cycle is our own mistake, and must neither stop the server nor end deletion in silence.
pub fn spawn(target: Target, settings: Settings, cancel: CancellationToken) -> JoinHandle<()> {
    tokio::spawn(async move {
        loop {
            let sweeping = tokio::spawn(run(target.clone(), settings.clone(), cancel.clone()));
            if let Err(panic) = sweeping.await {
                error!(target: "retention", %panic, "the task failed and starts again");
            }
            if !pause(RESTART_GAP, &cancel).await {
                return;
            }
        }
    })
}

/// Runs cycles until `cancel` is cancelled; a step in flight runs to its end.
///
/// `target` must reach the database directly: leadership is a session's.
pub async fn run(target: Target, settings: Settings, cancel: CancellationToken) {
    info!(
        target: "retention",
        interval_ms = settings.interval.as_millis(),
        lock_id = LOCK_ID,
        batch_size = settings.rows_max,
        metrics_days = settings.metrics_days,
        cleanup_days = settings.cleanup_days,
        "started"
    );
    let mut leader = Leader::new(&target, &settings);
    let mut vacuums = Vacuums::new(target.clone());
    let mut gate = gate(target);
    let mut pace = Pace::new(settings.interval);
    let mut cleanup = Every::new(CLEANUP_INTERVAL);
    let mut walk = Every::new(settings.walk_interval.unwrap_or(Duration::MAX));
    let mut kv = Every::new(settings.kv_interval.unwrap_or(Duration::MAX));
    let mut told = Told::default();
    while let Some(started) = pace.next(&cancel).await {
        let slow = Slow { cleanup: cleanup.is_due(started), walk: true, kv: kv.is_due(started) };
        if walk.is_due(started) && leader.memory.walk.position().is_none() {
            leader.memory.walk.start();
        }
        let led = gate.as_leader(async |db| cycle::run(&db, &settings, &mut leader, slow, &cancel).await).await;
        if let Ok(Led::Ran(swept)) = &led {
            if swept.report.phase(phase::CLEANUP).is_some() {
                cleanup.restart(started);
            }
            if swept.report.phase(phase::STAMPS).is_some() && walk.is_due(started) {
                walk.restart(started);
            }
            if swept.report.phase(phase::KV).is_some() {
                kv.restart(started);
            }
            if swept.is_full {
                pace.hurry();
            }
            if settings.vacuum && swept.report.anything_went() {
                vacuums.start(leader.watch.is_horizon_held(), &cancel);
            }
        }
        told.tell(&led);
        if let Some(memory::Round { scanned, repaired }) = leader.memory.walk.ended() {
            told.tell_walk(scanned, repaired);
        }
    }
    vacuums.finish().await;
}

impl Leader {
    fn new(target: &Target, settings: &Settings) -> Self {
        Self {
            memory: Memory::default(),
            pacing: Pacing::new(settings),
            watch: Watch::new(target.clone(), settings.limits),
        }
    }
}

/// Runs one cycle, every phase due, unless another session leads.
///
/// # Errors
/// If no leader could be elected. Failures of the cycle itself are in its report.
pub async fn once(target: Target, settings: &Settings, cancel: &CancellationToken) -> Result<Led<Swept>, GateError> {
    // Whatever is due goes, in one plan: nobody comes to do the rest.
    let settings = Settings { due_max: config::DUE_MAX, ..settings.clone() };
    let slow = Slow { cleanup: true, walk: false, kv: true };
    let mut leader = Leader::new(&target, &settings);
    let mut gate = gate(target.clone());
    let led = gate.as_leader(async |db| cycle::run(&db, &settings, &mut leader, slow, cancel).await).await?;
    if settings.vacuum && matches!(&led, Led::Ran(swept) if swept.report.anything_went()) {
        // What the cycle deleted it deleted, whatever becomes of the vacuum.
        if let Err(error) = vacuum::vacuum(&target, cancel).await {
            warn!(target: "retention", %error, "vacuum failed; autovacuum will come by");
        }
    }
    Ok(led)
}

fn gate(mut target: Target) -> AdvisoryGate {
    target.config.connect_timeout(NETWORK_WAIT).tcp_user_timeout(NETWORK_WAIT);
    target.config.keepalives_idle(NETWORK_WAIT / 3);
    AdvisoryGate::new(LOCK_ID, move || {
        let target = target.clone();
        async move {
            let (client, connection) = target.config.connect(target.connector()).await?;
            let driver = tokio::spawn(async move {
                if let Err(error) = connection.await {
                    debug!(target: "retention", %error, "connection ended");
                }
            });
            Ok((client, driver))
        }
    })
}

/// What was said lately, so that an outage does not fill the log.
struct Told {
    cycle_errors: LineLimit,
    metrics_errors: LineLimit,
}

impl Default for Told {
    fn default() -> Self {
        Self { cycle_errors: LineLimit::new(CYCLE_ERROR_GAP), metrics_errors: LineLimit::new(METRICS_ERROR_GAP) }
    }
}

impl Told {
    fn tell(&mut self, led: &Result<Led<Swept>, GateError>) {
        let outcome = match led {
            Ok(Led::Skipped) => "skipped",
            Ok(Led::Ran(swept)) => self.tell_swept(swept),
            Err(error) => {
                self.tell_failed(&full(error), 1);
                "failed"
            }
        };
        counter!("ebbtide_retention_cycles_total", "outcome" => outcome).increment(1);
    }

    fn tell_swept(&mut self, swept: &Swept) -> &'static str {
        log_swept(swept);
        count(swept);
        if let Some(metrics) = swept.report.phase(phase::METRICS)
            && let Some(error) = &metrics.first_error
            && let Some(suppressed) = self.metrics_errors.admit()
        {
            error!(target: "retention", error = full(error), suppressed, "metrics purge failed");
        }
        match (swept.report.first_error(), swept.as_of) {
            (Some(error), _) => {
                let failures = swept.report.phases().iter().filter(|p| !p.is_minor).map(|p| p.failures).sum();
                self.tell_failed(&full(error), failures);
                "failed"
            }
            (None, Some(as_of)) => {
                gauge!("ebbtide_retention_last_success_timestamp_seconds").set(as_of.as_duration().as_secs_f64());
                "succeeded"
            }
            (None, None) => "cancelled",
        }
    }

    /// Stamps that were wrong are worth a line: what they hid was not swept until now.
    fn tell_walk(&mut self, scanned: u64, repaired: u64) {
        counter!("ebbtide_retention_stamps_repaired_total").increment(repaired);
        if 0 < repaired {
            info!(target: "retention", scanned, repaired, "repaired stamps");
        } else {
            debug!(target: "retention", scanned, "stamps are right");
        }
    }

    fn tell_failed(&mut self, error: &str, failures: u64) {
        if let Some(suppressed) = self.cycle_errors.admit() {
            error!(target: "retention", error, failures, suppressed, "cycle failed");
        }
    }
}

/// The error and what caused it, on one line.
fn full(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// At info only when data went: an idle server stays silent, and so does one that only trims its metrics.
fn log_swept(swept: &Swept) {
    let Swept { report, queues, metrics, is_full: _, held: _, held_back: _, as_of: _ } = swept;
    let queues = queues.len();
    let segments_deleted = report.deleted(phase::RETENTION);
    let txns_purged = report.deleted(phase::TXNS);
    let max_wait_evicted = report.deleted(phase::EVICTION);
    let partitions_deleted = report.deleted(phase::CLEANUP);
    let kv_expired = report.deleted(phase::KV);
    let metrics_purge = metrics.to_string();
    let elapsed_ms = report.elapsed().as_millis();
    macro_rules! line {
        ($level:ident) => {
            $level!(
                target: "retention", queues, segments_deleted, txns_purged, max_wait_evicted,
                partitions_deleted, kv_expired, metrics_purge, elapsed_ms, "swept"
            )
        };
    }
    if report.anything_went() { line!(info) } else { line!(debug) }
}

fn count(swept: &Swept) {
    let report: &Report<Error> = &swept.report;
    for PhaseReport { name, deleted, failures, .. } in report.phases() {
        counter!("ebbtide_retention_deleted_rows_total", "phase" => *name).increment(*deleted);
        counter!("ebbtide_retention_failed_steps_total", "phase" => *name).increment(*failures);
    }
    if let Some(held) = swept.held {
        #[allow(clippy::cast_precision_loss, reason = "a count of partitions, for a graph")]
        gauge!("ebbtide_retention_pinned_partitions").set(held as f64);
    }
    histogram!("ebbtide_retention_cycle_seconds").record(report.elapsed().as_secs_f64());
}
