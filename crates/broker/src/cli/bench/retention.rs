//! `ebbtide bench retention`: what deletion costs, and what it costs everybody else.

mod beside;
mod drain;
mod plan;

use std::time::Duration;

use anyhow::ensure;
use clap::{Args, ValueEnum};
use tokio_postgres::Client;

use super::load::{Load, push};
use super::report::{Case, Report};
use super::server::Server;
use super::{Database, Place};
use crate::db::bench::{self, retention as db};

/// Messages of one segment.
const SEGMENT_MESSAGES: usize = 100;
/// Blobs that the data is made of.
const BLOBS: i64 = 200;
/// The server looks for what is due more often than by default, so that no case waits for it.
const SERVER_SETTINGS: &[(&str, &str)] = &[("RETENTION_INTERVAL", "500")];
const MEMORY_REACH_MIB: f64 = 128.0;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Choice {
    /// What an idle cycle and a short list of due partitions cost among many.
    Plan,
    /// What keeping the stamps costs a push.
    Stamps,
    /// How fast data goes when nobody else is there, and what log it writes.
    Drain,
    /// The first and the last step through one long partition.
    Steps,
    /// Pushes at a steady rate while data goes.
    Beside,
    /// The same with one hot partition, and beside everything at once.
    Hot,
    /// Pushing and deleting many times the live window.
    Churn,
    /// Pushes beside a snapshot that is never let go.
    Snapshot,
}

#[derive(Args, Clone)]
pub(super) struct Options {
    /// What to measure.
    #[arg(long, value_enum, value_delimiter = ',',
        default_values = ["plan", "stamps", "drain", "steps", "beside", "hot", "churn", "snapshot"])]
    cases: Vec<Choice>,
    /// Messages that go, in the cases that delete.
    #[arg(long, default_value_t = 10_000_000, value_parser = clap::value_parser!(i64).range(100_000..=100_000_000))]
    messages: i64,
    /// Partitions of the case `plan`.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(i64).range(1000..=10_000_000))]
    many: i64,
    /// Stale segments of the case `steps`.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(i64).range(10_000..=10_000_000))]
    long_segments: i64,
    /// Pushes a second, of one batch each, in the cases with a steady rate.
    #[arg(long, default_value_t = 400, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pushes: u32,
    /// Messages of such a push.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    push_messages: u32,
    /// Partitions that they go to.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    partitions: u32,
    /// Size of one JSON payload.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(160..=100_000))]
    payload_bytes: u32,
    /// Length of a measurement that does not end by itself.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=20))]
    runs: u32,
    #[command(flatten)]
    pub(super) place: Place,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(super) json: bool,
}

struct Run<'a> {
    options: &'a Options,
    database: &'a Database,
    server: Server,
    client: Client,
    /// What segments of real payloads look like.
    blobs: Vec<Vec<u8>>,
    made: u64,
}

pub(super) async fn measure_in(options: &Options, database: &Database) -> anyhow::Result<Report> {
    let server = Server::start(&database.url, SERVER_SETTINGS).await?;
    let client = database.target.connect("ebbtide-bench").await?;
    let mut report = Report::default();
    describe(options, &client, &mut report).await?;
    let mut run = Run { options, database, server, client, blobs: Vec::new(), made: 0 };
    let outcome = run.all(&mut report).await;
    let cleaned = db::remove(&run.client).await;
    let stopped = run.server.stop().await;
    outcome?;
    cleaned?;
    stopped?;
    Ok(report)
}

async fn describe(options: &Options, client: &Client, report: &mut Report) -> anyhow::Result<()> {
    report.program(bench::server_version(client).await?);
    report.setting("messages", options.messages);
    report.setting("many", options.many);
    report.setting("pushes", options.pushes);
    report.setting("push_messages", options.push_messages);
    report.setting("partitions", options.partitions);
    report.setting("payload_bytes", options.payload_bytes);
    report.setting("seconds", options.seconds);
    report.setting("runs", options.runs);
    Ok(())
}

impl Run<'_> {
    async fn all(&mut self, report: &mut Report) -> anyhow::Result<()> {
        self.blobs = self.sample_blobs().await?;
        let bytes: usize = self.blobs.iter().map(Vec::len).sum();
        report.setting("segment_bytes", bytes / self.blobs.len().max(1));
        for choice in self.options.cases.clone() {
            let mut case = match choice {
                Choice::Plan => self.plan_case().await?,
                Choice::Stamps => self.stamps_case().await?,
                Choice::Drain => self.drain_case().await?,
                Choice::Steps => self.steps_case().await?,
                Choice::Beside => self.beside_case().await?,
                Choice::Hot => self.hot_case().await?,
                Choice::Churn => self.churn_case().await?,
                Choice::Snapshot => self.snapshot_case().await?,
            };
            if let Some(mib) = self.server.memory_max_mib() {
                case.record("most resident memory of the server so far", "MiB", mib);
            }
            report.add(case);
        }
        if let Some(mib) = self.server.memory_max_mib() {
            let mut case = Case::new("Server memory");
            case.record("most resident memory, over all cases", "MiB", mib);
            case.reach(format!("resident memory under {MEMORY_REACH_MIB} MiB"), mib < MEMORY_REACH_MIB);
            report.add(case);
        }
        Ok(())
    }

    fn length(&self) -> Duration {
        Duration::from_secs(u64::from(self.options.seconds))
    }

    fn next_name(&mut self) -> String {
        self.made += 1;
        format!("ebbtide-bench-{}", self.made)
    }

    /// Segments as the server stores them.
    async fn sample_blobs(&mut self) -> anyhow::Result<Vec<Vec<u8>>> {
        let queue = self.next_name();
        db::make_queue(&self.client, &queue, 1).await?;
        let load = Load {
            address: self.server.address,
            queue: queue.clone(),
            partitions: 1,
            payload_bytes: self.options.payload_bytes as usize,
            batch: SEGMENT_MESSAGES,
            producers: 1,
            length: Duration::from_secs(60),
            seed: super::body::mix(u64::from(std::process::id())),
            messages_max: BLOBS.unsigned_abs() * SEGMENT_MESSAGES as u64,
        };
        push(&load).await?;
        let blobs = bench::blobs(&self.client, &queue, SEGMENT_MESSAGES as i64, BLOBS).await?;
        ensure!(!blobs.is_empty(), "no segment of {SEGMENT_MESSAGES} messages was stored");
        db::delete_queue(&self.client, &queue).await?;
        Ok(blobs)
    }

    /// A queue with old data in it, and what has to be written of it written.
    async fn old_queue(&mut self, partitions: i64, messages: i64) -> anyhow::Result<(String, uuid::Uuid)> {
        let name = self.next_name();
        let id = db::make_queue(&self.client, &name, partitions).await?;
        let segments = (messages / SEGMENT_MESSAGES as i64 / partitions).max(1);
        db::build_log(&self.client, id, segments, SEGMENT_MESSAGES as i64, &self.blobs).await?;
        db::checkpoint(&self.client).await?;
        Ok((name, id))
    }

    fn database_cpu(&self) -> f64 {
        self.database.cpu_seconds().unwrap_or(f64::NAN)
    }
}
