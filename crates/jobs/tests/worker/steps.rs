//! Steps are recorded once, and a replay answers with the records.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ebbtide_jobs::{Ctx, DEFAULT_VERSION, Determinism, JobError, JobId, JobStatus, Queue};
use serde::{Deserialize, Serialize};

use crate::rig::{Effects, run, send};
use crate::support::Store;

/// Fails the first run at the end, so that the second one replays.
fn crash_once(ctx: &Ctx) -> Result<(), JobError> {
    if ctx.attempt() == 1 { Err(JobError::new("crash")) } else { Ok(()) }
}

async fn a_finished_step_is_not_repeated(t: Store) {
    let (queue, effects) = (t.queue(), Effects::default());
    let seen = effects.clone();
    queue
        .register("flow", move |ctx: Ctx, (): ()| {
            let effects = seen.clone();
            async move {
                let one: u64 = ctx
                    .step("one", || async {
                        effects.add("one");
                        Ok(1)
                    })
                    .await?;
                let two: String = ctx
                    .step("two", || async {
                        effects.add("two");
                        if ctx.attempt() == 1 { Err(JobError::new("not yet")) } else { Ok(format!("{one}+1")) }
                    })
                    .await?;
                Ok(two)
            }
        })
        .unwrap();
    let _running = run(&queue);
    let id = send(&queue, "flow", &()).await;
    let job = t.becomes(id, JobStatus::Completed).await;
    assert_eq!((job.attempt, queue.result::<String>(id).await.unwrap().as_str()), (2, "1+1"));
    assert_eq!(effects.all(), ["one", "two", "two"], "what failed runs again, what succeeded does not");
    assert_eq!(t.count_checkpoints(id).await, 2);
}

/// An outer step with two inner calls, and another outer step: after a crash before the end the second run gives what
/// an undisturbed one gives.
async fn a_step_with_steps_of_its_own_keeps_its_places(t: Store) {
    let (queue, effects) = (t.queue(), Effects::default());
    let seen = effects.clone();
    queue
        .register("inner", move |_, n: u64| {
            seen.add(format!("inner {n}"));
            async move { Ok(n * 10) }
        })
        .unwrap();
    queue
        .register("outer", |ctx: Ctx, n: u64| async move {
            let one: u64 = ctx.call("inner", n).await?;
            let two: u64 = ctx.call("inner", n + 1).await?;
            Ok(one + two)
        })
        .unwrap();
    queue
        .register("flow", |ctx: Ctx, crashes: bool| async move {
            let first: u64 = ctx.call("outer", 1).await?;
            let second: u64 = ctx.call("outer", 5).await?;
            if crashes {
                crash_once(&ctx)?;
            }
            Ok((first, second))
        })
        .unwrap();
    let _running = run(&queue);
    let plain = send(&queue, "flow", &false).await;
    t.becomes(plain, JobStatus::Completed).await;
    assert_eq!(effects.all().len(), 4);
    let crashed = send(&queue, "flow", &true).await;
    t.becomes(crashed, JobStatus::Completed).await;
    assert_eq!(effects.all().len(), 8, "the replay called nothing");
    let result: (u64, u64) = queue.result(crashed).await.unwrap();
    assert_eq!(result, queue.result::<(u64, u64)>(plain).await.unwrap());
    let spans = format!(
        "select call_index || call_type || span_end from @checkpoints where job_id = {} order by call_index",
        t.id(crashed)
    );
    let spans: Vec<String> = t.texts(&spans).await.into_iter().flatten().collect();
    assert_eq!(spans, ["0outer3", "1inner2", "2inner3", "3outer6", "4inner5", "5inner6"]);
}

async fn a_final_failure_is_recorded_and_replayed(t: Store) {
    let (queue, effects) = (t.queue(), Effects::default());
    let seen = effects.clone();
    queue
        .register("flow", move |ctx: Ctx, (): ()| {
            let effects = seen.clone();
            async move {
                let paid = ctx
                    .step("pay", || async {
                        effects.add("pay");
                        Err::<(), _>(JobError::sentinel("declined", "no funds"))
                    })
                    .await;
                let error = paid.expect_err("it is declined");
                assert_eq!((error.key(), error.to_string().as_str()), (Some("declined"), "no funds"));
                crash_once(&ctx)?;
                Ok("refunded")
            }
        })
        .unwrap();
    let _running = run(&queue);
    let id = send(&queue, "flow", &()).await;
    let job = t.becomes(id, JobStatus::Completed).await;
    assert_eq!((job.attempt, effects.all().len()), (2, 1));
}

