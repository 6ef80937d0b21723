//! Signals and sleeps: what a job waits for, what wakes it, and what it gets.

use std::collections::BTreeSet;
use std::time::Duration;

use ebbtide_jobs::{Ctx, Error, JobId, JobStatus, PauseMode, TerminalStatus};
use tokio_util::sync::CancellationToken;

use crate::rig::{Effects, MS, Running, quick, run, send, until};
use crate::support::{DAY, SECOND, Store};

async fn a_job_waits_for_its_signal_and_takes_the_oldest(t: Store) {
    let queue = t.queue();
    queue
        .register("flow", |ctx: Ctx, (): ()| async move {
            let one: u64 = ctx.wait_signal("n").await?;
            let two: u64 = ctx.wait_signal("n").await?;
            Ok((one, two, ctx.attempt()))
        })
        .unwrap();
    let running = run(&queue);
    let id = send(&queue, "flow", &()).await;
    let job = t.becomes(id, JobStatus::Waiting).await;
    assert_eq!((job.waiting_signal_name.as_deref(), job.locked_by, job.run_at), (Some("n"), None, None));
    until("a waiting job occupies no worker", || async { running.worker.health().running == 0 }).await;
    for n in [1, 2] {
        queue.signal(id, "n", &n).await.unwrap();
    }
    t.becomes(id, JobStatus::Completed).await;
    assert_eq!(queue.result::<(u64, u64, u32)>(id).await.unwrap(), (1, 2, 1), "waking up is no new attempt");
    assert_eq!(t.number("select count(*) from @signals where consumed_at is not null").await, 2);
}

async fn a_signal_of_another_name_wakes_nobody_and_stays(t: Store) {
    let (queue, effects) = (t.queue(), Effects::default());
    let seen = effects.clone();
    queue
        .register("flow", move |ctx: Ctx, (): ()| {
            seen.add("run");
            async move { ctx.wait_signal::<String>("yes").await }
        })
        .unwrap();
    let _running = run(&queue);
    let id = send(&queue, "flow", &()).await;
    t.becomes(id, JobStatus::Waiting).await;
    queue.signal(id, "no", &"x").await.unwrap();
    let timers = t.storage.timers().unwrap();
    let (woken, last) = timers.wake_signalled(None, 10).await.unwrap();
    assert_eq!((woken.jobs, last), (0, None));
    assert_eq!(t.job(id).await.status, JobStatus::Waiting);
    queue.signal(id, "yes", &"y").await.unwrap();
    t.becomes(id, JobStatus::Completed).await;
    assert_eq!(effects.all().len(), 2);
    assert_eq!(t.text("select name from @signals where consumed_at is null").await.as_deref(), Some("no"));
}

async fn a_signal_sent_before_the_wait_is_there(t: Store) {
    let queue = t.queue();
    queue.register("flow", |ctx: Ctx, (): ()| async move { ctx.wait_signal::<u64>("n").await }).unwrap();
    let id = send(&queue, "flow", &()).await;
    queue.signal(id, "n", &7).await.unwrap();
    let _running = run(&queue);
    t.becomes(id, JobStatus::Completed).await;
    assert_eq!(queue.result::<u64>(id).await.unwrap(), 7);
}

/// Stored past the queue, as if the sender had died before the wake-up.
async fn a_signal_that_woke_nobody_is_found(t: Store) {
    let queue = t.queue();
    queue.register("flow", |ctx: Ctx, (): ()| async move { ctx.wait_signal::<u64>("n").await }).unwrap();
    let _running = run(&queue);
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(send(&queue, "flow", &()).await);
    }
    for id in &ids {
        t.becomes(*id, JobStatus::Waiting).await;
        t.storage.signals().unwrap().send(*id, "n", b"1").await.unwrap();
    }
    for id in ids {
        t.becomes(id, JobStatus::Completed).await;
    }
}

