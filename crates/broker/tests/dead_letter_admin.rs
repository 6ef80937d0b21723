//! Dead letters by the many: replayed to where they came from, or deleted for good.

mod support;

use serde_json::{Value, json};
use support::Broker;
use support::lane::Lane;
use tokio_postgres::{Client, Row};
use uuid::Uuid;

/// Files a message as `group`'s, so many seconds into the year.
async fn file(lane: &Lane<'_>, group: &str, offset: i64, payload: Option<&str>, second: i32) -> Uuid {
    let query = "insert into queen.log_dlq
            (partition_id, consumer_group, \"offset\", transaction_id, payload, error, failed_at)
        values ($1, $2, $3::bigint, 'm' || $3::bigint, $4, 'boom', '2026-01-01 00:00:00Z'::timestamptz + make_interval(secs => $5))
        returning id";
    lane.broker.row(query, &[&lane.id, &group, &offset, &payload, &f64::from(second)]).await.get(0)
}

async fn filed(broker: &Broker) -> Vec<String> {
    let query = "select p.name || ' ' || d.consumer_group || ' ' || d.\"offset\" from queen.log_dlq d
        join queen.log_partitions p on p.id = d.partition_id order by d.failed_at";
    broker.rows(query, &[]).await.iter().map(|row: &Row| row.get(0)).collect()
}

/// The payloads of a partition in offset order, as far as a consumer group that starts at the beginning reads.
async fn payloads(broker: &Broker, partition: &str) -> Vec<Value> {
    let path = format!(
        "/api/v1/pop/queue/q/partition/{partition}?consumerGroup=look&subscriptionMode=all&batch=10000&autoAck=true"
    );
    let (_, body) = broker.get(&path).await;
    body["messages"]
        .as_array()
        .map(|list| list.iter().map(|message| message["data"].clone()).collect())
        .unwrap_or_default()
}

async fn replay(broker: &Broker, body: Value) -> Value {
    let (status, answer) = broker.post("/api/v1/dlq/replay", body.clone()).await;
    assert_eq!(status, 200, "{body}: {answer}");
    answer
}

#[tokio::test]
async fn a_replay_pushes_each_message_once_in_its_order_and_says_what_it_did() {
    let broker = Broker::start().await;
    let p = Lane::empty(&broker, "p").await;
    let r = Lane::empty(&broker, "r").await;
    file(&p, "g", 5, Some("\"p5\""), 1).await;
    file(&p, "g", 3, Some("\"p3\""), 2).await;
    file(&p, "h", 5, Some("\"p5\""), 3).await;
    file(&r, "g", 0, Some("\"r0\""), 4).await;
    file(&r, "g", 1, None, 5).await;
    let answer = replay(&broker, json!({"queue": "q"})).await;
    let counts = json!({
        "success": true, "matched": 5, "replayed": 4, "messages": 3, "withoutPayload": 1, "remaining": 0,
    });
    assert_eq!(answer, counts);
    assert_eq!(filed(&broker).await, ["r g 1"], "there is nothing to push");
    assert_eq!(payloads(&broker, "p").await, ["p3", "p5"]);
    assert_eq!(payloads(&broker, "r").await, ["r0"]);
    let ids = broker.rows("select hashes from queen.log_txns where octet_length(hashes) = 32", &[]).await;
    let hashes: Vec<u8> = ids[0].get(0);
    assert_ne!(hashes[..16], hashes[16..], "each has a transaction id of its own");
    let answer = replay(&broker, json!({"queue": "q"})).await;
    assert_eq!((&answer["matched"], &answer["replayed"], &answer["remaining"]), (&json!(1), &json!(0), &json!(0)));
}

#[tokio::test]
async fn a_replay_wakes_who_waits() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    file(&lane, "g", 0, Some("\"again\""), 1).await;
    let pop = broker.get("/api/v1/pop/queue/q?wait=true&timeout=50000");
    let replay = async {
        support::until("the pop is parked", || broker.app.wake.parked() == 1).await;
        replay(&broker, json!({"queue": "q"})).await
    };
    let ((status, popped), _) = tokio::join!(pop, replay);
    assert_eq!((status, &popped["messages"][0]["data"]), (200, &json!("again")));
}

