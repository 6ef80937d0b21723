//! Stopping and pausing: what runs to its end, and what is given back.

use std::sync::Arc;

use ebbtide_jobs::{Error, JobError, JobStatus, PauseMode, Retention, Worker};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::Level;

use crate::log::Log;
use crate::rig::{Effects, MS, Running, quick, run, send, until};
use crate::support::Store;

async fn a_stopping_worker_lets_handlers_finish(t: Store) {
    let (queue, go, effects) = (t.queue(), Arc::new(Notify::new()), Effects::default());
    let (waits, seen) = (go.clone(), effects.clone());
    queue
        .register("slow", move |_, (): ()| {
            let (go, effects) = (waits.clone(), seen.clone());
            async move {
                effects.add("started");
                go.notified().await;
                Ok(())
            }
        })
        .unwrap();
    let running = run(&queue);
    let id = send(&queue, "slow", &()).await;
    until("it runs", || async { effects.count("started") == 1 }).await;
    running.stop.cancel();
    let later = send(&queue, "slow", &()).await;
    go.notify_one();
    running.stop().await;
    assert_eq!(t.job(id).await.status, JobStatus::Completed, "it was waited for, and its outcome is written");
    let later = t.job(later).await;
    assert_eq!((later.status, later.attempt), (JobStatus::Pending, 0), "a stopping worker claims nothing");
}

async fn a_handler_that_takes_too_long_to_stop_is_given_back(t: Store) {
    let queue = t.queue();
    queue.register("hangs", |_, (): ()| std::future::pending::<Result<(), JobError>>()).unwrap();
    let running = Running::start(quick(&queue).drain_timeout(10 * MS).build().unwrap());
    let id = send(&queue, "hangs", &()).await;
    t.becomes(id, JobStatus::Running).await;
    running.stop().await;
    let job = t.job(id).await;
    assert_eq!((job.status, job.attempt, job.locked_by), (JobStatus::Pending, 0, None));
    assert_eq!(job.last_error, None, "being stopped is no failure");
}

async fn a_paused_worker_claims_nothing_and_an_aggressive_pause_gives_back(t: Store) {
    let (queue, effects) = (t.queue(), Effects::default());
    let seen = effects.clone();
    queue
        .register("once", move |ctx: ebbtide_jobs::Ctx, hang: bool| {
            seen.add("run");
            async move {
                if hang && ctx.attempt() == 1 && ctx.job().metadata.is_empty() {
                    std::future::pending::<()>().await;
                }
                Ok(())
            }
        })
        .unwrap();
    let running = run(&queue);
    let hangs = send(&queue, "once", &true).await;
    until("it runs", || async { effects.count("run") == 1 }).await;
    running.worker.pause(PauseMode::Graceful);
    assert!(running.worker.health().is_paused);
    let waits = send(&queue, "once", &false).await;
    assert_eq!(t.job(hangs).await.status, JobStatus::Running);
    running.worker.pause(PauseMode::Aggressive);
    let job = t.becomes(hangs, JobStatus::Pending).await;
    assert_eq!(job.attempt, 0, "the attempt does not count");
    until("nothing runs", || async { running.worker.health().running == 0 }).await;
    assert_eq!(t.job(waits).await.status, JobStatus::Pending);
    queue.job(hangs).cancel().await.unwrap();
    running.worker.resume();
    t.becomes(waits, JobStatus::Completed).await;
    assert_eq!(effects.count("run"), 2);
}

async fn a_worker_runs_once_at_a_time_and_again_afterwards(t: Store) {
    let queue = t.queue();
    queue.register("t", |_, (): ()| async { Ok(()) }).unwrap();
    let worker = quick(&queue).build().unwrap();
    let running = Running::start(worker.clone());
    until("it runs", || async { worker.health().is_started }).await;
    let again = worker.run(CancellationToken::new()).await;
    assert!(matches!(again, Err(Error::WorkerAlreadyStarted)), "{again:?}");
    running.stop().await;
    assert!(!worker.health().is_started);
    let running = Running::start(worker);
    let id = send(&queue, "t", &()).await;
    t.becomes(id, JobStatus::Completed).await;
    running.stop().await;
}

async fn queues_are_named_once_and_well(t: Store) {
    let queue = t.queue();
    let twice = Worker::builder(&queue).queue("a", options()).queue("a", options()).build();
    assert!(matches!(twice, Err(Error::Invalid { field: "queue", .. })));
    assert!(Worker::builder(&queue).queue("no name", options()).build().is_err());
}

fn options() -> ebbtide_jobs::QueueOptions {
    ebbtide_jobs::QueueOptions::concurrency(1)
}

cases!(
    a_stopping_worker_lets_handlers_finish,
    a_handler_that_takes_too_long_to_stop_is_given_back,
    a_paused_worker_claims_nothing_and_an_aggressive_pause_gives_back,
    a_worker_runs_once_at_a_time_and_again_afterwards,
    queues_are_named_once_and_well,
);

/// On one thread, whose lines the log collects.
#[tokio::test]
async fn retention_is_announced_once_however_often_the_worker_starts() {
    let t = Store::sqlite().await;
    let queue = t.queue();
    let (log, _guard) = Log::start(Level::INFO);
    let worker = quick(&queue).build().unwrap();
    for _ in 0..2 {
        let stop = CancellationToken::new();
        stop.cancel();
        worker.run(stop).await.unwrap();
    }
    let enabled = log.lines().into_iter().filter(|line| line.contains("retention GC enabled")).count();
    assert_eq!(enabled, 1);
    assert_eq!(worker.health().retention, Retention::stock());
    let off = quick(&queue).retention(Retention::disabled()).build().unwrap();
    let stop = CancellationToken::new();
    stop.cancel();
    off.run(stop).await.unwrap();
    assert_eq!(log.lines().into_iter().filter(|line| line.contains("retention is disabled")).count(), 1);
}
