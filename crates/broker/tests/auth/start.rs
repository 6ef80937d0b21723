//! What the start of a server says about who may reach it, in its log.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use jsonwebtoken::Algorithm;
use reqwest::Client;
use serde_json::json;

use crate::support::server::{Server, open_folder};
use crate::support::token::{Pair, SECRET, signed, with_role};

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

/// An issuer of keys behind TLS, with a certificate that only this test knows.
struct SecureIssuer {
    process: Child,
    url: String,
}

impl SecureIssuer {
    /// Serves `keys` from `folder`, where `cert.pem` is made.
    fn start(folder: &Path, keys: &str) -> Self {
        let mut making = Command::new("openssl");
        making.args(["req", "-x509", "-newkey", "ed25519", "-nodes", "-keyout", "key.pem", "-out", "cert.pem"]);
        making.args(["-days", "2", "-subj", "/CN=issuer", "-addext", "subjectAltName=IP:127.0.0.1"]);
        making.args(["-addext", "basicConstraints=critical,CA:FALSE"]);
        let made = making.current_dir(folder).stderr(Stdio::null()).status().expect("openssl is installed");
        assert!(made.success(), "a certificate");
        let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", keys.len());
        std::fs::write(folder.join("keys"), head + keys).expect("a file");
        let mut serving = Command::new("openssl");
        serving.args(["s_server", "-accept", "127.0.0.1:0", "-cert", "cert.pem", "-key", "key.pem", "-HTTP"]);
        serving.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = serving.spawn().expect("openssl is installed");
        let mut lines = BufReader::new(process.stdout.take().expect("piped")).lines();
        let port = lines.find_map(|line| line.expect("text").strip_prefix("ACCEPT 127.0.0.1:").map(str::to_owned));
        let url = format!("https://127.0.0.1:{}/keys", port.expect("it says where it listens"));
        // It goes on writing, and must find a reader.
        std::thread::spawn(move || lines.for_each(drop));
        Self { process, url }
    }
}

impl Drop for SecureIssuer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test]
async fn keys_come_over_tls_from_an_issuer_whose_certificate_is_believed() {
    let (folder, pair) = (open_folder(), Pair::ed());
    let keys = json!({"keys": [pair.jwk(Some("one"), Algorithm::EdDSA)]}).to_string();
    let issuer = SecureIssuer::start(folder.path(), &keys);
    let cert = folder.path().join("cert.pem");
    let token = signed(Algorithm::EdDSA, &pair.key, Some("one"), &json!({"role": "read-only"}));
    let data_dir = folder.path().join("data");
    let asks = [("JWT_ENABLED", "true"), ("JWT_ALGORITHM", "EdDSA"), ("JWT_JWKS_URL", issuer.url.as_str())];
    for (believed, expected) in [(Some(cert.to_str().expect("text")), 200), (None, 503)] {
        let settings: Vec<_> = asks.into_iter().chain(believed.map(|path| ("SSL_CERT_FILE", path))).collect();
        let server = Server::with(&data_dir, &settings);
        let request = Client::new().get(format!("{}/api/v1/dlq", server.url())).bearer_auth(&token);
        let status = request.send().await.expect("it answers").status();
        let log = server.stop();
        assert_eq!(status, expected, "{log}");
        assert_eq!(log.contains("could not be fetched"), expected == 503, "{log}");
    }
}
