//! Consumer groups under an operator's hands: lists with lag, delete, another start time.

#[path = "consumer_groups/seek.rs"]
mod seek;
mod support;
#[path = "consumer_groups/together.rs"]
mod together;

use serde_json::{Value, json};
use support::Broker;
use support::log::ids;
use support::names::{encoded, hard_names};

/// Pops a batch as `group`, which starts at the oldest message.
async fn take(b: &Broker, group: &str, batch: usize) -> Vec<String> {
    b.pop_ids(&format!("queue/q?consumerGroup={}&subscriptionMode=all&partitions=10&batch={batch}", encoded(group)))
        .await
}

async fn count(b: &Broker, query: &str) -> i64 {
    b.row(query, &[]).await.get(0)
}

const WATERMARK: &str = "insert into queen.consumer_watermarks (queue_id, consumer_group, last_empty_scan_at)
    select id, $1, now() from queen.queues
    on conflict (queue_id, consumer_group) do update set last_empty_scan_at = now()";

#[tokio::test]
async fn a_deleted_group_comes_back_as_a_new_one() {
    let b = Broker::start().await;
    b.store("q", "a", 2).await;
    b.store("q", "b", 1).await;
    let other = b.store("other", "p", 1).await;
    assert_eq!(take(&b, "g", 10).await.len(), 3, "all leased");
    assert_eq!(take(&b, "h", 10).await.len(), 3);
    b.pop_ids("queue/other?consumerGroup=g&subscriptionMode=all").await;
    b.execute(WATERMARK, &[&"g"]).await;
    b.execute(WATERMARK, &[&"h"]).await;

    let (status, body) = b.delete("/api/v1/consumer-groups/g?deleteMetadata=true").await;
    let expected = json!({"success": true, "consumerGroup": "g", "deletedPartitions": 3, "metadataDeleted": true});
    assert_eq!((status, body), (200, expected));
    for table in ["log_consumers", "consumer_groups_metadata", "consumer_watermarks"] {
        let left = |group: &str| format!("select count(*) from queen.{table} where consumer_group = '{group}'");
        assert_eq!(count(&b, &left("g")).await, 0, "{table}");
        assert!(0 < count(&b, &left("h")).await, "{table}");
    }
    assert_eq!(b.cursor(other.partition_id, "g").await, None);
    let mut again = take(&b, "g", 10).await;
    again.sort();
    assert_eq!(again, ["a-0", "a-1", "b-0"], "everything, as at first contact");
}

#[tokio::test]
async fn a_group_deleted_with_its_metadata_kept_remembers_what_it_asked_for() {
    let b = Broker::start().await;
    b.store("q", "a", 1).await;
    assert_eq!(b.pop_ids("queue/q?consumerGroup=g&subscriptionMode=new").await, [""; 0]);
    b.store("q", "a", 1).await;
    let (status, body) = b.delete("/api/v1/consumer-groups/g?deleteMetadata=false").await;
    let expected = json!({"success": true, "consumerGroup": "g", "deletedPartitions": 1, "metadataDeleted": false});
    assert_eq!((status, body), (200, expected));
    assert_eq!(take(&b, "g", 10).await, ["a-1"], "what was pushed after it subscribed");
}

#[tokio::test]
async fn a_group_is_deleted_from_one_queue_and_stays_in_another() {
    let b = Broker::start().await;
    let here = b.store("q", "a", 1).await;
    let there = b.store("other", "a", 1).await;
    take(&b, "g", 1).await;
    b.pop_ids("queue/other?consumerGroup=g&subscriptionMode=all").await;
    let (status, body) = b.delete("/api/v1/consumer-groups/g/queues/q").await;
    let expected = json!({
        "success": true, "consumerGroup": "g", "queueName": "q", "deletedPartitions": 1, "metadataDeleted": true,
    });
    assert_eq!((status, body), (200, expected));
    assert_eq!(b.cursor(here.partition_id, "g").await, None);
    assert!(b.cursor(there.partition_id, "g").await.is_some());
    assert_eq!(count(&b, "select count(*) from queen.consumer_groups_metadata").await, 1);
}