/// A handler whose first run takes the step `one`, and whose second run takes `other` in the same place.
fn changes_its_mind(queue: &Queue, effects: &Effects) {
    let seen = effects.clone();
    queue
        .register("flow", move |ctx: Ctx, (): ()| {
            let effects = seen.clone();
            async move {
                let name = if ctx.attempt() == 1 { "one" } else { "other" };
                ctx.step(name, || async {
                    effects.add(name);
                    Ok(())
                })
                .await?;
                crash_once(&ctx)
            }
        })
        .unwrap();
}

async fn another_step_than_the_recorded_one_fails_or_is_dropped(t: Store) {
    let (queue, effects) = (t.queue(), Effects::default());
    changes_its_mind(&queue, &effects);
    let _running = run(&queue);
    for mode in [Determinism::Explicit, Determinism::Strict] {
        let id = queue.enqueue("flow", &()).determinism(mode).send().await.unwrap().id();
        let job = t.becomes(id, JobStatus::Failed).await;
        assert_eq!((job.attempt, job.dead_letter_reason.as_deref()), (2, Some("not_retryable")));
        assert_eq!(job.last_error.as_deref(), Some("the run asks for other at step 0, where one is recorded"));
    }
    assert_eq!(effects.count("other"), 0);
    let id = queue.enqueue("flow", &()).determinism(Determinism::BestEffort).send().await.unwrap().id();
    t.becomes(id, JobStatus::Completed).await;
    assert_eq!(effects.count("other"), 1);
    let left = t.text(&format!("select call_type from @checkpoints where job_id = {}", t.id(id))).await;
    assert_eq!((left.as_deref(), t.count_checkpoints(id).await), (Some("other"), 1));
}

async fn a_strict_run_may_leave_out_nothing(t: Store) {
    let queue = t.queue();
    queue
        .register("flow", |ctx: Ctx, (): ()| async move {
            ctx.step("one", || async { Ok(()) }).await?;
            if ctx.attempt() == 1 {
                ctx.step("two", || async { Ok(()) }).await?;
            }
            crash_once(&ctx)
        })
        .unwrap();
    let _running = run(&queue);
    let explicit = send(&queue, "flow", &()).await;
    t.becomes(explicit, JobStatus::Completed).await;
    let strict = queue.enqueue("flow", &()).determinism(Determinism::Strict).send().await.unwrap().id();
    let job = t.becomes(strict, JobStatus::Failed).await;
    assert_eq!(job.last_error.as_deref(), Some("the run finished without step two, which is recorded at 1"));
}

async fn a_record_of_another_type_is_refused(t: Store) {
    #[derive(Serialize, Deserialize)]
    struct Old {
        #[serde(default)]
        id: u64,
    }
    #[derive(Serialize, Deserialize)]
    struct New {
        #[serde(default)]
        name: String,
    }
    let queue = t.queue();
    queue
        .register("flow", |ctx: Ctx, (): ()| async move {
            if ctx.attempt() == 1 {
                let _: Old = ctx.step("one", || async { Ok(Old { id: 7 }) }).await?;
            } else {
                // Its JSON could be read as one, with a name that nobody gave.
                let _: New = ctx.step("one", || async { Ok(New { name: String::new() }) }).await?;
            }
            crash_once(&ctx)
        })
        .unwrap();
    let _running = run(&queue);
    let id = send(&queue, "flow", &()).await;
    let job = t.becomes(id, JobStatus::Failed).await;
    assert_eq!(job.last_error.as_deref(), Some("the record of step one holds another type than the one asked for"));
    let clear = format!("update @checkpoints set result_shape = '' where job_id = {}", t.id(id));
    t.exec(&clear).await;
    assert!(queue.requeue(id).await.unwrap());
}

async fn phases_are_values_by_name(t: Store) {
    let queue = t.queue();
    queue
        .register("flow", |ctx: Ctx, twice: bool| async move {
            let before: Option<u64> = ctx.load_phase("cursor").await?;
            assert_eq!(before.is_none(), ctx.attempt() == 1);
            ctx.save_phase("cursor", &u64::from(ctx.attempt())).await?;
            assert_eq!(ctx.load_phase::<u64>("cursor").await?, Some(u64::from(ctx.attempt())));
            let other = ctx.load_phase::<String>("cursor").await;
            assert!(other.is_err(), "absent and unreadable are two things");
            if twice {
                ctx.save_phase("cursor", &9).await?;
            }
            crash_once(&ctx)?;
            Ok(before)
        })
        .unwrap();
    let _running = run(&queue);
    let id = send(&queue, "flow", &false).await;
    t.becomes(id, JobStatus::Completed).await;
    assert_eq!(queue.result::<Option<u64>>(id).await.unwrap(), Some(1));
    let twice = send(&queue, "flow", &true).await;
    let job = t.becomes(twice, JobStatus::Failed).await;
    assert_eq!(job.last_error.as_deref(), Some("phase cursor was saved twice in one run"));
    assert_eq!(job.dead_letter_reason.as_deref(), Some("not_retryable"));
}

