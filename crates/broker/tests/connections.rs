//! Connections by real sockets: how many, how long they may stand still, and what all of them may hold.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ebbtide::db::{Db, Statements};
use ebbtide::http::{self, App, ConnectionLimits, Settings};
use serde_json::json;
use support::{Broker, Database, PATIENCE, wait_until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::timeout;

const SHORT: Duration = Duration::from_millis(100);

fn limited(limits: ConnectionLimits) -> Settings {
    Settings { connections: limits, ..Settings::default() }
}

/// A client that writes bytes and reads them, and waits no longer than a test may.
struct Client(TcpStream);

impl Client {
    async fn to(url: &str) -> Self {
        Self(TcpStream::connect(url.strip_prefix("http://").expect("a URL")).await.expect("connects"))
    }

    async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.write_all(bytes.as_ref()).await.expect("sends");
    }

    /// The next answer: its head, and its body as far as the head says.
    async fn answer(&mut self) -> String {
        let mut text = String::new();
        let reading = async {
            while !is_whole(&text) {
                let mut part = [0; 4096];
                let read = self.0.read(&mut part).await.expect("reads");
                assert!(0 < read, "the server closed after {text:?}");
                text.push_str(std::str::from_utf8(&part[..read]).expect("text"));
            }
        };
        timeout(PATIENCE, reading).await.expect("an answer");
        text
    }

    /// What comes until the server closes.
    async fn rest(&mut self) -> String {
        let mut bytes = Vec::new();
        // A reset ends it as well.
        let _ = timeout(PATIENCE, self.0.read_to_end(&mut bytes)).await.expect("the server closes");
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn is_whole(text: &str) -> bool {
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let mut lengths =
        head.lines().filter_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ").map(str::to_owned));
    body.len() >= lengths.next().map_or(0, |length| length.parse().expect("a number"))
}

const HEALTH: &str = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n";

fn push_head(length: usize) -> String {
    format!("POST /api/v1/push HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n")
}

/// A push with a payload of so many bytes.
fn push(payload: usize) -> String {
    json!({"items": [{"queue": "q", "payload": "x".repeat(payload)}]}).to_string()
}

#[tokio::test]
async fn a_connection_that_stands_still_before_a_request_is_closed() {
    let limits = ConnectionLimits { idle_max: SHORT, ..ConnectionLimits::default() };
    let broker = Broker::with(limited(limits)).await;
    for sent in ["", "G", "GET /health HTTP/1.1\r\nhost: x\r\nx-slow: "] {
        let mut client = Client::to(&broker.url).await;
        client.send(sent).await;
        assert!(!client.rest().await.contains("200 OK"), "{sent:?}");
    }
    let mut client = Client::to(&broker.url).await;
    client.send(HEALTH).await;
    assert!(client.answer().await.starts_with("HTTP/1.1 200 "));
    assert_eq!(client.rest().await, "", "kept alive for a while, and no longer");
}

#[tokio::test]
async fn a_request_that_takes_long_is_not_idle() {
    let limits = ConnectionLimits { idle_max: SHORT, ..ConnectionLimits::default() };
    let broker = Broker::with(limited(limits)).await;
    let mut client = Client::to(&broker.url).await;
    client.send("GET /api/v1/pop/queue/q?wait=true&timeout=500 HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(client.answer().await.starts_with("HTTP/1.1 204 "));
}

#[tokio::test]
async fn more_connections_than_there_may_be_wait_for_a_place() {
    let broker = Broker::with(limited(ConnectionLimits { most: 2, ..ConnectionLimits::default() })).await;
    let (mut first, mut second) = (Client::to(&broker.url).await, Client::to(&broker.url).await);
    for client in [&mut first, &mut second] {
        client.send(HEALTH).await;
        client.answer().await;
    }
    let mut third = Client::to(&broker.url).await;
    third.send(HEALTH).await;
    let left = Arc::new(AtomicBool::new(false));
    let seen = left.clone();
    let waiting = tokio::spawn(async move {
        let answer = third.answer().await;
        assert!(seen.load(Ordering::SeqCst), "answered while there was no place for it");
        answer
    });
    for _ in 0..20 {
        second.send(HEALTH).await;
        second.answer().await;
    }
    left.store(true, Ordering::SeqCst);
    drop(first);
    assert!(waiting.await.expect("it had to wait").starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn a_client_that_does_not_read_its_answer_gives_the_lease_back() {
    let limits = ConnectionLimits { write_pause_max: SHORT, ..ConnectionLimits::default() };
    let broker = Broker::with(limited(limits)).await;
    // More than the buffers of both sockets take.
    assert_eq!(broker.post_raw("/api/v1/push", push(40 << 20)).await.0, 201);
    let mut client = Client::to(&broker.url).await;
    client.send("GET /api/v1/pop/queue/q?consumerGroup=g&subscriptionMode=all HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let taken = "select count(*) = 1 from queen.log_consumers where committed = -1 and batch_end is null";
    wait_until(&broker.sql, "the lease was taken and given back", taken, &[]).await;
    let text = client.rest().await;
    assert!(text.starts_with("HTTP/1.1 200 ") && text.len() < 40 << 20, "cut off after {} bytes", text.len());
    assert_eq!(broker.pop("queue/q?consumerGroup=g").await.0, 200, "for somebody who reads");
}

#[tokio::test]
async fn large_bodies_share_their_memory_and_small_ones_get_through() {
    let settings = Settings { body_bytes_max: 1 << 20, bodies_bytes_max: 1 << 20, ..Settings::default() };
    let broker = Broker::with(settings).await;
    let body = push(900_000);
    let mut slow = Client::to(&broker.url).await;
    slow.send(push_head(body.len())).await;
    slow.send(&body[..850_000]).await;
    // Until what was sent has been read.
    let refused = {
        let mut tries = 0;
        loop {
            let request = broker.request(reqwest::Method::POST, "/api/v1/push").body(body.clone());
            let response = request.send().await.expect("the server answers");
            if response.status() == 503 {
                break response;
            }
            tries += 1;
            assert!(tries < 10_000, "gave up waiting until the memory is taken");
        }
    };
    assert_eq!(refused.headers()["retry-after"], "1");
    let text = refused.text().await.expect("text");
    assert!(text.contains("EBBTIDE_BODIES_BYTES_MAX"), "{text}");
    for path in ["/api/v1/push", "/api/v1/transaction"] {
        let large = broker.post_raw(path, body.clone()).await;
        assert_eq!(large.0, 503, "{path}: {large:?}");
    }
    assert_eq!(broker.post_raw("/api/v1/push", push(10_000)).await.0, 201);
    slow.send(&body[850_000..]).await;
    assert!(slow.answer().await.starts_with("HTTP/1.1 201 "), "whoever was there first is served");
    assert_eq!(broker.post_raw("/api/v1/push", body).await.0, 201, "what it took is free again");
}

#[tokio::test]
async fn a_server_that_stops_finishes_what_is_under_way() {
    let database = Database::create().await;
    let db = Db::open(&database.target, 4, Statements::Prepared, PATIENCE).await.expect("pool");
    let app = App::new(db, Settings::default()).expect("no spool");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = tokio::spawn(http::serve(listener, app, async move { drop(stopped.await) }));
    let (mut idle, mut busy, mut parked) = (Client::to(&url).await, Client::to(&url).await, Client::to(&url).await);
    idle.send(HEALTH).await;
    idle.answer().await;
    parked.send("GET /api/v1/pop/queue/other?wait=true&timeout=600000 HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let body = push(100_000);
    busy.send(push_head(body.len())).await;
    // The server has taken the head when it asks for the body.
    let mut asked = Client::to(&url).await;
    asked.send(push_head(body.len()).replace("\r\n\r\n", "\r\nexpect: 100-continue\r\n\r\n")).await;
    assert!(asked.answer().await.starts_with("HTTP/1.1 100 "));
    busy.send(&body[..50_000]).await;
    stop.send(()).expect("it runs");
    assert_eq!(idle.rest().await, "", "nothing is under way there");
    asked.send(&body).await;
    let answer = asked.rest().await;
    assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
    busy.send(&body[50_000..]).await;
    let answer = busy.rest().await;
    assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
    assert!(parked.rest().await.starts_with("HTTP/1.1 204 "), "a parked pop is let go");
    timeout(PATIENCE, serving).await.expect("it ends").expect("no panic");
    assert!(TcpStream::connect(url.strip_prefix("http://").expect("a URL")).await.is_err(), "nobody listens");
}
