//! How fast steps follow each other: batches that fit, a share of the time, and the eye on what they do.

use std::sync::Mutex;
use std::time::Duration;

use ebbtide_sweep::{Batch, LineLimit, Pressure, StepOutcome, Throttle, pause};
use metrics::{counter, gauge};
use tokio::sync::Mutex as Turn;
use tokio::time::Instant;
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::Settings;
use crate::db::Target;
use crate::db::space::{self, Holder, Sample};
use crate::error::Error;

/// Between two looks at the database while a cycle is under way.
const SAMPLE_GAP: Duration = Duration::from_millis(200);
/// Between two looks for whoever holds old snapshots.
const HOLDER_GAP: Duration = Duration::from_secs(2);
/// Between two lines of one kind.
const LINE_GAP: Duration = Duration::from_secs(60);
/// A commit that takes this many times as long as it can suffers, if it takes [`COMMIT_EXCESS`] longer, too.
const COMMIT_FACTOR: f64 = 4.0;
const COMMIT_EXCESS: Duration = Duration::from_millis(5);
/// Weight of the newest commit in their average.
const COMMIT_WEIGHT: f64 = 0.3;
/// The best time of a commit is forgotten by so much a sample: machines change.
const BEST_DRIFT: f64 = 1.002;
/// A snapshot older than this many transactions keeps rows dead that could be gone, if no time of it is known.
const SNAPSHOT_TRANSACTIONS: u64 = 1_000_000;
/// Dead rows that are no trouble, however few live ones there are.
const DEAD_ROWS_MIN: u64 = 1_000_000;

/// Why steps are slowed down.
pub mod reason {
    pub const COMMITS: &str = "commit latency";
    pub const WAL: &str = "write-ahead log";
    pub const REPLICATION: &str = "replication lag";
    pub const DEAD_ROWS: &str = "dead rows";
    pub const HORIZON: &str = "old snapshot";
}

/// The kinds of steps, each with a batch of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Retention,
    Txns,
    Eviction,
    Cleanup,
}

/// What all cycles of a leader share.
pub(super) struct Pacing {
    pub(super) throttle: Throttle,
    batches: [Mutex<Batch>; 4],
    /// Held by the step whose turn it is while steps are spaced; alone they may stand in line in the database.
    turn: Turn<()>,
}

impl Pacing {
    pub(super) fn new(settings: &Settings) -> Self {
        let batch = || Mutex::new(Batch::new(settings.rows_max, settings.lock_hold));
        Self {
            throttle: Throttle::new(settings.shared_duty),
            batches: [batch(), batch(), batch(), batch()],
            turn: Turn::new(()),
        }
    }

    /// Runs one step when its time has come, with the batch of its kind.
    pub(super) async fn step<F, Fut>(
        &self, kind: Kind, cancel: &CancellationToken, run: F,
    ) -> Result<StepOutcome, Error>
    where
        F: FnOnce(i32) -> Fut,
        Fut: Future<Output = Result<StepOutcome, Error>>,
    {
        let _turn = if self.throttle.duty() < 1.0 { Some(self.turn.lock().await) } else { None };
        // Cancelled or not: who asked for this step has not been told to stop, and the step is short.
        let _ = self.throttle.ready(cancel).await;
        let rows = self.batch(kind).rows();
        let sent = Instant::now();
        let result = run(rows).await;
        match &result {
            Ok(outcome) => {
                let ran = self.throttle.took(sent);
                self.batch(kind).took(outcome.deleted, ran);
            }
            Err(Error::LockTimeout | Error::StatementTimeout) => self.batch(kind).timed_out(),
            Err(_) => {}
        }
        result
    }

    fn batch(&self, kind: Kind) -> std::sync::MutexGuard<'_, Batch> {
        self.batches[kind as usize].lock().expect("no holder panics")
    }
}

