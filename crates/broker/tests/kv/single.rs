//! One key by its path.

use reqwest::Method;
use serde_json::{Value, json};

use super::support::Broker;
use super::{expire, one, put};

const PATH: &str = "/api/v1/kv/n/a/b%2Fc";

async fn tag(broker: &Broker) -> String {
    let response = broker.request(Method::GET, PATH).send().await.expect("answers");
    assert_eq!(response.status(), 200);
    response.headers()["etag"].to_str().expect("text").to_owned()
}

async fn write(broker: &Broker, method: Method, headers: &[(&str, &str)], body: Option<Value>) -> (u16, Value) {
    let mut request = broker.request(method, PATH);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    if let Some(body) = body {
        request = request.json(&body);
    }
    broker.send(request).await
}

#[tokio::test]
async fn a_key_is_written_read_and_deleted_by_its_path() {
    let broker = Broker::start().await;
    let (status, body) = broker.get(PATH).await;
    assert_eq!((status, &body["found"]), (404, &json!(false)));
    let (status, body) = write(&broker, Method::PUT, &[], Some(json!({"value": [1], "ttlSeconds": 60}))).await;
    assert_eq!((status, &body["applied"], &body["key"]), (200, &json!(true), &json!("a/b/c")));
    let read = one(&broker, json!({"op": "get", "ns": "n", "key": "a/b/c"})).await;
    assert_eq!((&read["value"], &read["version"]), (&json!([1]), &body["version"]));
    assert_eq!(tag(&broker).await, format!("\"{}\"", body["version"]));
    let (status, body) = write(&broker, Method::DELETE, &[], None).await;
    assert_eq!((status, &body["applied"]), (200, &json!(true)));
    let (status, body) = write(&broker, Method::DELETE, &[], None).await;
    assert_eq!((status, &body["reason"]), (200, &json!("absent")));
}

#[tokio::test]
async fn tags_make_writes_conditional_and_reads_short() {
    let broker = Broker::start().await;
    let body = |value: i32| Some(json!({"value": value, "forever": true}));
    let (status, _) = write(&broker, Method::PUT, &[("if-none-match", "*")], body(1)).await;
    assert_eq!(status, 200);
    let (status, answer) = write(&broker, Method::PUT, &[("if-none-match", "*")], body(2)).await;
    assert_eq!((status, &answer["reason"], &answer["value"]), (412, &json!("exists"), &json!(1)));
    let first = tag(&broker).await;
    let (status, _) = write(&broker, Method::PUT, &[("if-match", &first)], body(2)).await;
    assert_eq!(status, 200);
    let (status, _) = write(&broker, Method::DELETE, &[("if-match", &first)], None).await;
    assert_eq!(status, 412);
    let second = tag(&broker).await;
    let unchanged = broker.request(Method::GET, PATH).header("if-none-match", format!("\"0\", W/{second}"));
    let response = unchanged.send().await.expect("answers");
    assert_eq!(
        (response.status().as_u16(), response.headers()["etag"].to_str().expect("text")),
        (304, second.as_str())
    );
    assert!(response.bytes().await.expect("a body").is_empty());
    let changed = broker.send(broker.request(Method::GET, PATH).header("if-none-match", &first)).await;
    assert_eq!((changed.0, &changed.1["value"]), (200, &json!(2)));
    for (name, value) in [("if-match", "*"), ("if-match", "7"), ("if-none-match", "\"7\"")] {
        let (status, answer) = write(&broker, Method::PUT, &[(name, value)], body(3)).await;
        assert_eq!((status, &answer["error"]), (400, &json!("kv_bad_request")), "{name}: {value}");
    }
}

#[tokio::test]
async fn paths_and_bodies_that_make_no_sense_are_refused() {
    let broker = Broker::start().await;
    one(&broker, put("k", json!(1))).await;
    for path in ["/api/v1/kv/n/k?x=1", "/api/v1/kv/N/k", "/api/v1/kv/n/%00", "/api/v1/kv/n/%ff"] {
        let (status, body) = broker.get(path).await;
        assert_eq!((status, &body["error"]), (400, &json!("kv_bad_request")), "{path}: {body}");
    }
    for body in [
        json!({"value": 1}),
        json!({"forever": true}),
        json!({"value": 1, "forever": true, "key": "k"}),
        json!({"value": 1, "forever": true, "delta": 1}),
        json!([1]),
    ] {
        let (status, answer) = write(&broker, Method::PUT, &[], Some(body.clone())).await;
        assert_eq!((status, &answer["error"]), (400, &json!("kv_bad_request")), "{body}: {answer}");
    }
    assert_eq!(write(&broker, Method::PUT, &[], None).await.0, 400);
    expire(&broker, "k").await;
    assert_eq!(broker.get("/api/v1/kv/n/k").await.0, 404);
}