#[tokio::test]
async fn deleting_what_is_not_there_deletes_nothing() {
    let b = Broker::start().await;
    let nothing = json!({"success": true, "consumerGroup": "g", "deletedPartitions": 0, "metadataDeleted": false});
    assert_eq!(b.delete("/api/v1/consumer-groups/g").await, (200, nothing.clone()));
    let (status, body) = b.delete("/api/v1/consumer-groups/g/queues/nowhere").await;
    assert_eq!((status, &body["deletedPartitions"]), (200, &json!(0)));
    let (status, body) = b.delete("/api/v1/consumer-groups/g?deleteMetadata=maybe").await;
    assert_eq!(status, 400);
    assert_eq!(body["error"], "deleteMetadata: must be true or false");
    let long = "x".repeat(256);
    let (status, body) = b.delete(&format!("/api/v1/consumer-groups/{long}")).await;
    assert_eq!(status, 400);
    assert_eq!(body["error"], "consumerGroup: must have 1 to 255 characters, has 256");
}

#[tokio::test]
async fn a_group_with_more_cursors_than_a_step_takes_is_deleted_whole() {
    let b = Broker::start().await;
    b.execute("insert into queen.queues (name) values ('q'), ('other')", &[]).await;
    let partitions = "insert into queen.log_partitions (queue_id, name, last_offset)
        select q.id, n::text, 0 from queen.queues q, generate_series(1, $1) n where q.name = $2";
    b.execute(partitions, &[&2001_i32, &"q"]).await;
    b.execute(partitions, &[&500_i32, &"other"]).await;
    let cursors = "insert into queen.log_consumers (partition_id, consumer_group)
        select id, g from queen.log_partitions, unnest('{g,h}'::text[]) g";
    b.execute(cursors, &[]).await;
    let (_, body) = b.delete("/api/v1/consumer-groups/g/queues/q").await;
    assert_eq!(body["deletedPartitions"], 2001);
    let (_, body) = b.delete("/api/v1/consumer-groups/g").await;
    assert_eq!(body["deletedPartitions"], 500);
    assert_eq!(count(&b, "select count(*) from queen.log_consumers").await, 2501, "the other group's");
}

#[tokio::test]
async fn any_name_is_a_group() {
    let b = Broker::start().await;
    b.store("q", "a", 1).await;
    for name in hard_names().iter().map(String::as_str).chain(["lagging"]) {
        let path = format!("/api/v1/consumer-groups/{}", encoded(name));
        assert_eq!(take(&b, name, 1).await, ["a-0"], "{name}");
        if name != "lagging" {
            let (status, body) = b.get(&path).await;
            assert_eq!((status, &body["q"]["partitions"][0]["partition"]), (200, &json!("a")), "{name}");
        }
        let (status, body) = b.post(&format!("{path}/queues/q/seek"), json!({"toEnd": true})).await;
        assert_eq!((status, &body["consumerGroup"]), (200, &json!(name)), "{body}");
        let (status, body) =
            b.post(&format!("{path}/subscription"), json!({"subscriptionTimestamp": "2026-01-01T00:00:00Z"})).await;
        assert_eq!((status, &body["rowsUpdated"]), (200, &json!(1)), "{name}: {body}");
        let (status, body) = b.delete(&path).await;
        assert_eq!((status, &body["deletedPartitions"]), (200, &json!(1)), "{name}: {body}");
    }
}

#[tokio::test]
async fn another_start_time_counts_where_the_group_has_no_cursor() {
    let b = Broker::start().await;
    let old = b.store("q", "old", 1).await;
    b.pop_ids("queue/q?consumerGroup=g&subscriptionMode=new").await;
    let body = json!({"subscriptionTimestamp": "2020-01-01T00:00:00Z"});
    let (status, answer) = b.post("/api/v1/consumer-groups/g/subscription", body).await;
    let expected = json!({
        "success": true, "consumerGroup": "g", "newTimestamp": "2020-01-01T00:00:00Z", "rowsUpdated": 1,
    });
    assert_eq!((status, answer), (200, expected));
    assert_eq!(b.cursor(old.partition_id, "g").await.expect("a cursor").0, 0, "stays where it is");
    b.store_aged("q", "late", 1, 3600.0).await;
    assert_eq!(take(&b, "g", 10).await, ["late-0"], "an hour older than the first contact");
}

#[tokio::test]
async fn a_subscription_to_everything_becomes_one_from_a_time() {
    let b = Broker::start().await;
    b.store("q", "old", 1).await;
    take(&b, "g", 1).await;
    b.execute(WATERMARK, &[&"g"]).await;
    let at: String = b.row("select queen.iso_milliseconds(now() - interval '1 minute')", &[]).await.get(0);
    b.post("/api/v1/consumer-groups/g/subscription", json!({"subscriptionTimestamp": at})).await;
    assert_eq!(count(&b, "select count(*) from queen.consumer_watermarks").await, 0);
    b.store_aged("q", "late", 1, 3600.0).await;
    b.store_aged("q", "late", 1, 0.0).await;
    assert_eq!(take(&b, "g", 10).await, ["late-1"]);
}

