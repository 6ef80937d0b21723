//! Traces: written for any message, read by message, by name, and as a list of names.

mod support;

use serde_json::{Value, json};
use support::Broker;
use uuid::Uuid;

/// A partition of the queue `q/1`.
async fn partition(broker: &Broker, name: &str) -> Uuid {
    broker.execute("insert into queen.queues (name) values ('q/1') on conflict do nothing", &[]).await;
    let query = "insert into queen.log_partitions (queue_id, name) select id, $1 from queen.queues returning id";
    broker.row(query, &[&name]).await.get(0)
}

async fn record(broker: &Broker, body: Value) -> String {
    let (status, answer) = broker.post("/api/v1/traces", body.clone()).await;
    assert_eq!((status, &answer["success"]), (201, &json!(true)), "{body}: {answer}");
    answer["traceId"].as_str().expect("a text").to_owned()
}

/// Gives a trace an age in minutes; each trace of a test has another.
async fn age(broker: &Broker, id: &str, minutes: i32) {
    let id: Uuid = id.parse().expect("a UUID");
    let query = "update queen.message_traces set created_at = '2026-08-28 10:11:12.123456Z'::timestamptz - make_interval(mins => $2) where id = $1";
    assert_eq!(broker.execute(query, &[&id, &minutes]).await, 1);
}

fn data_of(list: &Value) -> Vec<Value> {
    list["traces"].as_array().expect("a list").iter().map(|trace| trace["data"].clone()).collect()
}

#[tokio::test]
async fn what_is_recorded_is_read_back_oldest_first() {
    let broker = Broker::start().await;
    let pid = partition(&broker, "p").await;
    let first = json!({
        "transactionId": "t", "partitionId": pid, "consumerGroup": "__QUEUE_MODE__",
        "traceNames": ["b", "a", "b"], "eventType": "error", "data": {"step": 1}, "workerId": "w",
    });
    let first = record(&broker, first).await;
    let second = json!({"transactionId": "t", "partitionId": pid, "traceNames": null, "eventType": null, "data": [2]});
    let second = record(&broker, second).await;
    record(&broker, json!({"transactionId": "T", "partitionId": pid, "data": 3})).await;
    record(&broker, json!({"transactionId": "t", "partitionId": Uuid::from_u128(9), "data": 4})).await;
    age(&broker, &first, 1).await;
    age(&broker, &second, 0).await;

    let (status, answer) = broker.get(&format!("/api/v1/traces/{pid}/t")).await;
    assert_eq!(status, 200);
    assert_eq!(
        answer,
        json!({
            "traces": [
                {
                    "id": first, "event_type": "error", "data": {"step": 1}, "consumer_group": "__QUEUE_MODE__",
                    "worker_id": "w", "created_at": "2026-08-28T10:10:12.123Z", "trace_names": ["a", "b"],
                },
                {
                    "id": second, "event_type": "info", "data": [2], "consumer_group": null,
                    "worker_id": null, "created_at": "2026-08-28T10:11:12.123Z", "trace_names": [],
                },
            ],
            "total": 2,
            "pagination": {"limit": 1000, "offset": 0},
        })
    );
}

