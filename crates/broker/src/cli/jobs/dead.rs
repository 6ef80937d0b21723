//! `ebbtide jobs dlq`: jobs that failed for good.

use anyhow::bail;
use clap::{Args, Subcommand};
use ebbtide_jobs::{BulkReport, DeadLetterFilter, DeadLetterStore, Error, JobId, Storage};
use serde_json::{Value, json};

use super::args::Filter;
use super::{act, print};

/// Dead letters that are requeued between two looks.
const PAGE: u32 = 1000;

#[derive(Subcommand)]
pub(super) enum Dlq {
    /// List them, the newest first.
    List(List),
    /// Run them again from nothing: one by its id, or all that match.
    Requeue(Requeue),
}

/// Which ones to list, and how.
#[derive(Args)]
pub(super) struct List {
    #[command(flatten)]
    filter: Filter,
    /// Most jobs to show.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    /// Jobs to pass over first.
    #[arg(long, default_value_t = 0)]
    offset: u64,
    /// Print ids and nothing else.
    #[arg(long, conflicts_with = "json")]
    ids_only: bool,
}

/// Which ones to requeue.
#[derive(Args)]
pub(super) struct Requeue {
    /// The job.
    id: Option<JobId>,
    #[command(flatten)]
    filter: Filter,
    /// All of them.
    #[arg(long)]
    all: bool,
}

fn filter(given: &Filter) -> DeadLetterFilter {
    let mut filter = DeadLetterFilter::all();
    if let Some(queue) = &given.queue {
        filter = filter.queue(queue.clone());
    }
    if let Some(job_type) = &given.job_type {
        filter = filter.job_type(job_type.clone());
    }
    if let Some(tenant) = &given.tenant {
        filter = filter.tenant(tenant);
    }
    for (key, value) in &given.metadata {
        filter = filter.meta(key, value);
    }
    match &given.search {
        Some(search) => filter.search(search),
        None => filter,
    }
}

impl Dlq {
    pub(super) async fn run(self, storage: &dyn Storage, json: bool) -> anyhow::Result<()> {
        let store = storage.dead_letters().ok_or(Error::Unsupported("dead letters"))?;
        match self {
            Self::List(list) => list.run(store, json).await,
            Self::Requeue(requeue) => requeue.run(storage, store, json).await,
        }
    }
}

impl List {
    async fn run(self, store: &dyn DeadLetterStore, json: bool) -> anyhow::Result<()> {
        let filter = filter(&self.filter).limit(self.limit).offset(self.offset);
        let jobs = store.list(&filter).await?;
        if self.ids_only {
            jobs.iter().for_each(|job| println!("{}", job.id));
        } else if json {
            let total = store.count(&filter).await?;
            println!("{}", json!({ "jobs": jobs.iter().map(print::job).collect::<Vec<Value>>(), "total": total }));
        } else {
            print!("{}", print::jobs(&jobs));
        }
        Ok(())
    }
}

impl Requeue {
    async fn run(self, storage: &dyn Storage, store: &dyn DeadLetterStore, json: bool) -> anyhow::Result<()> {
        let is_filtered = self.all || !self.filter.is_empty();
        let report = match (self.id, is_filtered) {
            (Some(_), true) => bail!("name one job, or say which ones by filters, not both"),
            (None, false) => bail!("name a job, or say which ones by --queue, --type, --tenant, --metadata or --all"),
            (Some(id), false) => {
                storage.requeue(id).await?;
                BulkReport { done: vec![id], skipped: Vec::new() }
            }
            (None, true) => matching(storage, store, &filter(&self.filter)).await?,
        };
        if report.done.is_empty() && report.skipped.is_empty() {
            eprintln!("nothing matches");
        }
        act::report(&report, "requeued", json)
    }
}

/// Requeues those that match, once each. What is dead-lettered meanwhile is left for the next call.
async fn matching(
    storage: &dyn Storage, store: &dyn DeadLetterStore, filter: &DeadLetterFilter,
) -> anyhow::Result<BulkReport> {
    let count = usize::try_from(store.count(filter).await?)?;
    let mut report = BulkReport::default();
    while report.done.len() + report.skipped.len() < count {
        // Those that were left stand in front of what is still to come, or behind it: both are seen.
        let page = store.list(&filter.clone().limit(PAGE).offset(report.skipped.len() as u64)).await?;
        let room = count - report.done.len() - report.skipped.len();
        let is_new = |job: &&ebbtide_jobs::Job| !report.skipped.iter().any(|(id, _)| *id == job.id);
        let ids: Vec<JobId> = page.iter().filter(is_new).map(|job| job.id).take(room).collect();
        if ids.is_empty() {
            break;
        }
        for id in ids {
            match storage.requeue(id).await {
                Ok(()) => report.done.push(id),
                Err(error) => report.skipped.push((id, error)),
            }
        }
    }
    Ok(report)
}
