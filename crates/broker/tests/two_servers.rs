//! Two servers on one database: any request to either, wake-ups between them, and a kill -9.

mod support;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ebbtide::http::{PopWait, Settings};
use serde_json::{Value, json};
use support::away::Postgres;
use support::{Broker, Database, until, wait_until};
use tokio_util::sync::CancellationToken;

/// Whatever wakes a waiting pop, it is no timer.
fn no_timer() -> Settings {
    let hour = Duration::from_secs(3600);
    let pop_wait = PopWait { initial: hour, threshold: 0, multiplier: 1.0, longest: hour };
    Settings { pop_wait, subscribe_to_new: false, ..Settings::default() }
}

/// Two linked servers in this process.
async fn pair() -> (Broker, Broker, CancellationToken) {
    let a = Broker::with(no_timer()).await;
    let database = Database { name: a.database.name.clone(), target: a.database.target.clone() };
    let b = Broker::on(database, no_timer()).await;
    let stop = CancellationToken::new();
    for server in [&a, &b] {
        tokio::spawn(server.app.wake.clone().listen(server.database.target.clone(), stop.clone()));
    }
    let listening = "select count(*) = 2 from pg_stat_activity where application_name = 'ebbtide-wake' and datname = current_database()
        and query like 'listen%'";
    wait_until(&a.sql, "both listen", listening, &[]).await;
    (a, b, stop)
}

/// A pop on `server` that waits for a minute.
async fn waiting(server: &Broker, query: &str) -> tokio::task::JoinHandle<Value> {
    let before = server.app.wake.idle();
    let url = format!("{}/api/v1/pop/queue/q?wait=true&timeout=60000&{query}", server.url);
    let pop = tokio::spawn(async move {
        let response = reqwest::get(url).await.expect("answers");
        assert_eq!(response.status(), 200, "woken with a message");
        response.json().await.expect("JSON")
    });
    until("the pop has looked and waits", || before < server.app.wake.idle()).await;
    pop
}

async fn push(server: &Broker, id: &str) {
    let item = json!({"queue": "q", "payload": id, "transactionId": id});
    assert_eq!(server.post("/api/v1/push", json!({"items": [item]})).await.0, 201);
}

#[tokio::test]
async fn a_push_through_one_wakes_a_pop_on_the_other() {
    let (a, b, stop) = pair().await;
    let pop = waiting(&b, "").await;
    let heard = b.app.wake.notices();
    push(&a, "1").await;
    assert_eq!(pop.await.expect("no panic")["messages"][0]["transactionId"], "1");
    assert!(heard < b.app.wake.notices(), "by notice");
    stop.cancel();
}

#[tokio::test]
async fn an_ack_through_one_wakes_a_pop_on_the_other() {
    let (a, b, stop) = pair().await;
    push(&a, "1").await;
    push(&a, "2").await;
    let (_, first) = a.get("/api/v1/pop/queue/q?batch=1").await;
    let message = &first["messages"][0];
    let pop = waiting(&b, "").await;
    let heard = b.app.wake.notices();
    let ack = json!({"transactionId": "1", "partitionId": message["partitionId"], "leaseId": message["leaseId"]});
    let (_, acked) = a.post("/api/v1/ack", ack).await;
    assert_eq!(acked[0]["success"], true, "{acked}");
    assert_eq!(pop.await.expect("no panic")["messages"][0]["transactionId"], "2", "the lease was in its way");
    assert!(heard < b.app.wake.notices(), "by notice");
    stop.cancel();
}

#[tokio::test]
async fn a_seek_through_one_wakes_a_pop_on_the_other() {
    let (a, b, stop) = pair().await;
    push(&a, "1").await;
    assert_eq!(a.get("/api/v1/pop/queue/q?consumerGroup=g&autoAck=true").await.0, 200);
    let pop = waiting(&b, "consumerGroup=g").await;
    let heard = b.app.wake.notices();
    let (status, body) =
        a.post("/api/v1/consumer-groups/g/queues/q/seek", json!({"timestamp": "2020-01-01T00:00:00Z"})).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(pop.await.expect("no panic")["messages"][0]["transactionId"], "1");
    assert!(heard < b.app.wake.notices(), "by notice");
    stop.cancel();
}

#[tokio::test]
async fn a_switch_turned_on_one_is_obeyed_by_the_other() {
    let (a, b, stop) = pair().await;
    tokio::spawn(b.app.clone().keep_current(stop.clone()));
    a.post("/api/v1/system/maintenance/pop", json!({"enabled": true})).await;
    let app = b.app.clone();
    until("the other server obeys", || app.switches.is_on(ebbtide::switches::Switch::PopMaintenance)).await;
    stop.cancel();
}

const CONSUMERS: usize = 20;
const MESSAGES: usize = 1000;
const PARTITIONS: usize = 10;

/// What the consumers did.
#[derive(Default)]
struct Seen {
    /// Partition ─► the lease under which somebody holds it now.
    held: Mutex<HashMap<String, String>>,
    done: Mutex<HashSet<String>>,
    /// Acknowledged without an answer: done or not.
    unanswered: Mutex<HashSet<String>>,
    deliveries: AtomicUsize,
    is_over: AtomicBool,
}

impl Seen {
    fn done(&self) -> usize {
        self.done.lock().expect("no panic").len()
    }
}

