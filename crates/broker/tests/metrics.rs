//! Metrics: their purge, their flush, and what is read from them.

mod support;

use std::time::Duration;

use ebbtide::error::Error;
use ebbtide::id::PartitionId;
use ebbtide::telemetry::{Flusher, Identity, QUEUES_MAX, Request};
use serde_json::{Value, json};
use support::Broker;
use tokio_postgres::types::Json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Writes one row of each purged table, `age` old; the ages of a row's other times differ.
async fn aged(broker: &Broker, age: &str, mark: i32) {
    for statement in [
        "insert into queen.worker_metrics (hostname, worker_id, pid, bucket_time, created_at)
         values ('h', $2, 0, now() - $1::text::interval, now())",
        "insert into queen.queue_lag_metrics (bucket_time, queue_id, parked_count)
         values (now() - $1::text::interval, gen_random_uuid(), $2)",
        "insert into queen.queue_parked_replica (bucket_time, queue_name, hostname, worker_id)
         values (now() - $1::text::interval, 'q', 'h', $2)",
        "insert into queen.retention_history (executed_at, messages_deleted) values (now() - $1::text::interval, $2)",
    ] {
        broker.execute(statement, &[&age, &mark]).await;
    }
}

/// The marks that are left in each purged table, in the order of the answer's keys.
async fn marks(broker: &Broker) -> Vec<Vec<i32>> {
    let mut marks = Vec::new();
    for query in [
        "select worker_id from queen.worker_metrics order by 1",
        "select parked_count from queen.queue_lag_metrics order by 1",
        "select worker_id from queen.queue_parked_replica order by 1",
        "select messages_deleted from queen.retention_history order by 1",
    ] {
        marks.push(broker.rows(query, &[]).await.iter().map(|row| row.get(0)).collect());
    }
    marks
}

async fn cleanup(broker: &Broker, days: Option<i32>, rows_max: Option<i32>) -> Value {
    let Json(answer) = broker.row("select queen.cleanup_worker_metrics_v1($1, $2)", &[&days, &rows_max]).await.get(0);
    answer
}

fn purged(rows: i64, done: bool) -> Value {
    json!({
        "deletedMetrics": rows, "deletedLagMetrics": rows, "deletedParkedReplica": rows,
        "deletedRetentionHistory": rows, "done": done,
    })
}

#[tokio::test]
async fn the_metrics_purge_keeps_what_is_younger_than_its_days() {
    let broker = Broker::start().await;
    for (age, mark) in [("3 days 1 minute", 1), ("2 days 23 hours 59 minutes", 2), ("-1 hour", 3)] {
        aged(&broker, age, mark).await;
    }
    assert_eq!(cleanup(&broker, Some(3), None).await, purged(1, true));
    assert_eq!(marks(&broker).await, vec![vec![2, 3]; 4]);
    assert_eq!(cleanup(&broker, Some(3), None).await, purged(0, true), "nothing to do");
}

#[tokio::test]
async fn the_metrics_purge_defaults_to_seven_days() {
    let broker = Broker::start().await;
    aged(&broker, "7 days 1 minute", 1).await;
    aged(&broker, "6 days 23 hours", 2).await;
    let Json(answer): Json<Value> = broker.row("select queen.cleanup_worker_metrics_v1()", &[]).await.get(0);
    assert_eq!(answer, purged(1, true));
    assert_eq!(marks(&broker).await, vec![vec![2]; 4]);
}

#[tokio::test]
async fn the_metrics_purge_is_bounded() {
    let broker = Broker::start().await;
    for mark in 1..=3 {
        aged(&broker, "30 days", mark).await;
    }
    assert_eq!(cleanup(&broker, Some(3), Some(2)).await, purged(2, false));
    assert_eq!(cleanup(&broker, Some(3), Some(2)).await, purged(1, true));
    assert_eq!(marks(&broker).await, vec![Vec::<i32>::new(); 4]);
}