/// Looks at the database while a cycle runs, on a session of its own. A cycle that ends soon opens none.
pub(super) struct Watch {
    target: Target,
    limits: Limits,
    session: Option<Client>,
    commit_best: Option<Duration>,
    commit_average: Option<Duration>,
    wal: Option<(Instant, u64)>,
    holders_at: Option<Instant>,
    holder: Option<Holder>,
    slow_line: LineLimit,
    holder_line: LineLimit,
    failure_line: LineLimit,
}

/// From where on something counts as suffering; `None` where it may suffer.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of log a second, of everybody together. It counts while anybody else is at work.
    pub wal_bytes_per_second: Option<u64>,
    pub replication_lag_bytes: Option<u64>,
    /// How old a snapshot may be before it counts as one that keeps rows dead that could be gone.
    pub snapshot_age: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            wal_bytes_per_second: Some(256 << 20),
            replication_lag_bytes: Some(64 << 20),
            snapshot_age: Duration::from_secs(60),
        }
    }
}

impl Watch {
    pub(super) fn new(target: Target, limits: Limits) -> Self {
        Self {
            target,
            limits,
            session: None,
            commit_best: None,
            commit_average: None,
            wal: None,
            holders_at: None,
            holder: None,
            slow_line: LineLimit::new(LINE_GAP),
            holder_line: LineLimit::new(LINE_GAP),
            failure_line: LineLimit::new(LINE_GAP),
        }
    }

    /// Whether an old snapshot keeps dead rows, so that vacuum could not remove them.
    pub(super) fn is_horizon_held(&self) -> bool {
        self.holder.is_some()
    }

    /// Samples and presses `throttle`, until it is dropped. `leader` is the backend of the steps.
    pub(super) async fn run(&mut self, throttle: &Throttle, leader: i32, cancel: &CancellationToken) {
        self.wal = None;
        while pause(SAMPLE_GAP, cancel).await {
            match self.look(leader).await {
                Ok(pressure) => self.press(throttle, pressure),
                Err(error) => {
                    self.session = None;
                    if let Some(suppressed) = self.failure_line.admit() {
                        warn!(target: "retention", %error, suppressed, "deletion cannot see what it does to the database");
                    }
                }
            }
        }
        // Whoever drops this decides when the cycle has ended.
        std::future::pending::<()>().await;
    }

    fn press(&mut self, throttle: &Throttle, pressure: Pressure) {
        let reasons = pressure.reasons.join(", ");
        let has_changed = throttle.press(pressure);
        gauge!("ebbtide_retention_duty_ratio").set(throttle.duty());
        if has_changed && !reasons.is_empty() {
            if let Some(suppressed) = self.slow_line.admit() {
                info!(target: "retention", reasons, duty = throttle.duty(), suppressed, "slowed down");
            }
        } else if has_changed {
            debug!(target: "retention", duty = throttle.duty(), "no longer slowed down");
        }
    }

    async fn look(&mut self, leader: i32) -> Result<Pressure, Error> {
        if self.session.is_none() {
            self.session = Some(self.target.connect("ebbtide-watch").await?);
        }
        let client = self.session.as_ref().expect("opened above");
        let own = &[leader];
        let sample = space::sample(client, own).await?;
        let started = Instant::now();
        space::commit(client).await?;
        let commit = started.elapsed();
        let holder_due = self.holders_at.is_none_or(|at| HOLDER_GAP <= at.elapsed());
        if holder_due {
            let holders = space::holders(client, own, 1).await?;
            self.holder = holders.into_iter().find(|holder| is_old(holder, self.limits.snapshot_age));
            self.holders_at = Some(Instant::now());
        }
        self.tell_holder();
        Ok(self.judge(sample, commit))
    }

