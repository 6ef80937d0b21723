//! The advisory gate against a real PostgreSQL, named by `TEST_DATABASE_URL`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "support/log.rs"]
mod log;
#[path = "support/pooler.rs"]
mod pooler;

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use ebbtide_sweep::{AdvisoryGate, Connected, GateError, LeaderGate, Led};
use pooler::{Lending, Pooler};
use tokio_postgres::{Client, Config, NoTls};

/// For facts that a loaded machine may be slow to bring about.
const PATIENCE: Duration = Duration::from_secs(60);

fn config() -> Config {
    let url = std::env::var("TEST_DATABASE_URL")
        .expect("TEST_DATABASE_URL must be the URL of a superuser on a scratch PostgreSQL");
    url.parse().expect("TEST_DATABASE_URL must be a PostgreSQL URL")
}

async fn connect(config: Config) -> Result<Connected, tokio_postgres::Error> {
    let (client, connection) = config.connect(NoTls).await?;
    let driver = tokio::spawn(async move {
        // A broken connection shows at the statements that were sent on it.
        let _ = connection.await;
    });
    Ok((client, driver))
}

/// The tests share a database: each has a lock of its own.
fn gate(lock_id: i64) -> AdvisoryGate {
    gate_to(lock_id, config())
}

fn gate_to(lock_id: i64, config: Config) -> AdvisoryGate {
    AdvisoryGate::new(lock_id, move || {
        let config = config.clone();
        async move { Ok(connect(config).await?) }
    })
}

async fn observer() -> Client {
    connect(config()).await.unwrap().0
}

async fn number(client: &Client, query: &str) -> i64 {
    client.query_one(query, &[]).await.unwrap().get(0)
}

fn holders_query(lock_id: i64) -> String {
    format!("select count(*) from pg_locks where locktype = 'advisory' and granted and objid = {lock_id}")
}

async fn holders(observer: &Client, lock_id: i64) -> i64 {
    number(observer, &holders_query(lock_id)).await
}

async fn backend_pid(client: &Client) -> i32 {
    let query = "select pg_backend_pid()";
    client.query_one(query, &[]).await.unwrap().get(0)
}

/// Asks until the answer is `expected`.
async fn wait_for(observer: &Client, expected: i64, query: &str) {
    let asking = async { while number(observer, query).await != expected {} };
    tokio::time::timeout(PATIENCE, asking).await.unwrap_or_else(|_| panic!("never {expected}: {query}"));
}

async fn wait_until_free(observer: &Client, lock_id: i64) {
    wait_for(observer, 0, &holders_query(lock_id)).await;
}

#[tokio::test]
async fn one_leads_and_the_other_skips() {
    let (mut first, mut second) = (gate(1001), gate(1001));
    let observer = observer().await;
    let led = first
        .as_leader(|_| async {
            assert_eq!(holders(&observer, 1001).await, 1);
            second.as_leader(|_| ready(())).await.unwrap()
        })
        .await;
    assert_eq!(led.unwrap(), Led::Ran(Led::Skipped));
    assert_eq!(holders(&observer, 1001).await, 0);
    assert_eq!(second.as_leader(|_| ready(2)).await.unwrap(), Led::Ran(2));
}

#[tokio::test]
async fn every_cycle_runs_on_the_one_connection_of_the_gate() {
    let mut gate = gate(1002);
    let mut pids = Vec::new();
    for _ in 0..3 {
        let led = gate.as_leader(|client| async move { backend_pid(&client).await }).await;
        let Led::Ran(pid) = led.unwrap() else { panic!("skipped") };
        pids.push(pid);
    }
    assert!(pids.iter().all(|pid| *pid == pids[0]), "{pids:?}");

    let query = "select count(*) from pg_stat_activity where application_name = 'ebbtide-sweep 1002'";
    wait_for(&observer().await, 1, query).await;
}

#[tokio::test]
async fn the_session_has_its_settings() {
    // Against defaults that differ, as a role or a database may set them.
    let mut config = config();
    config.options("-c timezone=Asia/Tokyo -c default_transaction_isolation=serializable -c synchronous_commit=on");
    let mut gate = gate_to(1003, config);
    let led = gate
        .as_leader(|client| async move {
            let mut settings = Vec::new();
            for name in [
                "application_name",
                "TimeZone",
                "transaction_isolation",
                "synchronous_commit",
                "client_connection_check_interval",
            ] {
                let row = client.query_one(&format!("show {name}"), &[]).await;
                settings.push(row.unwrap().get::<_, String>(0));
            }
            settings
        })
        .await;
    let expected = ["ebbtide-sweep 1003", "UTC", "read committed", "off", "1s"];
    assert_eq!(led.unwrap(), Led::Ran(expected.map(String::from).to_vec()));
}

