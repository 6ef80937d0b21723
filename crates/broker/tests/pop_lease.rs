//! Leases kept longer, and given back.

mod support;

use ebbtide::http::Settings;
use jiff::Timestamp;
use serde_json::{Value, json};
use support::{Broker, Database};

async fn lease(b: &Broker, query: &str) -> String {
    let (status, body) = b.pop(query).await;
    assert_eq!(status, 200, "{body}");
    body["leaseId"].as_str().expect("an id").to_owned()
}

async fn extend(b: &Broker, lease_id: &str, body: Value) -> Value {
    let (status, body) = b.post(&format!("/api/v1/lease/{lease_id}/extend"), body).await;
    assert_eq!(status, 200, "{body}");
    body
}

/// Seconds from now until the earliest and the latest expiry.
async fn expiries(b: &Broker) -> (i32, i32) {
    let query = "select min(s), max(s) from (
        select round(extract(epoch from lease_expires_at - clock_timestamp()))::int as s
        from queen.log_consumers where batch_end is not null) e";
    let row = b.row(query, &[]).await;
    (row.get(0), row.get(1))
}

fn is_about(seconds: i32, wanted: i32) -> bool {
    (wanted - 30..=wanted).contains(&seconds)
}

#[tokio::test]
async fn all_partitions_of_a_lease_are_extended_and_none_is_shortened() {
    let b = Broker::start().await;
    for partition in ["a", "b", "c"] {
        b.store("q", partition, 1).await;
    }
    let lease_id = lease(&b, "queue/q?partitions=3&leaseSeconds=50").await;
    b.execute(
        "update queen.log_consumers set lease_expires_at = now() + interval '1 day' where partition_id =
        (select id from queen.log_partitions where name = 'b')",
        &[],
    )
    .await;
    // No body at all, as the published client sends it.
    let (status, body) = b.post_raw(&format!("/api/v1/lease/{lease_id}/extend"), Vec::new()).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!((&body["leaseId"], &body["success"], &body["renewed"]), (&json!(lease_id), &json!(true), &json!(3)));
    assert_eq!((&body["expiresAt"], &body["lease_expires_at"]), (&body["newExpiresAt"], &body["newExpiresAt"]));
    let text = body["newExpiresAt"].as_str().expect("a time");
    assert_eq!((text.len(), &text[26..]), (27, "Z"));
    let earliest: Timestamp = b.row("select min(lease_expires_at) from queen.log_consumers", &[]).await.get(0);
    assert_eq!(text.parse::<Timestamp>().expect("a time"), earliest, "the earliest is reported");
    let (low, high) = expiries(&b).await;
    assert!(is_about(low, 60) && is_about(high, 86_400), "{low} {high}");
    extend(&b, &lease_id, json!({"seconds": 300})).await;
    assert!(is_about(expiries(&b).await.0, 300));
    extend(&b, &lease_id, json!({"seconds": 1})).await;
    assert!(is_about(expiries(&b).await.0, 300), "never shortened");
}

#[tokio::test]
async fn only_a_live_lease_of_this_id_is_extended() {
    let b = Broker::start().await;
    b.store("q", "p", 1).await;
    let first = lease(&b, "queue/q").await;
    b.expire_leases().await;
    let nothing = |id: &str| {
        json!({"leaseId": id, "success": false, "renewed": 0, "newExpiresAt": null, "expiresAt": null,
            "lease_expires_at": null})
    };
    assert_eq!(extend(&b, &first, json!({})).await, nothing(&first), "expired");
    let second = lease(&b, "queue/q").await;
    assert_eq!(extend(&b, &first, json!({})).await, nothing(&first), "taken over");
    assert_eq!(extend(&b, &second, json!({})).await["renewed"], 1);
    for id in ["none", "00000000-0000-4000-8000-000000000000", &uuid::Uuid::now_v7().to_string()] {
        assert_eq!(extend(&b, id, json!({})).await, nothing(id));
    }
    b.complete_leases().await;
    assert_eq!(extend(&b, &second, json!({})).await, nothing(&second), "completed");
}

#[tokio::test]
async fn seconds_are_checked() {
    let b = Broker::start().await;
    for body in [r#"{"seconds":0}"#, r#"{"seconds":-5}"#, r#"{"seconds":604801}"#] {
        let (status, answer) = b.post_raw("/api/v1/lease/x/extend", body).await;
        assert_eq!(status, 400, "{body}");
        assert!(answer["error"].as_str().expect("text").contains("seconds"), "{answer}");
    }
    for body in [r#"{"seconds":"5"}"#, "{", r#"{"seconds":1e99}"#] {
        assert_eq!(b.post_raw("/api/v1/lease/x/extend", body).await.0, 400, "{body}");
    }
    assert_eq!(b.post_raw("/api/v1/lease/x/extend", r#"{"seconds":null}"#).await.0, 200);
}

#[tokio::test]
async fn any_server_extends_any_lease() {
    let first = Broker::start().await;
    let same = Database { name: first.database.name.clone(), target: first.database.target.clone() };
    let second = Broker::on(same, Settings::default()).await;
    for partition in ["a", "b"] {
        first.store("q", partition, 1).await;
    }
    let lease_id = lease(&first, "queue/q?partitions=2&consumerGroup=g&subscriptionMode=all&leaseSeconds=5").await;
    let other = lease_id.as_str();
    let unknown = uuid::Uuid::now_v7().to_string();
    let (a, b, none) = tokio::join!(
        extend(&second, other, json!({"seconds": 100})),
        extend(&second, other, json!({"seconds": 100})),
        extend(&second, &unknown, json!({}))
    );
    assert_eq!((&a["renewed"], &b["renewed"], &none["renewed"]), (&json!(2), &json!(2), &json!(0)));
    assert!(is_about(expiries(&first).await.0, 100));
}

#[tokio::test]
async fn a_released_lease_is_as_if_never_given() {
    let b = Broker::start().await;
    let stored = b.store("q", "p", 2).await;
    b.store("q", "other", 1).await;
    let lease_id = lease(&b, "queue/q/partition/p").await;
    lease(&b, "queue/q/partition/other").await;
    b.execute("update queen.log_consumers set batch_retry_count = 1", &[]).await;
    let release = "select queen.log_release_lease_v1($1)";
    assert_eq!(b.row(release, &[&"nobody"]).await.get::<_, i32>(0), 0);
    assert_eq!(b.row(release, &[&lease_id]).await.get::<_, i32>(0), 1);
    assert_eq!(b.cursor(stored.partition_id, "__QUEUE_MODE__").await, Some((-1, None, 0, false)));
    let query = "select batch_retry_count from queen.log_consumers where partition_id = $1";
    assert_eq!(b.row(query, &[&stored.partition_id]).await.get::<_, i32>(0), 1, "nothing is charged");
    assert_eq!(b.pop_ids("queue/q?partitions=2").await, ["p-0", "p-1"], "at once, and only this one");
    assert_eq!(b.cursor(stored.partition_id, "__QUEUE_MODE__").await, Some((-1, Some(1), 1, true)));
}