/// The code before a change, the code after it, and code that no longer knows the old way.
async fn a_run_stays_with_the_version_it_began_with(t: Store) {
    let queue = t.queue();
    let is_new = Arc::new(AtomicBool::new(false));
    let deployed = is_new.clone();
    queue
        .register("flow", move |ctx: Ctx, oldest: i32| {
            let is_new = deployed.load(Ordering::Relaxed);
            async move {
                ctx.step("one", || async { Ok(()) }).await?;
                let version = if is_new { ctx.version("rounding", oldest..=2).await? } else { DEFAULT_VERSION };
                ctx.step("two", || async { Ok(()) }).await?;
                ctx.wait_signal::<()>("go").await?;
                let again = if is_new { ctx.version("rounding", oldest..=2).await? } else { DEFAULT_VERSION };
                assert_eq!(again, version);
                Ok(version)
            }
        })
        .unwrap();
    let _running = run(&queue);
    let (old, too_old) = (send(&queue, "flow", &-1).await, send(&queue, "flow", &1).await);
    for id in [old, too_old] {
        t.becomes(id, JobStatus::Waiting).await;
    }
    is_new.store(true, Ordering::Relaxed);
    let new = send(&queue, "flow", &1).await;
    t.becomes(new, JobStatus::Waiting).await;
    for id in [old, too_old, new] {
        queue.signal(id, "go", &()).await.unwrap();
    }
    t.becomes(old, JobStatus::Completed).await;
    t.becomes(new, JobStatus::Completed).await;
    assert_eq!(queue.result::<i32>(old).await.unwrap(), DEFAULT_VERSION);
    assert_eq!(queue.result::<i32>(new).await.unwrap(), 2);
    let job = t.becomes(too_old, JobStatus::Failed).await;
    assert_eq!(
        job.last_error.as_deref(),
        Some("change rounding is recorded as version -1, which this code does not support")
    );
}

async fn checkpoints_go_with_a_completion_if_the_worker_says_so(t: Store) {
    use crate::rig::{Running, quick};
    let queue = t.queue();
    queue
        .register("flow", |ctx: Ctx, fails: bool| async move {
            ctx.step("one", || async { Ok(()) }).await?;
            if fails { Err(JobError::no_retry("x")) } else { Ok(()) }
        })
        .unwrap();
    let policy = ebbtide_jobs::Retention::custom().delete_checkpoints_on_complete();
    for batch in [1, 100] {
        let builder = quick(&queue).retention(policy.clone()).batch_completion(batch, std::time::Duration::ZERO);
        let running = Running::start(builder.build().unwrap());
        let good = send(&queue, "flow", &false).await;
        let bad = send(&queue, "flow", &true).await;
        t.becomes(good, JobStatus::Completed).await;
        t.becomes(bad, JobStatus::Failed).await;
        assert_eq!((t.count_checkpoints(good).await, t.count_checkpoints(bad).await), (0, 1));
        running.stop().await;
    }
}

async fn names_of_steps_are_names(t: Store) {
    let queue = t.queue();
    queue.register("flow", |ctx: Ctx, name: String| async move { ctx.step(&name, || async { Ok(()) }).await }).unwrap();
    let _running = run(&queue);
    for name in ["", "_sleep", "signal:x", "jobs.version:x"] {
        let id: JobId = send(&queue, "flow", &name).await;
        t.becomes(id, JobStatus::Failed).await;
        assert_eq!(t.count_checkpoints(id).await, 0, "{name:?}");
    }
}

cases!(
    a_finished_step_is_not_repeated,
    a_step_with_steps_of_its_own_keeps_its_places,
    a_final_failure_is_recorded_and_replayed,
    another_step_than_the_recorded_one_fails_or_is_dropped,
    a_strict_run_may_leave_out_nothing,
    a_record_of_another_type_is_refused,
    phases_are_values_by_name,
    a_run_stays_with_the_version_it_began_with,
    checkpoints_go_with_a_completion_if_the_worker_says_so,
    names_of_steps_are_names,
);
