//! What a claim gives the right to, and that a claim that is over gives none.

use std::time::Duration;

use ebbtide_jobs::{Claim, Completion, DeadLetterReason, Error, Failure, JobStatus, Reclaim};

use crate::support::{DAY, SECOND, Store};

fn completion(claim: &Claim) -> Completion {
    Completion::new(claim.clone(), Some(b"42".to_vec())).unwrap()
}

fn failure() -> Failure {
    Failure::new("no\npassword=hunter2")
}

async fn a_completion_stores_the_result_and_lets_go(t: Store) {
    let claim = t.running("w").await;
    t.storage.complete(&completion(&claim)).await.unwrap();
    let job = t.job(claim.job_id).await;
    assert_eq!((job.status, job.result.as_deref(), job.attempt), (JobStatus::Completed, Some(&b"42"[..]), 1));
    assert!(job.completed_at.unwrap() >= job.started_at.unwrap());
    assert_eq!((job.locked_by, job.locked_until, job.dispatch_token), (None, None, None));
    assert_eq!((job.dead_lettered_at, job.dead_letter_reason), (None, None));
}

async fn a_retry_waits_on_the_databases_clock(t: Store) {
    let claim = t.running("w").await;
    t.storage.retry(&claim, &failure(), DAY).await.unwrap();
    let job = t.job(claim.job_id).await;
    assert_eq!((job.status, job.attempt, job.completed_at), (JobStatus::Pending, 1, None));
    assert_eq!(job.run_at.unwrap().duration_since(job.updated_at).as_micros(), DAY.as_micros() as i128);
    assert_eq!(job.last_error.as_deref(), Some("no password=***"));
    assert_eq!((job.locked_by, job.dispatch_token), (None, None));
    assert!(t.claim("w", 1).await.is_empty());
}

async fn a_failure_for_good_is_dead_lettered(t: Store) {
    let reasons = [DeadLetterReason::AttemptsExhausted, DeadLetterReason::NotRetryable, DeadLetterReason::WorkerLost];
    for reason in reasons {
        let claim = t.running("w").await;
        t.storage.fail(&claim, &failure(), reason).await.unwrap();
        let job = t.job(claim.job_id).await;
        assert_eq!((job.status, job.dead_letter_reason.as_deref()), (JobStatus::Failed, Some(reason.as_str())));
        assert!(job.completed_at.is_some());
        assert_eq!(job.dead_lettered_at, job.completed_at);
        assert_eq!((job.locked_by, job.last_error.as_deref()), (None, Some("no password=***")));
    }
}

async fn a_release_does_not_count_the_attempt(t: Store) {
    let claim = t.running("w").await;
    t.storage.release(&claim).await.unwrap();
    let job = t.job(claim.job_id).await;
    assert_eq!((job.status, job.attempt, job.started_at), (JobStatus::Pending, 0, None));
    assert_eq!(t.claim("w", 1).await[0].attempt, 1);
}

async fn a_heartbeat_moves_the_lease(t: Store) {
    let claim = t.running("w").await;
    t.storage.heartbeat(&claim, DAY).await.unwrap();
    let job = t.job(claim.job_id).await;
    let lease = job.locked_until.unwrap().duration_since(job.last_heartbeat_at.unwrap());
    assert_eq!(lease.as_micros(), DAY.as_micros() as i128);
}

/// Everything that a claim gives the right to, each of which must be refused.
async fn refused(t: &Store, claim: &Claim) {
    let not_owned = |answer: Result<(), Error>, what: &str| {
        assert!(matches!(answer, Err(Error::JobNotOwned(id)) if id == claim.job_id), "{what}: {answer:?}");
    };
    let before = t.job(claim.job_id).await;
    not_owned(t.storage.heartbeat(claim, DAY).await, "heartbeat");
    not_owned(t.storage.complete(&completion(claim).delete_checkpoints(true)).await, "complete");
    not_owned(t.storage.retry(claim, &failure(), SECOND).await, "retry");
    not_owned(t.storage.fail(claim, &failure(), DeadLetterReason::NotRetryable).await, "fail");
    not_owned(t.storage.release(claim).await, "release");
    let batch = t.storage.batch_completion().unwrap();
    let answers = batch.complete_batch(&[completion(claim).delete_checkpoints(true)]).await.unwrap();
    assert_eq!(answers, [false]);
    assert_eq!(t.job(claim.job_id).await, before, "a refused write has no effect");
    assert_eq!(t.count_checkpoints(claim.job_id).await, 2);
}

