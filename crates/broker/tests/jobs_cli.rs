//! `ebbtide jobs`, the program itself, on rows that another program wrote with plain SQL, in both storages.

mod support;

use std::process::{Output, Stdio};

use serde_json::Value;
use support::partition::Log;
use support::url;
use tempfile::TempDir;
use tokio::process::Command;

/// A storage with its schema, and plain SQL beside the program.
enum World {
    Postgres(Box<Log>),
    Sqlite(TempDir),
}

struct Run {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Run {
    fn json(&self) -> Value {
        assert_eq!(self.code, 0, "{}", self.stderr);
        self.any_json()
    }

    fn any_json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {}{}", self.stdout, self.stderr))
    }
}

impl World {
    async fn postgres() -> Self {
        let world = Self::Postgres(Box::new(Log::start().await));
        assert_eq!(world.run(&["migrate"]).await.code, 0);
        world
    }

    async fn sqlite() -> Self {
        let world = Self::Sqlite(tempfile::tempdir().expect("a directory"));
        assert_eq!(world.run(&["migrate"]).await.code, 0);
        world
    }

    fn url(&self) -> String {
        match self {
            Self::Postgres(log) => url(&log.database.name),
            Self::Sqlite(dir) => format!("sqlite://{}", dir.path().join("jobs.db").display()),
        }
    }

    async fn run(&self, arguments: &[&str]) -> Run {
        let url = self.url();
        run(&[&["--storage", &url], arguments].concat()).await
    }

    async fn json(&self, arguments: &[&str]) -> Value {
        self.run(&[arguments, &["--json"]].concat()).await.json()
    }

    async fn sql(&self, sql: &str) {
        match self {
            Self::Postgres(log) => log.execute(&sql.replace('@', "ebbtide_jobs.")).await,
            Self::Sqlite(dir) => {
                let db = rusqlite::Connection::open(dir.path().join("jobs.db")).expect("opens");
                db.execute_batch(&sql.replace('@', "")).unwrap_or_else(|error| panic!("{error} in {sql}"));
            }
        }
    }

    fn id(&self, id: &str) -> String {
        match self {
            Self::Postgres(_) => format!("'{id}'"),
            Self::Sqlite(_) => format!("x'{}'", id.replace('-', "")),
        }
    }

    fn days_ago(&self, days: i64) -> String {
        match self {
            Self::Postgres(_) => format!("now() - interval '{days} days'"),
            Self::Sqlite(_) => format!("unixepoch() * 1000000 - {days} * 86400000000"),
        }
    }

    /// A row of another program: the columns that it names, and everything else by default.
    async fn job(&self, number: u32, columns: &str, values: &str) -> String {
        let id = format!("01900000-0000-7000-8000-{number:012}");
        let literal = self.id(&id);
        self.sql(&format!("insert into @jobs (id, type{columns}) values ({literal}, 'mail'{values})")).await;
        id
    }

    /// One that failed for good this long ago.
    async fn dead(&self, number: u32, queue: &str, days: i64) -> String {
        let ago = self.days_ago(days);
        let columns = ", queue, status, completed_at, dead_lettered_at, last_error";
        self.job(number, columns, &format!(", '{queue}', 'failed', {ago}, {ago}, 'no disk'")).await
    }
}

async fn run(arguments: &[&str]) -> Run {
    let program = Command::new(env!("CARGO_BIN_EXE_ebbtide"))
        .arg("jobs")
        .args(arguments)
        .env_remove("EBBTIDE_JOBS_STORAGE")
        .stdin(Stdio::null())
        .output();
    let Output { status, stdout, stderr } = program.await.expect("the program runs");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    Run { code: status.code().expect("an exit"), stdout: text(stdout), stderr: text(stderr) }
}

