//! Partitions that are old enough for rule 2 and wait for a consumer group.

use ebbtide::retention::{Settings, phase};
use serde_json::json;
use tokio_postgres::types::ToSql;

use super::cycle::{settings, sweep_on, sweep_with};
use crate::support::partition::{Log, Partition};
use crate::support::{Broker, Database};

/// How long the next look is away, in seconds, and the offset that is waited for; `None` where nothing is held.
async fn hold(p: Partition<'_>) -> Option<(i64, i64)> {
    let query = "select held_next, extract(epoch from recheck_at - now())::bigint + 1,
        (held_next is null) = (held_since is null) and (held_next is null) = (recheck_at is null)
        from queen.log_partitions where id = $1";
    let row = p.log.sql.query_one(query, &[&p.id]).await.expect("partition");
    assert!(row.get::<_, bool>(2), "all three or none");
    row.get::<_, Option<i64>>(0).map(|next| (next, row.get(1)))
}

/// A queue with rule 2, and three old messages in a partition of it.
async fn old(log: &Log) -> Partition<'_> {
    let queue = log.queue("q").await;
    log.execute("update queen.queues set retention_enabled = true, completed_retention_seconds = 100").await;
    log.partition_of(queue, "p").await.segments(&[(0, 0, 0), (1, 1, 1), (2, 2, 2)]).await
}

/// What phase 1 of a cycle did: steps and segments.
async fn swept(log: &Log) -> (u64, u64) {
    swept_on(&log.database).await
}

async fn swept_on(database: &Database) -> (u64, u64) {
    // The partitions of these tests are old, and would be gone once they are empty.
    let swept = sweep_on(database, &Settings { cleanup_days: None, ..settings() }).await;
    assert!(swept.report.first_error().is_none(), "{swept:?}");
    let phase = swept.report.phase(phase::RETENTION).expect("ran");
    (phase.steps, phase.deleted)
}

async fn set(log: &Log, query: &str, params: &[&(dyn ToSql + Sync)]) {
    log.sql.execute(query, params).await.unwrap_or_else(|error| panic!("{query}: {error:?}"));
}

#[tokio::test]
async fn a_held_partition_is_let_be_until_its_slowest_group_moves() {
    let log = Log::start().await;
    let p = old(&log).await.cursor("slow", 0).await.cursor("fast", 1).await;
    assert_eq!(swept(&log).await, (1, 1), "what both have read goes");
    assert_eq!(hold(p).await.map(|(next, _)| next), Some(1));
    assert_eq!(swept(&log).await, (0, 0), "and the rest costs nothing");
    p.cursor("fast", 2).await;
    assert_eq!(log.count("select count(*) from queen.due_events").await, 0, "it did not wait for that group");
    assert_eq!(swept(&log).await, (0, 0));
    p.cursor("slow", 1).await;
    assert_eq!(log.count("select count(*) from queen.due_events").await, 1);
    assert_eq!(swept(&log).await, (1, 1), "the next cycle knows");
    assert_eq!(p.live().await, [2]);
    assert_eq!(log.count("select count(*) from queen.due_events").await, 0);
    p.cursor("slow", 2).await;
    assert_eq!(swept(&log).await, (1, 1));
    assert_eq!((p.live().await, hold(p).await), (vec![], None));
}

#[tokio::test]
async fn an_acknowledgement_over_http_ends_a_hold() {
    let broker = Broker::start().await;
    let (status, _) = broker
        .post(
            "/api/v1/configure",
            json!({"queue": "q", "options": {"retentionEnabled": true, "completedRetentionSeconds": 60}}),
        )
        .await;
    assert!(status < 300, "{status}");
    broker.post("/api/v1/push", json!({"items": [{"queue": "q", "payload": 1}]})).await;
    let (status, popped) = broker.get("/api/v1/pop/queue/q?consumerGroup=g&subscriptionMode=all").await;
    assert_eq!(status, 200, "{popped}");
    broker.execute("update queen.log_segments set created_at = now() - interval '1 hour'", &[]).await;
    assert_eq!(swept_on(&broker.database).await, (1, 0));
    assert_eq!(swept_on(&broker.database).await, (0, 0), "held");
    let message = &popped["messages"][0];
    let ack = json!({"transactionId": message["transactionId"], "partitionId": message["partitionId"],
        "leaseId": message["leaseId"], "consumerGroup": "g", "status": "completed"});
    let (status, answer) = broker.post("/api/v1/ack", ack).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(swept_on(&broker.database).await, (1, 1));
}

#[tokio::test]
async fn nobody_at_all_is_waited_for_until_somebody_comes() {
    let log = Log::start().await;
    let p = old(&log).await;
    assert_eq!(swept(&log).await, (1, 0));
    assert_eq!(hold(p).await.map(|(next, _)| next), Some(0), "from the first offset on");
    assert_eq!(swept(&log).await, (0, 0));
    p.cursor("g", -1).await;
    assert_eq!(swept(&log).await, (0, 0), "a group that begins at the start changes nothing");
    p.cursor("g", 2).await;
    assert_eq!(swept(&log).await, (1, 3));
    let queue = log.sql.query_one("select id from queen.queues", &[]).await.expect("queue").get(0);
    let q = log.partition_of(queue, "q").await.segments(&[(0, 0, 0)]).await;
    assert_eq!(swept(&log).await, (1, 0));
    q.cursor("new", 0).await;
    assert_eq!(swept(&log).await, (1, 1), "a group that begins at the end has read all there is");
}

