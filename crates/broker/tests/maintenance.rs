//! Maintenance of pushes and pops: cluster-wide, persistent, and over when an operator says so.

mod support;

use serde_json::{Value, json};
use support::away::Postgres;
use support::{Broker, until};

#[tokio::test]
async fn pushes_are_spooled_on_every_server_until_it_is_over() {
    let postgres = Postgres::start().await;
    let (a, b) = (postgres.serve("a", &[]).await, postgres.serve("b", &[]).await);
    a.until_ready().await;
    b.until_ready().await;
    let (status, body) = a.post("/api/v1/system/maintenance", json!({"enabled": true})).await;
    assert_eq!((status, &body["maintenanceMode"], &body["bufferHealthy"]), (200, &json!(true), &json!(true)), "{body}");
    b.until("the other server hears of it", "/api/v1/system/maintenance", |_, body| body["maintenanceMode"] == true)
        .await;
    for (server, id) in [(&a, "of-a"), (&b, "of-b")] {
        let item = json!({"queue": "q", "payload": id, "transactionId": id});
        let (status, body) = server.post("/api/v1/push", json!({"items": [item]})).await;
        assert_eq!((status, &body[0]["status"]), (201, &json!("buffered")));
        let (_, state) = server.get("/api/v1/system/maintenance").await;
        assert_eq!((&state["bufferedMessages"], &state["bufferStats"]["pending"]), (&json!(1), &json!(1)));
        assert!(server.pop_all("q").await.is_empty());
    }
    // It outlives the servers.
    b.kill();
    let b = postgres.serve("b", &[]).await;
    b.until_ready().await;
    let (_, state) = b.get("/api/v1/system/shared-state").await;
    assert_eq!((&state["enabled"], &state["maintenance_mode"]), (&json!(false), &json!(true)));
    assert_eq!(b.get("/api/v1/status/buffers").await.1["pending"], 1, "nothing is replayed meanwhile");

    a.post("/api/v1/system/maintenance", json!({"enabled": false})).await;
    a.until_replayed().await;
    b.until_replayed().await;
    let mut ids: Vec<Value> = b.pop_all("q").await.iter().map(|message| message["transactionId"].clone()).collect();
    ids.sort_by_key(ToString::to_string);
    assert_eq!(ids, ["of-a", "of-b"]);
    a.stop();
    b.stop();
}

#[tokio::test]
async fn pops_find_nothing_until_it_is_over() {
    let t = Broker::start().await;
    t.post("/api/v1/push", json!({"items": [{"queue": "q", "payload": 1}]})).await;
    let (_, body) = t.post("/api/v1/system/maintenance/pop", json!({"enabled": true})).await;
    assert_eq!(body["popMaintenanceMode"], true);
    assert_eq!(t.get("/api/v1/system/maintenance/pop").await.1["popMaintenanceMode"], true);
    assert_eq!(t.get("/api/v1/pop/queue/q").await.0, 204);
    for wait in ["", "&wait=true&timeout=100"] {
        let path = format!("/api/v1/pop/queue/q?consumerGroup=g&conflation=true{wait}");
        let (status, body) = t.get(&path).await;
        let said = (&body["messages"], &body["paused"], &body["conflation"]);
        assert_eq!((status, said), (200, (&json!([]), &json!(true), &json!(true))), "{body}");
    }
    assert_eq!(t.get("/api/v1/pop/queue/q?wait=true&timeout=200").await.0, 204);
    let url = format!("{}/api/v1/pop/queue/q?wait=true&timeout=60000", t.url);
    let waiting = tokio::spawn(async move { reqwest::get(url).await.expect("answers").status() });
    until("it is parked", || t.app.wake.parked() == 1).await;
    t.post("/api/v1/system/maintenance/pop", json!({"enabled": false})).await;
    assert_eq!(waiting.await.expect("no panic"), 200, "whoever waited is served");
}

#[tokio::test]
async fn without_a_spool_push_maintenance_refuses_pushes() {
    let t = Broker::start().await;
    t.post("/api/v1/system/maintenance", json!({"enabled": true})).await;
    let (status, body) = t.post("/api/v1/push", json!({"items": [{"queue": "q", "payload": 1}]})).await;
    assert_eq!(status, 503);
    assert!(body["error"].as_str().expect("text").contains("no spool"), "{body}");
}

#[tokio::test]
async fn a_switch_takes_true_or_false_and_nothing_else() {
    let t = Broker::start().await;
    for path in ["maintenance", "maintenance/pop", "ephemeral"] {
        for body in [json!({}), json!({"enabled": "true"}), json!({"enabled": null}), json!({"enabled": 1})] {
            let (status, answer) = t.post(&format!("/api/v1/system/{path}"), body).await;
            assert_eq!(status, 400, "{path}");
            assert!(answer["error"].as_str().expect("text").contains("enabled"), "{answer}");
        }
    }
    assert_eq!(t.get("/api/v1/system/maintenance").await.1["maintenanceMode"], false);
}
