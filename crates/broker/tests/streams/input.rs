//! Wrong cycles are refused by the name of what is wrong, and change nothing.

use serde_json::{Value, json};

use super::support::Broker;
use super::support::lane::Lane;
use super::{commit, done, everything, idle, query, result, results, state, upsert, with};

/// Asserts a 400 whose text names `place`.
async fn bad(broker: &Broker, body: Value, place: &str) {
    let (status, answer) = broker.post("/streams/v1/cycle", body).await;
    assert_eq!((status, &answer["success"]), (400, &json!(false)), "{place}: {answer}");
    assert!(answer["error"].as_str().expect("a text").contains(place), "{place}: {answer}");
}

#[tokio::test]
async fn what_is_wrong_is_named() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    let id = query(&broker, "s").await;
    let valid = with(&idle(id, &lane), json!({"ack": done(1)}));
    let before = everything(&broker).await;
    let (long, huge) = ("x".repeat(256), "v".repeat(1 << 20));
    let deep: Value = serde_json::from_str(&format!("{}{}", "[".repeat(120), "]".repeat(120))).expect("JSON");
    let deeper = json!([[[[[[[[[deep]]]]]]]]]);
    for (field, value, place) in [
        ("query_id", json!(null), "query_id"),
        ("query_id", json!("s"), "query_id"),
        ("partition_id", json!(null), "partition_id"),
        ("partition_id", json!(7), "partition_id"),
        ("consumer_group", json!(long), "consumer_group"),
        ("consumer_group", json!(["g"]), "consumer_group"),
        ("release_lease", json!("no"), "release_lease"),
        ("state_ops", json!({}), "state_ops"),
        ("state_ops", json!([7]), "state_ops[0]"),
        ("state_ops", json!([{"key": "k"}]), "state_ops[0].type"),
        ("state_ops", json!([upsert("a", &json!(1)), {"type": "delete"}]), "state_ops[1].key"),
        ("state_ops", json!([{"type": "upsert", "key": "k"}]), "state_ops[0].value"),
        ("state_ops", json!([upsert(&"k".repeat(2049), &json!(1))]), "state_ops[0].key"),
        ("state_ops", json!([upsert("k", &json!(huge))]), "state_ops[0].value"),
        ("state_ops", json!([upsert("k", &deeper)]), "state_ops[0].value"),
        ("push_items", json!("x"), "push_items"),
        ("push_items", json!([result("p", &json!(1)), {"payload": 1}]), "push_items[1].queue"),
        ("push_items", json!([{"queue": "out"}]), "push_items[0].payload"),
        ("push_items", json!([{"queue": long, "payload": 1}]), "push_items[0].queue"),
        ("push_items", json!([result("a\u{1f}", &json!(1))]), "push_items[0].partition"),
        ("push_items", json!([result("p", &deeper)]), "push_items[0].payload"),
        ("ack", json!("m0"), "ack"),
        ("ack", json!({"leaseId": 7}), "ack.leaseId"),
        ("ack", json!({"leaseId": "l", "transactionId": 7}), "ack.transactionId"),
        ("ack", json!({"leaseId": "l", "status": 7}), "ack.status"),
        ("ack", json!({"leaseId": "l", "count": -1}), "ack.count"),
        ("ack", json!({"leaseId": "l", "count": 1.5}), "ack.count"),
    ] {
        bad(&broker, with(&valid, json!({ field: value })), place).await;
    }
    for body in ["", "[]", "{", r#"{"query_id": "#] {
        let (status, answer) = broker.post_raw("/streams/v1/cycle", body).await;
        assert_eq!((status, &answer["success"]), (400, &json!(false)), "{answer}");
    }
    let lone = format!(
        r#"{{"query_id": "{id}", "partition_id": "{}", "state_ops": [{{"type": "delete", "key": "\ud800"}}]}}"#,
        lane.id
    );
    assert_eq!(broker.post_raw("/streams/v1/cycle", lone).await.0, 400, "a key is whole text");
    assert_eq!(everything(&broker).await, before);
}

#[tokio::test]
async fn bounds_hold_at_their_edge() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let id = query(&broker, "s").await;
    let base = idle(id, &lane);
    let delete = json!({"type": "delete", "key": "k"});
    bad(&broker, with(&base, json!({"state_ops": vec![delete; 100_001]})), "state_ops").await;
    let item = json!({"queue": "out", "payload": 1});
    bad(&broker, with(&base, json!({"push_items": vec![item; 100_001]})), "push_items").await;
    let items: Vec<Value> = (0..10_001).map(|n| result(&n.to_string(), &json!(n))).collect();
    bad(&broker, with(&base, json!({"push_items": items})), "push_items[10000].partition").await;

    let largest = json!("v".repeat((1 << 20) - 2));
    let ops: Vec<Value> = (0..2000).map(|n| upsert(&n.to_string(), &json!(n))).collect();
    let items: Vec<Value> = (0..1000).map(|n| result(&(n % 300).to_string(), &json!(n))).collect();
    let ops = [ops, vec![upsert("largest", &largest)]].concat();
    let answer = commit(&broker, &with(&base, json!({"state_ops": ops, "push_items": items}))).await;
    assert_eq!(answer["state_ops_applied"], 2001);
    assert_eq!(answer["push_results"].as_array().map(Vec::len), Some(1000));
    assert_eq!(results(&broker).await.len(), 1000);
    assert_eq!(state(&broker, id, &lane, json!({"keys": ["largest"]})).await, [("largest".to_owned(), largest)]);
}
