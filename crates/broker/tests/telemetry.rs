//! What requests leave in the metrics: each test does something over HTTP, flushes, and reads the rows.

mod support;

use ebbtide::telemetry::{Flusher, Identity};
use serde_json::{Value, json};
use support::Broker;
use support::lane::{Lane, send};

/// Flushes once, so that the ages of what is delivered next are known.
async fn flusher(broker: &Broker) -> Flusher {
    let identity = Identity { hostname: "h".to_owned(), port: 1 };
    let mut flusher = Flusher::new(broker.app.telemetry.clone(), broker.app.db.clone(), identity);
    flusher.flush().await.expect("flushes");
    flusher
}

async fn of_queue(broker: &Broker, queue: &str, columns: &str) -> Value {
    let query = format!(
        "select to_json(sums) from (
            select {columns} from queen.queue_lag_metrics m join queen.queues q on q.id = m.queue_id where q.name = $1
         ) sums"
    );
    broker.row(&query, &[&queue]).await.get(0)
}

#[tokio::test]
async fn a_pop_counts_its_messages_and_their_age() {
    let broker = Broker::start().await;
    let mut flusher = flusher(&broker).await;
    broker.store_aged("q", "p", 3, 20.0).await;
    broker.store_aged("q", "p", 1, 5.0).await;
    let path = "queue/q?consumerGroup=g&subscriptionMode=all&batch=10";
    assert_eq!(broker.pop_ids(path).await.len(), 4);
    assert_eq!(broker.pop(path).await.0, 204);
    assert_eq!(broker.pop("queue/unknown").await.0, 204);
    flusher.flush().await.expect("flushes");

    let counted = of_queue(&broker, "q", "sum(pop_count) pops, sum(pop_empty_count) empty, sum(lag_count) lags").await;
    assert_eq!(counted, json!({"pops": 4, "empty": 1, "lags": 4}));
    let query = "select max(max_lag_ms) between 19000 and 79000 and min(avg_lag_ms) between 15000 and 79000
                 from queen.queue_lag_metrics where 0 < lag_count";
    assert!(broker.row(query, &[]).await.get::<_, bool>(0), "the oldest is 20 seconds old, three of four are");
    let row = broker.row("select pop_request_count, pop_message_count from queen.worker_metrics_summary", &[]).await;
    assert_eq!((row.get(0), row.get(1)), (3_i64, 4_i64));
}

#[tokio::test]
async fn an_acknowledgement_counts_for_the_queue_of_its_partition() {
    let broker = Broker::start().await;
    let mut flusher = flusher(&broker).await;
    let lane = Lane::leased(&broker, 3).await;
    let elements = vec![lane.element("m0", "completed"), lane.element("m1", "dlq"), lane.element("none", "completed")];
    let replies = send(&broker, elements).await;
    assert_eq!((&replies[0]["success"], &replies[1]["dlq"]), (&json!(true), &json!(true)), "{replies:?}");
    flusher.flush().await.expect("flushes");

    let columns = "sum(ack_request_count) acks, sum(ack_success_count) done, sum(ack_failed_count) failed";
    assert_eq!(of_queue(&broker, "q", columns).await, json!({"acks": 1, "done": 1, "failed": 2}));
    let query = "select ack_request_count, ack_message_count, dlq_count from queen.worker_metrics_summary";
    let row = broker.row(query, &[]).await;
    assert_eq!((row.get(0), row.get(1), row.get(2)), (1_i64, 3_i64, 1_i64));
}

#[tokio::test]
async fn a_push_counts_once_for_each_of_its_queues() {
    let broker = Broker::start().await;
    let mut flusher = flusher(&broker).await;
    let item = |queue: &str, partition: &str, id: &str| json!({"queue": queue, "partition": partition, "transactionId": id, "payload": 0});
    let items = json!({"items": [
        item("q", "a", "1"), item("q", "b", "1"), item("q", "b", "2"), item("r", "a", "1"),
    ]});
    for _ in 0..2 {
        let (status, body) = broker.post("/api/v1/push", items.clone()).await;
        assert_eq!(status, 201, "{body}");
    }
    flusher.flush().await.expect("flushes");

    let columns = "sum(push_request_count) requests, sum(push_message_count) messages, sum(partitions_created) born";
    let q = of_queue(&broker, "q", columns).await;
    assert_eq!(q, json!({"requests": 2, "messages": 3, "born": 2}), "duplicates are not stored again");
    assert_eq!(of_queue(&broker, "r", columns).await, json!({"requests": 2, "messages": 1, "born": 1}));
    let row = broker.row("select push_request_count, push_message_count from queen.worker_metrics_summary", &[]).await;
    assert_eq!((row.get(0), row.get(1)), (2_i64, 4_i64));
}
