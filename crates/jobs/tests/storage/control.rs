//! Cancelling, pausing, requeueing and deleting, with everything that they must refuse.

use std::collections::BTreeSet;

use ebbtide_jobs::{
    DeadLetterReason, EnqueueOptions, Error, Failure, JobId, JobStatus, PurgeStatus, QueueName, TerminalStatus,
};

use crate::rows::Row;
use crate::support::{DAY, Store, new_job, options};

fn queue(name: &str) -> QueueName {
    QueueName::new(name).unwrap()
}

fn keyed() -> EnqueueOptions {
    options().idempotency_key("k", DAY * 90)
}

/// A root with a child and a grandchild, each with every side row and a live window.
async fn family(t: &Store, statuses: [JobStatus; 3]) -> [JobId; 3] {
    let [root, child, grandchild] = statuses;
    let root = Row::new(root).ended(t, DAY).put(t).await;
    let fan_out = t.fan_out(root, "completed").await;
    let child = Row::new(child).parent(root).root(root).fan_out(fan_out).put(t).await;
    let grandchild = Row::new(grandchild).parent(child).root(root).put(t).await;
    for job in [root, child, grandchild] {
        t.checkpoints(job, 2).await;
        t.signal(job, None).await;
        t.window(job, &t.ahead(DAY)).await;
    }
    [root, child, grandchild]
}

async fn cancel_stops_unfinished_jobs_and_stamps_their_end(t: Store) {
    for status in JobStatus::ALL {
        let job = Row::new(status).put(&t).await;
        let before = t.job(job).await;
        let answer = t.storage.cancel(job).await;
        match status {
            JobStatus::Cancelled => assert_eq!(answer.unwrap(), 0),
            JobStatus::Completed | JobStatus::Failed => {
                let refused =
                    matches!(&answer, Err(Error::JobNotCancellable { id, status: is }) if (*id, *is) == (job, status));
                assert!(refused, "{answer:?}");
                assert_eq!(t.job(job).await, before);
            }
            _ => {
                assert_eq!(answer.unwrap(), 1, "{status}");
                let after = t.job(job).await;
                assert_eq!(
                    (after.status, after.last_error.as_deref()),
                    (JobStatus::Cancelled, Some("cancelled by user"))
                );
                assert!(after.completed_at.is_some(), "{status}");
            }
        }
    }
    let missing = JobId::new();
    assert!(matches!(t.storage.cancel(missing).await, Err(Error::JobNotFound(id)) if id == missing));
}

async fn cancel_takes_the_whole_subtree_and_the_claims_in_it(t: Store) {
    let [root, child, grandchild] = family(&t, [JobStatus::Waiting, JobStatus::Completed, JobStatus::Waiting]).await;
    let other = Row::new(JobStatus::Waiting).put(&t).await;
    t.exec(&format!("update @jobs set status = 'running', locked_by = 'w' where id = {}", t.id(grandchild))).await;
    let slot = format!("'c', {}, 'w', {}", t.id(grandchild), t.ahead(DAY));
    t.exec(&format!("insert into @concurrency_slots (slot_name, job_id, worker_id, expires_at) values ({slot})")).await;
    assert_eq!(t.storage.cancel(root).await.unwrap(), 2);
    for job in [root, grandchild] {
        let job = t.job(job).await;
        assert_eq!(job.status, JobStatus::Cancelled);
        assert!(job.completed_at.is_some());
    }
    assert_eq!(t.job(grandchild).await.locked_by.as_deref(), Some("w"), "by it the owner learns of it");
    assert_eq!(t.job(child).await.status, JobStatus::Completed);
    assert_eq!(t.job(other).await.status, JobStatus::Waiting);
    assert_eq!(t.number("select count(*) from @concurrency_slots").await, 0);
    assert_eq!(t.count_checkpoints(root).await, 2, "a cancelled job keeps its checkpoints");
}

async fn a_cancelled_run_writes_nothing_more(t: Store) {
    let claim = t.running("w").await;
    t.storage.cancel(claim.job_id).await.unwrap();
    let fail = t.storage.fail(&claim, &Failure::new("x"), DeadLetterReason::NotRetryable).await;
    assert!(matches!(fail, Err(Error::JobNotOwned(_))));
    assert!(matches!(t.storage.heartbeat(&claim, DAY).await, Err(Error::JobNotOwned(_))));
}

