//! The due list: stamps that say when a partition comes due, and a plan that costs what is due.

use std::collections::HashSet;

use ebbtide::db::retention::{Awake, Learnt, QUIET, Quiet, WORK_LIST, WorkList, quiet, work_list};
use ebbtide::id::{PartitionId, QueueId};
use ebbtide::retention::phase;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::cycle::{settings, sweep_with};
use crate::support::Broker;
use crate::support::partition::{DAY, Log, SECOND, US, at};

/// Microseconds from the tests' cutoff to a stamp; `None` where it is NULL.
async fn stamps(log: &Log, id: Uuid) -> (Option<i64>, Option<i64>) {
    let query = "select (extract(epoch from oldest_live_at - $2) * 1000000)::bigint,
        (extract(epoch from oldest_txn_at - $2) * 1000000)::bigint from queen.log_partitions where id = $1";
    let row = log.sql.query_one(query, &[&id, &at(0)]).await.expect("finite stamps");
    (row.get(0), row.get(1))
}

async fn unknown(log: &Log) -> i64 {
    log.count(
        "select count(*) filter (where oldest_live_at = '-infinity') + count(*) filter (where oldest_txn_at = '-infinity')
           from queen.log_partitions",
    )
    .await
}

fn known_by(learnt: &[Learnt]) -> impl Iterator<Item = (QueueId, Quiet)> {
    learnt.iter().map(|queue| (queue.queue_id, queue.quiet))
}

async fn all_queues(log: &Log) -> Vec<Uuid> {
    let rows = log.sql.query("select id from queen.queues", &[]).await.expect("queues");
    rows.iter().map(|row| row.get(0)).collect()
}

async fn plan(log: &Log, behind: Uuid, except: &[PartitionId], due_max: i32) -> WorkList {
    let all: Vec<QueueId> = all_queues(log).await.into_iter().map(QueueId).collect();
    let awake = Awake { live: all.clone(), held: all.clone(), txns: all };
    work_list(&log.sql, None, &awake, QueueId(behind), except, due_max).await.expect("plans")
}

fn ids(list: &WorkList) -> Vec<Uuid> {
    list.works.iter().map(|work| work.partition_id.0).collect()
}

#[tokio::test]
async fn a_step_leaves_the_stamp_of_the_first_row_that_stays() {
    let log = Log::start().await;
    let rows = [(0, 1, -DAY), (2, 2, -US), (3, 3, US), (4, 4, DAY)];
    let p = log.partition().await.segments(&rows).await.txns(&rows).await;
    assert_eq!(unknown(&log).await, 2, "what nobody has looked at may be due");
    p.step(Some(at(-DAY)), None, 10).await;
    p.purge(Some(at(-DAY)), 10).await;
    assert_eq!(stamps(&log, p.id).await, (Some(-DAY), Some(-DAY)), "nothing went, and now it is known");
    p.step(Some(at(0)), None, 1).await;
    p.purge(Some(at(0)), 1).await;
    assert_eq!(stamps(&log, p.id).await, (Some(-US), Some(-US)), "a batch that ends early");
    p.step(Some(at(0)), None, 10).await;
    p.purge(Some(at(0)), 10).await;
    assert_eq!(stamps(&log, p.id).await, (Some(US), Some(US)));
    p.evict(Some(at(2 * DAY)), 10).await;
    p.purge(Some(at(2 * DAY)), 10).await;
    assert_eq!(stamps(&log, p.id).await, (None, None), "nothing is left");
}

#[tokio::test]
async fn a_step_that_finds_its_stamp_right_writes_nothing() {
    let log = Log::start().await;
    let p = log.partition().await.segments(&[(0, 0, 0)]).await.txns(&[(0, 0, 0)]).await;
    let version = "select xmin::text::bigint from queen.log_partitions";
    p.step(Some(at(-DAY)), None, 10).await;
    p.purge(Some(at(-DAY)), 10).await;
    let before = log.count(version).await;
    p.step(Some(at(-DAY)), None, 10).await;
    p.purge(Some(at(-DAY)), 10).await;
    assert_eq!(log.count(version).await, before);
}

