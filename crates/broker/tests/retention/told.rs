//! What the background task says, and when it says nothing.

use std::time::Duration;

use ebbtide::db::Target;
use ebbtide::retention::{self, LOCK_ID, Settings};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::support::partition::Log;
use crate::support::trace::{Trace, capture};
use crate::support::{self, Broker, Database};

/// The task, cycling without a rest.
struct Sweeping {
    trace: Trace,
    cancel: CancellationToken,
    task: JoinHandle<()>,
}

impl Sweeping {
    fn start(target: &Target) -> Self {
        let trace = capture("retention");
        let cancel = CancellationToken::new();
        let settings = Settings {
            interval: Duration::from_millis(1),
            rows_max: 10,
            cleanup_days: Some(30),
            metrics_days: 90,
            lock_wait: Duration::from_secs(60),
            ..crate::support::unpaced()
        };
        let task = tokio::spawn(retention::run(target.clone(), settings, cancel.clone()));
        Self { trace, cancel, task }
    }

    async fn stop(self) -> Trace {
        self.cancel.cancel();
        self.task.await.expect("no panic");
        self.trace
    }
}

fn is_silent(trace: &Trace) {
    for level in ["WARN", "ERROR"] {
        assert_eq!(trace.lines(level, ""), [""; 0]);
    }
}

#[tokio::test]
async fn the_start_says_what_is_in_force() {
    let database = Database::create().await;
    let sweeping = Sweeping::start(&database.target);
    sweeping.trace.wait_for("INFO", "started", 1).await;
    let trace = sweeping.stop().await;
    let line = trace.lines("INFO", "started").remove(0);
    for field in ["interval_ms=1", "lock_id=737001", "batch_size=10", "metrics_days=90", "cleanup_days=30"] {
        assert!(line.contains(field), "{field} in {line}");
    }
}

#[tokio::test]
async fn idle_cycles_say_nothing_at_info() {
    let database = Database::create().await;
    let sweeping = Sweeping::start(&database.target);
    sweeping.trace.wait_for("DEBUG", "swept", 5).await;
    let trace = sweeping.stop().await;
    assert_eq!(trace.lines("INFO", "").len(), 1, "the start and nothing else");
    is_silent(&trace);
}

#[tokio::test]
async fn a_cycle_that_deleted_says_so_in_one_line() {
    let log = Log::start().await;
    log.execute(
        "insert into queen.queues (name, retention_enabled, retention_seconds) values ('a', true, 60), ('b', true, 60);
         insert into queen.log_partitions (queue_id, name, last_offset)
         select id, n::text, 0 from queen.queues, generate_series(1, 2) n;
         insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
         select id, 0, 0, now() - interval '1 day', 'x' from queen.log_partitions;
         insert into queen.log_txns (partition_id, base_offset, end_offset, created_at, hashes)
         select id, 0, 0, now() - interval '1 day', 'x' from queen.log_partitions where name = '1';
         insert into queen.queues (name, max_wait_time_seconds) values ('c', 60);
         insert into queen.log_partitions (queue_id, name, last_offset) select id, 'p', 0 from queen.queues where name = 'c';
         insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
         select id, 0, 0, now() - interval '1 day', 'x' from queen.log_partitions where name = 'p'",
    )
    .await;
    let sweeping = Sweeping::start(&log.database.target);
    sweeping.trace.wait_for("DEBUG", "swept", 3).await;
    let trace = sweeping.stop().await;
    let lines = trace.lines("INFO", "swept");
    assert_eq!(lines.len(), 1, "{lines:?}");
    for field in [
        "queues=2",
        "segments_deleted=4",
        "txns_purged=2",
        "max_wait_evicted=1",
        "partitions_deleted=0",
        "metrics_purge=",
        "elapsed_ms=",
    ] {
        assert!(lines[0].contains(field), "{field} in {}", lines[0]);
    }
    is_silent(&trace);
}

