//! Timers: scheduling, firing, sharing the work, and what becomes of a crash.

#[path = "../support/mod.rs"]
mod support;

mod fire;
mod killed;
mod routes;
mod share;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use support::Broker;

fn encoded(json: &str) -> String {
    BASE64_STANDARD.encode(json)
}

fn schedule(queue: &str, key: &str, delay_ms: i64) -> Value {
    json!({"op": "schedule", "queue": queue, "timerKey": key, "payload": encoded(&format!("{{\"key\": \"{key}\"}}")),
        "delayMs": delay_ms, "txn": format!("txn-{key}")})
}

/// `operation` with more fields.
fn with(mut operation: Value, more: Value) -> Value {
    operation.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    operation
}

async fn run(broker: &Broker, operations: Value) -> Vec<Value> {
    let (status, body) = broker.post("/api/v1/timers", json!({"operations": operations})).await;
    assert_eq!(status, 200, "{body}");
    body["results"].as_array().expect("results").clone()
}

async fn one(broker: &Broker, operation: Value) -> Value {
    run(broker, json!([operation])).await.remove(0)
}

async fn left(broker: &Broker) -> i64 {
    broker.row("select count(*) from queen.log_timers", &[]).await.get(0)
}

/// Pops everything of a queue: (message id, transaction id, data, partition).
async fn popped(broker: &Broker, queue: &str) -> Vec<(String, String, Value, String)> {
    let path = format!("queue/{queue}?batch=1000&partitions=100&autoAck=true&consumerGroup=g&subscriptionMode=all");
    let (status, body) = broker.pop(&path).await;
    if status == 204 {
        return Vec::new();
    }
    let text = |message: &Value, name: &str| message[name].as_str().expect("text").to_owned();
    let messages = body["messages"].as_array().expect("messages").iter();
    messages.map(|m| (text(m, "id"), text(m, "transactionId"), m["data"].clone(), text(m, "partition"))).collect()
}