#[tokio::test]
async fn a_push_stamps_an_empty_partition_and_leaves_the_others_hot() {
    let broker = Broker::start().await;
    let push = async |count: usize| {
        let items: Vec<Value> = (0..count).map(|n| json!({"queue": "q", "payload": n})).collect();
        assert_eq!(broker.post("/api/v1/push", json!({"items": items})).await.0, 201);
    };
    push(1).await;
    let query = "select s.created_at >= p.oldest_live_at and t.created_at >= p.oldest_txn_at
                    and isfinite(p.oldest_live_at) and isfinite(p.oldest_txn_at)
        from queen.log_partitions p
        join queen.log_segments s on s.partition_id = p.id and s.base_offset = 0
        join queen.log_txns t on t.partition_id = p.id and t.base_offset = 0";
    assert!(broker.row(query, &[]).await.get::<_, bool>(0));
    // The first push and a second that begins another second may leave the HOT path; the rest may not.
    let updates = "select u, u - h from pg_stat_get_xact_tuples_updated('queen.log_partitions'::regclass) u,
        pg_stat_get_xact_tuples_hot_updated('queen.log_partitions'::regclass) h";
    let client = broker.database.client().await;
    client
        .batch_execute(
            "begin;
             do $$ declare v_pid uuid := (select id from queen.log_partitions); begin
                 for i in 1 .. 400 loop
                     perform queen.log_push_one_v1('q', 'Default', 1, decode(md5(i::text), 'hex'), -1, 'x', v_pid, 0);
                 end loop;
             end $$",
        )
        .await
        .expect("pushes");
    let row = client.query_one(updates, &[]).await.expect("counts");
    let (all, cold): (i64, i64) = (row.get(0), row.get(1));
    assert_eq!(all, 400);
    // All versions of one transaction stay until its end, so a page fills up now and then.
    assert!(cold <= 400 / 10, "{cold} of {all} updates left the HOT path");
}

#[tokio::test]
async fn rows_written_by_hand_are_due_in_the_next_cycle() {
    let log = Log::start().await;
    log.execute("insert into queen.queues (name, retention_enabled, retention_seconds) values ('q', true, 100)").await;
    log.execute(
        "insert into queen.log_partitions (queue_id, name, oldest_live_at, oldest_txn_at)
         select id, 'p', null, null from queen.queues",
    )
    .await;
    assert!(plan(&log, Uuid::nil(), &[], 10).await.works.is_empty(), "known to be empty");
    log.execute(
        "insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
         select id, 0, 0, now() - interval '1 day', 'x' from queen.log_partitions;
         insert into queen.log_txns (partition_id, base_offset, end_offset, created_at, hashes)
         select id, 0, 0, now() - interval '1 day', 'x' from queen.log_partitions;
         update queen.log_partitions set last_offset = 0",
    )
    .await;
    let swept = sweep_with(&log, &settings()).await;
    assert_eq!([phase::RETENTION, phase::TXNS].map(|name| swept.report.deleted(name)), [1, 1]);
}

#[tokio::test]
async fn many_rows_aged_by_one_statement_are_due() {
    let log = Log::start().await;
    log.execute(
        "insert into queen.queues (name, retention_enabled, retention_seconds) values ('q', true, 100);
         insert into queen.log_partitions (queue_id, name, last_offset) select id, n::text, 9 from queen.queues, generate_series(1, 20) n;
         insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
         select id, n, n, now(), 'x' from queen.log_partitions, generate_series(0, 9) n;
         insert into queen.log_txns (partition_id, base_offset, end_offset, created_at, hashes)
         select id, n, n, now(), 'x' from queen.log_partitions, generate_series(0, 9) n",
    )
    .await;
    sweep_with(&log, &settings()).await;
    assert!(plan(&log, Uuid::nil(), &[], 100).await.works.is_empty());
    log.execute(
        "update queen.log_segments set created_at = created_at - interval '1 day' where base_offset < 3;
         update queen.log_txns set created_at = created_at - interval '1 day' where base_offset < 4",
    )
    .await;
    let swept = sweep_with(&log, &settings()).await;
    assert_eq!([phase::RETENTION, phase::TXNS].map(|name| swept.report.deleted(name)), [60, 80]);
}

