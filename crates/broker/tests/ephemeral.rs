//! Ephemeral queues over HTTP: in memory, bounded, and gone with the server.

mod support;

use serde_json::{Value, json};
use support::{Broker, until};

async fn push(t: &Broker, queue: &str, payloads: &[Value]) -> (u16, Value) {
    let messages: Vec<Value> = payloads.iter().map(|payload| json!({"payload": payload})).collect();
    t.post("/api/v1/ephemeral/push", json!({"queue": queue, "messages": messages})).await
}

async fn pop(t: &Broker, query: &str) -> Vec<Value> {
    let (status, body) = t.get(&format!("/api/v1/ephemeral/pop?{query}")).await;
    assert_eq!(status, 200, "{body}");
    body["messages"].as_array().expect("messages").clone()
}

#[tokio::test]
async fn what_is_pushed_is_popped_once_and_acknowledged() {
    let t = Broker::start().await;
    assert_eq!(push(&t, "q", &[json!(1), json!(null), json!({"b": 1, "a": 2})]).await, (201, json!({"pushed": 3})));
    let first = pop(&t, "queue=q").await;
    assert_eq!(
        (&first[0]["partition"], &first[0]["attempts"], &first[0]["payload"]),
        (&json!("Default"), &json!(1), &json!(1))
    );
    let rest = pop(&t, "queue=q&batch=10").await;
    assert_eq!(rest.len(), 2);
    assert!(pop(&t, "queue=q&batch=10").await.is_empty());
    let acks = json!({"queue": "q", "acks": [{"id": first[0]["id"]}, {"id": rest[0]["id"], "status": "retry", "error": "x"},
        {"id": "e:0:Default:0"}, {"id": "nonsense"}]});
    let (status, body) = t.post("/api/v1/ephemeral/ack", acks).await;
    assert_eq!(status, 200);
    let outcomes: Vec<&Value> =
        body["results"].as_array().expect("results").iter().map(|one| &one["outcome"]).collect();
    assert_eq!(outcomes, ["acked", "redelivered", "stale", "unknown"]);
    let again = pop(&t, "queue=q").await;
    assert_eq!((&again[0]["payload"], &again[0]["attempts"]), (&json!(null), &json!(2)));

    let (_, depth) = t.get("/api/v1/ephemeral/queues/q/depth").await;
    assert_eq!(
        (&depth["pending"], &depth["tier"], &depth["group"]),
        (&json!(2), &json!("implicit"), &json!("__QUEUE_MODE__"))
    );
    let (_, list) = t.get("/api/v1/ephemeral/queues").await;
    assert_eq!(
        (&list["count"], &list["queues"][0]["queue"], &list["queues"][0]["depth"]),
        (&json!(1), &json!("q"), &json!(2))
    );
    assert_eq!(list["cellBytes"], list["queues"][0]["bytes"]);
    assert_eq!(t.post("/api/v1/ephemeral/reset", json!({"queue": "q"})).await.1, json!({"queue": "q", "dropped": 2}));
    assert_eq!(t.app.ephemeral.bytes(), 0);
    assert_eq!(t.get("/api/v1/status/buffers").await.0, 200);
    assert_eq!(t.row("select count(*) from queen.queues", &[]).await.get::<_, i64>(0), 0, "nothing is in the database");
}

