//! How a run ends, and what is written for it.

use std::time::Duration;

use ebbtide_jobs::{EnqueueOptions, Error, HandlerOptions, JobError, JobStatus, Queue, QueueOptions};
use serde::{Deserialize, Serialize};

use crate::rig::{Effects, MS, Running, quick, run, send, until};
use crate::support::{DAY, SECOND, Store};

#[derive(Serialize, Deserialize)]
struct Mail {
    to: String,
}

async fn a_job_runs_and_its_result_is_stored(t: Store) {
    let queue = t.queue();
    let mail = queue
        .define(
            "mail",
            |ctx: ebbtide_jobs::Ctx, mail: Mail| async move { Ok(format!("{} {}", ctx.attempt(), mail.to)) },
        )
        .unwrap();
    let _running = run(&queue);
    let id = mail.enqueue(Mail { to: "a@b".to_owned() }).send().await.unwrap().id();
    let job = t.becomes(id, JobStatus::Completed).await;
    assert_eq!((job.attempt, job.locked_by), (1, None));
    assert_eq!(queue.result::<String>(id).await.unwrap(), "1 a@b");
    let wrong = queue.result::<u64>(id).await;
    assert!(matches!(wrong, Err(Error::PayloadDecode(_))), "{wrong:?}");
}

async fn many_jobs_all_complete_with_results_of_their_own(t: Store) {
    let queue = t.queue();
    queue.register("double", |_, n: u64| async move { Ok(n * 2) }).unwrap();
    let entries = (0..500u64).map(|n| ebbtide_jobs::BatchEntry::new("double", &n)).collect();
    let ids = queue.enqueue_batch(entries).await.unwrap();
    let _running = Running::start(quick(&queue).concurrency(50).dequeue_batch_size(100).build().unwrap());
    until("all complete", || async {
        t.number("select count(*) from @jobs where status = 'completed' and attempt = 1").await == 500
    })
    .await;
    for (n, id) in ids.iter().enumerate() {
        assert_eq!(queue.result::<usize>(id.id()).await.unwrap(), n * 2);
    }
}

async fn a_failed_job_runs_again_until_its_retries_are_used_up(t: Store) {
    let (queue, effects) = (t.queue(), Effects::default());
    let seen = effects.clone();
    queue
        .register("fails", move |ctx: ebbtide_jobs::Ctx, (): ()| {
            seen.add(format!("run {}", ctx.attempt()));
            async { Err::<(), _>(JobError::new("no luck, password=hunter2")) }
        })
        .unwrap();
    let _running = run(&queue);
    let id = queue.enqueue("fails", &()).retries(2).send().await.unwrap().id();
    let job = t.becomes(id, JobStatus::Failed).await;
    assert_eq!(effects.all(), ["run 1", "run 2", "run 3"]);
    assert_eq!(job.dead_letter_reason.as_deref(), Some("attempts_exhausted"));
    assert_eq!(job.last_error.as_deref(), Some("no luck, password=***"));
    assert!(matches!(queue.result::<()>(id).await, Err(Error::Failed { .. })));
    assert_eq!(queue.dead_letters().count().await.unwrap(), 1);

    let once = queue.enqueue("fails", &()).retries(0).send().await.unwrap().id();
    t.becomes(once, JobStatus::Failed).await;
    assert_eq!(effects.count("run 1"), 2, "a job without retries runs once");
}

async fn an_error_without_retries_ends_at_once(t: Store) {
    let queue = t.queue();
    queue.register("final", |_, (): ()| async { Err::<(), _>(JobError::no_retry("never")) }).unwrap();
    queue.register("panics", |_, (): ()| async { if true { panic!("oh no") } else { Ok(()) } }).unwrap();
    let _running = run(&queue);
    let id = send(&queue, "final", &()).await;
    let job = t.becomes(id, JobStatus::Failed).await;
    assert_eq!((job.attempt, job.dead_letter_reason.as_deref()), (1, Some("not_retryable")));

    let id = queue.enqueue("panics", &()).retries(1).send().await.unwrap().id();
    let job = t.becomes(id, JobStatus::Failed).await;
    assert_eq!((job.attempt, job.last_error.as_deref()), (2, Some("the handler panicked: oh no")));

    let id = queue.enqueue("unknown", &()).remote().send().await.unwrap().id();
    let job = t.becomes(id, JobStatus::Failed).await;
    assert_eq!((job.attempt, job.dead_letter_reason.as_deref()), (1, Some("not_retryable")));
}

async fn arguments_that_do_not_fit_are_refused_before_and_after(t: Store) {
    let queue = t.queue();
    queue.register("mail", |_, _: Mail| async { Ok(()) }).unwrap();
    let refused = queue.enqueue("mail", &7).send().await;
    assert!(matches!(refused, Err(Error::JobArgsMismatch { .. })), "{refused:?}");
    let refused = queue.enqueue("other", &7).send().await;
    assert!(matches!(&refused, Err(Error::HandlerNotFound(name)) if name == "other"), "{refused:?}");
    let again = queue.register("mail", |_, _: u64| async { Ok(()) });
    assert!(matches!(again, Err(Error::HandlerRegistered(_))), "{again:?}");
    assert!(t.jobs().await.is_empty());

    let _running = run(&queue);
    let id = queue.enqueue("mail", &7).remote().send().await.unwrap().id();
    let job = t.becomes(id, JobStatus::Failed).await;
    assert!(job.last_error.unwrap().starts_with("the arguments cannot be read"));
}

