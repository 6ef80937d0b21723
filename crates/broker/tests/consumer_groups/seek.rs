//! Seek: where cursors land, what a seek forgets, whom it wakes and what it waits for.

use std::time::Duration;

use ebbtide::http::{PopWait, Settings};
use jiff::Timestamp;
use serde_json::{Value, json};
use uuid::Uuid;

use super::support::log::Stored;
use super::support::names::{encoded, hard_names};
use super::support::random::Random;
use super::support::{Broker, PATIENCE, until, wait_until};
use super::{WATERMARK, count, take};

const IN_QUEUE: &str = "/api/v1/consumer-groups/g/queues/q/seek";
const HOUR: Duration = Duration::from_secs(3600);

/// The time of the segment at `base`, moved by so many microseconds.
async fn time_of(b: &Broker, stored: Stored, us: i64) -> String {
    let query = "select created_at from queen.log_segments where partition_id = $1 and base_offset = $2";
    let at: Timestamp = b.row(query, &[&stored.partition_id, &stored.base]).await.get(0);
    Timestamp::from_microsecond(at.as_microsecond() + us).expect("near now").to_string()
}

async fn seek(b: &Broker, to: Value) -> Value {
    let (status, body) = b.post(IN_QUEUE, to).await;
    assert_eq!(status, 200, "{body}");
    body
}

async fn committed(b: &Broker, id: Uuid) -> i64 {
    b.cursor(id, "g").await.expect("a cursor").0
}

#[tokio::test]
async fn a_seek_to_the_end_passes_everything_and_drops_leases() {
    let b = Broker::start().await;
    let one = b.store("q", "a", 3).await;
    let two = b.store("q", "b", 5).await;
    let (_, held) = b.pop("queue/q/partition/a?consumerGroup=g&subscriptionMode=all&batch=2").await;
    b.execute("update queen.log_consumers set batch_retry_count = 2", &[]).await;
    let body = seek(&b, json!({"toEnd": true})).await;
    let expected = json!({
        "success": true, "consumerGroup": "g", "queueName": "q", "seekToEnd": true, "targetTimestamp": null,
        "partitionsUpdated": 2, "clamped": false, "clampedToStart": 0, "clampedToEnd": 0,
    });
    assert_eq!(body, expected);
    assert_eq!(b.cursor(one.partition_id, "g").await, Some((2, None, 0, false)));
    assert_eq!(b.cursor(two.partition_id, "g").await, Some((4, None, 0, false)));
    assert_eq!(count(&b, "select sum(batch_retry_count) from queen.log_consumers").await, 0);
    assert_eq!(take(&b, "g", 10).await, [""; 0]);
    let ack = json!({"transactionId": "a-0", "partitionId": one.partition_id, "leaseId": held["leaseId"],
        "consumerGroup": "g", "status": "failed"});
    let (_, body) = b.post("/api/v1/ack", ack).await;
    assert_eq!(body[0]["success"], false, "the lease is gone: {body}");
    b.store("q", "a", 1).await;
    assert_eq!(take(&b, "g", 10).await, ["a-3"]);
}

#[tokio::test]
async fn a_seek_to_a_time_lands_before_the_first_segment_from_then_on() {
    let b = Broker::start().await;
    let first = b.store_aged("q", "a", 2, 30.0).await;
    let second = b.store_aged("q", "a", 2, 20.0).await;
    let third = b.store_aged("q", "a", 2, 10.0).await;
    let cases = [
        (first, -1, -1, true, "before the first message"),
        (first, 0, -1, false, "at the first"),
        (first, 1, 1, false, "after the first"),
        (second, -1, 1, false, "before the second"),
        (second, 0, 1, false, "at the second"),
        (second, 1, 3, false, "after the second"),
        (third, 0, 3, false, "at the last"),
        (third, 1, 5, true, "after the last"),
    ];
    for (stored, us, expected, clamped, what) in cases {
        let to = time_of(&b, stored, us).await;
        let body = seek(&b, json!({"timestamp": to})).await;
        assert_eq!(committed(&b, first.partition_id).await, expected, "{what}");
        assert_eq!(body["clamped"], clamped, "{what}: {body}");
        assert_eq!((&body["seekToEnd"], &body["targetTimestamp"]), (&json!(false), &json!(to)));
    }
    seek(&b, json!({"timestamp": time_of(&b, second, 0).await, "toEnd": false})).await;
    assert_eq!(take(&b, "g", 10).await, ["a-2", "a-3", "a-4", "a-5"]);
}

