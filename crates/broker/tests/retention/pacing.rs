//! Steps that share the database: what slows them down, what says so, and the space that they leave.

use std::time::Duration;

use ebbtide::db::space;
use ebbtide::retention::pacing::{Limits, reason};
use ebbtide::retention::{self, Settings, Swept};
use ebbtide_sweep::Led;
use tokio::task::JoinHandle;
use tokio_postgres::NoTls;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::cycle::settings;
use crate::support::partition::Log;
use crate::support::trace::{Trace, capture};
use crate::support::{Database, wait_until};

fn quietly() -> Limits {
    Limits { wal_bytes_per_second: None, replication_lag_bytes: None, snapshot_age: Duration::MAX }
}

/// Old segments in one partition.
async fn stale(log: &Log, segments: i64) -> Uuid {
    log.execute(&format!(
        "insert into queen.queues (name, retention_enabled, retention_seconds) values ('q', true, 100);
         insert into queen.log_partitions (queue_id, name, last_offset) select id, 'p', {segments} - 1 from queen.queues;
         insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
         select id, n, n, now() - interval '1 day', 'x' from queen.log_partitions, generate_series(0, {segments} - 1) n"
    ))
    .await;
    log.sql.query_one("select id from queen.log_partitions", &[]).await.expect("partition").get(0)
}

fn sweep(database: &Database, settings: Settings) -> JoinHandle<Swept> {
    let target = database.target.clone();
    tokio::spawn(async move {
        match retention::once(target, &settings, &CancellationToken::new()).await {
            Ok(Led::Ran(swept)) => swept,
            other => panic!("{other:?}"),
        }
    })
}

/// Runs a cycle whose step waits for a lock until `trace` has the line, and returns what it did.
async fn swept_while(log: &Log, settings: Settings, trace: &Trace, level: &str, line: &str) -> Swept {
    let id = stale(log, 3).await;
    let holder = log.database.client().await;
    holder.batch_execute("begin").await.expect("begins");
    holder.execute("select from queen.log_partitions where id = $1 for update", &[&id]).await.expect("held");
    let sweeping = sweep(&log.database, settings);
    trace.wait_for(level, line, 1).await;
    holder.batch_execute("rollback").await.expect("let go");
    sweeping.await.expect("no panic")
}

#[tokio::test]
async fn what_slows_a_cycle_down_is_said_and_reported() {
    let log = Log::start().await;
    let trace = capture("retention");
    let neighbour = log.database.target.connect("a neighbour").await.expect("connects");
    let end = neighbour.cancel_token();
    let at_work = tokio::spawn(async move { neighbour.batch_execute("select pg_sleep(300)").await });
    // Any log at all is too much, and the watch writes some itself.
    let limits = Limits { wal_bytes_per_second: Some(1), ..quietly() };
    let swept = swept_while(&log, Settings { limits, ..settings() }, &trace, "INFO", "slowed down").await;
    end.cancel_query(NoTls).await.expect("asked to end");
    assert!(at_work.await.expect("no panic").is_err(), "it worked all the time");
    assert_eq!(swept.report.deleted(retention::phase::RETENTION), 3, "slow and not stopped");
    let reasons: Vec<_> = swept.held_back.iter().map(|(reason, _)| *reason).collect();
    assert!(reasons.contains(&reason::WAL), "{reasons:?}");
    assert!(trace.lines("INFO", "slowed down")[0].contains(reason::WAL));
}

#[tokio::test]
async fn the_disk_is_spared_beside_others_alone() {
    for (shared_duty, expected) in [(0.5, "1MB"), (1.0, "0")] {
        let log = Log::start().await;
        stale(&log, 3).await;
        log.execute(
            "create table seen (value text);
             create function see() returns trigger language plpgsql as
                $$ begin insert into seen values (current_setting('backend_flush_after')); return null; end $$;
             create trigger see after delete on queen.log_segments execute function see()",
        )
        .await;
        let settings = Settings { shared_duty, limits: quietly(), ..settings() };
        let swept = sweep(&log.database, settings).await.expect("no panic");
        assert_eq!(swept.report.deleted(retention::phase::RETENTION), 3);
        let seen: String = log.sql.query_one("select distinct value from seen", &[]).await.expect("one").get(0);
        assert_eq!(seen, expected, "with {shared_duty} of the time beside others");
    }
}