#[tokio::test]
async fn the_metrics_page_tells_of_cycles() {
    let broker = Broker::start().await;
    broker
        .sql
        .batch_execute(
            "insert into queen.queues (name, max_wait_time_seconds) values ('q', 60);
             insert into queen.log_partitions (queue_id, name, last_offset) select id, 'p', 2 from queen.queues;
             insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
             select id, n, n, now() - interval '1 day', 'x' from queen.log_partitions, generate_series(0, 2) n;
             insert into queen.log_consumers (partition_id, consumer_group, committed)
             select id, 'g', 0 from queen.log_partitions",
        )
        .await
        .expect("three old segments, one of them read");
    let sweeping = Sweeping::start(&broker.database.target);
    sweeping.trace.wait_for("DEBUG", "swept", 2).await;
    sweeping.stop().await;
    let (_, page) = broker.get("/metrics/prometheus").await;
    let page = page.as_str().expect("text").to_owned();
    let value = |start: &str| {
        let line = page.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{start} in {page}"));
        line.rsplit(' ').next().expect("a value").parse::<f64>().expect("a number")
    };
    assert_eq!(value("ebbtide_retention_deleted_rows_total{phase=\"eviction\"}"), 3.0);
    assert_eq!(value("ebbtide_retention_skipped_offsets_total{phase=\"eviction\"}"), 2.0);
    assert!(value("ebbtide_retention_cycles_total{outcome=\"succeeded\"}") >= 2.0);
    assert!(value("ebbtide_retention_cycle_seconds_count") >= 2.0);
    let query = "select extract(epoch from now())::float8";
    let now: f64 = broker.row(query, &[]).await.get(0);
    let age = now - value("ebbtide_retention_last_success_timestamp_seconds");
    assert!((0.0..600.0).contains(&age), "by the database's clock: {age}");
}

#[tokio::test]
async fn skipped_cycles_say_nothing_above_debug() {
    let log = Log::start().await;
    log.sql.execute("select pg_advisory_lock($1)", &[&LOCK_ID]).await.expect("lock");
    let sweeping = Sweeping::start(&log.database.target);
    sweeping.trace.wait_for("DEBUG", "skipped", 5).await;
    let trace = sweeping.stop().await;
    assert_eq!(trace.lines("INFO", "").len(), 1, "the start and nothing else");
    is_silent(&trace);
}

/// The database refuses every connection: it is counted, not timed.
#[tokio::test]
async fn an_outage_is_one_line() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let mut target = support::dead_target();
    target.config.port(listener.local_addr().expect("bound").port());
    let sweeping = Sweeping::start(&target);
    for _ in 0..20 {
        drop(listener.accept().await.expect("a client"));
    }
    let trace = sweeping.stop().await;
    assert_eq!(trace.lines("ERROR", "cycle failed").len(), 1);
    assert_eq!(trace.lines("ERROR", "").len(), 1);
    assert!(trace.lines("ERROR", "suppressed=0").len() == 1);
    assert_eq!(trace.lines("INFO", "").len(), 1, "the start and nothing else");
}

#[tokio::test]
async fn a_metrics_purge_that_keeps_failing_is_one_line_and_no_failed_cycle() {
    let log = Log::start().await;
    log.execute("drop table queen.system_metrics").await;
    let sweeping = Sweeping::start(&log.database.target);
    sweeping.trace.wait_for("DEBUG", "swept", 5).await;
    let trace = sweeping.stop().await;
    assert_eq!(trace.lines("ERROR", "metrics purge failed").len(), 1);
    assert_eq!(trace.lines("ERROR", "").len(), 1, "the cycles themselves succeeded");
}

#[tokio::test]
async fn cleanup_runs_at_once_and_then_not_again_for_a_minute() {
    let log = Log::start().await;
    log.partition().await;
    let sweeping = Sweeping::start(&log.database.target);
    sweeping.trace.wait_for("INFO", "partitions_deleted=1", 1).await;
    log.partition().await;
    let seen = sweeping.trace.lines("DEBUG", "swept").len();
    sweeping.trace.wait_for("DEBUG", "swept", seen + 5).await;
    assert_eq!(log.partitions().await, ["p"], "five cycles later it is not due");
    sweeping.stop().await;
}
