//! Pushes and acknowledgements that happen together or not at all.

mod support;

#[path = "transaction/letters.rs"]
mod letters;
#[path = "transaction/locks.rs"]
mod locks;
#[path = "transaction/riders.rs"]
mod riders;

use serde_json::{Value, json};
use support::Broker;
use support::lane::{GROUP, LEASE, Lane};
use uuid::Uuid;

async fn post(broker: &Broker, body: Value) -> Value {
    let (status, body) = broker.post("/api/v1/transaction", body).await;
    assert_eq!(status, 200, "{body}");
    assert!(body["transactionId"].as_str().is_some_and(|id| Uuid::parse_str(id).is_ok()), "{body}");
    body
}

/// Posts `operations` and returns the results of a commit.
async fn commit(broker: &Broker, operations: Value) -> Vec<Value> {
    let body = post(broker, json!({"operations": operations})).await;
    assert_eq!(body["success"], true, "{body}");
    body["results"].as_array().expect("an array").clone()
}

/// Asserts that nothing came of `body`, for `reason`; returns the error's text.
async fn refused(broker: &Broker, body: Value, reason: &str) -> String {
    let before = everything(broker).await;
    let body = post(broker, body).await;
    assert_eq!((&body["success"], &body["reason"], &body["results"]), (&json!(false), &json!(reason), &json!([])));
    assert_eq!(everything(broker).await, before, "nothing happened");
    body["error"].as_str().expect("a text").to_owned()
}

/// All that a transaction can change.
async fn everything(broker: &Broker) -> String {
    let query = "select concat(
        (select string_agg(q::text, ';' order by q.id) from queen.queues q),
        (select string_agg(p::text, ';' order by p.id) from queen.log_partitions p),
        (select string_agg(s::text, ';' order by s.partition_id, s.base_offset) from queen.log_segments s),
        (select string_agg(t::text, ';' order by t.partition_id, t.base_offset) from queen.log_txns t),
        (select string_agg(c::text, ';' order by c.partition_id, c.consumer_group) from queen.log_consumers c),
        (select string_agg(d::text, ';' order by d.id) from queen.log_dlq d))";
    broker.row(query, &[]).await.get(0)
}

fn ack(lane: &Lane<'_>, id: &str, status: &str) -> Value {
    json!({"type": "ack", "transactionId": id, "partitionId": lane.id, "status": status, "consumerGroup": GROUP})
}

fn push(queue: &str, id: &str) -> Value {
    json!({"type": "push", "items": [{"queue": queue, "payload": {"id": id}, "transactionId": id}]})
}

/// Every message of a queue as (partition, transaction id, payload).
async fn stored(broker: &Broker, queue: &str) -> Vec<(String, String, String)> {
    let query = "select p.name, s.blob from queen.log_segments s join queen.log_partitions p on p.id = s.partition_id
        join queen.queues q on q.id = p.queue_id where q.name = $1 order by p.name, s.base_offset";
    let mut messages = Vec::new();
    for row in broker.rows(query, &[&queue]).await {
        let segment = ebbtide::segment::Segment::unpack(row.get(1)).expect("a segment");
        messages.extend(segment.frames().map(|frame| {
            let payload = String::from_utf8(frame.payload.to_vec()).expect("text");
            (row.get(0), frame.transaction_id.to_owned(), payload)
        }));
    }
    messages
}

#[tokio::test]
async fn pushes_and_acknowledgements_commit_together() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    let results =
        commit(&broker, json!([ack(&lane, "m0", "completed"), push("out", "t"), ack(&lane, "m1", "ok")])).await;
    let message_id = results[1]["messageId"].as_str().expect("a message id");
    assert!(Uuid::parse_str(message_id).is_ok());
    let acked = |index: i32, id: &str| json!({"index": index, "type": "ack", "success": true, "transactionId": id, "error": null, "dlq": false});
    let pushed = json!({"index": 1, "type": "push", "success": true, "transactionId": "t", "messageId": message_id,
        "queueName": "out"});
    assert_eq!(results, [acked(0, "m0"), pushed, acked(2, "m1")]);
    lane.free_at(1, 0).await;
    let expected = ("Default".to_owned(), "t".to_owned(), r#"{"id":"t"}"#.to_owned());
    assert_eq!(stored(&broker, "out").await, [expected]);
}

