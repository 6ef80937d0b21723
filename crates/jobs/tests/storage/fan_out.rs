//! Children: started all or none, counted once each, and joined by a parent that wakes once.

use std::time::Duration;

use ebbtide_jobs::{
    Claim, Completion, DeadLetterReason, Error, Failure, FanOut, FanOutId, FanOutOutcome, FanOutStatus, FanOutStore,
    JobId, JobStatus, Joined, NewJob, QueueName, Reclaim,
};

use crate::support::{DAY, Store, new_job, options, request};

pub fn store(t: &Store) -> &dyn FanOutStore {
    t.storage.fan_outs().unwrap()
}

pub fn children(count: usize) -> Vec<NewJob> {
    (0..count).map(|_| new_job("child", options().queue("children"))).collect()
}

/// A parent that waits for its children.
pub async fn family(t: &Store, fan_out: FanOut, count: usize) -> (JobId, FanOutId) {
    let parent = t.running("w").await;
    let id = store(t).start(&parent, 0, &fan_out, &children(count)).await.unwrap();
    (parent.job_id, id)
}

/// The claims on so many children, in their order.
pub async fn claims(t: &Store, count: u32) -> Vec<Claim> {
    let jobs = t.storage.claim(&request("c", &[("children", count)])).await.unwrap();
    let mut jobs: Vec<_> = jobs.into_iter().map(|job| (job.fan_out_index, job.claim().unwrap())).collect();
    jobs.sort_by_key(|(index, _)| *index);
    jobs.into_iter().map(|(_, claim)| claim).collect()
}

pub async fn complete(t: &Store, claim: &Claim) {
    let result = Some(claim.job_id.to_string().into_bytes());
    t.storage.complete(&Completion::new(claim.clone(), result).unwrap()).await.unwrap();
}

pub async fn fail(t: &Store, claim: &Claim) {
    t.storage.fail(claim, &Failure::new("no"), DeadLetterReason::NotRetryable).await.unwrap();
}

/// Status, and the children completed, failed and cancelled.
pub async fn counts(t: &Store, id: FanOutId) -> String {
    let of = format!("from @fan_outs where id = {}", t.id(JobId::from_uuid(id.as_uuid()).unwrap()));
    let counts = "status || ' ' || completed_count || ' ' || failed_count || ' ' || cancelled_count";
    t.text(&format!("select {counts} {of}")).await.unwrap()
}

async fn status(t: &Store, id: JobId) -> JobStatus {
    t.job(id).await.status
}

/// Claims the parent again and joins.
async fn joined(t: &Store, id: FanOutId) -> FanOutOutcome {
    let parent = t.claim("w2", 1).await.pop().expect("the parent is due");
    match store(t).join(&parent.claim().unwrap(), id).await.unwrap() {
        Joined::Decided(outcome) => outcome,
        Joined::Suspended => panic!("it is decided"),
    }
}

