//! A cycle happens as a whole, once: its lease says so.

use serde_json::json;
use uuid::Uuid;

use super::support::Broker;
use super::support::lane::{Cursor, GROUP, LEASE, Lane};
use super::{commit, delete, done, idle, query, refused, result, results, state, upsert, with};

#[tokio::test]
async fn state_results_and_cursor_change_together() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    let id = query(&broker, "s").await;
    let ops = json!([upsert("a", &json!({"acc": 1})), upsert("b", &json!(2)), delete("b"), delete("never there")]);
    let items = json!([result("x", &json!({"n": 1})), {"queue": "out", "payload": [2]}, result("x", &json!(null))]);
    let body = with(&idle(id, &lane), json!({"state_ops": ops, "push_items": items, "ack": done(3)}));
    let answer = commit(&broker, &body).await;
    let ids: Vec<&str> = (0..3).map(|n| answer["push_results"][n]["message_id"].as_str().expect("an id")).collect();
    let pushed = |index: usize| json!({"index": index, "message_id": ids[index], "transaction_id": ids[index], "queueName": "out", "status": "queued"});
    let expected = json!({
        "success": true, "query_id": id, "partition_id": lane.id, "queueName": "q", "state_ops_applied": 4,
        "push_results": [pushed(0), pushed(1), pushed(2)],
        "ack_result": {"success": true, "count": 3, "lease_released": true, "dlq": false}});
    assert_eq!(answer, expected);
    assert_eq!(state(&broker, id, &lane, json!({})).await, [("a".to_owned(), json!({"acc": 1}))]);
    let stored = |partition: &str, payload: &str| (partition.to_owned(), payload.to_owned());
    let all = [stored("Default", "[2]"), stored("x", r#"{"n":1}"#), stored("x", "null")];
    assert_eq!(results(&broker).await, all);
    lane.free_at(2, 0).await;
    let popped = broker.pop_ids("queue/out/partition/x?batch=10").await;
    assert_eq!(popped, [ids[0], ids[2]], "in the order in which they were sent");
    // Found again by what an acknowledgement finds them by.
    let sidecar = "select count(*) from queen.log_txns t join queen.log_segments s using (partition_id, base_offset)";
    assert_eq!(broker.row(sidecar, &[]).await.get::<_, i64>(0), 3, "source and two sinks");
}

#[tokio::test]
async fn a_lease_that_is_not_held_undoes_everything() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    let id = query(&broker, "s").await;
    let body = with(
        &idle(id, &lane),
        json!({"state_ops": [upsert("k", &json!(1))], "push_items": [result("p", &json!(1))], "ack": done(2)}),
    );
    let lease =
        |lease: serde_json::Value| with(&body, json!({"ack": {"leaseId": lease, "status": "completed", "count": 2}}));
    for wrong in [lease(json!("other")), lease(json!(null)), lease(json!("")), lease(json!("\0"))] {
        assert_eq!(refused(&broker, &wrong).await, "invalid or expired lease", "{wrong}");
    }
    let stranger = with(&body, json!({"consumer_group": "nobody"}));
    assert_eq!(refused(&broker, &stranger).await, "invalid or expired lease");
    broker.expire_leases().await;
    assert_eq!(refused(&broker, &body).await, "invalid or expired lease");
    assert_eq!(results(&broker).await, [], "not even the queue was made");

    lane.lease(1).await;
    commit(&broker, &body).await;
    assert_eq!(refused(&broker, &body).await, "invalid or expired lease", "the same cycle again");
    assert_eq!(results(&broker).await.len(), 1);
}

#[tokio::test]
async fn what_does_not_exist_is_said() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    let id = query(&broker, "s").await;
    let body = with(&idle(id, &lane), json!({"push_items": [result("p", &json!(1))], "ack": done(1)}));
    let unknown = json!({"partition_id": Uuid::from_u128(7)});
    assert_eq!(refused(&broker, &with(&body, unknown)).await, "partition not found");
    assert_eq!(refused(&broker, &with(&body, json!({"query_id": Uuid::from_u128(7)}))).await, "query not found");
    let op = json!({"state_ops": [upsert("a", &json!(1)), {"type": "increment", "key": "k", "value": 1}]});
    assert_eq!(refused(&broker, &with(&body, op)).await, "unknown state op type: increment");
    commit(&broker, &body).await;
}

