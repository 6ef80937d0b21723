//! The server killed with -9 while it spools and while it replays: every acknowledged message is stored once, in order.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::support::away::Postgres;
use crate::support::{until, wait_until};

const PUSHERS: usize = 6;
const PUSHES_MAX: usize = 5000;

/// Pushes until the server is gone. What it says is buffered or queued goes into `acknowledged`.
async fn push(
    url: String, pusher: usize, round: usize, acknowledged: Arc<Mutex<Vec<String>>>, count: Arc<AtomicUsize>,
) {
    let http = reqwest::Client::new();
    for at in 0..PUSHES_MAX {
        let ids: Vec<String> = (0..1 + at % 3).map(|n| format!("{round}-{at:06}-{n}")).collect();
        let item = |id: &String| json!({"queue": "q", "partition": format!("p{pusher}"), "payload": id, "transactionId": format!("{pusher}:{id}")});
        let items: Vec<Value> = ids.iter().map(item).collect();
        let sent = http.post(format!("{url}/api/v1/push")).json(&json!({"items": items})).send().await;
        let Ok(response) = sent else { return };
        assert_eq!(response.status(), 201);
        if response.bytes().await.is_err() {
            return;
        }
        count.fetch_add(ids.len(), Ordering::Relaxed);
        acknowledged.lock().expect("no panic").extend(ids.iter().map(|id| format!("{pusher}:{id}")));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_acknowledged_push_is_stored_once_and_in_order() {
    let mut postgres = Postgres::start().await;
    // One message a step: many moments at which to be killed.
    let settings = [("FILE_BUFFER_MAX_BATCH", "20"), ("FILE_BUFFER_EVENTS_PER_FILE", "100")];
    let acknowledged = Arc::new(Mutex::new(Vec::new()));
    let count = Arc::new(AtomicUsize::new(0));
    let first = postgres.serve("a", &settings).await;
    first.until_ready().await;
    postgres.down().await;
    let mut server = first;
    for round in 0..2 {
        let pushers: Vec<_> = (0..PUSHERS)
            .map(|n| tokio::spawn(push(server.url.clone(), n, round, acknowledged.clone(), count.clone())))
            .collect();
        let enough = 400 * (round + 1);
        until("enough is buffered", || enough <= count.load(Ordering::Relaxed)).await;
        server.kill();
        for pusher in pushers {
            pusher.await.expect("no panic");
        }
        server = postgres.serve("a", &settings).await;
    }

    postgres.up().await;
    let sql = postgres.sql().await;
    let stored = "select case when to_regclass('queen.log_segments') is null then false
        else (select coalesce(sum(end_offset - base_offset + 1), 0) >= $1::bigint from queen.log_segments) end";
    for part in [100_i64, 300] {
        wait_until(&sql, "a part is replayed", stored, &[&part]).await;
        server.kill();
        server = postgres.serve("a", &settings).await;
    }
    server.until_replayed().await;

    let popped = server.pop_all("q").await;
    let id = |message: &Value| message["transactionId"].as_str().expect("text").to_owned();
    let once: HashSet<String> = popped.iter().map(id).collect();
    assert_eq!(once.len(), popped.len(), "nothing is stored twice");
    let acknowledged = std::mem::take(&mut *acknowledged.lock().expect("no panic"));
    let lost: Vec<&String> = acknowledged.iter().filter(|id| !once.contains(*id)).collect();
    assert!(lost.is_empty(), "acknowledged and lost: {lost:?}");
    for pusher in 0..PUSHERS {
        let of: Vec<String> =
            popped.iter().filter(|message| message["partition"] == format!("p{pusher}")).map(id).collect();
        assert!(of.is_sorted(), "in order: {of:?}");
        let ids: Vec<&Value> =
            popped.iter().filter(|message| message["partition"] == format!("p{pusher}")).map(|m| &m["id"]).collect();
        assert!(ids.is_sorted_by_key(|id| id.as_str().expect("text")), "ids sort along the partition");
    }
    server.stop();
}