async fn pause_and_resume_go_there_and_back(t: Store) {
    for status in JobStatus::ALL {
        let job = Row::new(status).put(&t).await;
        let answer = t.storage.pause(job).await;
        match status {
            JobStatus::Pending | JobStatus::Waiting => {
                answer.unwrap();
                let paused = t.job(job).await;
                assert_eq!((paused.status, paused.previous_status), (JobStatus::Paused, Some(status)));
                t.storage.resume(job).await.unwrap();
                let resumed = t.job(job).await;
                assert_eq!((resumed.status, resumed.previous_status), (status, None));
            }
            JobStatus::Paused => assert!(matches!(answer, Err(Error::JobAlreadyPaused(id)) if id == job)),
            _ => assert!(matches!(answer, Err(Error::JobNotPausable { id, .. }) if id == job), "{status}"),
        }
        if !matches!(status, JobStatus::Paused) {
            assert!(matches!(t.storage.resume(job).await, Err(Error::JobNotPaused { id, .. }) if id == job));
        }
    }
    assert!(matches!(t.storage.pause(JobId::new()).await, Err(Error::JobNotFound(_))));
    assert!(matches!(t.storage.resume(JobId::new()).await, Err(Error::JobNotFound(_))));
}

async fn a_paused_queue_is_listed_and_gives_nothing(t: Store) {
    t.enqueue("t", options()).await;
    assert!(t.storage.paused_queues().await.unwrap().is_empty());
    t.storage.pause_queue(&queue("default"), "bo").await.unwrap();
    t.storage.pause_queue(&queue("default"), "al").await.unwrap();
    t.storage.pause_queue(&queue("b"), "bo").await.unwrap();
    t.storage.resume_queue(&queue("never-paused")).await.unwrap();
    assert_eq!(t.storage.paused_queues().await.unwrap(), [queue("b"), queue("default")]);
    assert_eq!(t.text("select paused_by from @queue_states where queue = 'default'").await.unwrap(), "bo");
    assert!(t.claim("w", 1).await.is_empty());
    t.storage.resume_queue(&queue("default")).await.unwrap();
    assert_eq!(t.storage.paused_queues().await.unwrap(), [queue("b")]);
    assert_eq!(t.claim("w", 1).await.len(), 1);
}

async fn requeue_starts_from_nothing(t: Store) {
    let windows = t.storage.windowed_enqueue().unwrap();
    let id = windows.enqueue_windowed(&new_job("t", keyed().retries(0))).await.unwrap().id();
    let claim = t.claim("w", 1).await[0].claim().unwrap();
    t.checkpoints(id, 3).await;
    t.signal(id, Some(t.ago(DAY))).await;
    t.fan_out(id, "failed").await;
    let child = Row::completed().parent(id).root(id).put(&t).await;
    t.window(child, &t.ahead(DAY)).await;
    t.storage.fail(&claim, &Failure::new("x"), DeadLetterReason::AttemptsExhausted).await.unwrap();

    t.storage.requeue(id).await.unwrap();
    let job = t.job(id).await;
    assert_eq!((job.status, job.attempt, job.last_error, job.result), (JobStatus::Pending, 0, None, None));
    assert_eq!((job.dead_lettered_at, job.dead_letter_reason, job.completed_at), (None, None, None));
    assert_eq!((job.started_at, job.run_at, job.locked_by), (None, None, None));
    assert_eq!(t.jobs().await, [id].into(), "what was below it is gone");
    assert_eq!(t.ids("select job_id from @unique_locks").await, [id].into(), "it keeps its own window alone");
    assert_eq!((t.count_checkpoints(id).await, t.number("select count(*) from @fan_outs").await), (0, 0));
    assert_eq!(t.number("select count(*) from @signals where consumed_at is not null").await, 1);
    assert_eq!(t.claim("w", 1).await[0].attempt, 1);
}

