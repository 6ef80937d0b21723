//! A server on a database of its own: the one place where tests touch the API.
#![allow(dead_code, unreachable_pub, reason = "each test binary includes this module and uses a part")]

pub mod away;
pub mod lane;
pub mod log;
pub mod names;
pub mod partition;
pub mod random;
pub mod server;
pub mod token;
pub mod trace;

use std::sync::Arc;
use std::time::Duration;

use ebbtide::db::migrate::{fingerprint, migrate};
use ebbtide::db::{Db, Statements, Target, TlsSettings};
use ebbtide::http::{self, App, Settings};
use ebbtide::retention;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Past this, a test that waits for a fact gives up and says which.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The scratch cluster that the test set-up starts.
pub fn cluster() -> tokio_postgres::Config {
    let url = std::env::var("TEST_DATABASE_URL")
        .expect("TEST_DATABASE_URL names a scratch PostgreSQL; `make test` starts one");
    url.parse().expect("TEST_DATABASE_URL is a PostgreSQL URL")
}

fn target(database: &str) -> Target {
    let mut config = cluster();
    config.dbname(database);
    Target { config, tls: TlsSettings::unused() }
}

/// An address where no database is; the test gives it a port.
pub fn dead_target() -> Target {
    let mut config = tokio_postgres::Config::new();
    config.host("127.0.0.1").user("nobody");
    Target { config, tls: TlsSettings::unused() }
}

/// The address of a test's database, for a program that is told by its environment.
pub fn url(database: &str) -> String {
    let cluster = std::env::var("TEST_DATABASE_URL").expect("names a scratch PostgreSQL");
    let (address, _) = cluster.rsplit_once('/').expect("ends with a database");
    format!("{address}/{database}")
}

/// Settings of retention that let nothing slow it down, and leave no task behind.
pub fn unpaced() -> retention::Settings {
    retention::Settings {
        lock_hold: Duration::from_secs(60),
        shared_duty: 1.0,
        limits: retention::pacing::Limits { snapshot_age: Duration::MAX, ..Default::default() },
        vacuum: false,
        ..Default::default()
    }
}

/// A database that exists for one test.
pub struct Database {
    pub name: String,
    pub target: Target,
}

impl Database {
    /// A copy of a migrated template, which the first test that needs it makes.
    pub async fn create() -> Self {
        let admin = target("postgres").connect("test-admin").await.expect("the cluster answers");
        let template = template(&admin).await;
        Self::from_template(&admin, &template).await
    }

    /// A database with nothing in it.
    pub async fn empty() -> Self {
        let admin = target("postgres").connect("test-admin").await.expect("the cluster answers");
        Self::from_template(&admin, "template0").await
    }

    async fn from_template(admin: &Client, template: &str) -> Self {
        let name = format!("t_{}", Uuid::now_v7().simple());
        admin.batch_execute(&format!("create database {name} template {template}")).await.expect("database is made");
        let target = target(&name);
        Self { name, target }
    }

    pub async fn client(&self) -> Client {
        self.target.connect("test").await.expect("the test database answers")
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let name = self.name.clone();
        let dropped = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
            runtime.block_on(async {
                if let Ok(admin) = target("postgres").connect("test-admin").await {
                    // Best effort: the whole cluster goes when the run ends.
                    let _ = admin.batch_execute(&format!("drop database if exists {name} with (force)")).await;
                }
            });
        });
        let _ = dropped.join();
    }
}

/// Every test process may come first; an advisory lock lets one make the template, and the rename
/// at the end keeps a half-made one from being used.
async fn template(admin: &Client) -> String {
    let name = format!("template_{}", fingerprint());
    admin.execute("select pg_advisory_lock(737000)", &[]).await.expect("lock");
    let query = "select exists (select from pg_database where datname = $1)";
    let exists: bool = admin.query_one(query, &[&name]).await.expect("query").get(0);
    if !exists {
        let making = format!("making_{}", Uuid::now_v7().simple());
        admin.batch_execute(&format!("create database {making} template template0")).await.expect("create");
        migrate(&target(&making)).await.expect("the schema installs");
        wait_until(
            admin,
            "the installer has left",
            "select count(*) = 0 from pg_stat_activity where datname = $1",
            &[&making],
        )
        .await;
        admin.batch_execute(&format!("alter database {making} rename to {name}")).await.expect("rename");
    }
    admin.execute("select pg_advisory_unlock(737000)", &[]).await.expect("unlock");
    name
}

