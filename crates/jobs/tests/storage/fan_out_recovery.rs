//! What is left behind by processes that were lost, and by hands: each look takes its own kind and no other.

use std::time::Duration;

use ebbtide_jobs::{FanOut, FanOutId, FanOutScan, JobId, JobStatus, QueueName};

use crate::fan_out::{claims, counts, family, store};
use crate::rows::Row;
use crate::support::{DAY, SECOND, Store};

const STALE: Duration = Duration::from_secs(120);

async fn settle(t: &Store, scan: FanOutScan) -> u64 {
    store(t).settle(scan, STALE, 10).await.unwrap().rows
}

/// A pending fan-out of a row, this old.
async fn left(t: &Store, parent: JobId, age: Duration) -> FanOutId {
    let id = t.fan_out(parent, "pending").await;
    t.exec(&format!("update @fan_outs set created_at = {} where id = {}", t.ago(age), t.id(id))).await;
    id.to_string().parse().unwrap()
}

async fn nothing_is_found_where_all_is_well(t: Store) {
    family(&t, FanOut::fail_fast().cancel_on_parent_failure().decided_within(DAY), 2).await;
    t.exec(&format!("update @fan_outs set created_at = {}", t.ago(DAY))).await;
    for scan in FanOutScan::ALL {
        assert_eq!(settle(&t, scan).await, 0, "{scan:?}");
    }
}

async fn a_fan_out_whose_counts_are_complete_is_decided(t: Store) {
    let (parent, id) = family(&t, FanOut::fail_fast(), 2).await;
    t.exec("update @fan_outs set completed_count = 1").await;
    assert_eq!(settle(&t, FanOutScan::Counted).await, 0);
    t.exec("update @fan_outs set completed_count = 2").await;
    let settled = store(&t).settle(FanOutScan::Counted, STALE, 10).await.unwrap();
    assert_eq!((settled.rows, settled.woken), (1, vec![QueueName::default_queue()]));
    assert_eq!((counts(&t, id).await.as_str(), t.job(parent).await.status), ("completed 2 0 0", JobStatus::Pending));
}

async fn a_fan_out_whose_time_ran_out_fails(t: Store) {
    let (parent, id) = family(&t, FanOut::collect_all().decided_within(DAY), 2).await;
    assert_eq!(settle(&t, FanOutScan::TimedOut).await, 0);
    t.exec(&format!("update @fan_outs set timeout_at = {}", t.ago(SECOND))).await;
    assert_eq!(settle(&t, FanOutScan::TimedOut).await, 1);
    assert_eq!((counts(&t, id).await.as_str(), t.job(parent).await.status), ("failed 0 0 0", JobStatus::Pending));
    assert_eq!(settle(&t, FanOutScan::TimedOut).await, 0);
}

async fn a_fan_out_that_lost_children_fails_once_it_is_stale(t: Store) {
    let (parent, id) = family(&t, FanOut::collect_all(), 2).await;
    t.exec("delete from @jobs where fan_out_index = 1 and type = 'child'").await;
    assert_eq!(settle(&t, FanOutScan::Incomplete).await, 0, "too young");
    t.exec(&format!("update @fan_outs set created_at = {}", t.ago(STALE + SECOND))).await;
    assert_eq!(settle(&t, FanOutScan::Incomplete).await, 1);
    assert_eq!((counts(&t, id).await.as_str(), t.job(parent).await.status), ("failed 0 0 0", JobStatus::Pending));
}

/// Pending, of a finished parent, without children, and old: all four.
async fn an_abandoned_fan_out_is_all_of_four_things(t: Store) {
    let old = STALE + SECOND;
    let over = Row::new(JobStatus::Failed).put(&t).await;
    let young = left(&t, over, SECOND).await;
    let live = left(&t, Row::new(JobStatus::Waiting).put(&t).await, old).await;
    let decided = left(&t, over, old).await;
    t.exec(&format!(
        "update @fan_outs set status = 'completed' where id = {}",
        t.id(JobId::from_uuid(decided.as_uuid()).unwrap())
    ))
    .await;
    let peopled = left(&t, over, old).await;
    Row::completed().fan_out(JobId::from_uuid(peopled.as_uuid()).unwrap()).put(&t).await;
    assert_eq!(settle(&t, FanOutScan::Abandoned).await, 0);
    let abandoned = left(&t, over, old).await;
    assert_eq!(settle(&t, FanOutScan::Abandoned).await, 1);
    for (id, status) in
        [(young, "pending"), (live, "pending"), (decided, "completed"), (peopled, "pending"), (abandoned, "cancelled")]
    {
        assert!(counts(&t, id).await.starts_with(status), "{status}");
    }
}

async fn children_of_a_failed_fan_out_are_cancelled_later_if_not_at_once(t: Store) {
    let (_, id) = family(&t, FanOut::fail_fast().cancel_on_parent_failure(), 3).await;
    let claim = claims(&t, 1).await.remove(0);
    t.exec("update @fan_outs set status = 'failed'").await;
    assert_eq!(settle(&t, FanOutScan::Losers).await, 1);
    assert_eq!(counts(&t, id).await, "failed 0 0 3");
    assert!(t.storage.heartbeat(&claim, DAY).await.is_err());
    assert_eq!(settle(&t, FanOutScan::Losers).await, 0, "once");

    t.exec("delete from @jobs").await;
    family(&t, FanOut::fail_fast(), 1).await;
    t.exec("update @fan_outs set status = 'failed'").await;
    assert_eq!(settle(&t, FanOutScan::Losers).await, 0, "it was not asked for");
}

async fn a_parent_that_missed_its_wake_up_is_woken(t: Store) {
    let (parent, _) = family(&t, FanOut::collect_all(), 1).await;
    assert_eq!(settle(&t, FanOutScan::Joinable).await, 0);
    t.exec("update @fan_outs set status = 'completed'").await;
    // One that waits for something else stays.
    let other = Row::new(JobStatus::Waiting).put(&t).await;
    assert_eq!(settle(&t, FanOutScan::Joinable).await, 1);
    assert_eq!((t.job(parent).await.status, t.job(other).await.status), (JobStatus::Pending, JobStatus::Waiting));
}

async fn a_look_repairs_no_more_than_it_may(t: Store) {
    let over = Row::new(JobStatus::Failed).put(&t).await;
    for _ in 0..5 {
        left(&t, over, STALE * 2).await;
    }
    for expected in [2, 2, 1, 0] {
        assert_eq!(store(&t).settle(FanOutScan::Abandoned, STALE, 2).await.unwrap().rows, expected);
    }
}

cases!(
    nothing_is_found_where_all_is_well,
    a_fan_out_whose_counts_are_complete_is_decided,
    a_fan_out_whose_time_ran_out_fails,
    a_fan_out_that_lost_children_fails_once_it_is_stale,
    an_abandoned_fan_out_is_all_of_four_things,
    children_of_a_failed_fan_out_are_cancelled_later_if_not_at_once,
    a_parent_that_missed_its_wake_up_is_woken,
    a_look_repairs_no_more_than_it_may,
);
