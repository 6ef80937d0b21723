//! The push functions on their own: what they answer, write, lock and refuse.

mod support;

use ebbtide::db::Statements;
use ebbtide::db::push::{Batch, Written, log_provision_v1, log_push_batch_v1, log_segment_at_v1};
use ebbtide::error::Error;
use ebbtide::segment::hash;
use serde_json::{Value, json};
use support::{Database, wait_until};
use tokio_postgres::Client;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

/// Calls `log_push_multi_v1` with one element per (queue, partition, transaction ids).
async fn push_multi(client: &Client, elements: &[(&str, &str, &[&str])]) -> Result<Value, tokio_postgres::Error> {
    let queues: Vec<&str> = elements.iter().map(|e| e.0).collect();
    let partitions: Vec<&str> = elements.iter().map(|e| e.1).collect();
    let counts: Vec<i32> = elements.iter().map(|e| i32::try_from(e.2.len()).expect("few")).collect();
    let hashes: Vec<Vec<u8>> = elements.iter().map(|e| e.2.iter().flat_map(|id| hash(id)).collect()).collect();
    let verified = vec![-1_i64; elements.len()];
    let blobs = vec![b"blob".as_slice(); elements.len()];
    let query = "select queen.log_push_multi_v1($1, $2, $3, $4, $5, $6)";
    let row = client.query_one(query, &[&queues, &partitions, &counts, &hashes, &verified, &blobs]).await?;
    Ok(row.get(0))
}

async fn push_one(client: &Client, queue: &str, partition: &str, ids: &[&str]) -> Value {
    let hashes: Vec<u8> = ids.iter().flat_map(|id| hash(id)).collect();
    let count = i32::try_from(ids.len()).expect("few");
    let query = "select queen.log_push_one_v1($1, $2, $3, $4, -1, 'blob')";
    client.query_one(query, &[&queue, &partition, &count, &hashes]).await.expect("pushes").get(0)
}

async fn partition_id(client: &Client, queue: &str, partition: &str) -> Uuid {
    let query = "select p.id from queen.log_partitions p join queen.queues q on q.id = p.queue_id
        where q.name = $1 and p.name = $2";
    client.query_one(query, &[&queue, &partition]).await.expect("the partition exists").get(0)
}

fn code(error: &tokio_postgres::Error) -> &str {
    error.as_db_error().map_or("none", |db| db.code().code())
}

#[tokio::test]
async fn a_push_creates_what_it_names_and_answers_in_input_order() {
    let database = Database::create().await;
    let client = database.client().await;
    let elements: &[(&str, &str, &[&str])] =
        &[("b.task.x", "2", &["a", "b"]), ("a", "1", &["a"]), ("b.task.x", "1", &["c"])];
    let answer = push_multi(&client, elements).await.expect("pushes");
    for (element, (queue, partition, _)) in answer.as_array().expect("an array").iter().zip(elements) {
        assert_eq!(element["status"], "queued");
        assert_eq!(element["baseOffset"], 0);
        assert_eq!(element["partitionId"], json!(partition_id(&client, queue, partition).await));
        assert_eq!(element["createdAt"].as_str().expect("a stamp").len(), "2026-01-01T00:00:00.000000Z".len());
    }
    let query = "select name, namespace, task from queen.queues order by name";
    let rows = client.query(query, &[]).await.expect("queues");
    let named: Vec<(String, Option<String>, Option<String>)> =
        rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(named, [("a".to_owned(), some("a"), None), ("b.task.x".to_owned(), some("b"), some("task"))]);
    let again = push_multi(&client, &[("b.task.x", "2", &["z"])]).await.expect("pushes");
    assert_eq!(again[0]["baseOffset"], 2);
}

