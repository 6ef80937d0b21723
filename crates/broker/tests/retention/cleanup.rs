//! Cleanup of empty partitions: the predicate veto by veto, then the step.

use jiff::Timestamp;
use uuid::Uuid;

use crate::support::partition::{DAY, Log, Partition, SECOND, US, at};
use crate::support::{Broker, wait_until};

const CUTOFF: Option<Timestamp> = Some(Timestamp::constant(1_767_225_600, 0));

/// A cursor whose stamps are all different and all before the cutoff, and what `change` sets.
async fn consumer(p: Partition<'_>, change: &str) {
    p.cursor("g", 5).await;
    let query = format!(
        "update queen.log_consumers set lease_acquired_at = '2025-11-01', lease_expires_at = '2025-11-02'
          where partition_id = '{0}';
         update queen.log_consumers set {change} where partition_id = '{0}'",
        p.id
    );
    p.log.execute(&query).await;
}

/// Numbered partitions of one queue, in the order of their ids.
async fn numbered(log: &Log, count: u128) -> Vec<Partition<'_>> {
    let queue = log.queue("numbered").await;
    let mut partitions = Vec::new();
    for number in 1..=count {
        partitions.push(log.partition_with_id(Uuid::from_u128(number), queue, &number.to_string()).await);
    }
    partitions
}

#[tokio::test]
async fn both_stamps_must_lie_before_the_cutoff() {
    let log = Log::start().await;
    let p = log.partition().await;
    assert_eq!(p.is_dead(CUTOFF).await, Some(true));
    assert_ne!(p.is_dead(None).await, Some(true), "no cutoff, no verdict");
    for column in ["created_at", "last_write_at"] {
        p.stamp(column, -US).await;
        assert_eq!(p.is_dead(CUTOFF).await, Some(true), "{column} just before");
        p.stamp(column, 0).await;
        assert_eq!(p.is_dead(CUTOFF).await, Some(false), "{column} at the cutoff");
        p.stamp(column, US).await;
        assert_eq!(p.is_dead(CUTOFF).await, Some(false), "{column} after it");
        p.stamp(column, -DAY).await;
    }
    log.execute("delete from queen.log_partitions").await;
    assert_eq!(p.is_dead(CUTOFF).await, None, "a partition that does not exist");
}

#[tokio::test]
async fn segments_dead_letters_and_streams_state_veto() {
    let log = Log::start().await;
    let p = log.partition().await.segments(&[(0, 0, -60 * DAY)]).await;
    assert_eq!(p.is_dead(CUTOFF).await, Some(false), "a segment, however old");
    log.execute("delete from queen.log_segments").await;
    assert_eq!(p.is_dead(CUTOFF).await, Some(true));
    let insert = "insert into queen.log_dlq (partition_id, consumer_group, \"offset\", failed_at)
        values ($1, 'g', 0, '2020-01-01')";
    log.sql.execute(insert, &[&p.id]).await.expect("dead letter");
    assert_eq!(p.is_dead(CUTOFF).await, Some(false), "a dead letter, however old");
    log.execute("delete from queen.log_dlq").await;
    let insert = "with query as (
            insert into queen_streams.queries (name, config_hash) values ('q', '') returning id)
        insert into queen_streams.state (query_id, partition_id, key, value, updated_at)
        select id, $1, 'k', 'v', '2020-01-01' from query";
    log.sql.execute(insert, &[&p.id]).await.expect("state");
    assert_eq!(p.is_dead(CUTOFF).await, Some(false), "streams state, however old");
    log.execute("delete from queen_streams.state").await;
    assert_eq!(p.is_dead(CUTOFF).await, Some(true));
}

#[tokio::test]
async fn consumer_activity_vetoes_stamp_by_stamp() {
    let log = Log::start().await;
    for column in ["created_at", "lease_acquired_at", "lease_expires_at"] {
        for (us, dead) in [(-US, true), (0, false), (US, false)] {
            let p = log.partition().await;
            consumer(p, &format!("{column} = '{}'", at(us))).await;
            assert_eq!(p.is_dead(CUTOFF).await, Some(dead), "{column} {us} after the cutoff");
        }
    }
}