/// Runs each case on both storages.
macro_rules! cases {
    ($($case:ident),* $(,)?) => {
        mod postgres {
            $(#[tokio::test] async fn $case() { super::$case(super::World::postgres().await).await })*
        }
        mod sqlite {
            $(#[tokio::test] async fn $case() { super::$case(super::World::sqlite().await).await })*
        }
    };
}

async fn migrating_again_changes_nothing_and_health_says_so(w: World) {
    let again = w.json(&["migrate"]).await;
    assert_eq!(again["applied"], 0);
    assert!(0 < again["version"].as_i64().expect("a version"));
    assert_eq!(w.json(&["health"]).await["isReady"], true);
    assert!(w.run(&["health"]).await.stdout.contains("ready"));
    w.sql("alter table @queue_states rename to away").await;
    let ill = w.run(&["health", "--json"]).await;
    assert_eq!((ill.code, &ill.any_json()["isReady"]), (1, &Value::from(false)));
    assert!(ill.stderr.contains("migrate"), "{}", ill.stderr);
}

async fn queues_jobs_and_pages_are_shown(w: World) {
    let first = w.job(1, ", queue, metadata, tenant", ", 'a b', '{\"k\": \"v\"}', 'acme'").await;
    let second = w.job(2, "", "").await;
    w.dead(3, "a b", 1).await;
    w.sql("insert into @queue_states (queue, paused) values ('stopped', true)").await;
    let queues = w.json(&["queues"]).await;
    let of = |name: &str| queues["queues"].as_array().expect("queues").iter().find(|q| q["queue"] == name).cloned();
    let ours = of("a b").expect("listed");
    assert_eq!((&ours["pending"], &ours["dlq"], &ours["isPaused"]), (&1.into(), &1.into(), &false.into()));
    assert!(ours["oldestPendingAgeSeconds"].is_i64() && ours["oldestPending"].is_string());
    assert_eq!(of("stopped").expect("listed")["isPaused"], true);
    assert!(w.run(&["queues"]).await.stdout.contains("a b"));

    let page = w.json(&["list", "--limit", "2"]).await;
    assert_eq!(page["jobs"].as_array().map(Vec::len), Some(2));
    let next = page["next"].as_str().expect("there is more");
    assert_eq!(next, second);
    let rest = w.json(&["list", "--limit", "2", "--after", next]).await;
    assert_eq!((rest["jobs"][0]["id"].as_str(), &rest["next"]), (Some(&*first), &Value::Null));
    let filtered = w.json(&["list", "--queue", "a b", "--status", "pending", "--metadata", "k=v"]).await;
    assert_eq!(filtered["jobs"].as_array().map(Vec::len), Some(1));
    assert_eq!(w.run(&["list", "--tenant", "acme", "--ids-only"]).await.stdout.trim(), first);
    for bad in [["--status", "odd"], ["--limit", "101"], ["--limit", "0"], ["--since", "noon"], ["--after", "7"]] {
        assert_eq!(w.run(&["list", bad[0], bad[1]]).await.code, 2, "{bad:?}");
    }
}

async fn one_job_is_shown_with_its_steps(w: World) {
    let id = w.job(1, "", "").await;
    let step = format!("insert into @checkpoints (job_id, call_index, call_type) values ({}, 0, 'charge')", w.id(&id));
    w.sql(&step).await;
    let shown = w.json(&["show", &id]).await;
    assert_eq!(
        (&shown["type"], &shown["status"], &shown["maxRetries"]),
        (&"mail".into(), &"pending".into(), &3.into())
    );
    assert_eq!((&shown["args"], &shown["checkpoints"][0]["name"]), (&Value::Null, &"charge".into()));
    assert!(w.run(&["show", &id]).await.stdout.contains("charge"));
    let missing = w.run(&["show", "01900000-0000-7000-8000-000000000099"]).await;
    assert_eq!((missing.code, missing.stdout.as_str()), (1, ""));
    assert!(missing.stderr.contains("not found"), "{}", missing.stderr);
}

async fn jobs_are_cancelled_requeued_and_deleted(w: World) {
    let (live, done) = (w.job(1, "", "").await, w.job(2, ", status", ", 'completed'").await);
    assert_eq!(w.json(&["cancel", &live]).await["cancelled"], 1);
    assert_eq!(w.json(&["show", &live]).await["status"], "cancelled");
    let refused = w.run(&["cancel", &done]).await;
    assert_eq!(refused.code, 1);
    assert!(refused.stderr.contains("cannot be cancelled"));
    let both = w.run(&["requeue", &live, &done, "--json"]).await;
    let report = both.any_json();
    assert_eq!((both.code, &report["requeued"]), (4, &1.into()));
    assert_eq!(
        (&report["skipped"][0]["id"], &report["skipped"][0]["reason"]),
        (&done.as_str().into(), &"job_not_requeueable".into())
    );
    assert_eq!(w.json(&["show", &live]).await["status"], "pending");
    assert_eq!(w.run(&["requeue", &live]).await.code, 1);

    let child = w.job(3, ", parent_job_id, root_job_id", &format!(", {0}, {0}", w.id(&live))).await;
    assert_eq!(w.run(&["delete", &child]).await.code, 1, "its parent may still want it");
    assert_eq!(w.json(&["delete", &live, "--workflow"]).await["deleted"], 2);
    assert_eq!(w.json(&["delete", &done]).await["deleted"], 1);
    assert_eq!(w.json(&["list"]).await["jobs"], Value::Array(vec![]));
}

async fn a_queue_is_purged_of_one_status(w: World) {
    for number in 0..3 {
        w.job(number, ", queue, status", ", 'a b', 'completed'").await;
    }
    let kept = w.job(9, ", queue", ", 'a b'").await;
    assert_eq!(w.json(&["purge", "--queue", "a b", "--status", "completed"]).await["deleted"], 3);
    assert_eq!(w.json(&["purge", "--queue", "a b", "--status", "completed"]).await["deleted"], 0);
    assert_eq!(w.json(&["list"]).await["jobs"][0]["id"], *kept);
    assert_eq!(w.run(&["purge", "--queue", "a b", "--status", "running"]).await.code, 2);
}

async fn dead_letters_are_listed_and_requeued(w: World) {
    let (old, new, other) = (w.dead(1, "q", 3).await, w.dead(2, "q", 1).await, w.dead(3, "other", 2).await);
    let listed = w.json(&["dlq", "list", "--queue", "q"]).await;
    assert_eq!(
        (&listed["total"], &listed["jobs"][0]["id"], &listed["jobs"][1]["id"]),
        (&2.into(), &new.as_str().into(), &old.as_str().into())
    );
    let ids = w.run(&["dlq", "list", "--ids-only", "--limit", "1", "--offset", "1"]).await.stdout;
    assert_eq!(ids.trim(), other);
    assert_eq!(w.json(&["dlq", "requeue", &other]).await["requeued"], 1);

    // One of the two that match cannot be requeued: a job of a workflow is run again only by its parent.
    w.sql(&format!("update @jobs set parent_job_id = {} where id = {}", w.id(&other), w.id(&new))).await;
    let bulk = w.run(&["dlq", "requeue", "--queue", "q", "--json"]).await;
    assert_eq!((bulk.code, &bulk.any_json()["requeued"]), (4, &1.into()));
    assert_eq!(bulk.any_json()["skipped"][0]["id"], *new);
    assert_eq!(w.json(&["show", &old]).await["status"], "pending");
    let nothing = w.run(&["dlq", "requeue", "--queue", "nowhere"]).await;
    assert_eq!(nothing.code, 0);
    assert!(nothing.stderr.contains("nothing matches"));
    assert_eq!(w.run(&["dlq", "requeue"]).await.code, 1, "all of them are meant only by saying so");
    assert_eq!(w.run(&["dlq", "requeue", &old, "--all"]).await.code, 1);
}

async fn retention_is_planned_and_run_by_the_stock_policy_or_ones_own(w: World) {
    for (number, status, days) in [(1, "completed", 31), (2, "completed", 29), (3, "failed", 91), (4, "cancelled", 89)]
    {
        let values = format!(", '{status}', {}", w.days_ago(days));
        w.job(number, ", status, completed_at", &values).await;
    }
    let plan = w.json(&["retention", "plan"]).await;
    assert_eq!(
        (&plan["completed"]["due"], &plan["failed"]["due"], &plan["cancelled"]["due"]),
        (&1.into(), &1.into(), &0.into())
    );
    let own = w.json(&["retention", "plan", "--completed-after", "1d"]).await;
    assert_eq!((&own["completed"]["due"], &own["failed"]), (&2.into(), &Value::Null));
    assert_eq!(w.json(&["list"]).await["jobs"].as_array().map(Vec::len), Some(4), "a plan deletes nothing");

    let run = w.json(&["retention", "run", "--batch-size", "1"]).await;
    assert_eq!(
        (&run["completed"], &run["failed"], &run["cancelled"], &run["consumedSignals"]),
        (&1.into(), &1.into(), &0.into(), &0.into())
    );
    let own = w.json(&["retention", "run", "--failed-after", "30d", "--completed-after", "0"]).await;
    assert_eq!(
        (&own["completed"], &own["cancelled"], &own["consumedSignals"]),
        (&Value::Null, &1.into(), &Value::Null)
    );
    assert_eq!(w.json(&["list"]).await["jobs"].as_array().map(Vec::len), Some(1));
    for bad in [["--completed-after", "30"], ["--batch-size", "0"], ["--batch-size", "10001"]] {
        assert_eq!(w.run(&["retention", "run", bad[0], bad[1]]).await.code, 2, "{bad:?}");
    }
    w.job(5, ", status, completed_at", &format!(", 'completed', {}", w.days_ago(99))).await;
    w.sql("alter table @checkpoints rename to away").await;
    let failed = w.run(&["retention", "run"]).await;
    assert_eq!(failed.code, 1, "{}", failed.stdout);
}

async fn windows_are_listed_and_released(w: World) {
    let id = w.job(1, ", status, completed_at", &format!(", 'completed', {}", w.days_ago(99))).await;
    let scopes = ["a", "b", "c"].map(|letter| letter.repeat(64));
    for (scope, days) in scopes.iter().zip([-1, -2, 1]) {
        let values = format!("'{scope}', {}, {}", w.id(&id), w.days_ago(days));
        w.sql(&format!("insert into @unique_locks (scope_hash, job_id, expires_at) values ({values})")).await;
    }
    let plan = w.json(&["retention", "plan"]).await;
    assert_eq!((&plan["completed"]["keptBy"]["live_window"], &plan["expiredLocks"]), (&1.into(), &1.into()));
    let locks = w.json(&["locks", "list", "--job", &id]).await;
    let hashes: Vec<_> =
        locks["locks"].as_array().expect("locks").iter().map(|lock| lock["scopeHash"].clone()).collect();
    assert_eq!(hashes, [scopes[2].clone(), scopes[0].clone(), scopes[1].clone()]);
    assert!(w.run(&["locks", "list"]).await.stdout.contains(&scopes[0]));
    assert_eq!(w.json(&["locks", "release", "--expired"]).await["released"], 1);
    assert_eq!(w.json(&["locks", "release", &scopes[0]]).await["released"], 1);
    assert_eq!(w.json(&["retention", "run"]).await["completed"], 0, "one window holds it");
    assert_eq!(w.json(&["locks", "release", "--job", &id]).await["released"], 1);
    assert_eq!(w.json(&["locks", "release", "--job", &id]).await["released"], 0);
    assert_eq!(w.json(&["retention", "run"]).await["completed"], 1);
    assert_eq!(w.run(&["locks", "release"]).await.code, 2);
}

cases!(
    migrating_again_changes_nothing_and_health_says_so,
    queues_jobs_and_pages_are_shown,
    one_job_is_shown_with_its_steps,
    jobs_are_cancelled_requeued_and_deleted,
    a_queue_is_purged_of_one_status,
    dead_letters_are_listed_and_requeued,
    retention_is_planned_and_run_by_the_stock_policy_or_ones_own,
    windows_are_listed_and_released,
);

#[tokio::test]
async fn a_storage_that_is_none_is_refused_in_words_and_without_secrets() {
    let dir = tempfile::tempdir().expect("a directory");
    let missing = format!("sqlite://{}", dir.path().join("none.db").display());
    for (url, word) in [
        ("mysql://me:hunter2@host/db", "postgres://"),
        ("sqlite://", "names no file"),
        (missing.as_str(), "migrate"),
        ("postgres://me:hunter2@127.0.0.1:1/db", "answer"),
    ] {
        let refused = run(&["--storage", url, "health"]).await;
        assert_eq!((refused.code, refused.stdout.as_str()), (1, ""), "{url}");
        assert!(refused.stderr.contains(word) && !refused.stderr.contains("hunter2"), "{}", refused.stderr);
    }
    assert!(!dir.path().join("none.db").exists());
    assert_eq!(run(&["health"]).await.code, 1);
}