#[tokio::test]
async fn absurd_days_and_bounds_are_held_to_sane_ones() {
    let broker = Broker::start().await;
    aged(&broker, "36 hours", 1).await;
    aged(&broker, "12 hours", 2).await;
    assert_eq!(cleanup(&broker, Some(i32::MAX), None).await, purged(0, true));
    assert_eq!(cleanup(&broker, Some(i32::MIN), Some(i32::MIN)).await, purged(1, false), "1 day, 1 row");
    assert_eq!(marks(&broker).await, vec![vec![2]; 4]);
}

#[tokio::test]
async fn the_metrics_purge_passes_by_what_another_session_holds() {
    let broker = Broker::start().await;
    aged(&broker, "30 days", 1).await;
    aged(&broker, "30 days", 2).await;
    let mut other = broker.database.client().await;
    let held = other.transaction().await.expect("a transaction");
    let query = "select from queen.queue_lag_metrics where parked_count = 1 for update";
    held.execute(query, &[]).await.expect("held");
    let answer = cleanup(&broker, Some(3), None).await;
    assert_eq!((&answer["deletedMetrics"], &answer["deletedLagMetrics"]), (&json!(2), &json!(1)));
    held.rollback().await.expect("let go");
    assert_eq!(cleanup(&broker, Some(3), None).await["deletedLagMetrics"], 1);
}

#[tokio::test]
async fn each_statement_notes_its_partitions_by_queue() {
    let broker = Broker::start().await;
    broker.execute("insert into queen.queues (name) values ('a'), ('b')", &[]).await;
    let made = "insert into queen.log_partitions (queue_id, name)
                select q.id, n::text from queen.queues q, generate_series(1, 3) n where q.name = 'a' or n = 1
                on conflict do nothing";
    assert_eq!(broker.execute(made, &[]).await, 4);
    assert_eq!(broker.execute(made, &[]).await, 0, "and a statement that made none notes none");
    broker.execute("delete from queen.log_partitions where name = '2'", &[]).await;
    let query = "select q.name::text, e.created, e.deleted
                 from queen.partition_events e join queen.queues q on q.id = e.queue_id order by 1, 2";
    let events: Vec<(String, i32, i32)> =
        broker.rows(query, &[]).await.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    assert_eq!(events, [("a".to_owned(), 0, 1), ("a".to_owned(), 3, 0), ("b".to_owned(), 1, 0)]);
}

#[tokio::test]
async fn installing_again_keeps_the_triggers() {
    let broker = Broker::start().await;
    let query = "select array_agg(oid::bigint order by tgname) from pg_trigger where tgname like 'note_partitions_%'";
    let before: Vec<i64> = broker.row(query, &[]).await.get(0);
    broker.execute("update queen.installed_files set checksum = 'older' where name = 'metrics.sql'", &[]).await;
    let installed = ebbtide::db::migrate::migrate(&broker.database.target).await.expect("installs");
    assert_eq!(installed.procedures, 1, "the changed file is noticed");
    assert_eq!(broker.row(query, &[]).await.get::<_, Vec<i64>>(0), before);
    assert_eq!(before.len(), 2);
}

async fn timeseries(broker: &Broker, filters: Value) -> Value {
    let Json(answer) = broker.row("select queen.get_retention_timeseries_v1($1)", &[&Json(filters)]).await.get(0);
    answer
}

/// Retention removed messages from a partition of a queue at a time.
async fn went(broker: &Broker, queue: &str, rule: &str, at: &str, messages: i32) {
    let query = "insert into queen.retention_history
                     (partition_id, queue_id, tenant_id, retention_type, executed_at, messages_deleted)
                 select gen_random_uuid(), id, tenant_id, $2, $3::text::timestamptz, $4 from queen.queues where name = $1";
    assert_eq!(broker.execute(query, &[&queue, &rule, &at, &messages]).await, 1);
}