#[tokio::test]
async fn a_live_lease_vetoes_whatever_the_cutoff() {
    let log = Log::start().await;
    let p = log.partition().await;
    consumer(p, "batch_end = 9, lease_expires_at = now() + interval '1 minute'").await;
    let tomorrow: Timestamp = log.sql.query_one("select now() + interval '1 day'", &[]).await.expect("clock").get(0);
    assert_eq!(p.is_dead(Some(tomorrow)).await, Some(false));
    log.execute("update queen.log_consumers set lease_expires_at = now() - interval '1 second'").await;
    assert_eq!(p.is_dead(Some(tomorrow)).await, Some(true), "expired, and every stamp before the cutoff");
}

#[tokio::test]
async fn d1_a_lease_without_expiry_counts_as_live() {
    let log = Log::start().await;
    let p = log.partition().await;
    consumer(p, "batch_end = 9, lease_expires_at = null").await;
    assert_eq!(p.is_dead(CUTOFF).await, Some(false));
}

#[tokio::test]
async fn d2_a_lease_that_expired_before_the_cutoff_is_no_veto() {
    let log = Log::start().await;
    let p = log.partition().await;
    consumer(p, "batch_end = 9").await;
    assert_eq!(p.is_dead(CUTOFF).await, Some(true));
}

#[tokio::test]
async fn d3_a_lease_that_expired_inside_the_window_is_a_veto() {
    let log = Log::start().await;
    let p = log.partition().await;
    consumer(p, &format!("batch_end = 9, lease_expires_at = '{}'", at(SECOND))).await;
    assert_eq!(p.is_dead(CUTOFF).await, Some(false));
}

#[tokio::test]
async fn d4_a_released_lease_vetoes_by_its_stamp() {
    let log = Log::start().await;
    let p = log.partition().await;
    consumer(p, &format!("batch_end = null, lease_expires_at = '{}'", at(SECOND))).await;
    assert_eq!(p.is_dead(CUTOFF).await, Some(false));
}

#[tokio::test]
async fn d5_a_group_that_left_no_trace_is_no_veto() {
    let log = Log::start().await;
    let p = log.partition().await;
    consumer(p, "lease_acquired_at = null, lease_expires_at = null, total_consumed = 1000").await;
    assert_eq!(p.is_dead(CUTOFF).await, Some(true));
}

#[tokio::test]
async fn d6_traces_are_no_veto_and_stay() {
    let log = Log::start().await;
    let p = log.partition().await;
    let insert = "insert into queen.message_traces (partition_id, transaction_id, data) values ($1, 't', '{}')";
    log.sql.execute(insert, &[&p.id]).await.expect("trace");
    assert_eq!(log.cleanup(CUTOFF, Some(10)).await, (1, true));
    assert_eq!(log.count("select count(*) from queen.message_traces").await, 1);
}

#[tokio::test]
async fn d7_sidecar_rows_are_no_veto_and_go_along() {
    let log = Log::start().await;
    let p = log.partition().await.txns(&[(0, 0, -DAY), (1, 1, DAY)]).await.cursor("g", 1).await;
    let other = log.partition().await.segments(&[(0, 0, -DAY)]).await.txns(&[(0, 0, -DAY)]).await;
    assert_eq!(p.is_dead(CUTOFF).await, Some(true));
    assert_eq!(log.cleanup(CUTOFF, Some(10)).await, (1, true));
    assert_eq!((p.hashes().await, other.hashes().await), (vec![], vec![0]));
    assert_eq!(log.count("select count(*) from queen.log_consumers").await, 0, "cursors cascade");
}

#[tokio::test]
async fn d8_a_partition_written_inside_the_window_stays_though_just_emptied() {
    let log = Log::start().await;
    let old = log.partition().await.segments(&[(0, 0, -DAY)]).await;
    let recent = log.partition().await.segments(&[(0, 0, -DAY)]).await.stamp("last_write_at", SECOND).await;
    for p in [old, recent] {
        assert_eq!(p.step(CUTOFF, None, 10).await.0, 1);
    }
    assert_eq!(log.cleanup(CUTOFF, Some(10)).await, (1, true));
    assert_eq!((old.is_dead(CUTOFF).await, recent.is_dead(CUTOFF).await), (None, Some(false)));
}

#[tokio::test]
async fn d9_a_partition_that_was_never_written_goes() {
    let log = Log::start().await;
    let p = log.partition().await.stamp("last_write_at", -90 * DAY).await;
    assert_eq!(p.number("last_offset").await, -1);
    assert_eq!(log.cleanup(CUTOFF, Some(10)).await, (1, true));
}

