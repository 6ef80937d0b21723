//! The list: its order, its pages, its filters, its totals.

use serde_json::{Value, json};
use uuid::Uuid;

use super::support::Broker;
use super::support::lane::{LEASE, Lane};
use super::{commit, file};

async fn list(broker: &Broker, query: &str) -> Value {
    let (status, body) = broker.get(&format!("/api/v1/messages?{query}")).await;
    assert_eq!(status, 200, "{query}: {body}");
    body
}

fn ids(list: &Value) -> Vec<&str> {
    list["messages"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|row| row["transactionId"].as_str().expect("open"))
        .collect()
}

async fn listed(broker: &Broker, query: &str) -> (Vec<String>, i64) {
    let list = list(broker, query).await;
    (ids(&list).into_iter().map(str::to_owned).collect(), list["total"].as_i64().expect("a number"))
}

/// Gives the segment at `base`, and its hashes, an age.
async fn age(lane: &Lane<'_>, base: i64, at: &str) {
    for table in ["log_segments", "log_txns"] {
        let query = format!(
            "update queen.{table} set created_at = $3::text::timestamptz where partition_id = $1 and base_offset = $2"
        );
        assert_eq!(lane.broker.execute(&query, &[&lane.id, &base, &at]).await, 1);
    }
}

#[tokio::test]
async fn the_newest_come_first_page_by_page_over_all_partitions() {
    let broker = Broker::start().await;
    let a = Lane::empty(&broker, "a").await;
    let b = Lane::empty(&broker, "b").await;
    a.write(&[("a0", "1"), ("a1", "2")]).await;
    b.write(&[("b0", "3")]).await;
    a.write(&[("a2", "4")]).await;
    b.write(&[("b1", "5"), ("b2", "6"), ("b3", "7")]).await;
    let all = ["b3", "b2", "b1", "a2", "b0", "a1", "a0"];
    let page = list(&broker, "").await;
    assert_eq!((ids(&page), &page["total"], &page["truncated"]), (all.to_vec(), &json!(7), &json!(false)));
    assert_eq!(page["pagination"], json!({"limit": 200, "offset": 0}));
    for limit in 1..=7 {
        for offset in 0..8 {
            let (page, total) = listed(&broker, &format!("limit={limit}&offset={offset}")).await;
            let expected: Vec<&str> = all.iter().copied().skip(offset).take(limit).collect();
            assert_eq!((page, total), (expected.iter().map(ToString::to_string).collect(), 7), "{limit} {offset}");
        }
    }
    assert_eq!(listed(&broker, "limit=0").await, (vec![], 7));
}

#[tokio::test]
async fn many_partitions_are_merged_by_age() {
    let broker = Broker::start().await;
    let mut expected = Vec::new();
    for n in 0..9 {
        let lane = Lane::empty(&broker, &format!("p{n}")).await;
        for round in 0..=n {
            let names = [format!("{n}-{round}-0"), format!("{n}-{round}-1")];
            lane.write(&[(&names[0], "0"), (&names[1], "1")]).await;
            // One after the other and interleaved; the last one of a partition differs widely.
            let second = round * 9 + (n * 5) % 9;
            age(&lane, round * 2, &format!("2026-01-01 00:{:02}:{:02}Z", second / 60, second % 60)).await;
            expected.extend(names.into_iter().rev().map(|name| (second, name)));
        }
    }
    // No two segments share a second, so the order is total; the sort is stable within one.
    expected.sort_by_key(|(second, _)| std::cmp::Reverse(*second));
    let expected: Vec<String> = expected.into_iter().map(|(_, name)| name).collect();
    for (limit, offset) in [(1000, 0), (1, 0), (7, 0), (10, 33), (5, 88), (3, 200)] {
        let page = listed(&broker, &format!("queue=q&from=2026-01-01&limit={limit}&offset={offset}")).await;
        let wanted: Vec<String> = expected.iter().skip(offset).take(limit).cloned().collect();
        assert_eq!(page, (wanted, 90), "{limit} {offset}");
    }
}