async fn children_are_linked_and_inherit_and_the_parent_waits(t: Store) {
    let parent = t.enqueue("t", options().tenant("acme").meta("k", "v")).await;
    let claim = t.claim("w", 1).await[0].claim().unwrap();
    let own = new_job("child", options().queue("children").tenant("other").meta("k", "own"));
    let set = FanOut::collect_all().priority(5).retries(0);
    let id = store(&t).start(&claim, 3, &set, &[children(1).remove(0), own]).await.unwrap();
    let waiting = t.job(parent).await;
    assert_eq!((waiting.status, waiting.attempt), (JobStatus::Waiting, 1));
    assert_eq!((waiting.locked_by, waiting.dispatch_token, waiting.run_at), (None, None, None));
    assert_eq!(waiting.waiting_signal_name.as_deref(), Some("_fanout"));
    let jobs = t.storage.claim(&request("c", &[("children", 9)])).await.unwrap();
    assert_eq!(jobs.len(), 2);
    for job in &jobs {
        let index = job.fan_out_index;
        assert_eq!((job.parent_job_id, job.root_job_id, job.fan_out_id), (Some(parent), Some(parent), Some(id)));
        assert_eq!(job.unique_key.as_deref(), Some(&*format!("fanout-{id}-{index}")));
        assert_eq!((job.priority, job.max_retries), (5, 0));
        let expected = if index == 0 { ("acme", "v") } else { ("other", "own") };
        assert_eq!((job.tenant.as_str(), job.metadata["k"].as_str()), expected);
    }
    let record = t.text("select result from @checkpoints where call_index = 3 and call_type = 'fanout'").await;
    // On PostgreSQL the bytes come as hexadecimal digits.
    let hex: String = id.to_string().bytes().map(|byte| format!("{byte:02x}")).collect();
    assert!([id.to_string(), format!("\\x{hex}")].contains(&record.unwrap()));
    assert_eq!(t.number("select span_end from @checkpoints").await, 4);

    // A child that fans out itself: the root stays the top of the workflow.
    let nested = store(&t).start(&jobs[0].claim().unwrap(), 0, &FanOut::fail_fast(), &children(1)).await.unwrap();
    let grandchild = t.storage.claim(&request("c", &[("children", 9)])).await.unwrap().remove(0);
    assert_eq!((grandchild.parent_job_id, grandchild.root_job_id), (Some(jobs[0].id), Some(parent)));
    assert_eq!(grandchild.fan_out_id, Some(nested));
}

async fn a_start_that_is_refused_leaves_nothing(t: Store) {
    let claim = t.running("w").await;
    let lost = Claim { token: t.running("w").await.token, ..claim.clone() };
    let refused = store(&t).start(&lost, 0, &FanOut::fail_fast(), &children(2)).await;
    assert!(matches!(refused, Err(Error::JobNotOwned(id)) if id == claim.job_id));
    assert!(matches!(store(&t).start(&claim, 0, &FanOut::fail_fast(), &[]).await, Err(Error::Invalid { .. })));
    // The record is there already: nothing of the second start may stay.
    t.exec(&format!(
        "insert into @checkpoints (job_id, call_index, call_type) values ({}, 0, 'fanout')",
        t.id(claim.job_id)
    ))
    .await;
    assert!(store(&t).start(&claim, 0, &FanOut::fail_fast(), &children(2)).await.is_err());
    assert_eq!(t.number("select count(*) from @fan_outs").await, 0);
    assert_eq!(t.number("select count(*) from @jobs where type = 'child'").await, 0);
    assert_eq!(status(&t, claim.job_id).await, JobStatus::Running);
}

async fn fail_fast_is_decided_by_the_first_that_fails_or_is_cancelled(t: Store) {
    for is_cancelled in [false, true] {
        let (parent, id) = family(&t, FanOut::fail_fast(), 3).await;
        let claims = claims(&t, 3).await;
        complete(&t, &claims[0]).await;
        assert_eq!((counts(&t, id).await.as_str(), status(&t, parent).await), ("pending 1 0 0", JobStatus::Waiting));
        if is_cancelled {
            t.storage.cancel(claims[1].job_id).await.unwrap();
        } else {
            fail(&t, &claims[1]).await;
        }
        let woken = t.job(parent).await;
        assert_eq!((woken.status, woken.attempt, woken.waiting_signal_name), (JobStatus::Pending, 0, None));
        let outcome = joined(&t, id).await;
        assert_eq!((outcome.status, outcome.total, outcome.missing()), (FanOutStatus::Failed, 3, None));
        assert_eq!(outcome.children[2].status, JobStatus::Running, "it goes on");
        // A child that finishes later is counted, and decides and wakes nothing.
        complete(&t, &claims[2]).await;
        let expected = if is_cancelled { "failed 2 0 1" } else { "failed 2 1 0" };
        assert_eq!((counts(&t, id).await.as_str(), status(&t, parent).await), (expected, JobStatus::Running));
        t.exec("delete from @jobs").await;
    }
}

