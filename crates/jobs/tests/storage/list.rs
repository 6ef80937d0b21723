//! What an operator looks at, on rows of this library and of others.

use ebbtide_jobs::{Error, JobFilter, JobId, JobStatus, JobType, ListStore, QueueName, delete_all, requeue_all};

use crate::rows::Row;
use crate::support::{DAY, Raw, Store, new_job, options};

fn lists(t: &Store) -> &dyn ListStore {
    t.storage.lists().unwrap()
}

async fn ids(t: &Store, filter: JobFilter) -> Vec<JobId> {
    lists(t).jobs(&filter).await.unwrap().jobs.into_iter().map(|job| job.id).collect()
}

async fn pages_hold_every_job_once_and_the_latest_first(t: Store) {
    let mut expected = Vec::new();
    for _ in 0..7 {
        expected.insert(0, t.enqueue("t", options()).await);
    }
    let (mut found, mut sizes, mut filter) = (Vec::new(), Vec::new(), JobFilter::all().limit(3));
    loop {
        let page = lists(&t).jobs(&filter).await.unwrap();
        sizes.push(page.jobs.len());
        found.extend(page.jobs.iter().map(|job| job.id));
        let Some(next) = page.next else { break };
        // What comes meanwhile does not move the pages.
        t.enqueue("late", options()).await;
        filter = filter.after(next);
    }
    assert_eq!((found, sizes), (expected, vec![3, 3, 1]));
}

async fn each_filter_takes_its_own_and_they_add_up(t: Store) {
    let plain = t.enqueue("plain", options()).await;
    let job = options().queue("q").tenant("acme").meta("a", "1").meta("b", "2").unique("invoice-7");
    let rich = t.enqueue("rich", job).await;
    let failed = Row::new(JobStatus::Failed).put(&t).await;
    t.exec(&format!("update @jobs set last_error = 'disk full' where id = {}", t.id(failed))).await;
    let child = Row::completed().root(plain).put(&t).await;
    let all = JobFilter::all;
    let name = |name: &str| QueueName::new(name).unwrap();
    assert_eq!(ids(&t, all()).await.len(), 4);
    assert_eq!(ids(&t, all().status(JobStatus::Failed)).await, [failed]);
    assert_eq!(ids(&t, all().queue(name("q"))).await, [rich]);
    assert_eq!(ids(&t, all().job_type(JobType::new("plain").unwrap())).await, [plain]);
    assert_eq!(ids(&t, all().tenant("acme")).await, [rich]);
    assert_eq!(ids(&t, all().meta("a", "1")).await, [rich]);
    assert_eq!(ids(&t, all().meta("a", "1").meta("b", "3")).await, []);
    assert_eq!(ids(&t, all().root(plain)).await, [child]);
    for (text, found) in [("voice-7", vec![rich]), ("k fu", vec![failed]), ("ric", vec![rich]), ("%", vec![])] {
        assert_eq!(ids(&t, all().search(text).unwrap()).await, found, "{text}");
    }
    assert!(matches!(all().search("x".repeat(257)), Err(Error::Invalid { field: "search", .. })));
    let edge = t.job(plain).await.created_at;
    assert!(!ids(&t, all().since(edge)).await.contains(&failed), "it is years old");
    assert!(ids(&t, all().since(edge)).await.contains(&plain), "the edge is in");
    assert!(!ids(&t, all().until(edge)).await.contains(&plain), "and not in both");
    assert_eq!(ids(&t, all().queue(name("q")).status(JobStatus::Failed)).await, []);
}

async fn rows_of_other_programs_are_listed(t: Store) {
    let args = if matches!(t.raw, Raw::Postgres { .. }) { "'{}'" } else { "x'7b7d'" };
    t.exec(&format!("insert into @jobs (type, args, queue) values ('mail', {args}, 'a queue with spaces')")).await;
    let page = lists(&t).jobs(&JobFilter::all()).await.unwrap();
    assert_eq!((page.jobs[0].queue.as_str(), page.jobs[0].args.as_slice()), ("a queue with spaces", b"{}".as_slice()));
    assert_eq!(lists(&t).queues().await.unwrap()[0].pending, 1);
}

