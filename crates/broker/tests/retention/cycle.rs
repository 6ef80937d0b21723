//! A whole cycle: its phases, its clock, its failures.

use std::time::Duration;

use ebbtide::error::Error;
use ebbtide::retention::{self, LOCK_ID, Settings, Swept, phase};
use ebbtide_sweep::Led;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::support::Database;
use crate::support::partition::Log;

pub(crate) fn settings() -> Settings {
    Settings {
        interval: Duration::from_secs(5),
        rows_max: 10,
        cleanup_days: Some(30),
        metrics_days: 90,
        lock_wait: Duration::from_secs(60),
        ..crate::support::unpaced()
    }
}

pub(crate) async fn sweep_with(log: &Log, settings: &Settings) -> Swept {
    sweep_on(&log.database, settings).await
}

pub(crate) async fn sweep_on(database: &Database, settings: &Settings) -> Swept {
    match retention::once(database.target.clone(), settings, &CancellationToken::new()).await {
        Ok(Led::Ran(swept)) => swept,
        Ok(Led::Skipped) => panic!("another session leads"),
        Err(error) => panic!("{error}"),
    }
}

async fn sweep(log: &Log) -> Swept {
    let swept = sweep_with(log, &settings()).await;
    if let Some(error) = swept.report.first_error() {
        panic!("{error}");
    }
    swept
}

fn deleted(swept: &Swept) -> [u64; 4] {
    [phase::RETENTION, phase::TXNS, phase::EVICTION, phase::CLEANUP].map(|name| swept.report.deleted(name))
}

/// A queue with a policy, and in its partition `p` one segment and one sidecar row of each age in seconds,
/// from the oldest on.
async fn aged(log: &Log, name: &str, policy: &str, ages: &[i64]) -> Uuid {
    log.execute(&format!(
        "insert into queen.queues (name) values ('{name}');
         update queen.queues set {policy} where name = '{name}';
         insert into queen.log_partitions (queue_id, name, last_offset)
         select id, 'p', {} from queen.queues where name = '{name}'",
        i64::try_from(ages.len()).expect("few") - 1
    ))
    .await;
    let query = "select p.id from queen.log_partitions p join queen.queues q on q.id = p.queue_id
        where q.name = $1 order by p.created_at desc limit 1";
    let id: Uuid = log.sql.query_one(query, &[&name]).await.expect("partition").get(0);
    for (offset, age) in (0_i64..).zip(ages) {
        log.execute(&format!(
            "insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
             values ('{id}', {offset}, {offset}, now() - interval '{age} seconds', 'x');
             insert into queen.log_txns (partition_id, base_offset, end_offset, created_at, hashes)
             values ('{id}', {offset}, {offset}, now() - interval '{age} seconds', 'x')"
        ))
        .await;
    }
    id
}

async fn bases(log: &Log, table: &str, id: Uuid) -> Vec<i64> {
    let query = format!("select base_offset from queen.{table} where partition_id = $1 order by 1");
    log.sql.query(&query, &[&id]).await.expect("offsets").iter().map(|row| row.get(0)).collect()
}

async fn live(log: &Log, id: Uuid) -> Vec<i64> {
    bases(log, "log_segments", id).await
}

