//! Commands that change nothing, and the one that installs the schema.

use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use ebbtide_jobs::{Checkpoint, Error, JobFilter, JobId, JobStatus, ListStore, QueueCounts, Storage};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::args::Filter;
use super::print;

pub(super) fn lists(storage: &dyn Storage) -> anyhow::Result<&dyn ListStore> {
    storage.lists().ok_or_else(|| Error::Unsupported("lists").into())
}

pub(super) async fn migrate(storage: &dyn Storage, json: bool) -> anyhow::Result<()> {
    let migrated = storage.migrate().await?;
    if json {
        println!("{}", json!({ "applied": migrated.applied, "version": migrated.version }));
    } else {
        println!("{} migrations applied, schema version {}", migrated.applied, migrated.version);
    }
    Ok(())
}

pub(super) async fn queues(storage: &dyn Storage, json: bool) -> anyhow::Result<()> {
    let queues = lists(storage)?.queues().await?;
    let now = storage.now().await?;
    // The age of a job that is not due yet is none.
    let age =
        |queue: &QueueCounts| queue.oldest_due.filter(|due| *due <= now).map(|due| now.duration_since(due).as_secs());
    if json {
        let queue = |queue: &QueueCounts| {
            json!({
                "queue": queue.queue.as_str(),
                "pending": queue.pending,
                "running": queue.running,
                "waiting": queue.waiting,
                "paused": queue.paused,
                "dlq": queue.dead,
                "oldestPending": print::time(queue.oldest_due),
                "oldestPendingAgeSeconds": age(queue),
                "isPaused": queue.is_paused,
            })
        };
        println!("{}", json!({ "queues": queues.iter().map(queue).collect::<Vec<_>>() }));
        return Ok(());
    }
    let row = |queue: &QueueCounts| {
        vec![
            queue.queue.to_string(),
            queue.pending.to_string(),
            queue.running.to_string(),
            queue.waiting.to_string(),
            queue.paused.to_string(),
            queue.dead.to_string(),
            queue.oldest_due.map_or("-".to_owned(), |due| format!("{due:.0}")),
            age(queue).map_or("-".to_owned(), |seconds| format!("{seconds} s")),
            if queue.is_paused { "paused" } else { "" }.to_owned(),
        ]
    };
    let rows: Vec<_> = queues.iter().map(row).collect();
    let head = ["queue", "pending", "running", "waiting", "paused", "dlq", "oldest", "age", ""];
    print!("{}", print::table(&head, &rows));
    Ok(())
}

/// Which jobs to list, and how.
#[derive(Args)]
pub(super) struct List {
    #[command(flatten)]
    filter: Filter,
    /// Only in this status.
    #[arg(long)]
    status: Option<JobStatus>,
    /// Only enqueued at this time or later, 2026-12-01T06:00:00Z say.
    #[arg(long, value_name = "TIME")]
    since: Option<Timestamp>,
    /// Only enqueued before this time.
    #[arg(long, value_name = "TIME")]
    until: Option<Timestamp>,
    /// Only what stands below this job.
    #[arg(long, value_name = "ID")]
    root: Option<JobId>,
    /// Begin after this job: the next page.
    #[arg(long, value_name = "ID")]
    after: Option<JobId>,
    /// Most jobs to show.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100))]
    limit: u32,
    /// Print ids and nothing else.
    #[arg(long, conflicts_with = "json")]
    ids_only: bool,
}

impl List {
    fn filter(&self) -> Result<JobFilter, Error> {
        let mut filter = JobFilter::all().limit(self.limit);
        let given = &self.filter;
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
        if let Some(search) = &given.search {
            filter = filter.search(search)?;
        }
        if let Some(status) = self.status {
            filter = filter.status(status);
        }
        if let Some(since) = self.since {
            filter = filter.since(since);
        }
        if let Some(until) = self.until {
            filter = filter.until(until);
        }
        if let Some(root) = self.root {
            filter = filter.root(root);
        }
        Ok(match self.after {
            Some(after) => filter.after(after),
            None => filter,
        })
    }

