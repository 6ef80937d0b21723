//! What becomes of a message that cannot be processed.

use serde_json::{Value, json};
use uuid::Uuid;

use super::support::Broker;
use super::support::lane::{Filed, GROUP, LEASE, Lane, errors};

fn filed(offset: i64, error: &str, retries: i32) -> Filed {
    Filed {
        offset,
        transaction_id: format!("m{offset}"),
        payload: Some(format!("{{\"n\": {offset}}}")),
        error: error.to_owned(),
        retries,
    }
}

async fn fail(lane: &Lane<'_>, id: &str, error: &str) -> Value {
    let mut element = lane.element(id, "failed");
    element["error"] = json!(error);
    let (status, body) = lane.broker.post("/api/v1/ack", element).await;
    assert_eq!(status, 200);
    body[0].clone()
}

#[tokio::test]
async fn the_failure_after_the_last_retry_is_filed() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    broker.execute("update queen.queues set retry_limit = 2", &[]).await;
    for failures in 1..=2 {
        assert_eq!(fail(&lane, "m0", "boom").await["dlq"], false);
        lane.free_at(-1, failures).await;
        lane.lease(1).await;
    }
    let reply = fail(&lane, "m0", "boom at last").await;
    assert_eq!((&reply["success"], &reply["dlq"], &reply["leaseReleased"]), (&json!(true), &json!(true), &json!(true)));
    lane.free_at(0, 0).await;
    assert_eq!(lane.filed().await, [filed(0, "boom at last", 2)]);
}

#[tokio::test]
async fn without_retries_the_first_failure_is_filed_and_only_the_lowest() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 4).await;
    broker.execute("update queen.queues set retry_limit = 0", &[]).await;
    let replies = lane.ack(&[("m0", "completed"), ("m1", "failed"), ("m2", "failed"), ("m3", "completed")]).await;
    let dlq: Vec<&Value> = replies.iter().map(|reply| &reply["dlq"]).collect();
    assert_eq!(dlq, [false, true, false, false]);
    assert_eq!(errors(&replies), [None; 4]);
    lane.free_at(1, 0).await;
    assert_eq!(lane.filed().await, [filed(1, "Retries exhausted", 0)]);
}

#[tokio::test]
async fn either_switch_of_the_queue_files_and_with_both_off_the_message_is_dropped() {
    let broker = Broker::start().await;
    for (dead_letter_queue, after_max_retries, letters) in [(true, false, 1), (false, true, 1), (false, false, 0)] {
        let lane = Lane::empty(&broker, &format!("{dead_letter_queue} {after_max_retries}")).await;
        lane.append(2).await;
        lane.lease(1).await;
        let query = "update queen.queues set retry_limit = 0, dead_letter_queue = $1, dlq_after_max_retries = $2";
        broker.execute(query, &[&dead_letter_queue, &after_max_retries]).await;
        let replies = lane.ack(&[("m0", "failed")]).await;
        assert_eq!((&replies[0]["success"], &replies[0]["dlq"]), (&json!(true), &json!(letters == 1)));
        lane.free_at(0, 0).await;
        assert_eq!(lane.filed().await.len(), letters);
    }
}

#[tokio::test]
async fn dlq_files_at_once_whatever_the_queue_says() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    broker.execute("update queen.queues set dead_letter_queue = false, dlq_after_max_retries = false", &[]).await;
    broker.execute("update queen.log_consumers set batch_retry_count = 1", &[]).await;
    let replies = lane.ack(&[("m0", "completed"), ("m1", "dlq")]).await;
    assert_eq!(replies[1]["dlq"], true);
    lane.free_at(1, 0).await;
    // The failure was charged to the message before it.
    assert_eq!(lane.filed().await, [filed(1, "Dead-lettered by the consumer", 0)]);
}

#[tokio::test]
async fn a_dead_letter_without_a_lease_is_filed_once() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    lane.ack(&[("m0", "retry")]).await;
    let mut element = lane.element("m0", "dlq");
    element["leaseId"] = json!(null);
    let (_, first) = broker.post("/api/v1/ack", element.clone()).await;
    assert_eq!(first[0]["dlq"], true);
    let (_, second) = broker.post("/api/v1/ack", element).await;
    assert!(second[0]["error"].as_str().expect("an error").starts_with("already committed: "));
    assert_eq!(lane.filed().await.len(), 1);
}

/// What jsonb would refuse, reorder, or respell.
const ODD: &[&str] = &[
    r#"{"nul": "a\u0000b", "lone": "\ud800", "slash": "\/", "é": "\u00e9"}"#,
    r#"{"b": 1, "a": 2, "b": 3}"#,
    "[1.0, 1e400, -0, 0.10, 123456789012345678901234567890]",
    " {  \"spaces\" :\t[ ] } ",
    "null",
];