    fn judge(&mut self, sample: Sample, commit: Duration) -> Pressure {
        let mut reasons = Vec::new();
        if self.is_commit_slow(commit) {
            reasons.push(reason::COMMITS);
        }
        let now = Instant::now();
        let before = self.wal.replace((now, sample.wal_bytes));
        // The bandwidth is kept for the others: alone, steps may fill it. Standbys have a limit of their own.
        if let (true, Some(limit), Some((at, bytes))) = (sample.is_shared, self.limits.wal_bytes_per_second, before) {
            let elapsed = now.saturating_duration_since(at).as_secs_f64().max(0.001);
            #[allow(clippy::cast_precision_loss, reason = "a rate")]
            let (rate, limit) = (sample.wal_bytes.saturating_sub(bytes) as f64 / elapsed, limit as f64);
            if limit < rate {
                reasons.push(reason::WAL);
            }
        }
        if self.limits.replication_lag_bytes.is_some_and(|limit| limit < sample.replication_lag_bytes) {
            reasons.push(reason::REPLICATION);
        }
        if sample.live_rows.max(DEAD_ROWS_MIN) < sample.dead_rows {
            reasons.push(reason::DEAD_ROWS);
        }
        if self.is_horizon_held() {
            reasons.push(reason::HORIZON);
        }
        Pressure { is_shared: sample.is_shared, reasons }
    }

    fn is_commit_slow(&mut self, commit: Duration) -> bool {
        let average = self
            .commit_average
            .map_or(commit, |average| average.mul_f64(1.0 - COMMIT_WEIGHT) + commit.mul_f64(COMMIT_WEIGHT));
        let best = self.commit_best.map_or(commit, |best| best.mul_f64(BEST_DRIFT).min(commit));
        self.commit_average = Some(average);
        self.commit_best = Some(best);
        gauge!("ebbtide_retention_commit_seconds").set(average.as_secs_f64());
        best.mul_f64(COMMIT_FACTOR).max(best + COMMIT_EXCESS) < average
    }

    fn tell_holder(&mut self) {
        let Some(holder) = &self.holder else { return };
        if let Some(suppressed) = self.holder_line.admit() {
            let Holder { kind, who, held, transactions } = holder;
            let held_seconds = held.map(|held| held.as_secs());
            warn!(target: "retention", kind, who, held_seconds, transactions, suppressed,
                "an old snapshot keeps deleted rows on disk; deletion slows down until it ends");
        }
    }
}

fn is_old(holder: &Holder, snapshot_age: Duration) -> bool {
    match holder.held {
        Some(held) => snapshot_age <= held,
        None => SNAPSHOT_TRANSACTIONS <= holder.transactions,
    }
}

/// Counts how long each reason held steps back.
pub(super) fn count_held_back(throttle: &Throttle) -> ebbtide_sweep::HeldBack {
    let held_back = throttle.held_back();
    for (reason, held) in &held_back {
        counter!("ebbtide_retention_held_back_milliseconds_total", "reason" => *reason)
            .increment(u64::try_from(held.as_millis()).unwrap_or(u64::MAX));
    }
    held_back
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::TlsSettings;

    #[tokio::test(start_paused = true)]
    async fn alone_it_may_write_as_much_as_it_can() {
        let target = Target { config: tokio_postgres::Config::new(), tls: TlsSettings::unused() };
        let limits = Limits { wal_bytes_per_second: Some(100), ..Limits::default() };
        let mut watch = Watch::new(target, limits);
        let mut reasons_at = async |wal_bytes, is_shared| {
            tokio::time::advance(Duration::from_secs(1)).await;
            let sample = Sample { wal_bytes, is_shared, replication_lag_bytes: 0, dead_rows: 0, live_rows: 0 };
            watch.judge(sample, Duration::from_millis(1)).reasons
        };
        assert_eq!(reasons_at(1000, true).await, [""; 0], "one look is no rate");
        assert_eq!(reasons_at(1100, true).await, [""; 0], "as much as is allowed");
        assert_eq!(reasons_at(1201, true).await, [reason::WAL]);
        assert_eq!(reasons_at(9000, false).await, [""; 0], "nobody suffers");
    }
}
