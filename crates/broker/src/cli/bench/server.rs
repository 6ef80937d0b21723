//! The server under test: a child process, so that its memory and its processor time are its own.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::client::{Connection, request};

const READY_WAIT: Duration = Duration::from_secs(120);
const STOP_WAIT: Duration = Duration::from_secs(30);
/// The kernel reports processor time to user space in hundredths of a second, on every Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// Up to the reason, which the milliseconds follow.
const HELD_BACK: &str = "ebbtide_retention_held_back_milliseconds_total{reason=\"";

/// A server, and the process that it is if this program started it.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    child: Option<Child>,
}

impl Server {
    /// One that runs already; its memory is not ours to read.
    pub(super) fn elsewhere(address: SocketAddr) -> Self {
        Self { address, child: None }
    }

    /// Starts a server of this very program on a free port.
    pub(super) async fn start(database_url: &str, settings: &[(&str, &str)]) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("this program's own path")?;
        let mut command = Command::new(program);
        command
            .args(["serve", "--port", "0", "--bind-addr", "127.0.0.1", "--log-json", "false", "--database-url"])
            .arg(database_url)
            .envs(settings.iter().copied());
        if std::env::var_os("RUST_LOG").is_none() {
            command.env("RUST_LOG", "warn");
        }
        let mut child = command.stdout(Stdio::piped()).kill_on_drop(true).spawn().context("starting the server")?;
        let output = child.stdout.take().expect("spawned with a pipe");
        let mut lines = BufReader::new(output).lines();
        let line = timeout(READY_WAIT, lines.next_line()).await.context("the server was not ready in time")??;
        let Some(line) = line else { bail!("the server ended at once") };
        let address = line.split_once("ready: http://").and_then(|(_, rest)| rest.split(',').next());
        let address = address.with_context(|| format!("the server said: {line}"))?.parse()?;
        Ok(Self { address, child: Some(child) })
    }

    /// Ends the process in an orderly way; a server that runs elsewhere is left alone.
    pub(super) async fn stop(&mut self) -> anyhow::Result<()> {
        let Some(child) = &mut self.child else { return Ok(()) };
        if let Some(pid) = child.id() {
            kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGTERM)?;
        }
        let status = timeout(STOP_WAIT, child.wait()).await.context("the server did not stop in time")??;
        if !status.success() {
            bail!("the server ended with {status}");
        }
        Ok(())
    }

    pub(super) fn is_ours(&self) -> bool {
        self.child.is_some()
    }

    /// The most memory that was resident since the server started, in MiB.
    pub(super) fn memory_max_mib(&self) -> Option<f64> {
        let pid = self.child.as_ref()?.id()?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        let kib: f64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
        Some(kib / 1024.0)
    }

    /// How long each reason has held deletion back, in seconds, as its metrics say.
    pub(super) async fn held_back(&self) -> anyhow::Result<BTreeMap<String, f64>> {
        let mut connection = Connection::open(self.address).await?;
        let reply = connection.send(&request("GET", "/metrics/prometheus", b"")).await?;
        let text = std::str::from_utf8(reply.body).context("metrics that are not text")?;
        let samples = text.lines().filter_map(|line| line.strip_prefix(HELD_BACK)?.split_once("\"} "));
        samples.map(|(reason, value)| Ok((reason.to_owned(), value.trim().parse::<f64>()? / 1000.0))).collect()
    }

    /// Processor time that the server has used, in seconds.
    pub(super) fn cpu_seconds(&self) -> Option<f64> {
        cpu_seconds(&self.child.as_ref()?.id()?.to_string())
    }
}

/// Processor time of a process, named by its id or as `self`.
pub(super) fn cpu_seconds(process: &str) -> Option<f64> {
    Stat::read(process).map(|stat| stat.cpu_seconds)
}

/// Processor time of a process and of its children, those that have ended included.
pub(super) fn family_cpu_seconds(parent: &str) -> Option<f64> {
    let own = Stat::read(parent)?;
    let living = std::fs::read_dir("/proc").ok()?.filter_map(|entry| Stat::read(entry.ok()?.file_name().to_str()?));
    let of_children: f64 = living.filter(|stat| stat.parent == parent).map(|stat| stat.cpu_seconds).sum();
    Some(own.cpu_seconds + own.ended_children_cpu_seconds + of_children)
}

struct Stat {
    parent: String,
    cpu_seconds: f64,
    ended_children_cpu_seconds: f64,
}

impl Stat {
    /// `None` for what is no process, or no longer one.
    fn read(process: &str) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // The name is in parentheses and may hold anything, so fields are counted from behind it.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let ticks = |at: usize| fields.get(at)?.parse::<f64>().ok();
        Some(Self {
            parent: (*fields.get(1)?).to_owned(),
            cpu_seconds: (ticks(11)? + ticks(12)?) / TICKS_PER_SECOND,
            ended_children_cpu_seconds: (ticks(13)? + ticks(14)?) / TICKS_PER_SECOND,
        })
    }
}