#[tokio::test]
async fn the_walk_repairs_what_was_deleted_by_hand() {
    let log = Log::start().await;
    let first = log.partition().await.segments(&[(0, 0, -DAY), (1, 1, DAY)]).await.txns(&[(0, 0, -DAY)]).await;
    let right = log.partition().await.segments(&[(0, 0, -DAY)]).await;
    for p in [first, right] {
        p.step(Some(at(-2 * DAY)), None, 10).await;
        p.purge(Some(at(-2 * DAY)), 10).await;
    }
    log.execute(&format!(
        "delete from queen.log_segments where partition_id = '{0}' and base_offset = 0;
         delete from queen.log_txns where partition_id = '{0}'",
        first.id
    ))
    .await;
    let walk = "select o_scanned::bigint, o_last, o_wrong from queen.log_stamps_walk_v1($1, $2)";
    let row = log.sql.query_one(walk, &[&Uuid::nil(), &1]).await.expect("walks");
    assert_eq!((row.get::<_, i64>(0), row.get::<_, Option<Uuid>>(1)), (1, Some(first.id.min(right.id))));
    let row = log.sql.query_one(walk, &[&Uuid::nil(), &10]).await.expect("walks");
    assert_eq!((row.get::<_, i64>(0), row.get::<_, Option<Uuid>>(1)), (2, None), "the end");
    assert_eq!(row.get::<_, Vec<Uuid>>(2), [first.id]);
    let repair = "select (queen.log_stamps_repair_v1($1) ->> 'repaired')::bool";
    for expected in [true, false] {
        assert_eq!(log.sql.query_one(repair, &[&first.id]).await.expect("repairs").get::<_, bool>(0), expected);
    }
    assert_eq!(stamps(&log, first.id).await, (Some(DAY), None));
    assert_eq!(stamps(&log, right.id).await, (Some(-DAY), None));
    assert!(!log.sql.query_one(repair, &[&Uuid::nil()]).await.expect("gone").get::<_, bool>(0));
}

#[tokio::test]
async fn queues_take_turns_when_more_is_due_than_fits() {
    let log = Log::start().await;
    log.execute(
        "insert into queen.queues (name, retention_enabled, retention_seconds)
         select n::text, true, 100 from generate_series(1, 4) n;
         insert into queen.log_partitions (queue_id, name, oldest_txn_at)
         select id, n::text, null from queen.queues, generate_series(1, 30) n;
         delete from queen.due_events",
    )
    .await;
    let mut behind = Uuid::nil();
    let mut served = HashSet::new();
    for _ in 0..4 {
        let list = plan(&log, behind, &[], 10).await;
        assert!(list.is_full);
        assert_eq!(list.works.len(), 10);
        let ids = ids(&list);
        assert!(ids.is_sorted(), "ascending");
        behind = list.works[0].queue_id.0;
        assert!(list.works.iter().all(|work| work.queue_id.0 == behind), "one queue fills it");
        served.insert(behind);
    }
    assert_eq!(served.len(), 4, "each queue had its turn");
    let all = plan(&log, behind, &[], 1000).await;
    assert_eq!((all.works.len(), all.is_full), (120, false));
    assert!(ids(&all).is_sorted());
    let except: Vec<PartitionId> = all.works.iter().take(100).map(|work| work.partition_id).collect();
    assert_eq!(plan(&log, behind, &except, 1000).await.works.len(), 20);
}

#[tokio::test]
async fn the_oldest_of_a_queue_come_first() {
    let log = Log::start().await;
    let queue = log.queue("q").await;
    log.execute("update queen.queues set retention_enabled = true, retention_seconds = 1").await;
    let mut expected = Vec::new();
    for (name, age) in [("a", 5), ("b", 1), ("c", 3), ("d", 4), ("e", 2)] {
        let p = log.partition_of(queue, name).await.segments(&[(0, 0, -age * SECOND)]).await;
        p.step(Some(at(-DAY)), None, 1).await;
        if age >= 3 {
            expected.push(p.id);
        }
    }
    log.execute("update queen.log_partitions set oldest_txn_at = null").await;
    expected.sort_unstable();
    assert_eq!(ids(&plan(&log, Uuid::nil(), &[], 3).await), expected);
}

