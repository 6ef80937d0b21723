//! A PostgreSQL that a test stops and starts, and server processes on it.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};

use ebbtide::embedded::Cluster;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;
use tokio_postgres::Client;

use super::server::{ebbtide, open_folder};
use super::{PATIENCE, until};

/// A cluster in a folder of its own.
pub struct Postgres {
    pub folder: TempDir,
    cluster: Option<Cluster>,
}

impl Postgres {
    pub async fn start() -> Self {
        let mut postgres = Self { folder: open_folder(), cluster: None };
        postgres.up().await;
        postgres
    }

    pub async fn up(&mut self) {
        let cluster = Cluster::start(&self.folder.path().join("pg"), None, 100).await.expect("PostgreSQL starts");
        self.cluster = Some(cluster);
    }

    /// Connections break, and nothing listens any more.
    pub async fn down(&mut self) {
        self.cluster.take().expect("it is up").stop().await;
    }

    pub fn address(&self) -> tokio_postgres::Config {
        let mut address = tokio_postgres::Config::new();
        address.host_path(self.socket()).user("postgres").dbname("postgres");
        address
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("pg/run")
    }

    pub async fn sql(&self) -> Client {
        let (client, connection) = self.address().connect(tokio_postgres::NoTls).await.expect("PostgreSQL answers");
        tokio::spawn(connection);
        client
    }

    /// A server process that keeps what is its own in a folder of this name. It listens; its database may be away.
    pub async fn serve(&self, name: &str, settings: &[(&str, &str)]) -> Process {
        let data = self.folder.path().join(name);
        let mut command = ebbtide(&data, "serve");
        command.env("PG_HOST", self.socket()).env("FILE_BUFFER_FLUSH_MS", "10").env("RUST_LOG", "info,spool=debug");
        command.envs(settings.iter().copied()).stdout(Stdio::null());
        let mut child = command.spawn().expect("a server process");
        let log = Arc::new(Mutex::new(String::new()));
        let lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let written = log.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let mut log = written.lock().expect("no panic");
                log.push_str(&line);
                log.push('\n');
            }
        });
        let mut process = Process { child, url: String::new(), spool: data.join("buffers"), log };
        until("the server listens", || process.logged("listening")).await;
        let text = process.log();
        let (_, rest) = text.split_once("address=").expect("the line says where");
        let address: String = rest.chars().take_while(|c| c.is_ascii_digit() || matches!(c, '.' | ':')).collect();
        process.url = format!("http://{address}");
        process
    }
}

/// A running `ebbtide serve`.
pub struct Process {
    child: Child,
    pub url: String,
    /// Its spool's folder.
    pub spool: PathBuf,
    log: Arc<Mutex<String>>,
}

impl Process {
    pub fn log(&self) -> String {
        self.log.lock().expect("no panic").clone()
    }

    pub fn logged(&self, text: &str) -> bool {
        self.log.lock().expect("no panic").contains(text)
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().try_into().expect("a pid")), signal).expect("it runs");
    }

    /// `kill -9`.
    pub fn kill(mut self) {
        self.signal(Signal::SIGKILL);
        self.child.wait().expect("it ends");
    }

    pub fn stop(mut self) {
        self.signal(Signal::SIGTERM);
        let status = self.child.wait().expect("it ends");
        assert!(status.success(), "{status}: {}", self.log());
    }

    pub async fn get(&self, path: &str) -> (u16, Value) {
        send(reqwest::Client::new().get(format!("{}{path}", self.url))).await
    }

    pub async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        send(reqwest::Client::new().post(format!("{}{path}", self.url)).json(&body)).await
    }

    /// Waits until `GET path` answers what `fact` wants.
    #[allow(clippy::disallowed_methods, reason = "the pause between two looks at an observed fact")]
    pub async fn until(&self, what: &str, path: &str, fact: impl Fn(u16, &Value) -> bool) {
        let started = tokio::time::Instant::now();
        while started.elapsed() < PATIENCE {
            let (status, body) = self.get(path).await;
            if fact(status, &body) {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        panic!("gave up waiting until {what}: {:?}\n{}", self.get(path).await, self.log());
    }

    pub async fn until_replayed(&self) {
        let is_done = |_, body: &Value| body["pending"] == 0 && body["dbHealthy"] == true;
        self.until("everything is replayed", "/api/v1/status/buffers", is_done).await;
    }

    pub async fn until_ready(&self) {
        self.until("the server is healthy", "/health", |status, _| status == 200).await;
    }

    /// Pops everything, in order, from a queue, and commits it.
    pub async fn pop_all(&self, queue: &str) -> Vec<Value> {
        let mut all = Vec::new();
        loop {
            let path = format!("/api/v1/pop/queue/{queue}?batch=10000&partitions=100&autoAck=true");
            let (status, body) = self.get(&path).await;
            match status {
                204 => return all,
                200 => all.extend(body["messages"].as_array().expect("messages").iter().cloned()),
                _ => panic!("{status}: {body}"),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn send(request: reqwest::RequestBuilder) -> (u16, Value) {
    let response = request.send().await.expect("the server answers");
    let status = response.status().as_u16();
    let bytes = response.bytes().await.expect("the body arrives");
    (status, serde_json::from_slice(&bytes).unwrap_or_default())
}
