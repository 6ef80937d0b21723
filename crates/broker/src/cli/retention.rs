//! `ebbtide retention space`: how much room each table takes, and what keeps vacuum from freeing more of it.

use std::fmt::Write;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::database;
use crate::config::{Config, RawConfig};
use crate::db::space::{self, Holder, TableSpace};

/// Holders of old snapshots that are listed.
const HOLDERS_MAX: i64 = 20;

#[derive(Args)]
pub(super) struct Retention {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show live, dead and free bytes of each table, and whose snapshots vacuum waits for. Changes nothing.
    Space(Space),
}

#[derive(Args)]
struct Space {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    raw: RawConfig,
}

impl Retention {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let Command::Space(Space { json, raw }) = self.command;
        super::run_with(raw, async move |config, stop| show(config, json, stop).await)
    }
}

async fn show(config: Config, json: bool, stop: CancellationToken) -> anyhow::Result<()> {
    let Some(opened) = database::open(&config.database, &stop).await? else { bail!("interrupted") };
    let read = async {
        let db = opened.direct.connect("ebbtide-report").await?;
        Ok::<_, crate::error::Error>((space::tables(&db).await?, space::holders(&db, &[], HOLDERS_MAX).await?))
    };
    let outcome = read.await;
    opened.close().await;
    let (tables, holders) = outcome.context("the tables could not be read")?;
    if json {
        println!("{}", as_json(&tables, &holders));
    } else {
        print!("{}", as_text(&tables, &holders));
    }
    Ok(())
}

fn as_json(tables: &[TableSpace], holders: &[Holder]) -> Value {
    let table = |table: &TableSpace| {
        let TableSpace {
            table,
            bytes,
            index_bytes,
            live_rows,
            dead_rows,
            live_bytes,
            dead_bytes,
            free_bytes,
            vacuumed_seconds_ago,
        } = table;
        json!({
            "table": table, "bytes": bytes, "indexBytes": index_bytes, "liveRows": live_rows, "deadRows": dead_rows,
            "liveBytes": live_bytes, "deadBytes": dead_bytes, "freeBytes": free_bytes,
            "vacuumedSecondsAgo": vacuumed_seconds_ago,
        })
    };
    let holder = |holder: &Holder| {
        let Holder { kind, who, held, transactions } = holder;
        json!({
            "kind": kind, "who": who, "heldSeconds": held.map(|held| held.as_secs_f64()),
            "transactions": transactions,
        })
    };
    json!({
        "tables": tables.iter().map(table).collect::<Vec<_>>(),
        "vacuumWaitsFor": holders.iter().map(holder).collect::<Vec<_>>(),
    })
}

fn as_text(tables: &[TableSpace], holders: &[Holder]) -> String {
    let mut text = String::new();
    let mut line = |line: String| {
        writeln!(text, "{line}").expect("a string takes all");
    };
    let row = |cells: [&str; 7]| {
        let [name, total, indexes, live, dead, free, vacuumed] = cells;
        format!("{name:<28} {total:>10} {indexes:>10} {live:>10} {dead:>10} {free:>10}  {vacuumed}")
    };
    line(row(["MiB", "table", "indexes", "live", "dead", "free", "vacuumed"]));
    for table in tables {
        let vacuumed =
            table.vacuumed_seconds_ago.map_or_else(|| "never".to_owned(), |seconds| format!("{seconds:.0} s ago"));
        line(row([
            &table.table,
            &mebibytes(table.bytes),
            &mebibytes(table.index_bytes),
            &mebibytes(table.live_bytes),
            &mebibytes(table.dead_bytes),
            &mebibytes(table.free_bytes),
            &vacuumed,
        ]));
    }
    if holders.is_empty() {
        line("vacuum waits for nobody".to_owned());
    }
    for Holder { kind, who, held, transactions } in holders {
        let since = held.map_or_else(String::new, |held| format!(", for {} s", held.as_secs()));
        line(format!("vacuum waits for {kind} ({who}){since}, {transactions} transactions old"));
    }
    line("live, dead and free follow from the statistics' counts of rows; the rest is exact".to_owned());
    text
}

fn mebibytes(bytes: u64) -> String {
    #[allow(clippy::cast_precision_loss, reason = "a size for a person")]
    let mebibytes = bytes as f64 / f64::from(1 << 20);
    format!("{mebibytes:.1}")
}