/// Pops and acknowledges, on the other server when its own is gone.
async fn consume(urls: [String; 2], consumer: usize, seen: Arc<Seen>) {
    let http = reqwest::Client::new();
    let mut at = consumer % 2;
    while !seen.is_over.load(Ordering::Acquire) {
        let url = format!(
            "{}/api/v1/pop/queue/q?consumerGroup=g&subscriptionMode=all&batch=10&wait=true&timeout=500",
            urls[at]
        );
        let Ok(response) = http.get(url).send().await else {
            at = 1 - at;
            continue;
        };
        if response.status() != 200 {
            continue;
        }
        let Ok(body) = response.json::<Value>().await else { continue };
        work(&http, &urls[at], &body, &seen).await;
    }
}

async fn work(http: &reqwest::Client, url: &str, body: &Value, seen: &Seen) {
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let (partition, lease) = (text(&body["partitionId"]), text(&body["leaseId"]));
    let holder = seen.held.lock().expect("no panic").insert(partition.clone(), lease.clone());
    assert_eq!(holder, None, "the lease of another consumer is live");
    let messages = body["messages"].as_array().expect("messages");
    seen.deliveries.fetch_add(messages.len(), Ordering::Relaxed);
    let acks: Vec<Value> = messages
        .iter()
        .map(|message| json!({"transactionId": message["transactionId"], "partitionId": partition, "leaseId": lease, "status": "completed"}))
        .collect();
    // Something that takes a while, so that others have their chance to break in.
    let renewed = http.post(format!("{url}/api/v1/lease/{lease}/extend")).json(&json!({"seconds": 5})).send().await;
    // Given up before the word is sent: from then on the lease may end at any time.
    seen.held.lock().expect("no panic").remove(&partition);
    if renewed.is_err() {
        return; // the server is gone, and the lease runs out
    }
    let body = json!({"acknowledgments": acks, "consumerGroup": "g"});
    let sent = http.post(format!("{url}/api/v1/ack/batch")).json(&body).send().await;
    let answered = match sent {
        Ok(response) => response.json::<Value>().await,
        Err(error) => Err(error),
    };
    let Ok(results) = answered else {
        let ids = messages.iter().map(|message| text(&message["transactionId"]));
        seen.unanswered.lock().expect("no panic").extend(ids);
        return;
    };
    let results = results.as_array().or_else(|| results["results"].as_array()).expect("results").clone();
    let mut done = seen.done.lock().expect("no panic");
    for (message, result) in messages.iter().zip(results) {
        if result["success"] == true {
            done.insert(text(&message["transactionId"]));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_consumers_lose_nothing_when_a_server_is_killed() {
    let postgres = Postgres::start().await;
    let (a, b) = (postgres.serve("a", &[]).await, postgres.serve("b", &[]).await);
    a.until_ready().await;
    b.until_ready().await;
    // What the killed server's consumers held comes again when its lease is over.
    let options = json!({"queue": "q", "options": {"leaseTime": 5}});
    assert_eq!(a.post("/api/v1/configure", options).await.0, 200);
    let seen = Arc::new(Seen::default());
    let urls = [a.url.clone(), b.url.clone()];
    let consumers: Vec<_> = (0..CONSUMERS).map(|n| tokio::spawn(consume(urls.clone(), n, seen.clone()))).collect();
    let mut doomed = Some(a);
    for start in (0..MESSAGES).step_by(50) {
        let items: Vec<Value> = (start..start + 50)
            .map(|n| json!({"queue": "q", "partition": format!("p{}", n % PARTITIONS), "payload": n, "transactionId": n.to_string()}))
            .collect();
        let server = if start % 100 == 0 { doomed.as_ref().unwrap_or(&b) } else { &b };
        assert_eq!(server.post("/api/v1/push", json!({"items": items})).await.0, 201);
        if MESSAGES / 2 <= start && doomed.is_some() {
            until("half is under way", || MESSAGES / 10 <= seen.done()).await;
            doomed.take().expect("just seen").kill();
        }
    }
    let sql = postgres.sql().await;
    let all_done = "select count(*) = $1::bigint from queen.log_partitions p join queen.log_consumers c
        on c.partition_id = p.id and c.consumer_group = 'g' and p.last_offset <= c.committed";
    let partitions = i64::try_from(PARTITIONS).expect("few");
    wait_until(&sql, "every cursor is at its end", all_done, &[&partitions]).await;
    seen.is_over.store(true, Ordering::Release);
    for consumer in consumers {
        consumer.await.expect("no consumer panicked");
    }
    assert!(MESSAGES <= seen.deliveries.load(Ordering::Relaxed));
    let done = std::mem::take(&mut *seen.done.lock().expect("no panic"));
    let unanswered = std::mem::take(&mut *seen.unanswered.lock().expect("no panic"));
    let lost: Vec<String> =
        (0..MESSAGES).map(|n| n.to_string()).filter(|id| !done.contains(id) && !unanswered.contains(id)).collect();
    assert!(lost.is_empty(), "nobody was told of {lost:?}");
    let query = "select coalesce(sum(end_offset - base_offset + 1), 0)::bigint from queen.log_segments";
    let stored: i64 = sql.query_one(query, &[]).await.expect("counted").get(0);
    assert_eq!(stored, i64::try_from(MESSAGES).expect("few"), "nothing is stored twice");
    b.stop();
}