#[tokio::test]
async fn an_element_with_a_duplicate_writes_nothing_and_disturbs_no_other() {
    let database = Database::create().await;
    let client = database.client().await;
    push_multi(&client, &[("q", "1", &["a", "b"]), ("q", "2", &["a"])]).await.expect("pushes");
    push_multi(&client, &[("q", "1", &["c"])]).await.expect("pushes");
    let elements: &[(&str, &str, &[&str])] = &[("q", "2", &["b"]), ("q", "1", &["x", "c", "a"]), ("q", "3", &["a"])];
    let answer = push_multi(&client, elements).await.expect("pushes");
    assert_eq!(answer[0]["baseOffset"], 1);
    assert_eq!(answer[1]["status"], "duplicate");
    assert_eq!(answer[1]["dups"], json!([{"i": 1, "off": 2}, {"i": 2, "off": 0}]));
    assert_eq!(answer[2]["baseOffset"], 0);
    let query = "select last_offset from queen.log_partitions order by name";
    let last: Vec<i64> = client.query(query, &[]).await.expect("rows").iter().map(|row| row.get(0)).collect();
    assert_eq!(last, [2, 1, 0]);
    let query = "select count(*) from queen.log_segments s full join queen.log_txns t
        using (partition_id, base_offset, end_offset, created_at)
        where s.blob is null or t.hashes is null";
    assert_eq!(client.query_one(query, &[]).await.expect("row").get::<_, i64>(0), 0, "a sidecar row for each segment");
}

#[tokio::test]
async fn a_partition_named_twice_takes_its_elements_in_order() {
    let database = Database::create().await;
    let client = database.client().await;
    let answer = push_multi(&client, &[("q", "1", &["a"]), ("q", "1", &["b", "c"]), ("q", "1", &["a"])]).await;
    let answer = answer.expect("pushes");
    assert_eq!([&answer[0]["baseOffset"], &answer[1]["baseOffset"]], [0, 1]);
    assert_eq!(answer[2]["dups"], json!([{"i": 0, "off": 0}]));
    assert_eq!(push_multi(&client, &[]).await.expect("nothing to do"), json!([]));
}

#[tokio::test]
async fn the_window_ends_at_its_edge() {
    let database = Database::create().await;
    let client = database.client().await;
    for (id, age) in [("before", "1 microsecond"), ("at", "0"), ("after", "-1 microsecond")] {
        push_multi(&client, &[("q", "1", &[id])]).await.expect("pushes");
        let query = "update queen.log_txns set created_at = '2020-01-01'::timestamptz - $1::text::interval
            where base_offset = (select max(base_offset) from queen.log_txns)";
        client.execute(query, &[&age]).await.expect("aged");
    }
    let pid = partition_id(&client, "q", "1").await;
    let hashes: Vec<u8> = ["after", "at", "before"].iter().flat_map(|id| hash(id)).collect();
    let found = |verified: i64, cutoff: &'static str| {
        let (client, hashes) = (&client, &hashes);
        async move {
            let query =
                "select idx, off from queen.log_push_dups_v1($1, $2, $3, 0, 2, $4::text::timestamptz) order by 1";
            let rows = client.query(query, &[&pid, hashes, &verified, &cutoff]).await.expect("probes");
            rows.iter().map(|row| (row.get::<_, i32>(0), row.get::<_, i64>(1))).collect::<Vec<_>>()
        }
    };
    assert_eq!(found(-1, "2020-01-01").await, [(0, 2), (1, 1)], "a row as old as the window is inside it");
    assert_eq!(found(-1, "2019-01-01").await, [(0, 2), (1, 1), (2, 0)]);
    assert_eq!(found(-1, "2021-01-01").await, []);
    assert_eq!(found(1, "2019-01-01").await, [(0, 2)], "what is verified is not looked at");
    assert_eq!(found(2, "2019-01-01").await, []);
}

