//! Nothing where there could be something, and the same thing several times.

use serde_json::{Value, json};

use crate::support::Broker;
use crate::support::lane::{GROUP, LEASE, Lane};

#[tokio::test]
async fn an_empty_list_is_nothing_to_do_or_a_mistake() {
    let b = Broker::start().await;
    for (path, body, expected) in [
        ("/api/v1/push", json!({"items": []}), (201, "[]")),
        ("/api/v1/ack/batch", json!({"acknowledgments": []}), (200, "[]")),
        ("/api/v1/transaction", json!({"operations": []}), (400, "operations is required")),
        ("/api/v1/transaction", json!({"operations": [{"type": "push", "items": []}]}), (400, "items: must have")),
        ("/api/v1/dlq/replay", json!({"ids": []}), (400, "ids: must be 1 to 1000")),
        ("/api/v1/dlq/replay", json!({}), (400, "queue or ids is required")),
    ] {
        let (status, answer) = b.post(path, body.clone()).await;
        assert_eq!(status, expected.0, "{path} {body}: {answer}");
        assert!(answer.to_string().contains(expected.1), "{path} {body}: {answer}");
    }
    for query in ["?ids=", "?queue=", ""] {
        let (status, answer) = b.delete(&format!("/api/v1/dlq{query}")).await;
        assert_eq!(status, 400, "an empty choice is no choice of everything: {query} {answer}");
    }
}

#[tokio::test]
async fn an_empty_parameter_counts_as_not_given() {
    let b = Broker::start().await;
    for path in [
        "/api/v1/dlq?queue=&from=&limit=&offset=",
        "/api/v1/messages?status=&to=&limit=",
        "/api/v1/resources/queues?search=&limit=",
        "/api/v1/consumer-groups/lagging?minLagSeconds=",
    ] {
        let (status, answer) = b.get(path).await;
        assert_eq!(status, 200, "{path}: {answer}");
    }
    let (status, answer) = b.get("/api/v1/pop?namespace=&task=").await;
    assert_eq!((status, &answer["error"]), (400, &json!("namespace or task is required")));
    assert_eq!(answer["messages"], json!([]), "a consumer that only looks at these finds none");
}

#[tokio::test]
async fn a_message_that_is_acknowledged_several_times_at_once_is_acknowledged_once() {
    let b = Broker::start().await;
    let lane = Lane::leased(&b, 3).await;
    let ack = |id: &str| json!({"transactionId": id, "partitionId": lane.id, "consumerGroup": GROUP, "leaseId": LEASE});
    let body = json!({"acknowledgments": [ack("m0"), ack("m0"), ack("m0")]});
    let (status, answer) = b.post("/api/v1/ack/batch", body).await;
    assert_eq!(status, 200);
    let success: Vec<&Value> = answer.as_array().expect("a list").iter().map(|one| &one["success"]).collect();
    assert_eq!(success, [true, true, true], "{answer}");
    let cursor = lane.cursor().await;
    assert_eq!((cursor.committed, cursor.failures), (0, 0), "only m0 is behind it");
}

#[tokio::test]
async fn a_dead_letter_that_is_named_several_times_is_replayed_once() {
    let b = Broker::start().await;
    let lane = Lane::leased(&b, 1).await;
    let dead = json!({"transactionId": "m0", "partitionId": lane.id, "consumerGroup": GROUP, "leaseId": LEASE, "status": "dlq"});
    assert_eq!(b.post("/api/v1/ack", dead).await.1[0]["dlq"], true);
    let id = b.get("/api/v1/dlq").await.1["messages"][0]["id"].clone();
    let (status, answer) = b.post("/api/v1/dlq/replay", json!({"ids": [id, id, id]})).await;
    assert_eq!((status, &answer["replayed"], &answer["messages"]), (200, &json!(1), &json!(1)), "{answer}");
    let (_, again) = b.post("/api/v1/dlq/replay", json!({"ids": [id]})).await;
    assert_eq!(again["matched"], 0, "it is gone: {again}");
}

#[tokio::test]
async fn a_parameter_that_is_given_twice_counts_the_last_time() {
    let b = Broker::start().await;
    let (status, answer) = b.get("/api/v1/dlq?limit=7&limit=9").await;
    assert_eq!((status, &answer["pagination"]["limit"]), (200, &json!(9)));
    let (status, answer) = b.get("/api/v1/dlq?limit=9&limit=x").await;
    assert_eq!(status, 400, "{answer}");
}
