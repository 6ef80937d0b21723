//! Idle workers hear of new jobs, in this process and from others.

use std::time::Duration;

use ebbtide_jobs::{JobStatus, Queue, QueueName};
use tokio::time::timeout;

use crate::rig::{Running, quick, send, until};
use crate::support::{DAY, PATIENCE, SECOND, Store};

async fn an_idle_worker_is_told_within_the_process(t: Store) {
    let queue = t.queue();
    queue.register("t", |_, (): ()| async { Ok(()) }).unwrap();
    // A poll a day apart: whatever runs was told of.
    let running = Running::start(quick(&queue).poll_interval(DAY).build().unwrap());
    for _ in 0..3 {
        let id = send(&queue, "t", &()).await;
        t.becomes(id, JobStatus::Completed).await;
    }
    let id = send(&queue, "t", &()).await;
    t.becomes(id, JobStatus::Completed).await;
    running.stop().await;
}

async fn a_delayed_job_and_a_foreign_one_are_found_by_polling(t: Store) {
    let queue = t.queue();
    queue.register("t", |_, _: serde_json::Value| async { Ok(()) }).unwrap();
    let _running = Running::start(quick(&queue).build().unwrap());
    let delayed = queue.enqueue("t", &()).delay(Duration::from_millis(30)).send().await.unwrap().id();
    t.becomes(delayed, JobStatus::Completed).await;
    t.exec("insert into @jobs (type) values ('t')").await;
    until("both ran", || async { t.number("select count(*) from @jobs where status = 'completed'").await == 2 }).await;
}

/// Two workers carry the schedule; each time is fired by one of them, and none by a worker that fires no schedules.
async fn schedules_enqueue_jobs_that_run(t: Store) {
    let queue = t.queue();
    queue.register("tick", |_, (): ()| async { Ok(()) }).unwrap();
    let often = || ebbtide_jobs::Schedule::every(Duration::from_millis(100)).unwrap();
    queue.schedule("often", often(), queue.enqueue("tick", &())).unwrap();
    let again = queue.schedule("often", often(), queue.enqueue("tick", &()));
    assert!(matches!(again, Err(ebbtide_jobs::Error::Invalid { field: "schedule", .. })));
    let unknown = queue.schedule("other", often(), queue.enqueue("unknown", &()));
    assert!(matches!(unknown, Err(ebbtide_jobs::Error::HandlerNotFound(_))));

    let idle = Running::start(quick(&queue).scheduler(false).build().unwrap());
    let id = send(&queue, "tick", &()).await;
    t.becomes(id, JobStatus::Completed).await;
    assert_eq!(t.number("select count(*) from @scheduled_fires").await, 0);
    idle.stop().await;

    let _two = (Running::start(quick(&queue).build().unwrap()), Running::start(quick(&queue).build().unwrap()));
    until("it fired three times", || async {
        4 <= t.number("select count(*) from @jobs where status = 'completed'").await
    })
    .await;
}

cases!(
    schedules_enqueue_jobs_that_run,
    an_idle_worker_is_told_within_the_process,
    a_delayed_job_and_a_foreign_one_are_found_by_polling,
);

/// Two storages stand for two processes: they share nothing but the database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_of_other_processes_are_told() {
    let t = Store::postgres().await;
    let queue = t.queue();
    queue.register("t", |_, (): ()| async { Ok(()) }).unwrap();
    let running = Running::start(quick(&queue).poll_interval(DAY).build().unwrap());
    let wake = t.storage.wake().unwrap();
    until("it listens", || async { wake.reaches_other_processes() }).await;
    let other = Queue::builder(t.another()).build();
    for _ in 0..3 {
        let id = other.enqueue("t", &()).remote().send().await.unwrap().id();
        t.becomes(id, JobStatus::Completed).await;
    }
    running.stop().await;
}

/// Two thousand announcements are few notices, and none is sent inside the transaction that enqueues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_link_is_made_again() {
    let t = Store::postgres().await;
    let name = QueueName::default_queue();
    let wake = t.storage.wake().unwrap();
    let told = wake.subscribe(std::slice::from_ref(&name));
    until("it listens", || async { wake.reaches_other_processes() }).await;
    told.told().await;
    let end = "select pg_terminate_backend(pid) from pg_stat_activity
                where application_name = 'ebbtide-jobs-wake' and datname = current_database()";
    t.exec(end).await;
    until("it noticed", || async { !wake.reaches_other_processes() }).await;
    until("it listens again", || async { wake.reaches_other_processes() }).await;
    timeout(PATIENCE, told.told()).await.expect("what came meanwhile may have been missed, so everybody is told");
    let other = t.another();
    other.wake().unwrap().announce(&name);
    timeout(PATIENCE, told.told()).await.expect("told over the new link");
    other.wake().unwrap().announce(&QueueName::new("else").unwrap());
    assert!(timeout(SECOND / 5, told.told()).await.is_err(), "told of another queue");
}