#[tokio::test]
async fn the_window_start_is_the_first_fresh_row_of_many() {
    let database = Database::create().await;
    let client = database.client().await;
    let pid = Uuid::new_v4();
    // Rows of 1 to 7 messages, one a second, with a purged hole in the middle.
    let query = "insert into queen.log_txns
        select $1, b, b + n - 1, timestamptz '2020-01-01' + i * interval '1 second', ''
        from (select i, n, sum(n) over (order by i) - n as b from (select i, 1 + i * 5 % 7 as n from generate_series(0, 299) i) s) r
        where i not between 100 and 120";
    client.execute(query, &[&pid]).await.expect("rows");
    for second in [0, 1, 99, 100, 110, 120, 121, 299, 300] {
        let query =
            "select queen.log_txns_window_start_v1($1, 0, 5000, timestamptz '2020-01-01' + $2 * interval '1 second'),
            coalesce((select min(base_offset) from queen.log_txns where partition_id = $1
                and created_at >= timestamptz '2020-01-01' + $2 * interval '1 second'), 5001)";
        let row = client.query_one(query, &[&pid, &f64::from(second)]).await.expect("row");
        let (start, first_fresh): (i64, i64) = (row.get(0), row.get(1));
        let query =
            "select count(*) from queen.log_txns where partition_id = $1 and base_offset >= $2 and base_offset < $3";
        let between: i64 = client.query_one(query, &[&pid, &start, &first_fresh]).await.expect("row").get(0);
        assert!(start <= first_fresh && between == 0, "second {second}: {start} {first_fresh}");
    }
}

#[tokio::test]
async fn without_a_window_nothing_is_a_duplicate() {
    let database = Database::create().await;
    let client = database.client().await;
    push_one(&client, "q", "1", &["a"]).await;
    assert_eq!(push_one(&client, "q", "1", &["b", "a"]).await["dups"], json!([{"i": 1, "off": 0}]));
    client.execute("update queen.queues set dedup_window_seconds = 0", &[]).await.expect("off");
    assert_eq!(push_one(&client, "q", "1", &["a"]).await["baseOffset"], 1);
    assert_eq!(push_multi(&client, &[("q", "1", &["a"])]).await.expect("pushes")[0]["baseOffset"], 2);
}

#[tokio::test]
async fn arrays_that_do_not_match_are_refused() {
    let database = Database::create().await;
    let client = database.client().await;
    let misaligned = "select queen.log_push_multi_v1('{q,r}', '{1}', '{1,1}', '{a,b}', '{-1,-1}', '{x,y}')";
    let error = client.execute(misaligned, &[]).await.expect_err("misaligned");
    assert!(error.as_db_error().expect("db").message().starts_with("QMULTI misaligned"), "{error:?}");
    for call in [
        "select queen.log_push_multi_v1('{q}', '{1}', '{2}', '{0123456789abcdef}', '{-1}', '{x}')",
        "select queen.log_push_multi_v1('{q}', '{1}', '{0}', array[''::bytea], '{-1}', '{x}')",
        "select queen.log_push_one_v1('q', '1', 2, '0123456789abcdef', -1, 'x')",
        "select queen.log_push_one_v1('q', '1', 1, null, -1, 'x')",
    ] {
        let error = client.execute(call, &[]).await.expect_err("the hashes do not match");
        assert!(error.as_db_error().expect("db").message().starts_with("QPUSH bad segment"), "{error:?}");
    }
    let written: i64 = client.query_one("select count(*) from queen.log_segments", &[]).await.expect("row").get(0);
    assert_eq!(written, 0);
}

