//! Scheduling, cancelling, looking and listing.

use serde_json::{Value, json};

use super::support::Broker;
use super::{encoded, left, one, run, schedule, with};

const HOUR: i64 = 3_600_000;

#[tokio::test]
async fn a_timer_is_scheduled_moved_seen_and_cancelled() {
    let broker = Broker::start().await;
    let first = one(&broker, schedule("q", "a/b", HOUR)).await;
    assert_eq!((&first["ok"], &first["status"], &first["index"]), (&json!(true), &json!("scheduled"), &json!(0)));
    assert_eq!((&first["queue"], &first["timerKey"], &first["txn"]), (&json!("q"), &json!("a/b"), &json!("txn-a/b")));
    let late: bool = broker
        .row(
            "select deliver_at between now() + interval '59 minutes' and now() + interval '61 minutes'
                 and to_char(deliver_at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') = $1
             from queen.log_timers",
            &[&first["deliverAt"].as_str().expect("a time")],
        )
        .await
        .get(0);
    assert!(late, "by the database's clock: {first}");

    broker.execute("update queen.log_timers set attempts = 3, last_error = 'x'", &[]).await;
    let moved = with(schedule("q", "a/b", 2 * HOUR), json!({"txn": "other", "partition": "p"}));
    let second = one(&broker, moved).await;
    assert_eq!((&second["status"], &second["txn"]), (&json!("rescheduled"), &json!("other")));
    let (status, peek) = broker.get("/api/v1/timers/q/a/b").await;
    assert_eq!(
        (status, &peek["found"], &peek["attempts"], &peek["lastError"]),
        (200, &json!(true), &json!(0), &Value::Null)
    );
    assert_eq!((&peek["messageId"], &peek["deliverAt"]), (&second["messageId"], &second["deliverAt"]));
    assert_eq!((&peek["payload"], &peek["partition"]), (&json!(encoded("{\"key\": \"a/b\"}")), &json!("p")));
    for (name, expected) in [("payloadZstd", false), ("encrypted", false), ("claimed", false)] {
        assert_eq!(peek[name], expected, "{name}");
    }
    let (status, gone) = broker.delete("/api/v1/timers/q/a/b?txn=ignored").await;
    assert_eq!((status, &gone["status"], &gone["txn"]), (200, &json!("cancelled"), &json!("other")));
    let (_, gone) = broker.delete("/api/v1/timers/q/a/b?txn=mine").await;
    assert_eq!((&gone["ok"], &gone["status"], &gone["txn"]), (&json!(false), &json!("absent"), &json!("mine")));
    let (status, peek) = broker.get("/api/v1/timers/q/a/b").await;
    assert_eq!((status, peek), (200, json!({"found": false, "queue": "q", "timerKey": "a/b"})));
}

#[tokio::test]
async fn a_queue_with_a_slash_is_one_segment() {
    let broker = Broker::start().await;
    one(&broker, schedule("a/b", "k", HOUR)).await;
    let (_, peek) = broker.get("/api/v1/timers/a%2Fb/k").await;
    assert_eq!((&peek["found"], &peek["queue"]), (&json!(true), &json!("a/b")));
}

#[tokio::test]
async fn pages_follow_each_other_in_byte_order() {
    let broker = Broker::start().await;
    run(&broker, json!(["b", "B", "é", "a"].map(|key| schedule("q", key, HOUR)))).await;
    one(&broker, schedule("r", "c", HOUR)).await;
    let keys = |page: &Value| -> Vec<String> {
        let rows = page["rows"].as_array().expect("rows").iter();
        rows.map(|row| row["timerKey"].as_str().expect("a key").to_owned()).collect()
    };
    let (_, all) = broker.get("/api/v1/timers/q").await;
    assert_eq!(
        (keys(&all), &all["truncated"], &all["nextAfter"]),
        (vec!["B".into(), "a".into(), "b".into(), "é".into()], &json!(false), &Value::Null)
    );
    assert!(all["rows"][0].get("payload").is_none(), "without payloads");
    let (_, first) = broker.get("/api/v1/timers/q?limit=3").await;
    assert_eq!((keys(&first).len(), &first["truncated"], &first["nextAfter"]), (3, &json!(true), &json!("b")));
    let (_, rest) = broker.get("/api/v1/timers/q?limit=3&after=b").await;
    assert_eq!((keys(&rest), &rest["truncated"]), (vec!["é".into()], &json!(false)));
    assert_eq!(keys(&broker.get("/api/v1/timers/q?limit=0").await.1).len(), 1, "brought into its range");
    assert_eq!(broker.get("/api/v1/timers/q?limit=x").await.0, 400);
    assert_eq!(keys(&broker.get("/api/v1/timers/none").await.1).len(), 0);
}

#[tokio::test]
async fn bad_requests_are_refused_by_code_and_name() {
    let broker = Broker::start().await;
    let twice = json!([schedule("q", "k", 0), {"op": "cancel", "queue": "q", "timerKey": "k"}]);
    for (operations, status, code, words) in [
        (twice, 400, "timers_bad_request", "already"),
        (json!([with(schedule("q", "k", 0), json!({"producerSub": "me"}))]), 400, "timers_bad_request", "producerSub"),
        (json!([with(schedule("q", "k", 0), json!({"deliverAt": "x"}))]), 400, "timers_bad_request", "deliverAt"),
        (json!([with(schedule("q", "k", 0), json!({"_x": 1}))]), 400, "timers_bad_request", "_x"),
        (json!([with(schedule("q", "k", 0), json!({"payload": encoded("{")}))]), 400, "timers_bad_request", "JSON"),
        (json!([schedule("q", "k", 7_776_000_001)]), 403, "timer_horizon_exceeded", "delayMs"),
        (json!([schedule(&"q".repeat(256), "k", 0)]), 400, "timers_bad_request", "queue"),
        (
            json!([with(schedule("q", "k", 0), json!({"payload": encoded(&format!("\"{}\"", "x".repeat(1 << 20)))}))]),
            413,
            "payload_too_large",
            "1048576",
        ),
        (json!([]), 400, "timers_bad_request", "operations"),
    ] {
        let (found, body) = broker.post("/api/v1/timers", json!({"operations": operations})).await;
        assert_eq!((found, &body["error"]), (status, &json!(code)), "{body}");
        assert!(body["detail"].as_str().expect("words").contains(words), "{body}");
    }
    assert_eq!(left(&broker).await, 0);
    assert_eq!(one(&broker, schedule("q", "far", 7_776_000_000)).await["status"], "scheduled", "the limit itself");
    assert_eq!(one(&broker, schedule("q", "past", i64::MIN)).await["status"], "scheduled", "any time ago");
    assert_eq!(broker.get("/api/v1/timers/q/%00").await.1["error"], "timers_bad_request");
}

#[tokio::test]
async fn pausing_stops_scheduling_and_never_cancelling() {
    let broker = Broker::start().await;
    one(&broker, schedule("q", "a", HOUR)).await;
    one(&broker, schedule("q", "b", HOUR)).await;
    let (_, body) = broker.post("/api/v1/system/kv-timers", json!({"timersSchedule": false})).await;
    assert_eq!((&body["timersScheduleEnabled"], &body["kvEnabled"]), (&json!(false), &json!(true)));
    let (status, body) = broker.post("/api/v1/timers", json!({"operations": [schedule("q", "c", 0)]})).await;
    assert_eq!((status, &body["error"]), (503, &json!("timers_disabled")));
    let (status, body) = broker.post("/api/v1/transaction", json!({"timers": [schedule("q", "c", 0)]})).await;
    assert_eq!((status, &body["code"]), (403, &json!("timers_disabled")));
    assert_eq!(broker.delete("/api/v1/timers/q/a").await.1["status"], "cancelled");
    let cancel = json!({"op": "cancel", "queue": "q", "timerKey": "b"});
    assert_eq!(one(&broker, cancel).await["status"], "cancelled");
    assert_eq!(left(&broker).await, 0);
}

#[tokio::test]
async fn a_claimed_timer_can_neither_be_moved_nor_cancelled() {
    let broker = Broker::start().await;
    one(&broker, schedule("q", "k", HOUR)).await;
    let claim =
        "update queen.log_timers set claim_token = gen_random_uuid(), claimed_until = now() + $1::text::interval";
    broker.execute(claim, &[&"1 minute"]).await;
    let late = json!({"index": 0, "ok": false, "status": "too_late", "queue": "q", "timerKey": "k"});
    assert_eq!(one(&broker, schedule("q", "k", 0)).await, late);
    assert_eq!(broker.delete("/api/v1/timers/q/k").await.1["status"], "too_late");
    assert_eq!(broker.get("/api/v1/timers/q/k").await.1["claimed"], true);
    broker.execute(claim, &[&"-1 minute"]).await;
    assert_eq!(one(&broker, schedule("q", "k", 0)).await["status"], "rescheduled", "the claim has ended");
}
