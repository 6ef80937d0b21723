//! Commands that change jobs and windows.

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use ebbtide_jobs::{
    BulkReport, Error, JobId, PurgeStatus, QueueName, Storage, UniqueLock, delete_all, limits, requeue_all,
};
use serde_json::json;

use super::look::lists;
use super::{Skipped, args, print};

/// Which jobs.
#[derive(Args)]
pub(super) struct Ids {
    /// The jobs; at most 1000.
    #[arg(required = true, value_name = "ID")]
    ids: Vec<JobId>,
}

impl Ids {
    pub(super) async fn requeue(self, storage: &dyn Storage, json: bool) -> anyhow::Result<()> {
        if let [id] = self.ids[..] {
            storage.requeue(id).await?;
            return said(json, "requeued", 1);
        }
        report(&requeue_all(storage, &self.ids).await?, "requeued", json)
    }

    pub(super) async fn cancel(self, storage: &dyn Storage, json: bool) -> anyhow::Result<()> {
        if limits::BULK_IDS_MAX < self.ids.len() {
            bail!("at most {} ids", limits::BULK_IDS_MAX);
        }
        if let [id] = self.ids[..] {
            return said(json, "cancelled", storage.cancel(id).await?);
        }
        let mut cancelled = BulkReport::default();
        for id in self.ids {
            match storage.cancel(id).await {
                Ok(_) => cancelled.done.push(id),
                Err(error) => cancelled.skipped.push((id, error)),
            }
        }
        report(&cancelled, "cancelled", json)
    }
}

fn said(json: bool, what: &str, count: u64) -> anyhow::Result<()> {
    if json {
        println!("{}", json!({ what: count }));
    } else {
        println!("{count} {what}");
    }
    Ok(())
}

/// Prints what was done and what was left, and fails with [`Skipped`] if there is any of that.
pub(super) fn report(report: &BulkReport, what: &str, json: bool) -> anyhow::Result<()> {
    if json {
        let skipped = |(id, error): &(JobId, Error)| json!({ "id": id.to_string(), "reason": error.key(), "message": error.to_string() });
        let skipped: Vec<_> = report.skipped.iter().map(skipped).collect();
        println!("{}", json!({ what: report.done.len(), "skipped": skipped }));
    } else {
        println!("{} {what}", report.done.len());
        report.skipped.iter().for_each(|(_, error)| eprintln!("left: {error}"));
    }
    if report.skipped.is_empty() { Ok(()) } else { Err(Skipped(report.skipped.len()).into()) }
}

/// Which jobs to delete.
#[derive(Args)]
pub(super) struct Delete {
    #[command(flatten)]
    ids: Ids,
    /// Delete everything below them too, whatever it is doing.
    #[arg(long)]
    workflow: bool,
}

impl Delete {
    pub(super) async fn run(self, storage: &dyn Storage, json: bool) -> anyhow::Result<()> {
        let ids = self.ids.ids;
        if self.workflow {
            let [root] = ids[..] else { bail!("--workflow takes one id, the root of the workflow") };
            return said(json, "deleted", storage.delete_workflow(root).await?);
        }
        if let [id] = ids[..] {
            storage.delete(id).await?;
            return said(json, "deleted", 1);
        }
        report(&delete_all(storage, &ids).await?, "deleted", json)
    }
}

/// What to purge.
#[derive(Args)]
pub(super) struct Purge {
    /// The queue.
    #[arg(long, value_parser = args::queue)]
    queue: QueueName,
    /// The status: pending, paused, completed, failed or cancelled.
    #[arg(long, value_parser = status)]
    status: PurgeStatus,
}

fn status(text: &str) -> Result<PurgeStatus, String> {
    let found = PurgeStatus::ALL.into_iter().find(|status| status.status().as_str() == text);
    found.ok_or_else(|| "a queue is purged of pending, paused, completed, failed or cancelled jobs".to_owned())
}

impl Purge {
    pub(super) async fn run(self, storage: &dyn Storage, json: bool) -> anyhow::Result<()> {
        let mut purged = 0;
        // Parents can go once their children are gone: until a step finds nothing.
        loop {
            let step = storage.purge(&self.queue, self.status, limits::PURGE_BATCH).await;
            match step.with_context(|| format!("{purged} were deleted before"))? {
                0 => return said(json, "deleted", purged),
                deleted => purged += deleted,
            }
        }
    }
}

#[derive(Subcommand)]
pub(super) enum Locks {
    /// List windows, the first to pass first.
    List(LockList),
    /// End windows before their time: what they kept from being enqueued twice can be enqueued again.
    Release(LockRelease),
}

/// Which windows to list.
#[derive(Args)]
pub(super) struct LockList {
    /// Only those that name this job.
    #[arg(long, value_name = "ID")]
    job: Option<JobId>,
    /// Most windows to show.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
}

/// Which windows to end.
#[derive(Args)]
#[group(required = true, multiple = false)]
pub(super) struct LockRelease {
    /// The one with this hash.
    scope_hash: Option<String>,
    /// Those that name this job.
    #[arg(long, value_name = "ID")]
    job: Option<JobId>,
    /// All that have passed, as the sweep does.
    #[arg(long)]
    expired: bool,
}

impl Locks {
    pub(super) async fn run(self, storage: &dyn Storage, json: bool) -> anyhow::Result<()> {
        match self {
            Self::List(list) => {
                let locks = lists(storage)?.locks(list.job, list.limit).await?;
                print_locks(&locks, json);
                Ok(())
            }
            Self::Release(release) => said(json, "released", release.run(storage).await?),
        }
    }
}

fn print_locks(locks: &[UniqueLock], json: bool) {
    if json {
        let lock = |lock: &UniqueLock| {
            json!({
                "scopeHash": lock.scope_hash,
                "jobId": lock.job_id.to_string(),
                "expiresAt": lock.expires_at.to_string(),
                "createdAt": lock.created_at.to_string(),
            })
        };
        println!("{}", json!({ "locks": locks.iter().map(lock).collect::<Vec<_>>() }));
        return;
    }
    let row =
        |lock: &UniqueLock| vec![lock.scope_hash.clone(), lock.job_id.to_string(), format!("{:.0}", lock.expires_at)];
    print!("{}", print::table(&["scope hash", "job", "passes"], &locks.iter().map(row).collect::<Vec<_>>()));
}

impl LockRelease {
    async fn run(self, storage: &dyn Storage) -> anyhow::Result<u64> {
        let lists = lists(storage)?;
        if self.expired {
            let store = storage.unique_locks().ok_or(Error::StorageNoUniqueLocks)?;
            let mut released = 0;
            loop {
                let step = store.delete_expired(limits::SWEEP_BATCH).await?;
                released += step;
                if step < u64::from(limits::SWEEP_BATCH) {
                    return Ok(released);
                }
            }
        }
        let scopes = match (self.scope_hash, self.job) {
            (Some(scope), _) => vec![scope],
            (None, job) => lists.locks(job, 1000).await?.into_iter().map(|lock| lock.scope_hash).collect(),
        };
        let mut released = 0;
        for scope in scopes {
            released += u64::from(lists.release_lock(&scope).await?);
        }
        if released == 0 {
            eprintln!("there is no such window");
        }
        Ok(released)
    }
}