async fn names_and_sizes_of_signals_are_checked(t: Store) {
    let queue = t.queue();
    let id = queue.enqueue("t", &()).remote().send().await.unwrap().id();
    for name in ["", "_sleep", &"x".repeat(241), "a\0b"] {
        let refused = queue.signal(id, name, &1).await;
        assert!(matches!(refused, Err(Error::Invalid { field: "signal", .. })), "{name:?}");
    }
    let refused = queue.signal(id, "n", &"x".repeat(1 << 20)).await;
    assert!(matches!(refused, Err(Error::Invalid { field: "payload", .. })));
    let nobody = JobId::new();
    assert!(matches!(queue.signal(nobody, "n", &1).await, Err(Error::JobNotFound(id)) if id == nobody));
    assert_eq!(t.number("select count(*) from @signals").await, 0);
    t.set_status(id, JobStatus::Completed).await;
    queue.signal(id, "n", &1).await.unwrap();
    assert_eq!(t.number("select count(*) from @signals").await, 1, "one that has ended takes signals as well");
}

async fn a_wait_ends_at_its_deadline(t: Store) {
    let queue = t.queue();
    queue
        .register("flow", |ctx: Ctx, ms: u64| async move {
            let first: Option<u64> = ctx.wait_signal_timeout("n", Duration::from_millis(ms)).await?;
            let second: Option<u64> = ctx.wait_signal_timeout("m", Duration::ZERO).await?;
            Ok((first, second))
        })
        .unwrap();
    let _running = run(&queue);
    let late = send(&queue, "flow", &30).await;
    t.becomes(late, JobStatus::Completed).await;
    assert_eq!(queue.result::<(Option<u64>, Option<u64>)>(late).await.unwrap(), (None, None));
    let early = send(&queue, "flow", &86_400_000).await;
    let job = t.becomes(early, JobStatus::Waiting).await;
    assert_eq!(job.run_at.unwrap().duration_since(job.started_at.unwrap()).as_hours(), 24);
    queue.signal(early, "n", &1).await.unwrap();
    t.becomes(early, JobStatus::Completed).await;
    assert_eq!(queue.result::<(Option<u64>, Option<u64>)>(early).await.unwrap(), (Some(1), None));
}

/// What counts is when the signal was sent, not when the job comes to look.
async fn the_deadline_separates_signals_by_when_they_were_sent(t: Store) {
    let queue = t.queue();
    queue.register("flow", |ctx: Ctx, (): ()| async move { ctx.wait_signal_timeout::<u64>("n", DAY).await }).unwrap();
    let running = run(&queue);
    let (before, after) = (send(&queue, "flow", &()).await, send(&queue, "flow", &()).await);
    for id in [before, after] {
        t.becomes(id, JobStatus::Waiting).await;
    }
    running.stop().await;
    // The deadline moves into the past, by a second; the signals were sent a moment before and after it.
    let micros = match t.raw {
        crate::support::Raw::Postgres { .. } => {
            format!("convert_to(((extract(epoch from {}) * 1000000)::bigint)::text, 'UTF8')", t.ago(SECOND))
        }
        crate::support::Raw::Sqlite { .. } => format!("cast(cast({} as text) as blob)", t.ago(SECOND)),
    };
    t.exec(&format!("update @checkpoints set result = {micros}")).await;
    t.exec(&format!("update @jobs set run_at = {}", t.ago(SECOND))).await;
    for (id, ago) in [(before, 2 * SECOND), (after, Duration::ZERO)] {
        t.storage.signals().unwrap().send(id, "n", b"1").await.unwrap();
        t.exec(&format!("update @signals set created_at = {} where job_id = {}", t.ago(ago), t.id(id))).await;
    }
    let _running = run(&queue);
    for (id, seen) in [(before, Some(1)), (after, None)] {
        t.becomes(id, JobStatus::Completed).await;
        assert_eq!(queue.result::<Option<u64>>(id).await.unwrap(), seen);
    }
    let pending = t.ids("select job_id from @signals where consumed_at is null").await;
    assert_eq!(pending, BTreeSet::from([after]), "one that came too late stays pending");
}