async fn a_claim_that_is_over_writes_nothing(t: Store) {
    let first = t.running("w").await;
    t.checkpoints(first.job_id, 2).await;
    t.storage.release(&first).await.unwrap();
    refused(&t, &first).await;

    // The same worker again: only the token tells the two runs apart.
    let second = t.claim("w", 1).await[0].claim().unwrap();
    assert_eq!(first.worker, second.worker);
    refused(&t, &first).await;
    t.storage.heartbeat(&second, DAY).await.unwrap();

    for status in JobStatus::ALL.into_iter().filter(|status| *status != JobStatus::Running) {
        t.exec(&format!("update @jobs set status = '{status}'")).await;
        refused(&t, &second).await;
    }
}

async fn a_batch_completes_what_is_owned(t: Store) {
    let (mine, lost, kept) = (t.running("w").await, t.running("w").await, t.running("w").await);
    for claim in [&mine, &lost, &kept] {
        t.checkpoints(claim.job_id, 2).await;
    }
    t.storage.release(&lost).await.unwrap();
    let batch = [completion(&lost), completion(&mine), completion(&kept)];
    let batch = batch.map(|c| if c.claim() == &kept { c } else { c.delete_checkpoints(true) });
    let answers = t.storage.batch_completion().unwrap().complete_batch(&batch).await.unwrap();
    assert_eq!(answers, [false, true, true]);
    for (claim, status, checkpoints) in
        [(&mine, JobStatus::Completed, 0), (&lost, JobStatus::Pending, 2), (&kept, JobStatus::Completed, 2)]
    {
        assert_eq!(t.job(claim.job_id).await.status, status);
        assert_eq!(t.count_checkpoints(claim.job_id).await, checkpoints);
    }
    assert!(t.storage.batch_completion().unwrap().complete_batch(&[]).await.unwrap().is_empty());
}

async fn checkpoints_go_with_success_and_with_nothing_else(t: Store) {
    assert!(t.storage.deletes_checkpoints());
    for (case, left) in [("complete", 0), ("keep", 3), ("retry", 3), ("fail", 3), ("release", 3), ("reclaim", 3)] {
        let claim = t.running("w").await;
        t.checkpoints(claim.job_id, 3).await;
        match case {
            "complete" => t.storage.complete(&completion(&claim).delete_checkpoints(true)).await.unwrap(),
            "keep" => t.storage.complete(&completion(&claim)).await.unwrap(),
            "retry" => t.storage.retry(&claim, &failure(), DAY).await.unwrap(),
            "fail" => t.storage.fail(&claim, &failure(), DeadLetterReason::NotRetryable).await.unwrap(),
            "release" => t.storage.release(&claim).await.unwrap(),
            _ => {
                t.exec(&format!("update @jobs set started_at = {} where status = 'running'", t.ago(DAY))).await;
                assert_eq!(t.storage.reclaim(&Reclaim::older_than(SECOND)).await.unwrap().len(), 1);
            }
        }
        assert_eq!(t.count_checkpoints(claim.job_id).await, left, "{case}");
        t.exec("update @jobs set status = 'cancelled' where status = 'pending'").await;
    }
}

