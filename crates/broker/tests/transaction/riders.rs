//! Key/value and timer operations that commit with pushes and acknowledgements, or not at all.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use super::support::Broker;
use super::support::lane::Lane;
use super::{ack, post, push};

fn put(key: &str, value: i64) -> Value {
    json!({"op": "put", "ns": "n", "key": key, "value": value, "forever": true})
}

fn once(key: &str) -> Value {
    json!({"op": "putIfAbsent", "ns": "n", "key": key, "value": true, "ttlSeconds": 60, "required": true})
}

fn timer(key: &str) -> Value {
    json!({"op": "schedule", "queue": "q", "timerKey": key, "payload": BASE64_STANDARD.encode("{}"), "delayMs": 3_600_000,
        "txn": key})
}

/// What riders can change.
async fn riders(broker: &Broker) -> (i64, i64) {
    let query = "select (select count(*) from queen.kv), (select count(*) from queen.log_timers)";
    let row = broker.row(query, &[]).await;
    (row.get(0), row.get(1))
}

#[tokio::test]
async fn everything_commits_together_in_one_flat_answer() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    let body = json!({
        "operations": [ack(&lane, "m0", "completed"), push("out", "t")],
        "kv": [put("a", 5), {"op": "get", "ns": "n", "key": "a"}, {"op": "getMany", "ns": "n", "keys": ["a", "b"]}],
        "timers": [timer("k"), {"op": "cancel", "queue": "q", "timerKey": "none", "txn": "x"}],
    });
    let body = post(&broker, body).await;
    assert_eq!(body["success"], true, "{body}");
    let results = body["results"].as_array().expect("results");
    let kinds: Vec<(&str, i64, Option<i64>)> = results
        .iter()
        .map(|result| {
            let kind = result["type"].as_str().expect("a type");
            (kind, result["index"].as_i64().expect("an index"), result["opIndex"].as_i64())
        })
        .collect();
    assert_eq!(
        kinds,
        [
            ("ack", 0, None),
            ("push", 1, None),
            ("kv", 2, Some(0)),
            ("kv", 3, Some(1)),
            ("kv", 4, Some(2)),
            ("timer", 5, Some(0)),
            ("timer", 6, Some(1)),
        ]
    );
    assert_eq!((&results[3]["value"], &results[4]["missing"]), (&json!(5), &json!(["b"])));
    assert_eq!((&results[5]["status"], &results[6]["status"]), (&json!("scheduled"), &json!("absent")));
    assert_eq!(riders(&broker).await, (1, 1));
    lane.free_at(0, 0).await;
}

#[tokio::test]
async fn riders_alone_are_a_transaction() {
    let broker = Broker::start().await;
    for body in [json!({"kv": [put("a", 1)]}), json!({"operations": [], "timers": [timer("k")]})] {
        assert_eq!(post(&broker, body).await["success"], true);
    }
    assert_eq!(riders(&broker).await, (1, 1));
    let (status, body) = broker.post("/api/v1/transaction", json!({"kv": [], "timers": []})).await;
    assert_eq!((status, &body["reason"]), (400, &json!("bad_request")));
}

#[tokio::test]
async fn a_gate_that_is_taken_undoes_the_transaction_and_says_where() {
    let broker = Broker::start().await;
    assert_eq!(post(&broker, json!({"kv": [once("gate")]})).await["success"], true);
    let body = json!({"operations": [push("out", "t")], "kv": [once("gate")], "timers": [timer("k")]});
    let body = post(&broker, body).await;
    assert_eq!(
        (&body["success"], &body["reason"], &body["ok"]),
        (&json!(false), &json!("kv_precondition"), &json!(false))
    );
    assert_eq!((&body["failedIndex"], &body["kvReason"], &body["value"]), (&json!(1), &json!("exists"), &json!(true)));
    assert!(0 < body["version"].as_i64().expect("a version") && body["error"].is_string(), "{body}");
    assert_eq!(body["results"], json!([]));
    assert_eq!(riders(&broker).await, (1, 0));
    let queues: i64 = broker.row("select count(*) from queen.queues", &[]).await.get(0);
    assert_eq!(queues, 0, "nothing was pushed");
}

#[tokio::test]
async fn a_refused_acknowledgement_or_a_duplicate_undoes_the_riders() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    let riding = |operations: Value| json!({"operations": operations, "kv": [put("a", 1)], "timers": [timer("k")]});
    let body = post(&broker, riding(json!([ack(&lane, "unknown", "completed")]))).await;
    assert_eq!((&body["success"], &body["reason"]), (&json!(false), &json!("ack_rejected")));
    assert_eq!(riders(&broker).await, (0, 0));
    assert_eq!(post(&broker, json!({"operations": [push("out", "t")]})).await["success"], true);
    let body = post(&broker, riding(json!([push("out", "t")]))).await;
    assert_eq!((&body["success"], &body["reason"]), (&json!(false), &json!("duplicate")));
    assert_eq!(riders(&broker).await, (0, 0));
}

#[tokio::test]
async fn a_dead_letter_that_has_to_be_brought_applies_the_riders_once() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    let add = json!({"op": "incr", "ns": "n", "key": "a", "delta": 1, "forever": true});
    let body = post(&broker, json!({"operations": [ack(&lane, "m0", "dlq")], "kv": [add]})).await;
    assert_eq!((&body["success"], &body["results"][1]["value"]), (&json!(true), &json!(1)), "{body}");
    assert_eq!(lane.filed().await.len(), 1);
}

#[tokio::test]
async fn wrong_riders_are_refused_with_their_status_and_name() {
    let broker = Broker::start().await;
    let many: Vec<Value> = (0..65).map(|n| put(&n.to_string(), n)).collect();
    let far = json!({"op": "schedule", "queue": "q", "timerKey": "k", "payload": "MQ==", "delayMs": 7_776_000_001_i64, "txn": "t"});
    let big = json!({"op": "put", "ns": "n", "key": "k", "value": "x".repeat(65_536), "forever": true});
    for (body, status, reason, words) in [
        (json!({"kv": many}), 400, "bad_request", "kv"),
        (json!({"kv": [{"op": "getPrefix", "ns": "n", "prefix": "p"}]}), 400, "bad_request", "kv[0]"),
        (json!({"kv": [put("k", 1), put("k", 2)]}), 400, "bad_request", "kv[1]"),
        (json!({"kv": 7}), 400, "bad_request", "kv"),
        (json!({"kv": [big]}), 413, "payload_too_large", "kv[0].value"),
        (json!({"timers": [timer("k"), timer("k")]}), 400, "bad_request", "timers[1]"),
        (json!({"timers": [far]}), 403, "timer_horizon_exceeded", "timers[0].delayMs"),
    ] {
        let (found, answer) = broker.post("/api/v1/transaction", body).await;
        assert_eq!((found, &answer["reason"], &answer["success"]), (status, &json!(reason), &json!(false)), "{answer}");
        assert!(answer["error"].as_str().expect("words").contains(words), "{answer}");
    }
    assert_eq!(riders(&broker).await, (0, 0));
}