async fn looks_and_drains_are_recorded(t: Store) {
    let (queue, effects) = (t.queue(), Effects::default());
    let seen = effects.clone();
    queue
        .register("flow", move |ctx: Ctx, (): ()| {
            let effects = seen.clone();
            async move {
                let peeked: Option<u64> = ctx.check_signal("n").await?;
                let drained: Vec<u64> = ctx.drain_signals("n").await?;
                let empty: Vec<u64> = ctx.drain_signals("n").await?;
                let none: Option<u64> = ctx.check_signal("n").await?;
                effects.add(format!("{peeked:?} {drained:?} {empty:?} {none:?}"));
                ctx.wait_signal::<()>("go").await
            }
        })
        .unwrap();
    let id = send(&queue, "flow", &()).await;
    for n in [1, 2, 3] {
        queue.signal(id, "n", &n).await.unwrap();
    }
    let _running = run(&queue);
    t.becomes(id, JobStatus::Waiting).await;
    // What comes now is for another drain: the replay sees what the first run saw.
    queue.signal(id, "n", &4).await.unwrap();
    queue.signal(id, "go", &()).await.unwrap();
    t.becomes(id, JobStatus::Completed).await;
    assert_eq!(effects.all(), vec!["Some(1) [1, 2, 3] [] None"; 2]);
    assert_eq!(t.number("select count(*) from @signals where consumed_at is null").await, 1);
}

/// Consumption writes the record with it, so that the consumed row may go while the job still waits for another one.
async fn a_consumed_signal_may_be_deleted_while_its_job_waits(t: Store) {
    let queue = t.queue();
    queue
        .register("flow", |ctx: Ctx, (): ()| async move {
            let a: String = ctx.wait_signal("a").await?;
            let b: String = ctx.wait_signal("b").await?;
            Ok(a + &b)
        })
        .unwrap();
    let _running = run(&queue);
    let id = send(&queue, "flow", &()).await;
    queue.signal(id, "a", &"first").await.unwrap();
    until("it waits for b", || async { t.job(id).await.waiting_signal_name.as_deref() == Some("b") }).await;
    t.exec(&format!("update @signals set consumed_at = {}", t.ago(8 * DAY))).await;
    let store = t.storage.signal_retention().unwrap();
    assert_eq!(store.delete_consumed_older_than(7 * DAY, 10).await.unwrap(), 1);
    queue.signal(id, "b", &"second").await.unwrap();
    t.becomes(id, JobStatus::Completed).await;
    assert_eq!(queue.result::<String>(id).await.unwrap(), "firstsecond");
}

async fn a_paused_job_is_not_woken(t: Store) {
    let queue = t.queue();
    queue.register("flow", |ctx: Ctx, (): ()| async move { ctx.wait_signal::<u64>("n").await }).unwrap();
    let _running = run(&queue);
    let id = send(&queue, "flow", &()).await;
    t.becomes(id, JobStatus::Waiting).await;
    queue.job(id).pause(PauseMode::Graceful).await.unwrap();
    queue.signal(id, "n", &1).await.unwrap();
    let timers = t.storage.timers().unwrap();
    assert_eq!(timers.wake_signalled(None, 10).await.unwrap().0.jobs, 0);
    assert!(queue.job(id).is_paused().await.unwrap());
    queue.job(id).resume().await.unwrap();
    t.becomes(id, JobStatus::Completed).await;
}

