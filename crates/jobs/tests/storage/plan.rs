//! The dry run, and how the databases find what is due.

use ebbtide_jobs::retention::{self, Plan};
use ebbtide_jobs::{JobStatus, KindPlan, Protection, Retention};

use crate::rows::Row;
use crate::support::{DAY, Raw, Store};

async fn a_plan_counts_what_goes_and_what_stays_for_which_reason(t: Store) {
    for status in [JobStatus::Completed, JobStatus::Failed, JobStatus::Cancelled] {
        Row::new(status).ended(&t, DAY * 91).put(&t).await;
        Row::new(status).ended(&t, DAY * 3).put(&t).await;
    }
    let parent = Row::completed().ended(&t, DAY * 31).put(&t).await;
    Row::new(JobStatus::Pending).parent(parent).root(parent).put(&t).await;
    let joining = Row::completed().ended(&t, DAY * 31).put(&t).await;
    t.fan_out(joining, "pending").await;
    let waiting = Row::new(JobStatus::Waiting).put(&t).await;
    let collected = t.fan_out(waiting, "completed").await;
    Row::completed().ended(&t, DAY * 31).parent(waiting).fan_out(collected).put(&t).await;
    let pinned = Row::completed().ended(&t, DAY * 31).put(&t).await;
    t.window(pinned, &t.ahead(DAY)).await;
    let expired = Row::completed().ended(&t, DAY * 31).put(&t).await;
    t.window(expired, &t.ago(DAY)).await;
    t.signal(waiting, Some(t.ago(DAY * 8))).await;
    t.signal(waiting, Some(t.ago(DAY))).await;
    t.signal(waiting, None).await;
    let before = t.jobs().await;

    let plan = retention::plan(&*t.storage, &Retention::stock()).await.unwrap();
    let completed = plan.completed.unwrap();
    assert_eq!((completed.due, completed.kept), (2, 4));
    for protection in Protection::ALL {
        assert_eq!(completed.kept_by(protection), 1, "{}", protection.as_str());
    }
    let now = t.storage.now().await.unwrap();
    let held = completed.held_until.unwrap().duration_since(now).as_secs();
    assert!((86_000..=86_400).contains(&held), "{held}");
    assert_eq!((plan.failed.unwrap().due, plan.cancelled.unwrap().due), (1, 1));
    assert_eq!((plan.consumed_signals, plan.expired_locks), (Some(1), 1));
    assert_eq!(t.jobs().await, before, "a plan reads");

    let report = retention::run_once(&*t.storage, &Retention::stock(), &Default::default()).await;
    assert_eq!(report.deleted("completed"), 2, "and the tick does as planned");
    let after = retention::plan(&*t.storage, &Retention::stock()).await.unwrap().completed.unwrap();
    assert_eq!((after.due, after.kept), (0, 4));
}

async fn a_plan_does_not_look_at_kinds_that_are_off(t: Store) {
    Row::completed().ended(&t, DAY * 3650).put(&t).await;
    let plan = retention::plan(&*t.storage, &Retention::disabled()).await.unwrap();
    assert_eq!(plan, Plan::default());
    let plan = retention::plan(&*t.storage, &Retention::custom().failed_after(DAY)).await.unwrap();
    assert_eq!((plan.completed, plan.failed), (None, Some(KindPlan::default())));
    let never = Retention::custom().completed_after(std::time::Duration::MAX);
    assert_eq!(retention::plan(&*t.storage, &never).await.unwrap().completed, Some(KindPlan::default()));
}

/// The choice walks its own index in order and probes the others, however many live jobs there are.
async fn the_choice_uses_the_index_whatever_else_is_there(t: Store) {
    let ten = "(select 0 as n union select 1 union select 2 union select 3 union select 4 union select 5
                union select 6 union select 7 union select 8 union select 9)";
    let insert = |status: &str, ended: String, times: usize| {
        let more = [", ", ten, " d"].concat().repeat(times);
        format!(
            "insert into @jobs (type, status, completed_at) select 'row', '{status}', {ended}
               from {ten} a, {ten} b, {ten} c{more}"
        )
    };
    t.exec(&insert("completed", t.ago(DAY * 31), 0)).await;
    t.exec(&insert("completed", t.ago(DAY), 0)).await;
    t.exec("insert into @fan_outs (parent_job_id, total_count, status) select id, 1, 'completed' from @jobs").await;
    let scope = if matches!(t.raw, Raw::Postgres { .. }) { "md5(id::text)" } else { "hex(id)" };
    t.exec(&format!(
        "insert into @unique_locks (scope_hash, job_id, expires_at) select {scope}, id, {} from @jobs",
        t.ago(DAY)
    ))
    .await;
    for live in [false, true] {
        if live {
            t.exec(&insert("pending", "null".to_owned(), 1)).await;
        }
        t.exec("analyze").await;
        let plan = explain(&t).await;
        assert!(plan.contains("jobs_retention"), "{plan}");
        for index in ["jobs_live_parent", "jobs_live_root", "fan_outs_parent", "unique_locks_job"] {
            assert!(plan.contains(index), "{index} is not probed in {plan}");
        }
        for slow in ["Seq Scan", "Sort", "Hash", "TEMP B-TREE", "SCAN j "] {
            assert!(!plan.contains(slow), "{slow} in {plan}");
        }
    }
}

async fn explain(t: &Store) -> String {
    let ago = t.ago(DAY * 30);
    match &t.raw {
        Raw::Postgres { .. } => {
            let choice = ebbtide_jobs::postgres::RETENTION_CHOICE;
            let choice = choice.replace("$1", "'completed'").replace("$2", "(statement_timestamp() - interval '30 d')");
            t.texts(&format!("explain {}", choice.replace("$3", "1000"))).await
        }
        Raw::Sqlite { db, .. } => {
            let _ = ago;
            let db = db.lock().expect("not poisoned");
            let mut query =
                db.prepare(&format!("explain query plan {}", ebbtide_jobs::sqlite::RETENTION_CHOICE)).unwrap();
            let lines = query.query_map(("completed", 0, 0, 1000), |row| row.get::<_, Option<String>>(3)).unwrap();
            lines.map(|line| line.unwrap()).collect()
        }
    }
    .into_iter()
    .flatten()
    .collect::<Vec<_>>()
    .join("\n")
}

cases!(
    a_plan_counts_what_goes_and_what_stays_for_which_reason,
    a_plan_does_not_look_at_kinds_that_are_off,
    the_choice_uses_the_index_whatever_else_is_there,
);