async fn fail_fast_completes_with_the_last_and_the_results_come_by_index(t: Store) {
    let (parent, id) = family(&t, FanOut::fail_fast(), 3).await;
    let claims = claims(&t, 3).await;
    for claim in claims.iter().rev() {
        assert_eq!(status(&t, parent).await, JobStatus::Waiting);
        complete(&t, claim).await;
    }
    assert_eq!((counts(&t, id).await.as_str(), status(&t, parent).await), ("completed 3 0 0", JobStatus::Pending));
    let outcome = joined(&t, id).await;
    assert_eq!(outcome.status, FanOutStatus::Completed);
    for (index, (child, claim)) in outcome.children.iter().zip(&claims).enumerate() {
        assert_eq!((child.index as usize, child.id), (index, claim.job_id));
        assert_eq!(child.result.as_deref(), Some(claim.job_id.to_string().as_bytes()));
    }
}

async fn collect_all_waits_for_everyone(t: Store) {
    let (parent, id) = family(&t, FanOut::collect_all(), 3).await;
    let claims = claims(&t, 3).await;
    fail(&t, &claims[0]).await;
    t.storage.cancel(claims[1].job_id).await.unwrap();
    assert_eq!((counts(&t, id).await.as_str(), status(&t, parent).await), ("pending 0 1 1", JobStatus::Waiting));
    complete(&t, &claims[2]).await;
    assert_eq!((counts(&t, id).await.as_str(), status(&t, parent).await), ("completed 1 1 1", JobStatus::Pending));
    let outcome = joined(&t, id).await;
    let statuses: Vec<_> = outcome.children.iter().map(|child| child.status).collect();
    assert_eq!(statuses, [JobStatus::Failed, JobStatus::Cancelled, JobStatus::Completed]);
    assert_eq!(outcome.children[0].error.as_deref(), Some("no"));
}

async fn a_threshold_fails_when_it_is_out_of_reach_and_not_before(t: Store) {
    // Share, children, failures that it can take.
    for (share, total, spare) in [(0.5, 3, 1), (1.0, 2, 0), (0.0, 2, 2), (0.07, 100, 93), (0.34, 3, 1)] {
        let (parent, id) = family(&t, FanOut::threshold(share).unwrap(), total).await;
        let claims = claims(&t, u32::try_from(total).unwrap()).await;
        for claim in &claims[..spare] {
            fail(&t, claim).await;
        }
        let expected = if spare == total { JobStatus::Pending } else { JobStatus::Waiting };
        assert_eq!(status(&t, parent).await, expected, "{share} of {total}");
        if spare < total {
            fail(&t, &claims[spare]).await;
            assert_eq!(status(&t, parent).await, JobStatus::Pending, "{share} of {total}");
            assert!(counts(&t, id).await.starts_with("failed"), "{share} of {total}");
        } else {
            assert!(counts(&t, id).await.starts_with("completed"));
        }
        t.exec("delete from @jobs").await;
    }
    let (parent, id) = family(&t, FanOut::threshold(0.5).unwrap(), 3).await;
    let claims = claims(&t, 3).await;
    fail(&t, &claims[0]).await;
    complete(&t, &claims[1]).await;
    assert_eq!(status(&t, parent).await, JobStatus::Waiting);
    complete(&t, &claims[2]).await;
    assert_eq!((counts(&t, id).await.as_str(), status(&t, parent).await), ("completed 2 1 0", JobStatus::Pending));
}

