//! Schedules: one fire a time, however many workers there are and whatever their clocks say.

use std::time::Duration;

use ebbtide_jobs::{Fire, Schedule, ScheduleState, ScheduleStore, ScheduledJob, Scheduler};
use jiff::Timestamp;

use crate::support::{DAY, SECOND, Store, new_job, options};

fn store(t: &Store) -> &dyn ScheduleStore {
    t.storage.schedules().unwrap()
}

fn every(period: Duration) -> ScheduledJob {
    ScheduledJob::new("tick", Schedule::every(period).unwrap(), new_job("t", options())).unwrap()
}

async fn state(t: &Store) -> ScheduleState {
    store(t).list().await.unwrap().into_iter().find(|state| state.name == "tick").expect("it is known")
}

async fn jobs(t: &Store) -> i64 {
    t.number("select count(*) from @jobs").await
}

/// Moves the schedule's cursor this far back.
async fn rewind(t: &Store, by: Duration) {
    t.exec(&format!("update @scheduled_fires set last_fire_at = {}", t.ago(by))).await;
}

/// A worker that has just started.
fn scheduler(t: &Store, job: &ScheduledJob) -> Scheduler {
    Scheduler::new(t.another(), vec![job.clone()]).unwrap()
}

async fn the_first_sight_begins_on_the_storages_clock(t: Store) {
    let before = t.storage.now().await.unwrap();
    let first = store(&t).register(&every(DAY)).await.unwrap();
    assert!(before <= first.last_fire_at && first.last_fire_at <= t.storage.now().await.unwrap());
    assert_eq!((first.last_fired_at, first.is_paused), (None, false));
    assert_eq!(first.next_fire_at, Schedule::every(DAY).unwrap().next_after(first.last_fire_at));
    assert_eq!((first.rule.as_str(), first.job_type.as_str(), first.queue.as_str()), ("every 86400s", "t", "default"));
    let second = store(&t).register(&every(DAY)).await.unwrap();
    assert_eq!(second, first, "every worker derives the same next time");
    assert_eq!(state(&t).await, first);

    rewind(&t, DAY * 30).await;
    let changed = store(&t).register(&every(DAY * 2)).await.unwrap();
    assert!(first.last_fire_at <= changed.last_fire_at, "new times begin anew");
    assert_eq!(changed.rule, "every 172800s");
}

async fn a_time_is_fired_once_and_the_clock_is_the_storages(t: Store) {
    store(&t).register(&every(DAY)).await.unwrap();
    rewind(&t, DAY * 3).await;
    let now = t.storage.now().await.unwrap();
    let later = now.checked_add(jiff::SignedDuration::from_hours(1)).unwrap();
    let job = new_job("t", options());
    assert_eq!(store(&t).fire("tick", later, None, &job).await.unwrap(), Fire::NotTaken, "it has not come");
    assert_eq!(store(&t).fire("other", now, None, &job).await.unwrap(), Fire::NotTaken, "there is none");
    assert_eq!(store(&t).fire("tick", now, Some(later), &job).await.unwrap(), Fire::Fired(job.id()));
    let state = state(&t).await;
    assert_eq!((state.last_fire_at, state.last_fired_at, state.next_fire_at), (now, Some(now), Some(later)));
    for taken in [now, now.checked_sub(jiff::SignedDuration::from_mins(1)).unwrap()] {
        let fire = store(&t).fire("tick", taken, None, &new_job("t", options())).await.unwrap();
        assert_eq!(fire, Fire::NotTaken, "it was taken, or a later one was");
    }
    assert_eq!(jobs(&t).await, 1);
}

async fn many_workers_fire_each_time_once(t: Store) {
    store(&t).register(&every(DAY)).await.unwrap();
    let now = t.storage.now().await.unwrap();
    rewind(&t, DAY * 3).await;
    let times: Vec<Timestamp> =
        (0..10).map(|s| now.checked_sub(jiff::SignedDuration::from_secs(10 - s)).unwrap()).collect();
    let mut workers = Vec::new();
    for _ in 0..5 {
        let (storage, times) = (t.another(), times.clone());
        workers.push(tokio::spawn(async move {
            let mut fired = 0;
            for at in times {
                let fire = storage.schedules().unwrap().fire("tick", at, None, &new_job("t", options())).await.unwrap();
                fired += i64::from(matches!(fire, Fire::Fired(_)));
            }
            fired
        }));
    }
    let mut fired = 0;
    for worker in workers {
        fired += worker.await.unwrap();
    }
    assert!((1..=10).contains(&fired), "{fired}");
    assert_eq!(jobs(&t).await, fired);
    assert_eq!(state(&t).await.last_fire_at, times[9]);
}