#[tokio::test]
async fn a_seek_beyond_the_ends_says_how_many_partitions_it_clamped() {
    let b = Broker::start().await;
    let kept = b.store("q", "a", 2).await;
    b.store("q", "a", 2).await;
    b.delete_below(kept.partition_id, 2).await;
    let emptied = b.store("q", "b", 3).await;
    b.delete_below(emptied.partition_id, 3).await;

    let body = seek(&b, json!({"timestamp": "0001-01-01T00:00:00Z"})).await;
    assert_eq!(
        (&body["clamped"], &body["clampedToStart"], &body["clampedToEnd"]),
        (&json!(true), &json!(1), &json!(1))
    );
    assert_eq!(committed(&b, kept.partition_id).await, 1, "the oldest message that is there");
    assert_eq!(committed(&b, emptied.partition_id).await, 2, "nothing is there: the tail");

    let body = seek(&b, json!({"timestamp": "9999-01-01T00:00:00Z"})).await;
    assert_eq!(
        (&body["clamped"], &body["clampedToStart"], &body["clampedToEnd"]),
        (&json!(true), &json!(0), &json!(2))
    );
    assert_eq!(committed(&b, kept.partition_id).await, 3);
}

#[tokio::test]
async fn halving_finds_what_walking_finds() {
    let b = Broker::start().await;
    let mut random = Random::seeded();
    b.execute("insert into queen.queues (name) values ('q')", &[]).await;
    let id: Uuid = b
        .row("insert into queen.log_partitions (queue_id, name) select id, 'a' from queen.queues returning id", &[])
        .await
        .get(0);
    let (mut base, mut at, mut log_start) = (random.below(50), 0_i64, None);
    for _ in 0..150 {
        let end = base + random.below(40);
        at += random.below(3);
        let segment =
            "insert into queen.log_segments values ($1, $2, $3, 'epoch'::timestamptz + make_interval(secs => $4), '')";
        b.execute(segment, &[&id, &base, &end, &(at as f64)]).await;
        log_start.get_or_insert(base);
        // Some stand right behind each other, some leave a hole.
        base = end + 1 + if random.below(4) == 0 { random.below(100) } else { 0 };
    }
    let differing = "with p as (select $1::uuid as id, $2::bigint as log_start, $3::bigint as last_offset)
        select count(*) filter (where t.r_committed is distinct from queen.log_seed_cursor_v1(
                   p.id, p.log_start, p.last_offset, 'timestamp', times.at)), count(*)
        from p, generate_series(-1, $4::bigint + 1) n,
             lateral (select 'epoch'::timestamptz + make_interval(secs => n) as at) times,
             lateral queen.log_seek_target_v1(p.id, p.log_start, p.last_offset, times.at) t";
    let start = log_start.expect("there are segments");
    let row = b.row(differing, &[&id, &start, &(base - 1), &at]).await;
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (0, at + 3));
}

#[tokio::test]
async fn one_partition_is_sought_alone_and_without_a_body_to_its_end() {
    let b = Broker::start().await;
    let one = b.store("q", "a", 3).await;
    let two = b.store("q", "b", 3).await;
    take(&b, "g", 1).await;
    b.complete_leases().await;
    let before = committed(&b, two.partition_id).await;
    let path = "/api/v1/consumer-groups/g/queues/q/partitions/a/seek";
    let (status, body) = b.post_raw(path, "").await;
    let expected = json!({
        "success": true, "consumerGroup": "g", "queueName": "q", "partitionName": "a", "updated": true,
        "seekToEnd": true, "targetTimestamp": null, "partitionsUpdated": 1,
        "clamped": false, "clampedToStart": 0, "clampedToEnd": 0,
    });
    assert_eq!((status, body), (200, expected));
    assert_eq!(committed(&b, one.partition_id).await, 2);
    assert_eq!(committed(&b, two.partition_id).await, before);
    let (status, body) = b.post(path, json!({"timestamp": "2020-01-01T00:00:00Z"})).await;
    assert_eq!((status, &body["clampedToStart"]), (200, &json!(1)));
    assert_eq!(committed(&b, one.partition_id).await, -1);
    assert_eq!(b.post(path, json!({})).await.0, 400, "an object that says nothing is no empty body");
}