/// The pages that a query touches and the rows that it finds, once the catalogue is known.
async fn pages(log: &Log, query: &str, types: &[Type], params: &[&(dyn ToSql + Sync)]) -> (i64, usize) {
    let explained = format!("explain (analyze, buffers, format json) {query}");
    for setting in ["enable_seqscan", "enable_bitmapscan", "jit"] {
        log.execute(&format!("set {setting} = off")).await;
    }
    let mut last = (0, 0);
    for _ in 0..2 {
        let statement = log.sql.prepare_typed(&explained, types).await.expect("prepares");
        let plan: Value = log.sql.query_one(&statement, params).await.expect("explains").get(0);
        let plan = &plan[0]["Plan"];
        let buffers = |key: &str| plan[key].as_i64().expect("a count");
        let rows = usize::try_from(plan["Actual Rows"].as_i64().expect("rows")).expect("few");
        last = (buffers("Shared Hit Blocks") + buffers("Shared Read Blocks"), rows);
    }
    last
}

async fn plan_pages(log: &Log, queues: &[Uuid]) -> (i64, usize) {
    let mut types = vec![Type::TIMESTAMPTZ, Type::UUID, Type::UUID_ARRAY, Type::INT8];
    types.extend([Type::UUID_ARRAY, Type::UUID_ARRAY, Type::UUID_ARRAY]);
    let (as_of, none): (Option<Timestamp>, Vec<Uuid>) = (None, Vec::new());
    pages(log, WORK_LIST, &types, &[&as_of, &Uuid::nil(), &none, &5000_i64, &queues, &none, &none]).await
}

async fn quiet_pages(log: &Log, known: &[Learnt]) -> (i64, usize) {
    let types = [Type::TIMESTAMPTZ, Type::UUID_ARRAY, Type::INT8_ARRAY, Type::TIMESTAMPTZ_ARRAY];
    let as_of: Option<Timestamp> = None;
    let ids: Vec<Uuid> = known.iter().map(|queue| queue.queue_id.0).collect();
    let versions: Vec<i64> = known.iter().map(|queue| queue.quiet.version).collect();
    let untils: Vec<Timestamp> = known.iter().map(|queue| queue.quiet.until).collect();
    pages(log, QUIET, &types, &[&as_of, &ids, &versions, &untils]).await
}

/// Partitions whose rows are young, and known to be.
async fn young(log: &Log, queues: i64, partitions: i64) {
    log.execute(&format!(
        "insert into queen.queues (name, retention_enabled, retention_seconds, completed_retention_seconds, max_wait_time_seconds)
         select n::text, true, 86400, 3600, 864000 from generate_series(1, {queues}) n;
         insert into queen.log_partitions (queue_id, name, last_offset, oldest_live_at, oldest_txn_at)
         select id, n::text, 0, now(), now() from queen.queues, generate_series(1, {partitions}) n"
    ))
    .await;
    log.execute("vacuum analyze queen.log_partitions").await;
}

#[tokio::test]
async fn an_idle_plan_costs_the_same_for_many_partitions_as_for_few() {
    let log = Log::start().await;
    young(&log, 100, 2).await;
    log.execute(
        "insert into queen.log_partitions (queue_id, name, last_offset, oldest_live_at, oldest_txn_at)
         select id, 'more' || n, 0, now(), now() from queen.queues, generate_series(1, 400) n",
    )
    .await;
    log.execute("vacuum analyze queen.log_partitions").await;
    let known = quiet(&log.sql, None, [].into_iter()).await.expect("asks");
    assert_eq!(known.len(), 100);
    // Two or three levels of an index, for each of three probes a queue.
    let (first, _) = quiet_pages(&log, &[]).await;
    assert!(first <= 100 * 3 * 3 + 50, "{first} pages where nothing is known");
    let (idle, rows) = quiet_pages(&log, &known).await;
    assert_eq!(rows, 0, "all are quiet");
    let (plan, rows) = plan_pages(&log, &[]).await;
    assert_eq!(rows, 0);
    assert!(idle + plan <= 50, "{idle} + {plan} pages for 40,200 partitions in 100 queues");
}

