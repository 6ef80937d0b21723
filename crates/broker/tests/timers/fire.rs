//! From a due timer to its message.

use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ebbtide::http::{PopWait, Settings};
use ebbtide::timers::Tally;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::support::{Broker, PATIENCE, until, wait_until};
use super::{encoded, left, one, popped, run, schedule, with};

const NOTHING: Tally = Tally { claimed: 0, fired: 0, duplicates: 0, failed: 0, dead: 0 };

async fn fire(broker: &Broker) -> Tally {
    broker.app.sweeper().fire_due().await.expect("the database is there")
}

#[tokio::test]
async fn a_due_timer_becomes_the_promised_message() {
    let broker = Broker::start().await;
    let payload = r#"{"b": 1.0, "a": "\u0000é"}"#;
    let due = with(schedule("q", "due", -5), json!({"payload": encoded(payload), "partition": "p"}));
    let results = run(&broker, json!([due, schedule("q", "later", 3_600_000)])).await;
    assert_eq!(fire(&broker).await, Tally { claimed: 1, fired: 1, ..NOTHING });
    assert_eq!(left(&broker).await, 1, "the other one is not due");
    let (_, bytes) = broker.get_bytes("/api/v1/pop/queue/q/partition/p?consumerGroup=g&subscriptionMode=all").await;
    assert!(String::from_utf8(bytes).expect("text").contains(payload), "byte for byte");
    broker.expire_leases().await;
    let messages = popped(&broker, "q").await;
    assert_eq!(messages.len(), 1);
    assert_eq!((json!(messages[0].0), messages[0].1.as_str()), (results[0]["messageId"].clone(), "txn-due"));
    assert_eq!(broker.get("/api/v1/timers/q/due").await.1["found"], false);
    assert_eq!(fire(&broker).await, NOTHING);
}

#[tokio::test]
async fn a_timer_is_due_at_its_microsecond() {
    let broker = Broker::start().await;
    run(&broker, json!(["before", "after"].map(|key| schedule("q", key, 0)))).await;
    broker
        .execute(
            "update queen.log_timers set due_at = case timer_key when 'before' then now() else now() + interval '1 hour' end",
            &[],
        )
        .await;
    assert_eq!(fire(&broker).await.fired, 1);
    let key: String = broker.row("select timer_key from queen.log_timers", &[]).await.get(0);
    assert_eq!(key, "after");
}

#[tokio::test]
async fn many_are_fired_in_bounded_claims() {
    let broker = Broker::start().await;
    for batch in 0..2 {
        let timers: Vec<Value> = (0..150).map(|n| schedule("q", &format!("{batch}-{n}"), -1)).collect();
        run(&broker, json!(timers)).await;
    }
    assert_eq!(fire(&broker).await, Tally { claimed: 300, fired: 300, ..NOTHING });
    let messages = popped(&broker, "q").await;
    assert_eq!(messages.len(), 300);
    let segments: i64 = broker.row("select count(*) from queen.log_segments", &[]).await.get(0);
    assert_eq!(segments, 2, "one segment a claim and partition");
    for row in broker.rows("select blob from queen.log_segments", &[]).await {
        let segment = ebbtide::segment::Segment::unpack(row.get(0)).expect("a segment");
        assert!(segment.frames().map(|frame| frame.message_id).is_sorted(), "ids sort along a segment");
    }
}

#[tokio::test]
async fn a_claim_is_bounded_in_bytes() {
    let broker = Broker::start().await;
    let payload = encoded(&format!("\"{}\"", "x".repeat(1_000_000)));
    let timers: Vec<Value> =
        (0..10).map(|n| with(schedule("q", &n.to_string(), -1), json!({"payload": payload}))).collect();
    run(&broker, json!(timers)).await;
    let query = "select count(*) from queen.log_timers_claim_v1(gen_random_uuid(), 0, 200, 8388608)";
    assert_eq!(broker.row(query, &[]).await.get::<_, i64>(0), 8);
    let query = "select count(*) from queen.log_timers_claim_v1(gen_random_uuid(), 60000, 200, 1)";
    assert_eq!(broker.row(query, &[]).await.get::<_, i64>(0), 1, "one at least");
}