/// Waits for an observed fact: `query` must come to answer true.
#[allow(clippy::disallowed_methods, reason = "the pause between two looks at the database")]
pub async fn wait_until(client: &Client, what: &str, query: &str, params: &[&(dyn ToSql + Sync)]) {
    let started = tokio::time::Instant::now();
    while started.elapsed() < PATIENCE {
        if client.query_one(query, params).await.expect("the fact can be asked for").get::<_, bool>(0) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("gave up waiting until {what}");
}

/// Waits for a fact inside this process.
#[allow(clippy::disallowed_methods, reason = "the pause between two looks at an observed fact")]
pub async fn until(what: &str, fact: impl Fn() -> bool) {
    let started = tokio::time::Instant::now();
    while !fact() {
        assert!(started.elapsed() < PATIENCE, "gave up waiting until {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A broker: a database of its own, and an HTTP server on a free loopback port.
pub struct Broker {
    pub app: Arc<App>,
    /// `http://127.0.0.1:port`
    pub url: String,
    /// A session of the test's own.
    pub sql: Client,
    pub database: Database,
    http: reqwest::Client,
    server: tokio::task::JoinHandle<()>,
}

impl Broker {
    pub async fn start() -> Self {
        Self::with(Settings::default()).await
    }

    pub async fn with(settings: Settings) -> Self {
        Self::on(Database::create().await, settings).await
    }

    /// A server on a database that exists: a second one on the first one's, say.
    pub async fn on(database: Database, settings: Settings) -> Self {
        let (app, url, server) = serve(&database, settings).await;
        let sql = database.client().await;
        Self { app, url, sql, database, http: reqwest::Client::new(), server }
    }

    pub async fn get(&self, path: &str) -> (u16, Value) {
        self.send(self.http.get(format!("{}{path}", self.url))).await
    }

    pub async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        self.send(self.http.post(format!("{}{path}", self.url)).json(&body)).await
    }

    /// Posts bytes exactly as they are.
    pub async fn post_raw(&self, path: &str, body: impl Into<reqwest::Body>) -> (u16, Value) {
        self.send(self.http.post(format!("{}{path}", self.url)).body(body)).await
    }

    pub async fn delete(&self, path: &str) -> (u16, Value) {
        self.send(self.http.delete(format!("{}{path}", self.url))).await
    }

    /// A request to the server, to be completed and sent.
    pub fn request(&self, method: reqwest::Method, path: &str) -> reqwest::RequestBuilder {
        self.http.request(method, format!("{}{path}", self.url))
    }

    pub async fn send(&self, request: reqwest::RequestBuilder) -> (u16, Value) {
        let response = request.send().await.expect("the server answers");
        let status = response.status().as_u16();
        let bytes = response.bytes().await.expect("the body arrives");
        let value = if bytes.is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(&bytes)
                .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).into_owned()))
        };
        (status, value)
    }

    /// The answer's body as bytes, for what must survive byte for byte.
    pub async fn get_bytes(&self, path: &str) -> (u16, Vec<u8>) {
        let response = self.http.get(format!("{}{path}", self.url)).send().await.expect("the server answers");
        (response.status().as_u16(), response.bytes().await.expect("the body arrives").to_vec())
    }

    pub async fn rows(&self, query: &str, params: &[&(dyn ToSql + Sync)]) -> Vec<Row> {
        self.sql.query(query, params).await.unwrap_or_else(|error| panic!("{query}: {error:?}"))
    }

    pub async fn row(&self, query: &str, params: &[&(dyn ToSql + Sync)]) -> Row {
        self.sql.query_one(query, params).await.unwrap_or_else(|error| panic!("{query}: {error:?}"))
    }

    pub async fn execute(&self, query: &str, params: &[&(dyn ToSql + Sync)]) -> u64 {
        self.sql.execute(query, params).await.unwrap_or_else(|error| panic!("{query}: {error:?}"))
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn serve(database: &Database, settings: Settings) -> (Arc<App>, String, tokio::task::JoinHandle<()>) {
    let db = Db::open(&database.target, 16, Statements::Prepared, Duration::from_secs(30)).await.expect("pool");
    let app = App::new(db, settings).expect("the spool opens");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    tokio::spawn(app.spool.clone().replay(CancellationToken::new()));
    let server = tokio::spawn({
        let app = app.clone();
        async move { http::serve(listener, app, std::future::pending()).await }
    });
    (app, url, server)
}
