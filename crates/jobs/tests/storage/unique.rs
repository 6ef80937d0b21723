//! Deduplication: the key of an unfinished job, and the window of time.

use std::collections::BTreeSet;
use std::time::Duration;

use ebbtide_jobs::{EnqueueOptions, Enqueued, Error, JobId, JobStatus};

use crate::support::{SECOND, Store, new_job, options};

const HOUR: Duration = Duration::from_secs(3600);

async fn windowed(t: &Store, options: EnqueueOptions) -> Result<Enqueued, Error> {
    let windows = t.storage.windowed_enqueue().expect("both storages keep windows");
    windows.enqueue_windowed(&new_job("t", options)).await
}

fn keyed() -> EnqueueOptions {
    options().idempotency_key("k", HOUR)
}

async fn set_status(t: &Store, id: JobId, status: JobStatus) {
    t.exec(&format!("update @jobs set status = '{status}' where id = {}", t.id(id))).await;
}

async fn a_unique_key_holds_in_every_unfinished_status(t: Store) {
    for status in JobStatus::ALL {
        let key = format!("Key-{status}");
        let holder = t.enqueue("t", options().unique(&key)).await;
        set_status(&t, holder, status).await;
        let second = t.storage.enqueue(&new_job("t", options().unique(&key))).await;
        if status.is_terminal() {
            assert!(second.is_ok(), "{status}: {second:?}");
        } else {
            assert!(matches!(second, Err(Error::DuplicateJob { holder: id }) if id == holder), "{status}: {second:?}");
        }
        t.enqueue("t", options().unique(key.to_lowercase())).await;
        t.enqueue("t", options()).await;
    }
}

async fn a_window_answers_with_the_first_id_and_writes_nothing(t: Store) {
    let first = windowed(&t, keyed()).await.unwrap();
    assert!(first.is_new());
    for status in JobStatus::ALL {
        set_status(&t, first.id(), status).await;
        assert_eq!(windowed(&t, keyed()).await.unwrap(), Enqueued::Duplicate(first.id()), "{status}");
    }
    assert_eq!(t.jobs().await, BTreeSet::from([first.id()]));
    assert_eq!(t.number("select count(*) from @unique_locks").await, 1);
}

async fn a_window_holds_though_its_job_is_gone(t: Store) {
    let first = windowed(&t, keyed()).await.unwrap().id();
    t.exec("delete from @jobs").await;
    for options in [keyed(), keyed().take_over_failed()] {
        assert_eq!(windowed(&t, options).await.unwrap(), Enqueued::Duplicate(first));
    }
    assert!(t.jobs().await.is_empty());
}

async fn a_window_that_has_passed_is_free(t: Store) {
    let first = windowed(&t, keyed()).await.unwrap().id();
    t.exec(&format!("update @unique_locks set expires_at = {}", t.ahead(HOUR))).await;
    assert!(!windowed(&t, keyed()).await.unwrap().is_new());
    t.exec(&format!("update @unique_locks set expires_at = {}", t.ago(SECOND))).await;
    let second = windowed(&t, keyed()).await.unwrap();
    assert!(second.is_new());
    assert_eq!(t.ids("select job_id from @unique_locks").await, BTreeSet::from([second.id()]));
    let later = t.ahead(HOUR - SECOND * 60);
    assert_eq!(t.number(&format!("select count(*) from @unique_locks where expires_at > {later}")).await, 1);
    assert_eq!(t.jobs().await, BTreeSet::from([first, second.id()]));
}

async fn a_duplicate_does_not_make_the_window_longer(t: Store) {
    windowed(&t, keyed()).await.unwrap();
    let before = t.text("select expires_at from @unique_locks").await;
    windowed(&t, keyed()).await.unwrap();
    assert_eq!(t.text("select expires_at from @unique_locks").await, before);
}

async fn a_window_is_taken_over_only_on_request_and_only_from_failed_or_cancelled(t: Store) {
    let first = windowed(&t, keyed()).await.unwrap().id();
    for status in JobStatus::ALL {
        set_status(&t, first, status).await;
        if matches!(status, JobStatus::Failed | JobStatus::Cancelled) {
            continue;
        }
        assert_eq!(windowed(&t, keyed().take_over_failed()).await.unwrap(), Enqueued::Duplicate(first), "{status}");
    }
    for status in [JobStatus::Failed, JobStatus::Cancelled] {
        let holder = windowed(&t, keyed()).await.unwrap().id();
        set_status(&t, holder, status).await;
        assert_eq!(windowed(&t, keyed()).await.unwrap(), Enqueued::Duplicate(holder), "{status}");
        let next = windowed(&t, keyed().take_over_failed()).await.unwrap();
        assert!(next.is_new(), "{status}");
        assert_eq!(t.ids("select job_id from @unique_locks").await, BTreeSet::from([next.id()]));
    }
}