#[tokio::test]
async fn each_phase_does_its_part_in_order() {
    let log = Log::start().await;
    let rule_1 = aged(&log, "rule 1", "retention_enabled = true, retention_seconds = 100", &[300, 200, 50]).await;
    let rule_2 =
        aged(&log, "rule 2", "retention_enabled = true, completed_retention_seconds = 100", &[300, 200, 50]).await;
    log.execute(&format!(
        "insert into queen.log_consumers (partition_id, consumer_group, committed) values ('{rule_2}', 'g', 0)"
    ))
    .await;
    let evicted = aged(&log, "evicted", "max_wait_time_seconds = 100", &[300, 200, 50]).await;
    let kept = aged(&log, "kept", "dedup_window_seconds = 0", &[5000, 4000, 50]).await;
    let swept = sweep(&log).await;
    assert_eq!(deleted(&swept), [3, 2, 2, 0]);
    let names: Vec<_> = swept.report.phases().iter().map(|phase| phase.name).collect();
    assert_eq!(names, ["retention", "txns", "eviction", "cleanup", "metrics", "kv"]);
    assert_eq!(live(&log, rule_1).await, [2]);
    assert_eq!(live(&log, rule_2).await, [1, 2]);
    assert_eq!(live(&log, evicted).await, [2]);
    assert_eq!(live(&log, kept).await, [0, 1, 2], "without a policy data is kept for ever");
    assert_eq!(bases(&log, "log_txns", kept).await, [2], "and its sidecar is not");
    assert_eq!(swept.queues.len(), 2);
    // The last step of rule 2 saw that the group has to read what comes next.
    assert_eq!(swept.report.phase(phase::RETENTION).expect("ran").kept, [(phase::UNREAD, 1)]);
    assert_eq!(swept.held, Some(1));
}

#[tokio::test]
async fn windows_of_nothing_switch_rules_off() {
    let log = Log::start().await;
    let off = [
        "retention_enabled = true, retention_seconds = 0, completed_retention_seconds = 0, max_wait_time_seconds = 0",
        "retention_enabled = true, retention_seconds = null, completed_retention_seconds = null, max_wait_time_seconds = null",
        "retention_enabled = true, retention_seconds = -5, completed_retention_seconds = -5, max_wait_time_seconds = -5",
        "retention_enabled = false, retention_seconds = 5, completed_retention_seconds = 5",
        "retention_enabled = null, retention_seconds = 5, completed_retention_seconds = 5",
    ];
    for (number, policy) in off.iter().enumerate() {
        let id = aged(&log, &number.to_string(), policy, &[1000, 800]).await;
        log.execute(&format!(
            "insert into queen.log_consumers (partition_id, consumer_group, committed) values ('{id}', 'g', 1)"
        ))
        .await;
    }
    let swept = sweep(&log).await;
    assert_eq!(deleted(&swept), [0, 0, 0, 0]);
    assert_eq!(swept.queues.len(), 0, "no queue has a cutoff");
    assert_eq!(log.count("select count(*) from queen.log_segments").await, 10);
}

#[tokio::test]
async fn the_largest_windows_keep_everything() {
    let log = Log::start().await;
    let policy = format!(
        "retention_enabled = true, retention_seconds = {0}, completed_retention_seconds = {0},
         max_wait_time_seconds = {0}, dedup_window_seconds = {0}",
        i32::MAX
    );
    aged(&log, "q", &policy, &[1_000_000_000]).await;
    assert_eq!(deleted(&sweep(&log).await), [0, 0, 0, 0]);
}

#[tokio::test]
async fn the_sidecar_floor_is_900_seconds() {
    let log = Log::start().await;
    let floor = "dedup_window_seconds = 0, completed_retention_seconds = 0, retention_seconds = 0";
    let none = aged(&log, "none", floor, &[990, 910, 800]).await;
    let null = aged(&log, "null", "dedup_window_seconds = 0, completed_retention_seconds = null", &[910, 800]).await;
    let dedup = aged(&log, "dedup", "dedup_window_seconds = 2000", &[2100, 1900]).await;
    // Counts though retention is off: a group may still acknowledge what it was given.
    let completed =
        aged(&log, "completed", "dedup_window_seconds = 0, completed_retention_seconds = 2000", &[2100, 1900]).await;
    assert_eq!(deleted(&sweep(&log).await), [0, 5, 0, 0]);
    for (id, expected) in [(none, 2), (null, 1), (dedup, 1), (completed, 1)] {
        assert_eq!(bases(&log, "log_txns", id).await, [expected]);
    }
}

