//! Stream queries: registration, state, and the cycle that changes state, results and cursor together.

#[path = "../support/mod.rs"]
mod support;

mod crash;
mod cycle;
mod input;
mod partial;
mod register;
mod state;
mod together;

use serde_json::{Value, json};
use support::Broker;
use support::lane::{GROUP, LEASE, Lane};
use uuid::Uuid;

/// Registers the query `name` and returns its id.
async fn query(broker: &Broker, name: &str) -> Uuid {
    let (status, body) = register(broker, name, "hash", false).await;
    assert_eq!((status, &body["success"]), (200, &json!(true)), "{body}");
    body["query_id"].as_str().and_then(|id| id.parse().ok()).expect("an id")
}

async fn register(broker: &Broker, name: &str, hash: &str, reset: bool) -> (u16, Value) {
    let body = json!({"name": name, "source_queue": "q", "sink_queue": "out", "config_hash": hash, "reset": reset});
    broker.post("/streams/v1/queries", body).await
}

/// A cycle of a query in a lane, without anything to do.
fn idle(query: Uuid, lane: &Lane<'_>) -> Value {
    json!({"query_id": query, "partition_id": lane.id, "consumer_group": GROUP, "release_lease": true,
        "state_ops": [], "push_items": [], "ack": null})
}

/// `base` with some of its fields set.
fn with(base: &Value, fields: Value) -> Value {
    let mut body = base.clone();
    let Value::Object(fields) = fields else { panic!("an object") };
    body.as_object_mut().expect("an object").extend(fields);
    body
}

/// An acknowledgement of `count` messages under the lease of every test.
fn done(count: i64) -> Value {
    json!({"transactionId": "m0", "leaseId": LEASE, "status": "completed", "count": count})
}

fn upsert(key: &str, value: &Value) -> Value {
    json!({"type": "upsert", "key": key, "value": value})
}

fn delete(key: &str) -> Value {
    json!({"type": "delete", "key": key})
}

fn result(partition: &str, payload: &Value) -> Value {
    json!({"queue": "out", "partition": partition, "payload": payload})
}

async fn commit(broker: &Broker, body: &Value) -> Value {
    let (status, answer) = broker.post("/streams/v1/cycle", body.clone()).await;
    assert_eq!((status, &answer["success"]), (200, &json!(true)), "{answer}");
    answer
}

/// Asserts that nothing comes of `body`; returns the error's text.
async fn refused(broker: &Broker, body: &Value) -> String {
    let before = everything(broker).await;
    let (status, answer) = broker.post("/streams/v1/cycle", body.clone()).await;
    assert_eq!((status, &answer["success"]), (200, &json!(false)), "{answer}");
    assert_eq!(everything(broker).await, before, "nothing happened");
    answer["error"].as_str().expect("a text").to_owned()
}

/// All that a cycle can change.
async fn everything(broker: &Broker) -> String {
    let query = "select concat(
        (select string_agg(q::text, ';' order by q.id) from queen.queues q),
        (select string_agg(p::text, ';' order by p.id) from queen.log_partitions p),
        (select string_agg(s::text, ';' order by s.partition_id, s.base_offset) from queen.log_segments s),
        (select string_agg(t::text, ';' order by t.partition_id, t.base_offset) from queen.log_txns t),
        (select string_agg(c::text, ';' order by c.partition_id, c.consumer_group) from queen.log_consumers c),
        (select string_agg(q::text, ';' order by q.id) from queen_streams.queries q),
        (select string_agg(s::text, ';' order by s.query_id, s.partition_id, s.key) from queen_streams.state s))";
    broker.row(query, &[]).await.get(0)
}

/// State of a query in a lane, as (key, value), in key order.
async fn state(broker: &Broker, query: Uuid, lane: &Lane<'_>, which: Value) -> Vec<(String, Value)> {
    let body = with(&json!({"query_id": query, "partition_id": lane.id, "keys": []}), which);
    let (status, answer) = broker.post("/streams/v1/state/get", body).await;
    assert_eq!((status, &answer["success"]), (200, &json!(true)), "{answer}");
    let rows = answer["rows"].as_array().expect("rows");
    rows.iter().map(|row| (row["key"].as_str().expect("a key").to_owned(), row["value"].clone())).collect()
}

/// Payloads in the queue `out`, by partition and in order.
async fn results(broker: &Broker) -> Vec<(String, String)> {
    let query = "select p.name, s.blob from queen.log_segments s join queen.log_partitions p on p.id = s.partition_id
        join queen.queues q on q.id = p.queue_id where q.name = 'out' order by p.name, s.base_offset";
    let mut results = Vec::new();
    for row in broker.rows(query, &[]).await {
        let segment = ebbtide::segment::Segment::unpack(row.get(1)).expect("a segment");
        let payload = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("text");
        results.extend(segment.frames().map(|frame| (row.get(0), payload(frame.payload))));
    }
    results
}
