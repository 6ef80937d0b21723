//! Push over HTTP: answers, bytes, order, duplicates, and what happens when a partition is slow or gone.

mod support;

use std::collections::HashSet;

use ebbtide::http::Settings;
use ebbtide::segment::Segment;
use futures_util::future::join_all;
use serde_json::{Value, json};
use support::{Broker, Database, wait_until};
use uuid::Uuid;

const PUSH: &str = "/api/v1/push";
const NIL: &str = "00000000-0000-0000-0000-000000000000";

fn item(partition: &str, transaction_id: &str, payload: impl Into<Value>) -> Value {
    json!({"queue": "q", "partition": partition, "transactionId": transaction_id, "payload": payload.into()})
}

async fn push(broker: &Broker, items: Vec<Value>) -> Vec<Value> {
    let (status, body) = broker.post(PUSH, json!({"items": items})).await;
    assert_eq!(status, 201, "{body}");
    body.as_array().expect("an array").clone()
}

fn statuses(answer: &[Value]) -> Vec<&str> {
    answer.iter().map(|item| item["status"].as_str().expect("a status")).collect()
}

/// Another server on the same database.
async fn sibling(broker: &Broker) -> Broker {
    let Database { name, target } = &broker.database;
    Broker::on(Database { name: name.clone(), target: target.clone() }, Settings::default()).await
}

/// Transaction ids and payloads of a partition, in offset order.
async fn stored(broker: &Broker, partition: &str) -> Vec<(String, String)> {
    let query = "select s.blob from queen.log_segments s join queen.log_partitions p on p.id = s.partition_id
        where p.name = $1 order by s.base_offset";
    let mut messages = Vec::new();
    for row in broker.rows(query, &[&partition]).await {
        let segment = Segment::unpack(row.get(0)).expect("a segment");
        for frame in segment.frames() {
            let payload = String::from_utf8(frame.payload.to_vec()).expect("JSON is UTF-8");
            messages.push((frame.transaction_id.to_owned(), payload));
        }
    }
    messages
}

async fn ids_stored(broker: &Broker, partition: &str) -> Vec<String> {
    stored(broker, partition).await.into_iter().map(|(id, _)| id).collect()
}

#[tokio::test]
async fn every_item_is_answered_in_request_order() {
    let broker = Broker::start().await;
    let items = vec![item("1", "a", 1), json!({"queue": "other", "payload": null}), item("1", "b", 2)];
    let answer = push(&broker, items).await;
    assert_eq!(statuses(&answer), ["queued"; 3]);
    for (index, (given, queue)) in [(Some("a"), "q"), (None, "other"), (Some("b"), "q")].into_iter().enumerate() {
        let item = &answer[index];
        assert_eq!(item["index"], index);
        assert_eq!(item["queueName"], queue);
        let id = item["message_id"].as_str().expect("an id");
        assert_eq!(Uuid::parse_str(id).expect("a UUID").get_version_num(), 7);
        assert_eq!(item["transaction_id"], given.unwrap_or(id), "the message id stands in for a missing one");
        assert!(item.get("error").is_none());
    }
    assert_eq!(stored(&broker, "Default").await[0].1, "null");
    assert_eq!(push(&broker, vec![]).await, Vec::<Value>::new());
}

#[tokio::test]
async fn a_repeated_transaction_id_is_a_duplicate_with_the_first_id() {
    let broker = Broker::start().await;
    let first = push(&broker, vec![item("1", "a", 1), item("1", "b", 2), item("1", "c", 3)]).await;
    let again = push(&broker, vec![item("1", "x", 4), item("1", "b", 5), item("2", "b", 6), item("1", "y", 7)]).await;
    assert_eq!(statuses(&again), ["queued", "duplicate", "queued", "queued"]);
    assert_eq!(again[1]["message_id"], first[1]["message_id"]);
    assert_eq!(again[1]["transaction_id"], "b");
    assert_eq!(ids_stored(&broker, "1").await, ["a", "b", "c", "x", "y"], "the rest is stored, in order");
    let all = push(&broker, vec![item("1", "c", 8), item("1", "a", 9)]).await;
    assert_eq!(statuses(&all), ["duplicate"; 2]);
    assert_eq!([&all[0]["message_id"], &all[1]["message_id"]], [&first[2]["message_id"], &first[0]["message_id"]]);
}

