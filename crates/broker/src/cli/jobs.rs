//! `ebbtide jobs`: what an operator looks at and does about durable jobs, on whatever storage holds them.

mod act;
mod args;
mod dead;
mod look;
mod print;
mod retention;

use std::fmt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use ebbtide_jobs::{PostgresStorage, SqliteStorage, Storage};

/// The exit status when a command about many jobs left some of those that it had matched.
pub(super) const SKIPPED: u8 = 4;

const CONNECTIONS: usize = 2;
const HEALTH_PATIENCE: Duration = Duration::from_secs(5);

/// Some of the jobs were left as they are.
#[derive(Debug)]
pub(super) struct Skipped(usize);

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} jobs were left as they are", self.0)
    }
}

impl std::error::Error for Skipped {}

#[derive(Args)]
pub(super) struct Jobs {
    /// Where the jobs are: postgres://user@host/database, without TLS, or sqlite://file.
    #[arg(long, global = true, env = "EBBTIDE_JOBS_STORAGE", hide_env_values = true, value_name = "URL")]
    storage: Option<String>,
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install or upgrade the schema.
    Migrate,
    /// Show the queues, with their unfinished jobs and dead letters.
    Queues,
    /// List jobs, the latest first.
    List(look::List),
    /// Show one job with its steps.
    Show(look::Show),
    /// Stop unfinished jobs and everything below them.
    Cancel(act::Ids),
    /// Run failed or cancelled jobs again from nothing.
    Requeue(act::Ids),
    /// Delete jobs for good, and their deduplication windows.
    Delete(act::Delete),
    /// Delete all jobs of one queue and status for good.
    Purge(act::Purge),
    /// Jobs that failed for good.
    #[command(subcommand)]
    Dlq(dead::Dlq),
    /// What is deleted by age.
    #[command(subcommand)]
    Retention(retention::Retention),
    /// Deduplication windows.
    #[command(subcommand)]
    Locks(act::Locks),
    /// Show the schedules and their next times.
    Schedules,
    /// Ask whether the storage answers within 5 seconds.
    Health,
}

impl Jobs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let Some(url) = self.storage.as_deref() else { bail!("--storage names where the jobs are") };
        let storage = open(url, matches!(self.command, Command::Migrate))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let outcome = runtime.block_on(self.command.run(&*storage, self.json));
        runtime.shutdown_background();
        outcome
    }
}

fn open(url: &str, may_create: bool) -> anyhow::Result<Box<dyn Storage>> {
    let sqlite = url.strip_prefix("sqlite://").or_else(|| url.strip_prefix("sqlite:"));
    if let Some(path) = sqlite {
        if path.is_empty() {
            bail!("--storage names no file; write sqlite://file, or sqlite:///path/to/file");
        }
        if !may_create && !Path::new(path).exists() {
            bail!("{path} is not there; `ebbtide jobs migrate` makes it");
        }
        return Ok(Box::new(SqliteStorage::open(path).context("the file could not be opened")?));
    }
    if url.starts_with("postgres://") || url.starts_with("postgresql://") {
        let storage = PostgresStorage::connect(url, CONNECTIONS).context("--storage is no URL of PostgreSQL")?;
        return Ok(Box::new(storage));
    }
    bail!("--storage begins with postgres://, postgresql:// or sqlite://");
}

impl Command {
    async fn run(self, storage: &dyn Storage, json: bool) -> anyhow::Result<()> {
        match self {
            Self::Migrate => look::migrate(storage, json).await,
            Self::Queues => look::queues(storage, json).await,
            Self::List(list) => list.run(storage, json).await,
            Self::Show(show) => show.run(storage, json).await,
            Self::Cancel(ids) => ids.cancel(storage, json).await,
            Self::Requeue(ids) => ids.requeue(storage, json).await,
            Self::Delete(delete) => delete.run(storage, json).await,
            Self::Purge(purge) => purge.run(storage, json).await,
            Self::Dlq(dlq) => dlq.run(storage, json).await,
            Self::Retention(retention) => retention.run(storage, json).await,
            Self::Locks(locks) => locks.run(storage, json).await,
            Self::Schedules => look::schedules(storage, json).await,
            Self::Health => look::health(storage, json, HEALTH_PATIENCE).await,
        }
    }
}