#[tokio::test]
async fn the_retention_timeline_adds_up_by_rule_and_bucket() {
    let broker = Broker::start().await;
    broker.execute("insert into queen.queues (name) values ('a')", &[]).await;
    for (rule, at, messages) in [
        ("retention", "2026-08-28 10:00:00Z", 1),
        ("completed_retention", "2026-08-28 10:00:59.999999Z", 20),
        ("max_wait_time_eviction", "2026-08-28 10:01:00Z", 300),
        ("retention", "2026-08-28 10:59:59Z", 4000),
        ("__partition_deleted__", "2026-08-28 10:30:00Z", 7),
        ("retention", "2026-08-28 09:59:59.999999Z", 50_000),
        ("retention", "2026-08-28 11:00:00.000001Z", 600_000),
    ] {
        went(&broker, "a", rule, at, messages).await;
    }
    let filters = json!({"from": "2026-08-28T10:00:00Z", "to": "2026-08-28T11:00:00Z"});
    let bucket = |bucket: &str, [retention, completed, eviction]: [i64; 3], events: i64| {
        json!({
            "bucket": bucket, "retentionMsgs": retention, "completedRetentionMsgs": completed,
            "evictionMsgs": eviction, "totalMsgs": retention + completed + eviction, "eventCount": events,
        })
    };
    assert_eq!(
        timeseries(&broker, filters).await,
        json!({
            "timeRange": {"from": "2026-08-28T10:00:00.000Z", "to": "2026-08-28T11:00:00.000Z"},
            "bucketMinutes": 1,
            "series": [
                bucket("2026-08-28T10:00:00.000Z", [1, 20, 0], 2),
                bucket("2026-08-28T10:01:00.000Z", [0, 0, 300], 1),
                bucket("2026-08-28T10:59:00.000Z", [4000, 0, 0], 1),
            ],
            "totals": {
                "retentionMsgs": 4001, "completedRetentionMsgs": 20, "evictionMsgs": 300,
                "totalMsgs": 4321, "eventCount": 4,
            },
        })
    );
}

#[tokio::test]
async fn the_retention_timeline_of_nothing_is_the_last_hour() {
    let broker = Broker::start().await;
    let answer = timeseries(&broker, json!({})).await;
    let nothing = json!({
        "retentionMsgs": 0, "completedRetentionMsgs": 0, "evictionMsgs": 0, "totalMsgs": 0, "eventCount": 0,
    });
    assert_eq!((&answer["series"], &answer["totals"], &answer["bucketMinutes"]), (&json!([]), &nothing, &json!(1)));
    let query = "select ($1::text::timestamptz - $2::text::timestamptz) = '1 hour'
                 and now() - $1::text::timestamptz between '-1 second' and '1 minute'";
    let (to, from) = (answer["timeRange"]["to"].as_str(), answer["timeRange"]["from"].as_str());
    assert!(broker.row(query, &[&to, &from]).await.get::<_, bool>(0), "{answer}");
}

#[tokio::test]
async fn the_width_of_a_bucket_follows_the_range() {
    let broker = Broker::start().await;
    broker.execute("insert into queen.queues (name) values ('a')", &[]).await;
    went(&broker, "a", "retention", "2026-08-28 11:47:33Z", 1).await;
    for (from, minutes, bucket) in [
        ("2026-08-28T11:00:00Z", 1, "11:47"),
        ("2026-08-28T10:59:59Z", 5, "11:45"),
        ("2026-08-28T06:00:00Z", 5, "11:45"),
        ("2026-08-28T05:59:59Z", 15, "11:45"),
        ("2026-08-27T12:00:00Z", 15, "11:45"),
        ("2026-08-27T11:59:59Z", 60, "11:00"),
        ("2026-08-21T12:00:00Z", 60, "11:00"),
        // Six hours, from midnight on.
        ("2026-08-21T11:59:59Z", 360, "06:00"),
    ] {
        let answer = timeseries(&broker, json!({"from": from, "to": "2026-08-28T12:00:00Z"})).await;
        let expected = (json!(minutes), json!(format!("2026-08-28T{bucket}:00.000Z")));
        assert_eq!((&answer["bucketMinutes"], &answer["series"][0]["bucket"]), (&expected.0, &expected.1), "{from}");
    }
}

