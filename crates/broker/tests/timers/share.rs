//! Several servers, crashes, and encryption.

use ebbtide::http::Settings;
use ebbtide::seal::{Key, Sealer};
use serde_json::{Value, json};

use super::support::{Broker, Database};
use super::{left, one, popped, run, schedule};

/// A second server on the database of the first.
async fn second(broker: &Broker) -> Broker {
    let Database { name, target } = &broker.database;
    // Its drop would take the database away from the first; that happens at the end of the test anyway.
    Broker::on(Database { name: name.clone(), target: target.clone() }, Settings::default()).await
}

#[tokio::test]
async fn servers_share_what_is_due_and_nothing_is_fired_twice() {
    let broker = Broker::start().await;
    let other = second(&broker).await;
    for batch in 0..4 {
        let timers: Vec<Value> =
            (0..256).map(|n| schedule(&format!("q{}", n % 5), &format!("{batch}-{n}"), -1)).collect();
        run(&broker, json!(timers)).await;
    }
    let (one, two) = (broker.app.sweeper(), other.app.sweeper());
    let (one, two) = tokio::join!(one.fire_due(), two.fire_due());
    let (one, two) = (one.expect("fires"), two.expect("fires"));
    assert_eq!(one.fired + two.fired, 1024, "{one:?} {two:?}");
    assert_eq!(left(&broker).await, 0);
    let mut ids = Vec::new();
    for n in 0..5 {
        ids.extend(popped(&broker, &format!("q{n}")).await.into_iter().map(|message| message.1));
    }
    ids.sort();
    let count = ids.len();
    ids.dedup();
    assert_eq!((ids.len(), count), (1024, 1024));
}

#[tokio::test]
async fn a_claim_whose_holder_died_is_taken_over_when_it_ends() {
    let broker = Broker::start().await;
    one(&broker, schedule("q", "k", -1)).await;
    let claim =
        "select count(*) from queen.log_timers_claim_v1('00000000-0000-0000-0000-00000000dead', 60000, 10, 1000)";
    assert_eq!(broker.row(claim, &[]).await.get::<_, i64>(0), 1);
    assert_eq!(broker.app.sweeper().fire_due().await.expect("looks").claimed, 0, "somebody has it");
    broker.execute("update queen.log_timers set claimed_until = now(), due_at = now()", &[]).await;
    assert_eq!(broker.app.sweeper().fire_due().await.expect("fires").fired, 1);
    // The one that was believed dead comes back with its claim.
    let query = "select queen.log_timers_failed_v1('00000000-0000-0000-0000-00000000dead', 'q', 'k', 'x', true, 5, 1, null, false)";
    assert_eq!(broker.row(query, &[]).await.get::<_, String>(0), "lost");
    assert_eq!(popped(&broker, "q").await.len(), 1);
}

#[tokio::test]
async fn a_lost_claim_fires_nothing() {
    let broker = Broker::start().await;
    let result = one(&broker, schedule("q", "k", -1)).await;
    let id = uuid::Uuid::parse_str(result["messageId"].as_str().expect("an id")).expect("a UUID");
    let query = "select * from queen.log_timers_fire_v1(gen_random_uuid(), '{q}', '{Default}', '{1}', array[$1::bytea],
        array['x'::bytea], null, '{1}', '{k}', array[$2::uuid], 100)";
    let error = broker.sql.query_one(query, &[&vec![0_u8; 16], &id]).await.expect_err("it is not claimed");
    assert_eq!(error.code().expect("a code").code(), "QN012");
    assert_eq!((left(&broker).await, popped(&broker, "q").await.len()), (1, 0));
}

#[tokio::test]
async fn a_firing_that_is_terminated_leaves_the_timer_and_no_message() {
    let broker = Broker::start().await;
    broker.post("/api/v1/push", json!({"items": [{"queue": "q", "payload": 1, "transactionId": "t"}]})).await;
    one(&broker, schedule("q", "k", -1)).await;
    broker
        .sql
        .batch_execute(
            "create function public.die() returns trigger language plpgsql as $$
             begin perform pg_terminate_backend(pg_backend_pid()); return old; end $$;
             create trigger die before delete on queen.log_timers for each row execute function public.die()",
        )
        .await
        .expect("a trigger");
    broker.app.sweeper().fire_due().await.expect_err("the connection broke");
    // The dying backend lets go of its locks after it has hung up.
    broker.execute("select from queen.log_partitions for update", &[]).await;
    assert_eq!((left(&broker).await, popped(&broker, "q").await.len()), (1, 1), "all or nothing: the pushed one");
    broker.sql.batch_execute("drop trigger die on queen.log_timers").await.expect("gone");
    broker.execute("update queen.log_timers set claimed_until = now(), due_at = now()", &[]).await;
    assert_eq!(broker.app.sweeper().fire_due().await.expect("fires").fired, 1);
    assert_eq!(popped(&broker, "q").await.len(), 1);
}

#[tokio::test]
async fn timers_of_encrypted_queues_are_stored_sealed() {
    let sealer = Sealer::new(Key::from_hex(&"7".repeat(64)).as_ref());
    let broker = Broker::with(Settings { sealer, ..Settings::default() }).await;
    let configure = |enabled: bool| json!({"queue": "q", "options": {"encryptionEnabled": enabled}});
    assert_eq!(broker.post("/api/v1/configure", configure(true)).await.0, 200);
    one(&broker, schedule("q", "sealed", -1)).await;
    let (_, peek) = broker.get("/api/v1/timers/q/sealed").await;
    assert_eq!(peek["encrypted"], true);
    let clear = "select count(*) from queen.log_timers where position('sealed'::bytea in payload) > 0";
    assert_eq!(broker.row(clear, &[]).await.get::<_, i64>(0), 0, "not in clear");
    assert_eq!(broker.app.sweeper().fire_due().await.expect("fires").fired, 1);
    assert_eq!(popped(&broker, "q").await[0].2, json!({"key": "sealed"}));

    // Switched while timers wait: each becomes what the queue wants when it is fired.
    one(&broker, schedule("q", "opened", 3_600_000)).await;
    assert_eq!(broker.post("/api/v1/configure", configure(false)).await.0, 200);
    one(&broker, schedule("q", "closed", 3_600_000)).await;
    let encrypted = "select string_agg(timer_key || ' ' || encrypted, ', ' order by timer_key) from queen.log_timers";
    assert_eq!(broker.row(encrypted, &[]).await.get::<_, String>(0), "closed false, opened true");
    broker.execute("update queen.log_timers set due_at = now() where timer_key = 'opened'", &[]).await;
    assert_eq!(broker.app.sweeper().fire_due().await.expect("fires").fired, 1);
    assert_eq!(broker.post("/api/v1/configure", configure(true)).await.0, 200);
    broker.execute("update queen.log_timers set due_at = now()", &[]).await;
    assert_eq!(broker.app.sweeper().fire_due().await.expect("fires").fired, 1);
    let mut sealed = Vec::new();
    for row in broker.rows("select blob from queen.log_segments order by base_offset", &[]).await {
        let segment = ebbtide::segment::Segment::unpack(row.get(0)).expect("a segment");
        sealed.extend(segment.frames().map(|frame| frame.is_encrypted));
    }
    assert_eq!(sealed, [true, false, true]);
    assert_eq!(popped(&broker, "q").await.len(), 2);
}
