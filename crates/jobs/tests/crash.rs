//! What is left when the database or the process dies in the middle of a pass or of a completion: all or nothing.
#![allow(clippy::unwrap_used, reason = "a case fails at the line that was wrong")]
#![allow(dead_code, unused_macros, unreachable_pub, reason = "the support modules are shared with another suite")]

#[path = "support/rows.rs"]
mod rows;
#[macro_use]
#[path = "support/store.rs"]
mod support;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use ebbtide_jobs::{Completion, Error, JobId, JobStatus, SqliteStorage, Storage, TerminalStatus};
use tokio::time::Instant;

use crate::rows::Row;
use crate::support::{DAY, PATIENCE, Raw, Store, connect, request};

/// What is interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Pass,
    Completion,
}

/// Every table that the work writes, and how.
const POINTS: [(Work, &str, &str); 7] = [
    (Work::Pass, "fan_outs", "delete"),
    (Work::Pass, "checkpoints", "delete"),
    (Work::Pass, "signals", "delete"),
    (Work::Pass, "unique_locks", "delete"),
    (Work::Pass, "jobs", "delete"),
    (Work::Completion, "jobs", "update"),
    (Work::Completion, "checkpoints", "delete"),
];

/// A finished job past its window with all that can hang off it, and a pending one with checkpoints.
async fn fixture(t: &Store) -> (JobId, JobId) {
    let old = Row::completed().ended(t, DAY * 31).put(t).await;
    t.fan_out(old, "completed").await;
    t.signal(old, None).await;
    t.window(old, &t.ago(DAY)).await;
    let pending = Row::new(JobStatus::Pending).put(t).await;
    for job in [old, pending] {
        t.checkpoints(job, 3).await;
    }
    (old, pending)
}

/// The whole of every table that the work writes, as text.
async fn everything(t: &Store) -> Vec<Vec<Option<String>>> {
    let mut tables = Vec::new();
    for (table, columns) in [
        ("jobs", "cast(status as text) || attempt || coalesce(cast(completed_at as text), '')"),
        ("checkpoints", "id"),
        ("signals", "id"),
        ("unique_locks", "job_id"),
        ("fan_outs", "id"),
    ] {
        tables.push(t.texts(&format!("select {columns} from @{table} order by 1")).await);
    }
    tables
}

async fn claim(storage: &dyn Storage) -> Completion {
    let claimed = storage.claim(&request("w", &[("default", 1)])).await.unwrap();
    Completion::new(claimed[0].claim().unwrap(), Some(b"1".to_vec())).unwrap().delete_checkpoints(true)
}

async fn pass(storage: &dyn Storage) -> Result<u64, Error> {
    storage.retention().unwrap().delete_terminal_older_than(TerminalStatus::Completed, DAY * 30, 10).await
}

