//! Children from the handler's side: started once, joined by their results, and never in half.

use ebbtide_jobs::{
    Ctx, EnqueueOptions, FanOut, FanOutError, JobError, JobStatus, PauseMode, Queue, QueueName, SubJob,
};

use crate::rig::{Effects, Running, quick, run, send, until};
use crate::support::{Raw, SECOND, Store};

/// Children that double a number, fail at 13 and hang at 99.
fn with_children(t: &Store, effects: &Effects) -> Queue {
    let queue = t.queue();
    let seen = effects.clone();
    queue
        .register("double", move |_, n: u64| {
            seen.add(format!("child {n}"));
            async move {
                match n {
                    13 => Err(JobError::no_retry("unlucky")),
                    99 => std::future::pending().await,
                    n => Ok(n * 2),
                }
            }
        })
        .unwrap();
    queue
}

fn children(numbers: &[u64]) -> Vec<SubJob> {
    numbers.iter().map(|n| SubJob::new("double", n)).collect()
}

async fn results_come_in_the_order_of_the_children(t: Store) {
    let effects = Effects::default();
    let queue = with_children(&t, &effects);
    queue
        .register("parent", |ctx: Ctx, numbers: Vec<u64>| async move {
            let doubled = ctx.fan_out::<u64>(children(&numbers), FanOut::fail_fast()).await?;
            assert!(doubled.all_succeeded());
            let again = ctx.fan_out::<u64>(children(&doubled.values()), FanOut::fail_fast()).await?;
            Ok((again.values(), ctx.attempt()))
        })
        .unwrap();
    let _running = run(&queue);
    let numbers: Vec<u64> = (100..140).collect();
    let id = queue.enqueue("parent", &numbers).tenant("acme").meta("k", "v").send().await.unwrap().id();
    t.becomes(id, JobStatus::Completed).await;
    let expected: Vec<u64> = numbers.iter().map(|n| n * 4).collect();
    assert_eq!(queue.result::<(Vec<u64>, u32)>(id).await.unwrap(), (expected, 1), "a join is no new attempt");
    assert_eq!(effects.all().len(), 80, "no child ran twice");
    let of_parent = format!("from @jobs where parent_job_id = {0} and root_job_id = {0}", t.id(id));
    assert_eq!(t.number(&format!("select count(*) {of_parent} and tenant = 'acme'")).await, 80);
    let empty = send(&queue, "parent", &Vec::<u64>::new()).await;
    t.becomes(empty, JobStatus::Completed).await;
}

async fn the_strategy_decides(t: Store) {
    let queue = with_children(&t, &Effects::default());
    queue
        .register("parent", |ctx: Ctx, how: String| async move {
            let fan_out = match how.as_str() {
                "fast" => FanOut::fail_fast(),
                "all" => FanOut::collect_all(),
                "half" => FanOut::threshold(0.5)?,
                _ => FanOut::threshold(0.9)?,
            };
            match ctx.fan_out::<u64>(children(&[1, 13, 2, 3]), fan_out).await {
                Ok(results) => {
                    let count = results.success_count();
                    let (values, failures) = results.partition();
                    assert_eq!((failures[0].index, failures[0].error.as_str()), (1, "unlucky"));
                    Ok(format!("{count} {values:?}"))
                }
                Err(error) if error.is_suspended() => Err(error),
                Err(error) => {
                    let failed = error.downcast_ref::<FanOutError>().expect("it is the join that failed");
                    let unlucky = failed.failures.iter().find(|failure| failure.index == 1).unwrap();
                    assert_eq!((failed.total, unlucky.status), (4, JobStatus::Failed));
                    Err(error)
                }
            }
        })
        .unwrap();
    let _running = run(&queue);
    for (how, is_met) in [("fast", false), ("all", true), ("half", true), ("most", false)] {
        let id = send(&queue, "parent", &how).await;
        if is_met {
            t.becomes(id, JobStatus::Completed).await;
            assert_eq!(queue.result::<String>(id).await.unwrap(), "3 [2, 4, 6]", "{how}");
        } else {
            let job = t.becomes(id, JobStatus::Failed).await;
            assert_eq!(job.dead_letter_reason.as_deref(), Some("not_retryable"), "{how}");
            let error = job.last_error.unwrap();
            assert!(error.contains("of 4 children did not complete") && error.contains("unlucky"), "{error}");
        }
    }
}

async fn children_left_over_are_cancelled_if_asked_for(t: Store) {
    let queue = with_children(&t, &Effects::default());
    queue
        .register("parent", |ctx: Ctx, cancels: bool| async move {
            let fan_out = if cancels { FanOut::fail_fast().cancel_on_parent_failure() } else { FanOut::fail_fast() };
            ctx.fan_out::<u64>(children(&[99, 13, 99]), fan_out).await.map(|_| ())
        })
        .unwrap();
    let running = Running::start(quick(&queue).concurrency(8).build().unwrap());
    for (cancels, left) in [(true, 0), (false, 2)] {
        let id = send(&queue, "parent", &cancels).await;
        t.becomes(id, JobStatus::Failed).await;
        until("the rest is as it shall be", || async { running.worker.health().running == left }).await;
        let cancelled =
            format!("select count(*) from @jobs where parent_job_id = {} and status = 'cancelled'", t.id(id));
        until("the rows too", || async { t.number(&cancelled).await == 2 - left as i64 }).await;
    }
    running.worker.pause(PauseMode::Aggressive);
}

