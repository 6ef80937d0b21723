//! Claims: what is handed out, in which order, and never more than asked.

use std::collections::BTreeSet;

use ebbtide_jobs::{JobId, JobStatus};

use crate::support::{DAY, Raw, SECOND, Store, connect, options, request};

async fn a_claim_locks_the_job_and_counts_the_attempt(t: Store) {
    let id = t.enqueue("t", options()).await;
    t.exec(&format!("update @jobs set last_heartbeat_at = {}", t.ago(DAY))).await;
    let claimed = t.claim("w", 10).await;
    assert_eq!(claimed.len(), 1);
    let job = t.job(id).await;
    assert_eq!(claimed[0], job);
    assert_eq!((job.status, job.attempt, job.locked_by.as_deref()), (JobStatus::Running, 1, Some("w")));
    assert_eq!(job.last_heartbeat_at, None, "the sign of life of an earlier run says nothing of this one");
    let lease = job.locked_until.unwrap().duration_since(job.started_at.unwrap());
    assert_eq!(lease.as_micros(), 60_000_000);
    assert!(job.dispatch_token.is_some());
    assert!(t.claim("w", 10).await.is_empty(), "a running job is not handed out again");
}

async fn the_order_is_priority_then_due_time_then_id(t: Store) {
    let mut expected: Vec<(i32, u64, JobId)> = Vec::new();
    for (priority, age) in [(0, 5), (7, 1), (-3, 9), (0, 8), (7, 4), (0, 8)] {
        let id = t.enqueue("t", options().priority(priority)).await;
        t.exec(&format!("update @jobs set created_at = {} where id = {}", fixed(&t, age), t.id(id))).await;
        expected.push((-priority, 100 - age, id));
    }
    expected.sort();
    let mut seen = Vec::new();
    for _ in 0..expected.len() {
        seen.extend(t.claim("w", 1).await.into_iter().map(|job| job.id));
    }
    assert_eq!(seen, expected.iter().map(|(_, _, id)| *id).collect::<Vec<_>>());
}

/// A time that is the same for every row, so that equal ages are equal times.
fn fixed(t: &Store, days_ago: u64) -> String {
    match t.raw {
        Raw::Postgres { .. } => format!("timestamptz '2020-02-01' - interval '{days_ago} days'"),
        Raw::Sqlite { .. } => format!("1580515200000000 - {days_ago} * 86400000000"),
    }
}

async fn a_claim_comes_back_in_order(t: Store) {
    let ids: Vec<JobId> = {
        let mut ids = Vec::new();
        for priority in [1, 3, 2] {
            ids.push((-priority, t.enqueue("t", options().priority(priority)).await));
        }
        ids.sort();
        ids.into_iter().map(|(_, id)| id).collect()
    };
    assert_eq!(t.claim("w", 10).await.into_iter().map(|job| job.id).collect::<Vec<_>>(), ids);
}

async fn jobs_of_the_future_wait(t: Store) {
    let due = t.enqueue("t", options()).await;
    let later = t.enqueue("t", options().priority(9).delay(DAY)).await;
    let claimed: Vec<JobId> = t.claim("w", 10).await.into_iter().map(|job| job.id).collect();
    assert_eq!(claimed, [due]);
    t.exec(&format!("update @jobs set run_at = {} where id = {}", t.ago(SECOND), t.id(later))).await;
    assert_eq!(t.claim("w", 10).await[0].id, later);
}

async fn only_pending_jobs_are_claimed(t: Store) {
    for status in JobStatus::ALL {
        t.exec(&format!("insert into @jobs (type, status) values ('{status}', '{status}')")).await;
    }
    let claimed: Vec<String> = t.claim("w", 10).await.into_iter().map(|job| job.job_type.to_string()).collect();
    assert_eq!(claimed, ["pending"]);
}

async fn each_queue_gives_at_most_its_share(t: Store) {
    for queue in ["a", "b", "c"] {
        for _ in 0..5 {
            t.enqueue(queue, options().queue(queue)).await;
        }
    }
    let claimed = t.storage.claim(&request("w", &[("a", 2), ("b", 0), ("none", 4), ("c", 9)])).await.unwrap();
    let of = |name: &str| claimed.iter().filter(|job| job.queue.as_str() == name).count();
    assert_eq!((of("a"), of("b"), of("c"), claimed.len()), (2, 0, 5, 7));
    assert!(t.storage.claim(&request("w", &[])).await.unwrap().is_empty());
}

async fn a_paused_queue_gives_nothing(t: Store) {
    t.enqueue("t", options()).await;
    let other = t.enqueue("t", options().queue("other")).await;
    t.exec("insert into @queue_states (queue, paused) values ('default', true), ('other', false)").await;
    let claimed = t.storage.claim(&request("w", &[("default", 5), ("other", 5)])).await.unwrap();
    assert_eq!(claimed.iter().map(|job| job.id).collect::<Vec<_>>(), [other]);
    t.exec("update @queue_states set paused = false").await;
    assert_eq!(t.claim("w", 5).await.len(), 1);
}

async fn claims_at_once_hand_out_each_job_once_and_no_more_than_asked(t: Store) {
    let jobs: Vec<_> = (0..300).map(|n| crate::support::new_job("t", options().priority(n % 3))).collect();
    t.storage.enqueue_batch(&jobs).await.unwrap();
    let other = t.another();
    let calls: Vec<_> = (0..12)
        .map(|n| {
            let storage = if n % 2 == 0 { t.storage.clone() } else { other.clone() };
            tokio::spawn(async move {
                let mut mine = Vec::new();
                for _ in 0..5 {
                    let claimed = storage.claim(&request(&format!("w{n}"), &[("default", 5)])).await.expect("claimed");
                    assert!(claimed.len() <= 5, "asked for 5, got {}", claimed.len());
                    mine.extend(claimed.into_iter().map(|job| job.id));
                }
                mine
            })
        })
        .collect();
    let mut all = Vec::new();
    for call in calls {
        all.extend(call.await.unwrap());
    }
    let distinct: BTreeSet<JobId> = all.iter().copied().collect();
    assert_eq!(distinct.len(), all.len(), "a job was handed out twice");
    let running = t.ids("select id from @jobs where status = 'running' and attempt = 1").await;
    assert_eq!(running, distinct);
}

cases!(
    a_claim_locks_the_job_and_counts_the_attempt,
    the_order_is_priority_then_due_time_then_id,
    a_claim_comes_back_in_order,
    jobs_of_the_future_wait,
    only_pending_jobs_are_claimed,
    each_queue_gives_at_most_its_share,
    a_paused_queue_gives_nothing,
    claims_at_once_hand_out_each_job_once_and_no_more_than_asked,
);

/// Rows that another session has locked are passed over, and the ones behind them are handed out.
#[tokio::test]
async fn locked_rows_are_skipped() {
    let t = Store::postgres().await;
    for _ in 0..20 {
        t.enqueue("t", options()).await;
    }
    let Raw::Postgres { url, .. } = &t.raw else { unreachable!("made for PostgreSQL") };
    let mut other = connect(url).await;
    let transaction = other.transaction().await.unwrap();
    let held = "select id from ebbtide_jobs.jobs order by created_at, id limit 10 for update";
    let held: BTreeSet<uuid::Uuid> = transaction.query(held, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    let claimed = t.claim("w", 7).await;
    assert_eq!(claimed.len(), 7);
    assert!(claimed.iter().all(|job| !held.contains(&job.id.as_uuid())));
}
