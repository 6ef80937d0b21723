//! Bounds of key/value, timers and ephemeral pushes: what is refused, with which code, and what still works then.

mod support;

use ebbtide::http::Settings;
use ebbtide::quota::Limits;
use serde_json::{Value, json};
use support::Broker;

async fn limited(quotas: Limits) -> Broker {
    Broker::with(Settings { quotas, ..Settings::default() }).await
}

fn puts(from: usize, count: usize) -> Value {
    let put = |n| json!({"op": "put", "ns": "n", "key": format!("k{n}"), "value": n, "forever": true});
    json!({"operations": (from..from + count).map(put).collect::<Vec<_>>()})
}

fn schedule(key: &str) -> Value {
    json!({"op": "schedule", "queue": "q", "timerKey": key, "payload": "MQ==", "delayMs": 3_600_000, "txn": key})
}

/// A transaction that pushes `id` and carries riders.
fn transaction(id: &str, riders: Value) -> Value {
    let mut body =
        json!({"operations": [{"type": "push", "items": [{"queue": "q", "transactionId": id, "payload": 1}]}]});
    body.as_object_mut().expect("an object").extend(riders.as_object().expect("an object").clone());
    body
}

/// Has the database count what it holds, and the server learn it.
async fn measure(broker: &Broker) {
    broker.sql.batch_execute("vacuum analyze queen.kv, queen.log_timers").await.expect("counted");
    broker.app.refresh().await.expect("heard");
}

#[tokio::test]
async fn a_full_store_takes_nothing_new() {
    let broker = limited(Limits { kv_rows: 3, timer_rows: 1, ..Limits::default() }).await;
    assert_eq!(broker.post("/api/v1/kv", puts(0, 2)).await.0, 200);
    measure(&broker).await;
    assert_eq!(broker.post("/api/v1/kv", puts(2, 1)).await.0, 200, "one less than the bound");
    assert_eq!(broker.post("/api/v1/timers", json!([schedule("a")])).await.0, 200);
    measure(&broker).await;

    let (status, body) = broker.post("/api/v1/kv", puts(3, 1)).await;
    assert_eq!((status, &body["error"]), (403, &json!("kv_quota_exceeded")), "{body}");
    assert!(body["detail"].as_str().is_some_and(|text| text.contains("QUEEN_KV_MAX_ROWS")), "{body}");
    let (status, body) = broker.post("/api/v1/timers", json!([schedule("b")])).await;
    assert_eq!((status, &body["error"]), (403, &json!("timers_quota_exceeded")), "{body}");
    let riders = [
        (json!({"kv": puts(3, 1)["operations"]}), "kv_quota_exceeded"),
        (json!({"timers": [schedule("b")]}), "timers_quota_exceeded"),
    ];
    for (riders, code) in riders {
        let (status, body) = broker.post("/api/v1/transaction", transaction("t", riders)).await;
        assert_eq!((status, &body["reason"], &body["success"]), (403, &json!(code), &json!(false)), "{body}");
    }
    assert_eq!(broker.row("select count(*) from queen.log_segments", &[]).await.get::<_, i64>(0), 0, "nothing of it");

    let work = json!([{"op": "get", "ns": "n", "key": "k0"}, {"op": "delete", "ns": "n", "key": "k1"}]);
    assert_eq!(broker.post("/api/v1/kv", work).await.0, 200, "reading and deleting go on");
    let cancel = json!([{"op": "cancel", "queue": "q", "timerKey": "a"}]);
    assert_eq!(broker.post("/api/v1/timers", cancel).await.0, 200);
    measure(&broker).await;
    assert_eq!(broker.post("/api/v1/kv", puts(3, 1)).await.0, 200, "there is room again");
    assert_eq!(broker.post("/api/v1/timers", json!([schedule("b")])).await.0, 200);
}

#[tokio::test]
async fn what_comes_too_fast_is_told_when_to_come_again() {
    // A burst of 256, and hours until there is as much again.
    let slow = Limits { kv_reads: 1, kv_writes: 1, timer_writes: 1, ephemeral_messages: 1, ..Limits::default() };
    let broker = limited(slow).await;
    let gets = json!({"operations": vec![json!({"op": "get", "ns": "n", "key": "k"}); 256]});
    let timers: Vec<Value> = (0..256).map(|n| schedule(&n.to_string())).collect();
    let messages = vec![json!({"payload": 1}); 256];
    let requests = [
        ("/api/v1/kv", gets),
        ("/api/v1/kv", puts(0, 256)),
        ("/api/v1/timers", json!(timers)),
        ("/api/v1/ephemeral/push", json!({"queue": "e", "messages": messages})),
    ];
    let http = reqwest::Client::new();
    for (path, body) in requests {
        let (status, answer) = broker.post(path, body.clone()).await;
        assert!(status < 300, "{path} {answer}");
        let response = http.post(format!("{}{path}", broker.url)).json(&body).send().await.expect("answered");
        assert_eq!(response.status(), 429, "{path}");
        let wait: u64 = response.headers()["retry-after"].to_str().expect("text").parse().expect("seconds");
        assert!((200..=256).contains(&wait), "{path}: {wait}");
        let body: Value = response.json().await.expect("JSON");
        assert!([&body["error"], &body["code"]].contains(&&json!("rate_limited")), "{path}: {body}");
    }
    let riders = json!({"kv": [{"op": "get", "ns": "n", "key": "k"}]});
    let (status, body) = broker.post("/api/v1/transaction", transaction("t", riders)).await;
    assert_eq!((status, &body["reason"]), (429, &json!("rate_limited")), "{body}");
    let cancel = json!([{"op": "cancel", "queue": "q", "timerKey": "1"}]);
    assert_eq!(broker.post("/api/v1/timers", cancel).await.0, 200, "cancelling is free");
}

#[tokio::test]
async fn the_list_of_queues_says_what_the_stores_hold() {
    let broker = Broker::start().await;
    broker.post("/api/v1/kv", puts(0, 5)).await;
    broker.post("/api/v1/timers", json!([schedule("a"), schedule("b")])).await;
    measure(&broker).await;
    let (_, body) = broker.get("/api/v1/resources/queues").await;
    assert_eq!((&body["kvRows"], &body["timerRows"]), (&json!(5), &json!(2)), "{body}");
    assert!(body["kvBytes"].as_u64() > Some(0) && body["timerBytes"].as_u64() > Some(0), "{body}");
}