#[tokio::test]
async fn tenants_with_one_queue_name_keep_to_their_own_windows() {
    let log = Log::start().await;
    let short = aged(&log, "orders", "retention_enabled = true, retention_seconds = 100", &[300, 200, 50]).await;
    log.execute("update queen.queues set tenant_id = gen_random_uuid() where name = 'orders'").await;
    log.execute("update queen.queues set name = 'first' where name = 'orders'").await;
    let long = aged(&log, "orders", "retention_enabled = true, retention_seconds = 250", &[300, 200, 50]).await;
    log.execute("update queen.queues set name = 'orders'").await;
    let swept = sweep(&log).await;
    assert_eq!(deleted(&swept), [3, 0, 0, 0]);
    assert_eq!((live(&log, short).await, live(&log, long).await), (vec![2], vec![1, 2]));
    assert_eq!(swept.queues.len(), 2, "counted by id");
    assert_eq!(log.count("select count(distinct tenant_id) from queen.retention_history").await, 2);
}

#[tokio::test]
async fn what_the_first_phases_emptied_goes_in_the_same_cycle() {
    let log = Log::start().await;
    let id = aged(&log, "q", "retention_enabled = true, retention_seconds = 100", &[5_000_000]).await;
    let recent = aged(&log, "recent", "retention_enabled = true, retention_seconds = 100", &[5_000_000]).await;
    log.execute(&format!(
        "update queen.log_partitions set created_at = now() - interval '60 days',
             last_write_at = now() - interval '30 days 1 minute' where id = '{id}';
         update queen.log_partitions set created_at = now() - interval '60 days',
             last_write_at = now() - interval '29 days 23 hours' where id = '{recent}'"
    ))
    .await;
    assert_eq!(deleted(&sweep(&log).await), [2, 2, 0, 1]);
    let left: Uuid = log.sql.query_one("select id from queen.log_partitions", &[]).await.expect("one").get(0);
    assert_eq!(left, recent);
}

#[tokio::test]
async fn cleanup_that_is_off_does_not_run() {
    let log = Log::start().await;
    log.partition().await;
    let swept = sweep_with(&log, &Settings { cleanup_days: None, ..settings() }).await;
    assert!(swept.report.phase(phase::CLEANUP).is_none());
    assert_eq!(log.partitions().await, ["p"]);
}

#[tokio::test]
async fn every_partition_has_its_turn_however_many_there_are() {
    let log = Log::start().await;
    log.execute(
        "insert into queen.queues (name, retention_enabled, retention_seconds) values ('q', true, 100);
         insert into queen.log_partitions (queue_id, name, last_offset, oldest_live_at, oldest_txn_at)
         select id, n::text, 0, m.at, m.at from queen.queues, generate_series(1, 2500) n,
                lateral (select case when n % 50 = 0 then timestamptz '-infinity' end as at) m;
         insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
         select id, 0, 0, now() - interval '1 day', 'x' from queen.log_partitions where name::int % 50 = 0;
         insert into queen.log_txns (partition_id, base_offset, end_offset, created_at, hashes)
         select id, 0, 0, now() - interval '1 day', 'x' from queen.log_partitions where name::int % 50 = 0",
    )
    .await;
    let swept = sweep(&log).await;
    assert_eq!(deleted(&swept), [50, 50, 0, 0]);
    let steps = |name| swept.report.phase(name).expect("ran").steps;
    assert_eq!([steps(phase::RETENTION), steps(phase::TXNS)], [50, 50], "no step where nothing is due");
}

#[tokio::test]
async fn rows_aged_by_hand_go_in_the_next_cycle() {
    let log = Log::start().await;
    let id = aged(&log, "q", "retention_enabled = true, retention_seconds = 100", &[50, 40]).await;
    sweep(&log).await;
    let swept = sweep(&log).await;
    assert_eq!(swept.report.phase(phase::RETENTION).expect("ran").steps, 0, "its stamp is known and young");
    log.execute("update queen.log_segments set created_at = created_at - interval '1 hour' where base_offset = 0")
        .await;
    assert_eq!(deleted(&sweep(&log).await), [1, 0, 0, 0]);
    assert_eq!(live(&log, id).await, [1]);
}

