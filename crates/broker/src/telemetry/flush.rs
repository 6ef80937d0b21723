//! The periodic flush: one row for the server, then its queues, then births and deaths of partitions.

use std::sync::Arc;
use std::time::Duration;

use ebbtide_sweep::{LineLimit, pause};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::Telemetry;
use super::process::Samples;
use crate::db::metrics::{
    ServerMetrics, flush_parked_v1, flush_queue_metrics_v1, flush_server_metrics_v1, fold_partition_events_v1,
};
use crate::db::{Conn, Db};
use crate::error::Error;
use crate::id::DEFAULT_TENANT;

/// Queues that are counted on their own between two flushes, and as many partitions; what is done to
/// others counts for the server only.
pub const QUEUES_MAX: usize = 10_000;
/// Queues of one statement.
const QUEUES_PER_CALL: usize = 500;
const EVENTS_PER_CALL: i32 = 1000;
/// Bounds the time of one flush; what is left is folded by the next, here or on another server.
const FOLDS_MAX: usize = 1000;
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
const ERROR_GAP: Duration = Duration::from_secs(60);
/// How long the last flush may hold up the end of the server.
const LAST_FLUSH: Duration = Duration::from_secs(2);

/// Which server a row is about.
#[derive(Clone, Debug)]
pub struct Identity {
    pub hostname: String,
    pub port: u16,
}

impl Identity {
    /// This machine's.
    pub fn new(port: u16) -> Self {
        let hostname = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let hostname = hostname.trim();
        Self { hostname: if hostname.is_empty() { "localhost" } else { hostname }.to_owned(), port }
    }
}

/// Takes samples and writes them with the counts.
pub struct Flusher {
    telemetry: Arc<Telemetry>,
    db: Db,
    identity: Identity,
    samples: Samples,
    parked: Parked,
}

/// Tells by queue how many pops wait; at most as many queues as it is asked for.
type Parked = Box<dyn Fn(usize) -> Vec<(String, usize)> + Send + Sync>;

impl Flusher {
    pub fn new(telemetry: Arc<Telemetry>, db: Db, identity: Identity) -> Self {
        Self { telemetry, db, identity, samples: Samples::default(), parked: Box::new(|_| Vec::new()) }
    }

    /// Also notes how many pops wait, as `parked` tells.
    #[must_use]
    pub fn with_parked(self, parked: impl Fn(usize) -> Vec<(String, usize)> + Send + Sync + 'static) -> Self {
        Self { parked: Box::new(parked), ..self }
    }

    /// Flushes at once, then every `interval`, and once more when `cancel` is cancelled.
    pub async fn run(mut self, interval: Duration, cancel: CancellationToken) {
        let mut errors = LineLimit::new(ERROR_GAP);
        let mut due = Instant::now();
        let mut is_running = true;
        while is_running {
            if due <= Instant::now() {
                due = Instant::now() + interval;
                if let Err(error) = self.flush().await
                    && let Some(suppressed) = errors.admit()
                {
                    warn!(target: "telemetry", %error, suppressed, "metrics not flushed; kept for the next flush");
                }
            }
            let rest = SAMPLE_INTERVAL.min(due.saturating_duration_since(Instant::now()));
            let paused = Instant::now();
            is_running = pause(rest, &cancel).await;
            if is_running {
                self.samples.take(&self.db.status(), paused.elapsed().saturating_sub(rest));
            }
        }
        match timeout(LAST_FLUSH, self.flush()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(target: "telemetry", %error, "the last metrics were not flushed"),
            Err(_) => {
                warn!(target: "telemetry", seconds = LAST_FLUSH.as_secs(), "the last metrics were not flushed in time")
            }
        }
    }

    /// Writes what was counted since the last flush. What could not be written is kept.
    ///
    /// # Errors
    /// The first failure; later parts are left for the next flush.
    pub async fn flush(&mut self) -> Result<(), Error> {
        let conn = self.db.conn().await?;
        if self.samples.count == 0 {
            self.samples.take(&self.db.status(), Duration::ZERO);
        }
        self.flush_server(&conn).await?;
        self.flush_queues(&conn).await?;
        self.flush_parked(&conn).await?;
        for _ in 0..FOLDS_MAX {
            if fold_partition_events_v1(&conn, EVENTS_PER_CALL).await?.done {
                break;
            }
        }
        Ok(())
    }

    async fn flush_server(&mut self, conn: &Conn) -> Result<(), Error> {
        let worker = std::mem::take(&mut self.telemetry.counts().worker);
        let metrics = ServerMetrics {
            hostname: &self.identity.hostname,
            port: i32::from(self.identity.port),
            worker_id: 0,
            pid: i32::try_from(std::process::id()).unwrap_or(i32::MAX),
            counts: &with_gauges(worker.columns(), &self.samples),
            sample_count: i32::try_from(self.samples.count).unwrap_or(i32::MAX),
            system: &self.samples.json(),
        };
        match flush_server_metrics_v1(conn, &metrics).await {
            Ok(at) => {
                self.telemetry.heard(at);
                self.samples = Samples::default();
                Ok(())
            }
            Err(error) => {
                self.telemetry.counts().worker.absorb(worker);
                Err(error)
            }
        }
    }

    /// Servers on one machine are told apart by their ports.
    async fn flush_parked(&self, conn: &Conn) -> Result<(), Error> {
        let parked = (self.parked)(QUEUES_MAX);
        let Identity { hostname, port } = &self.identity;
        for some in parked.chunks(QUEUES_PER_CALL) {
            let rows: Vec<Value> =
                some.iter().map(|(queue, parked)| json!({"queue": queue, "parked": parked})).collect();
            flush_parked_v1(conn, hostname, i32::from(*port), &rows, DEFAULT_TENANT).await?;
        }
        Ok(())
    }

    /// Bounded by what there can be: queues counted meanwhile wait for the next flush.
    async fn flush_queues(&self, conn: &Conn) -> Result<(), Error> {
        for _ in 0..(2 * QUEUES_MAX).div_ceil(QUEUES_PER_CALL) {
            let (taken, elements) = self.telemetry.counts().take_queues(QUEUES_PER_CALL);
            if elements.is_empty() {
                break;
            }
            if let Err(error) = flush_queue_metrics_v1(conn, &elements, DEFAULT_TENANT).await {
                self.telemetry.counts().absorb(taken);
                return Err(error);
            }
        }
        Ok(())
    }
}

fn with_gauges(mut columns: Value, samples: &Samples) -> Value {
    for (name, value) in [
        ("avg_event_loop_lag_ms", samples.timer_lag_ms.avg()),
        ("max_event_loop_lag_ms", samples.timer_lag_ms.max),
        ("avg_free_slots", samples.pool_idle.avg()),
        ("min_free_slots", samples.pool_idle.min),
        ("db_connections", samples.pool_size.max),
        ("avg_job_queue_size", samples.pool_waiting.avg()),
        ("max_job_queue_size", samples.pool_waiting.max),
    ] {
        // These columns are 32 bits wide.
        columns[name] = value.min(i32::MAX as u64).into();
    }
    columns
}