/// After the interrupted work was undone, the same work goes through.
async fn goes_through(t: &Store, work: Work, completion: &Completion) {
    match work {
        Work::Pass => {
            assert_eq!(pass(&*t.storage).await.unwrap(), 1);
            assert_eq!((t.jobs().await.len(), t.orphans().await), (1, 0));
        }
        Work::Completion => {
            t.storage.complete(completion).await.unwrap();
            let id = completion.claim().job_id;
            assert_eq!((t.job(id).await.status, t.count_checkpoints(id).await), (JobStatus::Completed, 0));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_terminated_backend_leaves_all_or_nothing() {
    for (work, table, action) in POINTS {
        let t = Store::postgres().await;
        fixture(&t).await;
        let completion = claim(&*t.storage).await;
        let before = everything(&t).await;
        t.exec(&format!(
            "create function park() returns trigger language plpgsql as $$ begin
                 perform pg_advisory_xact_lock_shared(4711);
                 return case tg_op when 'DELETE' then old else new end;
             end $$;
             create trigger park before {action} on @{table} for each row execute function park();
             select pg_advisory_lock(4711)"
        ))
        .await;
        let storage = t.storage.clone();
        let doing = completion.clone();
        let interrupted = tokio::spawn(async move {
            match work {
                Work::Pass => pass(&*storage).await.map(|_| ()),
                Work::Completion => storage.complete(&doing).await,
            }
        });
        terminate_parked(&t).await;
        assert!(interrupted.await.unwrap().is_err(), "{work:?} at {table}");
        assert_eq!(everything(&t).await, before, "{work:?} at {table}");
        t.exec(&format!("select pg_advisory_unlock(4711); drop trigger park on @{table}")).await;
        goes_through(&t, work, &completion).await;
    }
}

/// Waits until our storage stands in the trigger, and ends its backend.
async fn terminate_parked(t: &Store) {
    let Raw::Postgres { url, .. } = &t.raw else { unreachable!("made for PostgreSQL") };
    let observer = connect(url).await;
    let parked = "select pid from pg_stat_activity where application_name = 'ebbtide-jobs'
                   and datname = current_database() and wait_event_type = 'Lock' and wait_event = 'advisory'";
    let started = Instant::now();
    let pid: i32 = loop {
        assert!(started.elapsed() < PATIENCE, "the storage never came to the trigger");
        if let Some(row) = observer.query(parked, &[]).await.unwrap().first() {
            break row.get(0);
        }
    };
    observer.execute("select pg_terminate_backend($1)", &[&pid]).await.unwrap();
    let gone = "select from pg_stat_activity where pid = $1";
    while !observer.query(gone, &[&pid]).await.unwrap().is_empty() {
        assert!(started.elapsed() < PATIENCE, "the backend does not end");
    }
}

/// Names the file for the child, and what it shall do there.
const CHILD: &str = "EBBTIDE_JOBS_CRASH_CHILD";

/// Not a case of its own: the process that the next test kills. Started by hand it has nothing to do.
#[tokio::test]
async fn child_process() {
    let Ok(task) = std::env::var(CHILD) else { return };
    let (work, path) = task.split_once(':').expect("work and path");
    let storage: Arc<dyn Storage> = Arc::new(SqliteStorage::open(path).unwrap());
    if work == "Pass" {
        let _ = pass(&*storage).await;
    } else {
        // The claim is the parent's, found by the row that it left.
        let id = std::env::var("JOB").unwrap().parse().unwrap();
        let claim = storage.job(id).await.unwrap().unwrap().claim().unwrap();
        let completion = Completion::new(claim, Some(b"1".to_vec())).unwrap().delete_checkpoints(true);
        let _ = storage.complete(&completion).await;
    }
    panic!("the child was to be killed in the middle");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_process_leaves_all_or_nothing() {
    for (work, table, action) in POINTS {
        let t = Store::sqlite().await;
        fixture(&t).await;
        let completion = claim(&*t.storage).await;
        let before = everything(&t).await;
        // The trigger never ends, so that the process stands in the middle of the write until it is killed.
        t.exec(&format!(
            "create trigger park before {action} on {table} begin
                 select count(*) from (with recursive r (n) as (select 1 union all select n + 1 from r) select n from r);
             end"
        ))
        .await;
        let Raw::Sqlite { path, .. } = &t.raw else { unreachable!("made for SQLite") };
        let mut child = start_child(work, path, completion.claim().job_id);
        wait_until_parked(&t, &mut child);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(everything(&t).await, before, "{work:?} at {table}");
        t.exec("drop trigger park").await;
        goes_through(&t, work, &completion).await;
    }
}

fn start_child(work: Work, path: &Path, job: JobId) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child_process"]).env(CHILD, format!("{work:?}:{}", path.display()));
    command.env("JOB", job.to_string()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

/// Waits until the child holds the write lock and has computed for long in it: nothing else in it takes so long.
fn wait_until_parked(t: &Store, child: &mut Child) {
    let Raw::Sqlite { db, .. } = &t.raw else { unreachable!("made for SQLite") };
    let db = db.lock().unwrap();
    db.busy_timeout(Duration::ZERO).unwrap();
    let started = Instant::now();
    let mut locked_since = None;
    loop {
        assert!(started.elapsed() < PATIENCE, "the child never came to the trigger");
        assert!(child.try_wait().unwrap().is_none(), "the child ended by itself");
        let is_locked = db.execute_batch("begin immediate; rollback").is_err();
        let ticks = cpu_ticks(child.id());
        match locked_since {
            Some(since) if is_locked && since + 20 < ticks => break,
            Some(_) if is_locked => {}
            _ => locked_since = is_locked.then_some(ticks),
        }
        std::thread::yield_now();
    }
    db.busy_timeout(PATIENCE).unwrap();
}

/// Hundredths of a second that the process has computed.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let after_name = stat.rsplit_once(") ").unwrap().1;
    after_name.split(' ').nth(11).unwrap().parse().unwrap()
}