#[tokio::test]
async fn data_comes_back_byte_for_byte() {
    let broker = Broker::start().await;
    let pid = partition(&broker, "p").await;
    for (n, data) in [
        r#"{"z":1,"a":2,"z":3}"#,
        r#""\u0000\ud800\/""#,
        "1.00000000000000000000001e400",
        "[ 1 ,\n\t{ } ]",
        r#""null""#,
        "false",
        &format!("{}{}", "[".repeat(128), "]".repeat(128)),
        &format!("\"{}\"", "x".repeat(65_534)),
        "\"🐘[[[\\\"\"",
    ]
    .into_iter()
    .enumerate()
    {
        let body = format!(r#"{{"transactionId":"t{n}","partitionId":"{pid}","traceNames":["n{n}"],"data":{data}}}"#);
        let (status, answer) = broker.post_raw("/api/v1/traces", body).await;
        assert_eq!(status, 201, "{answer}");
        for path in [format!("/api/v1/traces/{pid}/t{n}"), format!("/api/v1/traces/by-name/n{n}")] {
            let (status, bytes) = broker.get_bytes(&path).await;
            let text = String::from_utf8(bytes).expect("UTF-8");
            assert_eq!(status, 200);
            assert!(text.contains(&format!(r#""data":{data},"#)), "{data} in {text}");
        }
    }
}

#[tokio::test]
async fn what_is_missing_or_too_much_is_refused_by_name() {
    let broker = Broker::start().await;
    let pid = Uuid::from_u128(7);
    let good = json!({"transactionId": "t", "partitionId": pid, "data": {}});
    record(&broker, good.clone()).await;
    let mut names: Vec<String> = (0..=100).map(|n| n.to_string()).collect();
    for (field, bad) in [
        ("transactionId", json!(null)),
        ("transactionId", json!(7)),
        ("transactionId", json!("")),
        ("transactionId", json!("a\u{0}")),
        ("transactionId", json!("x".repeat(65_536))),
        ("partitionId", json!(null)),
        ("partitionId", json!("7")),
        ("data", json!(null)),
        ("data", json!("x".repeat(65_535))),
        (
            "data",
            serde_json::from_str(&format!("{}{}", "[".repeat(127), "]".repeat(127)))
                .map(|deep: Value| json!([[deep]]))
                .expect("JSON"),
        ),
        ("traceNames", json!("a")),
        ("traceNames", json!([1])),
        ("traceNames", json!([""])),
        ("traceNames", json!(["x".repeat(256)])),
        ("traceNames", json!(names)),
        ("eventType", json!(1)),
        ("eventType", json!("")),
        ("consumerGroup", json!({})),
        ("consumerGroup", json!("x".repeat(256))),
        ("workerId", json!(false)),
    ] {
        let mut body = good.clone();
        body[field] = bad;
        let (status, answer) = broker.post("/api/v1/traces", body).await;
        assert_eq!(status, 400, "{field}: {answer}");
        assert!(answer["error"].as_str().is_some_and(|error| error.starts_with(field)), "{field}: {answer}");
    }
    for field in ["transactionId", "partitionId", "data"] {
        let mut body = good.clone();
        body.as_object_mut().expect("an object").remove(field);
        let (status, answer) = broker.post("/api/v1/traces", body).await;
        assert_eq!((status, answer), (400, json!({"error": format!("{field} is required")})));
    }
    let written: i64 = broker.row("select count(*) from queen.message_traces", &[]).await.get(0);
    assert_eq!(written, 1, "what is refused is not written");

    names.truncate(99);
    names.push("🐘".repeat(255));
    let mut body = good.clone();
    body["traceNames"] = json!(names);
    body["transactionId"] = json!("x".repeat(65_535));
    record(&broker, body).await;
}

#[tokio::test]
async fn names_and_transaction_ids_may_hold_any_character() {
    let broker = Broker::start().await;
    let pid = partition(&broker, "p").await;
    for (path, name) in [
        ("a%2Fb", "a/b"),
        ("a/b/", "a/b/"),
        ("50%25", "50%"),
        ("it's%20%22so%22", "it's \"so\""),
        ("what%3F%23", "what?#"),
        ("%F0%9F%90%98", "🐘"),
        ("names", "names"),
    ] {
        record(&broker, json!({"transactionId": name, "partitionId": pid, "traceNames": [name], "data": name})).await;
        let (status, answer) = broker.get(&format!("/api/v1/traces/by-name/{path}")).await;
        assert_eq!((status, data_of(&answer)), (200, vec![json!(name)]), "{answer}");
        assert_eq!(answer["traces"][0]["transaction_id"], json!(name));
        let (status, answer) = broker.get(&format!("/api/v1/traces/{pid}/{path}")).await;
        assert_eq!((status, data_of(&answer)), (200, vec![json!(name)]), "{answer}");
    }
    for path in [format!("{pid}/%00"), "7/t".to_owned(), format!("by-name/{}", "x".repeat(256)), format!("{pid}/%FF")] {
        let (status, answer) = broker.get(&format!("/api/v1/traces/{path}")).await;
        assert_eq!(status, 400, "{path}");
        assert!(answer["error"].is_string(), "{answer}");
    }
}

#[tokio::test]
async fn traces_of_a_deleted_partition_are_found_by_message_only() {
    let broker = Broker::start().await;
    let kept = partition(&broker, "kept").await;
    let gone = partition(&broker, "gone").await;
    for pid in [kept, gone] {
        record(&broker, json!({"transactionId": "t", "partitionId": pid, "traceNames": ["n"], "data": pid})).await;
    }
    broker.execute("delete from queen.log_partitions where id = $1", &[&gone]).await;
    let (_, by_message) = broker.get(&format!("/api/v1/traces/{gone}/t")).await;
    assert_eq!(data_of(&by_message), [json!(gone)]);
    let (_, by_name) = broker.get("/api/v1/traces/by-name/n").await;
    let trace = &by_name["traces"][0];
    assert_eq!((data_of(&by_name), &by_name["total"]), (vec![json!(kept)], &json!(1)));
    assert_eq!(
        (&trace["queue_name"], &trace["partition_name"], &trace["partition_id"], &trace["message_payload"]),
        (&json!("q/1"), &json!("kept"), &json!(kept), &Value::Null)
    );
}

#[tokio::test]
async fn listings_come_in_pages_with_true_totals() {
    let broker = Broker::start().await;
    let pid = partition(&broker, "p").await;
    for n in 0..5 {
        let body = json!({"transactionId": "t", "partitionId": pid, "traceNames": ["n"], "data": n});
        let id = record(&broker, body).await;
        age(&broker, &id, n).await;
    }
    for path in ["by-name/n".to_owned(), format!("{pid}/t")] {
        let (_, answer) = broker.get(&format!("/api/v1/traces/{path}?limit=2&offset=1")).await;
        assert_eq!(data_of(&answer), [json!(3), json!(2)], "oldest first");
        assert_eq!((&answer["total"], &answer["pagination"]), (&json!(5), &json!({"limit": 2, "offset": 1})));
        let (_, answer) = broker.get(&format!("/api/v1/traces/{path}?offset=5")).await;
        assert_eq!((data_of(&answer), &answer["total"]), (vec![], &json!(5)), "a page past the end is empty");
        for (query, field) in
            [("limit=0", "limit"), ("limit=1001", "limit"), ("limit=x", "limit"), ("offset=-1", "offset")]
        {
            let (status, answer) = broker.get(&format!("/api/v1/traces/{path}?{query}")).await;
            assert_eq!(status, 400, "{query}");
            assert!(answer["error"].as_str().is_some_and(|error| error.starts_with(field)), "{answer}");
        }
    }
}

#[tokio::test]
async fn trace_names_are_listed_last_used_first() {
    let broker = Broker::start().await;
    let (_, none) = broker.get("/api/v1/traces/names").await;
    assert_eq!(none, json!({"trace_names": [], "total": 0, "pagination": {"limit": 50, "offset": 0}}));
    let pid = Uuid::from_u128(7);
    for (transaction_id, names, minutes) in
        [("t1", json!(["old"]), 9), ("t1", json!(["old", "new"]), 5), ("t2", json!(["new"]), 2)]
    {
        let id = record(
            &broker,
            json!({"transactionId": transaction_id, "partitionId": pid, "traceNames": names, "data": 0}),
        )
        .await;
        age(&broker, &id, minutes).await;
    }
    let new =
        json!({"trace_name": "new", "trace_count": 2, "message_count": 2, "last_seen": "2026-08-28T10:09:12.123Z"});
    let old =
        json!({"trace_name": "old", "trace_count": 2, "message_count": 1, "last_seen": "2026-08-28T10:06:12.123Z"});
    let (status, answer) = broker.get("/api/v1/traces/names").await;
    assert_eq!((status, &answer["trace_names"], &answer["total"]), (200, &json!([new, old]), &json!(2)));
    let (_, answer) = broker.get("/api/v1/traces/names?limit=1&offset=1").await;
    assert_eq!((&answer["trace_names"], &answer["total"]), (&json!([old]), &json!(2)));
}
