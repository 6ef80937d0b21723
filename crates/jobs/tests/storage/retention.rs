//! One pass of retention: which rows are old enough, how many go, and what goes with them.

use std::collections::BTreeSet;
use std::time::Duration;

use ebbtide_jobs::{DeadLetterReason, Failure, JobStatus, TerminalStatus};
use jiff::Timestamp;

use crate::rows::Row;
use crate::support::{DAY, Raw, SECOND, Store, options};

async fn pass(t: &Store, status: TerminalStatus, age: Duration, limit: u32) -> u64 {
    t.storage.retention().unwrap().delete_terminal_older_than(status, age, limit).await.unwrap()
}

async fn pass_signals(t: &Store, age: Duration, limit: u32) -> u64 {
    t.storage.signal_retention().unwrap().delete_consumed_older_than(age, limit).await.unwrap()
}

const CUTOFF: &str = "2024-02-29T12:00:00.000001Z";

/// That many microseconds from the cutoff.
fn at(t: &Store, micros: i64) -> String {
    let cutoff: Timestamp = CUTOFF.parse().unwrap();
    match t.raw {
        Raw::Postgres { .. } => format!("timestamptz '{CUTOFF}' + interval '{micros} microseconds'"),
        Raw::Sqlite { .. } => (cutoff.as_microsecond() + micros).to_string(),
    }
}

async fn a_job_that_ended_at_the_cutoff_stays(t: Store) {
    let cutoff: Timestamp = CUTOFF.parse().unwrap();
    for status in TerminalStatus::ALL {
        let row = |micros| Row::new(status.status()).ended_at(at(&t, micros));
        let (_before, equal, after) = (row(-1).put(&t).await, row(0).put(&t).await, row(1).put(&t).await);
        let store = t.storage.retention().unwrap();
        assert_eq!(store.delete_terminal_before(status, cutoff, 10).await.unwrap(), 1);
        assert_eq!(
            t.ids(&format!("select id from @jobs where status = '{}'", status.as_str())).await,
            [equal, after].into()
        );
    }
}

async fn a_signal_consumed_at_the_cutoff_stays(t: Store) {
    let job = Row::new(JobStatus::Waiting).put(&t).await;
    t.signal(job, Some(at(&t, -1))).await;
    let kept = [t.signal(job, Some(at(&t, 0))).await, t.signal(job, Some(at(&t, 1))).await];
    let store = t.storage.signal_retention().unwrap();
    assert_eq!(store.delete_consumed_before(CUTOFF.parse().unwrap(), 10).await.unwrap(), 1);
    assert_eq!(t.ids("select id from @signals").await, kept.into());
}

async fn age_counts_from_the_end_alone(t: Store) {
    let young = Row::completed().ended(&t, DAY * 29).put(&t).await;
    let _old = Row::completed().ended(&t, DAY * 31).put(&t).await;
    assert_eq!(pass(&t, TerminalStatus::Completed, DAY * 30, 10).await, 1);
    assert_eq!(t.jobs().await, [young].into());
}

async fn a_job_without_an_end_is_never_old(t: Store) {
    let kept: BTreeSet<_> = [
        Row::completed().put(&t).await,
        Row::new(JobStatus::Failed).put(&t).await,
        Row::new(JobStatus::Cancelled).put(&t).await,
    ]
    .into();
    for status in TerminalStatus::ALL {
        assert_eq!(pass(&t, status, SECOND, 10).await, 0);
    }
    assert_eq!(t.jobs().await, kept);
}

async fn only_the_asked_status_goes_and_never_an_unfinished_one(t: Store) {
    for status in JobStatus::ALL {
        Row::new(status).ended(&t, DAY * 3650).put(&t).await;
    }
    for status in TerminalStatus::ALL {
        assert_eq!(pass(&t, status, DAY, 10).await, 1, "{status:?}");
        let left = t.number(&format!("select count(*) from @jobs where status = '{}'", status.as_str())).await;
        assert_eq!(left, 0);
    }
    assert_eq!(t.jobs().await.len(), 5);
}

async fn no_age_or_no_limit_deletes_nothing(t: Store) {
    let job = Row::completed().ended(&t, DAY * 3650).put(&t).await;
    let signal = t.signal(job, Some(t.ago(DAY * 3650))).await;
    for (age, limit) in [(Duration::ZERO, 10), (DAY, 0), (Duration::MAX, 10), (DAY * 365 * 7000, 10)] {
        for status in TerminalStatus::ALL {
            assert_eq!(pass(&t, status, age, limit).await, 0, "{age:?} {limit}");
        }
        assert_eq!(pass_signals(&t, age, limit).await, 0, "{age:?} {limit}");
    }
    assert_eq!(t.storage.unique_locks().unwrap().delete_expired(0).await.unwrap(), 0);
    assert_eq!((t.jobs().await, t.ids("select id from @signals").await), ([job].into(), [signal].into()));
}