#[tokio::test]
async fn a_plan_costs_what_is_due() {
    let log = Log::start().await;
    young(&log, 5, 4000).await;
    log.execute("update queen.log_partitions set oldest_live_at = now() - interval '2 days' where name::int % 20 = 0")
        .await;
    log.execute("vacuum analyze queen.log_partitions").await;
    let (pages, rows) = plan_pages(&log, &all_queues(&log).await).await;
    assert_eq!(rows, 1000);
    assert!(pages <= 1500, "{pages} pages for {rows} due partitions");
}

#[tokio::test]
async fn a_queue_is_quiet_until_its_first_row_comes_due() {
    let log = Log::start().await;
    let second = |count: i64| jiff::SignedDuration::from_secs(count);
    let now: Timestamp = log.sql.query_one("select now()", &[]).await.expect("asks").get(0);
    let policy = "retention_enabled = true, retention_seconds = 1000, completed_retention_seconds = 500, dedup_window_seconds = 0";
    let set = "oldest_live_at = $1::timestamptz - interval '450 seconds', oldest_txn_at = null";
    for (policy, stamps, expected) in [
        (policy, set, 50),
        ("max_wait_time_seconds = 480", set, 30),
        ("retention_enabled = false, max_wait_time_seconds = 0", set, 300),
        ("retention_enabled = true", "held_next = 0, oldest_live_at = $1::timestamptz - interval '900 seconds'", 100),
        ("retention_seconds = 0", "held_next = 0", 300),
        ("completed_retention_seconds = 200", "oldest_live_at = null, held_next = null", 140),
        ("completed_retention_seconds = 0", "oldest_txn_at = $1::timestamptz - interval '800 seconds'", 100),
        ("dedup_window_seconds = 5000", "oldest_txn_at = $1::timestamptz - interval '800 seconds'", 300),
    ] {
        if log.count("select count(*) from queen.queues").await == 0 {
            log.queue("q").await;
            log.execute("insert into queen.log_partitions (queue_id, name) select id, 'p' from queen.queues").await;
        }
        log.execute(&format!("update queen.queues set {policy}")).await;
        log.sql
            .execute(&format!("update queen.log_partitions set {stamps} where $1::timestamptz is not null"), &[&now])
            .await
            .expect("stamped");
        let found = quiet(&log.sql, Some(now), [].into_iter()).await.expect("asks");
        assert_eq!(found[0].quiet.until, now + second(expected), "{policy}; {stamps}");
        assert_eq!(quiet(&log.sql, Some(now), known_by(&found)).await.expect("asks"), [], "known");
        let later = now + second(expected);
        assert_eq!(quiet(&log.sql, Some(later), known_by(&found)).await.expect("asks").len(), 1, "asked again");
    }
    log.execute("update queen.log_partitions set oldest_txn_at = '-infinity'").await;
    let found = quiet(&log.sql, Some(now), [].into_iter()).await.expect("asks");
    assert_eq!(found[0].quiet.until, Timestamp::MIN, "nothing is known");
}

#[tokio::test]
async fn a_policy_that_changes_wakes_its_queue() {
    let log = Log::start().await;
    log.queue("q").await;
    let known = quiet(&log.sql, None, [].into_iter()).await.expect("asks");
    assert_eq!(quiet(&log.sql, None, known_by(&known)).await.expect("asks"), []);
    for policy in [
        "retention_enabled = true, retention_seconds = 5000",
        "retention_enabled = true, retention_seconds = 0, completed_retention_seconds = 5000",
        "retention_enabled = false, retention_seconds = 0, completed_retention_seconds = 0, max_wait_time_seconds = 5000",
        "max_wait_time_seconds = 0, dedup_window_seconds = 5000",
    ] {
        log.execute(&format!("update queen.queues set {policy}")).await;
        assert_eq!(quiet(&log.sql, None, known_by(&known)).await.expect("asks").len(), 1, "{policy}");
    }
}
