//! `ebbtide sweep --once`: one cycle against a database, and what became of it.

use std::fmt::Write;

use anyhow::{Context, bail};
use clap::Args;
use ebbtide_sweep::Led;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::database::{self, Opened};
use crate::config::{Config, RawConfig};
use crate::db::retention::days_before;
use crate::db::retention::kept::{self, Silent, Unread};
use crate::retention::{self, Settings, Swept, phase};

/// The exit code of a cycle that was not run because another session led.
pub(super) const ANOTHER_LEADS: u8 = 3;
/// Lines that say who holds rule 2 back.
const UNREAD_LINES_MAX: i64 = 100;

/// Nothing was done: a server is sweeping at this moment.
#[derive(Debug, thiserror::Error)]
#[error("another session leads and sweeps right now; nothing was done here")]
pub(super) struct AnotherLeads;

#[derive(Args)]
pub(super) struct Sweep {
    /// Run one cycle, every phase of it due, and exit. Deletes for good.
    #[arg(long, required = true)]
    once: bool,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    raw: RawConfig,
}

impl Sweep {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let Self { once: _, json, raw } = self;
        super::run_with(raw, async move |config, stop| sweep(config, json, stop).await)
    }
}

async fn sweep(config: Config, json: bool, stop: CancellationToken) -> anyhow::Result<()> {
    let Some(opened) = database::open(&config.database, &stop).await? else { bail!("interrupted") };
    let outcome = sweep_on(&opened, &(&config.retention).into(), json, &stop).await;
    opened.close().await;
    outcome
}

async fn sweep_on(opened: &Opened, settings: &Settings, json: bool, stop: &CancellationToken) -> anyhow::Result<()> {
    database::prepare_schema(opened, false).await?;
    let swept = match retention::once(opened.direct.clone(), settings, stop).await? {
        Led::Ran(swept) => swept,
        Led::Skipped => {
            if json {
                println!("{}", json!({"outcome": "skipped"}));
            }
            return Err(AnotherLeads.into());
        }
    };
    let kept = Kept::find(opened, settings, &swept).await.context("what was kept could not be read")?;
    if json {
        println!("{}", as_json(&swept, &kept));
    } else {
        print!("{}", as_text(&swept, &kept));
    }
    if let Some(error) = swept.report.first_error() {
        bail!("the cycle failed: {error}");
    }
    if swept.as_of.is_none() {
        bail!("interrupted; what was deleted stays deleted");
    }
    Ok(())
}

/// What is old and still there.
#[derive(Default)]
struct Kept {
    unread: Vec<Unread>,
    silent: Vec<Silent>,
}

impl Kept {
    /// Nothing, if the cycle did not come to its end: it would be mistaken for what has to stay.
    async fn find(opened: &Opened, settings: &Settings, swept: &Swept) -> anyhow::Result<Self> {
        let Some(as_of) = swept.as_of else { return Ok(Self::default()) };
        let db = opened.direct.connect("ebbtide-report").await?;
        let unread = kept::unread(&db, as_of, UNREAD_LINES_MAX).await?;
        let silent = match settings.cleanup_days {
            Some(days) => kept::silent(&db, days_before(&db, as_of, days).await?).await?,
            None => Vec::new(),
        };
        Ok(Self { unread, silent })
    }
}

fn as_json(swept: &Swept, kept: &Kept) -> Value {
    let phases: Vec<Value> = swept
        .report
        .phases()
        .iter()
        .map(|phase| {
            json!({
                "name": phase.name, "deleted": phase.deleted, "steps": phase.steps, "failures": phase.failures,
                "firstError": phase.first_error.as_ref().map(ToString::to_string),
                "elapsedMs": millis(phase.elapsed),
            })
        })
        .collect();
    let outcome = match (swept.report.first_error(), swept.as_of) {
        (Some(_), _) => "failed",
        (None, Some(_)) => "swept",
        (None, None) => "interrupted",
    };
    json!({
        "outcome": outcome, "asOf": swept.as_of.map(|as_of| as_of.to_string()),
        "elapsedMs": millis(swept.report.elapsed()), "queues": swept.queues.len(), "phases": phases,
        "metrics": swept.metrics.to_string(),
        "kept": {
            "unread": kept.unread.iter().map(unread_as_json).collect::<Vec<_>>(),
            "silentPartitions": kept.silent.iter().map(silent_as_json).collect::<Vec<_>>(),
        },
    })
}

fn unread_as_json(unread: &Unread) -> Value {
    let Unread { tenant_id, queue, consumer_group, partitions } = unread;
    json!({"tenantId": tenant_id, "queue": queue, "consumerGroup": consumer_group, "partitions": partitions})
}

fn silent_as_json(silent: &Silent) -> Value {
    let Silent { reason, partitions } = silent;
    json!({"reason": reason, "partitions": partitions})
}

fn millis(elapsed: std::time::Duration) -> u64 {
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}

fn as_text(swept: &Swept, kept: &Kept) -> String {
    let mut text = String::new();
    let mut line = |line: String| {
        writeln!(text, "{line}").expect("a string takes all");
    };
    line(format!("{} queues with retention, {} ms", swept.queues.len(), millis(swept.report.elapsed())));
    for (name, what) in [
        (phase::RETENTION, "segments deleted"),
        (phase::TXNS, "hash rows purged"),
        (phase::EVICTION, "segments evicted"),
        (phase::CLEANUP, "partitions deleted"),
    ] {
        match swept.report.phase(name) {
            Some(phase) => line(format!("{name:<10} {} {what}", phase.deleted)),
            None => line(format!("{name:<10} not run")),
        }
    }
    line(format!("{:<10} {}", phase::METRICS, swept.metrics));
    for Unread { queue, consumer_group, partitions, .. } in &kept.unread {
        let who = match consumer_group {
            Some(group) => format!("group {group} has not read on"),
            None => "nobody has consumed".to_owned(),
        };
        line(format!("kept       queue {queue}: {who} in {partitions} partitions"));
    }
    for Silent { reason, partitions } in &kept.silent {
        line(format!("kept       {partitions} silent partitions: {reason}"));
    }
    for phase in swept.report.phases() {
        if let Some(error) = &phase.first_error {
            line(format!("failed     {}: {} times, first: {error}", phase.name, phase.failures));
        }
    }
    text
}
