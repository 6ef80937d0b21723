//! Claims that were lost: cancelled, deleted, taken by somebody else, or left behind by a dead worker.

use std::sync::Arc;
use std::time::Duration;

use ebbtide_jobs::{Claim, JobError, JobId, JobStatus, PauseMode, WorkerId};
use tokio::sync::Notify;

use crate::rig::{Effects, MS, Running, quick, run, send, until};
use crate::support::{DAY, SECOND, Store};

/// Tells when a handler was dropped before its end.
struct Dropped(Effects);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.add("stopped");
    }
}

fn hanging(t: &Store, effects: &Effects) -> ebbtide_jobs::Queue {
    let queue = t.queue();
    let seen = effects.clone();
    queue
        .register("hangs", move |_, (): ()| {
            let watch = Dropped(seen.clone());
            async move {
                let _watch = watch;
                std::future::pending::<Result<(), JobError>>().await
            }
        })
        .unwrap();
    queue
}

async fn a_cancelled_job_stops_its_handler(t: Store) {
    let effects = Effects::default();
    let queue = hanging(&t, &effects);
    let running = run(&queue);
    let id = send(&queue, "hangs", &()).await;
    t.becomes(id, JobStatus::Running).await;
    assert_eq!(queue.job(id).cancel().await.unwrap(), 1);
    until("the handler is stopped", || async { effects.count("stopped") == 1 }).await;
    until("the run is let go", || async { running.worker.health().running == 0 }).await;
    assert_eq!(t.job(id).await.status, JobStatus::Cancelled);

    let id = send(&queue, "hangs", &()).await;
    t.becomes(id, JobStatus::Running).await;
    queue.job(id).pause(PauseMode::Aggressive).await.unwrap();
    until("the handler is stopped", || async { effects.count("stopped") == 2 }).await;
    assert_eq!(t.job(id).await.status, JobStatus::Cancelled);

    let id = send(&queue, "hangs", &()).await;
    t.becomes(id, JobStatus::Running).await;
    queue.delete_job(id).await.unwrap();
    until("the handler is stopped", || async { effects.count("stopped") == 3 }).await;
}

async fn heartbeats_stop_a_run_that_is_not_owned_and_keep_one_that_is(t: Store) {
    let effects = Effects::default();
    let queue = hanging(&t, &effects);
    let builder = quick(&queue).ownership_audit_interval(Duration::ZERO).stale_lock_age(600 * MS);
    let _running = Running::start(builder.build().unwrap());
    let id = send(&queue, "hangs", &()).await;
    until("a heartbeat", || async { t.job(id).await.last_heartbeat_at.is_some() }).await;
    let first = t.job(id).await.last_heartbeat_at;
    until("another one", || async { t.job(id).await.last_heartbeat_at > first }).await;
    assert_eq!(effects.count("stopped"), 0);
    queue.job(id).cancel().await.unwrap();
    until("the handler is stopped", || async { effects.count("stopped") == 1 }).await;
}

async fn the_job_of_a_dead_worker_is_run_by_another(t: Store) {
    let queue = t.queue();
    queue.register("t", |ctx: ebbtide_jobs::Ctx, (): ()| async move { Ok(ctx.attempt()) }).unwrap();
    let id = send(&queue, "t", &()).await;
    assert_eq!(t.claim("dead", 1).await.len(), 1);
    t.exec(&format!("update @jobs set started_at = {}", t.ago(DAY))).await;
    let mut events = queue.events();
    let _running = run(&queue);
    t.becomes(id, JobStatus::Completed).await;
    assert_eq!(queue.result::<u32>(id).await.unwrap(), 2, "the lost run counts");
    let mut seen = Vec::new();
    while let Some(event) = events.try_next() {
        seen.push(event);
    }
    let reason = ebbtide_jobs::ReclaimReason::StaleLock;
    assert!(seen.contains(&ebbtide_jobs::Event::JobReclaimed { id, reason }), "{seen:?}");
}

