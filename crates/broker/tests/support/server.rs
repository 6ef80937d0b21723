//! A real server process on a private PostgreSQL, seen from outside.

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio_postgres::{Client, NoTls};

/// A folder that PostgreSQL's user can reach.
pub fn open_folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a real server process");
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("a real server process");
    folder
}

pub fn ebbtide(data_dir: &Path, command: &str) -> Command {
    let mut ebbtide = Command::new(env!("CARGO_BIN_EXE_ebbtide"));
    // Of the settings of whoever runs the tests, none.
    ebbtide.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    ebbtide.env("TMPDIR", data_dir.parent().expect("a real server process"));
    ebbtide.args([command, "--port=0", "--db-pool-size=4", "--data-dir"]).arg(data_dir);
    ebbtide.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    ebbtide
}

/// A running `ebbtide serve`. One that a failed test leaves behind is killed, and its PostgreSQL ends with it.
pub struct Server {
    pub child: Child,
    pub ready: String,
    pub folder: PathBuf,
}

impl Server {
    pub fn start(data_dir: &Path) -> Self {
        Self::with(data_dir, &[])
    }

    /// A server with settings of its own.
    pub fn with(data_dir: &Path, settings: &[(&str, &str)]) -> Self {
        let mut child =
            ebbtide(data_dir, "serve").envs(settings.iter().copied()).spawn().expect("a real server process");
        let mut ready = String::new();
        BufReader::new(child.stdout.take().expect("a real server process"))
            .read_line(&mut ready)
            .expect("a real server process");
        if ready.is_empty() {
            let mut log = String::new();
            child
                .stderr
                .take()
                .expect("a real server process")
                .read_to_string(&mut log)
                .expect("a real server process");
            panic!("the server did not become ready: {log}");
        }
        let folder = ready
            .split("embedded in ")
            .nth(1)
            .and_then(|rest| rest.split(", ").next())
            .expect("a real server process")
            .into();
        Self { child, ready, folder }
    }

    /// `http://127.0.0.1:port`
    pub fn url(&self) -> &str {
        let (_, rest) = self.ready.split_once("ready: ").expect("the ready line");
        rest.split_once(',').expect("the ready line").0
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().try_into().expect("a real server process")), signal)
            .expect("a real server process");
    }

    /// Asks for an orderly end, and returns what was logged.
    pub fn stop(mut self) -> String {
        self.signal(Signal::SIGTERM);
        let status = self.child.wait().expect("a real server process");
        assert!(status.success(), "an orderly end: {status}");
        let mut log = String::new();
        self.child
            .stderr
            .take()
            .expect("a real server process")
            .read_to_string(&mut log)
            .expect("a real server process");
        log
    }

    pub fn kill(mut self) {
        self.signal(Signal::SIGKILL);
        self.child.wait().expect("a real server process");
    }

    pub fn postgres_pid(&self) -> i32 {
        let text = std::fs::read_to_string(self.folder.join("pgdata/postmaster.pid")).expect("a real server process");
        text.lines().next().expect("a real server process").parse().expect("a real server process")
    }

    pub async fn sql(&self) -> Client {
        let mut config = tokio_postgres::Config::new();
        config.host_path(self.folder.join("run")).user("postgres").dbname("postgres");
        let (client, connection) = config.connect(NoTls).await.expect("a real server process");
        tokio::spawn(connection);
        client
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