#[tokio::test]
async fn what_the_index_vouches_for_counts_only_for_a_window_no_longer() {
    let database = Database::create().await;
    let client = database.client().await;
    push_one(&client, "q", "1", &["a"]).await;
    let pid = partition_id(&client, "q", "1").await;
    let hashes = hash("a");
    let db = ebbtide::db::Db::open(&database.target, 2, Statements::Prepared, support::PATIENCE).await.expect("pool");
    let conn = db.conn().await.expect("conn");
    let with = |verified: i64, window: i32| Batch {
        partition_ids: vec![pid],
        counts: vec![1],
        hashes: vec![&hashes],
        blobs: vec![b"x"],
        verified: vec![verified],
        windows: vec![window],
        sealed: None,
    };
    for batch in [with(-1, 3600), with(0, 3599)] {
        let (pushed, _) = log_push_batch_v1(&conn, &batch, None).await.expect("pushes");
        assert_eq!(pushed[0].written, Written::Duplicates(vec![(0, 0)]));
        assert_eq!(pushed[0].window_seconds, 3600);
    }
    let (pushed, _) = log_push_batch_v1(&conn, &with(0, 3600), None).await.expect("pushes");
    assert_eq!(pushed[0].written, Written::Base(1), "the caller's word is taken");
}

#[tokio::test]
async fn a_missing_partition_is_a_retryable_race_and_writes_nothing() {
    let database = Database::create().await;
    let client = database.client().await;
    let made = log_provision_v1(&client, &["q"], &["1"]).await.expect("provisions");
    let hashes = hash("a");
    let batch = Batch {
        partition_ids: vec![made[0].expect("made").0, Uuid::new_v4()],
        counts: vec![1, 1],
        hashes: vec![&hashes, &hashes],
        blobs: vec![b"x", b"x"],
        verified: vec![-1, -1],
        windows: vec![0, 0],
        sealed: None,
    };
    let error = log_push_batch_v1(&client, &batch, None).await.expect_err("one is missing");
    assert!(matches!(&error, Error::Retryable(text) if text == "QMULTI resolved 1 of 2 segments"), "{error}");
    let query = "select last_offset from queen.log_partitions";
    assert_eq!(client.query_one(query, &[]).await.expect("row").get::<_, i64>(0), -1);
}

/// A push that waits for a partition which is then deleted fails in one of three shapes.
#[tokio::test]
async fn every_shape_of_a_vanished_partition_is_retryable() {
    let database = Database::create().await;
    let mut holder = database.client().await;
    let watcher = database.client().await;
    let calls = [
        ("window", "select queen.log_push_one_v1('q', '1', 1, '0123456789abcdef', -1, 'x', $1, 60)"),
        ("no window", "select queen.log_push_one_v1('q', '1', 1, '0123456789abcdef', -1, 'x', $1, 0)"),
        ("multi", "select queen.log_push_multi_v1('{q}', '{1}', '{1}', '{0123456789abcdef}', '{-1}', '{x}')"),
    ];
    for (shape, call) in calls {
        push_one(&watcher, "q", "1", &["seed"]).await;
        let pid = partition_id(&watcher, "q", "1").await;
        let lock = holder.transaction().await.expect("begins");
        lock.execute("select from queen.log_partitions where id = $1 for update", &[&pid]).await.expect("locks");
        let pusher = database.target.connect("pusher").await.expect("connects");
        let waiting = tokio::spawn(async move {
            let params: &[&(dyn ToSql + Sync)] = if call.contains("$1") { &[&pid] } else { &[] };
            pusher.execute(call, params).await
        });
        let blocked = "select count(*) = 1 from pg_stat_activity
            where application_name = 'pusher' and wait_event_type = 'Lock' and datname = current_database()";
        wait_until(&watcher, "the push waits", blocked, &[]).await;
        lock.execute("delete from queen.log_txns where partition_id = $1", &[&pid]).await.expect("deletes");
        lock.execute("delete from queen.log_partitions where id = $1", &[&pid]).await.expect("deletes");
        lock.commit().await.expect("commits");
        let error = waiting.await.expect("joins").expect_err("the partition is gone");
        assert_eq!(code(&error), "QN001", "{shape}: {error:?}");
    }
    let orphan = "insert into queen.log_segments values (gen_random_uuid(), 0, 0, now(), 'x')";
    let error = watcher.execute(orphan, &[]).await.expect_err("no such partition");
    assert!(Error::from(error).is_retryable(), "the third shape is the foreign key");
}