#[tokio::test]
async fn what_was_pushed_before_is_not_pushed_again() {
    let broker = Broker::start().await;
    let item = json!({"queue": "q", "payload": 1, "transactionId": "txn-b"});
    assert_eq!(broker.post("/api/v1/push", json!({"items": [item]})).await.0, 201);
    let twin = with(schedule("q", "twin", -1), json!({"txn": "txn-a"}));
    let keys = ["a", "b", "c"].map(|key| schedule("q", key, -1));
    run(&broker, json!([keys[0], keys[1], keys[2], twin])).await;
    assert_eq!(fire(&broker).await, Tally { claimed: 4, fired: 2, duplicates: 2, ..NOTHING });
    assert_eq!(left(&broker).await, 0);
    let mut ids: Vec<String> = popped(&broker, "q").await.into_iter().map(|message| message.1).collect();
    ids.sort();
    assert_eq!(ids, ["txn-a", "txn-b", "txn-c"]);
}

#[tokio::test]
async fn without_a_window_the_same_transaction_id_comes_twice() {
    let broker = Broker::start().await;
    let options = json!({"queue": "q", "options": {"dedupWindowSeconds": 0}});
    assert_eq!(broker.post("/api/v1/configure", options).await.0, 200);
    let same = json!({"txn": "t"});
    run(&broker, json!([with(schedule("q", "a", -1), same.clone()), with(schedule("q", "b", -1), same)])).await;
    assert_eq!(fire(&broker).await, Tally { claimed: 2, fired: 2, ..NOTHING });
}

#[tokio::test]
async fn packed_payloads_are_unpacked() {
    let broker = Broker::start().await;
    let packed = zstd::encode_all(&b"{\"n\": 7}"[..], 3).expect("packs");
    let payload = BASE64_STANDARD.encode(&packed);
    one(&broker, with(schedule("q", "k", -1), json!({"payload": payload, "payloadZstd": true}))).await;
    let (_, peek) = broker.get("/api/v1/timers/q/k").await;
    assert_eq!((&peek["payload"], &peek["payloadZstd"]), (&json!(payload), &json!(true)), "as it is stored");
    assert_eq!(fire(&broker).await.fired, 1);
    assert_eq!(popped(&broker, "q").await[0].2, json!({"n": 7}));
}

/// Makes pushes to queue `q` fail, and those to other queues not.
async fn break_queue(broker: &Broker) {
    broker
        .sql
        .batch_execute(
            "insert into queen.queues (name) values ('q');
             insert into queen.log_partitions (queue_id, name) select id, 'Default' from queen.queues;
             create function public.refuse() returns trigger language plpgsql as $$
             begin
                 if exists (select from queen.log_partitions p join queen.queues q on q.id = p.queue_id
                            where p.id = new.partition_id and q.name = 'q') then
                     raise exception 'broken';
                 end if;
                 return new;
             end $$;
             create trigger refuse before insert on queen.log_segments for each row execute function public.refuse()",
        )
        .await
        .expect("a trigger");
}

#[tokio::test]
async fn what_fails_five_times_becomes_a_dead_letter_and_holds_up_nobody() {
    let broker = Broker::start().await;
    break_queue(&broker).await;
    let results = run(&broker, json!([schedule("q", "bad", -1), schedule("r", "good", -1)])).await;
    assert_eq!(fire(&broker).await, Tally { claimed: 2, fired: 1, failed: 1, ..NOTHING });
    assert_eq!(popped(&broker, "r").await.len(), 1);
    for attempts in 1..=4 {
        let (_, peek) = broker.get("/api/v1/timers/q/bad").await;
        assert_eq!((&peek["attempts"], &peek["claimed"]), (&json!(attempts), &json!(false)), "{peek}");
        assert!(peek["lastError"].as_str().expect("an error").contains("broken"), "{peek}");
        let pause: f64 = broker
            .row("select extract(epoch from due_at - clock_timestamp())::float8 from queen.log_timers", &[])
            .await
            .get(0);
        let longest = f64::from(1 << (attempts - 1));
        assert!(0.0 < pause && pause <= longest, "pause {pause} after attempt {attempts}");
        assert_eq!(fire(&broker).await, NOTHING, "it rests");
        broker.execute("update queen.log_timers set due_at = now()", &[]).await;
        let tally = fire(&broker).await;
        assert_eq!((tally.claimed, tally.fired), (1, 0), "{tally:?}");
    }
    assert_eq!(left(&broker).await, 0);
    let (_, body) = broker.get("/api/v1/dlq?queue=q").await;
    let letter = &body["messages"][0];
    assert_eq!((&body["total"], &letter["consumerGroup"]), (&json!(1), &json!("__timer__")), "{body}");
    assert_eq!((&letter["data"], &letter["transactionId"]), (&json!({"key": "bad"}), &json!("txn-bad")));
    let row = broker.row("select \"offset\", message_id::text, retry_count from queen.log_dlq", &[]).await;
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i32>(2)), (-1, 5));
    assert_eq!(results[0]["messageId"], row.get::<_, String>(1));
}