#[tokio::test]
async fn a_killed_leader_loses_its_steps_and_its_lock_together() {
    let log = log::capture();
    let (mut first, mut second) = (gate(1004), gate(1004));
    let observer = observer().await;
    let led = first
        .as_leader(|client| async move {
            let kill = "select pg_terminate_backend($1)";
            let pid = backend_pid(&client).await;
            observer.execute(kill, &[&pid]).await.unwrap();
            wait_until_free(&observer, 1004).await;
            let led = second.as_leader(|_| ready("second")).await.unwrap();
            (client.simple_query("select 1").await.is_err(), led)
        })
        .await;
    assert_eq!(led.unwrap(), Led::Ran((true, Led::Ran("second"))));
    let text = log.text();
    assert_eq!(text.matches("WARN").count(), 1, "{text}");
    assert!(text.contains("leader lock not released"), "{text}");

    let led = first.as_leader(|_| ready("first again")).await;
    assert_eq!(led.unwrap(), Led::Ran("first again"));
    assert_eq!(log.text().matches("WARN").count(), 1);
}

#[tokio::test]
async fn a_cycle_dropped_in_a_step_frees_the_lock() {
    let mut gate = gate(1005);
    let (observer, blocker) = (observer().await, observer().await);
    let block = "select pg_advisory_lock(991005)";
    blocker.simple_query(block).await.unwrap();
    let blocked = "select count(*) from pg_stat_activity
        where application_name = 'ebbtide-sweep 1005' and wait_event_type = 'Lock'";
    tokio::select! {
        _ = gate.as_leader(|client| async move { client.simple_query(block).await }) => panic!("not blocked"),
        () = wait_for(&observer, 1, blocked) => {}
    }
    // The step still waits: only the closed socket can end it.
    wait_until_free(&observer, 1005).await;
    assert_eq!(holders(&observer, 991_005).await, 1, "the blocker still blocks");
    assert_eq!(gate.as_leader(|_| ready(1)).await.unwrap(), Led::Ran(1));
}

#[tokio::test]
async fn a_cycle_that_panics_frees_the_lock() {
    let (mut first, mut second) = (gate(1006), gate(1006));
    let cycle = async move { first.as_leader(|_| async { panic!("in a step") }).await };
    assert!(tokio::spawn(cycle).await.unwrap_err().is_panic());
    wait_until_free(&observer().await, 1006).await;
    assert_eq!(second.as_leader(|_| ready(1)).await.unwrap(), Led::Ran(1));
}

#[tokio::test]
async fn a_lock_that_the_cycle_gave_away_is_one_warning() {
    let log = log::capture();
    let mut gate = gate(1007);
    let led = gate
        .as_leader(|client| async move {
            let unlock = "select pg_advisory_unlock(1007)";
            client.simple_query(unlock).await.is_ok()
        })
        .await;
    assert_eq!(led.unwrap(), Led::Ran(true));
    let text = log.text();
    assert_eq!(text.matches("WARN").count(), 1, "{text}");
    assert!(text.contains("leader lock was not held at release"), "{text}");
}

#[tokio::test]
async fn a_client_that_outlives_its_cycle_is_closed() {
    let log = log::capture();
    let mut gate = gate(1008);
    let Led::Ran(client) = gate.as_leader(ready::<Arc<Client>>).await.unwrap() else { panic!("skipped") };
    assert!(client.simple_query("select 1").await.is_err());
    assert_eq!(log.text().matches("WARN").count(), 1);
    wait_until_free(&observer().await, 1008).await;
    assert_eq!(gate.as_leader(|_| ready(1)).await.unwrap(), Led::Ran(1));
}

#[tokio::test]
async fn a_database_that_cannot_be_reached_is_an_error() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut config = config();
    // A port that was free a moment ago, in place of the server's.
    let url = format!("host=127.0.0.1 port={} user=x", listener.local_addr().unwrap().port());
    config.clone_from(&url.parse().unwrap());
    drop(listener);
    let led = gate_to(1009, config).as_leader(|_| ready(())).await;
    assert!(matches!(led, Err(GateError::Connect(_))), "{led:?}");
}

#[tokio::test]
async fn a_transaction_mode_pooler_is_refused_and_named() {
    for lending in [Lending::TransactionNewest, Lending::TransactionOldest] {
        for backends in 1..=3 {
            let pooler = Pooler::start(&config(), lending, backends).await;
            let through: Config = through(&pooler);
            let led = gate_to(1010, through)
                .as_leader(|_| -> std::future::Ready<()> { panic!("led through a pooler") })
                .await;
            let error = led.expect_err("a pooler was trusted");
            assert!(matches!(error, GateError::Pooled), "{lending:?}, {backends} backends: {error:?}");
            assert!(error.to_string().contains("EBBTIDE_DIRECT_DATABASE_URL"));
            assert_eq!(holders(&observer().await, 1010).await, 0);
        }
    }
}

#[tokio::test]
async fn a_session_mode_pooler_is_as_good_as_a_direct_connection() {
    let pooler = Pooler::start(&config(), Lending::Session, 2).await;
    let led = gate_to(1011, through(&pooler)).as_leader(|client| async move { backend_pid(&client).await }).await;
    assert!(matches!(led, Ok(Led::Ran(_))), "{led:?}");
}

/// The way to the database through a pooler.
fn through(pooler: &Pooler) -> Config {
    let mut config = Config::new();
    config.host("127.0.0.1").port(pooler.port).user("any");
    config
}