async fn what_fails_cancels_the_rest_if_it_was_asked_to(t: Store) {
    let (_, id) = family(&t, FanOut::fail_fast().cancel_on_parent_failure(), 4).await;
    let claims = claims(&t, 3).await;
    // Below a child, there is more.
    let nested = store(&t).start(&claims[2], 0, &FanOut::collect_all(), &children(1)).await.unwrap();
    complete(&t, &claims[0]).await;
    fail(&t, &claims[1]).await;
    assert_eq!(counts(&t, id).await, "failed 1 1 2");
    assert_eq!(counts(&t, nested).await, "cancelled 0 0 1");
    assert_eq!(t.number("select count(*) from @jobs where status = 'cancelled' and completed_at is not null").await, 3);
    let lost = t.storage.heartbeat(&claims[2], DAY).await;
    assert!(matches!(lost, Err(Error::JobNotOwned(_))), "a run elsewhere loses its claim");
}

async fn a_cancelled_parent_cancels_its_fan_out_and_wakes_its_own_parent(t: Store) {
    let (root, outer) = family(&t, FanOut::collect_all(), 1).await;
    let middle = claims(&t, 1).await.remove(0);
    let inner = store(&t).start(&middle, 0, &FanOut::collect_all(), &children(2)).await.unwrap();
    let leaf = claims(&t, 1).await.remove(0);
    assert_eq!(t.storage.cancel(middle.job_id).await.unwrap(), 3);
    assert_eq!(
        (counts(&t, inner).await.as_str(), counts(&t, outer).await.as_str()),
        ("cancelled 0 0 2", "completed 0 0 1")
    );
    assert_eq!(status(&t, root).await, JobStatus::Pending);
    let late = t.storage.complete(&Completion::new(leaf, None).unwrap()).await;
    assert!(matches!(late, Err(Error::JobNotOwned(_))));
    assert_eq!(counts(&t, inner).await, "cancelled 0 0 2", "counted once");
}

async fn only_the_end_of_a_child_counts(t: Store) {
    let (parent, id) = family(&t, FanOut::fail_fast(), 2).await;
    let claims = claims(&t, 2).await;
    t.storage.retry(&claims[0], &Failure::new("again"), Duration::ZERO).await.unwrap();
    t.storage.release(&claims[1]).await.unwrap();
    assert_eq!((counts(&t, id).await.as_str(), status(&t, parent).await), ("pending 0 0 0", JobStatus::Waiting));
    // A completion that comes twice, of which one has no claim any more.
    let again = self::claims(&t, 9).await;
    complete(&t, &again[0]).await;
    let twice = t.storage.complete(&Completion::new(again[0].clone(), None).unwrap()).await;
    assert!(matches!(twice, Err(Error::JobNotOwned(_))));
    assert_eq!(counts(&t, id).await, "pending 1 0 0");
}

async fn a_child_whose_workers_were_lost_for_good_counts_as_failed(t: Store) {
    let (parent, id) = family(&t, FanOut::fail_fast().retries(0), 1).await;
    claims(&t, 1).await;
    t.exec(&format!("update @jobs set started_at = {} where type = 'child'", t.ago(DAY))).await;
    let lost = t.storage.reclaim(&Reclaim::older_than(Duration::from_secs(60)).margin(0)).await.unwrap();
    assert_eq!(lost.iter().filter(|job| job.is_dead).count(), 1);
    assert_eq!((counts(&t, id).await.as_str(), status(&t, parent).await), ("failed 0 1 0", JobStatus::Pending));
}

async fn a_paused_parent_is_not_woken_until_it_is_resumed(t: Store) {
    let (parent, id) = family(&t, FanOut::collect_all(), 1).await;
    t.storage.pause(parent).await.unwrap();
    complete(&t, &claims(&t, 1).await[0]).await;
    assert_eq!((counts(&t, id).await.as_str(), status(&t, parent).await), ("completed 1 0 0", JobStatus::Paused));
    t.storage.resume(parent).await.unwrap();
    assert_eq!(status(&t, parent).await, JobStatus::Waiting);
    let settled = store(&t).settle(ebbtide_jobs::FanOutScan::Joinable, DAY, 10).await.unwrap();
    assert_eq!((settled.rows, settled.woken), (1, vec![QueueName::default_queue()]));
    assert_eq!(joined(&t, id).await.status, FanOutStatus::Completed);
}

