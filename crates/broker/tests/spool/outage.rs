//! One server through an outage of its database.

use serde_json::{Value, json};

use crate::support::away::{Postgres, Process};
use crate::support::{until, wait_until};

/// Pushes messages with these transaction ids to a partition each; returns the items of the answer.
async fn push(server: &Process, queue: &str, ids: &[String]) -> Vec<Value> {
    let item = |id: &String| {
        let partition = format!("p{}", id.len() % 3);
        json!({"queue": queue, "partition": partition, "payload": {"id": id}, "transactionId": id})
    };
    let items: Vec<Value> = ids.iter().map(item).collect();
    let (status, body) = server.post("/api/v1/push", json!({"items": items})).await;
    assert_eq!(status, 201, "{body}");
    body.as_array().expect("items").clone()
}

fn statuses(items: &[Value]) -> Vec<&str> {
    items.iter().map(|item| item["status"].as_str().expect("a status")).collect()
}

#[tokio::test]
async fn pushes_are_buffered_and_replayed_in_order_once() {
    let mut postgres = Postgres::start().await;
    let server = postgres.serve("a", &[]).await;
    server.until_ready().await;
    let ids =
        |range: std::ops::Range<usize>| range.map(|n| format!("{n:0width$}", width = 4 + n % 3)).collect::<Vec<_>>();
    assert!(statuses(&push(&server, "q", &ids(0..30)).await).iter().all(|status| *status == "queued"));

    postgres.down().await;
    let mut answered = Vec::new();
    for start in (30..90).step_by(10) {
        answered.extend(push(&server, "q", &ids(start..start + 10)).await);
    }
    assert!(statuses(&answered).iter().all(|status| *status == "buffered"), "{answered:?}");
    // Without a transaction id, and twice in one request.
    let twice = json!({"items": [{"queue": "r", "payload": 1}, {"queue": "r", "payload": 2, "transactionId": "t"},
        {"queue": "r", "payload": 3, "transactionId": "t"}]});
    let (status, mixed) = server.post("/api/v1/push", twice).await;
    assert_eq!(status, 201);
    assert_eq!(statuses(mixed.as_array().expect("items")), ["buffered", "buffered", "duplicate"]);
    assert_eq!(mixed[0]["message_id"], mixed[0]["transaction_id"], "minted");
    assert_eq!(mixed[1]["message_id"], mixed[2]["message_id"]);

    let (_, buffers) = server.get("/api/v1/status/buffers").await;
    assert_eq!(buffers, json!({"pending": 62, "failed": 0, "dbHealthy": false, "worker": 0}));
    let (status, health) = server.get("/health").await;
    assert_eq!((status, &health["database"]), (503, &json!("disconnected")));
    let (status, body) = server.get("/api/v1/pop/queue/q").await;
    assert_eq!((status, &body["messages"]), (503, &json!([])), "{body}");

    postgres.up().await;
    server.until_replayed().await;
    let after = push(&server, "q", &ids(90..93)).await;
    assert_eq!(statuses(&after), ["queued"; 3]);
    let popped = server.pop_all("q").await;
    for (partition, length) in [("p0", 6), ("p1", 4), ("p2", 5)] {
        let of = |message: &&Value| message["partition"] == partition;
        let got: Vec<&str> =
            popped.iter().filter(of).map(|message| message["transactionId"].as_str().expect("text")).collect();
        let all = ids(0..93);
        let expected: Vec<&str> = all.iter().filter(|id| id.len() == length).map(String::as_str).collect();
        assert_eq!(got, expected, "{partition} in order");
    }
    // The id that was answered is the id that is stored, and pushing again stores nothing.
    for item in &answered {
        let stored = popped.iter().find(|message| message["transactionId"] == item["transaction_id"]);
        assert_eq!(stored.map(|message| &message["id"]), Some(&item["message_id"]));
    }
    let again = push(&server, "q", &ids(0..93)).await;
    assert!(statuses(&again).iter().all(|status| *status == "duplicate"));
    assert_eq!(server.pop_all("r").await.len(), 2);
    assert!(server.logged("the database is away") && server.logged("the database is back"), "{}", server.log());
    assert!(server.log().matches("the database is away").count() < 20, "limited: {}", server.log());
    server.stop();
}

