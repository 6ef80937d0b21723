//! The command line: arguments ─► checked config ─► one command, one file each.

mod bench;
mod database;
mod files;
mod jobs;
mod migrate;
mod retention;
mod serve;
mod sweep;

use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use crate::config::{Config, RawConfig, set_variables};
use crate::logging;

/// Messages on PostgreSQL: ordered lanes, consumer groups, dead letters, and retention it can trust.
#[derive(Parser)]
#[command(name = "ebbtide", version, max_term_width = 110)]
struct Program {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the server; with no database named, on a private PostgreSQL of its own.
    Serve(Settings),
    /// Install or upgrade the schema, and exit.
    Migrate(Settings),
    /// Delete what is due, once, and say what went and what stayed.
    Sweep(sweep::Sweep),
    /// Look at what deletion leaves.
    Retention(retention::Retention),
    /// Look at durable jobs and act on them, in PostgreSQL or SQLite.
    Jobs(jobs::Jobs),
    /// Measure a server against its database, and clean up.
    Bench(bench::Bench),
}

impl Command {
    fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Serve(settings) => settings.run(serve::run),
            Self::Migrate(settings) => settings.run(migrate::run),
            Self::Sweep(sweep) => sweep.run(),
            Self::Retention(retention) => retention.run(),
            Self::Jobs(jobs) => jobs.run(),
            Self::Bench(bench) => bench.run(),
        }
    }
}

/// The settings, for a command that takes nothing else.
#[derive(Args)]
struct Settings {
    #[command(flatten)]
    raw: RawConfig,
}

impl Settings {
    fn run<F>(self, command: impl FnOnce(Config, CancellationToken) -> F) -> anyhow::Result<()>
    where
        F: Future<Output = anyhow::Result<()>>,
    {
        run_with(self.raw, command)
    }
}

/// Runs `command` with checked settings, a log, a runtime, and a token that a signal cancels.
fn run_with<F>(raw: RawConfig, command: impl FnOnce(Config, CancellationToken) -> F) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>>,
{
    let (config, warnings) = Config::check(raw, set_variables())?;
    logging::init(&config.log)?;
    for text in warnings {
        warn!(target: "config", "{text}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(async {
        let stop = CancellationToken::new();
        cancel_on_signal(stop.clone())?;
        command(config, stop).await
    });
    // A blocking task that hangs must not hold up the exit.
    runtime.shutdown_background();
    outcome
}

/// The first SIGTERM or SIGINT asks for an orderly end, the second one ends the process.
fn cancel_on_signal(stop: CancellationToken) -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if stop.is_cancelled() {
                std::process::exit(130);
            }
            tracing::info!(target: "serve", "stopping");
            stop.cancel();
        }
    });
    Ok(())
}

/// The whole program.
pub fn main() -> ExitCode {
    match Program::parse().command.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if logging::is_on() {
                error!(target: "serve", "{error:#}");
            } else {
                eprintln!("ebbtide: {error:#}");
            }
            if error.is::<sweep::AnotherLeads>() {
                ExitCode::from(sweep::ANOTHER_LEADS)
            } else if error.is::<jobs::Skipped>() {
                ExitCode::from(jobs::SKIPPED)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}