async fn children_have_options_and_children_of_their_own(t: Store) {
    let effects = Effects::default();
    let queue = with_children(&t, &effects);
    queue
        .register("middle", |ctx: Ctx, n: u64| async move {
            let results = ctx.fan_out::<u64>(children(&[n, n + 1]), FanOut::collect_all()).await?;
            Ok(results.values().into_iter().sum::<u64>())
        })
        .unwrap();
    queue
        .register("top", |ctx: Ctx, (): ()| async move {
            let middle = [1u64, 5].iter().map(|n| SubJob::new("middle", n).options(EnqueueOptions::new().priority(3)));
            let fan_out = FanOut::collect_all().queue(QueueName::new("other").unwrap()).retries(0);
            let results = ctx.fan_out::<u64>(middle.collect(), fan_out).await?;
            Ok(results.values())
        })
        .unwrap();
    let _default = run(&queue);
    let other = quick(&queue).queue("other", ebbtide_jobs::QueueOptions::concurrency(2)).build().unwrap();
    let _other = Running::start(other);
    let id = send(&queue, "top", &()).await;
    t.becomes(id, JobStatus::Completed).await;
    assert_eq!(queue.result::<Vec<u64>>(id).await.unwrap(), [6, 22]);
    let middle = format!(
        "select count(*) from @jobs where parent_job_id = {} and queue = 'other' and priority = 3 and max_retries = 0",
        t.id(id)
    );
    assert_eq!(t.number(&middle).await, 2);
    let root = format!("select count(*) from @jobs where root_job_id = {}", t.id(id));
    assert_eq!(t.number(&root).await, 6);
    assert_eq!(effects.all().len(), 4);
}

async fn a_child_that_somebody_deleted_is_missed(t: Store) {
    let queue = with_children(&t, &Effects::default());
    queue
        .register("parent", |ctx: Ctx, (): ()| async move {
            let fan_out = FanOut::collect_all().queue(QueueName::new("kids").unwrap());
            ctx.fan_out::<u64>(children(&[1, 2]), fan_out).await.map(|_| ())
        })
        .unwrap();
    let _running = run(&queue);
    let id = send(&queue, "parent", &()).await;
    t.becomes(id, JobStatus::Waiting).await;
    queue.job(id).pause(PauseMode::Graceful).await.unwrap();
    let kids = quick(&queue).queue("kids", ebbtide_jobs::QueueOptions::concurrency(2)).build().unwrap();
    let _kids = Running::start(kids);
    until("the children are done", || async {
        t.number("select count(*) from @jobs where queue = 'kids' and status = 'completed'").await == 2
    })
    .await;
    t.exec("delete from @jobs where fan_out_index = 1").await;
    queue.job(id).resume().await.unwrap();
    let job = t.becomes(id, JobStatus::Failed).await;
    assert_eq!(job.last_error.as_deref(), Some("child 1 of the fan-out is not there any more"));
}

/// The children are finished past the engine, as if a process had died between a count and a wake-up.
async fn a_join_that_was_decided_unheard_wakes_its_parent(t: Store) {
    let queue = with_children(&t, &Effects::default());
    queue
        .register("parent", |ctx: Ctx, (): ()| async move {
            let results = ctx.fan_out::<u64>(children(&[1, 2]), FanOut::collect_all()).await?;
            Ok(results.values())
        })
        .unwrap();
    let id = send(&queue, "parent", &()).await;
    let claim = t.claim("w", 1).await[0].claim().unwrap();
    let store = t.storage.fan_outs().unwrap();
    let jobs = [1u64, 2].map(|n| ebbtide_jobs::NewJob::new("double", &n, EnqueueOptions::new()).unwrap());
    store.start(&claim, 0, &FanOut::collect_all(), &jobs).await.unwrap();
    let seven = if matches!(t.raw, Raw::Postgres { .. }) { "'7'::bytea" } else { "cast('7' as blob)" };
    let end = format!("status = 'completed', completed_at = {}, result = {seven}", t.ago(SECOND));
    t.exec(&format!("update @jobs set {end} where parent_job_id = {}", t.id(id))).await;
    t.exec("update @fan_outs set completed_count = 2").await;
    let _running = run(&queue);
    t.becomes(id, JobStatus::Completed).await;
    assert_eq!(queue.result::<Vec<u64>>(id).await.unwrap(), [7, 7]);
}

cases!(
    results_come_in_the_order_of_the_children,
    the_strategy_decides,
    children_left_over_are_cancelled_if_asked_for,
    children_have_options_and_children_of_their_own,
    a_child_that_somebody_deleted_is_missed,
    a_join_that_was_decided_unheard_wakes_its_parent,
);