#[tokio::test]
async fn each_filter_filters() {
    let broker = Broker::start().await;
    let p = Lane::empty(&broker, "p").await;
    let r = Lane::empty(&broker, "r").await;
    p.write(&[("old", "0")]).await;
    p.write(&[("first", "0")]).await;
    p.write(&[("last", "0")]).await;
    r.write(&[("other", "0")]).await;
    age(&p, 0, "2026-01-01 00:00:00Z").await;
    age(&p, 1, "2026-01-01 00:00:01Z").await;
    broker.execute("update queen.queues set namespace = 'shop', task = 'bill'", &[]).await;
    broker.post("/api/v1/push", json!({"items": [{"queue": "x.y", "transactionId": "far", "payload": 1}]})).await;
    let one = |id: &str| (vec![id.to_owned()], 1);
    assert_eq!(listed(&broker, "partition=p").await, one("last"), "the others are older than an hour");
    assert_eq!(listed(&broker, "queue=q&partition=r").await, one("other"));
    assert_eq!(listed(&broker, "queue=none").await, (vec![], 0));
    assert_eq!(listed(&broker, "namespace=shop&partition=p").await, one("last"));
    assert_eq!(listed(&broker, "ns=x").await, one("far"));
    assert_eq!(listed(&broker, "task=y").await, one("far"));
    assert_eq!(listed(&broker, "task=bill&ns=shop&namespace=shop").await.1, 2);
    let span = |from: &str, to: &str| format!("queue=q&from=2026-01-01T00:00:{from}Z&to=2026-01-01T00:00:{to}Z");
    assert_eq!(listed(&broker, &span("00", "01")).await, (vec!["first".to_owned(), "old".to_owned()], 2));
    assert_eq!(listed(&broker, &span("00", "00.999999")).await, one("old"));
    assert_eq!(listed(&broker, &span("00.000001", "01")).await, one("first"));
    assert_eq!(listed(&broker, &span("01.000001", "30")).await, (vec![], 0));
    assert_eq!(listed(&broker, "queue=q&from=2026-01-01").await.1, 4);
}

#[tokio::test]
async fn a_status_filter_agrees_with_the_status_that_is_shown() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    lane.append(4).await;
    lane.append(6).await;
    let by_status = async |status: &str| listed(&broker, &format!("status={status}")).await;
    let m = |range: std::ops::Range<i64>| {
        let count = range.end - range.start;
        (range.rev().map(|n| format!("m{n}")).collect::<Vec<_>>(), count)
    };
    assert_eq!(by_status("pending").await, m(0..10));
    assert_eq!(by_status("completed").await, m(0..0));

    // Queue mode counts only while no named group is there.
    commit(&lane, "__QUEUE_MODE__", 4).await;
    assert_eq!(by_status("completed").await, m(0..5));
    commit(&lane, "g", 2).await;
    commit(&lane, "h", 6).await;
    assert_eq!(by_status("completed").await, m(0..3));
    assert_eq!(by_status("pending").await, m(3..10));
    lane.lease_as("h", LEASE, 7, 60.0).await;
    lane.lease_as("g", LEASE, 4, 60.0).await;
    assert_eq!(by_status("processing").await, (vec!["m7".into(), "m4".into(), "m3".into()], 3));
    lane.lease_as("h", LEASE, 7, -1.0).await;
    assert_eq!(by_status("processing").await, m(3..5), "an expired lease is none");
    file(&lane, "h", 4, "m4", None).await;
    file(&lane, "g", 4, "m4", None).await;
    file(&lane, "h", 1, "m1", None).await;
    assert_eq!(by_status("dead_letter").await, (vec!["m4".into(), "m1".into()], 2));
    assert_eq!(by_status("processing").await, m(3..4));
    assert_eq!(by_status("completed").await, (vec!["m2".into(), "m0".into()], 2));

    let all = list(&broker, "").await;
    let shown: Vec<&str> =
        all["messages"].as_array().expect("a list").iter().map(|row| row["status"].as_str().expect("a text")).collect();
    assert_eq!(
        shown,
        [
            "pending",
            "pending",
            "pending",
            "pending",
            "pending",
            "dead_letter",
            "processing",
            "completed",
            "dead_letter",
            "completed"
        ]
    );
    assert_eq!(all["mode"], json!({"hasQueueMode": true, "busGroupsCount": 2, "type": "hybrid"}));
    let fifth = &all["messages"][4];
    assert_eq!(
        (&fifth["transactionId"], &fifth["busStatus"]),
        (&json!("m5"), &json!({"consumedBy": 1, "totalGroups": 2}))
    );
    assert_eq!(fifth["queueStatus"], "pending");
    assert_eq!(all["messages"][6]["queueStatus"], "completed");
    assert!(all["messages"][6]["leaseExpiresAt"].is_string());
}

