//! The cases in their order, each beside its control, and what is expected of them.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tokio_postgres::Client;

use super::client::{Connection, request};
use super::load::{Load, Measured, Popping, push, through};
use super::report::{Case, Report};
use super::server::{Server, cpu_seconds};
use super::{Choice, Database, Options, control};
use crate::db::bench as db;

/// Blobs kept in memory for the control.
const BLOBS_MAX: i64 = 400;
/// More messages than any load can push in the longest run; bounds the memory of the accounting.
const MESSAGES_MAX: u64 = 400_000_000;
/// Pops after which preparing a queue is given up.
const SKIPS_MAX: usize = 1000;
/// How long filling the index may take.
const FILL_LENGTH_MAX: Duration = Duration::from_secs(1800);
/// How long one session inserts alone, to learn what a commit takes when nothing else goes on.
const ALONE_LENGTH: Duration = Duration::from_secs(3);
const MEMORY_REACH_MIB: f64 = 160.0;
const BATCH_REACH: f64 = 150_000.0;
const THROUGH_REACH: f64 = 40_000.0;

struct Run<'a> {
    options: &'a Options,
    database: &'a Database,
    server: Server,
    /// For looking and cleaning; never used while a measurement runs.
    client: Client,
    memory_max_mib: f64,
    loads: u64,
}

pub(super) async fn run(options: &Options, database: &Database, server: Server) -> anyhow::Result<Report> {
    let client = database.target.connect("ebbtide-bench").await?;
    let mut report = Report::default();
    describe(options, &client, &mut report).await?;
    db::create(&client).await?;
    let mut run = Run { options, database, server, client, memory_max_mib: 0.0, loads: 0 };
    let outcome = run.all(&mut report).await;
    let cleaned = db::remove(&run.client).await;
    let stopped = run.server.stop().await;
    outcome?;
    cleaned?;
    stopped?;
    Ok(report)
}

async fn describe(options: &Options, client: &Client, report: &mut Report) -> anyhow::Result<()> {
    report.program(db::server_version(client).await?);
    report.setting("batch", options.batch);
    report.setting("partitions", options.partitions);
    report.setting("payload_bytes", options.payload_bytes);
    report.setting("producers", options.producers);
    report.setting("single_producers", options.single_producers);
    report.setting("consumers", options.consumers);
    report.setting("seconds", options.seconds);
    report.setting("runs", options.runs);
    Ok(())
}

