//! The private PostgreSQL of a server that names no database: found, created, started, watched, stopped.

mod folder;
mod launch;
mod log;
mod programs;

use std::io;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, geteuid};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tracing::{error, info, warn};

use folder::{Folder, SOCKET_PORT};
use launch::Launch;
use log::RotatingLog;
use programs::Programs;

/// Connections beside the pool: leader gate, LISTEN, migrations, an operator, and PostgreSQL's own reserve.
const CONNECTIONS_EXTRA: usize = 24;
/// A start may have to replay the log of a crash.
const READY_WAIT: Duration = Duration::from_secs(600);
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
const FAST_STOP_WAIT: Duration = Duration::from_secs(20);
const IMMEDIATE_STOP_WAIT: Duration = Duration::from_secs(5);
const LAST_LINES_WAIT: Duration = Duration::from_secs(2);
/// A PostgreSQL that ends more often than this within the window is given up.
const RESTARTS_MAX: usize = 3;
const RESTARTS_WINDOW: Duration = Duration::from_secs(300);

/// Why there is no embedded database.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddedError {
    #[error(
        "no PostgreSQL {} or newer found{}; install it with `apt-get install postgresql`, set EBBTIDE_POSTGRES_BIN_DIR \
         to the folder of `postgres` and `initdb`, or name a database with EBBTIDE_DATABASE_URL (looked in {})",
        programs::MAJOR_MIN,
        found_majors(.majors),
        .looked.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    NoPrograms { looked: Vec<PathBuf>, majors: Vec<u32> },
    #[error(
        "the data folder was made by PostgreSQL {cluster}, and only {majors:?} is installed; install \
         `postgresql-{cluster}`, or upgrade the cluster with pg_upgrade"
    )]
    Version { cluster: u32, majors: Vec<u32> },
    #[error("{} is in use by another server (process {holder})", .folder.display())]
    InUse { folder: PathBuf, holder: String },
    #[error("a PostgreSQL that this server did not start still runs in {} (process {pid})", .folder.display())]
    StillRunning { folder: PathBuf, pid: u32 },
    #[error("{} belongs to another user", .0.display())]
    Foreign(PathBuf),
    #[error("{} exists but holds no PostgreSQL cluster", .0.display())]
    NotACluster(PathBuf),
    #[error("PostgreSQL may not run as root, and there is neither a user postgres nor nobody")]
    NoUser,
    #[error("user {user} cannot reach {}; move it, or open its parent folders for that user", .folder.display())]
    Unreachable { folder: PathBuf, user: String },
    #[error("could not {action} {}: {source}", .path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("initdb failed: {0}")]
    Initdb(String),
    #[error("PostgreSQL did not start: {0}")]
    Start(String),
}

impl EmbeddedError {
    fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }
}

fn found_majors(majors: &[u32]) -> String {
    if majors.is_empty() { String::new() } else { format!(" (only {majors:?})") }
}

/// A running cluster. Dropping it stops PostgreSQL too, without waiting for the end.
pub struct Cluster {
    folder: Arc<Folder>,
    socket_dir: PathBuf,
    shared: Arc<Shared>,
    state: watch::Receiver<State>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Starting,
    Running(i32),
    Stopped,
    Failed(String),
}

/// What the watching thread and the rest of the server share.
#[derive(Default)]
struct Shared {
    /// Holding it means that the process is not reaped meanwhile, so its id is not another's.
    control: Mutex<Control>,
    was_ready: AtomicBool,
}

#[derive(Default)]
struct Control {
    stopping: bool,
    pid: Option<Pid>,
}