    pub(super) async fn run(self, storage: &dyn Storage, json: bool) -> anyhow::Result<()> {
        let page = lists(storage)?.jobs(&self.filter()?).await?;
        if self.ids_only {
            page.jobs.iter().for_each(|job| println!("{}", job.id));
        } else if json {
            let jobs: Vec<Value> = page.jobs.iter().map(print::job).collect();
            println!("{}", json!({ "jobs": jobs, "next": page.next.map(|next| next.to_string()) }));
        } else {
            print!("{}", print::jobs(&page.jobs));
            if let Some(next) = page.next {
                eprintln!("there may be more: --after {next}");
            }
        }
        Ok(())
    }
}

/// Which job to show.
#[derive(Args)]
pub(super) struct Show {
    /// The job.
    id: JobId,
}

impl Show {
    pub(super) async fn run(self, storage: &dyn Storage, json: bool) -> anyhow::Result<()> {
        let job = storage.job(self.id).await?.ok_or(Error::JobNotFound(self.id))?;
        let steps = match storage.checkpoints() {
            Some(checkpoints) => checkpoints.load(self.id).await?,
            None => Vec::new(),
        };
        let step = |step: &Checkpoint| {
            let failed = step.error.as_ref().map(|error| error.text.clone());
            json!({ "index": step.call_index, "name": step.call_type, "error": failed })
        };
        let mut value = print::job(&job);
        if json {
            value["checkpoints"] = steps.iter().map(step).collect();
            println!("{value}");
            return Ok(());
        }
        print!("{}", print::members(&value));
        if !steps.is_empty() {
            let row = |step: &Checkpoint| vec![step.call_index.to_string(), step.call_type.clone()];
            print!("\n{}", print::table(&["step", "name"], &steps.iter().map(row).collect::<Vec<_>>()));
        }
        Ok(())
    }
}

pub(super) async fn schedules(storage: &dyn Storage, json: bool) -> anyhow::Result<()> {
    let store = storage.schedules().ok_or(Error::Unsupported("schedules"))?;
    let schedules = store.list().await?;
    if json {
        let schedule = |state: &ebbtide_jobs::ScheduleState| {
            json!({
                "name": state.name,
                "rule": state.rule,
                "type": state.job_type,
                "queue": state.queue,
                "nextFireAt": print::time(state.next_fire_at),
                "lastFiredAt": print::time(state.last_fired_at),
                "isPaused": state.is_paused,
            })
        };
        println!("{}", json!({ "schedules": schedules.iter().map(schedule).collect::<Vec<_>>() }));
        return Ok(());
    }
    let time = |time: Option<Timestamp>| time.map_or("-".to_owned(), |time| format!("{time:.0}"));
    let row = |state: &ebbtide_jobs::ScheduleState| {
        let paused = if state.is_paused { "paused" } else { "" };
        vec![
            state.name.clone(),
            state.rule.clone(),
            time(state.next_fire_at),
            time(state.last_fired_at),
            paused.to_owned(),
        ]
    };
    print!("{}", print::table(&["name", "rule", "next", "last", ""], &schedules.iter().map(row).collect::<Vec<_>>()));
    Ok(())
}

pub(super) async fn health(storage: &dyn Storage, json: bool, patience: Duration) -> anyhow::Result<()> {
    let started = Instant::now();
    // A table of the schema is read too: a database that answers but was never migrated is of no use.
    let asked = tokio::time::timeout(patience, async {
        storage.now().await.context("the storage does not answer")?;
        storage.paused_queues().await.context("the schema is not there; `ebbtide jobs migrate` installs it")
    });
    let outcome = asked.await.unwrap_or_else(|_| Err(anyhow!("no answer within {} s", patience.as_secs())));
    let elapsed_ms = started.elapsed().as_millis();
    if json {
        println!("{}", json!({ "isReady": outcome.is_ok(), "elapsedMs": elapsed_ms }));
    } else if outcome.is_ok() {
        println!("ready, answered in {elapsed_ms} ms");
    }
    match outcome {
        Ok(_) => Ok(()),
        Err(error) => bail!(error),
    }
}