#[tokio::test]
async fn a_timer_that_rests_can_be_cancelled() {
    let broker = Broker::start().await;
    break_queue(&broker).await;
    one(&broker, schedule("q", "bad", -1)).await;
    assert_eq!(fire(&broker).await.failed, 1);
    assert_eq!(broker.delete("/api/v1/timers/q/bad").await.1["status"], "cancelled");
}

#[tokio::test]
async fn a_partition_that_is_held_costs_no_attempt() {
    let broker = Broker::start().await;
    broker.post("/api/v1/push", json!({"items": [{"queue": "q", "payload": 1, "transactionId": "t"}]})).await;
    one(&broker, schedule("q", "k", -1)).await;
    let blocker = broker.database.client().await;
    blocker.batch_execute("begin; select from queen.log_partitions for update").await.expect("held");
    assert_eq!(fire(&broker).await, Tally { claimed: 1, failed: 1, ..NOTHING });
    blocker.batch_execute("commit").await.expect("let go");
    assert_eq!(broker.get("/api/v1/timers/q/k").await.1["attempts"], 0);
    broker.execute("update queen.log_timers set due_at = now()", &[]).await;
    assert_eq!(fire(&broker).await.fired, 1);
}

#[tokio::test]
async fn paused_firing_leaves_timers_where_they_are() {
    let broker = Broker::start().await;
    one(&broker, schedule("q", "k", -1)).await;
    broker.post("/api/v1/system/kv-timers", json!({"timersFire": false})).await;
    assert_eq!(fire(&broker).await, NOTHING);
    let due: Option<i64> = broker.row("select queen.log_timers_due_v1()", &[]).await.get(0);
    assert_eq!(due, None, "and nobody looks for them");
    broker.post("/api/v1/system/kv-timers", json!({"timersFire": true})).await;
    assert_eq!(fire(&broker).await.fired, 1);
}

/// Nothing but wake-ups moves anything here: the pop has no timer, and the sweeper none that is short.
#[tokio::test]
async fn a_scheduled_timer_wakes_the_sweeper_and_its_message_a_waiting_pop() {
    let hour = Duration::from_secs(3600);
    let pop_wait = PopWait { initial: hour, threshold: 1, multiplier: 1.0, longest: hour };
    let broker = Broker::with(Settings { pop_wait, ..Settings::default() }).await;
    let stop = CancellationToken::new();
    let sweeping = tokio::spawn(broker.app.sweeper().run(stop.clone()));
    let url = format!("{}/api/v1/pop/queue/q?wait=true&timeout=600000", broker.url);
    let pop = tokio::spawn(async move {
        let body: Value = reqwest::get(url).await.expect("answers").json().await.expect("a message");
        body
    });
    until("the pop is parked", || broker.app.wake.parked() == 1).await;
    one(&broker, schedule("q", "k", 300)).await;
    let body = tokio::time::timeout(PATIENCE, pop).await.expect("woken").expect("no panic");
    assert_eq!(body["messages"][0]["transactionId"], "txn-k");
    wait_until(&broker.sql, "the row is gone", "select not exists (select from queen.log_timers)", &[]).await;
    stop.cancel();
    sweeping.await.expect("it ends");
}

#[tokio::test]
async fn looking_for_due_timers_writes_nothing() {
    let broker = Broker::start().await;
    one(&broker, schedule("q", "k", 3_600_000)).await;
    let due: Option<i64> = broker.row("select queen.log_timers_due_v1()", &[]).await.get(0);
    assert!(due.is_some_and(|due| (3_500_000..=3_600_000).contains(&due)), "{due:?}");
    let xid = "select pg_current_xact_id_if_assigned() is null from (select queen.log_timers_due_v1()) d";
    assert!(broker.row(xid, &[]).await.get::<_, bool>(0), "no transaction id is used");
}
