//! One tick of a policy, and of the window sweep.

use std::collections::BTreeSet;
use std::time::Duration;

use ebbtide_jobs::retention::{self, CONSUMED_SIGNALS, EXPIRED_LOCKS};
use ebbtide_jobs::{JobId, JobStatus, NewJob, Retention, UniqueLockSweep};
use tokio_util::sync::CancellationToken;

use crate::rows::Row;
use crate::support::{DAY, Raw, Store, new_job, options};

async fn tick(t: &Store, policy: &Retention) -> ebbtide_sweep::Report<ebbtide_jobs::Error> {
    let report = retention::run_once(&*t.storage, policy, &CancellationToken::new()).await;
    assert!(report.first_error().is_none(), "{report:?}");
    report
}

/// Pairs of rows of each kind, one past its stock window by a day and one short of it by a day.
async fn stock_pairs(t: &Store) -> (Vec<JobId>, BTreeSet<JobId>, JobId) {
    let mut old = Vec::new();
    let mut young = BTreeSet::new();
    for (status, days) in [(JobStatus::Completed, 30), (JobStatus::Failed, 90), (JobStatus::Cancelled, 90)] {
        old.push(Row::new(status).ended(t, DAY * (days + 1)).put(t).await);
        young.insert(Row::new(status).ended(t, DAY * (days - 1)).put(t).await);
    }
    let waiting = Row::new(JobStatus::Waiting).put(t).await;
    young.insert(waiting);
    t.signal(waiting, Some(t.ago(DAY * 8))).await;
    let signal = t.signal(waiting, Some(t.ago(DAY * 6))).await;
    (old, young, signal)
}

async fn the_stock_policy_takes_exactly_what_is_past_its_windows(t: Store) {
    let (_, young, signal) = stock_pairs(&t).await;
    let report = tick(&t, &Retention::stock()).await;
    assert_eq!((t.jobs().await, t.ids("select id from @signals").await), (young, [signal].into()));
    let phases: Vec<_> = report.phases().iter().map(|phase| (phase.name, phase.deleted, phase.steps)).collect();
    assert_eq!(phases, [("completed", 1, 1), ("failed", 1, 1), ("cancelled", 1, 1), (CONSUMED_SIGNALS, 1, 1)]);
}

async fn a_policy_that_is_off_deletes_nothing_of_any_kind(t: Store) {
    let (old, mut all, _) = stock_pairs(&t).await;
    all.extend(old);
    for policy in [Retention::disabled(), Retention::custom(), Retention::custom().delete_checkpoints_on_complete()] {
        for _ in 0..3 {
            assert!(tick(&t, &policy).await.phases().is_empty());
        }
    }
    assert_eq!((t.jobs().await, t.number("select count(*) from @signals").await), (all, 2));
}

async fn windows_left_out_keep_their_kind(t: Store) {
    let done = Row::completed().ended(&t, DAY * 2).put(&t).await;
    let failed = Row::new(JobStatus::Failed).ended(&t, DAY * 3650).put(&t).await;
    let cancelled = Row::new(JobStatus::Cancelled).ended(&t, DAY * 3650).put(&t).await;
    let signal = t.signal(failed, Some(t.ago(DAY * 365))).await;
    let policy = Retention::custom().completed_after(DAY).failed_after(Duration::ZERO);
    tick(&t, &policy).await;
    assert_eq!(t.jobs().await, [failed, cancelled].into());
    tick(&t, &Retention::custom().failed_after(DAY * 9999)).await;
    assert_eq!((t.jobs().await, t.ids("select id from @signals").await), ([failed, cancelled].into(), [signal].into()));
    tick(&t, &Retention::custom().failed_after(DAY)).await;
    assert!(t.jobs().await.is_empty(), "the failed window takes cancelled jobs too");
    let _ = done;
}

async fn each_window_governs_its_own_kind(t: Store) {
    let waiting = Row::new(JobStatus::Waiting).put(&t).await;
    let signal = t.signal(waiting, Some(t.ago(DAY * 365))).await;
    let done = Row::completed().ended(&t, DAY * 365).put(&t).await;
    tick(&t, &Retention::custom().failed_after(DAY)).await;
    assert_eq!(t.jobs().await, [waiting, done].into());
    tick(&t, &Retention::custom().completed_after(DAY)).await;
    assert_eq!((t.jobs().await, t.ids("select id from @signals").await), ([waiting].into(), [signal].into()));
    tick(&t, &Retention::custom().consumed_signals_after(DAY)).await;
    assert_eq!((t.jobs().await.len(), t.number("select count(*) from @signals").await), (1, 0));
}

async fn a_window_before_all_time_stops_no_other(t: Store) {
    let done = Row::completed().ended(&t, DAY * 365).put(&t).await;
    Row::new(JobStatus::Failed).ended(&t, DAY * 365).put(&t).await;
    tick(&t, &Retention::stock().completed_after(Duration::MAX)).await;
    assert_eq!(t.jobs().await, [done].into());
}