impl Cluster {
    /// Starts the cluster in `data_dir`, made first if there is none, for a pool of `pool_size` connections.
    ///
    /// # Errors
    /// [`EmbeddedError`] says what is missing or in the way.
    pub async fn start(data_dir: &Path, bin_dir: Option<&Path>, pool_size: usize) -> Result<Self, EmbeddedError> {
        let (data_dir, bin_dir) = (data_dir.to_owned(), bin_dir.map(Path::to_owned));
        let preparing =
            tokio::task::spawn_blocking(move || prepare(&data_dir, bin_dir.as_deref(), pool_size + CONNECTIONS_EXTRA));
        let launch = preparing.await.expect("preparing does not panic")?;
        let shared = Arc::new(Shared::default());
        let (sender, state) = watch::channel(State::Starting);
        let (folder, socket_dir) = (launch.folder.clone(), launch.socket_dir.clone());
        let watching = shared.clone();
        std::thread::Builder::new()
            .name("postgres".to_owned())
            .spawn(move || watch_over(&launch, &watching, &sender))
            .map_err(|error| EmbeddedError::Start(error.to_string()))?;
        let cluster = Self { folder, socket_dir, shared, state };
        let mut state = cluster.state.clone();
        match timeout(READY_WAIT, ready(&mut state, &cluster.folder)).await {
            Ok(outcome) => outcome.map_err(EmbeddedError::Start)?,
            Err(_) => return Err(EmbeddedError::Start(format!("not ready after {} s", READY_WAIT.as_secs()))),
        }
        cluster.shared.was_ready.store(true, Ordering::Relaxed);
        tokio::spawn(announce(state, cluster.folder.clone()));
        Ok(cluster)
    }

    /// How to reach it.
    pub fn address(&self) -> tokio_postgres::Config {
        let mut address = tokio_postgres::Config::new();
        address.host_path(&self.socket_dir).port(SOCKET_PORT).user("postgres").dbname("postgres");
        address
    }

    /// The folder in use, which is not always the one asked for.
    pub fn folder(&self) -> &Path {
        &self.folder.path
    }

    /// Ends when PostgreSQL has failed for good, and says why.
    pub async fn failed(&self) -> String {
        let mut state = self.state.clone();
        let end = state.wait_for(|state| matches!(state, State::Failed(_) | State::Stopped)).await;
        match end.as_deref() {
            Ok(State::Failed(reason)) => reason.clone(),
            _ => "PostgreSQL is stopped".to_owned(),
        }
    }

    /// Stops PostgreSQL: the fast way, then, if that takes too long, the way that needs recovery at the next start.
    pub async fn stop(mut self) {
        self.shared.stop(Signal::SIGINT);
        if self.ended_within(FAST_STOP_WAIT).await {
            return;
        }
        warn!(target: "embedded", "PostgreSQL does not stop; stopping it at once");
        self.shared.stop(Signal::SIGQUIT);
        if !self.ended_within(IMMEDIATE_STOP_WAIT).await {
            error!(target: "embedded", "PostgreSQL does not stop; killing it");
            self.shared.stop(Signal::SIGKILL);
        }
    }

    async fn ended_within(&mut self, wait: Duration) -> bool {
        timeout(wait, self.failed()).await.is_ok()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.shared.stop(Signal::SIGINT);
    }
}

impl Shared {
    fn stop(&self, signal: Signal) {
        let mut control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        control.stopping = true;
        if let Some(pid) = control.pid {
            // It cannot be another process: only the watching thread reaps it, and under this lock.
            let _ = kill(pid, signal);
        }
    }
}

/// Waits until the PostgreSQL that was started last takes connections.
async fn ready(state: &mut watch::Receiver<State>, folder: &Folder) -> Result<(), String> {
    let mut look = interval(LOOK_INTERVAL);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        match &*state.borrow_and_update() {
            State::Failed(reason) => return Err(reason.clone()),
            State::Stopped => return Err("stopped".to_owned()),
            State::Running(pid) if is_ready(&folder.cluster(), *pid) => break,
            State::Running(_) | State::Starting => {}
        }
    }
    info!(target: "embedded", folder = %folder.path.display(), "PostgreSQL is ready");
    Ok(())
}

/// Says when a PostgreSQL that was started again is ready; ends with the watching thread.
async fn announce(mut state: watch::Receiver<State>, folder: Arc<Folder>) {
    while state.changed().await.is_ok() && ready(&mut state, &folder).await.is_ok() {}
}

/// PostgreSQL writes into its pid file when it takes connections, as `pg_ctl` knows too.
fn is_ready(cluster: &Path, pid: i32) -> bool {
    let Ok(text) = std::fs::read_to_string(cluster.join("postmaster.pid")) else { return false };
    let mut lines = text.lines();
    lines.next().is_some_and(|line| line.trim() == pid.to_string())
        && lines.nth(6).is_some_and(|line| line.trim() == "ready")
}

fn prepare(data_dir: &Path, bin_dir: Option<&Path>, max_connections: usize) -> Result<Launch, EmbeddedError> {
    let folder = Folder::claim(data_dir)?;
    let cluster_major = folder.cluster_major()?;
    let programs = Programs::find(bin_dir, cluster_major)?;
    if cluster_major.is_none() {
        create(&folder, &programs)?;
    }
    Launch::new(folder, programs, max_connections)
}

