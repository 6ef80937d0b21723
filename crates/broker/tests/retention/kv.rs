//! The sweep of expired values.

use jiff::Timestamp;
use serde_json::Value;

use ebbtide::retention::{self, Settings, phase};
use ebbtide_sweep::Led;
use tokio_util::sync::CancellationToken;

use crate::support::partition::Log;

const CUTOFF: Option<Timestamp> = Some(Timestamp::constant(1_767_225_600, 0));

async fn store(log: &Log, key: &str, expires_at: &str) {
    log.execute(&format!(
        "insert into queen.kv (namespace, key, value, version, expires_at, updated_at)
         values ('n', '{key}', '1', nextval('queen.kv_version_seq'), {expires_at}, '2020-01-01')"
    ))
    .await;
}

async fn step(log: &Log, cutoff: Option<Timestamp>, rows_max: Option<i32>) -> (i64, bool) {
    let query = "select queen.kv_sweep_step_v1($1, $2)";
    let value: Value = log.sql.query_one(query, &[&cutoff, &rows_max]).await.expect("a step").get(0);
    assert_eq!(value.as_object().expect("an object").len(), 2);
    (value["deleted"].as_i64().expect("a count"), value["done"].as_bool().expect("a boolean"))
}

async fn keys(log: &Log) -> Vec<String> {
    let rows = log.sql.query("select key from queen.kv order by key", &[]).await.expect("keys");
    rows.iter().map(|row| row.get(0)).collect()
}

/// Before the cutoff, at it, after it, and never.
async fn around(log: &Log) {
    store(log, "before", "'2025-12-31 23:59:59.999999+00'").await;
    store(log, "equal", "'2026-01-01 00:00:00+00'").await;
    store(log, "after", "'2026-01-01 00:00:00.000001+00'").await;
    store(log, "never", "null").await;
}

#[tokio::test]
async fn a_step_keeps_what_expires_at_or_after_the_cutoff() {
    let log = Log::start().await;
    assert_eq!(step(&log, CUTOFF, Some(10)).await, (0, true), "nothing to do");
    around(&log).await;
    assert_eq!(step(&log, None, Some(10)).await, (0, true), "off");
    assert_eq!(step(&log, CUTOFF, Some(10)).await, (1, true));
    assert_eq!(keys(&log).await, ["after", "equal", "never"]);
    assert_eq!(step(&log, CUTOFF, None).await, (0, true));
}

#[tokio::test]
async fn a_full_batch_of_exempt_rows_in_front_ends_nothing() {
    let log = Log::start().await;
    for n in 0..4 {
        store(&log, &format!("old-{n}"), &format!("'2020-01-0{}'", n + 1)).await;
        store(&log, &format!("forever-{n}"), "null").await;
    }
    let holder = log.database.client().await;
    holder.batch_execute("begin; select from queen.kv where key in ('old-0', 'old-1') for update").await.expect("held");
    assert_eq!(step(&log, CUTOFF, Some(2)).await, (2, false), "those behind the ones that are held");
    assert_eq!(step(&log, CUTOFF, Some(2)).await, (0, true));
    assert_eq!(keys(&log).await.len(), 6);
    holder.batch_execute("commit").await.expect("let go");
    assert_eq!(step(&log, CUTOFF, Some(2)).await, (2, false));
    assert_eq!(keys(&log).await, ["forever-0", "forever-1", "forever-2", "forever-3"]);
}

#[tokio::test]
async fn one_row_more_than_the_batch_takes_two_steps() {
    let log = Log::start().await;
    for n in 0..4 {
        store(&log, &format!("{n}"), &format!("'2020-01-0{}'", n + 1)).await;
    }
    assert_eq!(step(&log, CUTOFF, Some(3)).await, (3, false));
    assert_eq!(keys(&log).await, ["3"], "oldest first");
    assert_eq!(step(&log, CUTOFF, Some(3)).await, (1, true));
}

async fn cycle(log: &Log, settings: Settings) -> retention::Swept {
    let target = log.database.target.clone();
    match retention::once(target, &settings, &CancellationToken::new()).await {
        Ok(Led::Ran(swept)) => swept,
        other => panic!("the gate is free: {other:?}"),
    }
}

#[tokio::test]
async fn a_cycle_sweeps_values_and_says_so_unless_it_is_off() {
    let log = Log::start().await;
    for n in 0..5 {
        store(&log, &format!("{n}"), "now() - interval '1 second'").await;
    }
    store(&log, "live", "now() + interval '1 hour'").await;
    let off = cycle(&log, Settings { kv_interval: None, ..Settings::default() }).await;
    assert!(off.report.phase(phase::KV).is_none());
    assert_eq!(keys(&log).await.len(), 6);
    let swept = cycle(&log, Settings { rows_max: 2, ..Settings::default() }).await;
    let report = swept.report.phase(phase::KV).expect("it ran");
    assert_eq!((report.deleted, report.failures, report.steps), (5, 0, 3));
    assert_eq!(keys(&log).await, ["live"]);
    let names: Vec<&str> = swept.report.phases().iter().map(|phase| phase.name).collect();
    assert_eq!(names.last(), Some(&phase::KV), "after the others: {names:?}");
}

#[tokio::test]
async fn a_sweep_of_values_that_fails_is_told_and_disturbs_nothing() {
    let log = Log::start().await;
    store(&log, "k", "now() - interval '1 second'").await;
    log.execute(
        "create function public.refuse() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$;
         create trigger refuse before delete on queen.kv for each row execute function public.refuse();
         insert into queen.queues (name, retention_enabled, retention_seconds) values ('q', true, 60);
         insert into queen.log_partitions (queue_id, name, last_offset) select id, 'p', 0 from queen.queues;
         insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
         select id, 0, 0, now() - interval '1 day', 'x' from queen.log_partitions",
    )
    .await;
    let swept = cycle(&log, Settings::default()).await;
    assert_eq!(swept.report.deleted(phase::RETENTION), 1);
    assert_eq!(swept.report.phase(phase::KV).expect("it ran").failures, 1);
    assert!(swept.report.first_error().is_some() && swept.as_of.is_some(), "the cycle has failed, and was whole");
}