#[tokio::test]
async fn a_row_has_the_fields_of_the_wire_and_the_payload_as_it_was_sent() {
    let broker = Broker::start().await;
    let trace = Uuid::from_u128(7);
    let sent = r#"{ "b": 1.0, "a": "\u0000\ud800", "b": -0 }"#;
    let body = format!(
        r#"{{"items": [{{"queue": "x.y", "payload": 0, "transactionId": "t0"}},
            {{"queue": "x.y", "payload": 1, "transactionId": "t1", "traceId": "{trace}"}},
            {{"queue": "x.z", "payload": {sent}}}]}}"#
    );
    let (_, pushed) = broker.post_raw("/api/v1/push", body).await;
    let (status, bytes) = broker.get_bytes("/api/v1/messages?queue=x.z").await;
    let text = String::from_utf8(bytes).expect("UTF-8");
    assert_eq!(status, 200);
    assert!(text.contains(&format!(r#""data":{sent},"payload":{sent}"#)), "{text}");
    let list = list(&broker, "queue=x.y").await;
    let row = &list["messages"][0];
    let pid: Uuid = broker
        .row(
            "select p.id from queen.log_partitions p join queen.queues q on q.id = p.queue_id where q.name = 'x.y'",
            &[],
        )
        .await
        .get(0);
    for (key, value) in [
        ("id", pushed[1]["message_id"].clone()),
        ("transactionId", json!("t1")),
        ("txnHash", json!(format!("{:032x}", u128::from_be_bytes(ebbtide::segment::hash("t1"))))),
        ("partitionId", json!(pid)),
        ("queuePath", json!("x.y/Default")),
        ("queue", json!("x.y")),
        ("partition", json!("Default")),
        ("namespace", json!("x")),
        ("task", json!("y")),
        ("status", json!("pending")),
        ("queueStatus", json!(null)),
        ("busStatus", json!({"consumedBy": 0, "totalGroups": 0})),
        ("traceId", json!(trace)),
        ("producerSub", json!(null)),
        ("queuePriority", json!(0)),
        ("payloadAvailable", json!(true)),
        ("segment", json!({"seq": 0, "frameIdx": 1})),
        ("leaseExpiresAt", json!(null)),
        ("isEncrypted", json!(false)),
    ] {
        assert_eq!(row[key], value, "{key}");
    }
    assert_eq!(row["createdAt"].as_str().map(str::len), Some("2026-08-28T10:11:12.123456Z".len()));
    assert_eq!(list["mode"], json!({"hasQueueMode": false, "busGroupsCount": 0, "type": "none"}));
}

#[tokio::test]
async fn a_message_whose_segment_is_gone_is_listed_without_payload() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    lane.append(2).await;
    lane.append(1).await;
    broker.execute("delete from queen.log_segments where base_offset = 0", &[]).await;
    broker.execute("update queen.log_partitions set log_start = 2", &[]).await;
    let list = list(&broker, "").await;
    let of = |key: &str| -> Vec<Value> {
        list["messages"].as_array().expect("a list").iter().map(|row| row[key].clone()).collect()
    };
    assert_eq!(list["total"], 3);
    assert_eq!(of("payloadAvailable"), [json!(true), json!(false), json!(false)]);
    assert_eq!(of("transactionId"), [json!("m2"), json!(null), json!(null)]);
    assert_eq!(of("status"), [json!("pending"), json!("completed"), json!("completed")], "nobody will be given them");
    assert_eq!(listed(&broker, "status=pending").await, (vec!["m2".to_owned()], 1));
    // Beyond the sidecar's window nothing is listed, live or not.
    broker.execute("delete from queen.log_txns", &[]).await;
    broker.execute("update queen.log_partitions set txns_start = 3", &[]).await;
    assert_eq!(listed(&broker, "").await, (vec![], 0));
}

#[tokio::test]
async fn an_answer_unpacks_only_so_much_and_says_what_it_left_out() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let large = format!("\"{}\"", "x".repeat(20 << 20));
    for n in 0..4 {
        lane.write(&[(&format!("m{n}"), &large)]).await;
    }
    let list = list(&broker, "").await;
    let omitted: Vec<bool> =
        list["messages"].as_array().expect("a list").iter().map(|row| row["payloadOmitted"] == true).collect();
    assert_eq!(omitted, [false, false, true, true]);
    assert_eq!((&list["total"], &list["messages"][3]["payloadAvailable"]), (&json!(4), &json!(true)));
    assert_eq!(list["messages"][0]["data"].as_str().map(str::len), Some(20 << 20));
}

#[tokio::test]
async fn what_is_wrong_in_a_list_is_named() {
    let broker = Broker::start().await;
    for (query, field) in [
        ("limit=-1", "limit"),
        ("limit=1001", "limit"),
        ("limit=ten", "limit"),
        ("offset=-1", "offset"),
        ("offset=10001", "offset"),
        ("from=yesterday", "from"),
        ("to=2026-13-01", "to"),
        ("status=done", "status"),
        ("queue=%00", "queue"),
        ("partition=%1f", "partition"),
        ("ns=a&namespace=b", "ns"),
    ] {
        let (status, body) = broker.get(&format!("/api/v1/messages?{query}")).await;
        assert_eq!(status, 400, "{query}: {body}");
        assert!(body["error"].as_str().expect("a text").starts_with(field), "{query}: {body}");
    }
}

#[tokio::test]
async fn partitions_beyond_the_cap_are_not_counted_and_the_answer_says_so() {
    let broker = Broker::start().await;
    for name in ["a", "b", "c"] {
        let lane = Lane::empty(&broker, name).await;
        lane.append(1).await;
    }
    let query = "select partition, total, truncated from queen.list_messages_v1(null, null, null, null, null, null, null, 9, 0, $1)";
    for (lanes, partitions, truncated) in [(2, vec!["c", "b"], true), (3, vec!["c", "b", "a"], false)] {
        let rows = broker.rows(query, &[&lanes]).await;
        assert_eq!(rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>(), partitions);
        assert!(rows.iter().all(|row| row.get::<_, i64>(1) == i64::from(lanes) && row.get::<_, bool>(2) == truncated));
    }
}
