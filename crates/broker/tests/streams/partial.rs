//! A gate lets a part of its batch through: the rest stays leased, and comes again when the lease is over.

use ebbtide::telemetry::{Flusher, Identity};
use serde_json::{Value, json};

use super::support::Broker;
use super::support::lane::{GROUP, Lane};
use super::{commit, done, idle, query, refused, result, results, with};

/// A cycle that lets `count` messages through and keeps the lease.
fn part(base: &Value, count: i64) -> Value {
    with(base, json!({"release_lease": false, "ack": done(count), "push_items": [result("p", &json!(count))]}))
}

#[tokio::test]
async fn the_cursor_passes_so_many_and_the_lease_stays() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 5).await;
    let id = query(&broker, "s").await;
    let base = idle(id, &lane);
    let answer = commit(&broker, &part(&base, 2)).await;
    let expected = json!({"success": true, "count": 2, "lease_released": false, "dlq": false});
    assert_eq!(answer["ack_result"], expected);
    lane.leased_at(1, 4).await;
    let path = format!("queue/q/partition/p?consumerGroup={GROUP}&batch=10");
    assert_eq!(broker.pop_ids(&path).await, Vec::<String>::new(), "nobody else gets the rest");
    commit(&broker, &part(&base, 1)).await;
    lane.leased_at(2, 4).await;
    commit(&broker, &part(&base, 0)).await;
    lane.leased_at(2, 4).await;
    broker.expire_leases().await;
    assert_eq!(broker.pop_ids(&path).await, ["m3", "m4"], "the rest, in order");
    assert_eq!(results(&broker).await.len(), 3);
}

#[tokio::test]
async fn all_of_a_batch_may_be_passed_and_the_lease_still_stays() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    let id = query(&broker, "s").await;
    commit(&broker, &part(&idle(id, &lane), 2)).await;
    lane.leased_at(1, 1).await;
    assert!(refused(&broker, &part(&idle(id, &lane), 1)).await.contains("of which 0 are left"));
    let answer = commit(&broker, &with(&idle(id, &lane), json!({"ack": done(0)}))).await;
    assert_eq!(answer["ack_result"]["lease_released"], true);
    lane.free_at(1, 0).await;
}

#[tokio::test]
async fn more_than_is_left_is_refused() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    let id = query(&broker, "s").await;
    let error = refused(&broker, &part(&idle(id, &lane), 4)).await;
    assert_eq!(error, "count 4 is beyond the leased batch, of which 3 are left");
    for _ in 0..3 {
        assert!(refused(&broker, &part(&idle(id, &lane), i64::MAX)).await.contains("of which 3 are left"));
    }
    lane.leased_at(-1, 2).await;
    let identity = Identity { hostname: "h".to_owned(), port: 6632 };
    let mut flusher = Flusher::new(broker.app.telemetry.clone(), broker.app.db.clone(), identity);
    flusher.flush().await.expect("what was claimed fits into the metrics");
}

#[tokio::test]
async fn only_messages_that_exist_are_counted() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    for _ in 0..3 {
        lane.append(2).await;
    }
    lane.lease(5).await;
    broker.delete_below(lane.id, 2).await;
    let id = query(&broker, "s").await;
    commit(&broker, &part(&idle(id, &lane), 1)).await;
    lane.leased_at(2, 5).await;
    assert!(refused(&broker, &part(&idle(id, &lane), 4)).await.contains("of which 3 are left"));
    let consumed: i64 = broker.row("select total_consumed from queen.log_consumers", &[]).await.get(0);
    assert_eq!(consumed, 1, "what was deleted was not consumed");
}

#[tokio::test]
async fn progress_leaves_failures_behind() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    broker.execute("update queen.log_consumers set batch_retry_count = 2", &[]).await;
    let id = query(&broker, "s").await;
    commit(&broker, &part(&idle(id, &lane), 1)).await;
    lane.leased_at(0, 2).await;
}

#[tokio::test]
async fn a_partial_acknowledgement_needs_a_count_and_a_live_lease() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    let id = query(&broker, "s").await;
    let mut body = part(&idle(id, &lane), 1);
    body["ack"]["count"] = json!(null);
    let (status, answer) = broker.post("/streams/v1/cycle", body).await;
    assert_eq!((status, &answer["success"]), (400, &json!(false)));
    assert!(answer["error"].as_str().expect("a text").contains("ack.count"), "{answer}");
    broker.expire_leases().await;
    assert_eq!(refused(&broker, &part(&idle(id, &lane), 1)).await, "invalid or expired lease");
}
