//! `ebbtide jobs retention`: what goes by age, beforehand and for good.

use std::time::Duration;

use anyhow::anyhow;
use clap::{Args, Subcommand};
use ebbtide_jobs::retention::{CONSUMED_SIGNALS, Plan, plan, run_once};
use ebbtide_jobs::{KindPlan, Protection, Storage, TerminalStatus, limits};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::{args, print};

#[derive(Subcommand)]
pub(super) enum Retention {
    /// Count what the next tick would delete, and what stays for which reason. Changes nothing.
    Plan(Policy),
    /// Delete it, for good.
    Run(Policy),
}

/// The windows. With none of them those of a worker count: 30 days, 90 days and 7 days. With some of them, one that is
/// left out is off, and its kind is kept.
#[derive(Args)]
pub(super) struct Policy {
    /// Age past which completed jobs go, 30d say; 0 keeps them.
    #[arg(long, value_name = "AGE", value_parser = args::age)]
    completed_after: Option<Duration>,
    /// Age past which failed and cancelled jobs go; 0 keeps them.
    #[arg(long, value_name = "AGE", value_parser = args::age)]
    failed_after: Option<Duration>,
    /// Age past which consumed signals go; 0 keeps them.
    #[arg(long, value_name = "AGE", value_parser = args::age)]
    consumed_signals_after: Option<Duration>,
    /// Most rows in one transaction.
    #[arg(long, default_value_t = limits::SWEEP_BATCH,
          value_parser = clap::value_parser!(u32).range(1..=i64::from(limits::SWEEP_BATCH_MAX)))]
    batch_size: u32,
}

impl Policy {
    fn policy(&self) -> ebbtide_jobs::Retention {
        let windows = [self.completed_after, self.failed_after, self.consumed_signals_after];
        if windows.iter().all(Option::is_none) {
            return ebbtide_jobs::Retention::stock().batch_size(self.batch_size);
        }
        let [completed, failed, signals] = windows.map(Option::unwrap_or_default);
        ebbtide_jobs::Retention::custom()
            .completed_after(completed)
            .failed_after(failed)
            .consumed_signals_after(signals)
            .batch_size(self.batch_size)
    }
}

impl Retention {
    pub(super) async fn run(self, storage: &dyn Storage, json: bool) -> anyhow::Result<()> {
        match self {
            Self::Plan(policy) => show(&plan(storage, &policy.policy()).await?, json),
            Self::Run(policy) => return delete(storage, &policy.policy(), json).await,
        }
        Ok(())
    }
}

fn show(plan: &Plan, json: bool) {
    if json {
        let kind = |status: TerminalStatus| plan.kind(status).map_or(Value::Null, kind_json);
        let value = json!({
            "completed": kind(TerminalStatus::Completed),
            "failed": kind(TerminalStatus::Failed),
            "cancelled": kind(TerminalStatus::Cancelled),
            "consumedSignals": plan.consumed_signals,
            "expiredLocks": plan.expired_locks,
        });
        println!("{value}");
        return;
    }
    let row = |status: TerminalStatus| {
        let Some(kind) = plan.kind(status) else {
            return vec![status.as_str().to_owned(), "off".to_owned(), String::new(), String::new()];
        };
        let reasons = Protection::ALL.into_iter().map(|why| (why, kind.kept_by(why))).filter(|(_, count)| 0 < *count);
        let reasons: Vec<_> = reasons.map(|(why, count)| format!("{} {count}", why.as_str())).collect();
        vec![status.as_str().to_owned(), kind.due.to_string(), kind.kept.to_string(), reasons.join(", ")]
    };
    let mut rows: Vec<_> = TerminalStatus::ALL.into_iter().map(row).collect();
    let signals = plan.consumed_signals.map_or("off".to_owned(), |count| count.to_string());
    rows.push(vec!["consumed signals".to_owned(), signals, String::new(), String::new()]);
    print!("{}", print::table(&["kind", "would go", "stays", "because of"], &rows));
    println!(
        "{} deduplication windows have passed; `ebbtide jobs locks release --expired` deletes them",
        plan.expired_locks
    );
}

fn kind_json(kind: &KindPlan) -> Value {
    let kept: serde_json::Map<_, _> =
        Protection::ALL.into_iter().map(|why| (why.as_str().to_owned(), json!(kind.kept_by(why)))).collect();
    json!({ "due": kind.due, "kept": kind.kept, "keptBy": kept, "heldUntil": print::time(kind.held_until) })
}

async fn delete(storage: &dyn Storage, policy: &ebbtide_jobs::Retention, json: bool) -> anyhow::Result<()> {
    let report = run_once(storage, policy, &CancellationToken::new()).await;
    let kinds = TerminalStatus::ALL.map(TerminalStatus::as_str).into_iter().chain([CONSUMED_SIGNALS]);
    // A kind that is off has no phase.
    let deleted = kinds.map(|kind| (kind, report.phase(kind).map(|_| report.deleted(kind))));
    if json {
        let deleted: serde_json::Map<_, _> = deleted.map(|(kind, count)| (camel(kind), json!(count))).collect();
        println!("{}", Value::Object(deleted));
    } else {
        let row = |(kind, count): (&str, Option<u64>)| {
            vec![kind.replace('_', " "), count.map_or("off".to_owned(), |count| count.to_string())]
        };
        print!("{}", print::table(&["kind", "deleted"], &deleted.map(row).collect::<Vec<_>>()));
    }
    match report.first_error() {
        None => Ok(()),
        Some(error) => Err(anyhow!("not everything that is due was deleted: {error}")),
    }
}

fn camel(kind: &str) -> String {
    if kind == CONSUMED_SIGNALS { "consumedSignals".to_owned() } else { kind.to_owned() }
}