#[tokio::test]
async fn a_full_spool_refuses_and_says_so() {
    let mut postgres = Postgres::start().await;
    let server = postgres.serve("a", &[("EBBTIDE_FILE_BUFFER_MAX_BYTES", "65536")]).await;
    server.until_ready().await;
    postgres.down().await;
    let push = |n: usize| {
        let payload = "x".repeat(10_000);
        server.post(
            "/api/v1/push",
            json!({"items": [{"queue": "q", "payload": payload, "transactionId": n.to_string()}]}),
        )
    };
    let mut kept = 0;
    let (status, body) = loop {
        let (status, body) = push(kept).await;
        if status != 201 {
            break (status, body);
        }
        kept += 1;
        assert!(kept < 10, "bounded");
    };
    assert_eq!(status, 503);
    let error = body["error"].as_str().expect("text");
    assert!(error.contains("EBBTIDE_FILE_BUFFER_MAX_BYTES"), "{error}");
    assert!(3 < kept);
    postgres.up().await;
    server.until_replayed().await;
    assert_eq!(push(kept).await.0, 201, "there is room again");
    let popped = server.pop_all("q").await;
    let ids: Vec<String> =
        popped.iter().map(|message| message["transactionId"].as_str().expect("text").into()).collect();
    assert_eq!(ids, (0..=kept).map(|n| n.to_string()).collect::<Vec<_>>());
    server.stop();
}

#[tokio::test]
async fn what_the_database_refuses_goes_aside_and_holds_nothing_up() {
    let mut postgres = Postgres::start().await;
    let server = postgres.serve("a", &[]).await;
    server.until_ready().await;
    // One transaction id violates a constraint; its neighbours do not.
    let hash: String = ebbtide::segment::hash("unwanted").iter().map(|byte| format!("{byte:02x}")).collect();
    let refusing = format!(
        "create function refuse() returns trigger language plpgsql as $$ begin
            if position('\\x{hash}'::bytea in new.hashes) > 0 then
                raise exception 'no such thing' using errcode = '23514';
            end if;
            return new;
        end $$;
        create trigger refuse before insert on queen.log_txns for each row execute function refuse()"
    );
    postgres.sql().await.batch_execute(&refusing).await.expect("the trigger is made");
    postgres.down().await;
    let item = |id: &str| json!({"queue": "q", "payload": format!("{id}\n"), "transactionId": id});
    let items: Vec<Value> = ["a", "unwanted", "b"].map(item).into();
    let (_, answer) = server.post("/api/v1/push", json!({"items": items})).await;
    server.post("/api/v1/push", json!({"items": [item("c")]})).await;
    assert_eq!(statuses(answer.as_array().expect("items")), ["buffered"; 3]);
    postgres.up().await;
    server.until_replayed().await;
    let popped = server.pop_all("q").await;
    let ids: Vec<&str> = popped.iter().map(|message| message["transactionId"].as_str().expect("text")).collect();
    assert_eq!(ids, ["a", "b", "c"]);
    assert_eq!(server.get("/api/v1/status/buffers").await.1["failed"], 1);
    let lines = std::fs::read_to_string(server.spool.join("failed.jsonl")).expect("there");
    let line: Value = serde_json::from_str(&lines).expect("one line of JSON");
    assert_eq!((&line["transactionId"], &line["payload"]), (&json!("unwanted"), &json!("\"unwanted\\n\"")));
    assert!(line["error"].as_str().expect("text").contains("no such thing"), "{line}");
    assert!(server.logged("refuses a spooled message"));
    server.stop();
}