#[tokio::test]
async fn without_a_cutoff_nothing_goes() {
    let log = Log::start().await;
    log.partition().await;
    assert_eq!(log.cleanup(None, Some(10)).await, (0, true));
    assert_eq!(log.partitions().await, ["p"]);
}

#[tokio::test]
async fn one_partition_more_than_the_batch_takes_two_steps() {
    let log = Log::start().await;
    numbered(&log, 4).await;
    assert_eq!(log.cleanup(CUTOFF, Some(3)).await, (3, false));
    assert_eq!(log.partitions().await, ["4"], "ascending by id");
    assert_eq!(log.cleanup(CUTOFF, Some(3)).await, (1, true));
    assert_eq!(log.cleanup(CUTOFF, Some(3)).await, (0, true), "nothing to do");
}

#[tokio::test]
async fn the_batch_is_a_thousand_by_default_and_at_least_one() {
    let log = Log::start().await;
    numbered(&log, 3).await;
    assert_eq!(log.cleanup(CUTOFF, Some(0)).await, (1, false));
    assert_eq!(log.cleanup(CUTOFF, Some(-1)).await, (1, false));
    assert_eq!(log.cleanup(CUTOFF, None).await, (1, true));
    let many = "insert into queen.log_partitions (queue_id, name, created_at, last_write_at)
        select q.id, n::text, '2020-01-01', '2020-01-02' from queen.queues q, generate_series(1, 1001) n";
    log.execute(many).await;
    assert_eq!(log.cleanup(CUTOFF, None).await, (1000, false));
}

#[tokio::test]
async fn a_full_batch_of_vetoed_partitions_hides_no_dead_one() {
    let log = Log::start().await;
    let partitions = numbered(&log, 5).await;
    for p in &partitions[..3] {
        p.segments(&[(0, 0, -DAY)]).await;
    }
    assert_eq!(log.cleanup(CUTOFF, Some(3)).await, (2, true));
    assert_eq!(log.partitions().await, ["1", "2", "3"]);
}

#[tokio::test]
async fn each_deletion_leaves_one_line_that_outlives_the_partition() {
    let log = Log::start().await;
    let p = log.partition().await;
    let queue: Uuid = log.sql.query_one("select id from queen.queues", &[]).await.expect("queue").get(0);
    assert_eq!(log.cleanup(CUTOFF, Some(10)).await, (1, true));
    assert_eq!(p.history().await, [(0, "__partition_deleted__".to_owned())]);
    let row = log.sql.query_one("select queue_id, tenant_id from queen.retention_history", &[]).await.expect("line");
    assert_eq!((row.get::<_, Uuid>(0), row.get::<_, Uuid>(1)), (queue, Uuid::from_u128(1)));
}

#[tokio::test]
async fn c1_a_partition_that_is_held_is_skipped() {
    let log = Log::start().await;
    numbered(&log, 3).await;
    let pusher = log.database.client().await;
    pusher.batch_execute("begin; select from queen.log_partitions where name = '2' for update").await.expect("held");
    assert_eq!(log.cleanup(CUTOFF, Some(10)).await, (2, true));
    assert_eq!(log.partitions().await, ["2"]);
    pusher.batch_execute("rollback").await.expect("let go");
    assert_eq!(log.cleanup(CUTOFF, Some(10)).await, (1, true));
}

/// The choosing statement is held up while it looks for dead letters, with its snapshot already taken.
#[tokio::test]
async fn c2_what_changes_behind_the_choosing_statement_is_seen_under_the_locks() {
    let log = Log::start().await;
    let partitions = numbered(&log, 2).await;
    let writer = log.database.client().await;
    writer.batch_execute("begin; lock table queen.log_dlq in access exclusive mode").await.expect("held");
    let sweeper = log.database.target.connect("sweeper").await.expect("connects");
    let step = tokio::spawn(async move {
        let query = "select queen.log_partition_cleanup_step_v1($1, 2)";
        sweeper.query_one(query, &[&CUTOFF]).await.expect("cleanup").get::<_, serde_json::Value>(0)
    });
    wait_until(
        &log.sql,
        "the step looks for dead letters",
        "select exists (select from pg_stat_activity where application_name = 'sweeper' and wait_event_type = 'Lock')",
        &[],
    )
    .await;
    for p in &partitions {
        let insert = "insert into queen.log_dlq (partition_id, consumer_group, \"offset\") values ($1, 'g', 0)";
        writer.execute(insert, &[&p.id]).await.expect("dead letter");
    }
    writer.batch_execute("commit").await.expect("commits");
    let answer = step.await.expect("no panic");
    assert_eq!(answer, serde_json::json!({"deleted": 0, "done": true}), "a full batch, all spared, ends the loop");
    assert_eq!(log.partitions().await, ["1", "2"]);
    assert_eq!(log.count("select count(*) from queen.retention_history").await, 0);
}