#[tokio::test]
async fn a_duplicate_whose_message_is_gone_has_the_zero_id() {
    let broker = Broker::start().await;
    push(&broker, vec![item("1", "a", 1)]).await;
    broker.execute("delete from queen.log_segments", &[]).await;
    let again = push(&broker, vec![item("1", "a", 1), item("1", "b", 1)]).await;
    assert_eq!(statuses(&again), ["duplicate", "queued"]);
    assert_eq!(again[0]["message_id"], NIL);
}

#[tokio::test]
async fn inside_one_request_the_first_wins_whatever_the_window() {
    let broker = Broker::start().await;
    for window in [3600, 0] {
        let partition = window.to_string();
        push(&broker, vec![item(&partition, "seed", 0)]).await;
        broker.execute("update queen.queues set dedup_window_seconds = $1", &[&window]).await;
        let items = vec![item(&partition, "a", 1), item(&partition, "b", 2), item(&partition, "a", 3)];
        let answer = push(&broker, items).await;
        assert_eq!(statuses(&answer), ["queued", "queued", "duplicate"]);
        assert_eq!(answer[2]["message_id"], answer[0]["message_id"]);
        let again = push(&broker, vec![item(&partition, "a", 4)]).await;
        assert_eq!(statuses(&again), [if window == 0 { "queued" } else { "duplicate" }]);
    }
}

#[tokio::test]
async fn concurrent_repeats_without_a_window_are_all_stored() {
    let broker = Broker::start().await;
    push(&broker, vec![item("1", "a", 0)]).await;
    broker.execute("update queen.queues set dedup_window_seconds = 0", &[]).await;
    let pushes = (0..20).map(|n| push(&broker, vec![item("1", "a", n)]));
    for answer in join_all(pushes).await {
        assert_eq!(statuses(&answer), ["queued"]);
    }
    assert_eq!(ids_stored(&broker, "1").await.len(), 21);
}

#[tokio::test]
async fn another_servers_push_is_seen() {
    let broker = Broker::start().await;
    let other = sibling(&broker).await;
    let first = push(&broker, vec![item("1", "a", 1)]).await;
    let second = push(&other, vec![item("1", "b", 1), item("1", "a", 2)]).await;
    assert_eq!(statuses(&second), ["queued", "duplicate"]);
    assert_eq!(second[1]["message_id"], first[0]["message_id"]);
    let third = push(&broker, vec![item("1", "c", 1), item("1", "b", 2)]).await;
    assert_eq!(statuses(&third), ["queued", "duplicate"], "a gap in what a server knows is probed");
    assert_eq!(third[1]["message_id"], second[0]["message_id"]);
}

#[tokio::test]
async fn a_window_that_grows_brings_old_ids_back() {
    let broker = Broker::start().await;
    push(&broker, vec![item("1", "a", 1)]).await;
    broker.execute("update queen.log_txns set created_at = now() - interval '100 seconds'", &[]).await;
    let set = "update queen.queues set dedup_window_seconds = $1";
    broker.execute(set, &[&60]).await;
    let before: Vec<Value> = push(&broker, vec![item("1", "b", 1), item("1", "c", 1)]).await;
    assert_eq!(statuses(&before), ["queued"; 2]);
    broker.execute(set, &[&3600]).await;
    assert_eq!(statuses(&push(&broker, vec![item("1", "a", 2)]).await), ["duplicate"]);
    broker.execute(set, &[&60]).await;
    assert_eq!(statuses(&push(&broker, vec![item("1", "a", 2)]).await), ["queued"], "it is older than the window");
}

#[tokio::test]
async fn a_queue_made_again_remembers_no_transaction_id() {
    let broker = Broker::start().await;
    push(&broker, vec![item("1", "a", 1), item("1", "b", 1)]).await;
    broker.execute("delete from queen.queues", &[]).await;
    assert_eq!(statuses(&push(&broker, vec![item("1", "a", 2)]).await), ["queued"]);
    // Made again by somebody else, who stored an id below what this server vouched for.
    broker.execute("delete from queen.queues", &[]).await;
    let other = sibling(&broker).await;
    push(&other, vec![item("1", "fresh", 1)]).await;
    assert_eq!(statuses(&push(&broker, vec![item("1", "fresh", 2), item("1", "b", 1)]).await), ["duplicate", "queued"]);
}

