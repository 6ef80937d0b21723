//! Workers that are killed, stopped and misled about the time: what they did is there once, and nothing else is.
#![allow(clippy::unwrap_used, reason = "a case fails at the line that was wrong")]
#![allow(dead_code, unused_macros, unreachable_pub, reason = "the support modules are shared with other suites")]

#[path = "support/rig.rs"]
mod rig;
#[path = "support/rows.rs"]
mod rows;
#[macro_use]
#[path = "support/store.rs"]
mod support;

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use ebbtide_jobs::{Ctx, JobError, JobId, JobStatus, PostgresStorage, Queue, SqliteStorage, Storage, Worker};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio_util::sync::CancellationToken;

use crate::rig::{MS, Running, quick, send, until};
use crate::support::{DAY, Raw, SECOND, Store};

const STEPS: u64 = 20;
const KILLS: usize = 50;
/// Jobs that one worker runs at once.
const AT_ONCE: u32 = 4;

/// Tells a child process what to do: the storage, and the directory of its effects.
const CHILD: &str = "EBBTIDE_JOBS_FAULT_CHILD";

/// Where effects go, outside of the storage. The same effect twice is one.
#[derive(Clone)]
struct Sink(PathBuf);

impl Sink {
    fn effect(&self, name: &str) {
        fs::write(self.0.join(name), b"").unwrap();
    }