#[tokio::test]
async fn an_old_snapshot_is_named() {
    let log = Log::start().await;
    let reader = log.database.target.connect("nightly report").await.expect("connects");
    reader.batch_execute("begin isolation level repeatable read; select 1 from queen.queues").await.expect("reads");
    let trace = capture("retention");
    let limits = Limits { snapshot_age: Duration::ZERO, ..quietly() };
    let swept = swept_while(&log, Settings { limits, ..settings() }, &trace, "WARN", "old snapshot").await;
    assert_eq!(swept.report.deleted(retention::phase::RETENTION), 3);
    assert!(swept.held_back.iter().any(|(reason, _)| *reason == reason::HORIZON), "{:?}", swept.held_back);
    let line = trace.lines("WARN", "old snapshot").remove(0);
    assert!(line.contains("session") && line.contains("nightly report"), "{line}");
}

#[tokio::test]
async fn a_prepared_transaction_and_a_session_are_found_as_holders() {
    let log = Log::start().await;
    let reader = log.database.target.connect("a reader").await.expect("connects");
    reader.batch_execute("begin isolation level repeatable read; select 1 from queen.queues").await.expect("reads");
    let holders = space::holders(&log.sql, &[], 10).await.expect("asks");
    let found = holders.iter().find(|holder| holder.who.contains("a reader")).expect("found");
    assert_eq!(found.kind, "session");
    assert!(found.held.is_some());
    let pid: i32 = reader.query_one("select pg_backend_pid()", &[]).await.expect("asks").get(0);
    let others = space::holders(&log.sql, &[pid], 10).await.expect("asks");
    assert!(others.iter().all(|holder| !holder.who.contains("a reader")), "own sessions are left out");
    reader.batch_execute("rollback").await.expect("ends");
    let none = space::holders(&log.sql, &[], 10).await.expect("asks");
    assert!(none.iter().all(|holder| !holder.who.contains("a reader")));
}

#[tokio::test]
async fn somebody_elses_work_is_seen_and_ones_own_is_not() {
    let log = Log::start().await;
    let other = log.database.client().await;
    other.batch_execute("select 1").await.expect("works");
    assert!(space::sample(&log.sql, &[]).await.expect("samples").is_shared);
    let pid: i32 = other.query_one("select pg_backend_pid()", &[]).await.expect("asks").get(0);
    assert!(!space::sample(&log.sql, &[pid]).await.expect("samples").is_shared);
}

#[tokio::test]
async fn the_leader_vacuums_what_it_emptied_and_cuts_no_file_short() {
    let log = Log::start().await;
    stale(&log, 5000).await;
    let size = "select pg_relation_size('queen.log_segments')";
    let before = log.count(size).await;
    let vacuums = "select pg_stat_get_vacuum_count('queen.log_segments'::regclass)";
    let settings = Settings { rows_max: 1000, vacuum: true, ..settings() };
    let swept = sweep(&log.database, settings).await.expect("no panic");
    assert_eq!(swept.report.deleted(retention::phase::RETENTION), 5000);
    wait_until(&log.sql, "the vacuum is counted", &format!("select ({vacuums}) = 1"), &[]).await;
    assert_eq!(log.count("select pg_stat_get_dead_tuples('queen.log_segments'::regclass)").await, 0);
    assert_eq!(log.count(size).await, before, "the end of the file stays: cutting it would lock out every push");
    // What comes next finds the room.
    log.execute(
        "insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
         select id, n, n, now(), 'x' from queen.log_partitions, generate_series(5000, 9000) n",
    )
    .await;
    assert_eq!(log.count(size).await, before);
}

#[tokio::test]
async fn a_vacuum_that_is_off_does_not_run() {
    let log = Log::start().await;
    stale(&log, 5000).await;
    sweep(&log.database, Settings { rows_max: 1000, vacuum: false, ..settings() }).await.expect("no panic");
    wait_until(
        &log.sql,
        "the deletes are counted",
        "select pg_stat_get_dead_tuples('queen.log_segments'::regclass) = 5000",
        &[],
    )
    .await;
    assert_eq!(log.count("select pg_stat_get_vacuum_count('queen.log_segments'::regclass)").await, 0);
    assert_eq!(space::to_vacuum(&log.sql, 4999, 0.2).await.expect("asks"), ["log_segments"]);
    assert_eq!(space::to_vacuum(&log.sql, 5000, 0.2).await.expect("asks"), [""; 0]);
}