#[tokio::test]
async fn any_other_status_gives_the_batch_back_uncharged() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    let id = query(&broker, "s").await;
    broker.execute("update queen.log_consumers set batch_retry_count = 2", &[]).await;
    for status in ["failed", "retry", "dlq", "Completed"] {
        lane.lease(1).await;
        let ack = json!({"leaseId": LEASE, "status": status, "count": 2});
        let body = with(&idle(id, &lane), json!({"ack": ack, "state_ops": [upsert("k", &json!(status))]}));
        let answer = commit(&broker, &body).await;
        let expected = json!({"success": true, "count": 0, "lease_released": true, "dlq": false});
        assert_eq!(answer["ack_result"], expected);
        lane.free_at(-1, 2).await;
        assert_eq!(state(&broker, id, &lane, json!({})).await, [("k".to_owned(), json!(status))]);
    }
    assert_eq!(lane.filed().await, []);
}

#[tokio::test]
async fn a_completed_batch_forgets_failures_and_needs_no_count() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 4).await;
    let id = query(&broker, "s").await;
    broker.execute("update queen.log_consumers set batch_retry_count = 2", &[]).await;
    lane.lease(2).await;
    let answer = commit(&broker, &with(&idle(id, &lane), json!({"ack": {"leaseId": LEASE}}))).await;
    assert_eq!(answer["ack_result"]["count"], 3);
    lane.free_at(2, 0).await;
}

#[tokio::test]
async fn a_cycle_without_an_acknowledgement_touches_no_cursor() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    let id = query(&broker, "s").await;
    let body =
        with(&idle(id, &lane), json!({"push_items": [result("p", &json!(1))], "state_ops": [upsert("k", &json!(1))]}));
    let answer = commit(&broker, &body).await;
    assert_eq!(answer["ack_result"], json!(null));
    lane.leased_at(-1, 1).await;
    broker.execute("delete from queen.log_consumers", &[]).await;
    commit(&broker, &body).await;
    assert_eq!(results(&broker).await.len(), 2);
}

/// The client repeats a request whose answer it did not get, and two runners may flush the same window.
#[tokio::test]
async fn windows_that_are_flushed_twice_are_pushed_once() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let id = query(&broker, "s").await;
    commit(&broker, &with(&idle(id, &lane), json!({"state_ops": [upsert("w1", &json!(1)), upsert("w2", &json!(2))]})))
        .await;
    let flush = with(
        &idle(id, &lane),
        json!({"state_ops": [delete("w1"), delete("w2")], "push_items": [result("p", &json!(1)), result("p", &json!(2))]}),
    );
    commit(&broker, &flush).await;
    let error = refused(&broker, &flush).await;
    assert!(error.starts_with("state already gone: 2 of the keys"), "{error}");
    assert_eq!(results(&broker).await.len(), 2);
    // A row that is made in the same cycle is no proof, and neither is one that the cycle needs no proof for.
    let made = json!({"state_ops": [upsert("w3", &json!(1)), delete("w3")], "push_items": [result("p", &json!(3))]});
    commit(&broker, &with(&idle(id, &lane), made)).await;
    commit(&broker, &with(&idle(id, &lane), json!({"state_ops": [delete("w1")]}))).await;
    lane.append(1).await;
    lane.lease(0).await;
    let fenced = json!({"state_ops": [delete("w1")], "push_items": [result("p", &json!(4))], "ack": done(1)});
    commit(&broker, &with(&idle(id, &lane), fenced)).await;
    assert_eq!(results(&broker).await.len(), 4);
}

#[tokio::test]
async fn a_query_can_push_to_its_own_source() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    let id = query(&broker, "s").await;
    let items = json!([{"queue": "q", "partition": "p", "payload": {"again": 1}}]);
    commit(&broker, &with(&idle(id, &lane), json!({"push_items": items, "ack": done(2)}))).await;
    lane.free_at(1, 0).await;
    let popped = broker.pop_ids(&format!("queue/q/partition/p?consumerGroup={GROUP}&batch=10")).await;
    assert_eq!(popped.len(), 1);
}

#[tokio::test]
async fn a_cycle_without_a_group_moves_queue_mode() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    lane.append(2).await;
    lane.lease_as("__QUEUE_MODE__", LEASE, 1, 60.0).await;
    let id = query(&broker, "s").await;
    commit(&broker, &with(&idle(id, &lane), json!({"consumer_group": null, "ack": done(2)}))).await;
    assert_eq!(broker.cursor(lane.id, "__QUEUE_MODE__").await, Some((1, None, 0, false)));
}

#[tokio::test]
async fn a_batch_that_retention_took_is_completed() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    lane.append(1).await;
    lane.lease(2).await;
    broker.delete_below(lane.id, 2).await;
    let id = query(&broker, "s").await;
    let answer = commit(&broker, &with(&idle(id, &lane), json!({"ack": done(3)}))).await;
    assert_eq!(answer["ack_result"]["count"], 1, "what was there");
    let Cursor { committed, worker, .. } = lane.cursor().await;
    assert_eq!((committed, worker), (2, None));
}
