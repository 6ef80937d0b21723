//! The sweeping backend is ended at every table that a step writes and between steps; the next leader
//! comes to the same end.

mod support;

use std::time::Duration;

use ebbtide::error::Error;
use ebbtide::retention::{self, Settings, Swept, phase};
use ebbtide_sweep::Led;
use support::partition::Log;
use support::wait_until;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The advisory lock that a parked statement waits for.
const PARK: i64 = 4_242;

fn sweep(log: &Log) -> JoinHandle<Swept> {
    let target = log.database.target.clone();
    let settings = Settings {
        interval: Duration::from_secs(5),
        rows_max: 10,
        cleanup_days: Some(30),
        metrics_days: 90,
        lock_wait: Duration::from_secs(60),
        ..support::unpaced()
    };
    tokio::spawn(async move {
        match retention::once(target, &settings, &CancellationToken::new()).await {
            Ok(Led::Ran(swept)) => swept,
            other => panic!("the gate is free: {other:?}"),
        }
    })
}

async fn sweep_to_the_end(log: &Log) -> Swept {
    let swept = sweep(log).await.expect("no panic");
    assert!(swept.report.first_error().is_none() && swept.as_of.is_some(), "{:?}", swept.report);
    swept
}

/// Work for every phase: a queue with rule 1 and one with eviction, 35 segments and sidecar rows each; a dead
/// partition with a cursor and a sidecar row that no purge takes; old metrics and an old line of the audit.
async fn work(log: &Log) {
    log.execute(
        "insert into queen.queues (name, retention_enabled, retention_seconds) values ('timed', true, 60);
         insert into queen.queues (name, max_wait_time_seconds) values ('waiting', 60);
         insert into queen.log_partitions (queue_id, name, last_offset) select id, name, 69 from queen.queues;
         insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
         select id, 2 * n, 2 * n + 1, now() - interval '1 day' + n * interval '1 second', 'x'
           from queen.log_partitions, generate_series(0, 34) n;
         insert into queen.log_txns (partition_id, base_offset, end_offset, created_at, hashes)
         select id, 2 * n, 2 * n + 1, now() - interval '1 day' + n * interval '1 second', 'x'
           from queen.log_partitions, generate_series(0, 34) n;
         insert into queen.log_partitions (queue_id, name, created_at, last_write_at)
         select id, 'dead', '2020-01-01', '2020-01-02' from queen.queues where name = 'timed';
         insert into queen.log_consumers (partition_id, consumer_group, created_at)
         select id, 'g', '2020-01-01' from queen.log_partitions where name = 'dead';
         insert into queen.log_txns (partition_id, base_offset, end_offset, created_at, hashes)
         select id, 0, 0, now(), 'x' from queen.log_partitions where name = 'dead';
         insert into queen.worker_metrics (hostname, worker_id, pid, bucket_time) values ('h', 1, 1, '2020-01-01');
         insert into queen.system_metrics (timestamp, hostname, port, worker_id, metrics)
         values ('2020-01-01', 'h', 1, 'w', '{}');
         insert into queen.retention_history (retention_type, messages_deleted, executed_at)
         values ('long ago', 1000, '2020-01-01')",
    )
    .await;
}

/// All that work done, nothing of it twice.
async fn assert_done(log: &Log, when: &str) {
    for (what, query, expected) in [
        ("segments", "select count(*) from queen.log_segments", 0),
        ("sidecar rows", "select count(*) from queen.log_txns", 0),
        ("partitions", "select count(*) from queen.log_partitions where log_start = 70 and txns_start = 70", 2),
        ("all partitions", "select count(*) from queen.log_partitions", 2),
        ("cursors", "select count(*) from queen.log_consumers", 0),
        ("metrics", "select count(*) from queen.worker_metrics", 0),
        ("system metrics", "select count(*) from queen.system_metrics", 0),
        (
            "retained",
            "select sum(messages_deleted)::bigint from queen.retention_history where retention_type = 'retention'",
            70,
        ),
        (
            "evicted",
            "select sum(messages_deleted)::bigint from queen.retention_history where retention_type = 'max_wait_time_eviction'",
            70,
        ),
        ("deaths", "select count(*) from queen.retention_history where retention_type = '__partition_deleted__'", 1),
        ("old audit", "select count(*) from queen.retention_history where retention_type = 'long ago'", 0),
    ] {
        assert_eq!(log.count(query).await, expected, "{what}, {when}");
    }
}

