//! Servers that are killed with -9 while they fire: the message of every timer is there once.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::schedule;
use super::support::server::{Server, open_folder};
use super::support::wait_until;

const TIMERS: usize = 4000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_while_it_fires_every_timer_fires_once() {
    let folder = open_folder();
    let server = Server::with(folder.path(), &[("RUST_LOG", "warn"), ("QUEEN_SWEEPER", "false")]);
    let http = reqwest::Client::new();
    let timers: Vec<Value> = (0..TIMERS).map(|n| schedule(&format!("q{}", n % 3), &n.to_string(), -1)).collect();
    for chunk in timers.chunks(250) {
        let url = format!("{}/api/v1/timers", server.url());
        let response = http.post(url).json(&json!({"operations": chunk})).send().await.expect("answers");
        assert_eq!(response.status(), 200);
    }
    server.stop();

    let server = Server::with(folder.path(), &[("RUST_LOG", "warn")]);
    let sql = server.sql().await;
    let under_way = "select count(*) between 1 and $1 from queen.log_timers";
    let most = i64::try_from(TIMERS).expect("few") - 400;
    wait_until(&sql, "firing is under way", under_way, &[&most]).await;
    server.kill();

    let server = Server::with(folder.path(), &[("RUST_LOG", "warn")]);
    let sql = server.sql().await;
    // What the killed server had claimed is due again when its claim ends; the test does not wait for that.
    sql.batch_execute("update queen.log_timers set claimed_until = now(), due_at = now()").await.expect("claims end");
    wait_until(&sql, "all are fired", "select not exists (select from queen.log_timers)", &[]).await;
    let rows = sql.query("select blob from queen.log_segments", &[]).await.expect("segments");
    let mut ids = HashSet::new();
    let mut count = 0;
    for row in rows {
        let segment = ebbtide::segment::Segment::unpack(row.get(0)).expect("a segment");
        count += segment.len();
        ids.extend(segment.frames().map(|frame| frame.transaction_id.to_owned()));
    }
    assert_eq!((ids.len(), count), (TIMERS, TIMERS));
    server.stop();
}