/// Who files a dead letter or streams state holds a cursor and no partition.
#[tokio::test]
async fn c5_a_partition_whose_cursor_is_held_is_spared() {
    let log = Log::start().await;
    for p in numbered(&log, 3).await {
        p.cursor("a", 0).await.cursor("b", 0).await;
    }
    let worker = log.database.client().await;
    worker
        .batch_execute(
            "begin; select from queen.log_consumers c join queen.log_partitions p on p.id = c.partition_id
              where p.name = '2' and c.consumer_group = 'b' for update of c",
        )
        .await
        .expect("held");
    assert_eq!(log.cleanup(CUTOFF, Some(10)).await, (2, true));
    assert_eq!(log.partitions().await, ["2"]);
    let insert = "insert into queen.log_dlq (partition_id, consumer_group, \"offset\")
        select id, 'b', 0 from queen.log_partitions";
    worker.execute(insert, &[]).await.expect("dead letter");
    worker.batch_execute("commit").await.expect("commits");
    assert_eq!(log.cleanup(CUTOFF, Some(10)).await, (0, true), "and the dead letter keeps it");
    assert_eq!(log.count("select count(*) from queen.log_consumers").await, 2);
}

#[tokio::test]
async fn c6_a_partition_that_is_pushed_to_again_is_a_new_one() {
    let log = Log::start().await;
    let p = log.partition().await.set("last_offset = $2", 41).await.cursor("g", 41).await;
    let queue: String = log.sql.query_one("select name from queen.queues", &[]).await.expect("queue").get(0);
    assert_eq!(log.cleanup(CUTOFF, Some(10)).await, (1, true));
    let push = "select queen.log_push_multi_v1(array[$1], array['p'], array[1], array[$2::bytea], array[-1::bigint],
        array['\\x00'::bytea])->0->>'baseOffset'";
    let base: String = log.sql.query_one(push, &[&queue, &vec![7_u8; 16]]).await.expect("push").get(0);
    assert_eq!(base, "0", "offsets start again");
    let id: Uuid = log.sql.query_one("select id from queen.log_partitions", &[]).await.expect("partition").get(0);
    assert_ne!(id, p.id);
    assert_eq!(log.count("select count(*) from queen.log_consumers").await, 0, "groups seed again");
}

#[tokio::test]
async fn c7_a_dedup_window_longer_than_the_cleanup_window_is_refused() {
    let broker = Broker::start().await;
    let too_long = 31 * 86_400;
    let body = serde_json::json!({"queue": "q", "options": {"dedupWindowSeconds": too_long}});
    let (status, answer) = broker.post("/api/v1/configure", body).await;
    assert_eq!(status, 400, "{answer}");
    assert!(answer.to_string().contains("dedupWindowSeconds"), "{answer}");
}

#[tokio::test]
async fn c9_the_last_partition_goes_and_its_queue_stays() {
    let log = Log::start().await;
    log.partition().await;
    assert_eq!(log.cleanup(CUTOFF, Some(10)).await, (1, true));
    assert_eq!(log.count("select count(*) from queen.queues").await, 1);
}

#[tokio::test]
async fn c10_the_limit_counts_what_could_be_locked() {
    let log = Log::start().await;
    numbered(&log, 4).await;
    let pusher = log.database.client().await;
    pusher.batch_execute("begin; select from queen.log_partitions where name = '1' for update").await.expect("held");
    assert_eq!(log.cleanup(CUTOFF, Some(2)).await, (2, false), "a full batch behind the held one");
    assert_eq!(log.partitions().await, ["1", "4"]);
    assert_eq!(log.cleanup(CUTOFF, Some(2)).await, (1, true), "fewer than the limit");
}