#[tokio::test]
async fn every_form_of_push_keeps_its_bytes_and_its_trace() {
    let broker = Broker::start().await;
    let trace = Uuid::now_v7();
    let odd = r#"{ "b": 1.0, "a": "\u0000\ud800", "b": 123456789012345678901234567890 }"#;
    let body = format!(
        r#"{{"operations": [
            {{"type": "push", "queue": "q", "payload": {odd}, "transactionId": "flat", "traceId": "{trace}", "partition": "x"}},
            {{"type": "push", "queue": "q", "data": null}},
            {{"type": "push", "items": [{{"queue": "q", "data": [ 1 ], "transactionId": "i", "partition": null}},
                                        {{"queue": "q", "payload": 7, "data": 8, "transactionId": "j"}}]}}]}}"#
    );
    let (status, reply) = broker.post_raw("/api/v1/transaction", body).await;
    assert_eq!((status, &reply["success"]), (200, &json!(true)), "{reply}");
    let minted = reply["results"][1]["transactionId"].as_str().expect("an id").to_owned();
    assert_eq!(reply["results"][1]["messageId"], minted, "an id that is not given is the message's");
    let message = |partition: &str, id: &str, payload: &str| (partition.to_owned(), id.to_owned(), payload.to_owned());
    let expected = [
        message("Default", &minted, "null"),
        message("Default", "i", "[ 1 ]"),
        message("Default", "j", "7"),
        message("x", "flat", odd),
    ];
    assert_eq!(stored(&broker, "q").await, expected);
    let (_, popped) = broker.get_bytes("/api/v1/pop/queue/q/partition/x").await;
    let popped = String::from_utf8(popped).expect("text");
    assert!(popped.contains(&format!(r#""traceId":"{trace}","data":{odd}"#)), "{popped}");
}

#[tokio::test]
async fn a_message_that_is_pushed_twice_is_stored_once() {
    let broker = Broker::start().await;
    let results = commit(&broker, json!([push("out", "t"), push("out", "t"), push("other", "t")])).await;
    assert_eq!(results[0].get("duplicate"), None);
    assert_eq!((&results[1]["duplicate"], &results[1]["success"]), (&json!(true), &json!(true)));
    assert_eq!(results[1]["messageId"], results[0]["messageId"]);
    assert_eq!(results[2].get("duplicate"), None, "another queue");
    assert_eq!(stored(&broker, "out").await.len(), 1);
}

#[tokio::test]
async fn a_stored_transaction_id_refuses_everything() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    commit(&broker, json!([push("out", "t")])).await;
    let again = json!({"operations": [ack(&lane, "m0", "completed"), push("new", "u"), push("out", "t")]});
    let error = refused(&broker, again.clone(), "duplicate").await;
    assert!(error.starts_with("QDUP") && error.contains(" t ") && error.contains("out"), "{error}");

    broker.execute("update queen.queues set dedup_window_seconds = 0", &[]).await;
    assert_eq!(post(&broker, again).await["success"], true, "no window, no duplicate");
}

#[tokio::test]
async fn an_acknowledgement_that_is_refused_undoes_the_pushes() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    let gone = Lane { broker: &broker, id: Uuid::now_v7() };
    let mut other_group = ack(&lane, "m0", "completed");
    other_group["consumerGroup"] = json!("none");
    for (bad, text) in [
        (ack(&lane, "never pushed", "completed"), "unresolvable: transaction id never pushed"),
        (ack(&lane, "never\0pushed", "failed"), "unresolvable"),
        (ack(&gone, "m0", "completed"), "consumer not found"),
        (other_group, "consumer not found"),
    ] {
        let operations = json!([push("out", "t"), ack(&lane, "m0", "completed"), bad]);
        let error = refused(&broker, json!({"operations": operations}), "ack_rejected").await;
        assert!(error.starts_with("QTXN") && error.contains(text), "{error}");
    }
}

#[tokio::test]
async fn an_expired_lease_is_a_fence() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    lane.lease_as(GROUP, LEASE, 0, 0.0).await;
    let operations = json!([ack(&lane, "m0", "completed"), push("out", "t")]);
    let fenced = json!({"operations": operations, "requiredLeases": [LEASE]});
    assert!(refused(&broker, fenced, "ack_rejected").await.contains("invalid or expired lease"));
    let several = json!({"operations": operations, "requiredLeases": ["another", LEASE]});
    assert!(refused(&broker, several, "ack_rejected").await.contains("invalid or expired lease"));
    commit(&broker, operations).await;
}

#[tokio::test]
async fn the_lease_is_its_own_or_one_of_those_required() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 6).await;
    let with = |id: &str, own: Value, required: Value| {
        let mut operation = ack(&lane, id, "completed");
        operation["leaseId"] = own;
        json!({"operations": [operation], "requiredLeases": required})
    };
    for bad in [
        with("m0", json!("another"), json!([LEASE])),
        with("m0", json!(null), json!(["another"])),
        with("m0", json!(null), json!(["another", "third"])),
    ] {
        assert!(refused(&broker, bad, "ack_rejected").await.contains("invalid or expired lease"));
    }
    for (n, good) in [
        with("m0", json!(LEASE), json!(["another"])),
        with("m1", json!(null), json!([LEASE])),
        with("m2", json!(null), json!(["another", LEASE])),
        with("m3", json!(null), json!([])),
        with("m4", json!(null), json!(null)),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(post(&broker, good).await["success"], true);
        lane.leased_at(i64::try_from(n).expect("small"), 5).await;
    }
}