#[tokio::test]
async fn the_retention_timeline_filters_by_queue_and_tenant() {
    let broker = Broker::start().await;
    let other = "00000000-0000-0000-0000-000000000002";
    broker.execute("insert into queen.queues (name) values ('a'), ('b''s/ü')", &[]).await;
    broker.execute("insert into queen.queues (name, tenant_id) values ('theirs', $1::text::uuid)", &[&other]).await;
    // No partition of these rows exists any more.
    went(&broker, "a", "retention", "2026-08-28 10:00:00Z", 1).await;
    went(&broker, "b's/ü", "retention", "2026-08-28 10:00:00Z", 20).await;
    went(&broker, "theirs", "retention", "2026-08-28 10:00:00Z", 300).await;
    // Rows that do not say their queue: of a partition that is there, and of one that is not.
    let query = "with p as (insert into queen.log_partitions (queue_id, name) select id, 'p' from queen.queues where name = 'a' returning id)
                 insert into queen.retention_history (partition_id, retention_type, executed_at, messages_deleted)
                 select id, 'retention', '2026-08-28 10:00:00Z'::timestamptz, 4000 from p
                 union all select gen_random_uuid(), 'retention', '2026-08-28 10:00:00Z', 50000";
    broker.execute(query, &[]).await;
    for (filters, messages) in [
        (json!({}), 54_021),
        (json!({"queue": ""}), 54_021),
        (json!({"queue": "a"}), 4_001),
        (json!({"queue": "b's/ü"}), 20),
        (json!({"queue": "theirs"}), 0),
        (json!({"_tenant": other}), 300),
        (json!({"_tenant": other, "queue": "theirs"}), 300),
        (json!({"_tenant": other, "queue": "a"}), 0),
    ] {
        let mut all = json!({"from": "2026-08-28T09:30:00Z", "to": "2026-08-28T10:30:00Z"});
        all.as_object_mut().expect("an object").extend(filters.as_object().expect("an object").clone());
        assert_eq!(timeseries(&broker, all).await["totals"]["totalMsgs"], json!(messages), "{filters}");
    }
}

fn flusher(broker: &Broker) -> Flusher {
    let identity = Identity { hostname: "h".to_owned(), port: 6632 };
    Flusher::new(broker.app.telemetry.clone(), broker.app.db.clone(), identity)
}

/// Makes a queue with one partition.
async fn queue(broker: &Broker, name: &str) -> PartitionId {
    let query = "with q as (insert into queen.queues (name) values ($1) returning id)
                 insert into queen.log_partitions (queue_id, name) select id, 'p' from q returning id";
    PartitionId(broker.row(query, &[&name]).await.get(0))
}

/// The metrics of a queue, whatever minutes they are in.
async fn queue_metrics(broker: &Broker, name: &str) -> Value {
    let query = "select json_build_object(
            'pops', sum(pop_count), 'empty', sum(pop_empty_count), 'pushRequests', sum(push_request_count),
            'pushes', sum(push_message_count), 'acks', sum(ack_request_count), 'done', sum(ack_success_count),
            'failed', sum(ack_failed_count), 'transactions', sum(transaction_count), 'lags', sum(lag_count),
            'born', sum(partitions_created), 'died', sum(partitions_deleted), 'partitions', max(partition_count))
        from queen.queue_lag_metrics m join queen.queues q on q.id = m.queue_id where q.name = $1";
    broker.row(query, &[&name]).await.get(0)
}

