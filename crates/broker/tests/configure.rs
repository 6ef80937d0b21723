//! Queue administration: what configure stores and answers, and what a delete takes along.

mod support;

use serde_json::json;
use support::{Broker, wait_until};
use uuid::Uuid;

/// A queue with two partitions, and one row in every table that can hold something of it.
async fn full_queue(broker: &Broker, name: &str) -> Uuid {
    let query = "insert into queen.queues (name) values ($1) returning id";
    let id: Uuid = broker.row(query, &[&name]).await.get(0);
    for partition in ["a", "b"] {
        let query = "insert into queen.log_partitions (queue_id, name, last_offset) values ($1, $2, 0) returning id";
        let pid: Uuid = broker.row(query, &[&id, &partition]).await.get(0);
        for statement in [
            "insert into queen.log_segments values ($1, 0, 0, now(), 'x')",
            "insert into queen.log_txns values ($1, 0, 0, now(), decode(repeat('00', 16), 'hex'))",
            "insert into queen.log_consumers (partition_id, consumer_group) values ($1, 'g')",
            "insert into queen.log_dlq (partition_id, consumer_group, \"offset\") values ($1, 'g', 0)",
            "insert into queen.message_traces (partition_id, transaction_id, data) values ($1, 't', '{}')",
            "insert into queen.retention_history (partition_id) values ($1)",
        ] {
            broker.execute(statement, &[&pid]).await;
        }
    }
    for statement in [
        "insert into queen.consumer_groups_metadata (queue_id, consumer_group, subscription_mode, subscription_timestamp)
         values ($1, 'g', 'all', now())",
        "insert into queen.consumer_watermarks (queue_id, consumer_group) values ($1, 'g')",
        "insert into queen.queue_lag_metrics (bucket_time, queue_id) values (now(), $1)",
        "insert into queen.stats (stat_type, stat_key, queue_id) values ('queue', $1::uuid::text, $1)",
        "insert into queen.queue_parked_replica (bucket_time, queue_name, hostname, worker_id)
         select now(), name, 'h', 0 from queen.queues where id = $1",
    ] {
        broker.execute(statement, &[&id]).await;
    }
    id
}

/// Rows of every table, those of queues first.
async fn counts(broker: &Broker) -> Vec<(&'static str, i64)> {
    let mut counts = Vec::new();
    for (table, query) in [
        ("queues", "select count(*) from queen.queues"),
        ("log_partitions", "select count(*) from queen.log_partitions"),
        ("log_segments", "select count(*) from queen.log_segments"),
        ("log_txns", "select count(*) from queen.log_txns"),
        ("log_consumers", "select count(*) from queen.log_consumers"),
        ("log_dlq", "select count(*) from queen.log_dlq"),
        ("consumer_groups_metadata", "select count(*) from queen.consumer_groups_metadata"),
        ("consumer_watermarks", "select count(*) from queen.consumer_watermarks"),
        ("queue_lag_metrics", "select count(*) from queen.queue_lag_metrics"),
        ("stats", "select count(*) from queen.stats"),
        ("queue_parked_replica", "select count(*) from queen.queue_parked_replica"),
        ("partition_events", "select count(*) from queen.partition_events"),
        ("message_traces", "select count(*) from queen.message_traces"),
        ("retention_history", "select count(*) from queen.retention_history"),
    ] {
        counts.push((table, broker.row(query, &[]).await.get(0)));
    }
    counts
}

#[tokio::test]
async fn deleting_a_queue_takes_everything_but_traces_and_history() {
    let broker = Broker::start().await;
    full_queue(&broker, "other").await;
    let others = counts(&broker).await;
    full_queue(&broker, "doomed").await;
    let (status, body) = broker.delete("/api/v1/resources/queues/doomed").await;
    assert_eq!(status, 200);
    assert_eq!((&body["deleted"], &body["existed"], &body["queue"]), (&json!(true), &json!(true), &json!("doomed")));
    assert!(body["message"].is_string() && body.get("error").is_none(), "{body}");
    for ((table, after), (_, other)) in counts(&broker).await.into_iter().zip(others) {
        let stay = matches!(table, "message_traces" | "retention_history");
        assert_eq!(after, if stay { 2 * other } else { other }, "rows of {table}");
    }
}

#[tokio::test]
async fn deleting_a_queue_that_is_not_there_is_no_error() {
    let broker = Broker::start().await;
    let (status, body) = broker.delete("/api/v1/resources/queues/nothing").await;
    assert_eq!(status, 200);
    assert_eq!((&body["deleted"], &body["existed"]), (&json!(false), &json!(false)));
}

#[tokio::test]
async fn a_queue_is_deleted_by_its_decoded_name() {
    let broker = Broker::start().await;
    let longest = "q".repeat(255);
    for (path, name) in [
        ("a%2Fb", "a/b"),
        ("50%25", "50%"),
        ("it's%20%22so%22", "it's \"so\""),
        ("what%3F%23", "what?#"),
        ("%F0%9F%90%98", "🐘"),
        (longest.as_str(), longest.as_str()),
    ] {
        full_queue(&broker, name).await;
        let (status, body) = broker.delete(&format!("/api/v1/resources/queues/{path}")).await;
        assert_eq!((status, &body["deleted"], &body["queue"]), (200, &json!(true), &json!(name)), "{body}");
    }
    for path in ["q".repeat(256), "a%00b".to_owned(), "%FF".to_owned()] {
        let (status, body) = broker.delete(&format!("/api/v1/resources/queues/{path}")).await;
        assert_eq!(status, 400, "{body}");
        assert!(body["error"].is_string(), "{body}");
    }
}

#[tokio::test]
async fn a_delete_waits_for_a_push_and_takes_its_rows_too() {
    let broker = Broker::start().await;
    let id = full_queue(&broker, "busy").await;
    let mut pusher = broker.database.client().await;
    let push = pusher.transaction().await.expect("a transaction");
    let query = "insert into queen.log_partitions (queue_id, name) values ($1, 'new') returning id";
    let pid: Uuid = push.query_one(query, &[&id]).await.expect("makes a partition").get(0);
    let query = "insert into queen.log_txns values ($1, 0, 0, now(), decode(repeat('00', 16), 'hex'))";
    push.execute(query, &[&pid]).await.expect("writes its hashes");

    let delete = async { broker.delete("/api/v1/resources/queues/busy").await };
    let commit = async {
        let query = "select count(*) = 1 from pg_stat_activity
                     where application_name = 'ebbtide' and wait_event_type = 'Lock' and query like '%delete_queue_v1%'";
        wait_until(&broker.sql, "the delete waits for the push", query, &[]).await;
        push.commit().await.expect("the push ends first");
    };
    let ((status, body), ()) = tokio::join!(delete, commit);
    assert_eq!((status, &body["deleted"]), (200, &json!(true)));
    for (table, rows) in counts(&broker).await {
        let stay = if matches!(table, "message_traces" | "retention_history") { 2 } else { 0 };
        assert_eq!(rows, stay, "rows of {table}");
    }
}