#[tokio::test]
async fn a_short_lock_wait_is_for_that_transaction_only() {
    let database = Database::create().await;
    let mut holder = database.client().await;
    let client = database.client().await;
    let made = log_provision_v1(&client, &["q"], &["1"]).await.expect("provisions");
    let lock = holder.transaction().await.expect("begins");
    lock.execute("select from queen.log_partitions for update", &[]).await.expect("locks");
    let hashes = hash("a");
    let batch = Batch {
        partition_ids: vec![made[0].expect("made").0],
        counts: vec![1],
        hashes: vec![&hashes],
        blobs: vec![b"x"],
        verified: vec![-1],
        windows: vec![0],
        sealed: None,
    };
    let error = log_push_batch_v1(&client, &batch, Some(20)).await.expect_err("held");
    assert!(matches!(error, Error::LockTimeout), "{error}");
    let row = client.query_one("select current_setting('lock_timeout')", &[]).await.expect("row");
    assert_eq!(row.get::<_, String>(0), "0");
    lock.rollback().await.expect("lets go");
    log_push_batch_v1(&client, &batch, Some(20)).await.expect("free");
}

#[tokio::test]
async fn stamps_do_not_fall_when_the_clock_is_set_back() {
    let database = Database::create().await;
    let client = database.client().await;
    push_one(&client, "q", "1", &["a"]).await;
    let ahead = "update queen.log_partitions set last_write_at = '2999-01-01'";
    client.execute(ahead, &[]).await.expect("as if stamped by a clock that ran ahead");
    push_one(&client, "q", "1", &["b"]).await;
    push_multi(&client, &[("q", "1", &["c"])]).await.expect("pushes");
    let query = "select count(*) from queen.log_segments where created_at >= '2999-01-01'";
    assert_eq!(client.query_one(query, &[]).await.expect("row").get::<_, i64>(0), 2);
}

#[tokio::test]
async fn last_write_at_moves_at_most_once_a_second() {
    let database = Database::create().await;
    let client = database.client().await;
    push_one(&client, "q", "1", &["a"]).await;
    let recent =
        "update queen.log_partitions set last_write_at = now() + interval '1 hour' returning last_write_at::text";
    let before: String = client.query_one(recent, &[]).await.expect("row").get(0);
    push_multi(&client, &[("q", "1", &["b"])]).await.expect("pushes");
    let read = "select last_write_at::text from queen.log_partitions";
    assert_eq!(client.query_one(read, &[]).await.expect("row").get::<_, String>(0), before);
    client
        .execute("update queen.log_partitions set last_write_at = now() - interval '2 seconds'", &[])
        .await
        .expect("ages");
    push_multi(&client, &[("q", "1", &["c"])]).await.expect("pushes");
    let moved = "select last_write_at = (select max(created_at) from queen.log_segments where base_offset = 2)
        from queen.log_partitions";
    assert!(client.query_one(moved, &[]).await.expect("row").get::<_, bool>(0));
}

#[tokio::test]
async fn a_segment_is_found_by_any_offset_inside_it() {
    let database = Database::create().await;
    let client = database.client().await;
    push_one(&client, "q", "1", &["a", "b", "c"]).await;
    push_one(&client, "q", "1", &["d"]).await;
    push_one(&client, "q", "1", &["e"]).await;
    let pid = ebbtide::id::PartitionId(partition_id(&client, "q", "1").await);
    client.execute("delete from queen.log_segments where base_offset = 3", &[]).await.expect("deletes");
    for (offset, base) in [(-1, None), (0, Some(0)), (2, Some(0)), (3, None), (4, Some(4)), (5, None)] {
        let found = log_segment_at_v1(&client, pid, offset).await.expect("answers");
        assert_eq!(found.map(|segment| segment.base_offset), base, "offset {offset}");
    }
}
