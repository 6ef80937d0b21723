//! `ebbtide retention space`, the program itself.

mod support;

use std::process::Output;

use serde_json::Value;
use support::partition::Log;
use support::url;
use tokio::process::Command;

async fn space(log: &Log, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ebbtide"))
        .args(["retention", "space"])
        .args(arguments)
        .env("EBBTIDE_DATABASE_URL", url(&log.database.name))
        .env("RUST_LOG", "warn")
        .output()
        .await
        .expect("the program runs")
}

#[tokio::test]
async fn it_shows_where_the_space_is_and_who_keeps_it() {
    let log = Log::start().await;
    log.execute(
        "alter table queen.log_segments set (autovacuum_enabled = off);
         insert into queen.queues (name) values ('q');
         insert into queen.log_partitions (queue_id, name, last_offset) select id, 'p', 9999 from queen.queues;
         insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
         select id, n, n, now(), convert_to(repeat('x', 300), 'UTF8') from queen.log_partitions, generate_series(0, 9999) n",
    )
    .await;
    log.execute("analyze queen.log_segments").await;
    let reader = log.database.target.connect("a long report").await.expect("connects");
    reader.batch_execute("begin isolation level repeatable read; select 1 from queen.queues").await.expect("reads");
    log.execute("delete from queen.log_segments where base_offset < 7500").await;
    log.execute("select pg_stat_force_next_flush()").await;
    log.execute("vacuum queen.log_segments").await;

    let Output { status, stdout, stderr } = space(&log, &["--json"]).await;
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    let report: Value = serde_json::from_slice(&stdout).expect("JSON");
    let segments = report["tables"].as_array().expect("tables").iter().find(|t| t["table"] == "log_segments");
    let count = |key: &str| segments.expect("listed")[key].as_u64().unwrap_or_else(|| panic!("{key}: {report}"));
    let (bytes, live, dead) = (count("bytes"), count("liveBytes"), count("deadBytes"));
    assert_eq!((count("liveRows"), count("deadRows")), (2500, 7500), "the reader keeps them");
    assert_eq!(live + dead + count("freeBytes"), bytes);
    assert!(live * 2 < dead && dead <= bytes, "{report}");
    let waits = report["vacuumWaitsFor"].as_array().expect("holders");
    assert!(waits.iter().any(|h| h["kind"] == "session" && h["who"].as_str().expect("who").contains("a long report")));

    reader.batch_execute("rollback").await.expect("ends");
    log.execute("vacuum (truncate false) queen.log_segments").await;
    let text = String::from_utf8(space(&log, &[]).await.stdout).expect("text");
    assert!(text.contains("log_segments"), "{text}");
    assert!(!text.contains("a long report"), "{text}");
}