/// Makes the statement that `event` names wait, when `condition` holds, for a lock that the test has.
async fn park(log: &Log, event: &str, table: &str, condition: &str) {
    log.execute(&format!(
        "select pg_advisory_lock({PARK});
         create or replace function park() returns trigger language plpgsql as $$ begin
             if {condition} then perform pg_advisory_xact_lock({PARK}); end if;
             return case tg_op when 'DELETE' then old else new end;
         end $$;
         create trigger park before {event} on queen.{table} for each row execute function park()"
    ))
    .await;
}

/// Ends the backend that is parked, and takes the trigger away.
async fn terminate_parked(log: &Log, table: &str) {
    let parked = "from pg_stat_activity where datname = current_database()
        and application_name like 'ebbtide-sweep%' and wait_event_type = 'Lock' and wait_event = 'advisory'";
    wait_until(&log.sql, "the sweep is parked", &format!("select exists (select {parked})"), &[]).await;
    log.execute(&format!("select pg_terminate_backend(pid) {parked}")).await;
    log.execute(&format!("drop trigger park on queen.{table}; select pg_advisory_unlock({PARK})")).await;
}

/// Parks the sweep, ends it there, and lets another client lead.
async fn crash_at(event: &str, table: &str, condition: &str, when: &str) {
    let log = Log::start().await;
    work(&log).await;
    park(&log, event, table, condition).await;
    let swept = sweep(&log);
    terminate_parked(&log, table).await;
    let swept = swept.await.expect("no panic");
    let failed = swept.report.phases().last().expect("a phase");
    assert!(matches!(failed.first_error, Some(Error::Disconnected)), "{when}: {:?}", failed.first_error);
    if !failed.is_minor {
        assert!(swept.as_of.is_none(), "{when}: the cycle ended there");
    }
    // The session is gone and its lock with it: this one is another client.
    sweep_to_the_end(&log).await;
    assert_done(&log, when).await;
    assert!(!sweep_to_the_end(&log).await.report.anything_went(), "{when}: nothing was left");
}

#[tokio::test]
async fn without_a_crash_all_is_done() {
    let log = Log::start().await;
    work(&log).await;
    sweep_to_the_end(&log).await;
    assert_done(&log, "undisturbed").await;
}

const OF_TIMED: &str = "exists (select from queen.log_partitions p where p.name = 'timed' and p.id = old.partition_id)";
const OF_WAITING: &str =
    "exists (select from queen.log_partitions p where p.name = 'waiting' and p.id = old.partition_id)";
const OF_DEAD: &str = "exists (select from queen.log_partitions p where p.name = 'dead' and p.id = old.partition_id)";

#[tokio::test]
async fn a_retention_step_ends_at_each_table_it_writes() {
    for (event, table, condition) in [
        ("delete", "log_segments", OF_TIMED),
        ("update", "log_partitions", "new.log_start > old.log_start"),
        ("insert", "retention_history", "new.retention_type = 'retention'"),
    ] {
        crash_at(event, table, condition, &format!("retention, {event} on {table}")).await;
    }
}

#[tokio::test]
async fn a_purge_step_ends_at_each_table_it_writes() {
    for (event, table, condition) in
        [("delete", "log_txns", OF_TIMED), ("update", "log_partitions", "new.txns_start > old.txns_start")]
    {
        crash_at(event, table, condition, &format!("purge, {event} on {table}")).await;
    }
}

#[tokio::test]
async fn an_eviction_step_ends_at_each_table_it_writes() {
    for (event, table, condition) in [
        ("delete", "log_segments", OF_WAITING),
        ("update", "log_partitions", "old.name = 'waiting' and new.log_start > old.log_start"),
        ("insert", "retention_history", "new.retention_type = 'max_wait_time_eviction'"),
    ] {
        crash_at(event, table, condition, &format!("eviction, {event} on {table}")).await;
    }
}