#[tokio::test]
async fn a_group_that_is_deleted_is_not_waited_for() {
    let log = Log::start().await;
    let p = old(&log).await.cursor("gone", -1).await.cursor("fast", 1).await;
    assert_eq!(swept(&log).await, (1, 0));
    log.execute("delete from queen.log_consumers where consumer_group = 'gone'").await;
    assert_eq!(swept(&log).await, (1, 2));
    assert_eq!(p.live().await, [2]);
}

#[tokio::test]
async fn a_backward_seek_ends_no_hold() {
    let log = Log::start().await;
    let p = old(&log).await.cursor("g", 0).await;
    assert_eq!(swept(&log).await, (1, 1));
    log.execute("update queen.log_consumers set committed = -1").await;
    assert_eq!(swept(&log).await, (0, 0));
    assert_eq!(p.live().await, [1, 2]);
}

#[tokio::test]
async fn a_hold_is_looked_at_again_ever_less_often() {
    let log = Log::start().await;
    let p = old(&log).await.cursor("g", 0).await;
    swept(&log).await;
    let away = async || hold(p).await.expect("held").1;
    assert!((4..=6).contains(&away().await), "soon at first: {}", away().await);
    for (held_for, expected) in [(5, 5), (60, 60), (1200, 1200), (86_400, 2700)] {
        let query = "update queen.log_partitions set recheck_at = now() - interval '1 microsecond',
            held_since = now() - make_interval(secs => $1)";
        set(&log, query, &[&f64::from(held_for)]).await;
        assert_eq!(swept(&log).await, (1, 0), "its time has come");
        let away = away().await;
        assert!((expected - 2..=expected + 30).contains(&away), "held for {held_for} s, next look in {away} s");
        assert_eq!(swept(&log).await, (0, 0));
    }
    p.cursor("g", 1).await;
    assert_eq!(swept(&log).await, (1, 1));
    assert!((4..=6).contains(&away().await), "a group that moves is looked after closely");
}

#[tokio::test]
async fn a_move_that_was_not_noted_is_found_at_the_next_look() {
    let log = Log::start().await;
    let p = old(&log).await.cursor("g", 0).await;
    swept(&log).await;
    p.cursor("g", 2).await;
    log.execute("delete from queen.due_events").await;
    assert_eq!(swept(&log).await, (0, 0));
    log.execute("update queen.log_partitions set recheck_at = now()").await;
    assert_eq!(swept(&log).await, (1, 2));
}

#[tokio::test]
async fn the_other_rules_do_not_wait_for_a_hold() {
    for policy in ["retention_seconds = 1000", "max_wait_time_seconds = 1000"] {
        let log = Log::start().await;
        let p = old(&log).await.cursor("g", 0).await;
        swept(&log).await;
        assert!(hold(p).await.is_some());
        log.execute(&format!("update queen.queues set {policy}")).await;
        let swept = sweep_with(&log, &Settings { cleanup_days: None, ..settings() }).await;
        let deleted = [phase::RETENTION, phase::EVICTION].map(|name| swept.report.deleted(name));
        assert_eq!(deleted.iter().sum::<u64>(), 2, "{policy}: {deleted:?}");
        assert_eq!(hold(p).await, None);
    }
}

#[tokio::test]
async fn a_rule_that_is_switched_off_lets_its_holds_go() {
    let log = Log::start().await;
    let p = old(&log).await.cursor("g", 0).await;
    swept(&log).await;
    log.execute(
        "update queen.queues set completed_retention_seconds = 0; update queen.log_partitions set recheck_at = now()",
    )
    .await;
    assert_eq!(swept(&log).await, (1, 0));
    assert_eq!((hold(p).await, p.live().await), (None, vec![1, 2]));
    log.execute("update queen.queues set completed_retention_seconds = 100").await;
    assert_eq!(swept(&log).await, (1, 0), "and on again, it is looked at at once");
}

#[tokio::test]
async fn a_segment_that_is_read_in_part_is_held_whole() {
    let log = Log::start().await;
    let queue = log.queue("q").await;
    log.execute("update queen.queues set retention_enabled = true, completed_retention_seconds = 100").await;
    let p = log.partition_of(queue, "p").await.segments(&[(0, 9, 0), (10, 19, 1)]).await.cursor("g", 4).await;
    assert_eq!(swept(&log).await, (1, 0));
    assert_eq!(hold(p).await.map(|(next, _)| next), Some(5));
    p.cursor("g", 8).await;
    assert_eq!(swept(&log).await, (1, 0));
    assert_eq!(hold(p).await.map(|(next, _)| next), Some(9));
    p.cursor("g", 9).await;
    assert_eq!(swept(&log).await, (1, 1));
    assert_eq!(hold(p).await.map(|(next, _)| next), Some(10));
}

#[tokio::test]
async fn notes_of_a_partition_that_is_deleted_go_with_it() {
    let log = Log::start().await;
    let p = old(&log).await.cursor("g", 0).await;
    swept(&log).await;
    p.cursor("g", 1).await;
    assert_eq!(log.count("select count(*) from queen.due_events").await, 1);
    log.execute("select queen.delete_queue_v1('q')").await;
    assert_eq!(log.count("select count(*) from queen.due_events").await, 0);
    log.execute(&format!("insert into queen.due_events values ('{}')", p.id)).await;
    assert_eq!(p.step(None, None, 1).await, (0, None, true));
    assert_eq!(log.count("select count(*) from queen.due_events").await, 0, "nor does one that came late stay");
}
