//! `ebbtide sweep --once`, the program itself.

mod support;

use std::process::Output;

use serde_json::Value;
use support::partition::Log;
use support::url;
use tokio::process::Command;

async fn sweep(log: &Log, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ebbtide"))
        .arg("sweep")
        .args(arguments)
        .env("EBBTIDE_DATABASE_URL", url(&log.database.name))
        .env("RUST_LOG", "warn")
        .output()
        .await
        .expect("the program runs")
}

async fn sweep_json(log: &Log) -> (Option<i32>, Value) {
    let Output { status, stdout, stderr } = sweep(log, &["--once", "--json"]).await;
    let report = serde_json::from_slice(&stdout);
    (status.code(), report.unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&stderr))))
}

/// Two queues with a partition each, everything in them a day old.
async fn aged(log: &Log) {
    log.execute(
        "insert into queen.queues (name, retention_enabled, retention_seconds, completed_retention_seconds)
         values ('timed', true, 3600, 0), ('read', true, 0, 3600);
         insert into queen.log_partitions (queue_id, name, last_offset) select id, 'p', 1 from queen.queues;
         insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
         select p.id, n, n, now() - interval '1 day', 'x' from queen.log_partitions p, generate_series(0, 1) n;
         insert into queen.log_consumers (partition_id, consumer_group, committed)
         select p.id, g.name, g.committed from queen.log_partitions p, (values ('fast', 1), ('slow', -1)) g(name, committed)",
    )
    .await;
}

#[tokio::test]
async fn a_sweep_says_what_went_and_what_stayed() {
    let log = Log::start().await;
    aged(&log).await;
    let (code, report) = sweep_json(&log).await;
    assert_eq!((code, &report["outcome"]), (Some(0), &Value::from("swept")), "{report}");
    let names: Vec<&str> =
        report["phases"].as_array().expect("phases").iter().filter_map(|p| p["name"].as_str()).collect();
    assert_eq!(names, ["retention", "txns", "eviction", "cleanup", "metrics", "kv"]);
    assert_eq!(report["phases"][0]["deleted"], 2, "{report}");
    let unread = &report["kept"]["unread"];
    assert_eq!(unread.as_array().expect("lines").len(), 1, "{report}");
    assert_eq!((&unread[0]["queue"], &unread[0]["consumerGroup"]), (&"read".into(), &"slow".into()), "{report}");

    let text = String::from_utf8(sweep(&log, &["--once"]).await.stdout).expect("text");
    assert!(text.contains("queue read: group slow has not read on in 1 partitions"), "{text}");
    assert_eq!(log.count("select count(*) from queen.log_segments").await, 2);
}

#[tokio::test]
async fn silent_partitions_are_kept_for_a_reason() {
    let log = Log::start().await;
    log.partition().await.segments(&[(0, 0, 0)]).await;
    let p = log.partition().await;
    let insert = "insert into queen.log_dlq (partition_id, consumer_group, \"offset\") values ($1, 'g', 0)";
    log.sql.execute(insert, &[&p.id]).await.expect("dead letter");
    log.partition().await;
    let (code, report) = sweep_json(&log).await;
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(report["phases"][3]["deleted"], 1, "{report}");
    let silent = serde_json::json!([
        {"reason": "dead letters", "partitions": 1}, {"reason": "messages", "partitions": 1}]);
    assert_eq!(report["kept"]["silentPartitions"], silent);
}

#[tokio::test]
async fn a_sweep_beside_a_leader_does_nothing_and_says_so() {
    let log = Log::start().await;
    aged(&log).await;
    log.execute("select pg_advisory_lock(737001)").await;
    let (code, report) = sweep_json(&log).await;
    assert_eq!((code, report), (Some(3), serde_json::json!({"outcome": "skipped"})));
    assert_eq!(log.count("select count(*) from queen.log_segments").await, 4);
}

#[tokio::test]
async fn a_sweep_that_fails_exits_with_an_error() {
    let log = Log::start().await;
    aged(&log).await;
    log.execute("alter table queen.retention_history add constraint broken check (messages_deleted < 0)").await;
    let (code, report) = sweep_json(&log).await;
    assert_eq!((code, &report["outcome"]), (Some(1), &Value::from("failed")), "{report}");
    assert!(report["phases"][0]["firstError"].as_str().is_some_and(|e| e.contains("broken")), "{report}");
    assert_eq!(log.count("select count(*) from queen.log_segments").await, 4, "no audit, no delete");
}

#[tokio::test]
async fn a_sweep_asks_for_once() {
    let log = Log::start().await;
    assert_eq!(sweep(&log, &[]).await.status.code(), Some(2));
}