#[tokio::test]
async fn a_cleanup_step_ends_at_each_table_it_writes() {
    for (event, table, condition) in [
        ("delete", "log_txns", OF_DEAD),
        ("insert", "retention_history", "new.retention_type = '__partition_deleted__'"),
        ("delete", "log_partitions", "true"),
        ("delete", "log_consumers", "true"),
        ("insert", "partition_events", "new.deleted > 0"),
    ] {
        crash_at(event, table, condition, &format!("cleanup, {event} on {table}")).await;
    }
}

#[tokio::test]
async fn the_metrics_purge_ends_at_each_table_it_writes() {
    for table in ["worker_metrics", "retention_history", "system_metrics"] {
        crash_at("delete", table, "true", &format!("metrics, delete on {table}")).await;
    }
}

/// Between step n and the next one: exactly n batches are gone, and the audit says exactly that.
#[tokio::test]
async fn a_cycle_ends_after_any_number_of_steps() {
    for steps in 0..4_i64 {
        let log = Log::start().await;
        work(&log).await;
        let done = format!(
            "{OF_TIMED} and {steps} = (select count(*) from queen.retention_history where retention_type = 'retention')"
        );
        park(&log, "delete", "log_segments", &done).await;
        let swept = sweep(&log);
        terminate_parked(&log, "log_segments").await;
        assert_eq!(swept.await.expect("no panic").report.deleted(phase::RETENTION), 10 * steps.unsigned_abs());
        let left = "select count(*) from queen.log_segments s join queen.log_partitions p on p.id = s.partition_id
            where p.name = 'timed'";
        assert_eq!(log.count(left).await, 35 - 10 * steps);
        let told = "select coalesce(sum(messages_deleted), 0)::bigint from queen.retention_history
            where retention_type = 'retention'";
        assert_eq!(log.count(told).await, 20 * steps);
        let start = "select log_start from queen.log_partitions where name = 'timed'";
        assert_eq!(log.count(start).await, 20 * steps);
        sweep_to_the_end(&log).await;
        assert_done(&log, &format!("after {steps} steps")).await;
    }
}

/// What is not written down has not happened.
#[tokio::test]
async fn a_delete_whose_audit_fails_is_undone() {
    let log = Log::start().await;
    work(&log).await;
    log.execute(
        "create function refuse() returns trigger language plpgsql as $$ begin
             if (select count(*) from queen.retention_history where retention_type = new.retention_type) = 2
             then raise exception 'disk full'; end if;
             return new;
         end $$;
         create trigger refuse before insert on queen.retention_history for each row execute function refuse()",
    )
    .await;
    let swept = sweep(&log).await.expect("no panic");
    assert!(swept.report.first_error().expect("failed").to_string().contains("disk full"));
    assert_eq!([swept.report.deleted(phase::RETENTION), swept.report.deleted(phase::EVICTION)], [20, 20]);
    assert_eq!(log.count("select count(*) from queen.log_segments").await, 2 * 15);
    let told = "select sum(messages_deleted)::bigint from queen.retention_history";
    assert_eq!(log.count(told).await, 2 * 40);
    log.execute("drop trigger refuse on queen.retention_history").await;
    sweep_to_the_end(&log).await;
    assert_done(&log, "once the audit works").await;
}

/// A leader that vanished leaves no lock, also for a server that goes on cycling.
#[tokio::test]
async fn a_server_leads_again_after_its_session_was_ended() {
    let log = Log::start().await;
    work(&log).await;
    park(&log, "delete", "log_segments", OF_TIMED).await;
    let trace = support::trace::capture("retention");
    let cancel = CancellationToken::new();
    let settings = Settings {
        interval: Duration::from_millis(1),
        rows_max: 10,
        cleanup_days: Some(30),
        metrics_days: 90,
        lock_wait: Duration::from_secs(60),
        ..support::unpaced()
    };
    let task = tokio::spawn(retention::run(log.database.target.clone(), settings, cancel.clone()));
    terminate_parked(&log, "log_segments").await;
    trace.wait_for("INFO", "segments_deleted=35", 1).await;
    cancel.cancel();
    task.await.expect("no panic");
    assert_eq!(trace.lines("ERROR", "cycle failed").len(), 1);
    assert_done(&log, "by the same server").await;
}
