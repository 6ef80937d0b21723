//! Pushes at a fixed rate, whatever the answers take: a request that had to wait for its turn is timed from when it was due.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ebbtide_sweep::pause;
use hdrhistogram::Histogram;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::body::{PushRequest, mix};
use super::client::Connection;
use super::load::latency;

/// Connections that take turns; more requests than these are never under way.
const CONNECTIONS: u64 = 48;

/// Runs so far, so that each pushes transaction ids of its own: one that was seen before would be a duplicate.
static RUNS: AtomicU64 = AtomicU64::new(0);

/// A steady stream of pushes.
#[derive(Clone)]
pub(super) struct OpenLoop {
    pub(super) address: SocketAddr,
    pub(super) queue: String,
    pub(super) partitions: usize,
    /// Messages a push.
    pub(super) batch: usize,
    pub(super) payload_bytes: usize,
    pub(super) per_second: f64,
    pub(super) seed: u64,
}

/// What became of it: requests, and how late each answer came, in microseconds from when it was due.
pub(super) struct Answered {
    pub(super) requests: u64,
    pub(super) late: Histogram<u64>,
}

impl Answered {
    pub(super) fn quantile_ms(&self, quantile: f64) -> f64 {
        self.late.value_at_quantile(quantile) as f64 / 1000.0
    }

    pub(super) fn max_ms(&self) -> f64 {
        self.late.max() as f64 / 1000.0
    }
}

impl OpenLoop {
    /// Pushes for `length`, or until `enough` is set.
    pub(super) async fn run(&self, length: Duration, enough: &Arc<AtomicBool>) -> anyhow::Result<Answered> {
        let turns = Arc::new(AtomicU64::new(0));
        let mut connections = Vec::new();
        for _ in 0..CONNECTIONS {
            connections.push(Connection::open(self.address).await?);
        }
        let load = Self { seed: mix(self.seed ^ mix(RUNS.fetch_add(1, Ordering::Relaxed))), ..self.clone() };
        let started = Instant::now();
        let mut workers = JoinSet::new();
        for (index, connection) in connections.into_iter().enumerate() {
            workers.spawn(load.clone().work(index, connection, turns.clone(), started, length, enough.clone()));
        }
        let mut answered = Answered { requests: 0, late: latency() };
        while let Some(late) = workers.join_next().await {
            let late = late.context("a producer panicked")??;
            answered.requests += late.len();
            answered.late.add(&late)?;
        }
        Ok(answered)
    }

    async fn work(
        self, index: usize, mut connection: Connection, turns: Arc<AtomicU64>, started: Instant, length: Duration,
        enough: Arc<AtomicBool>,
    ) -> anyhow::Result<Histogram<u64>> {
        let never = CancellationToken::new();
        let mut late = latency();
        let mut request = PushRequest::new(&self.queue, self.batch, self.payload_bytes, self.seed, mix(index as u64));
        loop {
            let turn = turns.fetch_add(1, Ordering::Relaxed);
            let due = Duration::from_secs_f64(turn as f64 / self.per_second);
            if length <= due || enough.load(Ordering::Relaxed) {
                return Ok(late);
            }
            pause(due.saturating_sub(started.elapsed()), &never).await;
            let partition = mix(turn ^ self.seed) as usize % self.partitions;
            let reply = connection.send(request.patched(turn * self.batch as u64, partition)).await?;
            late.saturating_record(started.elapsed().saturating_sub(due).as_micros() as u64);
            ensure!(reply.status == 201, "push answered {}: {}", reply.status, reply.excerpt());
        }
    }
}