async fn a_join_before_the_end_waits_again(t: Store) {
    let (parent, id) = family(&t, FanOut::collect_all(), 1).await;
    let child = claims(&t, 1).await.remove(0);
    // An operator's hand, or a wake-up that raced.
    t.exec(&format!("update @jobs set status = 'pending' where id = {}", t.id(parent))).await;
    let claim = t.claim("w2", 1).await[0].claim().unwrap();
    let other: FanOutId = JobId::new().to_string().parse().unwrap();
    assert!(matches!(store(&t).join(&claim, other).await, Err(Error::FanOutNotFound(_))));
    assert_eq!(store(&t).join(&claim, id).await.unwrap(), Joined::Suspended);
    assert!(matches!(store(&t).join(&claim, id).await, Err(Error::JobNotOwned(_))));
    complete(&t, &child).await;
    assert_eq!(status(&t, parent).await, JobStatus::Pending);
}

/// Many workers finish the children of two fan-outs at once, in batches, some of them twice.
async fn concurrent_ends_count_each_child_once_and_wake_once(t: Store) {
    let mut families = Vec::new();
    for _ in 0..2 {
        families.push(family(&t, FanOut::collect_all(), 60).await);
    }
    let mut workers = Vec::new();
    for worker in 0..6 {
        let storage = if worker % 2 == 0 { t.storage.clone() } else { t.another() };
        workers.push(tokio::spawn(async move {
            let name = format!("w{worker}");
            loop {
                let jobs = storage.claim(&request(&name, &[("children", 5)])).await.unwrap();
                if jobs.is_empty() {
                    return;
                }
                let claims: Vec<_> = jobs.iter().map(|job| job.claim().unwrap()).collect();
                let (failing, completing) = claims.split_first().unwrap();
                let failure = Failure::new("no");
                storage.fail(failing, &failure, DeadLetterReason::NotRetryable).await.unwrap();
                let done: Vec<_> =
                    completing.iter().chain(completing).map(|c| Completion::new(c.clone(), None).unwrap()).collect();
                storage.batch_completion().unwrap().complete_batch(&done).await.unwrap();
            }
        }));
    }
    for worker in workers {
        worker.await.unwrap();
    }
    for (parent, id) in &families {
        let counts = counts(&t, *id).await;
        let numbers: Vec<u32> = counts.split(' ').skip(1).map(|count| count.parse().unwrap()).collect();
        assert_eq!((numbers.iter().sum::<u32>(), counts.starts_with("completed")), (60, true), "{counts}");
        // A parent that two enders met at once may be left to the recovery.
        store(&t).settle(ebbtide_jobs::FanOutScan::Joinable, DAY, 10).await.unwrap();
        assert_eq!((status(&t, *parent).await, t.job(*parent).await.attempt), (JobStatus::Pending, 0));
    }
}

cases!(
    children_are_linked_and_inherit_and_the_parent_waits,
    a_start_that_is_refused_leaves_nothing,
    fail_fast_is_decided_by_the_first_that_fails_or_is_cancelled,
    fail_fast_completes_with_the_last_and_the_results_come_by_index,
    collect_all_waits_for_everyone,
    a_threshold_fails_when_it_is_out_of_reach_and_not_before,
    what_fails_cancels_the_rest_if_it_was_asked_to,
    a_cancelled_parent_cancels_its_fan_out_and_wakes_its_own_parent,
    only_the_end_of_a_child_counts,
    a_child_whose_workers_were_lost_for_good_counts_as_failed,
    a_paused_parent_is_not_woken_until_it_is_resumed,
    a_join_before_the_end_waits_again,
    concurrent_ends_count_each_child_once_and_wake_once,
);