#[tokio::test]
async fn one_push_is_one_segment() {
    let broker = Broker::start().await;
    let items = (0..100).map(|n| item("1", &n.to_string(), n)).collect();
    let answer = push(&broker, items).await;
    let ids: Vec<&str> = answer.iter().map(|item| item["message_id"].as_str().expect("an id")).collect();
    assert!(ids.is_sorted_by(|a, b| a < b), "ids sort in offset order");
    let row = broker.row("select count(*), min(base_offset), max(end_offset) from queen.log_segments", &[]).await;
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1), row.get::<_, i64>(2)), (1, 0, 99));
}

#[tokio::test]
async fn many_callers_make_a_new_queue_together() {
    let broker = Broker::start().await;
    let pushes = (0..50).map(|n| push(&broker, vec![item(&(n % 7).to_string(), &format!("t{n}"), n)]));
    for answer in join_all(pushes).await {
        assert_eq!(statuses(&answer), ["queued"]);
    }
    let row = broker.row("select count(*), sum(last_offset + 1)::bigint from queen.log_partitions", &[]).await;
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (7, 50));
}

#[tokio::test]
async fn a_hot_partition_stays_dense_and_in_order() {
    let broker = Broker::start().await;
    let other = sibling(&broker).await;
    let pushes = (0..200).map(|n| {
        let target = if n % 3 == 0 { &other } else { &broker };
        push(target, vec![item("1", &format!("a{n}"), n), item("1", &format!("b{n}"), n)])
    });
    for answer in join_all(pushes).await {
        assert_eq!(statuses(&answer), ["queued"; 2]);
    }
    let query = "select base_offset, end_offset,
            base_offset - 1 - coalesce(lag(end_offset) over w, -1) as hole,
            coalesce(created_at >= lag(created_at) over w, true) as in_time
        from queen.log_segments window w as (order by base_offset)";
    let rows = broker.rows(query, &[]).await;
    assert!(rows.iter().all(|row| row.get::<_, i64>(2) == 0 && row.get::<_, bool>(3)), "dense, and stamps never fall");
    assert_eq!(rows.last().expect("segments").get::<_, i64>(1), 399);
    assert!(rows.len() < 200, "concurrent pushes share commits: {} segments", rows.len());
    let ids = ids_stored(&broker, "1").await;
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 400);
    for pair in ids.chunks(2) {
        assert_eq!(pair[0][1..], pair[1][1..], "a request's messages stay together");
    }
}

#[tokio::test]
async fn a_push_to_ten_thousand_partitions_is_stored() {
    let broker = Broker::start().await;
    let items = (0..10_000).map(|n| item(&n.to_string(), "a", n)).collect();
    let answer = push(&broker, items).await;
    assert!(answer.iter().all(|item| item["status"] == "queued"));
    let row = broker.row("select count(distinct partition_id) from queen.log_segments", &[]).await;
    assert_eq!(row.get::<_, i64>(0), 10_000);
}

