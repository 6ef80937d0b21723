//! What keeps a finished job past its window, and that it hides nothing behind it.

use std::time::Duration;

use ebbtide_jobs::{EnqueueOptions, Enqueued, JobId, JobStatus, TerminalStatus};

use crate::rows::Row;
use crate::support::{DAY, Raw, SECOND, Store, new_job, options};

const LIVE: [JobStatus; 5] =
    [JobStatus::Pending, JobStatus::Running, JobStatus::Waiting, JobStatus::Paused, JobStatus::Retrying];

async fn pass(t: &Store, status: TerminalStatus) -> u64 {
    t.storage.retention().unwrap().delete_terminal_older_than(status, DAY * 30, 10).await.unwrap()
}

async fn old(t: &Store) -> JobId {
    Row::completed().ended(t, DAY * 31).put(t).await
}

async fn an_unfinished_child_keeps_its_parent(t: Store) {
    let parent = old(&t).await;
    let child = Row::new(JobStatus::Pending).parent(parent).put(&t).await;
    for status in LIVE {
        t.set_status(child, status).await;
        assert_eq!(pass(&t, TerminalStatus::Completed).await, 0, "{status}");
    }
    t.set_status(child, JobStatus::Cancelled).await;
    assert_eq!(pass(&t, TerminalStatus::Completed).await, 1, "a finished child does not");
    assert_eq!(t.jobs().await, [child].into(), "and outlives it, its parent gone");
}

async fn an_unfinished_descendant_keeps_its_root(t: Store) {
    let root = old(&t).await;
    let descendant = Row::new(JobStatus::Pending).root(root).put(&t).await;
    for status in LIVE {
        t.set_status(descendant, status).await;
        assert_eq!(pass(&t, TerminalStatus::Completed).await, 0, "{status}");
    }
    t.set_status(descendant, JobStatus::Failed).await;
    assert_eq!(pass(&t, TerminalStatus::Completed).await, 1);
}

async fn an_undecided_fan_out_keeps_its_parent(t: Store) {
    let parent = old(&t).await;
    t.fan_out(parent, "completed").await;
    let open = t.fan_out(parent, "pending").await;
    assert_eq!(pass(&t, TerminalStatus::Completed).await, 0);
    t.exec(&format!("update @fan_outs set status = 'failed' where id = {}", t.id(open))).await;
    assert_eq!(pass(&t, TerminalStatus::Completed).await, 1);
    assert_eq!(t.orphans().await, 0);
}

async fn a_child_stays_until_its_parent_has_collected_it(t: Store) {
    let parent = Row::new(JobStatus::Waiting).put(&t).await;
    let fan_out = t.fan_out(parent, "completed").await;
    let child = Row::completed().ended(&t, DAY * 31).parent(parent).fan_out(fan_out).put(&t).await;
    for status in LIVE {
        t.set_status(parent, status).await;
        assert_eq!(pass(&t, TerminalStatus::Completed).await, 0, "{status}");
    }
    t.set_status(parent, JobStatus::Failed).await;
    assert_eq!(pass(&t, TerminalStatus::Completed).await, 1);
    assert_eq!(t.jobs().await, [parent].into());
    let _ = child;
}

async fn a_child_without_its_parent_goes(t: Store) {
    Row::completed().ended(&t, DAY * 31).parent(JobId::new()).fan_out(JobId::new()).put(&t).await;
    assert_eq!(pass(&t, TerminalStatus::Completed).await, 1);
}

async fn a_child_outside_a_fan_out_does_not_wait_for_its_parent(t: Store) {
    let parent = Row::new(JobStatus::Waiting).put(&t).await;
    Row::completed().ended(&t, DAY * 31).parent(parent).put(&t).await;
    assert_eq!(pass(&t, TerminalStatus::Completed).await, 1);
    assert_eq!(t.jobs().await, [parent].into());
}

async fn a_live_window_keeps_its_job_however_that_ended(t: Store) {
    for status in TerminalStatus::ALL {
        let job = Row::new(status.status()).ended(&t, DAY * 3650).put(&t).await;
        t.window(job, &t.ahead(SECOND * 60)).await;
        assert_eq!(pass(&t, status).await, 0, "{status:?}");
        t.exec(&format!("update @unique_locks set expires_at = {} where job_id = {}", t.ago(SECOND), t.id(job))).await;
        assert_eq!(pass(&t, status).await, 1, "{status:?}");
    }
    assert_eq!((t.jobs().await.len(), t.number("select count(*) from @unique_locks").await), (0, 0));
}

async fn a_job_goes_after_the_later_of_window_and_lock(t: Store) {
    // The lock ended a while ago, the window did not: it stays.
    let young = Row::completed().ended(&t, DAY * 29).put(&t).await;
    t.window(young, &t.ago(DAY * 2)).await;
    // The window ended long ago, the lock does so soon: no sum and no maximum of the two lengths.
    let locked = Row::completed().ended(&t, DAY * 60).put(&t).await;
    t.window(locked, &t.ahead(SECOND * 60)).await;
    // Both are over.
    let over = Row::completed().ended(&t, DAY * 31).put(&t).await;
    t.window(over, &t.ago(SECOND)).await;
    assert_eq!(pass(&t, TerminalStatus::Completed).await, 1);
    assert_eq!(t.jobs().await, [young, locked].into());
    assert_eq!(t.ids("select job_id from @unique_locks").await, [young, locked].into());
}