#[tokio::test]
async fn with_a_key_nothing_confidential_is_on_the_disk() {
    let mut postgres = Postgres::start().await;
    let key = [("QUEEN_ENCRYPTION_KEY", "7".repeat(64))];
    let settings: Vec<(&str, &str)> = key.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let server = postgres.serve("a", &settings).await;
    server.until_ready().await;
    let options = json!({"queue": "q", "options": {"encryptionEnabled": true}});
    assert_eq!(server.post("/api/v1/configure", options).await.0, 200);
    postgres.down().await;
    server.post("/api/v1/push", json!({"items": [{"queue": "q", "payload": {"pin": "plain-1234"}}]})).await;
    let mut found = 0;
    for entry in std::fs::read_dir(&server.spool).expect("there") {
        let bytes = std::fs::read(entry.expect("an entry").path()).expect("read");
        assert!(!String::from_utf8_lossy(&bytes).contains("plain-1234"));
        found += usize::from(String::from_utf8_lossy(&bytes).contains("encrypted"));
    }
    assert_eq!(found, 1, "sealed");

    // Without the key the spool waits and says so; with it, it is replayed.
    server.kill();
    postgres.up().await;
    let without = postgres.serve("a", &[]).await;
    without.until_ready().await;
    until("it says so", || without.logged("the spool is not replayed")).await;
    assert_eq!(without.get("/api/v1/status/buffers").await.1["pending"], 1);
    without.stop();
    let server = postgres.serve("a", &settings).await;
    server.until_replayed().await;
    assert_eq!(server.pop_all("q").await[0]["data"], json!({"pin": "plain-1234"}));
    server.stop();
}

#[tokio::test]
async fn a_server_that_starts_first_waits_says_so_and_spools() {
    let mut postgres = Postgres::start().await;
    postgres.down().await;
    let server = postgres.serve("a", &[]).await;
    assert_eq!(server.get("/health").await.0, 503);
    until("it says so", || server.logged("waiting for the database")).await;
    assert_eq!(statuses(&push(&server, "q", &["early".to_owned()]).await), ["buffered"]);
    assert_eq!(server.get("/api/v1/pop/queue/q?wait=true&timeout=300").await.0, 204, "whoever waits is told nothing");
    assert_eq!(server.get("/api/v1/pop/queue/q").await.0, 503);
    let ack = json!({"transactionId": "t", "partitionId": "00000000-0000-4000-8000-000000000001", "leaseId": "l"});
    let (status, body) = server.post("/api/v1/ack", ack).await;
    assert_eq!((status, &body["error"]), (500, &json!("pool")), "{body}");
    postgres.up().await;
    server.until_ready().await;
    server.until_replayed().await;
    assert_eq!(server.pop_all("q").await.len(), 1);
    wait_until(&postgres.sql().await, "the schema is there", "select to_regclass('queen.queues') is not null", &[])
        .await;
    server.stop();
}

#[tokio::test]
async fn a_pop_that_waits_outlasts_an_outage() {
    let mut postgres = Postgres::start().await;
    let server = postgres.serve("a", &[]).await;
    server.until_ready().await;
    push(&server, "q", &["first".to_owned()]).await;
    assert_eq!(server.pop_all("q").await.len(), 1);
    postgres.down().await;
    let (http, url) = (reqwest::Client::new(), server.url.clone());
    let waiting = tokio::spawn(async move {
        let path = format!("{url}/api/v1/pop/queue/q?wait=true&timeout=60000");
        http.get(path).send().await.expect("answers").json::<Value>().await.expect("messages")
    });
    server.until("a pop found no database", "/api/v1/status/buffers", |_, _| true).await;
    push(&server, "q", &["second".to_owned()]).await;
    postgres.up().await;
    let body = waiting.await.expect("no panic");
    assert_eq!(body["messages"][0]["transactionId"], "second");
    server.stop();
}