/// The cluster is made under another name: one that was interrupted is never taken for a whole one.
fn create(folder: &Folder, programs: &Programs) -> Result<(), EmbeddedError> {
    let unfinished = folder.path.join("pgdata.new");
    if unfinished.exists() {
        std::fs::remove_dir_all(&unfinished).map_err(|error| EmbeddedError::io("remove", &unfinished, error))?;
    }
    let user = folder.user.as_ref().map_or_else(|| geteuid().to_string(), |user| user.name.clone());
    info!(target: "embedded", folder = %folder.path.display(), version = programs.major, user, "creating a database");
    folder.make_private(&unfinished)?;
    let mut command = folder::command(folder.user.as_ref(), &programs.path("initdb"));
    command.arg("-D").arg(&unfinished).args([
        "--username=postgres",
        "--auth-local=trust", // the socket's folder admits PostgreSQL's user alone
        "--auth-host=reject",
        "--encoding=UTF8",
        "--locale=C",
        "--data-checksums",
        "--no-instructions",
    ]);
    let output = command.output().map_err(|error| EmbeddedError::Initdb(error.to_string()))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(EmbeddedError::Initdb(format!("{}: {}", output.status, text.trim())));
    }
    let cluster = folder.cluster();
    std::fs::rename(&unfinished, &cluster).map_err(|error| EmbeddedError::io("name", &cluster, error))
}

/// Runs in a thread of its own, which outlives each PostgreSQL that it starts.
fn watch_over(launch: &Launch, shared: &Shared, state: &watch::Sender<State>) {
    let mut ends: Vec<Instant> = Vec::new();
    loop {
        let exit = match run_once(launch, shared, state) {
            Ok(exit) => exit,
            Err(reason) => {
                state.send_replace(State::Failed(reason));
                return;
            }
        };
        if shared.control.lock().unwrap_or_else(PoisonError::into_inner).stopping {
            state.send_replace(State::Stopped);
            return;
        }
        let reason = format!("{exit}; its last lines:\n{}", launch.log.tail());
        ends.retain(|end| end.elapsed() < RESTARTS_WINDOW);
        ends.push(Instant::now());
        if !shared.was_ready.load(Ordering::Relaxed) || RESTARTS_MAX < ends.len() {
            state.send_replace(State::Failed(reason));
            return;
        }
        error!(target: "embedded", reason, "PostgreSQL ended unexpectedly; starting it again");
        if let Err(error) = launch.folder.wait_until_free() {
            state.send_replace(State::Failed(error.to_string()));
            return;
        }
    }
}

/// Starts PostgreSQL and waits for its end.
fn run_once(launch: &Launch, shared: &Shared, state: &watch::Sender<State>) -> Result<String, String> {
    let mut child = {
        let mut control = shared.control.lock().unwrap_or_else(PoisonError::into_inner);
        if control.stopping {
            return Ok("not started".to_owned());
        }
        let child = launch.command().spawn().map_err(|error| format!("setpriv: {error}"))?;
        control.pid = Some(pid_of(&child));
        child
    };
    state.send_replace(State::Running(pid_of(&child).as_raw()));
    let copied = copy_to_log(&mut child, launch.log.clone());
    // Waits without reaping: the id stays ours until the lock is held.
    let waited = waitid(Id::Pid(pid_of(&child)), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
    let mut control = shared.control.lock().unwrap_or_else(PoisonError::into_inner);
    let exit = child.wait().map_err(|error| error.to_string());
    control.pid = None;
    drop(control);
    waited.map_err(|error| error.to_string())?;
    // The last lines are wanted for the error; they come when the last backend closes the pipe.
    let _ = copied.recv_timeout(LAST_LINES_WAIT);
    exit.map(|status| status.to_string())
}

/// The channel closes when everything is copied.
fn copy_to_log(child: &mut Child, log: RotatingLog) -> mpsc::Receiver<()> {
    let (sender, copied) = mpsc::channel();
    let stderr = child.stderr.take().expect("spawned with a pipe");
    std::thread::spawn(move || {
        log.copy(stderr);
        drop(sender);
    });
    copied
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).expect("a process id is positive and fits"))
}