#[tokio::test]
async fn a_backlog_is_drained_in_one_cycle_batch_by_batch() {
    let log = Log::start().await;
    let ages: Vec<i64> = (0..25).map(|n| 1000 - n).collect();
    aged(&log, "q", "retention_enabled = true, retention_seconds = 100", &ages).await;
    let swept = sweep(&log).await;
    assert_eq!(deleted(&swept), [25, 0, 0, 0]);
    assert_eq!(swept.report.phase(phase::RETENTION).expect("ran").steps, 3);
    assert_eq!(log.count("select max(messages_deleted)::bigint from queen.retention_history").await, 10);
}

#[tokio::test]
async fn a_step_that_fails_starves_nothing_behind_it() {
    let log = Log::start().await;
    let policy =
        "retention_enabled = true, retention_seconds = 100, max_wait_time_seconds = 100, dedup_window_seconds = 0";
    let mut ids = vec![aged(&log, "a", policy, &[2000]).await, aged(&log, "b", policy, &[2000]).await];
    ids.push(aged(&log, "c", policy, &[2000]).await);
    ids.sort_unstable();
    log.partition().await;
    log.execute(&format!(
        "create function refuse() returns trigger language plpgsql as $$ begin
             if old.partition_id = '{}' then raise exception 'page is corrupt'; end if;
             return old;
         end $$;
         create trigger refuse before delete on queen.log_segments for each row execute function refuse()",
        ids[0]
    ))
    .await;
    let swept = sweep_with(&log, &settings()).await;
    // The first partition fails in phases 1 and 3; the sidecars, the others and the dead partition go.
    assert_eq!(deleted(&swept), [2, 3, 0, 1]);
    let failures = |name| swept.report.phase(name).expect("ran").failures;
    assert_eq!([failures(phase::RETENTION), failures(phase::TXNS), failures(phase::EVICTION)], [1, 0, 1]);
    assert!(swept.report.first_error().expect("failed").to_string().contains("page is corrupt"));
    assert!(swept.report.phase(phase::METRICS).is_some());
    assert_eq!(log.count("select sum(messages_deleted)::bigint from queen.retention_history").await, 2);
}

#[tokio::test]
async fn a_partition_that_somebody_holds_delays_nobody_for_long() {
    let log = Log::start().await;
    let policy = "retention_enabled = true, retention_seconds = 100";
    let mut ids = [aged(&log, "a", policy, &[200]).await, aged(&log, "b", policy, &[200]).await];
    ids.sort_unstable();
    let holder = log.database.client().await;
    holder.batch_execute("begin").await.expect("begins");
    holder.execute("select from queen.log_partitions where id = $1 for update", &[&ids[0]]).await.expect("held");
    let swept = sweep_with(&log, &Settings { lock_wait: Duration::from_millis(50), ..settings() }).await;
    assert!(matches!(swept.report.first_error(), Some(Error::LockTimeout)), "{:?}", swept.report.first_error());
    assert_eq!((live(&log, ids[0]).await, live(&log, ids[1]).await), (vec![0], vec![]));
    holder.batch_execute("rollback").await.expect("let go");
    assert_eq!(deleted(&sweep(&log).await), [1, 0, 0, 0]);
}

#[tokio::test]
async fn a_deadlock_in_cleanup_is_an_ordinary_failure() {
    let log = Log::start().await;
    log.partition().await;
    log.execute(
        "create function refuse() returns trigger language plpgsql as $$ begin
             raise exception 'deadlock detected' using errcode = '40P01';
         end $$;
         create trigger refuse before delete on queen.log_partitions for each row execute function refuse()",
    )
    .await;
    let swept = sweep_with(&log, &settings()).await;
    assert!(matches!(swept.report.first_error(), Some(Error::Retryable(_))), "{:?}", swept.report.first_error());
    assert!(swept.report.phase(phase::METRICS).is_some(), "the cycle went on");
    log.execute("drop trigger refuse on queen.log_partitions").await;
    assert_eq!(deleted(&sweep(&log).await), [0, 0, 0, 1]);
}

