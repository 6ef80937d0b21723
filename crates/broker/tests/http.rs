//! The wire, route by route.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use bytes::Bytes;
use ebbtide::http::Settings;
use http_body::Frame;
use http_body_util::StreamBody;
use serde_json::json;
use support::{Broker, PATIENCE};

#[tokio::test]
async fn health_says_that_the_database_answers() {
    let broker = Broker::start().await;
    let (status, body) = broker.get("/health").await;
    assert_eq!(status, 200);
    assert_eq!(body["status"], "healthy");
    assert_eq!(body["database"], "connected");
}

#[tokio::test]
async fn an_unknown_route_is_named_as_such() {
    let broker = Broker::start().await;
    for path in ["/api/v1/nothing", "//api/v1/nothing"] {
        let (status, body) = broker.get(path).await;
        assert_eq!(status, 404);
        assert_eq!(body["code"], "no_such_route");
    }
    assert_eq!(broker.post("/health", serde_json::json!({})).await.0, 404);
}

#[tokio::test]
async fn a_leading_double_slash_counts_as_one() {
    let broker = Broker::start().await;
    assert_eq!(broker.get("//health").await.0, 200);
}

#[tokio::test]
async fn metrics_are_prometheus_text() {
    let broker = Broker::start().await;
    broker.get("/health").await;
    let (status, body) = broker.get_bytes("/metrics/prometheus").await;
    assert_eq!(status, 200);
    let text = String::from_utf8(body).expect("text");
    assert!(text.contains("ebbtide_http_requests_total{route=\"/health\""), "{text}");
}

#[tokio::test]
async fn a_wrong_value_is_named_on_every_route() {
    let broker = Broker::start().await;
    let deep = format!(r#"{{"queue": "q", "options": {{"leaseTime": {}}}}}"#, "[".repeat(100_000));
    for (path, body, named) in [
        ("/api/v1/configure", r#"{"queue": "q", "options": {"leaseTime": 1e400}}"#, "options.leaseTime: "),
        ("/api/v1/configure", r#"{"queue": "\ud800"}"#, "queue: "),
        ("/api/v1/configure", deep.as_str(), "options.leaseTime[0]"),
        ("/api/v1/push", r#"{"items": [{"queue": "q", "payload": 1}, {"queue": 7}]}"#, "items[1].queue: "),
        ("/api/v1/push", r#"{"items": {"queue": 7}}"#, "items: "),
        ("/api/v1/ack/batch", r#"{"acknowledgments": 7}"#, "acknowledgments: "),
        ("/api/v1/lease/01a22f36-8218-7295-84e2-95348a3949cc/extend", r#"{"seconds": "60"}"#, "seconds: "),
        ("/api/v1/consumer-groups/g/queues/q/seek", r#"{"toEnd": 1e400}"#, "toEnd: "),
    ] {
        let (status, answer) = broker.post_raw(path, body.to_owned()).await;
        assert_eq!(status, 400, "{path}: {answer}");
        assert!(answer["error"].as_str().expect("text").contains(named), "{path}: {answer}");
    }
}

#[tokio::test]
async fn a_list_is_no_object_whose_fields_have_lost_their_names() {
    let broker = Broker::start().await;
    for (path, body) in [
        ("/api/v1/push", r#"[[{"queue": "q", "payload": 1}]]"#),
        ("/api/v1/push", r#"{"items": [["q", "p", 1, "t", null]]}"#),
        ("/api/v1/ack", r#"["t", "01a22f36-8218-7295-84e2-95348a3949cc", null, null, null, null]"#),
        ("/api/v1/ack/batch", r#"{"acknowledgments": [["t", null, null, null, null, null]]}"#),
        ("/api/v1/transaction", r#"{"operations": [["push"]]}"#),
        ("/api/v1/transaction", r#"{"operations": [{"type": "push", "items": [["q", "p", 1, "t", null]]}]}"#),
    ] {
        let (status, answer) = broker.post_raw(path, body.to_owned()).await;
        assert_eq!(status, 400, "{body}: {answer}");
        assert!(answer["error"].as_str().expect("text").contains("an object"), "{body}: {answer}");
    }
    assert_eq!(broker.rows("select 1 from queen.queues", &[]).await.len(), 0, "nothing was stored");
}

#[tokio::test]
async fn a_query_that_is_no_text_is_refused() {
    let broker = Broker::start().await;
    for query in ["consumerGroup=%ff", "consumerGroup=g&batch=1&x=%C3", "consumerGroup=%c3%"] {
        let (status, answer) = broker.get(&format!("/api/v1/pop/queue/q?{query}")).await;
        assert_eq!(status, 400, "{query}: {answer}");
        assert!(answer["error"].as_str().expect("text").starts_with("query: "), "{answer}");
    }
    assert_eq!(broker.get("/api/v1/pop/queue/q?consumerGroup=100%&x=%zz%C3%a9").await.0, 204);
}

#[tokio::test]
async fn a_body_that_stops_coming_is_408() {
    let broker = Broker::with(Settings { body_pause_max: Duration::from_millis(100), ..Settings::default() }).await;
    let address = broker.url.strip_prefix("http://").expect("a URL").to_owned();
    let answer = tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(address).expect("connects");
        stream.set_read_timeout(Some(PATIENCE)).expect("is set");
        let head = b"POST /api/v1/push HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n{";
        stream.write_all(head).expect("sends");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("the server answers and closes");
        answer
    });
    let answer = answer.await.expect("no panic");
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains(r#"{"error":"#), "{answer}");
}

#[tokio::test]
async fn a_body_in_small_pieces_is_put_together() {
    let broker = Broker::with(Settings { body_bytes_max: 10_000, ..Settings::default() }).await;
    let body = json!({"items": [{"queue": "q", "payload": "x".repeat(5_000)}]}).to_string();
    for (times, expected) in [(1, 201), (2, 413)] {
        let pieces: Vec<Result<_, std::io::Error>> =
            body.repeat(times).bytes().map(|byte| Ok(Frame::data(Bytes::from(vec![byte])))).collect();
        let stream = reqwest::Body::wrap(StreamBody::new(futures_util::stream::iter(pieces)));
        assert_eq!(broker.post_raw("/api/v1/push", stream).await.0, expected);
    }
}

#[tokio::test]
async fn health_does_not_wait_long_for_a_database_that_is_busy() {
    let broker = Broker::start().await;
    let mut held = Vec::new();
    for _ in 0..broker.app.db.status().max_size {
        held.push(broker.app.db.conn().await.expect("a connection"));
    }
    let start = Instant::now();
    let (status, body) = broker.get("/health").await;
    assert_eq!((status, &body["database"]), (503, &json!("disconnected")));
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    held.clear();
    assert_eq!(broker.get("/health").await.0, 200);
}