fn keyed(window: Duration) -> EnqueueOptions {
    options().idempotency_key("invoice-42", window)
}

async fn a_replay_within_the_window_finds_its_first_job(t: Store) {
    let windows = t.storage.windowed_enqueue().unwrap();
    let first = windows.enqueue_windowed(&new_job("t", keyed(DAY * 90))).await.unwrap().id();
    t.exec(&format!("update @jobs set status = 'completed', completed_at = {}", t.ago(DAY * 31))).await;
    assert_eq!(pass(&t, TerminalStatus::Completed).await, 0);
    assert_eq!(windows.enqueue_windowed(&new_job("t", keyed(DAY))).await.unwrap(), Enqueued::Duplicate(first));
    assert_eq!(t.jobs().await, [first].into());

    // The window was given a length, which the duplicate did not change.
    t.exec(&format!("update @unique_locks set expires_at = {}", t.ago(Duration::ZERO))).await;
    assert_eq!(pass(&t, TerminalStatus::Completed).await, 1);
    assert_eq!(t.number("select count(*) from @unique_locks").await, 0, "both went in one pass");
    assert!(windows.enqueue_windowed(&new_job("t", keyed(DAY))).await.unwrap().is_new());
}

async fn every_way_of_writing_a_window_pins(t: Store) {
    let windows = t.storage.windowed_enqueue().unwrap();
    let by_key = windows.enqueue_windowed(&new_job("t", keyed(DAY))).await.unwrap().id();
    let by_args = windows.enqueue_windowed(&new_job("t", options().unique_for(DAY))).await.unwrap().id();
    t.exec(&format!("update @jobs set status = 'completed', completed_at = {}", t.ago(DAY * 60))).await;
    let raw = old(&t).await;
    let expires_at = match t.raw {
        // The same instant in another zone.
        Raw::Postgres { .. } => "timestamptz '2999-01-01 05:30:00+05:30'",
        Raw::Sqlite { .. } => "32472144000000000",
    };
    t.window(raw, expires_at).await;
    assert_eq!(pass(&t, TerminalStatus::Completed).await, 0);
    assert_eq!(t.jobs().await, [by_key, by_args, raw].into());
}

async fn a_window_taken_over_no_longer_keeps_the_first_job(t: Store) {
    let windows = t.storage.windowed_enqueue().unwrap();
    let first = windows.enqueue_windowed(&new_job("t", keyed(DAY))).await.unwrap().id();
    t.exec(&format!("update @jobs set status = 'failed', completed_at = {}", t.ago(DAY * 60))).await;
    assert_eq!(pass(&t, TerminalStatus::Failed).await, 0);
    let second = windows.enqueue_windowed(&new_job("t", keyed(DAY).take_over_failed())).await.unwrap().id();
    assert_eq!(pass(&t, TerminalStatus::Failed).await, 1);
    assert_eq!(t.jobs().await, [second].into());
    let _ = first;
}

async fn a_full_batch_of_protected_jobs_hides_nothing(t: Store) {
    for _ in 0..10 {
        let kept = Row::completed().ended(&t, DAY * 99).put(&t).await;
        t.window(kept, &t.ahead(DAY)).await;
    }
    for _ in 0..5 {
        old(&t).await;
    }
    assert_eq!(pass(&t, TerminalStatus::Completed).await, 5);
    assert_eq!(t.jobs().await.len(), 10);
}

cases!(
    an_unfinished_child_keeps_its_parent,
    an_unfinished_descendant_keeps_its_root,
    an_undecided_fan_out_keeps_its_parent,
    a_child_stays_until_its_parent_has_collected_it,
    a_child_without_its_parent_goes,
    a_child_outside_a_fan_out_does_not_wait_for_its_parent,
    a_live_window_keeps_its_job_however_that_ended,
    a_job_goes_after_the_later_of_window_and_lock,
    a_replay_within_the_window_finds_its_first_job,
    every_way_of_writing_a_window_pins,
    a_window_taken_over_no_longer_keeps_the_first_job,
    a_full_batch_of_protected_jobs_hides_nothing,
);

/// A text is no time for SQLite's tables, so that none can compare wrongly.
#[tokio::test]
async fn a_window_written_as_text_is_refused() {
    let t = Store::sqlite().await;
    let job = old(&t).await;
    let values = format!("'x', {}, '2999-01-01T00:00:00+05:30'", t.id(job));
    let insert = format!("insert into @unique_locks (scope_hash, job_id, expires_at) values ({values})");
    assert!(t.try_exec(&insert).await.is_err());
}