#[tokio::test]
async fn an_answer_that_makes_no_sense_ends_that_partition_only() {
    let log = Log::start().await;
    for (name, answer) in [("a", "null::jsonb"), ("b", "'[]'::jsonb"), ("c", "'{\"deleted\":\"many\"}'::jsonb")] {
        log.execute(&format!(
            "create or replace function queen.log_txns_purge_step_v1(p_pid uuid, p_cutoff timestamptz, p_max_rows int)
             returns jsonb language sql as $$ select {answer} $$"
        ))
        .await;
        aged(&log, name, "max_wait_time_seconds = 100", &[9000]).await;
        let swept = sweep(&log).await;
        assert_eq!(deleted(&swept), [0, 0, 1, 0], "{answer}");
    }
}

#[tokio::test]
async fn phase_5_trims_metrics_and_audit_in_batches() {
    let log = Log::start().await;
    log.execute(
        "insert into queen.system_metrics (timestamp, hostname, port, worker_id, metrics)
         select now() - n * interval '1 day', 'h', 1, 'w', '{}' from generate_series(1, 125) n;
         insert into queen.retention_history (partition_id, executed_at)
         select gen_random_uuid(), now() - n * interval '1 day' from generate_series(1, 125) n;
         insert into queen.worker_metrics (hostname, worker_id, pid, bucket_time)
         select 'h', 1, 1, now() - n * interval '1 day' from generate_series(1, 95) n",
    )
    .await;
    let swept = sweep(&log).await;
    let metrics = swept.metrics;
    assert_eq!((metrics.workers, metrics.history, metrics.system), (6, 36, 36), "{metrics}");
    assert_eq!(
        log.count("select count(*) from queen.system_metrics where timestamp < now() - interval '90 days'").await,
        0
    );
    assert_eq!(log.count("select count(*) from queen.system_metrics").await, 89);
    assert!(!swept.report.anything_went(), "housekeeping alone is not worth a line");
}

#[tokio::test]
async fn a_failing_metrics_purge_does_not_fail_the_cycle() {
    let log = Log::start().await;
    aged(&log, "q", "retention_enabled = true, retention_seconds = 100", &[200]).await;
    log.execute("drop table queen.system_metrics").await;
    let swept = sweep(&log).await;
    assert_eq!(deleted(&swept), [1, 0, 0, 0]);
    assert!(swept.report.phase(phase::METRICS).expect("ran").first_error.is_some());
    assert!(swept.as_of.is_some(), "succeeded");
}

#[tokio::test]
async fn two_servers_never_sweep_at_once() {
    let log = Log::start().await;
    aged(&log, "q", "retention_enabled = true, retention_seconds = 100", &[200]).await;
    log.sql.execute("select pg_advisory_lock($1)", &[&LOCK_ID]).await.expect("lock");
    let led = retention::once(log.database.target.clone(), &settings(), &CancellationToken::new()).await;
    assert!(matches!(led, Ok(Led::Skipped)));
    assert_eq!(log.count("select count(*) from queen.log_segments").await, 1);
    log.sql.execute("select pg_advisory_unlock($1)", &[&LOCK_ID]).await.expect("unlock");
    assert_eq!(deleted(&sweep(&log).await), [1, 0, 0, 0]);
}

#[tokio::test]
async fn a_cancelled_cycle_starts_no_step() {
    let log = Log::start().await;
    aged(&log, "q", "retention_enabled = true, retention_seconds = 100", &[200]).await;
    let cancel = CancellationToken::new();
    cancel.cancel();
    let led = retention::once(log.database.target.clone(), &settings(), &cancel).await;
    let Ok(Led::Ran(swept)) = led else { panic!("{led:?}") };
    assert!(swept.report.first_error().is_none() && swept.as_of.is_none(), "neither failed nor succeeded");
    assert_eq!(log.count("select count(*) from queen.log_segments").await, 1);
}