#[tokio::test]
async fn a_start_time_must_be_given_and_be_a_time() {
    let b = Broker::start().await;
    let path = "/api/v1/consumer-groups/g/subscription";
    let missing = "subscriptionTimestamp is required";
    assert_eq!(b.post_raw(path, "").await, (400, json!({"error": missing})));
    assert_eq!(b.post(path, json!({})).await, (400, json!({"error": missing})));
    assert_eq!(b.post(path, json!({"subscriptionTimestamp": null})).await, (400, json!({"error": missing})));
    for bad in [json!("yesterday"), json!(5), json!(""), json!(["2026-01-01T00:00:00Z"])] {
        let (status, body) = b.post(path, json!({"subscriptionTimestamp": bad})).await;
        assert_eq!(status, 400);
        assert_eq!(body["error"], "subscriptionTimestamp: must be an ISO 8601 time", "{bad}");
    }
    for body in ["{", "[]", "nonsense"] {
        let (status, answer) = b.post_raw(path, body).await;
        assert_eq!(status, 400);
        assert!(answer["error"].as_str().expect("a text").starts_with("bad body: "), "{answer}");
    }
    let (status, body) = b.post(path, json!({"subscriptionTimestamp": "2026-01-01T00:00:00Z"})).await;
    assert_eq!((status, &body["rowsUpdated"]), (200, &json!(0)), "nobody knows the group");
}

/// Group `g` on queue `q`: three partitions, one consumed, one half consumed an hour late, one never seen.
async fn late_group(b: &Broker) {
    let done = b.store("q", "done", 4).await;
    let half = b.store_aged("q", "half", 2, 7200.0).await;
    b.store_aged("q", "half", 3, 3600.0).await;
    b.pop_ids("queue/q?consumerGroup=g&subscriptionMode=all&batch=1").await;
    let set =
        "update queen.log_consumers set committed = $2::bigint, worker_id = null, batch_end = null, total_consumed = $2::bigint + 1
        where partition_id = $1";
    b.execute(set, &[&done.partition_id, &3_i64]).await;
    b.execute(set, &[&half.partition_id, &1_i64]).await;
    b.store_aged("q", "unseen", 5, 60.0).await;
}

#[tokio::test]
async fn groups_are_listed_with_their_lag() {
    let b = Broker::start().await;
    assert_eq!(b.get("/api/v1/consumer-groups").await, (200, json!([])));
    late_group(&b).await;
    let (status, body) = b.get("/api/v1/consumer-groups").await;
    assert_eq!(status, 200);
    let listed = body.as_array().expect("an array");
    assert_eq!(listed.len(), 1);
    let group = listed[0].as_object().expect("an object").clone();
    let lag = group["maxTimeLag"].as_i64().expect("seconds");
    assert!((3600..3700).contains(&lag), "{lag}: the first pending message, not the first message");
    for time in ["subscriptionTimestamp", "subscriptionCreatedAt"] {
        let text = group[time].as_str().expect("a time");
        assert!(text.len() == 24 && text.ends_with('Z'), "{text}: milliseconds, UTC");
    }
    let mut rest = group;
    for varying in ["maxTimeLag", "subscriptionTimestamp", "subscriptionCreatedAt"] {
        rest.remove(varying);
    }
    let expected = json!({
        "name": "g", "topics": ["q"], "queueName": "q", "members": 2, "partitionCursors": 2, "partitionsWithLag": 2,
        "totalLag": 8, "gone": 0, "state": "Lagging", "storage": "segments", "subscriptionMode": "all",
        "conflation": false,
    });
    assert_eq!(Value::Object(rest), expected);
    assert_eq!(b.get("/api/v1/consumer-groups?limit=10&offset=1").await, (200, json!([])));
    assert_eq!(b.get("/api/v1/consumer-groups?limit=0").await, (200, json!([])));
}

#[tokio::test]
async fn a_group_is_stable_when_it_is_not_late_and_dead_without_a_cursor() {
    let b = Broker::start().await;
    b.store("q", "a", 1).await;
    take(&b, "fresh", 1).await;
    b.pop_ids("queue/empty?consumerGroup=early").await;
    b.pop_ids("queue/q").await;
    let (_, body) = b.get("/api/v1/consumer-groups").await;
    let states: Vec<(&str, &str)> = body
        .as_array()
        .expect("an array")
        .iter()
        .map(|group| (group["name"].as_str().expect("a name"), group["state"].as_str().expect("a state")))
        .collect();
    assert_eq!(states, [("__QUEUE_MODE__", "Stable"), ("early", "Dead"), ("fresh", "Stable")]);
    assert_eq!(body[0]["subscriptionMode"], Value::Null, "queue mode has no subscription");
    assert_eq!(body[0]["totalLag"], 1, "leased and not yet acknowledged");
}