async fn many_callers_of_one_window_get_one_job(t: Store) {
    let other = t.another();
    let calls = (0..32).map(|n| {
        let storage = if n % 2 == 0 { t.storage.clone() } else { other.clone() };
        tokio::spawn(async move {
            let windows = storage.windowed_enqueue().unwrap();
            windows.enqueue_windowed(&new_job("t", keyed())).await.unwrap()
        })
    });
    let mut answers = Vec::new();
    for call in calls.collect::<Vec<_>>() {
        answers.push(call.await.unwrap());
    }
    let ids: BTreeSet<JobId> = answers.iter().map(|answer| answer.id()).collect();
    assert_eq!(answers.iter().filter(|answer| answer.is_new()).count(), 1);
    assert_eq!(ids, t.jobs().await);
    assert_eq!(ids, t.ids("select job_id from @unique_locks").await);
}

async fn many_takers_of_a_failed_holder_have_one_winner(t: Store) {
    let first = windowed(&t, keyed()).await.unwrap().id();
    set_status(&t, first, JobStatus::Failed).await;
    let calls: Vec<_> = (0..16)
        .map(|_| {
            let storage = t.storage.clone();
            tokio::spawn(async move {
                let job = new_job("t", keyed().take_over_failed());
                storage.windowed_enqueue().unwrap().enqueue_windowed(&job).await.unwrap()
            })
        })
        .collect();
    let mut winners = BTreeSet::new();
    for call in calls {
        winners.insert(call.await.unwrap().id());
    }
    assert_eq!(winners, t.ids("select job_id from @unique_locks").await);
    assert_eq!(t.jobs().await.len(), 2);
}

async fn arguments_deduplicate_by_value_within_queue_and_type(t: Store) {
    let by_args = |queue: &str| options().unique_for(HOUR).queue(queue);
    let first = windowed(&t, by_args("a")).await.unwrap();
    assert_eq!(windowed(&t, by_args("a")).await.unwrap(), Enqueued::Duplicate(first.id()));
    assert!(windowed(&t, by_args("b")).await.unwrap().is_new());
    assert!(windowed(&t, options().queue("a").idempotency_key("\"t\"", HOUR)).await.unwrap().is_new());
    assert_eq!(windowed(&t, by_args("a").tenant("other")).await.unwrap(), Enqueued::Duplicate(first.id()));
}

async fn a_refused_unique_key_gives_the_window_back_as_it_was(t: Store) {
    let holder = t.enqueue("t", options().unique("u")).await;
    let both = || keyed().unique("u");
    let refused = windowed(&t, both()).await;
    assert!(matches!(refused, Err(Error::DuplicateJob { holder: id }) if id == holder), "{refused:?}");
    assert_eq!(t.number("select count(*) from @unique_locks").await, 0);

    let failed = windowed(&t, keyed()).await.unwrap().id();
    set_status(&t, failed, JobStatus::Failed).await;
    let refused = windowed(&t, both().take_over_failed()).await;
    assert!(matches!(refused, Err(Error::DuplicateJob { .. })), "{refused:?}");
    assert_eq!(t.ids("select job_id from @unique_locks").await, BTreeSet::from([failed]));
    // The window decides first.
    assert_eq!(windowed(&t, both()).await.unwrap(), Enqueued::Duplicate(failed));
}

async fn a_windowed_job_is_never_enqueued_without_its_window(t: Store) {
    let refused = t.storage.enqueue(&new_job("t", keyed())).await;
    assert!(matches!(refused, Err(Error::StorageNoUniqueLocks)), "{refused:?}");
    assert!(t.jobs().await.is_empty());
}

cases!(
    a_unique_key_holds_in_every_unfinished_status,
    a_window_answers_with_the_first_id_and_writes_nothing,
    a_window_holds_though_its_job_is_gone,
    a_window_that_has_passed_is_free,
    a_duplicate_does_not_make_the_window_longer,
    a_window_is_taken_over_only_on_request_and_only_from_failed_or_cancelled,
    many_callers_of_one_window_get_one_job,
    many_takers_of_a_failed_holder_have_one_winner,
    arguments_deduplicate_by_value_within_queue_and_type,
    a_refused_unique_key_gives_the_window_back_as_it_was,
    a_windowed_job_is_never_enqueued_without_its_window,
);