async fn a_lost_claim_consumes_and_records_nothing(t: Store) {
    let claim = t.running("w").await;
    let signals = t.storage.signals().unwrap();
    signals.send(claim.job_id, "n", b"1").await.unwrap();
    t.storage.release(&claim).await.unwrap();
    let refused = |what: &str, error: Error| assert!(matches!(error, Error::JobNotOwned(_)), "{what}: {error}");
    refused("receive", signals.receive(&claim, 0, "n", None).await.unwrap_err());
    refused("timed", signals.receive(&claim, 0, "n", Some(Duration::ZERO)).await.unwrap_err());
    refused("drain", signals.drain(&claim, 0, "n").await.unwrap_err());
    let timers = t.storage.timers().unwrap();
    refused("sleep", timers.sleep(&claim, 0, ebbtide_jobs::Until::After(SECOND)).await.unwrap_err());
    let store = t.storage.checkpoints().unwrap();
    refused("forget", store.forget(&claim, 0, "n").await.unwrap_err());
    assert_eq!(t.number("select count(*) from @signals where consumed_at is null").await, 1);
    assert_eq!((t.count_checkpoints(claim.job_id).await, t.job(claim.job_id).await.status), (0, JobStatus::Pending));
}

/// Signals that race with a pass over the same finished jobs: each is refused, or goes with its job.
async fn a_signal_never_outlives_its_job(t: Store) {
    for _ in 0..10 {
        let mut ids = Vec::new();
        for _ in 0..8 {
            ids.push(crate::rows::Row::completed().ended(&t, 40 * DAY).put(&t).await);
        }
        let (storage, other) = (t.storage.clone(), t.another());
        let passes = tokio::spawn(async move {
            let store = storage.retention().unwrap();
            let mut deleted = 0;
            while deleted < 8 {
                deleted += store.delete_terminal_older_than(TerminalStatus::Completed, 30 * DAY, 3).await.unwrap();
            }
        });
        let sends = tokio::spawn(async move {
            for id in ids {
                for _ in 0..3 {
                    match other.signals().unwrap().send(id, "n", b"1").await {
                        Ok(()) | Err(Error::JobNotFound(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        });
        passes.await.unwrap();
        sends.await.unwrap();
        assert_eq!(t.orphans().await, 0);
    }
}

async fn a_sleeping_job_wakes_on_time_and_no_signal_wakes_it(t: Store) {
    let (queue, effects) = (t.queue(), Effects::default());
    let seen = effects.clone();
    queue
        .register("flow", move |ctx: Ctx, ms: u64| {
            seen.add("run");
            async move {
                ctx.sleep(Duration::ZERO).await?;
                ctx.sleep(Duration::from_millis(ms)).await?;
                ctx.sleep_until(ctx.job().created_at).await?;
                Ok(ctx.attempt())
            }
        })
        .unwrap();
    let _running = run(&queue);
    let short = send(&queue, "flow", &30).await;
    t.becomes(short, JobStatus::Completed).await;
    assert_eq!((queue.result::<u32>(short).await.unwrap(), effects.all().len()), (1, 2));
    let long = send(&queue, "flow", &86_400_000).await;
    let job = t.becomes(long, JobStatus::Waiting).await;
    assert!(job.run_at.unwrap() > job.updated_at);
    queue.signal(long, "n", &1).await.unwrap();
    let timers = t.storage.timers().unwrap();
    timers.wake_due(10).await.unwrap();
    timers.wake_signalled(None, 10).await.unwrap();
    assert_eq!(t.job(long).await.status, JobStatus::Waiting);
    t.exec(&format!("update @jobs set run_at = {} where id = {}", t.ago(SECOND), t.id(long))).await;
    assert!(timers.wake_due(10).await.unwrap().jobs <= 1, "this look or the worker's");
    until("it slept on", || async { effects.all().len() == 4 }).await;
    let job = t.becomes(long, JobStatus::Waiting).await;
    assert!(job.run_at.unwrap() > job.updated_at, "the recorded deadline counts, whatever woke it");
}

async fn a_plain_wait_after_a_timed_one_has_no_deadline(t: Store) {
    let queue = t.queue();
    queue
        .register("flow", |ctx: Ctx, (): ()| async move {
            ctx.wait_signal_timeout::<u64>("n", Duration::from_millis(20)).await?;
            ctx.wait_signal::<u64>("m").await
        })
        .unwrap();
    let _running = run(&queue);
    let id = send(&queue, "flow", &()).await;
    until("it waits for m", || async { t.job(id).await.waiting_signal_name.as_deref() == Some("m") }).await;
    assert_eq!(t.job(id).await.run_at, None);
}

/// A job whose handler swallows the suspension waits all the same.
async fn a_swallowed_suspension_is_one(t: Store) {
    let queue = t.queue();
    queue
        .register("flow", |ctx: Ctx, (): ()| async move {
            let waited = ctx.wait_signal::<u64>("n").await;
            Ok(waited.unwrap_or(0))
        })
        .unwrap();
    let _running = run(&queue);
    let id = send(&queue, "flow", &()).await;
    t.becomes(id, JobStatus::Waiting).await;
    queue.signal(id, "n", &5).await.unwrap();
    t.becomes(id, JobStatus::Completed).await;
    assert_eq!(queue.result::<u64>(id).await.unwrap(), 5);
}

async fn looks_for_waiting_jobs_go_on_where_they_ended(t: Store) {
    let mut ids = Vec::new();
    for _ in 0..5 {
        let claim = t.running("w").await;
        let received = t.storage.signals().unwrap().receive(&claim, 0, "n", None).await.unwrap();
        assert_eq!(received, ebbtide_jobs::Received::Suspended);
        ids.push(claim.job_id);
    }
    let last = ids[4];
    t.storage.signals().unwrap().send(last, "n", b"1").await.unwrap();
    let timers = t.storage.timers().unwrap();
    let (woken, after) = timers.wake_signalled(None, 3).await.unwrap();
    assert_eq!((woken.jobs, after), (0, Some(ids[2])));
    let (woken, after) = timers.wake_signalled(after, 3).await.unwrap();
    assert_eq!((woken.jobs, woken.queues.len(), after), (1, 1, None));
    assert_eq!(t.job(last).await.status, JobStatus::Pending);
}

/// Two workers, one job, many signals: each is consumed once and none is lost on the way to sleep.
async fn signals_sent_while_the_job_goes_to_sleep_are_not_lost(t: Store) {
    let queue = t.queue();
    queue
        .register("sum", |ctx: Ctx, count: u64| async move {
            let mut sum = 0;
            for _ in 0..count {
                sum += ctx.wait_signal::<u64>("n").await?;
            }
            Ok(sum)
        })
        .unwrap();
    // Looks for waiting jobs are left to the sender's wake-up.
    let worker = || quick(&queue).ready_promote_interval(DAY).build().unwrap();
    let _two = (Running::start(worker()), Running::start(worker()));
    let id = send(&queue, "sum", &30).await;
    for n in 1..=30 {
        queue.signal(id, "n", &n).await.unwrap();
        if n % 3 == 0 {
            ebbtide_sweep::pause(2 * MS, &CancellationToken::new()).await;
        }
    }
    t.becomes(id, JobStatus::Completed).await;
    assert_eq!(queue.result::<u64>(id).await.unwrap(), 465);
}

cases!(
    a_job_waits_for_its_signal_and_takes_the_oldest,
    a_signal_of_another_name_wakes_nobody_and_stays,
    a_signal_sent_before_the_wait_is_there,
    a_signal_that_woke_nobody_is_found,
    names_and_sizes_of_signals_are_checked,
    a_wait_ends_at_its_deadline,
    the_deadline_separates_signals_by_when_they_were_sent,
    looks_and_drains_are_recorded,
    a_consumed_signal_may_be_deleted_while_its_job_waits,
    a_paused_job_is_not_woken,
    a_lost_claim_consumes_and_records_nothing,
    a_signal_never_outlives_its_job,
    a_sleeping_job_wakes_on_time_and_no_signal_wakes_it,
    a_plain_wait_after_a_timed_one_has_no_deadline,
    a_swallowed_suspension_is_one,
    looks_for_waiting_jobs_go_on_where_they_ended,
    signals_sent_while_the_job_goes_to_sleep_are_not_lost,
);
