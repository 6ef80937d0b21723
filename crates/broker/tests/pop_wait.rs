//! Long polls: what wakes them, what they hold, and what is left when their client hangs up.

mod support;

use std::time::Duration;

use ebbtide::http::{PopWait, Settings};
use ebbtide::wake::{Interest, PARKED_MAX, Waiter};
use serde_json::Value;
use support::log::ids;
use support::{Broker, Database, PATIENCE, until, wait_until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const HOUR: Duration = Duration::from_secs(3600);

/// Nothing but a wake-up makes a waiting pop look again.
fn no_timer() -> Settings {
    let pop_wait = PopWait { initial: HOUR, threshold: 1, multiplier: 1.0, longest: HOUR };
    Settings { pop_wait, ..Settings::default() }
}

/// A waiting pop in a task of its own.
fn park(b: &Broker, path_and_query: &str) -> JoinHandle<(u16, Value)> {
    let url = format!("{}/api/v1/pop{path_and_query}wait=true&timeout=600000", b.url);
    tokio::spawn(async move {
        let response = reqwest::get(url).await.expect("the server answers");
        let status = response.status().as_u16();
        let bytes = response.bytes().await.expect("the body arrives");
        (status, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
    })
}

async fn parked(b: &Broker, count: usize) {
    until("so many pops are parked", || b.app.wake.parked() == count).await;
}

/// Every pooled connection is back.
async fn idle(b: &Broker) {
    until("no connection is in use", || {
        let status = b.app.db.status();
        0 < status.size && status.available == status.size && status.waiting == 0
    })
    .await;
}

async fn answer(pop: JoinHandle<(u16, Value)>) -> (u16, Value) {
    tokio::time::timeout(PATIENCE, pop).await.expect("the pop was woken").expect("it ended")
}

/// Sends a pop on a connection that the test can cut.
async fn send_raw(b: &Broker, path_and_query: &str) -> TcpStream {
    let host = b.url.strip_prefix("http://").expect("a URL");
    let mut stream = TcpStream::connect(host).await.expect("connects");
    let request = format!("GET /api/v1/pop/{path_and_query} HTTP/1.1\r\nHost: {host}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sends");
    stream
}

async fn listeners(b: &Broker, count: i64) {
    let query = "select count(*) = $2 from pg_stat_activity
        where datname = $1 and application_name = 'ebbtide-wake' and query like 'listen%' and state = 'idle'";
    wait_until(&b.sql, "the servers listen", query, &[&b.database.name, &count]).await;
}

fn listen(b: &Broker, stop: &CancellationToken) {
    tokio::spawn(b.app.wake.clone().listen(b.database.target.clone(), stop.clone()));
}

#[tokio::test]
async fn a_push_wakes_the_pops_that_wait_for_it() {
    let b = Broker::with(no_timer()).await;
    b.store("q", "p", 1).await;
    b.store("other", "p", 1).await;
    b.execute("update queen.queues set namespace = name", &[]).await;
    b.execute("update queen.queues set window_buffer = 3600", &[]).await;
    let of_queue = park(&b, "/queue/q?consumerGroup=a&subscriptionMode=all&");
    let of_partition = park(&b, "/queue/q/partition/p?consumerGroup=b&subscriptionMode=all&");
    let of_namespace = park(&b, "?namespace=q&consumerGroup=c&subscriptionMode=all&");
    let of_other = park(&b, "/queue/other?");
    parked(&b, 4).await;
    idle(&b).await;
    b.execute("update queen.queues set window_buffer = 0", &[]).await;
    b.app.wake.pushed("q", "p");
    for pop in [of_queue, of_partition, of_namespace] {
        let (status, body) = answer(pop).await;
        assert_eq!((status, ids(&body)), (200, vec!["p-0".to_owned()]), "{body}");
    }
    assert!(!of_other.is_finished());
    parked(&b, 1).await;
    of_other.abort();
}

#[tokio::test]
async fn a_parked_pop_holds_no_connection() {
    let b = Broker::with(no_timer()).await;
    let pops: Vec<_> = (0..40).map(|_| park(&b, "/queue/q?")).collect();
    parked(&b, 40).await;
    idle(&b).await;
    let text = String::from_utf8(b.get_bytes("/metrics/prometheus").await.1).expect("text");
    assert!(text.lines().any(|line| line.starts_with("ebbtide_pops_parked ")), "{text}");
    assert!(text.contains("ebbtide_pop_claim_seconds_count"), "{text}");
    pops.iter().for_each(JoinHandle::abort);
    parked(&b, 0).await;
}

#[tokio::test]
async fn one_push_wakes_one_pop_and_each_push_its_own() {
    let b = Broker::with(no_timer()).await;
    let mut pops: Vec<_> = (0..5).map(|_| park(&b, "/queue/q?")).collect();
    parked(&b, 5).await;
    idle(&b).await;
    for n in 0..5 {
        b.store("q", &format!("p{n}"), 1).await;
        parked(&b, 4 - n).await;
    }
    let mut found = Vec::new();
    for pop in pops.drain(..) {
        found.extend(ids(&answer(pop).await.1));
    }
    found.sort();
    assert_eq!(found, ["p0-0", "p1-0", "p2-0", "p3-0", "p4-0"]);
}

#[tokio::test]
async fn the_timer_finds_what_nobody_announced() {
    let b = Broker::start().await;
    b.store("q", "p", 1).await;
    b.execute("update queen.queues set window_buffer = 3600", &[]).await;
    let pop = park(&b, "/queue/q?");
    parked(&b, 1).await;
    b.execute("update queen.queues set window_buffer = 0", &[]).await;
    assert_eq!(ids(&answer(pop).await.1), ["p-0"]);
}

#[tokio::test]
async fn a_wait_ends_at_its_time_out() {
    let b = Broker::with(no_timer()).await;
    assert_eq!(b.pop("queue/q?wait=true&timeout=1").await, (204, Value::Null));
    parked(&b, 0).await;
}

#[tokio::test]
async fn a_stopping_server_ends_every_wait() {
    let b = Broker::with(no_timer()).await;
    let pops = [park(&b, "/queue/q?"), park(&b, "/queue/q/partition/p?"), park(&b, "?task=t&")];
    parked(&b, 3).await;
    b.app.wake.close();
    for pop in pops {
        assert_eq!(answer(pop).await, (204, Value::Null));
    }
    assert_eq!(answer(park(&b, "/queue/q?")).await, (204, Value::Null), "and lets none begin");
}

#[tokio::test]
async fn more_waiting_pops_than_a_server_parks_are_told_to_come_back() {
    let b = Broker::start().await;
    let interest = || Interest::Queue("other".to_owned());
    let _full: Vec<Waiter> = (0..PARKED_MAX).map(|_| b.app.wake.wait(interest(), "g").expect("room")).collect();
    let response = reqwest::get(format!("{}/api/v1/pop/queue/q?wait=true", b.url)).await.expect("answers");
    assert_eq!(response.status().as_u16(), 429);
    assert_eq!(response.headers()["retry-after"], "1");
    let body: Value = serde_json::from_slice(&response.bytes().await.expect("a body")).expect("JSON");
    assert_eq!((&body["success"], &body["messages"]), (&Value::Bool(false), &Value::Array(Vec::new())));
    assert_eq!(b.pop("queue/q").await.0, 204, "a pop that does not wait is served");
}

#[tokio::test]
async fn a_push_through_another_server_wakes() {
    let first = Broker::with(no_timer()).await;
    let same = Database { name: first.database.name.clone(), target: first.database.target.clone() };
    let second = Broker::on(same, no_timer()).await;
    let stop = CancellationToken::new();
    listen(&first, &stop);
    listen(&second, &stop);
    listeners(&first, 2).await;
    let pops =
        [park(&second, "/queue/q?"), park(&second, "/queue/q/partition/p?consumerGroup=g&subscriptionMode=all&")];
    parked(&second, 2).await;
    idle(&second).await;
    first.store("q", "p", 1).await;
    for pop in pops {
        assert_eq!(ids(&answer(pop).await.1), ["p-0"]);
    }

    // The link breaks and comes back by itself.
    let broken = "select count(pg_terminate_backend(pid)) from pg_stat_activity
        where datname = $1 and application_name = 'ebbtide-wake'";
    assert_eq!(first.row(broken, &[&first.database.name]).await.get::<_, i64>(0), 2);
    listeners(&first, 0).await;
    listeners(&first, 2).await;
    let pop = park(&second, "/queue/again?");
    parked(&second, 1).await;
    idle(&second).await;
    first.store("again", "p", 1).await;
    assert_eq!(ids(&answer(pop).await.1), ["p-0"]);
    stop.cancel();
    listeners(&first, 0).await;
}

#[tokio::test]
async fn a_client_that_hangs_up_while_parked_gets_nothing() {
    let b = Broker::with(no_timer()).await;
    let stream = send_raw(&b, "queue/q?wait=true&timeout=600000").await;
    parked(&b, 1).await;
    idle(&b).await;
    drop(stream);
    parked(&b, 0).await;
    let stored = b.store("q", "p", 1).await;
    assert_eq!(b.cursor(stored.partition_id, "__QUEUE_MODE__").await, None, "nobody looked");
    assert_eq!(b.pop_ids("queue/q").await, ["p-0"]);
}

#[tokio::test]
async fn a_claim_that_ends_after_its_client_hung_up_is_released() {
    let b = Broker::with(no_timer()).await;
    let stored = b.store("q", "p", 1).await;
    let mut holder = b.database.client().await;
    let tx = holder.transaction().await.expect("begins");
    // A first contact has to wait for the partition's row.
    tx.execute("select from queen.log_partitions for update", &[]).await.expect("locks");
    let stream = send_raw(&b, "queue/q?wait=true&timeout=600000").await;
    let blocked = "select count(*) = 1 from pg_stat_activity
        where datname = $1 and application_name = 'ebbtide' and wait_event_type = 'Lock'";
    wait_until(&b.sql, "the claim is under way", blocked, &[&b.database.name]).await;
    drop(stream);
    parked(&b, 0).await;
    let other = park(&b, "/queue/q?");
    parked(&b, 1).await;
    tx.rollback().await.expect("lets go");
    assert_eq!(ids(&answer(other).await.1), ["p-0"], "the next one has it at once");
    assert_eq!(b.cursor(stored.partition_id, "__QUEUE_MODE__").await, Some((-1, Some(0), 1, true)));
}

#[tokio::test]
async fn an_answer_that_the_client_does_not_take_is_released() {
    let b = Broker::with(no_timer()).await;
    let payload = format!("\"{}\"", "x".repeat(1 << 20));
    let stored = b.store_payloads("q", "p", 0.0, &vec![payload.as_str(); 64]).await;
    let mut stream = send_raw(&b, "queue/q").await;
    let mut start = [0; 12];
    stream.read_exact(&mut start).await.expect("the answer begins");
    assert_eq!(&start, b"HTTP/1.1 200");
    assert_eq!(b.cursor(stored.partition_id, "__QUEUE_MODE__").await, Some((-1, Some(63), 1, true)));
    drop(stream);
    let released = "select worker_id is null and batch_end is null and attempt_count = 0 from queen.log_consumers";
    wait_until(&b.sql, "the lease is released", released, &[]).await;
    assert_eq!(b.pop_ids("queue/q").await.len(), 64);
}