#[tokio::test]
async fn each_filter_chooses_what_is_deleted() {
    let broker = Broker::start().await;
    let p = Lane::empty(&broker, "p").await;
    let r = Lane::empty(&broker, "r").await;
    let first = file(&p, "g", 0, Some("0"), 1).await;
    let second = file(&p, "h", 1, None, 2).await;
    for (lane, group, second) in [(&p, "g", 3), (&r, "g", 4), (&r, "h", 5), (&p, "g", 6), (&r, "g", 7), (&r, "g", 8)] {
        file(lane, group, i64::from(second), Some("1"), second).await;
    }
    let delete = async |query: &str| {
        let (status, body) = broker.delete(&format!("/api/v1/dlq?{query}")).await;
        assert_eq!((status, &body["success"]), (200, &json!(true)), "{query}: {body}");
        (
            body["matched"].as_i64().expect("n"),
            body["deleted"].as_i64().expect("n"),
            body["remaining"].as_i64().expect("n"),
        )
    };
    assert_eq!(delete("queue=none").await, (0, 0, 0));
    assert_eq!(delete(&format!("ids={}", Uuid::from_u128(1))).await, (0, 0, 0));
    assert_eq!(delete(&format!("ids={first}&consumerGroup=h")).await, (0, 0, 0), "filters narrow each other");
    assert_eq!(delete(&format!("ids={first},{second}")).await, (2, 2, 0), "without payload too");
    assert_eq!(delete("queue=q&partition=r&consumerGroup=h").await, (1, 1, 0));
    assert_eq!(filed(&broker).await, ["p g 3", "r g 4", "p g 6", "r g 7", "r g 8"]);
    assert_eq!(delete("queue=q&from=2026-01-01T00:00:04Z&to=2026-01-01T00:00:06Z").await, (2, 2, 0));
    assert_eq!(delete("queue=q&limit=2").await, (3, 2, 1));
    assert_eq!(filed(&broker).await, ["r g 8"], "the oldest go first");
    assert_eq!(broker.row("select count(*) from queen.log_segments", &[]).await.get::<_, i64>(0), 0);
}

#[tokio::test]
async fn a_step_ends_at_its_bytes_and_passes_over_what_is_gone() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let mut ids = vec![Uuid::from_u128(1)];
    for n in 0..4 {
        ids.push(file(&lane, "g", n, Some("12345678"), 1).await);
    }
    let query = "select ordinal from queen.log_dlq_letters_v1($1, $2)";
    for (bytes, ordinals) in [(1, vec![2]), (8, vec![2]), (9, vec![2, 3]), (1000, vec![2, 3, 4, 5])] {
        let rows = broker.rows(query, &[&ids, &i64::from(bytes)]).await;
        assert_eq!(rows.iter().map(|row| row.get::<_, i64>(0)).collect::<Vec<_>>(), ordinals, "{bytes}");
    }
}

#[tokio::test]
async fn more_than_one_step_holds_are_replayed_in_several() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let query =
        "insert into queen.log_dlq (partition_id, consumer_group, \"offset\", transaction_id, payload, failed_at)
        select $1, 'g', n, 'm' || n, n::text, now() + n * interval '1 second' from generate_series(0, 1199) n";
    broker.execute(query, &[&lane.id]).await;
    let answer = replay(&broker, json!({"queue": "q", "limit": 1100})).await;
    assert_eq!((&answer["replayed"], &answer["remaining"]), (&json!(1100), &json!(100)));
    assert_eq!(payloads(&broker, "p").await, (0..1100).map(Value::from).collect::<Vec<_>>());
    let segments: i64 = broker.row("select count(*) from queen.log_segments", &[]).await.get(0);
    assert_eq!(segments, 3, "500 at most in one transaction");
}