async fn requeue_refuses_what_is_not_over_and_what_is_not_alone(t: Store) {
    for status in JobStatus::ALL {
        let job = Row::new(status).ended(&t, DAY).put(&t).await;
        let answer = t.storage.requeue(job).await;
        if matches!(status, JobStatus::Failed | JobStatus::Cancelled) {
            answer.unwrap();
            assert_eq!(t.job(job).await.completed_at, None);
        } else {
            assert!(matches!(answer, Err(Error::JobNotRequeueable { id, .. }) if id == job), "{status}: {answer:?}");
        }
    }
    let child = Row::new(JobStatus::Failed).parent(JobId::new()).put(&t).await;
    assert!(matches!(t.storage.requeue(child).await, Err(Error::CannotRequeueSubJob(id)) if id == child));
    assert!(matches!(t.storage.requeue(JobId::new()).await, Err(Error::JobNotFound(_))));
    let first = t.enqueue("t", options().unique("u")).await;
    t.storage.cancel(first).await.unwrap();
    let second = t.enqueue("t", options().unique("u")).await;
    let refused = t.storage.requeue(first).await;
    assert!(matches!(refused, Err(Error::DuplicateJob { holder }) if holder == second), "{refused:?}");
    assert_eq!(t.job(first).await.status, JobStatus::Cancelled);
}

async fn delete_takes_one_job_with_its_side_rows(t: Store) {
    let job = Row::completed().put(&t).await;
    let kept = Row::completed().put(&t).await;
    for job in [job, kept] {
        t.checkpoints(job, 2).await;
        t.signal(job, None).await;
        t.window(job, &t.ahead(DAY)).await;
        t.fan_out(job, "completed").await;
    }
    t.storage.delete(job).await.unwrap();
    assert_eq!((t.jobs().await, t.orphans().await), ([kept].into(), 0));
    assert!(matches!(t.storage.delete(job).await, Err(Error::JobNotFound(id)) if id == job));
}

async fn delete_refuses_parents_and_children_of_the_living(t: Store) {
    let [root, child, grandchild] = family(&t, [JobStatus::Waiting, JobStatus::Completed, JobStatus::Completed]).await;
    let all = t.jobs().await;
    assert!(matches!(t.storage.delete(root).await, Err(Error::JobHasChildren(id)) if id == root));
    assert!(matches!(t.storage.delete(child).await, Err(Error::JobHasPendingParent(id)) if id == child));
    assert!(matches!(t.storage.delete_workflow(child).await, Err(Error::JobHasPendingParent(id)) if id == child));
    let joining = Row::completed().put(&t).await;
    t.fan_out(joining, "pending").await;
    assert!(matches!(t.storage.delete(joining).await, Err(Error::JobHasChildren(id)) if id == joining));
    assert!(t.jobs().await.is_superset(&all));
    t.storage.delete(grandchild).await.unwrap();
}

async fn delete_workflow_takes_everything_below(t: Store) {
    let ids = family(&t, [JobStatus::Running, JobStatus::Waiting, JobStatus::Completed]).await;
    // Its parent is gone; only the root names it.
    let dangling = Row::completed().parent(JobId::new()).root(ids[0]).put(&t).await;
    let other = Row::completed().put(&t).await;
    assert_eq!(t.storage.delete_workflow(ids[0]).await.unwrap(), 4);
    assert_eq!((t.jobs().await, t.orphans().await), ([other].into(), 0));
    assert!(matches!(t.storage.delete_workflow(dangling).await, Err(Error::JobNotFound(_))));
}

async fn a_workflow_that_is_too_deep_is_refused_whole(t: Store) {
    let root = Row::new(JobStatus::Waiting).put(&t).await;
    let mut parent = root;
    for _ in 0..256 {
        parent = Row::new(JobStatus::Waiting).parent(parent).root(root).put(&t).await;
    }
    assert_eq!(t.storage.cancel(root).await.unwrap(), 257);
    t.exec("update @jobs set status = 'waiting'").await;
    Row::new(JobStatus::Waiting).parent(parent).root(root).put(&t).await;
    assert!(matches!(t.storage.cancel(root).await, Err(Error::SubtreeTooDeep(id)) if id == root));
    assert!(matches!(t.storage.delete_workflow(root).await, Err(Error::SubtreeTooDeep(_))));
    assert_eq!(t.number("select count(*) from @jobs where status = 'waiting'").await, 258);
}

async fn purge_takes_one_queue_and_status_and_nothing_guarded(t: Store) {
    for purged in PurgeStatus::ALL {
        t.exec("delete from @jobs").await;
        for status in JobStatus::ALL {
            Row::new(status).queue("a").put(&t).await;
            Row::new(status).queue("b").put(&t).await;
        }
        assert_eq!(t.storage.purge(&queue("a"), purged, 10).await.unwrap(), 1);
        let left = format!("select count(*) from @jobs where queue = 'a' and status = '{}'", purged.status());
        assert_eq!((t.number(&left).await, t.jobs().await.len()), (0, 15), "{purged:?}");
    }
    t.exec("delete from @jobs").await;
    let live = family(&t, [JobStatus::Waiting, JobStatus::Completed, JobStatus::Running]).await;
    assert_eq!(t.storage.purge(&queue("default"), PurgeStatus::Completed, 10).await.unwrap(), 0);
    assert_eq!(t.jobs().await, live.into());
}

