//! What the start of a server says about who may reach it, in its log.

use reqwest::Client;
use serde_json::json;

use crate::support::server::{Server, open_folder};
use crate::support::token::{SECRET, with_role};

const OPEN: (&str, &str) = ("QUEEN_BIND_ADDR", "0.0.0.0");

/// The lines of a log that warn of something.
fn warnings(log: &str) -> Vec<&str> {
    log.lines().filter(|line| line.contains("WARN")).collect()
}

#[tokio::test]
async fn an_open_server_warns_once_unless_it_asks_for_tokens() {
    let folder = open_folder();
    let data_dir = folder.path().join("data");
    let open = Server::with(&data_dir, &[OPEN]);
    let port = open.url().rsplit(':').next().expect("a port").to_owned();
    let configured = Client::new()
        .post(format!("http://127.0.0.1:{port}/api/v1/configure"))
        .json(&json!({"queue": "q", "options": {"encryptionEnabled": true}}))
        .send()
        .await
        .expect("it answers");
    assert_eq!(configured.status(), 200);
    let log = open.stop();
    let found: Vec<&str> = warnings(&log).into_iter().filter(|line| line.contains("QUEEN_BIND_ADDR")).collect();
    assert_eq!(found.len(), 1, "{log}");
    for part in ["0.0.0.0", "JWT_ENABLED is false", "read, add and delete every message"] {
        assert!(found[0].contains(part), "{log}");
    }
    assert!(!log.contains("QUEEN_ENCRYPTION_KEY"), "no queue was encrypted when it started: {log}");

    let asking = Server::with(&data_dir, &[OPEN, ("JWT_ENABLED", "true"), ("JWT_SECRET", SECRET)]);
    let port = asking.url().rsplit(':').next().expect("a port").to_owned();
    let url = format!("http://127.0.0.1:{port}/api/v1/dlq");
    assert_eq!(Client::new().get(&url).send().await.expect("it answers").status(), 401);
    let request = Client::new().get(&url).bearer_auth(with_role("read-only"));
    assert_eq!(request.send().await.expect("it answers").status(), 200);
    let log = asking.stop();
    assert!(!log.contains("QUEEN_BIND_ADDR") && !log.contains(SECRET), "{log}");
    let about_key = warnings(&log).into_iter().filter(|line| line.contains("QUEEN_ENCRYPTION_KEY is not set")).count();
    assert_eq!(about_key, 1, "a queue wants its payloads encrypted: {log}");
}