async fn a_run_that_lost_its_claim_writes_nothing(t: Store) {
    let (queue, go, effects) = (t.queue(), Arc::new(Notify::new()), Effects::default());
    let (waits, seen) = (go.clone(), effects.clone());
    queue
        .register("slow", move |ctx: ebbtide_jobs::Ctx, (): ()| {
            let (go, effects) = (waits.clone(), seen.clone());
            async move {
                effects.add("started");
                go.notified().await;
                // The claim is over: the step runs, and its record is refused.
                let lost = ctx.step("late", || async { Ok(1) }).await;
                effects.add(format!("{:?}", lost.is_err()));
                Ok(7)
            }
        })
        .unwrap();
    let ended = effects.clone();
    queue.hooks().on_attempt_end(move |_| ended.add("no outcome"));
    let builder = quick(&queue).ownership_audit_interval(Duration::ZERO);
    let running = Running::start(builder.build().unwrap());
    let id = send(&queue, "slow", &()).await;
    until("it runs", || async { effects.count("started") == 1 }).await;
    running.worker.pause(PauseMode::Graceful);
    t.exec(&format!("update @jobs set status = 'pending', locked_by = '' where id = {}", t.id(id))).await;
    let other = t.claim("other", 1).await;
    go.notify_one();
    until("the run ended", || async { effects.count("no outcome") == 1 }).await;
    assert_eq!(effects.count("true"), 1, "the record was refused");
    assert_eq!(t.count_checkpoints(id).await, 0);
    let job = t.job(id).await;
    assert_eq!((job.status, job.locked_by.as_deref(), job.result), (JobStatus::Running, Some("other"), None));
    assert_eq!(job.dispatch_token, other[0].dispatch_token);
}

async fn only_lost_claims_are_reported(t: Store) {
    let mut claims: Vec<Claim> = Vec::new();
    for _ in 0..7 {
        claims.push(t.running("w").await);
    }
    let [owned, cancelled, deleted, taken, completed, waiting, paused] = &claims[..] else { unreachable!() };
    let set = |id: JobId, status: &str| {
        format!("update @jobs set status = '{status}', locked_by = '', dispatch_token = null where id = {}", t.id(id))
    };
    t.storage.cancel(cancelled.job_id).await.unwrap();
    t.exec(&format!("delete from @jobs where id = {}", t.id(deleted.job_id))).await;
    t.exec(&set(taken.job_id, "pending")).await;
    assert_eq!(t.claim("v", 1).await[0].id, taken.job_id);
    for (claim, status) in [(completed, "completed"), (waiting, "waiting"), (paused, "paused")] {
        t.exec(&set(claim.job_id, status)).await;
    }
    let mut lost = t.storage.ownership().unwrap().lost(&claims).await.unwrap();
    lost.sort();
    let mut expected = vec![cancelled.job_id, deleted.job_id, taken.job_id];
    expected.sort();
    assert_eq!(lost, expected);
    assert!(t.storage.ownership().unwrap().lost(std::slice::from_ref(owned)).await.unwrap().is_empty());
}

async fn a_lease_has_one_owner_until_it_ends(t: Store) {
    let leases = t.storage.leases().unwrap();
    let (one, other) = (WorkerId::new("one").unwrap(), WorkerId::new("other").unwrap());
    assert!(leases.acquire("l", &one, 60 * SECOND).await.unwrap());
    assert!(!leases.acquire("l", &other, 60 * SECOND).await.unwrap());
    assert!(leases.acquire("l", &one, 60 * SECOND).await.unwrap(), "the owner renews");
    assert!(leases.acquire("m", &other, 60 * SECOND).await.unwrap(), "another name is another lease");
    t.exec(&format!("update @leases set expires_at = {} where name = 'l'", t.ago(SECOND))).await;
    assert!(leases.acquire("l", &other, 60 * SECOND).await.unwrap());
    assert!(!leases.acquire("l", &one, 60 * SECOND).await.unwrap());
    leases.release("l", &one).await.unwrap();
    assert!(!leases.acquire("l", &one, 60 * SECOND).await.unwrap(), "only the owner lets go");
    leases.release("l", &other).await.unwrap();
    assert!(leases.acquire("l", &one, 60 * SECOND).await.unwrap());
}

cases!(
    a_cancelled_job_stops_its_handler,
    heartbeats_stop_a_run_that_is_not_owned_and_keep_one_that_is,
    the_job_of_a_dead_worker_is_run_by_another,
    a_run_that_lost_its_claim_writes_nothing,
    only_lost_claims_are_reported,
    a_lease_has_one_owner_until_it_ends,
);
