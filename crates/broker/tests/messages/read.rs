//! One message: live, or as its dead letter.

use serde_json::json;
use uuid::Uuid;

use super::support::Broker;
use super::support::lane::{LEASE, Lane};
use super::{commit, escaped, file};

#[tokio::test]
async fn a_live_message_is_read_whole() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let sent = r#"{ "n": 1.0, "n": "\u0000" }"#;
    lane.write(&[("m0", "0"), ("a/b %é?#", sent), ("m2", "2")]).await;
    commit(&lane, "g", 1).await;
    commit(&lane, "h", 0).await;
    lane.lease_as("h", LEASE, 2, 60.0).await;
    broker.execute("update queen.log_consumers set batch_retry_count = 2 where consumer_group = 'h'", &[]).await;
    let path = format!("/api/v1/messages/{}/{}", lane.id, escaped("a/b %é?#"));
    let (status, bytes) = broker.get_bytes(&path).await;
    let text = String::from_utf8(bytes).expect("UTF-8");
    assert!(status == 200 && text.contains(&format!(r#""data":{sent},"payload":{sent}"#)), "{text}");
    let (_, body) = broker.get(&path).await;
    for (key, value) in [
        ("transactionId", json!("a/b %é?#")),
        ("partitionId", json!(lane.id)),
        ("partition", json!("p")),
        ("queue", json!("q")),
        ("queuePath", json!("q/p")),
        ("offset", json!(1)),
        ("status", json!("processing")),
        ("errorMessage", json!(null)),
        ("retryCount", json!(2)),
        ("isEncrypted", json!(false)),
        ("mode", json!({"hasQueueMode": false, "busGroupsCount": 2, "type": "bus"})),
    ] {
        assert_eq!(body[key], value, "{key}");
    }
    assert_eq!((&body["queueConfig"]["leaseTime"], &body["queueConfig"]["retryLimit"]), (&json!(60), &json!(3)));
    let groups = body["consumerGroups"].as_array().expect("a list");
    assert_eq!(
        (&groups[0]["name"], &groups[0]["consumed"], &groups[0]["leaseExpiresAt"]),
        (&json!("g"), &json!(true), &json!(null))
    );
    assert_eq!((&groups[1]["name"], &groups[1]["consumed"]), (&json!("h"), &json!(false)));
    assert_eq!(groups[1]["leaseExpiresAt"], body["leaseExpiresAt"]);
    // A client that does not escape the slash.
    lane.write(&[("x/y", "\"raw\"")]).await;
    assert_eq!(broker.get(&format!("/api/v1/messages/{}/x/y", lane.id)).await.1["data"], "raw");
}

#[tokio::test]
async fn the_newest_message_of_a_transaction_id_is_read() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    lane.write(&[("again", "1"), ("other", "2")]).await;
    lane.write(&[("again", "3")]).await;
    let (_, body) = broker.get(&format!("/api/v1/messages/{}/again", lane.id)).await;
    assert_eq!((&body["data"], &body["offset"]), (&json!(3), &json!(2)));
}

#[tokio::test]
async fn a_dead_letter_is_read_once_its_segment_is_gone() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    lane.append(3).await;
    file(&lane, "g", 1, "m1", Some("{ \"kept\": \"\\u0000\" }")).await;
    file(&lane, "g", 2, "m2", None).await;
    let read = async |id: &str| broker.get(&format!("/api/v1/messages/{}/{id}", lane.id)).await;
    let (status, live) = read("m1").await;
    assert_eq!((status, &live["data"], &live["status"]), (200, &json!({"n": 1}), &json!("dead_letter")));
    assert_eq!((&live["errorMessage"], &live["retryCount"]), (&json!("boom"), &json!(0)));
    broker.execute("delete from queen.log_segments", &[]).await;
    let (status, dead) = read("m1").await;
    assert_eq!((status, &dead["data"], &dead["status"]), (200, &json!({"kept": "\0"}), &json!("dead_letter")));
    assert_eq!((&dead["errorMessage"], &dead["offset"]), (&json!("boom"), &json!(1)));
    let (status, lost) = read("m2").await;
    assert_eq!((status, &lost["data"]), (200, &json!(null)), "its payload was lost");
    let (status, body) = read("m0").await;
    assert_eq!((status, body), (404, json!({"error": "Message not found"})));
}

#[tokio::test]
async fn a_name_that_is_none_is_a_400_and_one_that_is_unknown_a_404() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    let (status, body) = broker.get("/api/v1/messages/no-uuid/t").await;
    assert_eq!((status, body), (400, json!({"error": "partitionId: must be a UUID"})));
    let path = |id: &str| format!("/api/v1/messages/{}/{}", lane.id, escaped(id));
    for id in ["\0", "a\nb"] {
        assert_eq!(broker.get(&path(id)).await.0, 400);
        assert_eq!(broker.delete(&path(id)).await.0, 400);
        assert_eq!(broker.post(&format!("{}/retry", path(id)), json!({})).await.0, 400);
    }
    assert_eq!(broker.get(&format!("/api/v1/messages/{}/%ff", lane.id)).await.0, 400, "no UTF-8");
    let nowhere = format!("/api/v1/messages/{}/m0", Uuid::from_u128(1));
    for action in ["", "/retry", "/dlq"] {
        let (got, posted) = (broker.get(&nowhere).await.0, broker.post_raw(&format!("{nowhere}{action}"), "").await);
        assert_eq!((got, posted.0), (404, 404), "{action}: {}", posted.1);
    }
    let (status, body) = broker.get(&path("unknown")).await;
    assert_eq!((status, body), (404, json!({"error": "Message not found"})), "beside a cursor");
    let (status, body) = broker.post(&path("m0"), json!({})).await;
    assert_eq!((status, &body["code"]), (404, &json!("no_such_route")));
}
