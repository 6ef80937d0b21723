//! `ebbtide bench`: how fast a server is, as a ratio to what its database does without it.

mod body;
mod cases;
mod client;
mod control;
mod jobs;
mod load;
mod open_loop;
mod report;
mod retention;
mod server;

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};

use crate::db::{Target, TlsSettings};
use crate::embedded::Cluster;
use report::Report;
use server::Server;

/// Sessions that the server may take by default.
const SERVER_SESSIONS: usize = 160;
/// Sessions of the controls, beside those.
const CONTROL_SESSIONS: usize = 160;

#[derive(Args)]
pub(super) struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Push, pop and ack, each beside the same data inserted straight into PostgreSQL.
    PushPop(Options),
    /// What deletion costs, and what it costs everybody else.
    Retention(retention::Options),
    /// Durable jobs: enqueueing, running and picking up, on PostgreSQL and SQLite.
    Jobs(jobs::Options),
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Choice {
    /// Pushes in batches against bare inserts of the same segments.
    Batch,
    /// Pushes of one message against bare inserts of one row.
    Single,
    /// Push, pop and ack at once, every message accounted for.
    Through,
    /// Batched pushes right after the server started on a full database.
    Cold,
    /// Batched pushes with an index of transaction ids that is full.
    Full,
}

#[derive(Args, Clone)]
struct Options {
    /// What to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["batch", "single", "through", "cold", "full"])]
    cases: Vec<Choice>,
    /// Messages in one batched push.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    batch: u32,
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=99_999))]
    partitions: u32,
    /// Size of one JSON payload.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(160..=1_000_000))]
    payload_bytes: u32,
    /// Connections that push batches, and sessions of their control.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=128))]
    producers: u32,
    /// Connections that push single messages, and sessions of their control.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=128))]
    single_producers: u32,
    /// Connections that push while others pop.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=128))]
    through_producers: u32,
    /// Connections that pop and ack.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=128))]
    consumers: u32,
    /// Messages a pop asks for.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pop_batch: u32,
    /// Partitions a pop asks for.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pop_partitions: u32,
    /// Length of one measurement.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=20))]
    runs: u32,
    /// Messages that fill the index of transaction ids before the case `full`.
    #[arg(long, default_value_t = 16_000_000, value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    fill_messages: u32,
    /// A server that runs already, as address:port, with --database-url its database. Default: one is started.
    #[arg(long, requires = "database_url")]
    server: Option<SocketAddr>,
    #[command(flatten)]
    place: Place,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// Where to measure.
#[derive(Args, Clone)]
struct Place {
    /// Database to measure in. Default: an embedded one is made and removed.
    #[arg(long, env = "EBBTIDE_BENCH_DATABASE_URL", hide_env_values = true)]
    database_url: Option<String>,
    /// Folder of the embedded database. Default: one in the system's folder for temporary files.
    #[arg(long)]
    data_dir: Option<PathBuf>,
}

impl Bench {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let (report, json) = match self.what {
            What::PushPop(options) => {
                let measured = measure(&options.place, async |database| measure_in(&options, database).await);
                (runtime.block_on(measured)?, options.json)
            }
            What::Retention(options) => {
                let measured =
                    measure(&options.place, async |database| retention::measure_in(&options, database).await);
                (runtime.block_on(measured)?, options.json)
            }
            What::Jobs(options) => {
                let measured = measure(&options.place, async |database| jobs::measure_in(&options, database).await);
                (runtime.block_on(measured)?, options.json)
            }
        };
        if json {
            println!("{}", serde_json::to_string_pretty(&report.json())?);
        } else {
            print!("{}", report.text());
        }
        Ok(())
    }
}

async fn measure(
    place: &Place, cases: impl AsyncFnOnce(&Database) -> anyhow::Result<Report>,
) -> anyhow::Result<Report> {
    let database = Database::open(place).await?;
    let outcome = tokio::select! {
        outcome = cases(&database) => outcome,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    };
    database.close().await.and(outcome)
}

async fn measure_in(options: &Options, database: &Database) -> anyhow::Result<Report> {
    let server = match options.server {
        Some(address) => Server::elsewhere(address),
        None => Server::start(&database.url, &[]).await?,
    };
    cases::run(options, database, server).await
}

/// The database under the server, and the way to it.
struct Database {
    target: Target,
    url: String,
    cluster: Option<(Cluster, PathBuf)>,
}

impl Database {
    async fn open(place: &Place) -> anyhow::Result<Self> {
        if let Some(url) = &place.database_url {
            let config = url.parse().context("--database-url")?;
            let target = Target { config, tls: TlsSettings::new(true, None)? };
            return Ok(Self { target, url: url.clone(), cluster: None });
        }
        let temporary = std::env::temp_dir().join(format!("ebbtide-bench-{}", std::process::id()));
        let data_dir = place.data_dir.clone().unwrap_or(temporary);
        if data_dir.exists() {
            bail!("{} exists; the benchmark makes a folder of its own and removes it", data_dir.display());
        }
        let cluster = Cluster::start(&data_dir, None, SERVER_SESSIONS + CONTROL_SESSIONS).await?;
        let target = Target { config: cluster.address(), tls: TlsSettings::unused() };
        let host = target.config.get_hosts().iter().find_map(|host| match host {
            tokio_postgres::config::Host::Unix(path) => Some(path.display().to_string()),
            tokio_postgres::config::Host::Tcp(_) => None,
        });
        let host = host.context("the embedded database has no socket")?;
        let url = format!("host='{host}' port=5432 user=postgres dbname=postgres");
        let folder = cluster.folder().to_owned();
        Ok(Self { target, url, cluster: Some((cluster, folder)) })
    }

    /// Processor time of PostgreSQL, in seconds; `None` if it is not this program's child.
    fn cpu_seconds(&self) -> Option<f64> {
        let (_, folder) = self.cluster.as_ref()?;
        let pid_file = std::fs::read_to_string(folder.join("pgdata/postmaster.pid")).ok()?;
        server::family_cpu_seconds(pid_file.lines().next()?.trim())
    }

    async fn close(self) -> anyhow::Result<()> {
        let Some((cluster, folder)) = self.cluster else { return Ok(()) };
        cluster.stop().await;
        std::fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))
    }
}