#[tokio::test]
async fn payload_bytes_come_back_as_they_were_sent() {
    let t = Broker::start().await;
    let payload = r#"{"b": 1.0e+07,"a":"\u0000\ud800", "c" : [ ]}"#;
    let body = format!(r#"{{"queue":"q","partition":"p","messages":[{{"payload": {payload} }}]}}"#);
    assert_eq!(t.post_raw("/api/v1/ephemeral/push", body).await.0, 201);
    let (_, bytes) = t.get_bytes("/api/v1/ephemeral/pop?queue=q&partition=p").await;
    assert!(String::from_utf8(bytes).expect("text").contains(payload));
}

#[tokio::test]
async fn a_waiting_pop_is_woken_by_a_push() {
    let t = Broker::start().await;
    let app = t.app.clone();
    let url = format!("{}/api/v1/ephemeral/pop?queue=q&wait=true&timeout=60000&batch=5", t.url);
    let waiting =
        tokio::spawn(async move { reqwest::get(url).await.expect("answers").json::<Value>().await.expect("JSON") });
    until("the pop has made its queue", || !app.ephemeral.list().is_empty()).await;
    push(&t, "q", &[json!("woken")]).await;
    assert_eq!(waiting.await.expect("no panic")["messages"][0]["payload"], "woken");
    let (status, body) = t.get("/api/v1/ephemeral/pop?queue=q&wait=true&timeout=1").await;
    assert_eq!((status, body), (200, json!({"queue": "q", "messages": []})));
}

#[tokio::test]
async fn a_window_lets_a_waiting_pop_fatten_its_batch() {
    let t = Broker::start().await;
    let options = json!({"queue": "q", "options": {"windowBuffer": {"ms": 60_000, "count": 3}}});
    assert_eq!(t.post("/api/v1/ephemeral/configure", options).await.0, 201);
    push(&t, "q", &[json!(1)]).await;
    let url = format!("{}/api/v1/ephemeral/pop?queue=q&wait=true&timeout=60000&batch=10", t.url);
    let waiting =
        tokio::spawn(async move { reqwest::get(url).await.expect("answers").json::<Value>().await.expect("JSON") });
    push(&t, "q", &[json!(2)]).await;
    push(&t, "q", &[json!(3)]).await;
    assert_eq!(waiting.await.expect("no panic")["messages"].as_array().map(Vec::len), Some(3));
    assert!(pop(&t, "queue=q").await.is_empty());
}

#[tokio::test]
async fn options_are_kept_and_contents_are_not() {
    let t = Broker::start().await;
    let options = json!({"queue": "q", "options": {"maxLength": 2, "policy": "dropOldest", "ttlSeconds": 60, "leaseSeconds": 7,
        "retryLimit": 1, "maxBytes": 100_000}});
    let (status, stored) = t.post("/api/v1/ephemeral/configure", options).await;
    assert_eq!(status, 201);
    assert_eq!((&stored["options"]["policy"], &stored["options"]["leaseSeconds"]), (&json!("dropOldest"), &json!(7)));
    push(&t, "q", &[json!(1)]).await;
    push(&t, "q", &[json!(2), json!(3)]).await;
    assert_eq!(pop(&t, "queue=q").await[0]["payload"], 2, "the oldest is gone");

    let name = t.database.name.clone();
    let database = support::Database { name: name.clone(), target: t.database.target.clone() };
    let other = Broker::on(database, ebbtide::http::Settings::default()).await;
    other.app.refresh().await.expect("the database answers");
    let (_, list) = other.get("/api/v1/ephemeral/queues").await;
    assert_eq!((&list["queues"][0]["tier"], &list["queues"][0]["depth"]), (&json!("declared"), &json!(0)));
    assert_eq!(list["queues"][0]["options"], stored["options"]);

    assert_eq!(t.delete("/api/v1/ephemeral/queue/q").await.1, json!({"queue": "q", "deleted": true, "declared": true}));
    assert_eq!(
        t.delete("/api/v1/ephemeral/queue/q").await.1,
        json!({"queue": "q", "deleted": false, "declared": false})
    );
    let (status, body) = t.get("/api/v1/ephemeral/queues/q/depth").await;
    assert_eq!((status, &body["code"]), (404, &json!("ephemeral_queue_not_found")));
    assert_eq!(t.app.ephemeral.bytes(), 0);
}

#[tokio::test]
async fn bounds_are_told_by_their_codes() {
    let settings = ebbtide::ephemeral::Settings { bytes_max: 2000, queue_length_max: 2, ..Default::default() };
    let t = Broker::with(ebbtide::http::Settings { ephemeral: settings, ..Default::default() }).await;
    push(&t, "q", &[json!(1), json!(2)]).await;
    let (status, body) = push(&t, "q", &[json!(3)]).await;
    assert_eq!((status, &body["code"]), (429, &json!("queue_full")), "{body}");
    let (status, body) = push(&t, "r", &[json!("x".repeat(2000))]).await;
    assert_eq!((status, &body["code"]), (503, &json!("ephemeral_unavailable")), "{body}");
    assert!(pop(&t, "queue=r").await.is_empty());
}

#[tokio::test]
async fn an_operator_can_pause_them() {
    let t = Broker::start().await;
    push(&t, "q", &[json!(1)]).await;
    let (_, state) = t.post("/api/v1/system/ephemeral", json!({"enabled": false})).await;
    assert_eq!((&state["ephemeralEnabled"], &state["queues"]), (&json!(false), &json!(1)));
    let (status, body) = push(&t, "q", &[json!(2)]).await;
    assert_eq!((status, &body["code"]), (503, &json!("ephemeral_disabled")));
    t.post("/api/v1/system/ephemeral", json!({"enabled": true})).await;
    assert_eq!(t.get("/api/v1/system/ephemeral").await.1["ephemeralEnabled"], true);
    assert_eq!(pop(&t, "queue=q&autoAck=true").await.len(), 1);
}

#[tokio::test]
async fn bad_requests_name_the_field() {
    let t = Broker::start().await;
    for (path, body, field) in [
        ("push", json!({"messages": []}), "queue"),
        ("push", json!({"queue": "q"}), "messages"),
        ("push", json!({"queue": "q", "messages": [{}]}), "messages[0].payload"),
        ("push", json!({"queue": "", "messages": []}), "queue"),
        ("push", json!({"queue": "q", "partition": "x\u{1}", "messages": []}), "partition"),
        ("push", json!({"queue": "q", "messages": vec![json!({"payload": 1}); 10_001]}), "messages"),
        ("configure", json!({"queue": "q", "options": {"ttlSecond": 1}}), "ttlSecond"),
        ("configure", json!({"queue": "q", "options": {"maxBytes": 0}}), "options.maxBytes"),
        ("configure", json!({"queue": "q", "options": {"policy": "other"}}), "policy"),
        ("configure", json!({"queue": "q", "options": {"leaseSeconds": 86_401}}), "options.leaseSeconds"),
        ("configure", json!({"queue": "q", "options": {"windowBuffer": {"ms": -1}}}), "options.windowBuffer.ms"),
        ("ack", json!({"queue": "q"}), "acks"),
        ("ack", json!({"queue": "q", "acks": [{}]}), "acks[0].id"),
        ("ack", json!({"queue": "q", "acks": [{"id": "x", "status": "done"}]}), "status"),
        ("reset", json!({}), "queue"),
    ] {
        let (status, answer) = t.post(&format!("/api/v1/ephemeral/{path}"), body.clone()).await;
        assert_eq!((status, &answer["code"]), (400, &json!("ephemeral_bad_request")), "{path}");
        assert!(answer["error"].as_str().expect("text").contains(field), "{path}: {answer}");
    }
    for (query, field) in [
        ("", "queue"),
        ("queue=q&batch=0", "batch"),
        ("queue=q&timeout=300001", "timeout"),
        ("queue=q&wait=maybe", "wait"),
    ] {
        let (status, answer) = t.get(&format!("/api/v1/ephemeral/pop?{query}")).await;
        assert_eq!(status, 400);
        assert!(answer["error"].as_str().expect("text").contains(field), "{answer}");
    }
    assert!(t.app.ephemeral.list().is_empty());
}