async fn queues_are_counted_by_what_is_unfinished_and_dead(t: Store) {
    for status in JobStatus::ALL {
        Row::new(status).queue("a").put(&t).await;
    }
    t.enqueue("t", options().queue("b").delay(DAY)).await;
    t.storage.pause_queue(&QueueName::new("c").unwrap(), "me").await.unwrap();
    Row::completed().queue("finished").put(&t).await;
    let queues = lists(&t).queues().await.unwrap();
    // Every fixture row carries the stamp of a dead letter; only failed ones count.
    let seen: Vec<_> = queues
        .iter()
        .map(|q| (q.queue.as_str(), q.pending, q.running, q.waiting, q.paused, q.dead, q.is_paused))
        .collect();
    assert_eq!(seen, [("a", 2, 1, 1, 1, 1, false), ("b", 1, 0, 0, 0, 0, false), ("c", 0, 0, 0, 0, 0, true)]);
    let now = t.storage.now().await.unwrap();
    assert!(queues[0].oldest_due.unwrap() < now && now < queues[1].oldest_due.unwrap());
    assert_eq!(queues[2].oldest_due, None);
}

async fn windows_are_listed_and_end_before_their_time(t: Store) {
    let windows = t.storage.windowed_enqueue().unwrap();
    let job = |key: &str, window| new_job("t", options().idempotency_key(key, window));
    let late = windows.enqueue_windowed(&job("late", DAY * 2)).await.unwrap().id();
    let soon = windows.enqueue_windowed(&job("soon", DAY)).await.unwrap().id();
    let locks = lists(&t).locks(None, 10).await.unwrap();
    assert_eq!(locks.iter().map(|lock| lock.job_id).collect::<Vec<_>>(), [soon, late]);
    assert!(locks[0].created_at < locks[0].expires_at && locks[0].scope_hash.len() == 64);
    assert_eq!(lists(&t).locks(None, 1).await.unwrap().len(), 1);
    let of_late = lists(&t).locks(Some(late), 10).await.unwrap();
    assert_eq!(of_late, [locks[1].clone()]);
    assert!(lists(&t).release_lock(&of_late[0].scope_hash).await.unwrap());
    assert!(!lists(&t).release_lock(&of_late[0].scope_hash).await.unwrap());
    assert!(windows.enqueue_windowed(&job("late", DAY)).await.unwrap().is_new());
    assert!(!windows.enqueue_windowed(&job("soon", DAY)).await.unwrap().is_new());
}

async fn bulk_calls_say_which_jobs_they_left_and_why(t: Store) {
    let failed = Row::new(JobStatus::Failed).put(&t).await;
    let (done, missing) = (Row::completed().put(&t).await, JobId::new());
    let report = requeue_all(&*t.storage, &[failed, done, missing]).await.unwrap();
    let reasons: Vec<_> = report.skipped.iter().map(|(id, error)| (*id, error.key())).collect();
    assert_eq!((report.done, reasons), (vec![failed], vec![(done, "job_not_requeueable"), (missing, "job_not_found")]));
    Row::new(JobStatus::Waiting).parent(failed).put(&t).await;
    let report = delete_all(&*t.storage, &[failed, done]).await.unwrap();
    assert_eq!((report.done, report.skipped[0].1.key()), (vec![done], "job_has_children"));
    let many: Vec<JobId> = (0..1001).map(|_| failed).collect();
    assert!(matches!(requeue_all(&*t.storage, &many).await, Err(Error::Invalid { field: "ids", .. })));
    assert!(matches!(delete_all(&*t.storage, &many).await, Err(Error::Invalid { field: "ids", .. })));
}

cases!(
    pages_hold_every_job_once_and_the_latest_first,
    each_filter_takes_its_own_and_they_add_up,
    rows_of_other_programs_are_listed,
    queues_are_counted_by_what_is_unfinished_and_dead,
    windows_are_listed_and_end_before_their_time,
    bulk_calls_say_which_jobs_they_left_and_why,
);