    fn effects(&self, prefix: &str) -> usize {
        let names = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_str().unwrap().starts_with(prefix)).count()
    }

    /// Notes an execution. Lines of several processes do not mix.
    fn note(&self, line: &str) {
        let mut log = OpenOptions::new().create(true).append(true).open(self.0.join("log")).unwrap();
        log.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    fn notes(&self) -> Vec<String> {
        let text = fs::read_to_string(self.0.join("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

fn queue_of(storage: Arc<dyn Storage>, sink: &Sink) -> Queue {
    let queue = Queue::builder(storage).build();
    let effects = sink.clone();
    queue
        .register("flow", move |ctx: Ctx, (): ()| {
            let sink = effects.clone();
            async move {
                let mut sum = 0;
                for step in 0..STEPS {
                    let id = ctx.job_id();
                    let taken = || async {
                        sink.note(&format!("{id} {step}"));
                        sink.effect(&format!("step-{id}-{step}"));
                        Ok(step)
                    };
                    sum += ctx.step(&format!("step{step}"), taken).await?;
                }
                Ok(sum)
            }
        })
        .unwrap();
    let effects = sink.clone();
    queue
        .register("pausing", move |ctx: Ctx, (): ()| {
            let sink = effects.clone();
            async move {
                let who = if std::env::var(CHILD).is_ok() { "child" } else { "parent" };
                sink.effect(&format!("began-{who}"));
                if who == "child" {
                    // The parent stops this process here, and lets it go on when the job is somebody else's.
                    until("the job was taken", || async { sink.0.join("taken").exists() }).await;
                }
                ctx.step("who", || async { Ok(who.to_owned()) }).await
            }
        })
        .unwrap();
    queue
        .register("waits", |ctx: Ctx, (): ()| async move {
            ctx.wait_signal::<()>("go").await?;
            ctx.sleep(10 * MS).await?;
            if ctx.load_phase::<()>("failed").await?.is_none() {
                ctx.save_phase("failed", &()).await?;
                return Err(JobError::retry_after(10 * MS, "once"));
            }
            Ok(())
        })
        .unwrap();
    let effects = sink.clone();
    queue.hooks().on_attempt_end(move |_| effects.effect("no-outcome"));
    queue
}

/// Not a case of its own: the process that the cases kill and stop. Started by hand it has nothing to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child_process() {
    let Ok(task) = std::env::var(CHILD) else { return };
    set_pdeathsig(Signal::SIGKILL).unwrap();
    let (storage, sink) = task.split_once('|').unwrap();
    let storage: Arc<dyn Storage> = if storage.starts_with("postgres") {
        Arc::new(PostgresStorage::connect(storage, 8).unwrap())
    } else {
        Arc::new(SqliteStorage::open(storage).unwrap())
    };
    let sink = Sink(sink.into());
    let queue = queue_of(storage, &sink);
    if std::env::var("ENQUEUE").is_ok() {
        queue.enqueue("waits", &()).delay(DAY).send().await.unwrap();
    }
    let worker = settings(Worker::builder(&queue)).build().unwrap();
    worker.run(CancellationToken::new()).await.unwrap();
}

/// Lost workers are noticed within seconds, and live ones are not taken for lost on a busy machine.
fn settings(builder: ebbtide_jobs::WorkerBuilder) -> ebbtide_jobs::WorkerBuilder {
    builder
        .concurrency(AT_ONCE)
        .poll_interval(50 * MS)
        .ready_promote_interval(50 * MS)
        .ownership_audit_interval(Duration::ZERO)
        .stale_lock_age(3 * SECOND)
        .stale_lock_interval(SECOND)
}

/// A child process that does not outlive the test.
struct Process(Child);

impl Process {
    fn start(t: &Store, sink: &Path, change: impl FnOnce(&mut Command)) -> Self {
        let storage = match &t.raw {
            Raw::Postgres { url, .. } => url.clone(),
            Raw::Sqlite { path, .. } => path.display().to_string(),
        };
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child_process"]).env(CHILD, format!("{storage}|{}", sink.display()));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        change(&mut command);
        Self(command.spawn().unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.0.id()).unwrap()), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Numbers that the seed gives, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % n as u64).unwrap()
    }
}

/// Two workers of a workflow of twenty steps; one of them is killed after a random number of further steps, fifty
/// times. Each kill is answered with a new worker and another job.
async fn workers_are_killed_at_random_moments(t: Store) {
    let dir = tempfile::tempdir().unwrap();
    let sink = Sink(dir.path().to_owned());
    let queue = queue_of(t.storage.clone(), &sink);
    let seed = 0x9e37_79b9_7f4a_7c15;
    println!("seed {seed:#x}");
    let mut random = Random(seed);
    let mut ids: Vec<JobId> = Vec::new();
    let enqueue = || async { queue.enqueue("flow", &()).retries(100).send().await.unwrap().id() };
    for _ in 0..8 {
        ids.push(enqueue().await);
    }
    let mut workers = [Process::start(&t, dir.path(), |_| {}), Process::start(&t, dir.path(), |_| {})];
    for _ in 0..KILLS {
        ids.push(enqueue().await);
        let enough = sink.notes().len() + random.below(16);
        until("further steps", || async { enough <= sink.notes().len() }).await;
        workers[random.below(2)] = Process::start(&t, dir.path(), |_| {});
    }
    for id in &ids {
        let job = t.becomes(*id, JobStatus::Completed).await;
        assert_eq!(job.result.as_deref(), Some(b"190".as_slice()), "seed {seed:#x}");
    }
    assert_eq!(t.number("select count(*) from @jobs").await, ids.len() as i64, "no job was lost or doubled");
    assert_eq!(sink.effects("step-"), ids.len() * STEPS as usize, "every effect is there once");
    let records = "select count(*) from @checkpoints";
    assert_eq!(t.number(records).await, (ids.len() as u64 * STEPS) as i64);
    // Only what was under way in a killed worker may have been done again.
    let again = sink.notes().len() - ids.len() * STEPS as usize;
    assert!(again <= KILLS * AT_ONCE as usize, "{again} steps were repeated");
    assert_eq!(t.orphans().await, 0);
    assert_eq!(t.number("select count(*) from @jobs where locked_by <> '' or dead_lettered_at is not null").await, 0);
}

/// Stops the process outside of a transaction: on SQLite it would keep everybody else from writing.
async fn stop(t: &Store, child: &Process) {
    let stat = format!("/proc/{}/stat", child.0.id());
    for _ in 0..1000 {
        child.signal(Signal::SIGSTOP);
        until("it stands still", || async { fs::read_to_string(&stat).unwrap().contains(") T ") }).await;
        let Raw::Sqlite { path, .. } = &t.raw else { return };
        let db = rusqlite::Connection::open(path).unwrap();
        db.busy_timeout(Duration::ZERO).unwrap();
        if db.execute_batch("begin immediate; rollback").is_ok() {
            return;
        }
        child.signal(Signal::SIGCONT);
        until("it lets go", || async { db.execute_batch("begin immediate; rollback").is_ok() }).await;
    }
    panic!("the process is never outside of a transaction");
}

/// A process that stands still past its lease finds, when it goes on, that nothing is its own any more.
async fn a_stopped_worker_cannot_write(t: Store) {
    let dir = tempfile::tempdir().unwrap();
    let sink = Sink(dir.path().to_owned());
    let queue = queue_of(t.storage.clone(), &sink);
    let child = Process::start(&t, dir.path(), |_| {});
    let id = queue.enqueue("pausing", &()).retries(5).send().await.unwrap().id();
    until("the child runs it", || async { sink.effects("began-child") == 1 }).await;
    stop(&t, &child).await;
    let parent = Running::start(settings(quick(&queue)).stale_lock_interval(SECOND).build().unwrap());
    let job = t.becomes(id, JobStatus::Completed).await;
    let records = "select cast(id as text) || coalesce(cast(result as text), '') from @checkpoints";
    let before = t.texts(records).await;
    sink.effect("taken");
    child.signal(Signal::SIGCONT);
    until("the child's run ended", || async { sink.effects("no-outcome") == 1 }).await;
    assert_eq!(t.job(id).await, job, "it wrote nothing about the job");
    assert_eq!(queue.result::<String>(id).await.unwrap(), "parent");
    assert_eq!(t.texts(records).await, before, "and no record");
    parent.stop().await;
}

cases!(workers_are_killed_at_random_moments, a_stopped_worker_cannot_write);

const SHIFTED_CLOCK: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, now);
    if (id == CLOCK_REALTIME) now->tv_sec += atol(getenv("CLOCK_SHIFT"));
    return failed;
}
"#;