#[tokio::test]
async fn replays_and_deletions_of_the_same_letters_neither_lose_nor_double_any() {
    let broker = Broker::start().await;
    for name in ["p", "r", "s"] {
        let lane = Lane::empty(&broker, name).await;
        let query = "insert into queen.log_dlq (partition_id, consumer_group, \"offset\", transaction_id, payload)
            select $1, 'g', n, 'm' || n, n::text from generate_series(0, 399) n";
        broker.execute(query, &[&lane.id]).await;
    }
    let calls = (0..6).map(|n| {
        let broker = &broker;
        async move {
            let (status, answer) = if n % 2 == 0 {
                broker.post("/api/v1/dlq/replay", json!({"queue": "q", "limit": 300})).await
            } else {
                broker.delete("/api/v1/dlq?queue=q&limit=50").await
            };
            (n % 2 == 0, status, answer)
        }
    });
    let (mut replayed, mut deleted) = (0, 0);
    for (is_replay, status, answer) in futures_util::future::join_all(calls).await {
        // A replay may lose the race for its letters more often than it tries; it has then done nothing.
        assert!(status == 200 || (is_replay && status == 500), "{status} {answer}");
        replayed += answer["replayed"].as_i64().unwrap_or(0);
        deleted += answer["deleted"].as_i64().unwrap_or(0);
    }
    let stored: i64 = broker.row("select sum(last_offset + 1)::bigint from queen.log_partitions", &[]).await.get(0);
    assert_eq!(stored, replayed);
    assert_eq!(filed(&broker).await.len() as i64, 1200 - replayed - deleted);
    assert!(0 < replayed);
}

#[tokio::test]
async fn what_is_wrong_is_named_and_nothing_goes() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    file(&lane, "g", 0, Some("1"), 1).await;
    let many: Vec<Uuid> = (0..1001).map(Uuid::from_u128).collect();
    for (body, error) in [
        (json!({}), "queue or ids is required"),
        (json!({"consumerGroup": "g"}), "queue or ids is required"),
        (json!({"queue": null}), "queue or ids is required"),
        (json!({"queue": "q", "group": "g"}), "bad body: unknown field `group`"),
        (json!({"queue": ""}), "queue"),
        (json!({"queue": 7}), "queue"),
        (json!({"queue": "q", "partition": "a\u{1f}"}), "partition"),
        (json!({"queue": "q", "consumerGroup": ""}), "consumerGroup"),
        (json!({"ids": []}), "ids"),
        (json!({"ids": ["x"]}), "ids"),
        (json!({"ids": [7]}), "ids"),
        (json!({"ids": 7}), "ids"),
        (json!({"ids": many}), "ids"),
        (json!({"queue": "q", "limit": 0}), "limit"),
        (json!({"queue": "q", "limit": -1}), "limit"),
        (json!({"queue": "q", "limit": 10_001}), "limit"),
        (json!({"queue": "q", "limit": 1.5}), "limit"),
        (json!({"queue": "q", "limit": 1e300}), "limit"),
        (json!({"queue": "q", "from": "yesterday"}), "from"),
        (json!({"queue": "q", "to": 5}), "to"),
        (json!([]), "bad body: must be an object"),
        (json!(["q"]), "bad body: must be an object"),
        (json!("q"), "bad body"),
    ] {
        let (status, answer) = broker.post("/api/v1/dlq/replay", body.clone()).await;
        assert_eq!(status, 400, "{body}: {answer}");
        assert!(answer["error"].as_str().expect("a text").starts_with(error), "{body}: {answer}");
    }
    for (query, error) in [
        ("", "queue or ids is required"),
        ("queue=", "queue"),
        ("queue=q&grp=g", "query: has no parameter \"grp\""),
        ("queue=q&consumerGroup=", "consumerGroup"),
        ("ids=", "ids"),
        ("queue=q&limit=x", "limit"),
        ("queue=q&limit=99999999999999999999", "limit"),
    ] {
        let (status, answer) = broker.delete(&format!("/api/v1/dlq?{query}")).await;
        assert_eq!(status, 400, "{query}: {answer}");
        assert!(answer["error"].as_str().expect("a text").starts_with(error), "{query}: {answer}");
    }
    let (status, answer) = broker.post("/api/v1/dlq/replay?queue=q", json!({"queue": "q"})).await;
    assert_eq!(
        (status, &answer["error"]),
        (400, &json!("queue: must be given in the query or in the body, not in both"))
    );
    assert_eq!(filed(&broker).await, ["p g 0"]);
    let (status, answer) = broker.post_raw("/api/v1/dlq/replay?queue=q&limit=5", "").await;
    assert_eq!((status, &answer["replayed"]), (200, &json!(1)), "the query alone is enough");
}