/// The sign of life is the heartbeat, else the start, else the end of the lease.
async fn a_job_is_stale_by_its_first_sign_of_life(t: Store) {
    let fresh = t.ago(Duration::ZERO);
    let old = t.ago(DAY);
    let cases = [
        ("heartbeat", &old, &fresh, &fresh, true),
        ("alive", &fresh, &old, &old, false),
        ("started", &"null".to_owned(), &old, &fresh, true),
        ("fresh", &"null".to_owned(), &fresh, &old, false),
        ("lease", &"null".to_owned(), &"null".to_owned(), &old, true),
        ("unknown", &"null".to_owned(), &"null".to_owned(), &"null".to_owned(), false),
    ];
    for (name, heartbeat, started, lease, _) in &cases {
        let values = format!("('{name}', 'running', 1, {heartbeat}, {started}, {lease}, 'w')");
        let columns = "type, status, attempt, last_heartbeat_at, started_at, locked_until, locked_by";
        t.exec(&format!("insert into @jobs ({columns}) values {values}")).await;
    }
    let reclaimed = t.storage.reclaim(&Reclaim::older_than(SECOND * 3600)).await.unwrap();
    let mut names: Vec<String> = reclaimed.iter().map(|job| job.job_type.to_string()).collect();
    names.sort();
    assert_eq!(names, ["heartbeat", "lease", "started"]);
    for job in reclaimed {
        assert!(!job.is_dead);
        let job = t.job(job.id).await;
        assert_eq!((job.status, job.attempt, job.locked_by), (JobStatus::Pending, 1, None));
    }
    assert!(t.storage.reclaim(&Reclaim::older_than(SECOND * 3600)).await.unwrap().is_empty());
}

async fn no_staleness_never_means_everything(t: Store) {
    t.running("w").await;
    t.exec(&format!("update @jobs set started_at = {}", t.ago(SECOND * 60 * 44))).await;
    assert!(t.storage.reclaim(&Reclaim::older_than(Duration::ZERO)).await.unwrap().is_empty());
    t.exec(&format!("update @jobs set started_at = {}", t.ago(SECOND * 60 * 46))).await;
    assert_eq!(t.storage.reclaim(&Reclaim::older_than(Duration::ZERO)).await.unwrap().len(), 1);
}

async fn a_job_that_loses_every_worker_ends_dead_lettered(t: Store) {
    let id = t.enqueue("t", crate::support::options().retries(1)).await;
    let reclaim = Reclaim::older_than(SECOND).margin(2);
    for run in 1..=4 {
        assert_eq!(t.claim("w", 1).await[0].attempt, run);
        t.exec(&format!("update @jobs set started_at = {}", t.ago(DAY))).await;
        let reclaimed = t.storage.reclaim(&reclaim).await.unwrap();
        assert_eq!((reclaimed[0].id, reclaimed[0].attempt, reclaimed[0].is_dead), (id, run, run == 4));
    }
    let job = t.job(id).await;
    assert_eq!((job.status, job.dead_letter_reason.as_deref()), (JobStatus::Failed, Some("worker_lost")));
    assert!(job.completed_at.is_some() && job.completed_at == job.dead_lettered_at);
    assert!(t.claim("w", 1).await.is_empty());
}

async fn a_reclaim_takes_one_batch(t: Store) {
    for _ in 0..5 {
        t.enqueue("t", crate::support::options()).await;
    }
    t.claim("w", 5).await;
    t.exec(&format!("update @jobs set started_at = {}", t.ago(DAY))).await;
    let reclaim = Reclaim::older_than(SECOND).limit(3);
    assert_eq!(t.storage.reclaim(&reclaim).await.unwrap().len(), 3);
    assert_eq!(t.storage.reclaim(&reclaim).await.unwrap().len(), 2);
}

async fn a_result_over_one_mebibyte_is_refused(t: Store) {
    let claim = t.running("w").await;
    let too_large = Completion::new(claim.clone(), Some(vec![0; (1 << 20) + 1]));
    assert!(matches!(too_large, Err(Error::Invalid { field: "result", .. })), "{too_large:?}");
    let largest = Completion::new(claim.clone(), Some(vec![0; 1 << 20])).unwrap();
    t.storage.complete(&largest).await.unwrap();
    assert_eq!(t.job(claim.job_id).await.result.unwrap().len(), 1 << 20);
}

cases!(
    a_completion_stores_the_result_and_lets_go,
    a_retry_waits_on_the_databases_clock,
    a_failure_for_good_is_dead_lettered,
    a_release_does_not_count_the_attempt,
    a_heartbeat_moves_the_lease,
    a_claim_that_is_over_writes_nothing,
    a_batch_completes_what_is_owned,
    checkpoints_go_with_success_and_with_nothing_else,
    a_job_is_stale_by_its_first_sign_of_life,
    no_staleness_never_means_everything,
    a_job_that_loses_every_worker_ends_dead_lettered,
    a_reclaim_takes_one_batch,
    a_result_over_one_mebibyte_is_refused,
);