#[tokio::test]
async fn odd_payloads_and_reasons_survive_byte_for_byte() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let ids: Vec<String> = (0..ODD.len()).map(|n| format!("odd-{n}")).collect();
    let messages: Vec<(&str, &str)> = ids.iter().map(String::as_str).zip(ODD.iter().copied()).collect();
    lane.write(&messages).await;
    for (n, (id, payload)) in messages.iter().enumerate() {
        lane.lease(i64::try_from(ODD.len()).expect("few") - 1).await;
        let body = format!(
            r#"{{"transactionId": "{id}", "partitionId": "{}", "status": "dlq", "error": "x\u0000\ud800", "consumerGroup": "{GROUP}", "leaseId": "{LEASE}"}}"#,
            lane.id
        );
        let (status, reply) = broker.post_raw("/api/v1/ack", body).await;
        assert_eq!((status, &reply[0]["dlq"]), (200, &json!(true)), "{reply}");
        let letter = lane.filed().await[n].clone();
        assert_eq!(letter.payload.as_deref(), Some(*payload));
        assert_eq!(letter.error, "x\\u0000\\ud800");
    }
    let (_, list) = broker.get_bytes("/api/v1/dlq?queue=q").await;
    let list = String::from_utf8(list).expect("text");
    for payload in ODD {
        assert!(list.contains(&format!("\"data\":{},", payload.trim())), "{payload} in {list}");
    }
}

#[tokio::test]
async fn a_message_whose_segment_is_gone_is_filed_without_payload_and_says_so() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    broker.execute("delete from queen.log_segments", &[]).await;
    let replies = lane.ack(&[("m0", "dlq")]).await;
    assert_eq!(replies[0]["dlq"], true);
    let letter = lane.filed().await.remove(0);
    assert_eq!((letter.transaction_id.as_str(), letter.payload), ("m0", None));
    assert_eq!(letter.error, "Dead-lettered by the consumer (the payload is lost: its segment was already deleted)");
    lane.free_at(0, 0).await;
}

#[tokio::test]
async fn a_damaged_segment_does_not_make_a_message_immortal() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    broker.execute("update queen.log_segments set blob = 'no segment'", &[]).await;
    assert_eq!(lane.ack(&[("m0", "dlq")]).await[0]["dlq"], true);
    let letter = lane.filed().await.remove(0);
    assert_eq!(letter.payload, None);
    assert!(letter.error.contains("corrupt data"), "{}", letter.error);
}

#[tokio::test]
async fn a_crash_before_filing_leaves_the_lease_to_expire() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    // The first half alone, as a server leaves it that dies right after.
    let query = "select queen.log_ack_by_hash_v1($1, 'g', 'lease-1', array[$2::bytea], array['dlq'])";
    let hash = ebbtide::segment::hash("m0");
    let acked: Value = broker.row(query, &[&lane.id, &hash.as_slice()]).await.get(0);
    assert_eq!((&acked["dlq"], &acked["offset"], &acked["leaseReleased"]), (&json!(true), &json!(0), &json!(false)));
    lane.leased_at(-1, 1).await;
    assert_eq!(lane.filed().await, []);
}

async fn file(lane: &Lane<'_>, worker: &str, offset: i64) -> Value {
    let query = "select queen.log_dlq_head_v1($1, 'g', $2, $3, null, 't', '1', 'e')";
    lane.broker.row(query, &[&lane.id, &worker, &offset]).await.get(0)
}

#[tokio::test]
async fn filing_checks_the_lease_and_the_place_again() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    assert_eq!(file(&lane, "another", 0).await["error"], "invalid or expired lease");
    assert_eq!(file(&lane, LEASE, 3).await["error"], "position beyond the leased batch");
    lane.ack(&[("m1", "completed")]).await;
    assert!(file(&lane, LEASE, 1).await["error"].as_str().expect("an error").starts_with("already committed: "));
    lane.lease_as(GROUP, LEASE, 2, 0.0).await;
    assert_eq!(file(&lane, LEASE, 2).await["error"], "invalid or expired lease");
    assert_eq!(lane.filed().await, []);
    let none = Lane { broker: &broker, id: Uuid::now_v7() };
    assert_eq!(file(&none, "", 0).await["error"], "consumer not found");
}

