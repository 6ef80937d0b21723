//! What a look costs among many rows: its own rows, found by an index.

use serde_json::json;

use super::one;
use super::support::Broker;

const ROWS: i32 = 20_000;

/// Sequential scans of a table, and rows that indexes led to, so far.
async fn reads(broker: &Broker, table: &str) -> (i64, i64) {
    // The server's sessions say what they read when they are next idle, or with their next statement.
    broker.execute("select pg_stat_clear_snapshot(), pg_stat_force_next_flush()", &[]).await;
    let query = "select seq_scan, coalesce(idx_tup_fetch, 0) from pg_stat_user_tables where relname = $1";
    let row = broker.row(query, &[&table]).await;
    (row.get(0), row.get(1))
}

#[tokio::test]
async fn a_page_reads_its_rows_and_no_others() {
    let broker = Broker::start().await;
    broker
        .execute(
            "insert into queen.kv (namespace, key, value, version, updated_at)
             select 'n', 'k' || to_char(g, 'FM00000'), '1', nextval('queen.kv_version_seq'), now()
             from generate_series(1, $1) g",
            &[&ROWS],
        )
        .await;
    let (scans, before) = reads(&broker, "kv").await;
    let session = "select queen.kv_apply_v1(
        '[{\"op\": \"getPrefix\", \"ns\": \"n\", \"prefix\": \"k1\", \"end\": \"k2\", \"after\": \"k10000\", \"limit\": 10,
           \"keysOnly\": false}]', 1000000)";
    let page: serde_json::Value = broker.row(session, &[]).await.get(0);
    assert_eq!(page[0]["rows"].as_array().map(Vec::len), Some(10));
    let (scans_after, after) = reads(&broker, "kv").await;
    assert_eq!(scans_after, scans, "no scan of the table");
    assert!(after - before <= 20, "{} rows for a page of 10", after - before);
    let page =
        one(&broker, json!({"op": "getPrefix", "ns": "n", "prefix": "k1", "after": "k10000", "limit": 10})).await;
    assert_eq!(page["nextAfter"], "k10010");
}

#[tokio::test]
async fn looking_for_due_timers_and_expired_values_reads_one_entry() {
    let broker = Broker::start().await;
    broker
        .execute(
            "insert into queen.log_timers (queue, timer_key, partition, deliver_at, due_at, txn, message_id, payload,
                 payload_zstd, payload_bytes, encrypted, created_at, updated_at)
             select 'q', g::text, 'p', now() + g * interval '1 hour', now() + g * interval '1 hour', g::text,
                 gen_random_uuid(), '1', false, 1, false, now(), now()
             from generate_series(1, $1) g",
            &[&ROWS],
        )
        .await;
    broker
        .execute(
            "insert into queen.kv (namespace, key, value, version, expires_at, updated_at)
             select 'n', g::text, '1', nextval('queen.kv_version_seq'), now() + g * interval '1 hour', now()
             from generate_series(1, $1) g",
            &[&ROWS],
        )
        .await;
    for (table, query) in [
        ("log_timers", "select queen.log_timers_due_v1()::text"),
        ("log_timers", "select count(*)::text from queen.log_timers_claim_v1(gen_random_uuid(), 1000, 200, 1000000)"),
        ("kv", "select queen.kv_sweep_step_v1(now(), 1000)::text"),
    ] {
        let (scans, before) = reads(&broker, table).await;
        broker.row(query, &[]).await;
        let (scans_after, after) = reads(&broker, table).await;
        assert_eq!(scans_after, scans, "{query}: no scan of the table");
        assert!(after - before <= 2, "{query}: {} rows", after - before);
    }
}
