//! A step costs its batch, however much is stale behind it.

use serde_json::Value;

use crate::support::partition::Log;

const STALE: i64 = 200_000;
const BATCH: i64 = 1000;
/// Pages per row that a step may touch: heap, index, visibility and the marks of the delete, with room to spare.
const PAGES_PER_ROW: i64 = 20;

/// The pages that one statement touched, those of the functions in it included.
async fn pages(log: &Log, query: &str) -> i64 {
    let explained = format!("explain (analyze, buffers, format json) {query}");
    let plan: Value = log.sql.query_one(&explained, &[]).await.unwrap_or_else(|e| panic!("{query}: {e:?}")).get(0);
    let plan = &plan[0]["Plan"];
    plan["Shared Hit Blocks"].as_i64().expect("hits") + plan["Shared Read Blocks"].as_i64().expect("reads")
}

/// Runs `step` with a small batch first and last, and drains what is between by large batches.
async fn first_and_last(log: &Log, step: &str, table: &str) -> (i64, i64) {
    let count = format!("select count(*) from queen.{table}");
    let call = |rows: i64| step.replace("ROWS", &rows.to_string());
    let first = pages(log, &call(BATCH)).await;
    assert_eq!(log.count(&count).await, STALE - BATCH);
    log.execute(&call(STALE - 3 * BATCH)).await;
    // The head of the table is a desert of dead rows; the watermark must lead past it.
    let last = pages(log, &call(BATCH)).await;
    assert_eq!(log.count(&count).await, BATCH);
    (first, last)
}

fn assert_cheap(pages: (i64, i64)) {
    for (when, pages) in [("first", pages.0), ("last", pages.1)] {
        assert!(pages < BATCH * PAGES_PER_ROW, "the {when} step touched {pages} pages");
    }
}

/// One partition with many stale rows, and statistics that know nothing of them.
async fn stale(log: &Log, insert: &str) {
    let p = log.partition().await.set("last_offset = $2", STALE - 1).await;
    p.cursor("g", STALE - 1).await;
    let insert = format!(
        "insert into queen.{insert} select p.id, n, n, timestamptz '2020-01-01' + n * interval '1 second', '\\x00'
           from queen.log_partitions p, generate_series(0, {}) n",
        STALE - 1
    );
    log.execute(&insert).await;
}

#[tokio::test]
async fn a_retention_step_costs_its_batch() {
    for cutoffs in ["now(), null", "null, now()"] {
        let log = Log::start().await;
        stale(&log, "log_segments (partition_id, base_offset, end_offset, created_at, blob)").await;
        let step = format!("select queen.log_retention_step_v1(id, {cutoffs}, ROWS) from queen.log_partitions");
        assert_cheap(first_and_last(&log, &step, "log_segments").await);
    }
}

#[tokio::test]
async fn a_purge_step_costs_its_batch() {
    let log = Log::start().await;
    stale(&log, "log_txns (partition_id, base_offset, end_offset, created_at, hashes)").await;
    let step = "select queen.log_txns_purge_step_v1(id, now(), ROWS) from queen.log_partitions";
    assert_cheap(first_and_last(&log, step, "log_txns").await);
}

#[tokio::test]
async fn a_step_with_nothing_to_do_costs_nearly_nothing() {
    let log = Log::start().await;
    stale(&log, "log_segments (partition_id, base_offset, end_offset, created_at, blob)").await;
    let idle = "select queen.log_retention_step_v1(id, '2019-01-01', '2019-01-01', 1000) from queen.log_partitions";
    pages(&log, idle).await; // reads the catalogue
    let idle = pages(&log, idle).await;
    assert!(idle < 100, "an idle step touched {idle} pages");
}

/// Log that a step may write for a message that it deletes, in bytes: a mark for each of the rows that hold its
/// segment, shared by a hundred messages.
const LOG_PER_MESSAGE: f64 = 60.0;

#[tokio::test]
async fn deleting_writes_little_log() {
    let log = Log::start().await;
    let p = log.partition().await.set("last_offset = $2", 99_999).await;
    // Segments as they are stored: a hundred messages in some ten kilobytes, out of line.
    log.execute(&format!(
        "insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
         select '{}', n * 100, n * 100 + 99, timestamptz '2020-01-01' + n * interval '1 second',
                (select string_agg(sha256(int4send((n * 1000 + k)::int)), '') from generate_series(1, 320) k)
           from generate_series(0, 999) n",
        p.id
    ))
    .await;
    let explained = "explain (analyze, wal, format json)
        select queen.log_retention_step_v1(id, now(), null, 1000) from queen.log_partitions";
    let plan: Value = log.sql.query_one(explained, &[]).await.expect("explains").get(0);
    let bytes = plan[0]["Plan"]["WAL Bytes"].as_f64().expect("bytes");
    assert_eq!(log.count("select count(*) from queen.log_segments").await, 0);
    let each = bytes / 100_000.0;
    assert!(0.0 < each && each < LOG_PER_MESSAGE, "{each} bytes of log a message");
}