#[tokio::test]
async fn what_is_behind_the_cursor_is_tolerated() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    lane.ack(&[("m1", "completed")]).await;
    let results =
        commit(&broker, json!([ack(&lane, "m0", "completed"), ack(&lane, "m1", "failed"), push("out", "t")])).await;
    assert_eq!((&results[0]["success"], &results[0]["error"]), (&json!(true), &json!(null)));
    assert_eq!(results[1]["success"], false);
    assert!(results[1]["error"].as_str().expect("a text").starts_with("already committed"));
    lane.leased_at(1, 2).await;
}

#[tokio::test]
async fn what_is_wrong_is_named_with_its_place() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    let deep = format!(
        r#"{{"operations": [{{"type": "push", "queue": "q", "payload": {}1{}}}]}}"#,
        "[".repeat(129),
        "]".repeat(129)
    );
    let good = push("out", "t");
    let op = |bad: Value| json!({"operations": [good, bad]}).to_string();
    for (body, text) in [
        ("{".to_owned(), "bad body: "),
        ("{}".to_owned(), "operations is required"),
        (json!({"operations": []}).to_string(), "operations is required"),
        (json!({"operations": 7}).to_string(), "operations: must be a list"),
        (json!({"operations": [good], "requiredLeases": [7]}).to_string(), "requiredLeases: must be a list"),
        (op(json!(7)), "operations[1]: an object is required"),
        (op(json!({"queue": "q"})), "operations[1]: type is required"),
        (op(json!({"type": "pop"})), "operations[1]: type: must be ack or push"),
        (op(json!({"type": "push", "items": 7})), "operations[1]: items: must be a list"),
        (op(json!({"type": "push", "items": []})), "operations[1]: items: must have at least one"),
        (op(json!({"type": "push", "queue": "q"})), "operations[1]: payload or data is required"),
        (
            op(json!({"type": "push", "items": [{"queue": "q", "payload": 1}, {"payload": 1}]})),
            "operations[1].items[1]: queue is required",
        ),
        (
            op(json!({"type": "push", "queue": "q", "payload": 1, "partition": "\u{1f}"})),
            "operations[1]: partition: must not contain",
        ),
        (
            op(json!({"type": "push", "queue": "q", "payload": 1, "transactionId": "\0"})),
            "operations[1]: transactionId: must not contain",
        ),
        (op(json!({"type": "ack", "partitionId": lane.id})), "operations[1]: transactionId is required"),
        (
            op(json!({"type": "ack", "transactionId": "m0", "partitionId": "x"})),
            "operations[1]: partitionId: must be a UUID",
        ),
        (
            op(json!({"type": "ack", "transactionId": "m0", "partitionId": lane.id, "consumerGroup": "\0"})),
            "operations[1]: consumerGroup: ",
        ),
        (deep, "operations[0]: payload: must nest at most 128"),
    ] {
        let (status, reply) = broker.post_raw("/api/v1/transaction", body.clone()).await;
        assert_eq!(
            (status, &reply["reason"], &reply["success"]),
            (400, &json!("bad_request"), &json!(false)),
            "{body}"
        );
        let error = reply["error"].as_str().expect("a text");
        assert!(error.contains(text), "{error} for {body}");
    }
    let empty_riders = json!({"operations": [good], "kv": [], "timers": null});
    assert_eq!(post(&broker, empty_riders).await["success"], true);
}

#[tokio::test]
async fn a_large_transaction_commits_whole() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2_000).await;
    let mut operations: Vec<Value> = (0..2_000).map(|n| ack(&lane, &format!("m{n}"), "completed")).collect();
    operations.extend((0..2_000).map(|n| {
        json!({"type": "push", "queue": "out", "partition": (n % 100).to_string(), "payload": "x".repeat(100), "transactionId": n.to_string()})
    }));
    let results = commit(&broker, json!(operations)).await;
    assert_eq!(results.len(), 4_000);
    assert!(results.iter().enumerate().all(|(n, result)| result["index"] == n && result["success"] == true));
    lane.free_at(1_999, 0).await;
    assert_eq!(stored(&broker, "out").await.len(), 2_000);
}

#[tokio::test]
async fn a_waiting_pop_is_woken_by_a_push_and_by_an_ended_lease() {
    let mut settings = ebbtide::http::Settings::default();
    settings.pop_wait.initial = support::PATIENCE;
    settings.pop_wait.longest = support::PATIENCE;
    let broker = Broker::with(settings).await;
    let lane = Lane::leased(&broker, 2).await;
    for (path, cause) in [
        ("/api/v1/pop/queue/out?wait=true&timeout=50000", json!({"operations": [push("out", "t")]})),
        (
            "/api/v1/pop/queue/q/partition/p?wait=true&timeout=50000&consumerGroup=g",
            json!({"operations": [ack(&lane, "m0", "retry")]}),
        ),
    ] {
        let (popped, ()) = tokio::join!(broker.get(path), async {
            while broker.app.wake.parked() == 0 {
                tokio::task::yield_now().await;
            }
            assert_eq!(post(&broker, cause).await["success"], true);
        });
        assert_eq!(popped.0, 200, "{path}");
    }
}
