//! Claims: what a pop delivers, in which order, and what it leaves behind.

mod support;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use support::Broker;
use support::log::{ids, partitions};

#[tokio::test]
async fn an_answer_has_every_field() {
    let b = Broker::start().await;
    let stored = b.store_payloads("orders", "p0", 0.0, &[r#"{"any":"json"}"#]).await;
    let (status, body) = b.pop("queue/orders?consumerGroup=g&subscriptionMode=all").await;
    assert_eq!(status, 200, "{body}");
    let partition_id = json!(stored.partition_id);
    assert_eq!(body["success"], true);
    assert_eq!((&body["queue"], &body["partition"]), (&json!("orders"), &json!("p0")));
    assert_eq!((&body["partitionId"], &body["partitionsClaimed"]), (&partition_id, &json!(1)));
    assert_eq!(body["consumerGroup"], "g");
    assert_eq!(body.get("autopilot"), None);
    let message = &body["messages"][0];
    assert_eq!(message["transactionId"], "p0-0");
    assert_eq!(message["data"], json!({"any": "json"}));
    assert_eq!((&message["traceId"], &message["producerSub"]), (&Value::Null, &Value::Null));
    assert_eq!((&message["partitionId"], &message["partition"]), (&partition_id, &json!("p0")));
    assert_eq!((&message["leaseId"], &message["consumerGroup"]), (&body["leaseId"], &json!("g")));
    let created = message["createdAt"].as_str().expect("a time");
    assert_eq!((created.len(), &created[19..20], &created[26..]), (27, ".", "Z"), "{created}");
    assert!(uuid::Uuid::parse_str(message["id"].as_str().expect("an id")).is_ok());
    assert_eq!(uuid::Uuid::parse_str(body["leaseId"].as_str().expect("an id")).expect("a UUID").get_version_num(), 7);
}

#[tokio::test]
async fn nothing_is_204_without_a_body() {
    let b = Broker::start().await;
    b.store("q", "p", 1).await;
    assert_eq!(b.pop("queue/none/partition/p").await, (204, Value::Null));
    assert_eq!(b.pop("queue/q/partition/none").await, (204, Value::Null));
    assert_eq!(b.pop("queue/none").await, (204, Value::Null));
}

#[tokio::test]
async fn payloads_come_back_byte_for_byte() {
    let b = Broker::start().await;
    let payloads = [
        "1.0000000000000000000001",
        "-0.0e-0",
        r#"{"z":1,"a":2,"z":3}"#,
        r#"{ "spaced" :  [ 1 ,2 ] }"#,
        r#""\u0000""#,
        r#""\ud800 lone""#,
        r#""\/ and 🦀""#,
        "123456789012345678901234567890",
        "null",
    ];
    b.store_payloads("q", "p", 0.0, &payloads).await;
    let (status, body) = b.get_bytes("/api/v1/pop/queue/q/partition/p").await;
    assert_eq!(status, 200);
    let text = String::from_utf8(body).expect("UTF-8");
    let mut rest = text.as_str();
    for payload in payloads {
        let whole = format!(r#""data":{payload},"producerSub""#);
        let at = rest.find(&whole).unwrap_or_else(|| panic!("{payload} is in {rest}"));
        rest = &rest[at + whole.len()..];
    }
}

#[tokio::test]
async fn a_head_request_takes_nothing() {
    let b = Broker::start().await;
    b.store("q", "p", 1).await;
    let client = reqwest::Client::new();
    for route in ["queue/q", "queue/q/partition/p"] {
        let url = format!("{}/api/v1/pop/{route}?autoAck=true", b.url);
        assert_eq!(client.head(url).send().await.expect("answers").status().as_u16(), 405);
    }
    assert_eq!(b.pop_ids("queue/q").await, ["p-0"]);
}

#[tokio::test]
async fn an_answer_is_bounded_in_plain_bytes() {
    let b = Broker::start().await;
    for partition in ["a", "b"] {
        for _ in 0..3 {
            b.store("q", partition, 1).await;
        }
    }
    // 9 MiB: by the size in the header of a frame, and by guess where there is none.
    for (blob, kind) in [("'\\x28b52ffda000009000'", "stated"), ("convert_to(repeat('x', 9 << 17), 'UTF8')", "guessed")]
    {
        b.execute(&format!("update queen.log_segments set blob = {blob}"), &[]).await;
        for (call, group) in [
            (format!("queen.log_pop_partition_v1('q', 'a', '{kind}-one', 100, 60, 'w')"), format!("{kind}-one")),
            (format!("queen.log_pop_queue_v1('q', '{kind}-any', 5, 100, 60, 'w')"), format!("{kind}-any")),
        ] {
            let row = b.row(&format!("select count(*), count(distinct r_pid) from {call}"), &[]).await;
            assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (2, 1), "{group}: no third segment after 18 MiB");
            let query = "select batch_end from queen.log_consumers where consumer_group = $1 and batch_end is not null";
            assert_eq!(b.row(query, &[&group]).await.get::<_, i64>(0), 1, "{group}: leased is what is delivered");
        }
    }
}

#[tokio::test]
async fn the_plain_size_is_that_of_the_frame() {
    let b = Broker::start().await;
    for len in [0, 1, 255, 256, 65_791, 65_792, 1 << 20] {
        let blob = zstd::bulk::compress(&vec![b'x'; len], 3).expect("compresses");
        let plain: i64 = b.row("select queen.log_plain_bytes_v1($1)", &[&blob]).await.get(0);
        assert_eq!(plain, i64::try_from(len.max(blob.len())).expect("small"));
    }
}

#[tokio::test]
async fn names_are_decoded_and_escaped() {
    let b = Broker::start().await;
    b.store("a \"b\" é", "p\\1", 1).await;
    let (status, body) = b.pop("queue/a%20%22b%22%20%C3%A9/partition/p%5C1").await;
    assert_eq!(status, 200, "{body}");
    assert_eq!((&body["queue"], &body["partition"]), (&json!("a \"b\" é"), &json!("p\\1")));
}

#[tokio::test]
async fn batch_is_a_hard_cap_and_messages_are_in_order() {
    let b = Broker::start().await;
    for partition in ["a", "b", "c"] {
        for _ in 0..3 {
            b.store("q", partition, 4).await;
        }
    }
    let (_, body) = b.pop("queue/q?batch=30&partitions=3").await;
    let mut by_partition: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (partition, id) in partitions(&body).into_iter().zip(ids(&body)) {
        by_partition.entry(partition).or_default().push(id);
    }
    assert_eq!(ids(&body).len(), 30);
    assert_eq!(body["partitionsClaimed"], 3);
    let mut lengths: Vec<usize> = by_partition.values().map(Vec::len).collect();
    lengths.sort_unstable();
    assert_eq!(lengths, [6, 12, 12], "the last one is cut");
    for (partition, got) in by_partition {
        let wanted: Vec<String> = (0..got.len()).map(|n| format!("{partition}-{n}")).collect();
        assert_eq!(got, wanted, "from the oldest on, none left out");
    }
}

#[tokio::test]
async fn one_partition_is_drained_across_segments() {
    let b = Broker::start().await;
    for partition in ["a", "b"] {
        for _ in 0..5 {
            b.store("q", partition, 7).await;
        }
    }
    let (_, body) = b.pop("queue/q?batch=100").await;
    let names: BTreeSet<String> = partitions(&body).into_iter().collect();
    assert_eq!((ids(&body).len(), names.len()), (35, 1));
}

#[tokio::test]
async fn a_batch_resumes_inside_a_segment() {
    let b = Broker::start().await;
    b.store("q", "p", 5).await;
    b.store("q", "p", 5).await;
    assert_eq!(b.pop_ids("queue/q/partition/p?batch=3").await, ["p-0", "p-1", "p-2"]);
    b.complete_leases().await;
    assert_eq!(b.pop_ids("queue/q/partition/p?batch=4").await, ["p-3", "p-4", "p-5", "p-6"]);
    b.complete_leases().await;
    assert_eq!(b.pop_ids("queue/q?batch=100").await, ["p-7", "p-8", "p-9"]);
}

#[tokio::test]
async fn a_live_lease_hides_and_an_expired_one_redelivers() {
    let b = Broker::start().await;
    let stored = b.store("q", "p", 2).await;
    b.execute("update queen.queues set lease_time = 120", &[]).await;
    let first = b.pop("queue/q/partition/p").await.1;
    let query =
        "select extract(epoch from lease_expires_at - lease_acquired_at)::int, worker_id from queen.log_consumers";
    let row = b.row(query, &[]).await;
    assert_eq!(row.get::<_, i32>(0), 120, "the queue's lease time");
    assert_eq!(first["leaseId"], row.get::<_, String>(1).as_str());
    assert_eq!(b.cursor(stored.partition_id, "__QUEUE_MODE__").await, Some((-1, Some(1), 1, true)));
    assert!(b.pop_ids("queue/q/partition/p").await.is_empty());
    assert!(b.pop_ids("queue/q").await.is_empty());
    for attempts in 2..4 {
        b.expire_leases().await;
        b.execute("update queen.log_consumers set batch_retry_count = 2", &[]).await;
        let (_, again) = b.pop("queue/q?leaseSeconds=7").await;
        assert_eq!(ids(&again), ["p-0", "p-1"]);
        assert_ne!(again["leaseId"], first["leaseId"]);
        assert_eq!(b.cursor(stored.partition_id, "__QUEUE_MODE__").await, Some((-1, Some(1), attempts, true)));
        let row = b.row(&format!("select batch_retry_count, q.* from queen.log_consumers, ({query}) q"), &[]).await;
        assert_eq!(
            (row.get::<_, i32>(0), row.get::<_, i32>(1)),
            (2, 7),
            "nothing is charged; the request's time counts"
        );
    }
}

#[tokio::test]
async fn groups_do_not_see_each_other() {
    let b = Broker::start().await;
    b.store("q", "p", 2).await;
    for group in ["a", "b"] {
        let query = format!("queue/q?consumerGroup={group}&subscriptionMode=all");
        assert_eq!(b.pop_ids(&query).await, ["p-0", "p-1"]);
        assert!(b.pop_ids(&query).await.is_empty());
    }
    assert_eq!(b.pop_ids("queue/q").await, ["p-0", "p-1"], "nor does a consumer without a group");
}

#[tokio::test]
async fn auto_ack_commits_and_leases_nothing() {
    let b = Broker::start().await;
    let stored = b.store("q", "p", 3).await;
    b.pop("queue/q?batch=1").await;
    b.expire_leases().await;
    let (_, body) = b.pop("queue/q?autoAck=true&batch=2").await;
    assert_eq!(ids(&body), ["p-0", "p-1"]);
    assert_eq!((&body["leaseId"], &body["messages"][0]["leaseId"]), (&json!(""), &json!("")));
    assert_eq!(b.cursor(stored.partition_id, "__QUEUE_MODE__").await, Some((1, None, 0, false)));
    let row = b
        .row(
            "select lease_expires_at is null and lease_acquired_at is null, total_consumed from queen.log_consumers",
            &[],
        )
        .await;
    assert_eq!((row.get::<_, bool>(0), row.get::<_, i64>(1)), (true, 2));
    assert_eq!(b.pop_ids("queue/q?autoAck=true").await, ["p-2"]);
}

#[tokio::test]
async fn a_locked_cursor_is_skipped_and_never_waited_for() {
    let b = Broker::start().await;
    let held = b.store("q", "held", 1).await;
    b.pop("queue/q").await;
    b.expire_leases().await;
    b.store("q", "free", 1).await;
    let mut holder = b.database.client().await;
    let tx = holder.transaction().await.expect("begins");
    tx.execute("select from queen.log_consumers where partition_id = $1 for update", &[&held.partition_id])
        .await
        .expect("locks");
    assert!(b.pop_ids("queue/q/partition/held").await.is_empty());
    assert_eq!(b.pop_ids("queue/q?partitions=2").await, ["free-0"]);
    tx.rollback().await.expect("lets go");
    assert_eq!(b.pop_ids("queue/q?partitions=2").await, ["held-0"]);
}

#[tokio::test]
async fn gaps_that_retention_left_are_crossed() {
    let b = Broker::start().await;
    let mut stored = b.store("q", "p", 10).await;
    for _ in 0..3 {
        stored = b.store("q", "p", 10).await;
    }
    assert_eq!(b.pop_ids("queue/q/partition/p?batch=5&autoAck=true").await.len(), 5);
    b.delete_below(stored.partition_id, 20).await;
    assert_eq!(b.pop_ids("queue/q/partition/p?batch=1&autoAck=true").await, ["p-20"], "a cursor inside the gap");
    b.pop("queue/q/partition/p?batch=15").await;
    b.delete_below(stored.partition_id, 30).await;
    b.expire_leases().await;
    assert_eq!(b.pop_ids("queue/q?batch=1").await, ["p-30"], "a leased span that is gone in part");
    let fresh = b.pop_ids("queue/q?consumerGroup=g&subscriptionMode=all&batch=1").await;
    assert_eq!(fresh, ["p-30"], "the oldest that is left");
}

#[tokio::test]
async fn an_emptied_partition_seals_its_cursor() {
    let b = Broker::start().await;
    let stored = b.store("q", "p", 10).await;
    b.pop("queue/q?batch=4").await;
    b.expire_leases().await;
    b.delete_below(stored.partition_id, 10).await;
    assert!(b.pop_ids("queue/q").await.is_empty());
    assert_eq!(b.cursor(stored.partition_id, "__QUEUE_MODE__").await, Some((9, None, 0, false)));
    let consumed: i64 = b.row("select total_consumed from queen.log_consumers", &[]).await.get(0);
    assert_eq!(consumed, 0, "what was evicted was not consumed");
    b.store("q", "p", 1).await;
    assert_eq!(b.pop_ids("queue/q").await, ["p-10"]);
}

#[tokio::test]
async fn a_delay_hides_the_segments_that_are_younger() {
    let b = Broker::start().await;
    b.store_aged("q", "p", 2, 100.0).await;
    b.store_aged("q", "p", 2, 50.0).await;
    let young = b.store_aged("q", "young", 2, 50.0).await;
    b.execute("update queen.queues set delayed_processing = 60", &[]).await;
    assert_eq!(b.pop_ids("queue/q?autoAck=true&partitions=5").await, ["p-0", "p-1"]);
    assert!(b.pop_ids("queue/q?autoAck=true&partitions=5").await.is_empty());
    assert_eq!(b.cursor(young.partition_id, "__QUEUE_MODE__").await.map_or(-1, |c| c.0), -1, "hidden is not empty");
    b.execute("update queen.log_segments set created_at = created_at - interval '20 seconds'", &[]).await;
    let mut rest = b.pop_ids("queue/q?autoAck=true&partitions=5").await;
    rest.sort();
    assert_eq!(rest, ["p-2", "p-3", "young-0", "young-1"]);
}

#[tokio::test]
async fn a_window_hides_a_partition_until_it_rests_or_is_full() {
    let b = Broker::start().await;
    b.store_aged("q", "p", 2, 100.0).await;
    b.store_aged("q", "p", 2, 50.0).await;
    b.execute("update queen.queues set window_buffer = 60", &[]).await;
    assert!(b.pop_ids("queue/q").await.is_empty());
    assert!(b.pop_ids("queue/q/partition/p").await.is_empty());
    let direct = "select count(*) from queen.log_pop_v1('q', 'p', 'direct', 10, 60, 'w', false, 'all', '', true)";
    assert_eq!(b.row(direct, &[]).await.get::<_, i64>(0), 2, "the debounce can be skipped");
    b.execute("update queen.log_segments set created_at = created_at - interval '20 seconds'", &[]).await;
    assert_eq!(b.pop_ids("queue/q").await.len(), 4);
    b.store("q", "burst", 99).await;
    assert!(b.pop_ids("queue/q").await.is_empty());
    b.store("q", "burst", 1).await;
    assert_eq!(b.pop_ids("queue/q").await.len(), 100, "a big burst need not rest");
}

#[tokio::test]
async fn a_wildcard_pop_serves_many_partitions() {
    let b = Broker::start().await;
    for n in 0..300 {
        b.store("q", &format!("p{n}"), 1).await;
    }
    let mut seen = BTreeSet::new();
    for _ in 0..100 {
        let (status, body) = b.pop("queue/q?autoAck=true&partitions=40&batch=100").await;
        if status == 204 {
            break;
        }
        assert!(ids(&body).len() <= 40, "no more partitions than asked for");
        for id in ids(&body) {
            assert!(seen.insert(id), "delivered once");
        }
    }
    assert_eq!(seen.len(), 300);
}

#[tokio::test]
async fn discovery_matches_both_filters() {
    let b = Broker::start().await;
    let queues = [("a", "shop", "bill", 11), ("b", "shop", "ship", 12), ("c", "bank", "bill", 13)];
    for (queue, namespace, task, lease) in queues {
        b.store(queue, queue, 1).await;
        let query = "update queen.queues set namespace = $2, task = $3, lease_time = $4 where name = $1";
        b.execute(query, &[&queue, &namespace, &task, &lease]).await;
    }
    let pop = async |filter: &str, group: &str| {
        let path = format!("/api/v1/pop?{filter}&partitions=9&consumerGroup={group}&subscriptionMode=all");
        let (status, body) = b.get(&path).await;
        assert!(status == 200 || status == 204, "{status} {body}");
        let mut found = ids(&body);
        found.sort();
        (found, body)
    };
    assert_eq!(pop("namespace=shop", "n").await.0, ["a-0", "b-0"]);
    assert_eq!(pop("task=bill", "t").await.0, ["a-0", "c-0"]);
    let (found, body) = pop("namespace=shop&task=bill", "both").await;
    assert_eq!(found, ["a-0"]);
    assert_eq!((&body["queue"], &body["messages"][0]["queue"]), (&json!(""), &json!("a")));
    let queues_before: i64 = b.row("select count(*) from queen.queues", &[]).await.get(0);
    assert!(pop("namespace=none", "g").await.0.is_empty());
    assert_eq!(b.row("select count(*) from queen.queues", &[]).await.get::<_, i64>(0), queues_before);
    let query = "select array_agg(extract(epoch from lease_expires_at - lease_acquired_at)::int)
        from queen.log_consumers where consumer_group in ('n', 't') and worker_id is not null";
    let leases: Vec<i32> = b.row(query, &[]).await.get(0);
    assert_eq!(leases.iter().collect::<BTreeSet<_>>(), BTreeSet::from([&11, &12, &13]), "each queue's own");
}

#[tokio::test]
async fn poppers_at_the_same_time_never_share_a_partition() {
    let b = Broker::start().await;
    for n in 0..10 {
        b.store("q", &format!("p{n}"), 3).await;
    }
    let pops = (0..20).map(|_| b.pop("queue/q?batch=3"));
    let mut claimed = Vec::new();
    for (_, body) in futures_util::future::join_all(pops).await {
        if let Some(partition) = body["partition"].as_str() {
            assert_eq!(ids(&body).len(), 3);
            claimed.push(partition.to_owned());
        }
    }
    let distinct: BTreeSet<&String> = claimed.iter().collect();
    assert_eq!(distinct.len(), claimed.len(), "{claimed:?}");
    // Who looked while another made the cursors may have come back empty; nothing is stuck.
    let mut rest = 10 - claimed.len();
    while rest > 0 {
        let found = b.pop_ids("queue/q?batch=3").await;
        assert_eq!(found.len(), 3, "what is left can be had");
        rest -= 1;
    }
}

#[tokio::test]
async fn bad_parameters_are_named() {
    let b = Broker::start().await;
    for (query, name) in [
        ("batch=0", "batch"),
        ("batch=-1", "batch"),
        ("batch=ten", "batch"),
        ("partitions=0", "partitions"),
        ("partitions=1.5", "partitions"),
        ("timeout=0", "timeout"),
        ("timeout=soon", "timeout"),
        ("leaseSeconds=0", "leaseSeconds"),
        ("leaseSeconds=99999999", "leaseSeconds"),
        ("wait=perhaps", "wait"),
        ("autoAck=2", "autoAck"),
        ("consumerGroup=a%01", "consumerGroup"),
        ("subscriptionFrom=%00", "subscriptionFrom"),
        ("conflation=true", "conflation"),
        ("conflation=true&consumerGroup=g&autoAck=true", "conflation"),
    ] {
        let (status, body) = b.pop(&format!("queue/q?{query}")).await;
        assert_eq!(status, 400, "{query}: {body}");
        assert!(body["error"].as_str().expect("text").contains(name), "{query}: {body}");
        assert_eq!((&body["success"], &body["messages"]), (&json!(false), &json!([])), "{query}");
    }
    let (status, body) = b.get("/api/v1/pop?wait=false").await;
    assert_eq!(status, 400);
    assert_eq!(body, json!({"success": false, "error": "namespace or task is required", "messages": []}));
    assert_eq!(b.pop(&format!("queue/{}", "x".repeat(256))).await.0, 400);
    assert_eq!(b.pop("queue/q?batch=99999999&partitions=99999999&unknown=1").await.0, 204, "cut, not refused");
}

#[tokio::test]
async fn autopilot_chooses_what_is_not_given_and_says_so() {
    let b = Broker::start().await;
    for n in 0..4 {
        b.store("q", &format!("p{n}"), 1).await;
    }
    let (_, body) = b.pop("queue/q?autopilot=true&autoAck=true").await;
    assert_eq!(body["autopilot"], json!({"partitions": 4, "batch": 200, "waitMs": 100}));
    assert_eq!(ids(&body).len(), 4);
    b.store("q", "p0", 1).await;
    let (_, body) = b.pop("queue/q?autopilot=true&batch=7&partitions=2").await;
    assert_eq!(body["autopilot"], json!({"partitions": 2, "batch": 7, "waitMs": 100}));
    assert_eq!(b.pop("queue/q?autopilot=true").await, (204, Value::Null));
}
