//! Enqueueing: options, batches, and the clock that decides when a job is due.

use std::collections::BTreeMap;
use std::time::Duration;

use ebbtide_jobs::{Determinism, EnqueueOptions, Enqueued, Error, JobId, JobStatus, NewJob};
use jiff::Timestamp;

use crate::support::{Store, new_job, options};

async fn every_option_is_stored(t: Store) {
    let metadata = BTreeMap::from([("a".to_owned(), "1".to_owned())]);
    let options = options()
        .queue("slow")
        .priority(-7)
        .retries(9)
        .timeout(Duration::from_millis(1500))
        .tenant("acme")
        .metadata(metadata)
        .meta("b", "2")
        .determinism(Determinism::Strict)
        .unique("k")
        .trace_context(vec![0, 255]);
    let id = t.enqueue("mail", options).await;
    let job = t.storage.job(id).await.unwrap().unwrap();
    assert_eq!(job.id, id);
    assert_eq!((job.job_type.as_str(), job.queue.as_str(), job.priority), ("mail", "slow", -7));
    assert_eq!((job.max_retries, job.timeout), (9, Some(Duration::from_millis(1500))));
    assert_eq!((job.tenant.as_str(), job.determinism), ("acme", Determinism::Strict));
    assert_eq!(job.metadata.into_iter().collect::<Vec<_>>(), [("a".into(), "1".into()), ("b".into(), "2".into())]);
    assert_eq!((job.unique_key.as_deref(), job.trace_context.as_deref()), (Some("k"), Some(&[0, 255][..])));
    assert_eq!((job.status, job.attempt, job.run_at, job.completed_at), (JobStatus::Pending, 0, None, None));
    assert_eq!(job.args, br#""mail""#);
}

async fn left_out_options_have_their_defaults(t: Store) {
    let id = t.enqueue("mail", options()).await;
    let job = t.storage.job(id).await.unwrap().unwrap();
    assert_eq!((job.queue.as_str(), job.priority, job.max_retries, job.timeout), ("default", 0, 2, None));
    assert_eq!((job.tenant.as_str(), job.unique_key, job.trace_context), ("", None, None));
    assert_eq!(job.determinism, Determinism::Explicit);
    assert!(job.metadata.is_empty());
}

async fn an_explicit_zero_of_retries_stays_zero(t: Store) {
    let id = t.enqueue("mail", options().retries(0)).await;
    assert_eq!(t.storage.job(id).await.unwrap().unwrap().max_retries, 0);
    let id = t.enqueue("mail", options().retries(101)).await;
    assert_eq!(t.storage.job(id).await.unwrap().unwrap().max_retries, 100);
}

async fn arguments_survive_byte_for_byte(t: Store) {
    for args in [r#"{"b":1,"a":[1.0,1e2,"\u0000é"]}"#, "null", r#""\\x41""#, &format!("\"{}\"", "x".repeat(1 << 19))] {
        let raw: Box<serde_json::value::RawValue> = serde_json::from_str(args).unwrap();
        let job = NewJob::new("t", &raw, options()).unwrap();
        let id = t.storage.enqueue(&job).await.unwrap();
        assert_eq!(t.storage.job(id).await.unwrap().unwrap().args, args.as_bytes());
        let batch = [NewJob::new("t", &raw, options()).unwrap()];
        let id = t.storage.enqueue_batch(&batch).await.unwrap()[0].id();
        assert_eq!(t.storage.job(id).await.unwrap().unwrap().args, args.as_bytes());
    }
}

async fn a_delay_counts_from_the_databases_clock(t: Store) {
    let hour = Duration::from_secs(3600);
    let batch = [new_job("t", options().delay(hour))];
    let ids = [t.enqueue("t", options().delay(hour)).await, t.storage.enqueue_batch(&batch).await.unwrap()[0].id()];
    for id in ids {
        let job = t.storage.job(id).await.unwrap().unwrap();
        let waits = job.run_at.unwrap().duration_since(job.created_at);
        assert_eq!(waits.as_micros(), 3_600_000_000);
    }
}

async fn a_time_in_the_past_means_at_once(t: Store) {
    let past: Timestamp = "2001-01-01T00:00:00Z".parse().unwrap();
    let future: Timestamp = "2201-01-01T00:00:00Z".parse().unwrap();
    let batch = [new_job("t", options().at(past)), new_job("t", options().at(future))];
    let batch = t.storage.enqueue_batch(&batch).await.unwrap();
    let past_ids = [t.enqueue("t", options().at(past)).await, batch[0].id()];
    let future_ids = [t.enqueue("t", options().at(future)).await, batch[1].id()];
    for id in past_ids {
        assert_eq!(t.storage.job(id).await.unwrap().unwrap().run_at, None);
    }
    for id in future_ids {
        assert_eq!(t.storage.job(id).await.unwrap().unwrap().run_at, Some(future));
    }
}

async fn a_batch_answers_in_its_own_order(t: Store) {
    let jobs: Vec<NewJob> = (0..500).map(|n| new_job("t", options().priority(n))).collect();
    let answers = t.storage.enqueue_batch(&jobs).await.unwrap();
    let expected: Vec<Enqueued> = jobs.iter().map(|job| Enqueued::New(job.id())).collect();
    assert_eq!(answers, expected);
    assert_eq!(t.jobs().await.len(), 500);
    assert_eq!(t.storage.enqueue_batch(&[]).await.unwrap(), []);
}

async fn a_batch_answers_a_taken_key_with_its_holder(t: Store) {
    let holder = t.enqueue("t", options().unique("taken")).await;
    let jobs = ["free", "taken", "free", "other"].map(|key| new_job("t", options().unique(key)));
    let answers = t.storage.enqueue_batch(&jobs).await.unwrap();
    let expected = [
        Enqueued::New(jobs[0].id()),
        Enqueued::Duplicate(holder),
        Enqueued::Duplicate(jobs[0].id()),
        Enqueued::New(jobs[3].id()),
    ];
    assert_eq!(answers, expected);
    assert_eq!(t.jobs().await.len(), 3);
}

async fn a_batch_with_a_window_is_refused_whole(t: Store) {
    let windowed = new_job("t", options().idempotency_key("k", Duration::from_secs(60)));
    let refused = t.storage.enqueue_batch(&[new_job("t", options()), windowed]).await;
    assert!(matches!(refused, Err(Error::BatchWindowedDedup { index: 1 })), "{refused:?}");
    assert!(t.jobs().await.is_empty());
}

async fn a_batch_is_all_or_nothing(t: Store) {
    let jobs: Vec<NewJob> = (0..3).map(|_| new_job("t", options())).collect();
    let twice = [jobs[0].clone(), jobs[1].clone(), jobs[0].clone()];
    assert!(t.storage.enqueue_batch(&twice).await.is_err(), "one id cannot be written twice");
    assert!(t.jobs().await.is_empty());
}

async fn a_job_that_is_not_there_is_none(t: Store) {
    assert_eq!(t.storage.job(JobId::new()).await.unwrap(), None);
}

cases!(
    every_option_is_stored,
    left_out_options_have_their_defaults,
    an_explicit_zero_of_retries_stays_zero,
    arguments_survive_byte_for_byte,
    a_delay_counts_from_the_databases_clock,
    a_time_in_the_past_means_at_once,
    a_batch_answers_in_its_own_order,
    a_batch_answers_a_taken_key_with_its_holder,
    a_batch_with_a_window_is_refused_whole,
    a_batch_is_all_or_nothing,
    a_job_that_is_not_there_is_none,
);

fn refusal(job_type: &str, args: &impl serde::Serialize, options: EnqueueOptions) -> &'static str {
    match NewJob::new(job_type, args, options) {
        Err(Error::Invalid { field, .. }) => field,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_no_storage_can_hold_is_refused_by_name() {
    let long = "x".repeat(256);
    assert_eq!(refusal("1", &1, options()), "type");
    assert_eq!(refusal("t", &1, options().queue("a b")), "queue");
    assert_eq!(refusal("t", &"x".repeat(1 << 20), options()), "args");
    assert_eq!(refusal("t", &1, options().tenant(&long)), "tenant");
    assert_eq!(refusal("t", &1, options().tenant("a\0")), "tenant");
    assert_eq!(refusal("t", &1, options().unique(&long)), "unique key");
    assert_eq!(refusal("t", &1, options().unique("")), "unique key");
    assert_eq!(refusal("t", &1, options().meta("a", "\0")), "metadata");
    assert_eq!(refusal("t", &1, options().meta("a", "x".repeat(1 << 16))), "metadata");
    assert_eq!(refusal("t", &1, options().idempotency_key(&long, Duration::from_secs(1))), "idempotency key");
}