/// The database's clock alone counts: a worker whose clock is ten days off in either direction does everything at the
/// same time as any other. (SQLite has no clock but its process's.)
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_ten_days_off_changes_nothing() {
    for shift in ["864000", "-864000"] {
        let t = Store::postgres().await;
        let dir = tempfile::tempdir().unwrap();
        let (source, library) = (dir.path().join("clock.c"), dir.path().join("clock.so"));
        fs::write(&source, SHIFTED_CLOCK).unwrap();
        let compiler = std::env::var("CC").unwrap_or("cc".to_owned());
        let mut build = Command::new(compiler);
        build.args(["-shared", "-fPIC", "-o"]).args([&library, &source]).arg("-ldl");
        assert!(build.status().unwrap().success(), "the clock compiles");
        let sink = Sink(dir.path().to_owned());
        let queue = queue_of(t.storage.clone(), &sink);
        let _child = Process::start(&t, dir.path(), |command| {
            command.env("LD_PRELOAD", &library).env("CLOCK_SHIFT", shift).env("ENQUEUE", "1");
        });
        let id = send(&queue, "waits", &()).await;
        until("it waits", || async { t.job(id).await.waiting_signal_name.as_deref() == Some("go") }).await;
        queue.signal(id, "go", &()).await.unwrap();
        let job = t.becomes(id, JobStatus::Completed).await;
        assert_eq!(job.attempt, 2);
        let near = "abs(extract(epoch from clock_timestamp() - ";
        let off = format!(
            "select count(*) from @jobs where {near}created_at)) > 300 or {near}updated_at)) > 300
                 or {near}completed_at)) > 300 or {near}started_at)) > 300"
        );
        assert_eq!(t.number(&off).await, 0, "shift {shift}");
        let consumed = format!("select count(*) from @signals where {near}consumed_at)) < 300");
        assert_eq!(t.number(&consumed).await, 1, "shift {shift}");
        let later = "select count(*) from @jobs where status = 'pending' and attempt = 0
                        and abs(extract(epoch from run_at - created_at) - 86400) < 1";
        assert_eq!(t.number(later).await, 1, "the job that the child enqueued waits for its day; shift {shift}");
    }
}
