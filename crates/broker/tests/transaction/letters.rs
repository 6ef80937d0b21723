//! Failures inside a transaction: they dead-letter like any other, and commit with the rest.

use serde_json::{Value, json};

use super::support::Broker;
use super::support::lane::{Filed, GROUP, LEASE, Lane};
use super::{ack, commit, everything, post, push, stored};

#[tokio::test]
async fn a_failure_with_tries_left_is_charged_and_commits() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    let results = commit(&broker, json!([ack(&lane, "m0", "failed"), push("out", "t")])).await;
    assert_eq!((&results[0]["success"], &results[0]["dlq"]), (&json!(true), &json!(false)));
    lane.free_at(-1, 1).await;
    assert_eq!(stored(&broker, "out").await.len(), 1);
}

#[tokio::test]
async fn exhausted_messages_are_filed_with_their_payloads_and_everything_commits() {
    let broker = Broker::start().await;
    let odd = r#"{"b": 1.0, "a": "\u0000\ud800"}"#;
    let one = Lane::empty(&broker, "one").await;
    one.write(&[("a", "0"), ("b", odd), ("c", "2")]).await;
    one.lease(2).await;
    let two = Lane::empty(&broker, "two").await;
    two.append(1).await;
    two.lease(0).await;
    broker.execute("update queen.queues set retry_limit = 0", &[]).await;
    let mut failed = ack(&one, "b", "failed");
    failed["error"] = json!("ValueError: \0");
    let operations =
        json!([ack(&one, "a", "completed"), failed, ack(&two, "m0", "dlq"), push("out", "t"), push("q", "u")]);
    let body = post(&broker, json!({"operations": operations, "requiredLeases": [LEASE, "another"]})).await;
    assert_eq!(body["success"], true, "{body}");
    let dlq: Vec<&Value> = body["results"].as_array().expect("an array").iter().map(|result| &result["dlq"]).collect();
    assert_eq!(dlq, [&json!(false), &json!(true), &json!(true), &json!(null), &json!(null)]);
    one.free_at(1, 0).await;
    two.free_at(0, 0).await;
    let letter = |offset, id: &str, payload: &str, error: &str| Filed {
        offset,
        transaction_id: id.to_owned(),
        payload: Some(payload.to_owned()),
        error: error.to_owned(),
        retries: 0,
    };
    assert_eq!(one.filed().await, [letter(1, "b", odd, "ValueError: \\u0000")]);
    assert_eq!(two.filed().await, [letter(0, "m0", "{\"n\": 0}", "Dead-lettered by the consumer")]);
    assert_eq!(stored(&broker, "out").await.len(), 1, "pushed once, though it took two calls");
}

#[tokio::test]
async fn a_message_whose_segment_is_gone_does_not_stop_the_transaction() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    broker.execute("delete from queen.log_segments", &[]).await;
    commit(&broker, json!([ack(&lane, "m0", "dlq"), push("out", "t")])).await;
    let letter = lane.filed().await.remove(0);
    assert_eq!(letter.payload, None);
    assert!(letter.error.contains("the payload is lost"), "{}", letter.error);
}

#[tokio::test]
async fn without_a_lease_a_dead_letter_is_filed_too() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    lane.ack(&[("m0", "retry")]).await;
    let results = commit(&broker, json!([ack(&lane, "m0", "dlq")])).await;
    assert_eq!(results[0]["dlq"], true);
    lane.free_at(0, 0).await;
    assert_eq!(lane.filed().await.len(), 1);
}

#[tokio::test]
async fn a_needed_letter_that_is_not_brought_undoes_everything() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    let before = everything(&broker).await;
    let hash: String = ebbtide::segment::hash("m0").iter().map(|byte| format!("{byte:02x}")).collect();
    let request = json!({"acks": [{"partitionId": lane.id, "group": GROUP, "workers": [LEASE], "hashes": hash,
        "statuses": "dlq", "transactionIds": ["m0"]}]});
    let error = broker.sql.query("select queen.log_transaction_wire_v1($1)", &[&request]).await.expect_err("refused");
    let error = error.as_db_error().expect("from the database");
    assert_eq!(error.code().code(), "QN004");
    let detail: Value = serde_json::from_str(error.detail().expect("a detail")).expect("JSON");
    assert_eq!(detail, json!([{"ack": 0, "offset": 0, "hash": hash}]));
    assert_eq!(everything(&broker).await, before);
}