#[tokio::test]
async fn a_flush_writes_what_was_done_by_server_and_by_queue() {
    let broker = Broker::start().await;
    let pid = queue(&broker, "a/b").await;
    queue(&broker, "other").await;
    let telemetry = &broker.app.telemetry;
    let mut flusher = flusher(&broker);
    flusher.flush().await.expect("hears the clock");

    let stored = broker.row("select now() - interval '10 seconds'", &[]).await.get(0);
    for request in [Request::Push, Request::Push, Request::Pop, Request::Ack, Request::Transaction] {
        telemetry.requested(request);
    }
    telemetry.pushed("a/b", 5);
    telemetry.pushed("a/b", 2);
    telemetry.pushed("other", 1);
    telemetry.pushed("no such queue", 1);
    telemetry.popped("a/b", 3, stored);
    telemetry.popped_nothing("a/b");
    telemetry.acked(pid, 2, 1);
    telemetry.acked(PartitionId(Uuid::from_u128(9)), 1, 0);
    telemetry.transacted("a/b");
    telemetry.dead_lettered(4);
    telemetry.failed();
    flusher.flush().await.expect("flushes");

    assert_eq!(
        queue_metrics(&broker, "a/b").await,
        json!({
            "pops": 3, "empty": 1, "pushRequests": 2, "pushes": 7, "acks": 1, "done": 2, "failed": 1,
            "transactions": 1, "lags": 3, "born": 1, "died": 0, "partitions": 1,
        })
    );
    let query = "select bool_and(9000 <= avg_lag_ms and avg_lag_ms <= max_lag_ms and max_lag_ms < 70000)
                 from queen.queue_lag_metrics where 0 < lag_count";
    assert!(broker.row(query, &[]).await.get::<_, bool>(0), "the lag is that of the database's clock");
    let totals = "select json_build_object(
            'requests', array[push_request_count, pop_request_count, ack_request_count, transaction_count],
            'messages', array[push_message_count, pop_message_count, ack_message_count],
            'acks', array[ack_success_count, ack_failed_count], 'dead', dlq_count, 'errors', db_error_count)
        from queen.worker_metrics_summary";
    let expected = json!({
        "requests": [2, 1, 1, 1], "messages": [9, 3, 4], "acks": [3, 1], "dead": 4, "errors": 1,
    });
    assert_eq!(broker.row(totals, &[]).await.get::<_, Value>(0), expected);
    let query = "select count(*), sum(push_message_count)::bigint, min(hostname) from queen.worker_metrics";
    let row = broker.row(query, &[]).await;
    assert_eq!((row.get(0), row.get(1), row.get(2)), (2_i64, 9_i64, "h"), "a row a flush");

    flusher.flush().await.expect("flushes");
    assert_eq!(broker.row(totals, &[]).await.get::<_, Value>(0), expected, "nothing is counted twice");
}

#[tokio::test]
async fn a_flush_measures_the_process_and_its_pool() {
    let broker = Broker::start().await;
    flusher(&broker).flush().await.expect("flushes");
    let row = broker.row("select metrics, sample_count, port, worker_id from queen.system_metrics", &[]).await;
    let metrics: Value = row.get(0);
    assert_eq!((row.get(1), row.get(2), row.get(3)), (1_i32, 6632_i32, "0"));
    let number =
        |path: &str| metrics.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("{path}: {metrics}"));
    assert!(number("/memory/rss_bytes/last") > 1 << 20);
    assert!(number("/memory/virtual_bytes/max") >= number("/memory/rss_bytes/max"));
    assert!(number("/database/pool_size/max") >= 1);
    assert_eq!(number("/cpu/user_us/avg"), number("/cpu/user_us/last"), "one sample");
}

#[tokio::test]
async fn what_could_not_be_flushed_is_flushed_later() {
    let broker = Broker::start().await;
    let pid = queue(&broker, "q").await;
    let mut flusher = flusher(&broker);
    for table in ["queen.worker_metrics", "queen.queue_lag_metrics"] {
        broker.app.telemetry.pushed("q", 1);
        broker.app.telemetry.acked(pid, 1, 0);
        broker.sql.batch_execute(&format!("alter table {table} rename to away")).await.expect("hidden");
        assert!(matches!(flusher.flush().await, Err(Error::Db(_))), "{table}");
        let back = table.trim_start_matches("queen.");
        broker.sql.batch_execute(&format!("alter table queen.away rename to {back}")).await.expect("shown");
    }
    flusher.flush().await.expect("flushes");
    let metrics = queue_metrics(&broker, "q").await;
    assert_eq!((&metrics["pushes"], &metrics["done"]), (&json!(2), &json!(2)));
    let summary =
        broker.row("select push_message_count, ack_success_count from queen.worker_metrics_summary", &[]).await;
    assert_eq!((summary.get(0), summary.get(1)), (2_i64, 2_i64));
}