async fn a_tick_goes_on_until_a_pass_is_short(t: Store) {
    for (rows, passes) in [(95, 10), (100, 11), (0, 1), (9, 1)] {
        for _ in 0..rows {
            Row::completed().ended(&t, DAY * 31).put(&t).await;
        }
        let report = tick(&t, &Retention::stock().batch_size(10)).await;
        let phase = report.phase("completed").unwrap();
        assert_eq!((phase.deleted, phase.steps), (rows, passes));
        assert!(t.jobs().await.is_empty());
    }
}

async fn queues_do_not_matter(t: Store) {
    t.exec("insert into @queue_states (queue, paused) values ('b', true)").await;
    for queue in ["a", "b"] {
        Row::completed().queue(queue).ended(&t, DAY * 31).put(&t).await;
    }
    tick(&t, &Retention::stock()).await;
    assert!(t.jobs().await.is_empty());
}

async fn a_cancelled_tick_starts_no_pass(t: Store) {
    let job = Row::completed().ended(&t, DAY * 31).put(&t).await;
    let cancel = CancellationToken::new();
    cancel.cancel();
    let report = retention::run_once(&*t.storage, &Retention::stock(), &cancel).await;
    assert!(report.phases().iter().all(|phase| phase.is_cancelled && phase.steps == 0));
    assert_eq!(t.jobs().await, [job].into());
}

async fn two_ticks_at_once_share_the_work(t: Store) {
    for _ in 0..60 {
        Row::completed().ended(&t, DAY * 31).put(&t).await;
    }
    let (other, policy) = (t.another(), Retention::stock().batch_size(7));
    let cancel = CancellationToken::new();
    let (one, two) = tokio::join!(
        retention::run_once(&*t.storage, &policy, &cancel),
        retention::run_once(&*other, &policy, &cancel)
    );
    assert!(one.first_error().is_none() && two.first_error().is_none());
    assert_eq!(one.deleted("completed") + two.deleted("completed"), 60);
    assert!(t.jobs().await.is_empty());
}

async fn the_window_sweep_is_independent_of_the_policy(t: Store) {
    let job = Row::completed().ended(&t, DAY * 3650).put(&t).await;
    t.window(job, &t.ago(DAY)).await;
    let cancel = CancellationToken::new();
    let off = retention::run_unique_locks_once(&*t.storage, &UniqueLockSweep::disabled(), &cancel).await;
    assert!(off.phases().is_empty());
    assert_eq!(t.number("select count(*) from @unique_locks").await, 1);
    tick(&t, &Retention::disabled()).await;
    let on = retention::run_unique_locks_once(&*t.storage, &UniqueLockSweep::stock(), &cancel).await;
    assert_eq!(on.deleted(EXPIRED_LOCKS), 1);
    assert_eq!(t.jobs().await, [job].into());
}

async fn the_window_sweep_drains(t: Store) {
    for _ in 0..25 {
        let job = Row::completed().put(&t).await;
        t.window(job, &t.ago(DAY)).await;
    }
    let policy = UniqueLockSweep::stock().batch_size(10);
    let report = retention::run_unique_locks_once(&*t.storage, &policy, &CancellationToken::new()).await;
    let phase = report.phase(EXPIRED_LOCKS).unwrap();
    assert_eq!((phase.deleted, phase.steps), (25, 3));
}

/// Bytes of the jobs on disk.
async fn size(t: &Store) -> i64 {
    match t.raw {
        Raw::Postgres { .. } => t.number("select pg_relation_size('@jobs')").await,
        Raw::Sqlite { .. } => t.number("pragma page_count").await,
    }
}

async fn the_space_of_deleted_jobs_is_used_again(t: Store) {
    let fill = async || {
        let jobs: Vec<NewJob> = (0..3000).map(|_| new_job("t", options())).collect();
        for batch in jobs.chunks(1000) {
            t.storage.enqueue_batch(batch).await.unwrap();
        }
        t.exec(&format!("update @jobs set status = 'completed', completed_at = {}", t.ago(DAY * 40))).await;
        // PostgreSQL counts what a session did once in a while.
        if matches!(t.raw, Raw::Postgres { .. }) {
            t.exec("select pg_stat_force_next_flush()").await;
        }
    };
    fill().await;
    let before = size(&t).await;
    assert_eq!(tick(&t, &Retention::stock()).await.deleted("completed"), 3000);
    t.storage.retention().unwrap().reclaim().await.unwrap();
    fill().await;
    let after = size(&t).await;
    assert!(after <= before + before / 10, "{before} before and {after} after");
}

cases!(
    the_space_of_deleted_jobs_is_used_again,
    the_stock_policy_takes_exactly_what_is_past_its_windows,
    a_policy_that_is_off_deletes_nothing_of_any_kind,
    windows_left_out_keep_their_kind,
    each_window_governs_its_own_kind,
    a_window_before_all_time_stops_no_other,
    a_tick_goes_on_until_a_pass_is_short,
    queues_do_not_matter,
    a_cancelled_tick_starts_no_pass,
    two_ticks_at_once_share_the_work,
    the_window_sweep_is_independent_of_the_policy,
    the_window_sweep_drains,
);