#[tokio::test]
async fn filing_in_many_partitions_takes_few_calls_and_files_all() {
    let broker = Broker::start().await;
    let mut lanes = Vec::new();
    let mut elements = Vec::new();
    for n in 0..150 {
        let lane = Lane::empty(&broker, &n.to_string()).await;
        lane.append(2).await;
        lane.lease(1).await;
        elements.push(lane.element("m0", "dlq"));
        lanes.push(lane);
    }
    let replies = super::send(&broker, elements).await;
    assert!(replies.iter().all(|reply| reply["dlq"] == true && reply["leaseReleased"] == true));
    for lane in lanes {
        assert_eq!(lane.filed().await, [filed(0, "Dead-lettered by the consumer", 0)]);
        lane.free_at(0, 0).await;
    }
}

async fn list(broker: &Broker, query: &str) -> (Vec<String>, i64) {
    let (status, body) = broker.get(&format!("/api/v1/dlq?{query}")).await;
    assert_eq!(status, 200, "{body}");
    let ids = body["messages"].as_array().expect("an array").iter();
    let ids = ids.map(|message| message["transactionId"].as_str().expect("a text").to_owned()).collect();
    (ids, body["total"].as_i64().expect("a number"))
}

#[tokio::test]
async fn the_list_filters_pages_and_counts() {
    let broker = Broker::start().await;
    let p = Lane::empty(&broker, "p").await;
    let r = Lane::empty(&broker, "r").await;
    for (lane, group, id, second) in [(&p, "g", "a", 1), (&p, "h", "b", 2), (&r, "g", "c", 3), (&r, "g", "d", 4)] {
        let query =
            "insert into queen.log_dlq (partition_id, consumer_group, \"offset\", transaction_id, payload, failed_at)
            values ($1, $2, 0, $3, '{}', '2026-01-01 00:00:00Z'::timestamptz + make_interval(secs => $4))";
        broker.execute(query, &[&lane.id, &group, &id, &f64::from(second)]).await;
    }
    let all = ["d", "c", "b", "a"].map(str::to_owned).to_vec();
    assert_eq!(list(&broker, "").await, (all.clone(), 4));
    assert_eq!(list(&broker, "queue=q").await, (all, 4));
    assert_eq!(list(&broker, "queue=none").await, (vec![], 0));
    assert_eq!(list(&broker, "consumerGroup=h").await, (vec!["b".to_owned()], 1));
    assert_eq!(list(&broker, "partition=p&consumerGroup=g").await, (vec!["a".to_owned()], 1));
    assert_eq!(
        list(&broker, "from=2026-01-01T00:00:02Z&to=2026-01-01T00:00:03Z").await,
        (vec!["c".to_owned(), "b".to_owned()], 2),
        "both ends count"
    );
    assert_eq!(list(&broker, "from=2026-01-01T00:00:02.000001").await.1, 2, "a time without a zone is UTC");
    assert_eq!(list(&broker, "from=2026-01-01T02:00:04+02:00").await.1, 1);
    assert_eq!(list(&broker, "limit=1&offset=1").await, (vec!["c".to_owned()], 4));
    assert_eq!(list(&broker, "limit=2&offset=4").await, (vec![], 4));
    for (query, field) in
        [("from=yesterday", "from"), ("limit=-1", "limit"), ("offset=x", "offset"), ("queue=%00", "queue")]
    {
        let (status, body) = broker.get(&format!("/api/v1/dlq?{query}")).await;
        assert_eq!(status, 400, "{query}");
        assert!(body["error"].as_str().expect("a text").starts_with(field), "{body}");
    }
}

#[tokio::test]
async fn a_listed_letter_has_the_fields_of_the_wire() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    fail(&lane, "m0", "one").await;
    lane.lease(0).await;
    let mut element = lane.element("m0", "dlq");
    element["error"] = json!("ValueError: two");
    broker.post("/api/v1/ack", element).await;
    let (_, body) = broker.get("/api/v1/dlq?queue=q").await;
    assert_eq!(body["pagination"], json!({"limit": 100, "offset": 0}));
    let message = &body["messages"][0];
    for (key, value) in [
        ("transactionId", json!("m0")),
        ("partitionId", json!(lane.id)),
        ("queue", json!("q")),
        ("partition", json!("p")),
        ("consumerGroup", json!(GROUP)),
        ("errorMessage", json!("ValueError: two")),
        ("retryCount", json!(1)),
        ("data", json!({"n": 0})),
        ("producerSub", json!(null)),
    ] {
        assert_eq!(message[key], value, "{key}");
    }
    assert_eq!(message["createdAt"], message["failedAt"]);
    assert_eq!(message["failedAt"].as_str().map(str::len), Some("2026-08-28T10:11:12.123456Z".len()));
    assert!(message["id"].as_str().is_some_and(|id| Uuid::parse_str(id).is_ok()));
}