#[tokio::test]
async fn the_number_of_queues_counted_is_bounded() {
    let broker = Broker::start().await;
    queue(&broker, "last").await;
    for n in 0..QUEUES_MAX {
        broker.app.telemetry.pushed(&format!("q{n}"), 1);
    }
    broker.app.telemetry.pushed("last", 1);
    flusher(&broker).flush().await.expect("flushes");
    let total: i64 = broker.row("select push_message_count from queen.worker_metrics_summary", &[]).await.get(0);
    assert_eq!(total, i64::try_from(QUEUES_MAX).expect("small") + 1, "the server counts them all");
    assert_eq!(queue_metrics(&broker, "last").await["pushes"], json!(0), "there was no room for it");
    broker.app.telemetry.pushed("last", 1);
    flusher(&broker).flush().await.expect("flushes");
    assert_eq!(queue_metrics(&broker, "last").await["pushes"], json!(1), "a flush makes room");
}

#[tokio::test]
async fn births_and_deaths_are_folded_once() {
    let broker = Broker::start().await;
    queue(&broker, "q").await;
    for n in 0..5 {
        let query = "insert into queen.log_partitions (queue_id, name) select id, $1 from queen.queues";
        broker.execute(query, &[&n.to_string()]).await;
    }
    broker.execute("delete from queen.log_partitions where name in ('1', '2')", &[]).await;
    broker
        .execute("insert into queen.partition_events (queue_id, at, created) values (gen_random_uuid(), now(), 1)", &[])
        .await;
    let fold = "select queen.fold_partition_events_v1(5)";
    assert_eq!(broker.row(fold, &[]).await.get::<_, Value>(0), json!({"folded": 5, "done": false}));
    assert_eq!(broker.row(fold, &[]).await.get::<_, Value>(0), json!({"folded": 3, "done": true}));
    assert_eq!(broker.row(fold, &[]).await.get::<_, Value>(0), json!({"folded": 0, "done": true}));
    let metrics = queue_metrics(&broker, "q").await;
    assert_eq!((&metrics["born"], &metrics["died"], &metrics["partitions"]), (&json!(6), &json!(2), &json!(4)));
}

#[tokio::test]
async fn a_fold_passes_by_events_that_a_queue_delete_holds() {
    let broker = Broker::start().await;
    queue(&broker, "held").await;
    queue(&broker, "free").await;
    let mut other = broker.database.client().await;
    let held = other.transaction().await.expect("a transaction");
    let query = "select from queen.partition_events e join queen.queues q on q.id = e.queue_id where q.name = 'held' for update of e";
    held.execute(query, &[]).await.expect("held");
    flusher(&broker).flush().await.expect("does not wait");
    assert_eq!(queue_metrics(&broker, "held").await["born"], Value::Null);
    assert_eq!(queue_metrics(&broker, "free").await["born"], json!(1));
    held.rollback().await.expect("let go");
}

#[tokio::test]
async fn requests_are_counted_by_their_route() {
    let broker = Broker::start().await;
    broker.post("/api/v1/push", json!({})).await;
    broker.post("/api/v1/transaction", json!({})).await;
    broker.post("/api/v1/ack", json!({})).await;
    broker.post("/api/v1/ack/batch", json!({})).await;
    broker.get("/api/v1/pop/queue/q").await;
    broker.post("/api/v1/configure", json!({})).await;
    flusher(&broker).flush().await.expect("flushes");
    let query = "select json_build_array(push_request_count, pop_request_count, ack_request_count, transaction_count, jobs_done)
                 from queen.worker_metrics";
    assert_eq!(broker.row(query, &[]).await.get::<_, Value>(0), json!([1, 1, 2, 1, 5]));
}

#[tokio::test]
async fn a_running_flusher_flushes_at_once_and_at_its_end() {
    let broker = Broker::start().await;
    let stop = CancellationToken::new();
    let running = tokio::spawn(flusher(&broker).run(Duration::from_secs(3600), stop.clone()));
    let flushed = "select count(*) = 1 from queen.worker_metrics";
    support::wait_until(&broker.sql, "the first flush is done", flushed, &[]).await;
    broker.app.telemetry.pushed("q", 7);
    stop.cancel();
    running.await.expect("ends");
    let total: i64 = broker.row("select push_message_count from queen.worker_metrics_summary", &[]).await.get(0);
    assert_eq!(total, 7);
}