#[tokio::test]
async fn payloads_come_back_byte_for_byte() {
    let broker = Broker::start().await;
    let payloads = [
        "null",
        r#"{"b":1,"a":2,"b":3}"#,
        "12345678901234567890.1000e+0010",
        r#""\u0000 \ud800 \/ \u00e9""#,
        "\"😀 é \u{7f}\"",
        "[ 1,\t2 ]",
        &format!("{}1{}", "[".repeat(128), "]".repeat(128)),
    ];
    let items: Vec<String> =
        payloads.iter().map(|p| format!(r#"{{"queue":"q","partition":"1","payload":{p}}}"#)).collect();
    let (status, body) = broker.post_raw(PUSH, format!(r#"{{"items":[{}]}}"#, items.join(","))).await;
    assert_eq!(status, 201, "{body}");
    let back: Vec<String> = stored(&broker, "1").await.into_iter().map(|(_, payload)| payload).collect();
    assert_eq!(back, payloads);
}

#[tokio::test]
async fn what_is_wrong_is_refused_by_name_and_nothing_is_stored() {
    let broker = Broker::start().await;
    let good = r#"{"queue":"q","payload":1}"#;
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let cases: Vec<(String, &str)> = vec![
        (format!(r#"{{"items":[{good},{{"payload":1}}]}}"#), "[1].queue"),
        (format!(r#"{{"items":[{good},{{"queue":"q"}}]}}"#), "[1].payload"),
        (format!(r#"{{"items":[{{"queue":"{}","payload":1}}]}}"#, "n".repeat(256)), "[0].queue"),
        (r#"{"items":[{"queue":"a\u0001","payload":1}]}"#.to_owned(), "[0].queue"),
        (r#"{"items":[{"queue":"q","partition":"a\u001fb","payload":1}]}"#.to_owned(), "[0].partition"),
        (
            format!(r#"{{"items":[{{"queue":"q","payload":1,"transactionId":"{}"}}]}}"#, "t".repeat(65_536)),
            "[0].transactionId",
        ),
        (format!(r#"{{"items":[{good},{{"queue":"q","payload":{deep}}}]}}"#), "[1].payload"),
        (r#"{"items":[{"queue":["q"],"payload":1}]}"#.to_owned(), "items[0]"),
        ("{}".to_owned(), "items"),
        ("[".to_owned(), "bad body"),
        (String::new(), "bad body"),
    ];
    for (body, named) in cases {
        let (status, answer) = broker.post_raw(PUSH, body).await;
        assert_eq!(status, 400, "{named}: {answer}");
        assert!(answer["error"].as_str().expect("text").contains(named), "{named}: {answer}");
    }
    let (status, _) = broker.post_raw(PUSH, b"{\"items\":[{\"queue\":\"q\",\"payload\":\"\xFF\"}]}".to_vec()).await;
    assert_eq!(status, 400, "not UTF-8");
    assert_eq!(broker.row("select count(*) from queen.queues", &[]).await.get::<_, i64>(0), 0);
    let longest = json!({"queue": "é".repeat(255), "partition": "p".repeat(255), "transactionId": "t".repeat(65_535), "payload": 1});
    assert_eq!(statuses(&push(&broker, vec![longest.clone()]).await), ["queued"]);
    assert_eq!(statuses(&push(&broker, vec![longest]).await), ["duplicate"]);
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_413() {
    let broker = Broker::with(Settings { body_bytes_max: 10_000, ..Settings::default() }).await;
    let (status, body) = broker.post(PUSH, json!({"items": [item("1", "a", "x".repeat(20_000))]})).await;
    assert_eq!(status, 413);
    assert!(body["error"].is_string(), "{body}");
}

const BLOCKED: &str = "select count(*) > 0 from pg_stat_activity
    where application_name = 'ebbtide' and wait_event_type = 'Lock' and datname = current_database()";
/// A push that waits for a lock without a limit has left its bundle.
const SPLIT_OFF: &str = "select count(*) > 0 from pg_stat_activity
    where application_name = 'ebbtide' and wait_event_type = 'Lock' and datname = current_database()
      and clock_timestamp() - query_start > interval '100 milliseconds'";

#[tokio::test]
async fn one_slow_partition_delays_no_other() {
    let broker = Broker::start().await;
    push(&broker, (0..20).map(|n| item(&n.to_string(), "seed", 0)).collect()).await;
    let mut holder = broker.database.client().await;
    let lock = holder.transaction().await.expect("begins");
    lock.execute("select from queen.log_partitions where name = '7' for update", &[]).await.expect("locks");
    let slow = async { push(&broker, vec![item("7", "slow", 1), item("8", "beside", 1)]).await };
    let others = async {
        wait_until(&broker.sql, "the slow push waits", SPLIT_OFF, &[]).await;
        for round in 0..5 {
            let pushes =
                (0..20).filter(|n| *n != 7).map(|n| push(&broker, vec![item(&n.to_string(), &format!("r{round}"), 1)]));
            for answer in join_all(pushes).await {
                assert_eq!(statuses(&answer), ["queued"]);
            }
        }
        assert_eq!(ids_stored(&broker, "8").await[1], "beside", "its companion was stored meanwhile");
        assert_eq!(ids_stored(&broker, "7").await, ["seed"]);
        lock.commit().await.expect("lets go");
    };
    let (answer, ()) = tokio::join!(slow, others);
    assert_eq!(statuses(&answer), ["queued"; 2]);
    assert_eq!(ids_stored(&broker, "7").await, ["seed", "slow"]);
}

#[tokio::test]
async fn a_partition_that_vanishes_under_a_push_is_made_again() {
    let broker = Broker::start().await;
    push(&broker, vec![item("1", "a", 1)]).await;
    let mut holder = broker.database.client().await;
    for round in 0..2 {
        // Without a window another path allocates the offsets.
        broker.execute("update queen.queues set dedup_window_seconds = $1", &[&(3600 * (1 - round))]).await;
        let lock = holder.transaction().await.expect("begins");
        let delete = "delete from queen.log_txns; delete from queen.log_partitions";
        lock.execute("select from queen.log_partitions for update", &[]).await.expect("locks");
        let cleanup = async {
            wait_until(&broker.sql, "the push waits", BLOCKED, &[]).await;
            lock.batch_execute(delete).await.expect("deletes");
            lock.commit().await.expect("commits");
        };
        let (answer, ()) = tokio::join!(push(&broker, vec![item("1", "a", 2)]), cleanup);
        assert_eq!(statuses(&answer), ["queued"]);
        assert_eq!(ids_stored(&broker, "1").await, ["a"]);
    }
}

#[tokio::test]
async fn a_partition_that_cannot_be_written_fails_alone() {
    let broker = Broker::start().await;
    push(&broker, vec![item("1", "a", 1), item("2", "a", 1)]).await;
    let obstacle =
        "insert into queen.log_segments select id, 1, 1, now(), 'x' from queen.log_partitions where name = '1'";
    broker.execute(obstacle, &[]).await;
    let answer = push(&broker, vec![item("1", "b", 1), item("2", "b", 1), item("3", "b", 1)]).await;
    assert_eq!(statuses(&answer), ["failed", "queued", "queued"]);
    assert!(answer[0]["error"].as_str().expect("text").contains("23505"), "{}", answer[0]);
    let (status, body) = broker.post(PUSH, json!({"items": [item("1", "b", 1)]})).await;
    assert_eq!(status, 500, "nothing was stored, so nothing looks like success");
    assert!(body["error"].is_string(), "{body}");
}

#[tokio::test]
async fn a_push_whose_client_hung_up_is_still_stored() {
    let broker = Broker::start().await;
    push(&broker, vec![item("1", "a", 1)]).await;
    let mut holder = broker.database.client().await;
    let lock = holder.transaction().await.expect("begins");
    lock.execute("select from queen.log_partitions for update", &[]).await.expect("locks");
    {
        let gone = push(&broker, vec![item("1", "b", 1)]);
        let blocked = wait_until(&broker.sql, "the push waits", BLOCKED, &[]);
        tokio::select! {
            _ = gone => panic!("the partition is locked"),
            () = blocked => {}
        }
    }
    lock.commit().await.expect("lets go");
    let fact = "select count(*) = 2 from queen.log_segments";
    wait_until(&broker.sql, "the push is stored", fact, &[]).await;
}

#[tokio::test]
async fn a_server_that_starts_on_a_full_log_learns_it_and_still_finds_duplicates() {
    let broker = Broker::start().await;
    let items = |range: std::ops::Range<i32>| range.map(|n| item("1", &n.to_string(), n)).collect::<Vec<_>>();
    for start in [0, 1_000, 2_000] {
        push(&broker, items(start..start + 1_000)).await;
    }
    let other = sibling(&broker).await;
    for round in 0..5 {
        let fresh = 10_000 + round * 10;
        let answer = push(&other, [items(fresh..fresh + 10), items(round * 500..round * 500 + 10)].concat()).await;
        assert_eq!(statuses(&answer), [["queued"; 10], ["duplicate"; 10]].concat());
    }
    assert_eq!(ids_stored(&broker, "1").await.len(), 3_050);
}