#[tokio::test]
async fn lagging_partitions_are_those_that_wait_long_enough() {
    let b = Broker::start().await;
    late_group(&b).await;
    let late = async |query: &str| {
        let (status, body) = b.get(&format!("/api/v1/consumer-groups/lagging{query}")).await;
        assert_eq!(status, 200);
        let rows = body.as_array().expect("an array").clone();
        let named: Vec<String> =
            rows.iter().map(|row| row["partition_name"].as_str().expect("a name").into()).collect();
        (rows, named)
    };
    let (rows, names) = late("").await;
    assert_eq!(names, ["half"], "an hour by default");
    let row = &rows[0];
    assert_eq!(row["consumer_group"], "g");
    assert_eq!(row["queue_name"], "q");
    assert_eq!(row["offset_lag"], 3);
    assert_eq!(row["lag_hours"], 1.0);
    assert_eq!(row["last_consumed_at"], Value::Null);
    assert_eq!(row["worker_id"], Value::Null);
    assert!(row["partition_id"].is_string() && row["oldest_unconsumed_at"].is_string());
    assert!(3600 <= row["time_lag_seconds"].as_i64().expect("seconds"));
    assert_eq!(late("?minLagSeconds=60").await.1, ["half", "unseen"], "the most delayed first");
    assert_eq!(late("?minLagSeconds=0&limit=1&offset=1").await.1, ["unseen"]);
    assert_eq!(late("?minLagSeconds=9223372036854775807").await.1, [""; 0]);
    for bad in ["-1", "1.5", "soon", "9223372036854775808"] {
        let (status, body) = b.get(&format!("/api/v1/consumer-groups/lagging?minLagSeconds={bad}")).await;
        assert_eq!(status, 400, "{bad}");
        assert!(body["error"].as_str().expect("a text").starts_with("minLagSeconds: "), "{body}");
    }
}

#[tokio::test]
async fn one_group_is_shown_by_queue_and_partition() {
    let b = Broker::start().await;
    late_group(&b).await;
    let (_, leased) = b.pop("queue/q/partition/half?consumerGroup=g&batch=1").await;
    assert_eq!(ids(&leased), ["half-2"]);
    let (status, body) = b.get("/api/v1/consumer-groups/g").await;
    assert_eq!(status, 200);
    assert_eq!(body["q"]["conflation"], false);
    let partitions = body["q"]["partitions"].as_array().expect("an array");
    assert_eq!(
        partitions[0],
        json!({
            "partition": "done", "workerId": null, "lastConsumedAt": null, "totalConsumed": 4, "offsetLag": 0,
            "timeLagSeconds": 0, "leaseActive": false, "gone": 0,
        })
    );
    assert_eq!(partitions[1]["workerId"], leased["leaseId"]);
    assert_eq!((&partitions[1]["leaseActive"], &partitions[1]["offsetLag"]), (&json!(true), &json!(3)));
    assert_eq!((&partitions[2]["partition"], &partitions[2]["offsetLag"]), (&json!("unseen"), &json!(5)));
    assert_eq!(b.get("/api/v1/consumer-groups/nobody").await, (200, json!({})));
}

#[tokio::test]
async fn what_was_deleted_before_a_group_came_to_it_is_gone() {
    let b = Broker::start().await;
    let p = b.store("q", "a", 2).await;
    b.store("q", "a", 3).await;
    b.store("q", "a", 4).await;
    take(&b, "g", 1).await;
    b.complete_leases().await;
    b.delete_below(p.partition_id, 5).await;
    let (_, body) = b.get("/api/v1/consumer-groups/g").await;
    let partition = &body["q"]["partitions"][0];
    assert_eq!((&partition["gone"], &partition["offsetLag"]), (&json!(4), &json!(4)), "offsets 1 to 4, and 5 to 8");
    let (_, body) = b.get("/api/v1/consumer-groups").await;
    assert_eq!((&body[0]["gone"], &body[0]["totalLag"]), (&json!(4), &json!(4)));
    let (_, body) = b.get("/api/v1/consumer-groups/lagging?minLagSeconds=0").await;
    assert_eq!(body[0]["gone"], 4);
    assert_eq!(take(&b, "g", 10).await.len(), 4, "the gap is skipped");
}