/// Runs a statement again and again on a session of its own. It may lose a race, but never by a deadlock.
async fn repeat(client: Client, query: &'static str, times: usize) -> u64 {
    let mut done = 0;
    for _ in 0..times {
        match client.query(query, &[]).await {
            Ok(_) => done += 1,
            Err(error) => {
                let code = error.code().unwrap_or_else(|| panic!("{query}: {error:?}"));
                assert!(["QN001", "23503"].contains(&code.code()), "{query}: {error:?}");
            }
        }
    }
    done
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replays_deletions_and_moves_never_deadlock() {
    const FILL: &str = "with made as (
            select id from unnest(queen.log_provision_v1(array_fill('q'::text, array[4]), array['a', 'b', 'c', 'd'])) id
        ), locked as (
            select p.id from queen.log_partitions p where p.id in (select id from made) order by p.id for key share
        )
        insert into queen.log_dlq (partition_id, consumer_group, \"offset\", transaction_id, payload)
        select locked.id, 'g', n, 'm' || n, '1' from locked, generate_series(1, 5) n";
    const REPLAY: &str = "with l as (
            select d.id, d.partition_id from queen.log_dlq d order by random() limit 8
        ), p as (
            select distinct partition_id from l
        )
        select queen.log_dlq_replay_v1((select array_agg(id) from l), array_agg(partition_id order by random()),
            array_agg(1), array_agg(decode(md5(random()::text), 'hex')), array_agg('\\x00'::bytea))
        from p having 0 < count(*)";
    const OTHERS: [&str; 4] = [
        "select queen.log_dlq_delete_v1(array(select id from queen.log_dlq order by random() limit 4))",
        "select queen.delete_message_v1(l.partition_id, l.transaction_id)
            from (select * from queen.log_dlq order by random() limit 1) l",
        "select queen.log_dlq_move_v1(p.id, '__QUEUE_MODE__', coalesce(c.committed, -1) + 1, null, 'moved', '1', 'why')
            from (select * from queen.log_partitions order by random() limit 1) p
            left join queen.log_consumers c on c.partition_id = p.id",
        "select queen.delete_queue_v1('q') where random() < 0.1",
    ];
    let broker = Broker::start().await;
    repeat(broker.database.client().await, FILL, 1).await;
    let mut sessions = Vec::new();
    for query in [FILL, REPLAY, REPLAY].into_iter().chain(OTHERS) {
        sessions.push((query, tokio::spawn(repeat(broker.database.client().await, query, 150))));
    }
    for (query, session) in sessions {
        assert!(0 < session.await.expect("no deadlock"), "{query}: had its turn");
    }
    let query = "select count(*) from queen.log_dlq where partition_id not in (select id from queen.log_partitions)";
    assert_eq!(broker.row(query, &[]).await.get::<_, i64>(0), 0, "no letter without its partition");
}

#[tokio::test]
async fn a_list_leaves_out_payloads_beyond_its_memory() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let large = format!("\"{}\"", "x".repeat(20 << 20));
    for offset in 0..4 {
        let payload = if offset == 1 { "1" } else { &large };
        file(&lane, "g", offset, Some(payload), i32::try_from(offset).expect("few")).await;
    }
    file(&lane, "g", 4, None, -1).await;
    let (status, body) = broker.get("/api/v1/dlq?queue=q").await;
    assert_eq!(status, 200);
    let messages = body["messages"].as_array().expect("messages");
    let shown: Vec<(i64, bool, bool)> = messages
        .iter()
        .map(|message| {
            let omitted = message["payloadOmitted"] == json!(true);
            (message["offset"].as_i64().expect("a number"), !message["data"].is_null(), omitted)
        })
        .collect();
    // Newest first: the second large one reaches the limit.
    assert_eq!(shown, [(3, true, false), (2, true, false), (1, false, true), (0, false, true), (4, false, false)]);
    assert_eq!(body["total"], json!(5));
    let (_, rest) = broker.get("/api/v1/dlq?queue=q&offset=2").await;
    assert_eq!(rest["messages"][0]["data"], json!(1));
}
