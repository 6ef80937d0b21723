//! Metrics: their purge, their flush, and what is read from them.

mod support;

use serde_json::{Value, json};
use support::Broker;
use tokio_postgres::types::Json;

/// Writes one row of each purged table, `age` old; the ages of a row's other times differ.
async fn aged(broker: &Broker, age: &str, mark: i32) {
    for statement in [
        "insert into queen.worker_metrics (hostname, worker_id, pid, bucket_time, created_at)
         values ('h', $2, 0, now() - $1::text::interval, now())",
        "insert into queen.queue_lag_metrics (bucket_time, queue_id, parked_count)
         values (now() - $1::text::interval, gen_random_uuid(), $2)",
        "insert into queen.queue_parked_replica (bucket_time, queue_name, hostname, worker_id)
         values (now() - $1::text::interval, 'q', 'h', $2)",
        "insert into queen.retention_history (executed_at, messages_deleted) values (now() - $1::text::interval, $2)",
    ] {
        broker.execute(statement, &[&age, &mark]).await;
    }
}

/// The marks that are left in each purged table, in the order of the answer's keys.
async fn marks(broker: &Broker) -> Vec<Vec<i32>> {
    let mut marks = Vec::new();
    for query in [
        "select worker_id from queen.worker_metrics order by 1",
        "select parked_count from queen.queue_lag_metrics order by 1",
        "select worker_id from queen.queue_parked_replica order by 1",
        "select messages_deleted from queen.retention_history order by 1",
    ] {
        marks.push(broker.rows(query, &[]).await.iter().map(|row| row.get(0)).collect());
    }
    marks
}

async fn cleanup(broker: &Broker, days: Option<i32>, rows_max: Option<i32>) -> Value {
    let Json(answer) = broker.row("select queen.cleanup_worker_metrics_v1($1, $2)", &[&days, &rows_max]).await.get(0);
    answer
}

fn purged(rows: i64, done: bool) -> Value {
    json!({
        "deletedMetrics": rows, "deletedLagMetrics": rows, "deletedParkedReplica": rows,
        "deletedRetentionHistory": rows, "done": done,
    })
}

#[tokio::test]
async fn the_metrics_purge_keeps_what_is_younger_than_its_days() {
    let broker = Broker::start().await;
    for (age, mark) in [("3 days 1 minute", 1), ("2 days 23 hours 59 minutes", 2), ("-1 hour", 3)] {
        aged(&broker, age, mark).await;
    }
    assert_eq!(cleanup(&broker, Some(3), None).await, purged(1, true));
    assert_eq!(marks(&broker).await, vec![vec![2, 3]; 4]);
    assert_eq!(cleanup(&broker, Some(3), None).await, purged(0, true), "nothing to do");
}

#[tokio::test]
async fn the_metrics_purge_defaults_to_seven_days() {
    let broker = Broker::start().await;
    aged(&broker, "7 days 1 minute", 1).await;
    aged(&broker, "6 days 23 hours", 2).await;
    let Json(answer): Json<Value> = broker.row("select queen.cleanup_worker_metrics_v1()", &[]).await.get(0);
    assert_eq!(answer, purged(1, true));
    assert_eq!(marks(&broker).await, vec![vec![2]; 4]);
}

#[tokio::test]
async fn the_metrics_purge_is_bounded() {
    let broker = Broker::start().await;
    for mark in 1..=3 {
        aged(&broker, "30 days", mark).await;
    }
    assert_eq!(cleanup(&broker, Some(3), Some(2)).await, purged(2, false));
    assert_eq!(cleanup(&broker, Some(3), Some(2)).await, purged(1, true));
    assert_eq!(marks(&broker).await, vec![Vec::<i32>::new(); 4]);
}

#[tokio::test]
async fn absurd_days_and_bounds_are_held_to_sane_ones() {
    let broker = Broker::start().await;
    aged(&broker, "36 hours", 1).await;
    aged(&broker, "12 hours", 2).await;
    assert_eq!(cleanup(&broker, Some(i32::MAX), None).await, purged(0, true));
    assert_eq!(cleanup(&broker, Some(i32::MIN), Some(i32::MIN)).await, purged(1, false), "1 day, 1 row");
    assert_eq!(marks(&broker).await, vec![vec![2]; 4]);
}

#[tokio::test]
async fn the_metrics_purge_passes_by_what_another_session_holds() {
    let broker = Broker::start().await;
    aged(&broker, "30 days", 1).await;
    aged(&broker, "30 days", 2).await;
    let mut other = broker.database.client().await;
    let held = other.transaction().await.expect("a transaction");
    let query = "select from queen.queue_lag_metrics where parked_count = 1 for update";
    held.execute(query, &[]).await.expect("held");
    let answer = cleanup(&broker, Some(3), None).await;
    assert_eq!((&answer["deletedMetrics"], &answer["deletedLagMetrics"]), (&json!(2), &json!(1)));
    held.rollback().await.expect("let go");
    assert_eq!(cleanup(&broker, Some(3), None).await["deletedLagMetrics"], 1);
}

#[tokio::test]
async fn each_statement_notes_its_partitions_by_queue() {
    let broker = Broker::start().await;
    broker.execute("insert into queen.queues (name) values ('a'), ('b')", &[]).await;
    let made = "insert into queen.log_partitions (queue_id, name)
                select q.id, n::text from queen.queues q, generate_series(1, 3) n where q.name = 'a' or n = 1
                on conflict do nothing";
    assert_eq!(broker.execute(made, &[]).await, 4);
    assert_eq!(broker.execute(made, &[]).await, 0, "and a statement that made none notes none");
    broker.execute("delete from queen.log_partitions where name = '2'", &[]).await;
    let query = "select q.name::text, e.created, e.deleted
                 from queen.partition_events e join queen.queues q on q.id = e.queue_id order by 1, 2";
    let events: Vec<(String, i32, i32)> =
        broker.rows(query, &[]).await.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    assert_eq!(events, [("a".to_owned(), 0, 1), ("a".to_owned(), 3, 0), ("b".to_owned(), 1, 0)]);
}

#[tokio::test]
async fn installing_again_keeps_the_triggers() {
    let broker = Broker::start().await;
    let query = "select array_agg(oid::bigint order by tgname) from pg_trigger where tgname like 'note_partitions_%'";
    let before: Vec<i64> = broker.row(query, &[]).await.get(0);
    broker.execute("update queen.installed_files set checksum = 'older' where name = 'metrics.sql'", &[]).await;
    let installed = ebbtide::db::migrate::migrate(&broker.database.target).await.expect("installs");
    assert_eq!(installed.procedures, 1, "the changed file is noticed");
    assert_eq!(broker.row(query, &[]).await.get::<_, Vec<i64>>(0), before);
    assert_eq!(before.len(), 2);
}