impl Run<'_> {
    async fn all(&mut self, report: &mut Report) -> anyhow::Result<()> {
        let wanted = |choice| self.options.cases.contains(&choice);
        let (batch, single) = (wanted(Choice::Batch), wanted(Choice::Single));
        let (through, cold, full) = (wanted(Choice::Through), wanted(Choice::Cold), wanted(Choice::Full));
        if batch {
            let case = self.batch_case().await?;
            self.end(case, report);
        }
        if single {
            let case = self.single_case().await?;
            self.end(case, report);
        }
        if through {
            let case = self.through_case().await?;
            self.end(case, report);
        }
        if full {
            let case = self.full_case().await?;
            self.end(case, report);
        }
        if cold && self.server.is_ours() {
            let case = self.cold_case().await?;
            self.end(case, report);
        } else if cold {
            report.note("a cold index was not measured: that needs a server that this program may restart".to_owned());
        }
        self.memory(report);
        Ok(())
    }

    fn memory(&mut self, report: &mut Report) {
        self.note_memory();
        if !self.server.is_ours() {
            report.note("memory was not measured: the server is not this program's child".to_owned());
            return;
        }
        let mut case = Case::new("Server memory");
        case.record("most resident memory, over all cases", "MiB", self.memory_max_mib);
        let met = self.memory_max_mib < MEMORY_REACH_MIB;
        case.reach(format!("resident memory under {MEMORY_REACH_MIB} MiB"), met);
        report.add(case);
    }

    fn note_memory(&mut self) {
        self.memory_max_mib = self.server.memory_max_mib().unwrap_or(0.0).max(self.memory_max_mib);
    }

    /// Adds a case, with the memory that the server has needed up to its end.
    fn end(&mut self, mut case: Case, report: &mut Report) {
        self.note_memory();
        if let Some(mib) = self.server.memory_max_mib() {
            case.record("most resident memory so far", "MiB", mib);
        }
        report.add(case);
    }

    fn length(&self) -> Duration {
        Duration::from_secs(u64::from(self.options.seconds))
    }

    fn load(&mut self, producers: u32, batch: u32) -> Load {
        self.loads += 1;
        Load {
            address: self.server.address,
            queue: format!("ebbtide-bench-{}", self.loads),
            partitions: self.options.partitions as usize,
            payload_bytes: self.options.payload_bytes as usize,
            batch: batch as usize,
            producers: producers as usize,
            length: self.length(),
            seed: super::body::mix(self.loads ^ u64::from(std::process::id()) << 32),
            messages_max: MESSAGES_MAX,
        }
    }

    /// Makes the queue and its partitions, so that no measurement pays for that.
    async fn prime(&self, load: &Load) -> anyhow::Result<()> {
        let mut connection = Connection::open(load.address).await?;
        let body = format!(r#"{{"queue":"{}"}}"#, load.queue);
        let reply = connection.send(&request("POST", "/api/v1/configure", body.as_bytes())).await?;
        ensure!(reply.status == 200, "configure answered {}: {}", reply.status, reply.excerpt());
        let items: Vec<String> = (0..load.partitions)
            .map(|index| {
                format!(r#"{{"queue":"{}","partition":"{}","payload":0}}"#, load.queue, super::body::lane(index))
            })
            .collect();
        let body = format!(r#"{{"items":[{}]}}"#, items.join(","));
        let reply = connection.send(&request("POST", "/api/v1/push", body.as_bytes())).await?;
        ensure!(reply.status == 201, "push answered {}: {}", reply.status, reply.excerpt());
        // What made the partitions is not part of the load; it must not be counted or consumed.
        let count = load.partitions;
        let path = format!("/api/v1/pop/queue/{}?batch={count}&partitions={count}&autoAck=true", load.queue);
        let skip = request("GET", &path, b"");
        let mut skipped = 0;
        // A pop leaves out partitions that something else holds at that moment.
        for _ in 0..SKIPS_MAX {
            let reply = connection.send(&skip).await?;
            ensure!(matches!(reply.status, 200 | 204), "pop answered {}: {}", reply.status, reply.excerpt());
            skipped += String::from_utf8_lossy(reply.body).matches(r#""transactionId":"#).count();
            if skipped == count {
                return Ok(());
            }
        }
        bail!("{skipped} of {count} partitions could be prepared")
    }

    async fn delete(&self, queue: &str) -> anyhow::Result<()> {
        let mut connection = Connection::open(self.server.address).await?;
        let reply = connection.send(&request("DELETE", &format!("/api/v1/resources/queues/{queue}"), b"")).await?;
        ensure!(reply.status == 200, "delete answered {}: {}", reply.status, reply.excerpt());
        Ok(())
    }

    /// Pushes, and records what it cost.
    async fn measured_push(&mut self, load: &Load, case: &mut Case) -> anyhow::Result<Measured> {
        let before = self.costs().await?;
        let measured = push(load).await?;
        let after = self.costs().await?;
        let messages = measured.messages as f64;
        case.record("pushed", "msg/s", measured.rate());
        case.record("request p50", "ms", measured.quantile_ms(0.5));
        case.record("request p99", "ms", measured.quantile_ms(0.99));
        case.record("messages a commit", "", messages / (after.commits - before.commits).max(1.0));
        case.record("log written", "B/msg", (after.log_bytes - before.log_bytes) / messages);
        after.record_since(&before, messages, case);
        let stored = db::messages_stored(&self.client, &load.queue).await?;
        let expected = measured.messages as i64 + load.partitions as i64;
        ensure!(stored == expected, "{stored} messages are stored, and {expected} were answered as queued");
        self.note_memory();
        Ok(measured)
    }

    async fn costs(&self) -> anyhow::Result<Costs> {
        let (commits, log_bytes) = db::work_done(&self.client).await?;
        Ok(Costs {
            commits: commits as f64,
            log_bytes: log_bytes as f64,
            server_cpu: self.server.cpu_seconds().unwrap_or(f64::NAN),
            database_cpu: self.database.cpu_seconds().unwrap_or(f64::NAN),
            own_cpu: cpu_seconds("self").context("this process's own processor time")?,
        })
    }

    /// Which of server and control goes first alternates, so that neither always meets the fresher disk.
    async fn batch_case(&mut self) -> anyhow::Result<Case> {
        let mut case = Case::new("Push in batches, against bare inserts of the same segments");
        for index in 0..self.options.runs {
            let load = self.load(self.options.producers, self.options.batch);
            self.prime(&load).await?;
            let blobs = Arc::new(self.sample_blobs(&load).await?);
            let mut bare = 0.0;
            if index % 2 == 1 {
                bare = self.bare_segments(&blobs, &mut case).await?;
            }
            db::settle(&self.client).await?;
            let pushed = self.measured_push(&load, &mut case).await?.rate();
            if index % 2 == 0 {
                bare = self.bare_segments(&blobs, &mut case).await?;
            }
            case.record("ratio to bare inserts, one a commit", "", pushed / bare);
            self.delete(&load.queue).await?;
        }
        let (pushed, bare) = (case.median("pushed"), case.median("bare inserts, one a commit"));
        let reach = BATCH_REACH.min(bare / 2.0);
        case.reach(
            format!("{reach:.0} msg/s: {BATCH_REACH}, or half of the bare rate if that is less"),
            reach <= pushed,
        );
        Ok(case)
    }

    /// Segments of one batch each, as the server stores them.
    async fn sample_blobs(&mut self, load: &Load) -> anyhow::Result<Vec<Vec<u8>>> {
        let one = Load { producers: 1, messages_max: BLOBS_MAX as u64 * load.batch as u64, ..self.load(1, 1) };
        let one = Load { batch: load.batch, ..one };
        self.prime(&one).await?;
        push(&one).await?;
        let blobs = db::blobs(&self.client, &one.queue, load.batch as i64, BLOBS_MAX).await?;
        self.delete(&one.queue).await?;
        Ok(blobs)
    }

    /// The rate with one segment a commit; the other one is recorded beside it.
    async fn bare_segments(&mut self, blobs: &Arc<Vec<Vec<u8>>>, case: &mut Case) -> anyhow::Result<f64> {
        let mut rates = Vec::new();
        let (sessions, batch) = (self.options.producers as usize, u64::from(self.options.batch));
        for (name, rows) in [("bare inserts, one a commit", 1), ("bare inserts, eight a commit", 8)] {
            db::settle(&self.client).await?;
            let target = &self.database.target;
            let bare = control::segments(target, sessions, rows, batch, blobs.clone(), self.length()).await?;
            case.record(name, "msg/s", bare.rate());
            rates.push(bare.rate());
        }
        Ok(rates[0])
    }

    async fn single_case(&mut self) -> anyhow::Result<Case> {
        let mut case = Case::new("Push of single messages, against one committed insert a message");
        for index in 0..self.options.runs {
            let load = self.load(self.options.single_producers, 1);
            self.prime(&load).await?;
            let mut bare = 0.0;
            if index % 2 == 1 {
                bare = self.bare_rows(&mut case).await?;
            }
            db::settle(&self.client).await?;
            let pushed = self.measured_push(&load, &mut case).await?.rate();
            if index % 2 == 0 {
                bare = self.bare_rows(&mut case).await?;
            }
            case.record("ratio to bare inserts, one a commit", "", pushed / bare);
            self.delete(&load.queue).await?;
        }
        let ratio = case.median("ratio to bare inserts, one a commit");
        case.reach("twice the bare rate".to_owned(), 2.0 <= ratio);
        case.reach("three times the bare rate".to_owned(), 3.0 <= ratio);
        Ok(case)
    }

    async fn bare_rows(&mut self, case: &mut Case) -> anyhow::Result<f64> {
        db::settle(&self.client).await?;
        let (sessions, bytes) = (self.options.single_producers as usize, self.options.payload_bytes as usize);
        let before = self.costs().await?;
        let bare = control::rows(&self.database.target, sessions, bytes, self.length()).await?;
        let database_cpu = self.costs().await?.database_cpu - before.database_cpu;
        case.record("bare insert PostgreSQL processor time", "us/msg", database_cpu * 1e6 / bare.messages as f64);
        case.record("bare inserts, one a commit", "msg/s", bare.rate());
        case.record("bare insert p50", "ms", bare.quantile_ms(0.5));
        case.record("bare insert p99", "ms", bare.quantile_ms(0.99));
        let alone = control::rows(&self.database.target, 1, bytes, ALONE_LENGTH).await?;
        case.record("bare insert p50 from one session alone", "ms", alone.quantile_ms(0.5));
        Ok(bare.rate())
    }

    async fn through_case(&mut self) -> anyhow::Result<Case> {
        let mut case = Case::new("Push, pop and ack at once, every message accounted for");
        let Options { consumers, pop_batch, pop_partitions, .. } = *self.options;
        let popping =
            Popping { consumers: consumers as usize, batch: pop_batch as usize, partitions: pop_partitions as usize };
        for _ in 0..self.options.runs {
            let load = self.load(self.options.through_producers, self.options.batch);
            self.prime(&load).await?;
            db::settle(&self.client).await?;
            let before = self.costs().await?;
            let outcome = through(&load, popping).await?;
            let after = self.costs().await?;
            let messages = outcome.pushed.messages as f64;
            case.record("through, until the last ack", "msg/s", outcome.rate);
            case.record("pushed", "msg/s", outcome.pushed.rate());
            case.record("push p99", "ms", outcome.pushed.quantile_ms(0.99));
            case.record("pop p50", "ms", outcome.pop_latency.value_at_quantile(0.5) as f64 / 1000.0);
            case.record("pop p99", "ms", outcome.pop_latency.value_at_quantile(0.99) as f64 / 1000.0);
            case.record("lost", "msg", outcome.lost as f64);
            case.record("delivered twice", "msg", outcome.twice as f64);
            after.record_since(&before, messages, &mut case);
            self.note_memory();
            self.delete(&load.queue).await?;
        }
        let (rate, lost) = (case.median("through, until the last ack"), case.median("lost"));
        case.reach(format!("{THROUGH_REACH} msg/s with nothing lost"), THROUGH_REACH <= rate && lost == 0.0);
        Ok(case)
    }

    async fn full_case(&mut self) -> anyhow::Result<Case> {
        let mut case = Case::new("Push in batches with a full index of transaction ids");
        let fill = self.load(self.options.producers, self.options.batch);
        self.prime(&fill).await?;
        let fill_max = u64::from(self.options.fill_messages);
        push(&Load { messages_max: fill_max, length: FILL_LENGTH_MAX, ..fill.clone() }).await?;
        // The partitions that filled it: not all of them are in the index any more.
        db::settle(&self.client).await?;
        let seed = super::body::mix(fill.seed);
        let same = push(&Load { batch: self.options.batch as usize, seed, ..fill }).await?;
        case.record("pushed to the partitions that filled it", "msg/s", same.rate());
        case.record("request p99 there", "ms", same.quantile_ms(0.99));
        self.note_memory();
        // New partitions, for which others are forgotten.
        let load = self.load(self.options.producers, self.options.batch);
        self.prime(&load).await?;
        db::settle(&self.client).await?;
        self.measured_push(&load, &mut case).await?;
        Ok(case)
    }

    async fn cold_case(&mut self) -> anyhow::Result<Case> {
        let mut case = Case::new("Push in batches with a cold index, on data that is there");
        let load = self.load(self.options.producers, self.options.batch);
        self.prime(&load).await?;
        push(&load).await?;
        self.note_memory();
        self.server.stop().await?;
        self.server = Server::start(&self.database.url, &[]).await?;
        db::settle(&self.client).await?;
        // The same partitions and other ids: what the index should know of them, it has to look up.
        let again = Load { address: self.server.address, seed: super::body::mix(load.seed), ..load };
        let measured = push(&again).await?;
        case.record("pushed", "msg/s", measured.rate());
        case.record("pushed in the first five seconds", "msg/s", measured.first_rate);
        case.record("request p99", "ms", measured.quantile_ms(0.99));
        self.note_memory();
        Ok(case)
    }
}

struct Costs {
    commits: f64,
    log_bytes: f64,
    server_cpu: f64,
    database_cpu: f64,
    own_cpu: f64,
}

impl Costs {
    fn record_since(&self, before: &Self, messages: f64, case: &mut Case) {
        let each = |seconds: f64| seconds * 1e6 / messages;
        case.record("server processor time", "us/msg", each(self.server_cpu - before.server_cpu));
        case.record("PostgreSQL processor time", "us/msg", each(self.database_cpu - before.database_cpu));
        case.record("load generator processor time", "us/msg", each(self.own_cpu - before.own_cpu));
    }
}
