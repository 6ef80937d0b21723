//! Eviction: data that may not sit longer, read or not.

use jiff::Timestamp;

use crate::support::partition::{DAY, Log, US};

const CUTOFF: Option<Timestamp> = Some(Timestamp::constant(1_767_225_600, 0));

#[tokio::test]
async fn eviction_keeps_segments_at_or_after_the_cutoff() {
    let log = Log::start().await;
    let p = log.partition().await.segments(&[(0, 0, -US), (1, 1, 0), (2, 2, US)]).await;
    assert_eq!(p.evict(None, 10).await, (0, Some(0), true), "off");
    assert_eq!(p.evict(CUTOFF, 10).await, (1, Some(1), true));
    assert_eq!(p.live().await, [1, 2]);
    assert_eq!(p.evict(CUTOFF, 10).await, (0, Some(1), true), "nothing to do");
    assert_eq!(p.history().await, [(1, "max_wait_time_eviction".to_owned())]);
}

#[tokio::test]
async fn eviction_takes_unread_and_leased_messages_and_files_no_dead_letter() {
    let log = Log::start().await;
    let p = log.partition().await.segments(&[(0, 4, -2 * DAY), (5, 9, -DAY), (10, 14, 0)]).await;
    p.cursor("reader", 2).await.cursor("other", -1).await;
    log.execute(
        "update queen.log_consumers set batch_end = 4, worker_id = 'w', lease_expires_at = now() + interval '1 hour'
          where consumer_group = 'reader'",
    )
    .await;
    assert_eq!(p.evict(CUTOFF, 1).await, (1, Some(5), false));
    assert_eq!(p.evict(CUTOFF, 1).await, (1, Some(10), true));
    assert_eq!(p.live().await, [10]);
    assert_eq!(log.count("select count(*) from queen.log_dlq").await, 0);
    assert_eq!(log.count("select sum(committed)::bigint from queen.log_consumers").await, 1, "cursors stay");
}

#[tokio::test]
async fn what_groups_lose_is_counted_once_for_each() {
    let log = Log::start().await;
    let p = log.partition().await.segments(&[(0, 4, -2 * DAY), (5, 9, -DAY), (10, 14, 0)]).await;
    p.cursor("none", -1).await.cursor("some", 2).await.cursor("all", 9).await;
    let evict = async || -> serde_json::Value {
        let query = "select queen.log_evict_max_wait_step_v1($1, $2, 1) -> 'skipped'";
        log.sql.query_one(query, &[&p.id, &CUTOFF]).await.expect("a step").try_get(0).unwrap_or_default()
    };
    assert_eq!(evict().await, 7, "0 to 4 of the first, 3 and 4 of the second");
    assert_eq!(evict().await, 10, "5 to 9 of both, and nothing again");
    assert_eq!(evict().await, serde_json::Value::Null, "nothing went");
}

#[tokio::test]
async fn evicting_where_no_partition_is_is_done() {
    let log = Log::start().await;
    let p = log.partition().await;
    log.execute("delete from queen.log_partitions").await;
    assert_eq!(p.evict(CUTOFF, 10).await, (0, None, true));
}