async fn purge_takes_families_from_below_in_bounded_steps(t: Store) {
    family(&t, [JobStatus::Completed, JobStatus::Completed, JobStatus::Completed]).await;
    let mut steps = Vec::new();
    loop {
        let deleted = t.storage.purge(&queue("default"), PurgeStatus::Completed, 2).await.unwrap();
        assert!(deleted <= 2);
        steps.push(deleted);
        if deleted == 0 {
            break;
        }
    }
    assert_eq!(steps, [1, 1, 1, 0]);
    assert_eq!((t.jobs().await.len(), t.orphans().await), (0, 0));
}

/// Each of the three ways to delete on request frees the window, and the next enqueue is a new job.
async fn explicit_deletes_release_the_window(t: Store) {
    let windows = t.storage.windowed_enqueue().unwrap();
    let mut seen = BTreeSet::new();
    for way in ["delete", "workflow", "purge"] {
        let first = windows.enqueue_windowed(&new_job("t", keyed())).await.unwrap();
        assert!(first.is_new() && seen.insert(first.id()), "{way}");
        t.set_status(first.id(), JobStatus::Completed).await;
        let pass = t.storage.retention().unwrap();
        t.exec(&format!("update @jobs set completed_at = {}", t.ago(DAY * 60))).await;
        assert_eq!(pass.delete_terminal_older_than(TerminalStatus::Completed, DAY, 9).await.unwrap(), 0, "pinned");
        match way {
            "delete" => t.storage.delete(first.id()).await.unwrap(),
            "workflow" => assert_eq!(t.storage.delete_workflow(first.id()).await.unwrap(), 1),
            _ => assert_eq!(t.storage.purge(&queue("default"), PurgeStatus::Completed, 9).await.unwrap(), 1),
        }
        assert_eq!(t.number("select count(*) from @unique_locks").await, 0, "{way}");
    }
    assert!(windows.enqueue_windowed(&new_job("t", keyed())).await.unwrap().is_new());
}

/// Whoever comes first wins whole: the job is pending with its side rows, or it is gone with them.
async fn a_requeue_that_races_a_pass_wins_whole_or_loses_whole(t: Store) {
    for _ in 0..30 {
        let job = Row::new(JobStatus::Failed).ended(&t, DAY * 91).put(&t).await;
        t.signal(job, None).await;
        let (sweep, requeue) = (t.storage.clone(), t.another());
        let pass = async move {
            sweep.retention().unwrap().delete_terminal_older_than(TerminalStatus::Failed, DAY, 9).await.unwrap()
        };
        let (deleted, requeued) =
            tokio::join!(tokio::spawn(pass), tokio::spawn(async move { requeue.requeue(job).await }));
        match (deleted.unwrap(), requeued.unwrap()) {
            (0, Ok(())) => assert_eq!(t.job(job).await.status, JobStatus::Pending),
            (1, Err(Error::JobNotFound(id))) => assert_eq!((id, t.storage.job(job).await.unwrap()), (job, None)),
            other => panic!("half a win: {other:?}"),
        }
        assert_eq!(t.orphans().await, 0);
        t.exec("delete from @jobs").await;
    }
}

cases!(
    cancel_stops_unfinished_jobs_and_stamps_their_end,
    cancel_takes_the_whole_subtree_and_the_claims_in_it,
    a_cancelled_run_writes_nothing_more,
    pause_and_resume_go_there_and_back,
    a_paused_queue_is_listed_and_gives_nothing,
    requeue_starts_from_nothing,
    requeue_refuses_what_is_not_over_and_what_is_not_alone,
    delete_takes_one_job_with_its_side_rows,
    delete_refuses_parents_and_children_of_the_living,
    delete_workflow_takes_everything_below,
    a_workflow_that_is_too_deep_is_refused_whole,
    purge_takes_one_queue_and_status_and_nothing_guarded,
    purge_takes_families_from_below_in_bounded_steps,
    explicit_deletes_release_the_window,
    a_requeue_that_races_a_pass_wins_whole_or_loses_whole,
);