#[tokio::test]
async fn what_is_no_place_is_refused() {
    let b = Broker::start().await;
    b.store("q", "a", 1).await;
    let neither = json!({"error": "Must specify toEnd=true or a timestamp"});
    for path in [IN_QUEUE, "/api/v1/consumer-groups/g/queues/q/partitions/a/seek"] {
        for body in ["{}", r#"{"toEnd":false}"#, r#"{"toEnd":null,"timestamp":null}"#, r#"{"position":"latest"}"#] {
            assert_eq!(b.post_raw(path, body).await, (400, neither.clone()), "{body}");
        }
        for (body, field) in [
            (r#"{"toEnd":"yes"}"#, "toEnd: must be true or false"),
            (r#"{"toEnd":1}"#, "toEnd: must be true or false"),
            (r#"{"timestamp":"yesterday"}"#, "timestamp: must be an ISO 8601 time"),
            (r#"{"timestamp":""}"#, "timestamp: must be an ISO 8601 time"),
            (r#"{"timestamp":1788000000}"#, "timestamp: must be an ISO 8601 time"),
            (r#"{"timestamp":"2026-02-30T00:00:00Z"}"#, "timestamp: must be an ISO 8601 time"),
            (r#"{"timestamp":"-005000-01-01T00:00:00Z"}"#, "timestamp: must not lie before the year 1"),
            (
                r#"{"toEnd":true,"timestamp":"2026-01-01T00:00:00Z"}"#,
                "timestamp: must not be given together with toEnd",
            ),
        ] {
            assert_eq!(b.post_raw(path, body).await, (400, json!({"error": field})), "{body}");
        }
        for body in ["{", "[]", "true"] {
            let (status, answer) = b.post_raw(path, body).await;
            assert_eq!(status, 400, "{body}");
            assert!(answer["error"].as_str().expect("a text").starts_with("bad body: "), "{answer}");
        }
    }
    assert_eq!(b.post_raw(IN_QUEUE, "").await, (400, neither));
    assert_eq!(count(&b, "select count(*) from queen.log_consumers").await, 0, "nothing moved");
}

#[tokio::test]
async fn a_queue_or_partition_that_is_not_there_is_not_found() {
    let b = Broker::start().await;
    b.execute("insert into queen.queues (name) values ('bare')", &[]).await;
    let end = json!({"toEnd": true});
    let no_queue = json!({"error": "Queue not found or has no partitions"});
    for queue in ["nowhere", "bare"] {
        let path = format!("/api/v1/consumer-groups/g/queues/{queue}/seek");
        assert_eq!(b.post(&path, end.clone()).await, (404, no_queue.clone()), "{queue}");
        let path = format!("/api/v1/consumer-groups/g/queues/{queue}/partitions/p/seek");
        assert_eq!(b.post(&path, end.clone()).await, (404, json!({"error": "Partition not found"})), "{queue}");
    }
    let long = "x".repeat(256);
    for path in
        [format!("g/queues/{long}/seek"), format!("{long}/queues/q/seek"), format!("g/queues/q/partitions/{long}/seek")]
    {
        assert_eq!(b.post(&format!("/api/v1/consumer-groups/{path}"), end.clone()).await.0, 400);
    }
}

#[tokio::test]
async fn any_name_can_be_sought() {
    let b = Broker::start().await;
    for name in hard_names() {
        b.store(&name, &name, 2).await;
        let quoted = encoded(&name);
        let path = format!("/api/v1/consumer-groups/{quoted}/queues/{quoted}/partitions/{quoted}/seek");
        let (status, body) = b.post_raw(&path, "").await;
        assert_eq!((status, &body["partitionName"], &body["queueName"]), (200, &json!(name), &json!(name)), "{body}");
    }
}

#[tokio::test]
async fn a_seek_back_is_seen_by_discovery_and_wakes_who_waits() {
    let pop_wait = PopWait { initial: HOUR, threshold: 1, multiplier: 1.0, longest: HOUR };
    let b = Broker::with(Settings { pop_wait, ..Settings::default() }).await;
    let p = b.store_aged("q", "a", 2, 3600.0).await;
    take(&b, "g", 10).await;
    b.complete_leases().await;
    b.execute(WATERMARK, &[&"g"]).await;
    assert_eq!(take(&b, "g", 10).await, [""; 0], "all is consumed");
    let waits = ["q?", "q/partition/a?"].map(|path| {
        let url = format!("{}/api/v1/pop/queue/{path}consumerGroup=g&wait=true&timeout=600000", b.url);
        tokio::spawn(async move { reqwest::get(url).await.expect("the server answers").status().as_u16() })
    });
    until("both are parked", || b.app.wake.parked() == 2).await;
    seek(&b, json!({"timestamp": time_of(&b, p, 0).await})).await;
    let [any, only] = waits;
    let first = tokio::time::timeout(PATIENCE, futures_util::future::select(any, only)).await.expect("one was woken");
    let status = match first {
        futures_util::future::Either::Left((status, other)) | futures_util::future::Either::Right((status, other)) => {
            other.abort();
            status.expect("it ended")
        }
    };
    assert_eq!(status, 200);
}

#[tokio::test]
async fn a_queue_of_more_partitions_than_a_step_takes_is_sought_whole() {
    let b = Broker::start().await;
    b.execute("insert into queen.queues (name) values ('q'), ('other')", &[]).await;
    let partitions = "insert into queen.log_partitions (queue_id, name, last_offset)
        select q.id, 'p' || n, n from queen.queues q, generate_series(1, 1501) n";
    b.execute(partitions, &[]).await;
    let body = seek(&b, json!({"toEnd": true})).await;
    assert_eq!(body["partitionsUpdated"], 1501);
    let right = "select count(*) from queen.log_consumers c join queen.log_partitions p on p.id = c.partition_id
        join queen.queues q on q.id = p.queue_id where c.committed = p.last_offset and q.name = 'q'";
    assert_eq!(count(&b, right).await, 1501);
    assert_eq!(count(&b, "select count(*) from queen.log_consumers").await, 1501, "and no other queue's");
}

#[tokio::test]
async fn a_seek_takes_partitions_by_ascending_id_before_any_cursor() {
    let b = Broker::start().await;
    let mut lanes = [b.store("q", "b", 1).await.partition_id, b.store("q", "a", 1).await.partition_id];
    lanes.sort();
    let [low, high] = lanes;
    seek(&b, json!({"toEnd": true})).await;
    let step = b.database.client().await;
    let hold = format!("begin; select from queen.log_partitions where id = '{low}' for update");
    step.batch_execute(&hold).await.expect("held");
    let sought = b.post(IN_QUEUE, json!({"timestamp": "2020-01-01T00:00:00Z"}));
    let rest = async {
        let blocked = "select count(*) = 1 from pg_stat_activity where datname = current_database()
            and application_name = 'ebbtide' and wait_event_type = 'Lock' and query like '%log_seek_step_v1%'";
        wait_until(&b.sql, "the seek waits for the lower partition", blocked, &[]).await;
        let free = format!(
            "select from queen.log_partitions where id = '{high}' for update nowait;
             select from queen.log_consumers where partition_id in ('{low}', '{high}') for update nowait; commit"
        );
        step.batch_execute(&free).await.expect("the seek holds nothing yet");
    };
    let ((status, _), ()) = tokio::join!(sought, rest);
    assert_eq!(status, 200);
    assert_eq!((committed(&b, low).await, committed(&b, high).await), (-1, -1));
}