async fn the_longest_window_still_runs(t: Store) {
    Row::completed().ended(&t, DAY).put(&t).await;
    assert_eq!(pass(&t, TerminalStatus::Completed, ebbtide_jobs::limits::WINDOW_MAX, 10).await, 0);
    assert_eq!(pass_signals(&t, ebbtide_jobs::limits::WINDOW_MAX, 10).await, 0);
    assert_eq!(t.jobs().await.len(), 1);
}

async fn the_oldest_go_first_and_no_more_than_the_limit(t: Store) {
    let mut rows = Vec::new();
    for days in [40, 60, 50, 90, 70] {
        rows.push((days, Row::completed().ended(&t, DAY * days).put(&t).await));
    }
    rows.sort();
    assert_eq!(pass(&t, TerminalStatus::Completed, DAY * 30, 3).await, 3);
    assert_eq!(t.jobs().await, [rows[0].1, rows[1].1].into());
    assert_eq!(pass(&t, TerminalStatus::Completed, DAY * 30, 3).await, 2);
    assert_eq!(pass(&t, TerminalStatus::Completed, DAY * 30, 3).await, 0);
}

async fn a_pass_may_be_larger_than_a_statement(t: Store) {
    let times = format!("{}, {}", t.ago(DAY * 40), t.ago(DAY * 41));
    let ten = "(select 0 as n union select 1 union select 2 union select 3 union select 4 union select 5
                union select 6 union select 7 union select 8 union select 9)";
    t.exec(&format!(
        "insert into @jobs (type, status, completed_at, created_at)
         select 'row', 'completed', {times} from {ten} a, {ten} b, {ten} c, {ten} d"
    ))
    .await;
    t.exec("insert into @checkpoints (job_id, call_index, call_type) select id, 0, 'step' from @jobs").await;
    assert_eq!(pass(&t, TerminalStatus::Completed, DAY * 30, 10_000).await, 10_000);
    assert_eq!((t.jobs().await.len(), t.orphans().await), (0, 0));
}

async fn everything_that_hangs_off_the_job_goes_with_it(t: Store) {
    let gone = Row::completed().ended(&t, DAY * 31).put(&t).await;
    let kept = Row::completed().ended(&t, DAY * 29).put(&t).await;
    for job in [gone, kept] {
        t.checkpoints(job, 2).await;
        t.signal(job, None).await;
        t.signal(job, Some(t.ago(SECOND))).await;
        t.window(job, &t.ago(SECOND)).await;
        t.fan_out(job, "completed").await;
    }
    assert_eq!(pass(&t, TerminalStatus::Completed, DAY * 30, 10).await, 1, "only jobs count");
    assert_eq!((t.jobs().await, t.orphans().await), ([kept].into(), 0));
    for (table, left) in [("checkpoints", 2), ("signals", 2), ("unique_locks", 1), ("fan_outs", 1)] {
        assert_eq!(t.number(&format!("select count(*) from @{table}")).await, left, "{table}");
    }
}

async fn nothing_else_is_touched(t: Store) {
    t.exec("insert into @queue_states (queue, paused) values ('default', true)").await;
    t.exec(&format!("insert into @scheduled_fires (name, last_fire_at) values ('s', {})", t.ago(DAY * 999))).await;
    t.exec(&format!("insert into @leases (name, owner, expires_at) values ('l', 'o', {})", t.ago(DAY * 999))).await;
    let job = Row::completed().queue("default").ended(&t, DAY * 999).put(&t).await;
    let slot = format!("'c', {}, 'w', {}", t.id(job), t.ago(DAY * 999));
    t.exec(&format!("insert into @concurrency_slots (slot_name, job_id, worker_id, expires_at) values ({slot})")).await;
    let window = t.ago(DAY * 999);
    t.exec(&format!("insert into @rate_limit_windows (limit_name, window_start) values ('r', {window})")).await;
    t.exec(&format!("insert into @job_stats (queue, \"timestamp\") values ('q', {window})")).await;
    assert_eq!(pass(&t, TerminalStatus::Completed, DAY, 10).await, 1);
    for table in ["queue_states", "scheduled_fires", "leases", "concurrency_slots", "rate_limit_windows", "job_stats"] {
        assert_eq!(t.number(&format!("select count(*) from @{table}")).await, 1, "{table}");
    }
}