async fn a_run_that_takes_too_long_is_a_failure(t: Store) {
    let queue = t.queue();
    let hangs = |_: ebbtide_jobs::Ctx, (): ()| async { std::future::pending::<Result<(), JobError>>().await };
    queue.register_with("hangs", HandlerOptions::new().timeout(DAY), hangs).unwrap();
    queue.register_with("short", HandlerOptions::new().timeout(20 * MS), hangs).unwrap();
    let _running = run(&queue);
    let by_job = queue.enqueue("hangs", &()).timeout(20 * MS).retries(0).send().await.unwrap().id();
    let by_handler = queue.enqueue("short", &()).retries(0).send().await.unwrap().id();
    for id in [by_job, by_handler] {
        let job = t.becomes(id, JobStatus::Failed).await;
        assert_eq!(job.last_error.as_deref(), Some("the run took longer than 20ms"));
    }
}

async fn the_wait_is_the_errors_or_the_handlers_or_the_workers(t: Store) {
    let queue = t.queue();
    let fails = |_: ebbtide_jobs::Ctx, (): ()| async { Err::<(), _>(JobError::new("x")) };
    queue.register("plain", fails).unwrap();
    queue.register_with("own", HandlerOptions::new().backoff(|_: u32, _: &JobError| 30 * SECOND), fails).unwrap();
    queue.register_with("long", HandlerOptions::new().backoff(|_: u32, _: &JobError| DAY), fails).unwrap();
    queue.register("asks", |_, (): ()| async { Err::<(), _>(JobError::retry_after(DAY, "later")) }).unwrap();
    let builder = quick(&queue).backoff(|_: u32, _: &JobError| 20 * SECOND);
    let _running = Running::start(builder.build().unwrap());
    for (name, wait) in [("plain", 20 * SECOND), ("own", 30 * SECOND), ("long", 60 * SECOND), ("asks", DAY)] {
        let id = send(&queue, name, &()).await;
        until("it failed once", || async { t.job(id).await.last_error.is_some() }).await;
        let job = t.job(id).await;
        assert_eq!((job.status, job.attempt), (JobStatus::Pending, 1));
        let waits = job.run_at.unwrap().duration_since(job.updated_at);
        assert_eq!(waits.as_micros(), wait.as_micros() as i128, "{name}");
    }
}

async fn never_more_than_the_concurrency_at_once(t: Store) {
    let queue = t.queue();
    let gauge = std::sync::Arc::new(std::sync::Mutex::new((0, 0)));
    let seen = gauge.clone();
    queue
        .register("busy", move |_, (): ()| {
            let gauge = seen.clone();
            async move {
                {
                    let mut gauge = gauge.lock().unwrap();
                    gauge.0 += 1;
                    gauge.1 = gauge.1.max(gauge.0);
                }
                tokio::task::yield_now().await;
                gauge.lock().unwrap().0 -= 1;
                Ok(())
            }
        })
        .unwrap();
    for queue_name in ["a", "b"] {
        let options = EnqueueOptions::new().queue(queue_name);
        let entry = || ebbtide_jobs::BatchEntry::new("busy", &()).options(options.clone());
        queue.enqueue_batch((0..60).map(|_| entry()).collect()).await.unwrap();
    }
    let builder = quick(&queue).queue("a", QueueOptions::concurrency(3)).queue("b", QueueOptions::concurrency(1));
    let _running = Running::start(builder.build().unwrap());
    until("all complete", || async { t.number("select count(*) from @jobs where status = 'completed'").await == 120 })
        .await;
    assert!(gauge.lock().unwrap().1 <= 4, "{} at once", gauge.lock().unwrap().1);
}

async fn batches_of_completions_keep_each_outcome(t: Store) {
    for (jobs, wait) in [(1, Duration::ZERO), (7, 5 * MS), (4096, Duration::ZERO)] {
        let queue: Queue = t.queue();
        queue
            .register("mixed", |_, n: u64| async move {
                if n.is_multiple_of(5) { Err(JobError::no_retry("five")) } else { Ok(vec![n; (n % 3) as usize]) }
            })
            .unwrap();
        let entries = (0..60u64).map(|n| ebbtide_jobs::BatchEntry::new("mixed", &n)).collect();
        let ids = queue.enqueue_batch(entries).await.unwrap();
        let running = Running::start(quick(&queue).concurrency(20).batch_completion(jobs, wait).build().unwrap());
        for (n, id) in ids.iter().enumerate() {
            let wanted = if n % 5 == 0 { JobStatus::Failed } else { JobStatus::Completed };
            t.becomes(id.id(), wanted).await;
            if wanted == JobStatus::Completed {
                assert_eq!(queue.result::<Vec<usize>>(id.id()).await.unwrap(), vec![n; n % 3]);
            }
        }
        running.stop().await;
    }
}

async fn a_result_that_is_too_large_fails_the_job(t: Store) {
    let queue = t.queue();
    queue.register("large", |_, (): ()| async { Ok("x".repeat(1 << 20)) }).unwrap();
    let _running = run(&queue);
    let id = send(&queue, "large", &()).await;
    let job = t.becomes(id, JobStatus::Failed).await;
    assert_eq!((job.dead_letter_reason.as_deref(), job.result), (Some("not_retryable"), None));
}

cases!(
    a_job_runs_and_its_result_is_stored,
    many_jobs_all_complete_with_results_of_their_own,
    a_failed_job_runs_again_until_its_retries_are_used_up,
    an_error_without_retries_ends_at_once,
    arguments_that_do_not_fit_are_refused_before_and_after,
    a_run_that_takes_too_long_is_a_failure,
    the_wait_is_the_errors_or_the_handlers_or_the_workers,
    never_more_than_the_concurrency_at_once,
    batches_of_completions_keep_each_outcome,
    a_result_that_is_too_large_fails_the_job,
);
