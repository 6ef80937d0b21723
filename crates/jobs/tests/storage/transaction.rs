//! Enqueueing in the caller's own transaction, and in SQL.

use std::time::Duration;

use ebbtide_jobs::{EnqueueOptions, Enqueued, Error, NewJob};
use rusqlite::TransactionBehavior;

use crate::support::{Raw, Store, connect, new_job, options};

const HOUR: Duration = Duration::from_secs(3600);

/// Enqueues all of them in one transaction of the caller's own.
async fn enqueue_in(t: &Store, jobs: &[NewJob], commit: bool) -> Vec<Result<Enqueued, Error>> {
    let mut answers = Vec::new();
    match &t.raw {
        Raw::Postgres { url, .. } => {
            let mut client = connect(url).await;
            let transaction = client.transaction().await.unwrap();
            for job in jobs {
                answers.push(ebbtide_jobs::postgres::enqueue_in(&transaction, job).await);
            }
            if commit { transaction.commit().await.unwrap() } else { transaction.rollback().await.unwrap() }
        }
        Raw::Sqlite { path, .. } => {
            let mut db = rusqlite::Connection::open(path).unwrap();
            let transaction = db.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
            for job in jobs {
                answers.push(ebbtide_jobs::sqlite::enqueue_in(&transaction, job));
            }
            if commit { transaction.commit().unwrap() } else { transaction.rollback().unwrap() }
        }
    }
    answers
}

fn keyed() -> EnqueueOptions {
    options().idempotency_key("k", HOUR)
}

async fn a_rollback_leaves_neither_job_nor_window(t: Store) {
    let answers = enqueue_in(&t, &[new_job("t", options()), new_job("t", keyed())], false).await;
    assert!(answers.iter().all(|answer| matches!(answer, Ok(Enqueued::New(_)))), "{answers:?}");
    assert!(t.jobs().await.is_empty());
    assert_eq!(t.number("select count(*) from @unique_locks").await, 0);
}

async fn duplicates_do_not_spoil_the_callers_transaction(t: Store) {
    let held = t.enqueue("t", options().unique("u")).await;
    let jobs = [
        new_job("t", keyed()),
        new_job("t", keyed()),
        new_job("t", options().unique("u")),
        new_job("t", options().unique("u").idempotency_key("other", HOUR)),
        new_job("last", options()),
    ];
    let answers = enqueue_in(&t, &jobs, true).await;
    assert_eq!(answers[0].as_ref().unwrap(), &Enqueued::New(jobs[0].id()));
    assert_eq!(answers[1].as_ref().unwrap(), &Enqueued::Duplicate(jobs[0].id()));
    assert!(matches!(answers[2], Err(Error::DuplicateJob { holder }) if holder == held), "{:?}", answers[2]);
    assert!(matches!(answers[3], Err(Error::DuplicateJob { holder }) if holder == held), "{:?}", answers[3]);
    assert_eq!(answers[4].as_ref().unwrap(), &Enqueued::New(jobs[4].id()));
    assert_eq!(t.jobs().await, [held, jobs[0].id(), jobs[4].id()].into());
    assert_eq!(t.number("select count(*) from @unique_locks").await, 1);
}

cases!(a_rollback_leaves_neither_job_nor_window, duplicates_do_not_spoil_the_callers_transaction);

async fn outcome(t: &Store, arguments: &str) -> String {
    t.text(&format!("select outcome from ebbtide_jobs.enqueue({arguments})")).await.unwrap()
}

#[tokio::test]
async fn sql_enqueues_with_the_same_rules() {
    let t = Store::postgres().await;
    assert_eq!(outcome(&t, r#"'mail', '{"b" : "\u0000"}', 'slow', p_unique_key => 'u'"#).await, "new");
    let id = *t.jobs().await.first().unwrap();
    let job = t.storage.job(id).await.unwrap().unwrap();
    assert_eq!(id.as_uuid().get_version_num(), 7);
    assert_eq!((job.args.as_slice(), job.queue.as_str(), job.max_retries), (&br#"{"b" : "\u0000"}"#[..], "slow", 2));
    assert_eq!(outcome(&t, "'mail', p_unique_key => 'u'").await, "held");
    assert_eq!(t.jobs().await.len(), 1);

    // The window is the one that the library takes.
    let args = "'t', p_idempotency_key => 'k', p_window => '1 hour'";
    assert_eq!(outcome(&t, args).await, "new");
    assert_eq!(outcome(&t, args).await, "duplicate");
    let windows = t.storage.windowed_enqueue().unwrap();
    assert!(!windows.enqueue_windowed(&new_job("t", keyed())).await.unwrap().is_new());
    assert_eq!(outcome(&t, "'t', p_unique_key => 'u', p_idempotency_key => 'z', p_window => '1 s'").await, "held");
    assert_eq!(t.number("select count(*) from @unique_locks").await, 1);

    assert_eq!(outcome(&t, "'later', p_delay => '1 hour'").await, "new");
    let wait = "select extract(epoch from run_at - created_at)::int from @jobs where type = 'later'";
    assert_eq!(t.number(wait).await, 3600);
}

#[tokio::test]
async fn sql_refuses_what_the_library_refuses() {
    let t = Store::postgres().await;
    for (arguments, code) in [
        ("'1'", "EJ001"),
        ("null", "EJ001"),
        ("'t', '{'", "EJ001"),
        ("'t', null", "EJ001"),
        ("'t', '1', 'a b'", "EJ001"),
        ("'t', p_metadata => '[]'", "EJ001"),
        ("'t', p_metadata => '{\"a\":1}'", "EJ001"),
        ("'t', p_idempotency_key => 'k'", "EJ002"),
        ("'t', p_window => '1 s'", "EJ002"),
        ("'t', p_idempotency_key => '', p_window => '1 s'", "EJ002"),
        ("'t', p_idempotency_key => 'k', p_window => '0 s'", "EJ002"),
    ] {
        let refused = t.try_exec(&format!("select from ebbtide_jobs.enqueue({arguments})")).await;
        assert!(refused.as_ref().is_err_and(|error| error.contains(code)), "{arguments}: {refused:?}");
    }
    assert!(t.jobs().await.is_empty());
}
