//! The dead-letter listing: its order, its filters, its pages.

use ebbtide_jobs::{
    DeadLetterFilter, DeadLetterReason, EnqueueOptions, Failure, JobId, JobStatus, JobType, QueueName, TerminalStatus,
};

use crate::support::{DAY, Store, options, request};

async fn dead(t: &Store, job_type: &str, options: EnqueueOptions, error: &str) -> JobId {
    let id = t.enqueue(job_type, options).await;
    let claimed = t.storage.claim(&request("w", &[("default", 1), ("slow", 1)])).await.unwrap();
    let claim = claimed[0].claim().unwrap();
    t.storage.fail(&claim, &Failure::new(error), DeadLetterReason::NotRetryable).await.unwrap();
    id
}

async fn list(t: &Store, filter: DeadLetterFilter) -> Vec<JobId> {
    let store = t.storage.dead_letters().unwrap();
    let listed: Vec<JobId> = store.list(&filter).await.unwrap().into_iter().map(|job| job.id).collect();
    let all = filter.limit(1000).offset(0);
    assert!(listed.len() as u64 <= store.count(&all).await.unwrap());
    listed
}

async fn the_newest_come_first_page_by_page(t: Store) {
    let mut ids = Vec::new();
    for day in 1..=5 {
        let id = dead(&t, "t", options(), "x").await;
        t.exec(&format!("update @jobs set dead_lettered_at = {} where id = {}", t.ago(DAY * day), t.id(id))).await;
        ids.push(id);
    }
    assert_eq!(list(&t, DeadLetterFilter::all()).await, ids);
    assert_eq!(list(&t, DeadLetterFilter::all().limit(2)).await, ids[..2]);
    assert_eq!(list(&t, DeadLetterFilter::all().limit(2).offset(4)).await, ids[4..]);
    assert_eq!(t.storage.dead_letters().unwrap().count(&DeadLetterFilter::all().limit(1)).await.unwrap(), 5);
}

async fn each_filter_narrows(t: Store) {
    let a =
        dead(&t, "mail", options().queue("slow").tenant("acme").meta("k", "1").meta("l", "2"), "smtp 100% down").await;
    let b = dead(&t, "print", options().meta("k", "2"), "no_paper").await;
    let all = DeadLetterFilter::all;
    assert_eq!(list(&t, all().queue(QueueName::new("slow").unwrap())).await, [a]);
    assert_eq!(list(&t, all().job_type(JobType::new("print").unwrap())).await, [b]);
    assert_eq!(list(&t, all().tenant("acme")).await, [a]);
    assert_eq!(list(&t, all().meta("k", "2")).await, [b]);
    assert_eq!(list(&t, all().meta("k", "1").meta("l", "2")).await, [a]);
    assert!(list(&t, all().meta("k", "1").meta("l", "3")).await.is_empty());
    assert_eq!(list(&t, all().search("100% d")).await, [a], "no character is a wildcard");
    assert!(list(&t, all().search("no-paper")).await.is_empty());
    assert_eq!(list(&t, all().search("prin")).await, [b]);
}

async fn only_what_failed_is_listed_and_only_while_it_is_there(t: Store) {
    let gone = dead(&t, "t", options(), "x").await;
    let requeued = dead(&t, "t", options(), "x").await;
    let cancelled = t.enqueue("t", options().delay(DAY)).await;
    t.storage.cancel(cancelled).await.unwrap();
    assert_eq!(t.job(cancelled).await.status, JobStatus::Cancelled);
    assert_eq!(list(&t, DeadLetterFilter::all()).await.len(), 2);
    t.storage.requeue(requeued).await.unwrap();
    assert_eq!(list(&t, DeadLetterFilter::all()).await, [gone]);
    t.exec(&format!("update @jobs set completed_at = {} where id = {}", t.ago(DAY * 91), t.id(gone))).await;
    let store = t.storage.retention().unwrap();
    assert_eq!(store.delete_terminal_older_than(TerminalStatus::Failed, DAY * 90, 9).await.unwrap(), 1);
    assert!(list(&t, DeadLetterFilter::all()).await.is_empty());
}

cases!(the_newest_come_first_page_by_page, each_filter_narrows, only_what_failed_is_listed_and_only_while_it_is_there,);