async fn pending_signals_are_never_old(t: Store) {
    let job = Row::new(JobStatus::Waiting).put(&t).await;
    let pending = t.signal(job, None).await;
    let young = t.signal(job, Some(t.ago(DAY * 7 - SECOND))).await;
    t.signal(job, Some(t.ago(DAY * 7 + SECOND))).await;
    assert_eq!(pass_signals(&t, DAY * 7, 10).await, 1, "the status of the job does not matter");
    assert_eq!(t.ids("select id from @signals").await, [pending, young].into());
}

async fn consumed_signals_go_oldest_first_within_the_limit(t: Store) {
    let job = Row::new(JobStatus::Waiting).put(&t).await;
    let mut signals = Vec::new();
    for days in [8, 20, 12] {
        signals.push((days, t.signal(job, Some(t.ago(DAY * days))).await));
    }
    assert_eq!(pass_signals(&t, DAY * 7, 2).await, 2);
    assert_eq!(t.ids("select id from @signals").await, [signals[0].1].into());
}

/// Every way in which this crate ends a job, from which its age is then counted.
async fn every_end_is_stamped_by_the_database(t: Store) {
    let done = t.running("w").await;
    t.storage.complete(&ebbtide_jobs::Completion::new(done.clone(), None).unwrap()).await.unwrap();
    let failed = t.running("w").await;
    t.storage.fail(&failed, &Failure::new("x"), DeadLetterReason::NotRetryable).await.unwrap();
    t.enqueue("t", options().retries(0)).await;
    t.claim("w", 1).await;
    t.exec(&format!("update @jobs set started_at = {} where status = 'running'", t.ago(DAY))).await;
    t.storage.reclaim(&ebbtide_jobs::Reclaim::older_than(SECOND).margin(0)).await.unwrap();
    assert_eq!(t.number("select count(*) from @jobs where status in ('completed', 'failed')").await, 3);
    let unstamped = format!("completed_at is null or completed_at > {} or completed_at < created_at", t.ahead(SECOND));
    assert_eq!(t.number(&format!("select count(*) from @jobs where {unstamped}")).await, 0);
}

async fn two_passes_at_once_delete_each_row_once(t: Store) {
    for _ in 0..40 {
        Row::completed().ended(&t, DAY * 31).put(&t).await;
    }
    let other = t.another();
    let passes: Vec<_> = [t.storage.clone(), other]
        .into_iter()
        .map(|storage| {
            tokio::spawn(async move {
                let store = storage.retention().unwrap();
                let mut deleted = 0;
                for _ in 0..12 {
                    deleted += store.delete_terminal_older_than(TerminalStatus::Completed, DAY, 4).await.unwrap();
                }
                deleted
            })
        })
        .collect();
    let mut deleted = 0;
    for pass in passes {
        deleted += pass.await.unwrap();
    }
    assert_eq!((deleted, t.jobs().await.len()), (40, 0));
}

async fn the_window_sweep_takes_what_has_passed_and_no_job(t: Store) {
    let job = Row::completed().ended(&t, DAY * 400).put(&t).await;
    let others = [Row::completed().put(&t).await, Row::completed().put(&t).await, Row::completed().put(&t).await];
    t.window(job, &t.ahead(DAY)).await;
    for (days, other) in [5, 3, 9].into_iter().zip(others) {
        t.window(other, &t.ago(DAY * days)).await;
    }
    let locks = t.storage.unique_locks().unwrap();
    assert_eq!(locks.delete_expired(2).await.unwrap(), 2);
    assert_eq!(t.ids("select job_id from @unique_locks").await, [job, others[1]].into(), "the longest past first");
    assert_eq!(locks.delete_expired(2).await.unwrap(), 1);
    assert_eq!(locks.delete_expired(2).await.unwrap(), 0);
    assert_eq!(t.ids("select job_id from @unique_locks").await, [job].into());
    assert_eq!(t.jobs().await.len(), 4);
}

cases!(
    a_job_that_ended_at_the_cutoff_stays,
    a_signal_consumed_at_the_cutoff_stays,
    age_counts_from_the_end_alone,
    a_job_without_an_end_is_never_old,
    only_the_asked_status_goes_and_never_an_unfinished_one,
    no_age_or_no_limit_deletes_nothing,
    the_longest_window_still_runs,
    the_oldest_go_first_and_no_more_than_the_limit,
    a_pass_may_be_larger_than_a_statement,
    everything_that_hangs_off_the_job_goes_with_it,
    nothing_else_is_touched,
    pending_signals_are_never_old,
    consumed_signals_go_oldest_first_within_the_limit,
    every_end_is_stamped_by_the_database,
    two_passes_at_once_delete_each_row_once,
    the_window_sweep_takes_what_has_passed_and_no_job,
);
