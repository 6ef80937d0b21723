//! Queues, partitions, groups, leases and transaction ids that nobody knows.

use reqwest::Method;
use serde_json::{Value, json};

use crate::schema::NIL;
use crate::support::Broker;

#[tokio::test]
async fn what_is_not_there_is_empty_or_404_and_never_an_error_of_the_server() {
    let b = Broker::start().await;
    let (get, post, delete) = (Method::GET, Method::POST, Method::DELETE);
    let (no_queue, no_message) = ("\"Queue not found\"", "\"Message not found\"");
    for (method, path, status, said) in [
        // A consumer may come before the first message, so it finds nothing yet.
        (&get, "pop/queue/q/partition/p", 204, ""),
        (&get, "pop?namespace=n", 204, ""),
        (&get, "messages/NIL/t", 404, no_message),
        (&delete, "messages/NIL/t", 404, "Dead letter not found"),
        (&post, "messages/NIL/t/retry", 404, "Dead letter not found"),
        (&post, "messages/NIL/t/dlq", 404, no_message),
        (&get, "messages?queue=q", 200, "\"total\":0"),
        (&get, "messages?partition=p", 200, "\"total\":0"),
        (&get, "dlq?queue=q&partition=p&consumerGroup=g", 200, "\"total\":0"),
        (&delete, "dlq?queue=q", 200, "\"matched\":0"),
        (&delete, "dlq?ids=NIL", 200, "\"matched\":0"),
        (&post, "dlq/replay?ids=NIL", 200, "\"matched\":0"),
        (&get, "traces/NIL/t", 200, "\"total\":0"),
        (&get, "traces/by-name/x", 200, "\"total\":0"),
        (&get, "consumer-groups/g", 200, "{}"),
        (&delete, "consumer-groups/g", 200, "\"deletedPartitions\":0"),
        (&delete, "consumer-groups/g/queues/q", 200, "\"deletedPartitions\":0"),
        (&post, "consumer-groups/g/queues/q/partitions/p/seek", 404, "Partition not found"),
        (&get, "resources/queues/q", 404, no_queue),
        (&get, "resources/queues/q/depth", 404, no_queue),
        (&get, "resources/partitions?queue=q", 200, "\"total\":0"),
        (&delete, "queues/q/clear", 404, no_queue),
        (&delete, "resources/queues/q", 200, "\"deleted\":false"),
        (&post, "lease/NIL/extend", 200, "\"renewed\":0"),
        (&post, "lease/no%20uuid/extend", 200, "\"renewed\":0"),
    ] {
        let path = format!("/api/v1/{}", path.replace("NIL", NIL));
        let (found, answer) = b.send(b.request(method.clone(), &path)).await;
        assert_eq!(found, status, "{method} {path}: {answer}");
        assert!(answer.to_string().contains(said), "{method} {path} says {said}: {answer}");
    }
    assert_eq!(b.get("/api/v1/resources/queues").await.1["total"], 0, "asking makes nothing");
}

#[tokio::test]
async fn bodies_that_name_what_is_not_there() {
    let b = Broker::start().await;
    let ack = json!({"transactionId": "t", "partitionId": NIL, "leaseId": NIL});
    let (status, answer) = b.post("/api/v1/ack", ack.clone()).await;
    assert_eq!(
        (status, &answer[0]["success"], &answer[0]["error"]),
        (200, &json!(false), &json!("consumer not found"))
    );

    let mut operation = ack;
    operation["type"] = json!("ack");
    let push = json!({"type": "push", "items": [{"queue": "q", "payload": 1}]});
    let (status, answer) = b.post("/api/v1/transaction", json!({"operations": [push, operation]})).await;
    assert_eq!((status, &answer["success"], &answer["reason"]), (200, &json!(false), &json!("ack_rejected")));

    let (status, answer) = b.post("/api/v1/consumer-groups/g/queues/q/seek", json!({"toEnd": true})).await;
    assert_eq!((status, &answer["error"]), (404, &json!("Queue not found or has no partitions")));

    let body = json!({"subscriptionTimestamp": "2026-01-01T00:00:00Z"});
    let (status, answer) = b.post("/api/v1/consumer-groups/g/subscription", body).await;
    assert_eq!((status, &answer["rowsUpdated"]), (200, &json!(0)));

    let trace = json!({"transactionId": "t", "partitionId": NIL, "data": 1});
    assert_eq!(b.post("/api/v1/traces", trace).await.0, 201, "a trace may come before its message");
    assert_eq!(b.get("/api/v1/resources/queues").await.1["total"], 0, "nothing was made");
}

async fn popped(b: &Broker) -> Value {
    b.post("/api/v1/push", json!({"items": [{"queue": "q", "payload": 1, "transactionId": "t"}]})).await;
    b.get("/api/v1/pop/queue/q").await.1
}

#[tokio::test]
async fn a_lease_of_a_queue_that_was_deleted_is_no_lease() {
    let b = Broker::start().await;
    let before = popped(&b).await;
    assert_eq!(b.delete("/api/v1/resources/queues/q").await.1["deleted"], true);
    let after = popped(&b).await;
    let (old, new) = (&before["messages"][0], &after["messages"][0]);
    assert_ne!(old["partitionId"], new["partitionId"], "another partition of the same name");

    let lease = before["leaseId"].as_str().expect("a lease");
    assert_eq!(b.post(&format!("/api/v1/lease/{lease}/extend"), json!({})).await.1["success"], false);
    for fields in [
        // Its own partition is gone; in the new one the lease is not known.
        json!({"partitionId": old["partitionId"], "leaseId": lease}),
        json!({"partitionId": new["partitionId"], "leaseId": lease}),
    ] {
        let mut ack = fields;
        ack["transactionId"] = json!("t");
        let (_, answer) = b.post("/api/v1/ack", ack).await;
        assert_eq!(answer[0]["success"], false, "{answer}");
    }
    let ack = json!({"transactionId": "t", "partitionId": new["partitionId"], "leaseId": after["leaseId"]});
    assert_eq!(b.post("/api/v1/ack", ack).await.1[0]["success"], true, "the live lease was not touched");
}
