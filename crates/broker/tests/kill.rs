//! The server killed with -9 while it works: nothing that was acknowledged is lost, nothing is done twice.

mod support;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use support::server::{Server, open_folder};
use support::{until, wait_until};

const PUSHERS: usize = 8;
const PUSHES_MAX: usize = 3000;
/// The server is killed when so many messages are acknowledged.
const ACKNOWLEDGED_MIN: usize = 1000;

/// What one pusher sent, and which of it the server said it has stored.
#[derive(Default)]
struct Sent {
    tried: Vec<String>,
    acknowledged: HashSet<String>,
}

/// Pushes until the server is gone, singly and in batches, over many partitions.
async fn push(url: String, pusher: usize, sent: Arc<Mutex<Sent>>, acknowledged: Arc<AtomicUsize>) {
    let http = reqwest::Client::new();
    for at in 0..PUSHES_MAX {
        let ids: Vec<String> = (0..1 + at % 7).map(|n| format!("{pusher}-{at}-{n}")).collect();
        sent.lock().expect("no panic").tried.extend(ids.iter().cloned());
        let Ok(statuses) = send(&http, &url, &ids).await else { return };
        let stored: Vec<String> =
            ids.into_iter().filter(|id| statuses.get(id).is_some_and(|s| s == "queued")).collect();
        acknowledged.fetch_add(stored.len(), Ordering::Relaxed);
        sent.lock().expect("no panic").acknowledged.extend(stored);
    }
}

/// The status of each id. The partition follows from the id, so that a repetition goes to the same.
async fn send(http: &reqwest::Client, url: &str, ids: &[String]) -> reqwest::Result<HashMap<String, String>> {
    let partition = |id: &str| format!("p{}", id.bytes().map(usize::from).sum::<usize>() % 20);
    let items: Vec<Value> = ids
        .iter()
        .map(|id| json!({"queue": "q", "partition": partition(id), "payload": {"id": id}, "transactionId": id}))
        .collect();
    let response = http.post(format!("{url}/api/v1/push")).json(&json!({"items": items})).send().await?;
    assert_eq!(response.status(), 201);
    let body: Value = response.json().await?;
    let text = |item: &Value, key: &str| item[key].as_str().expect("text").to_owned();
    let items = body.as_array().expect("items").iter();
    Ok(items.map(|item| (text(item, "transaction_id"), text(item, "status"))).collect())
}

async fn pop_all(http: &reqwest::Client, url: &str) -> Vec<String> {
    let mut ids = Vec::new();
    loop {
        let path = format!("{url}/api/v1/pop/queue/q?batch=10000&partitions=20&autoAck=true");
        let response = http.get(path).send().await.expect("answers");
        if response.status() == 204 {
            return ids;
        }
        let body: Value = response.json().await.expect("is JSON");
        for message in body["messages"].as_array().expect("messages") {
            assert_eq!(message["data"]["id"], message["transactionId"]);
            ids.push(message["transactionId"].as_str().expect("text").to_owned());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_in_mid_push_it_keeps_what_it_acknowledged() {
    let folder = open_folder();
    let server = Server::with(folder.path(), &[("RUST_LOG", "warn")]);
    let sent = Arc::new(Mutex::new(Sent::default()));
    let acknowledged = Arc::new(AtomicUsize::new(0));
    let pushers: Vec<_> = (0..PUSHERS)
        .map(|n| tokio::spawn(push(server.url().to_owned(), n, sent.clone(), acknowledged.clone())))
        .collect();
    until("enough is acknowledged", || ACKNOWLEDGED_MIN <= acknowledged.load(Ordering::Relaxed)).await;
    server.kill();
    for pusher in pushers {
        pusher.await.expect("no panic");
    }

    let server = Server::with(folder.path(), &[("RUST_LOG", "warn")]);
    let sent = std::mem::take(&mut *sent.lock().expect("no panic"));
    let http = reqwest::Client::new();
    let first = pop_all(&http, server.url()).await;
    let stored: HashSet<String> = first.iter().cloned().collect();
    assert_eq!(stored.len(), first.len(), "nothing is stored twice");
    let lost: Vec<&String> = sent.acknowledged.difference(&stored).collect();
    assert!(lost.is_empty(), "acknowledged and lost: {lost:?}");

    // Whoever got no answer repeats: what had been stored is a duplicate, the rest is stored now.
    for ids in sent.tried.chunks(500) {
        for (id, status) in send(&http, server.url(), ids).await.expect("answers") {
            assert_eq!(status, if stored.contains(&id) { "duplicate" } else { "queued" }, "{id}");
        }
    }
    let second: HashSet<String> = pop_all(&http, server.url()).await.into_iter().collect();
    assert!(second.is_disjoint(&stored), "nothing is delivered twice");
    assert_eq!(second.len() + stored.len(), sent.tried.len());
    server.stop();
}

#[tokio::test]
async fn killed_in_mid_cycle_it_resumes_and_history_adds_up() {
    const SEGMENTS: i64 = 1000;
    const PARTITIONS: i64 = 4;
    let folder = open_folder();
    // One row a step: many steps in which to be killed.
    let settings = [("RUST_LOG", "warn"), ("RETENTION_BATCH_SIZE", "1"), ("RETENTION_INTERVAL", "20")];
    let server = Server::with(folder.path(), &settings);
    let sql = server.sql().await;
    sql.batch_execute(&format!(
        "insert into queen.queues (name) values ('q');
         insert into queen.log_partitions (queue_id, name, last_offset)
         select q.id, 'p' || n, {SEGMENTS} * 3 - 1 from queen.queues q, generate_series(1, {PARTITIONS}) n;
         insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
         select p.id, n * 3, n * 3 + 2, now() - interval '1 day', 'x'
         from queen.log_partitions p, generate_series(0, {SEGMENTS} - 1) n;
         update queen.queues set retention_enabled = true, retention_seconds = 60;"
    ))
    .await
    .expect("old segments");
    let under_way = "select count(*) > 50 from queen.retention_history";
    wait_until(&sql, "a cycle is under way", under_way, &[]).await;
    server.kill();

    let server = Server::with(folder.path(), &settings);
    let sql = server.sql().await;
    let query = "select p.log_start, (select count(*) from queen.log_segments s where s.partition_id = p.id),
            (select coalesce(sum(h.messages_deleted), 0) from queen.retention_history h where h.partition_id = p.id)
        from queen.log_partitions p";
    for row in sql.query(query, &[]).await.expect("the state after the kill") {
        let (log_start, live, history): (i64, i64, i64) = (row.get(0), row.get(1), row.get(2));
        // One statement, one snapshot: each step is in it whole or not at all.
        assert_eq!(log_start, (SEGMENTS - live) * 3);
        assert_eq!(history, log_start);
    }
    let swept = "select not exists (select from queen.log_segments)";
    wait_until(&sql, "the next server has swept the rest", swept, &[]).await;
    let query = "select count(*), sum(messages_deleted), max(messages_deleted) from queen.retention_history";
    let row = sql.query_one(query, &[]).await.expect("history");
    let history: (i64, i64, i32) = (row.get(0), row.get(1), row.get(2));
    assert_eq!(history, (SEGMENTS * PARTITIONS, SEGMENTS * PARTITIONS * 3, 3));
    server.stop();
}
