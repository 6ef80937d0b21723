//! A connection that breaks after the commit and before its answer: the push is spooled and stored no second time.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ebbtide::db::{Db, Statements, Target, TlsSettings};
use ebbtide::http::{App, Settings};
use ebbtide::spool::Settings as SpoolSettings;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::support::{Database, wait_until};

/// Forwards to PostgreSQL. Once muted, no answer of the database comes through, and when told so the connections break.
struct Proxy {
    port: u16,
    muted: Arc<AtomicBool>,
    /// Of the connections that there are.
    broken: Arc<Mutex<CancellationToken>>,
}

impl Proxy {
    async fn before(target: &Target) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let database = target.config.get_ports()[0];
        let (muted, broken) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(CancellationToken::new())));
        let (is_muted, breaks) = (muted.clone(), broken.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect((Ipv4Addr::LOCALHOST, database)).await.expect("the cluster answers");
                let until = breaks.lock().expect("no panic").clone();
                tokio::spawn(until.run_until_cancelled_owned(forward(client, server, is_muted.clone())));
            }
        });
        Self { port, muted, broken }
    }

    /// All connections end; those made from now on are whole.
    fn break_off(&self) {
        self.muted.store(false, Ordering::Release);
        std::mem::take(&mut *self.broken.lock().expect("no panic")).cancel();
    }
}

async fn forward(client: TcpStream, server: TcpStream, muted: Arc<AtomicBool>) {
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (client.into_split(), server.into_split());
    let up = tokio::io::copy(&mut from_client, &mut to_server);
    let down = async {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from_server.read(&mut bytes).await {
            if !muted.load(Ordering::Acquire) && to_client.write_all(&bytes[..count]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        _ = up => {}
        () = down => {}
    }
}

#[tokio::test]
async fn a_push_that_was_stored_unheard_is_stored_once() {
    let database = Database::create().await;
    let proxy = Proxy::before(&database.target).await;
    let mut config = database.target.config.clone();
    config = format!(
        "host=127.0.0.1 port={} user={} dbname={}",
        proxy.port,
        config.get_user().unwrap_or("postgres"),
        config.get_dbname().expect("named")
    )
    .parse()
    .expect("an address");
    let target = Target { config, tls: TlsSettings::unused() };
    let folder = tempfile::tempdir().expect("a folder");
    let spool = SpoolSettings {
        folder: folder.path().join("spool"),
        make_at_once: true,
        bytes_max: 1 << 20,
        messages_per_file: 100,
        batch_messages: 10,
        pause_first: Duration::from_millis(1),
    };
    let db = Db::open(&target, 4, Statements::Prepared, Duration::from_secs(30)).await.expect("pool");
    let app = App::new(db, Settings { spool: Some(spool), ..Settings::default() }).expect("the spool opens");
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
    let url = format!("http://{}/api/v1/push", listener.local_addr().expect("bound"));
    tokio::spawn(ebbtide::http::serve(listener, app.clone(), std::future::pending()));
    let push = |payload: u32| {
        reqwest::Client::new().post(&url).json(&json!({"items": [{"queue": "q", "payload": payload}]})).send()
    };
    assert_eq!(push(1).await.expect("answers").status(), 201);

    let sql = database.client().await;
    proxy.muted.store(true, Ordering::Release);
    let pushing = tokio::spawn(push(2));
    wait_until(&sql, "it is committed", "select count(*) = 2 from queen.log_segments", &[]).await;
    proxy.break_off();
    let answer: serde_json::Value = pushing.await.expect("no panic").expect("answers").json().await.expect("JSON");
    assert_eq!(answer[0]["status"], "buffered", "{answer}");
    assert_eq!(app.spool.status().pending, 1);

    let stop = CancellationToken::new();
    tokio::spawn(app.spool.clone().replay(stop.clone()));
    crate::support::until("it is replayed", || app.spool.status().pending == 0).await;
    let query = "select count(*)::bigint, max(end_offset) from queen.log_segments";
    let row = sql.query_one(query, &[]).await.expect("counted");
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (2, 1), "no third message");
    stop.cancel();
}