async fn after_a_downtime_there_is_one_job_and_no_burst(t: Store) {
    let minutely = every(SECOND * 60);
    let mut first = scheduler(&t, &minutely);
    let (taken, wait, failed) = first.tick().await;
    assert!(taken.is_empty() && failed.is_none() && wait <= SECOND * 30, "{failed:?}");
    rewind(&t, DAY).await;
    let (mut one, mut other) = (scheduler(&t, &minutely), scheduler(&t, &minutely));
    let fired = one.tick().await.0.len() + other.tick().await.0.len() + one.tick().await.0.len();
    // A minute may begin in between.
    assert!((1..=2).contains(&fired), "{fired}");
    assert_eq!(jobs(&t).await, i64::try_from(fired).unwrap());
    let state = state(&t).await;
    assert_eq!(state.last_fired_at, Some(state.last_fire_at));
    assert!(t.storage.now().await.unwrap() < state.next_fire_at.unwrap() + jiff::SignedDuration::from_mins(1));
}

async fn a_time_whose_key_is_taken_is_skipped(t: Store) {
    let holder = t.enqueue("t", options().unique("k")).await;
    let job = ScheduledJob::new("tick", Schedule::every(DAY).unwrap(), new_job("t", options().unique("k"))).unwrap();
    scheduler(&t, &job).tick().await;
    rewind(&t, DAY * 3).await;
    let mut worker = scheduler(&t, &job);
    let (taken, ..) = worker.tick().await;
    assert_eq!(taken[0].fire, Fire::Skipped(holder));
    let state = state(&t).await;
    assert_eq!((state.last_fire_at, state.last_fired_at), (taken[0].at, None));
    assert!(worker.tick().await.0.is_empty());
    assert_eq!(jobs(&t).await, 1);
}

async fn a_windowed_job_is_deduplicated_by_its_window(t: Store) {
    let windowed = new_job("t", options().idempotency_key("k", DAY * 30));
    let job = ScheduledJob::new("tick", Schedule::every(DAY).unwrap(), windowed).unwrap();
    scheduler(&t, &job).tick().await;
    let mut fires = Vec::new();
    for _ in 0..2 {
        rewind(&t, DAY * 3).await;
        fires.push(scheduler(&t, &job).tick().await.0.remove(0).fire);
    }
    assert!(
        matches!((fires[0], fires[1]), (Fire::Fired(first), Fire::Skipped(holder)) if first == holder),
        "{fires:?}"
    );
}

async fn a_paused_schedule_fires_nothing_and_goes_on_from_when_it_was_taken_up(t: Store) {
    assert!(!store(&t).set_paused("tick", true).await.unwrap());
    scheduler(&t, &every(DAY)).tick().await;
    assert!(store(&t).set_paused("tick", true).await.unwrap());
    rewind(&t, DAY * 3).await;
    assert!(scheduler(&t, &every(DAY)).tick().await.0.is_empty());
    let before = t.storage.now().await.unwrap();
    assert!(store(&t).set_paused("tick", false).await.unwrap());
    let state = state(&t).await;
    assert!(before <= state.last_fire_at && !state.is_paused);
    assert!(scheduler(&t, &every(DAY * 2)).tick().await.0.is_empty());
    assert_eq!(jobs(&t).await, 0);
}

async fn a_deleted_schedule_is_fired_no_more(t: Store) {
    let mut worker = scheduler(&t, &every(DAY));
    worker.tick().await;
    assert!(store(&t).delete("tick").await.unwrap());
    assert!(!store(&t).delete("tick").await.unwrap());
    let now = t.storage.now().await.unwrap();
    let fire = store(&t).fire("tick", now, None, &new_job("t", options())).await.unwrap();
    assert_eq!((fire, store(&t).list().await.unwrap()), (Fire::NotTaken, vec![]));
}

async fn a_job_that_cannot_be_written_leaves_the_time_to_be_tried_again(t: Store) {
    scheduler(&t, &every(DAY)).tick().await;
    rewind(&t, DAY * 3).await;
    let cursor = state(&t).await.last_fire_at;
    t.exec("alter table @jobs rename column args to arguments").await;
    let mut worker = scheduler(&t, &every(DAY));
    let mut waits = Vec::new();
    for _ in 0..3 {
        let (taken, wait, failed) = worker.tick().await;
        assert!(taken.is_empty() && failed.is_some());
        waits.push(wait.as_millis());
    }
    assert_eq!(waits, [100, 200, 400]);
    assert_eq!(state(&t).await.last_fire_at, cursor);
    t.exec("alter table @jobs rename column arguments to args").await;
    assert!(matches!(worker.tick().await.0[0].fire, Fire::Fired(_)));
}

cases!(
    the_first_sight_begins_on_the_storages_clock,
    a_time_is_fired_once_and_the_clock_is_the_storages,
    many_workers_fire_each_time_once,
    after_a_downtime_there_is_one_job_and_no_burst,
    a_time_whose_key_is_taken_is_skipped,
    a_windowed_job_is_deduplicated_by_its_window,
    a_paused_schedule_fires_nothing_and_goes_on_from_when_it_was_taken_up,
    a_deleted_schedule_is_fired_no_more,
    a_job_that_cannot_be_written_leaves_the_time_to_be_tried_again,
);
