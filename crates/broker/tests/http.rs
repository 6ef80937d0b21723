//! The wire, route by route.

mod support;

use support::Broker;

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
