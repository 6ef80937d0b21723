//! Cancelling, pausing, requeueing and deleting, each in one transaction that first locks the job it is about.

use std::collections::BTreeSet;

use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::fan_out::tallied;
use super::row::{self, get};
use super::session::{Session, Sql as _, Transaction};
use crate::control::PurgeStatus;
use crate::error::Error;
use crate::job::{JobId, JobStatus};
use crate::limits::{QueueName, SUBTREE_DEPTH_MAX};
use crate::storage::fragment::{deletable, live};

/// How often a growing workflow is looked at again before the caller is told to come back.
const GROWTH_ROUNDS_MAX: usize = 16;

/// What a decision about one job needs of it.
struct Locked {
    status: JobStatus,
    parent: Option<Uuid>,
    unique_key: String,
    previous_status: Option<String>,
}

/// Waits for whoever has the row: a pass that deletes it, say. Afterwards the row is gone or as it stands here.
async fn lock(transaction: &Transaction<'_>, id: JobId) -> Result<Locked, Error> {
    let query = "select j.status, j.parent_job_id, j.unique_key, j.previous_status
                   from ebbtide_jobs.jobs j where j.id = $1 for update";
    let rows = transaction.rows(query, &[(&id.as_uuid(), Type::UUID)]).await?;
    let row = rows.first().ok_or(Error::JobNotFound(id))?;
    let status: &str = get(row, "status")?;
    Ok(Locked {
        status: status.parse().map_err(|_| Error::Corrupt(format!("status {status}")))?,
        parent: get(row, "parent_job_id")?,
        unique_key: get(row, "unique_key")?,
        previous_status: get(row, "previous_status")?,
    })
}

const TREE: &str = "
    with recursive tree (id, depth) as (
        select j.id, 1 from ebbtide_jobs.jobs j where j.parent_job_id = any($1)
        union all
        select j.id, tree.depth + 1 from tree join ebbtide_jobs.jobs j on j.parent_job_id = tree.id
         where tree.depth <= $2)
    select id, depth from tree where id <> all($1)
    union all
    select j.id, 0 from ebbtide_jobs.jobs j where j.root_job_id = any($1) and j.id <> all($1)";

async fn tree(transaction: &Transaction<'_>, roots: &[Uuid]) -> Result<BTreeSet<Uuid>, Error> {
    let depth_max = i32::try_from(SUBTREE_DEPTH_MAX).expect("256");
    let rows = transaction.rows(TREE, &[(&roots, Type::UUID_ARRAY), (&depth_max, Type::INT4)]).await?;
    let mut ids = BTreeSet::new();
    for row in &rows {
        if depth_max < get(row, "depth")? {
            let root = roots.first().copied().and_then(JobId::from_uuid);
            return Err(Error::SubtreeTooDeep(root.expect("a tree has a root with an id")));
        }
        ids.insert(get(row, "id")?);
    }
    Ok(ids)
}

/// Everything below locked jobs, locked. A run that has just added children did so before its row could be locked,
/// and they are seen in the next round; one that comes later finds its claim over.
async fn locked_tree(transaction: &Transaction<'_>, roots: &[Uuid]) -> Result<Vec<Uuid>, Error> {
    let mut seen = BTreeSet::new();
    for _ in 0..GROWTH_ROUNDS_MAX {
        let found = tree(transaction, roots).await?;
        if found == seen {
            return Ok(found.into_iter().collect());
        }
        let ids: Vec<Uuid> = found.iter().copied().collect();
        let query = "select 1 from ebbtide_jobs.jobs j where j.id = any($1) order by j.id for update";
        transaction.rows(query, &[(&ids, Type::UUID_ARRAY)]).await?;
        seen = found;
    }
    Err(Error::Busy("the workflow keeps growing".into()))
}

const DELETE: &str = "
    with doomed as materialized (select unnest($1::uuid[]) as id),
    fan_outs as (delete from ebbtide_jobs.fan_outs x using doomed where x.parent_job_id = doomed.id),
    checkpoints as (delete from ebbtide_jobs.checkpoints x using doomed where x.job_id = doomed.id),
    signals as (delete from ebbtide_jobs.signals x using doomed where x.job_id = doomed.id),
    windows as (delete from ebbtide_jobs.unique_locks x using doomed where x.job_id = doomed.id),
    slots as (delete from ebbtide_jobs.concurrency_slots x using doomed where x.job_id = doomed.id),
    gone as (delete from ebbtide_jobs.jobs x using doomed where x.id = doomed.id returning 1)
    select count(*) as count from gone";

/// Deletes locked jobs with all that hangs off them, their deduplication windows included.
async fn delete_rows(transaction: &Transaction<'_>, ids: &[Uuid]) -> Result<u64, Error> {
    count(&transaction.planned(DELETE, &[(&ids, Type::UUID_ARRAY)]).await?)
}

fn count(rows: &[Row]) -> Result<u64, Error> {
    let count: i64 = get(row::only(rows)?, "count")?;
    Ok(u64::try_from(count).expect("a count is not negative"))
}

pub(super) async fn cancel(session: &mut Session, id: JobId) -> Result<u64, Error> {
    let transaction = session.begin().await?;
    let job = lock(&transaction, id).await?;
    match job.status {
        JobStatus::Cancelled => return Ok(0),
        status if status.is_terminal() => return Err(Error::JobNotCancellable { id, status }),
        _ => {}
    }
    let cancelled = stop(&transaction, &[id.as_uuid()]).await?;
    transaction.commit().await?;
    Ok(cancelled)
}

/// Cancels what is unfinished of locked jobs and of everything below them, and counts it in the fan-outs above.
pub(super) async fn stop(transaction: &Transaction<'_>, roots: &[Uuid]) -> Result<u64, Error> {
    let mut ids = locked_tree(transaction, roots).await?;
    ids.extend_from_slice(roots);
    // The owner's name stays: by it the owner learns that the run is to be stopped.
    let query = concat!(
        "with stopped as (
            update ebbtide_jobs.jobs j
               set status = 'cancelled', previous_status = null, completed_at = statement_timestamp(),
                   last_error = 'cancelled by user', updated_at = statement_timestamp()
             where j.id = any($1) and j.status in ",
        live!(),
        " returning j.id, j.fan_out_id),
        slots as (delete from ebbtide_jobs.concurrency_slots x using stopped where x.job_id = stopped.id)
        select fan_out_id from stopped"
    );
    let rows = transaction.rows(query, &[(&ids, Type::UUID_ARRAY)]).await?;
    let fan_outs = rows.iter().map(|row| get(row, "fan_out_id")).collect::<Result<Vec<Option<Uuid>>, _>>()?;
    settle_stopped(transaction, &ids, &fan_outs).await?;
    Ok(fan_outs.len() as u64)
}

/// Counts cancelled children. Fan-outs whose parent was cancelled too are decided by that.
async fn settle_stopped(transaction: &Transaction<'_>, ids: &[Uuid], fan_outs: &[Option<Uuid>]) -> Result<(), Error> {
    let lock = "select 1 from ebbtide_jobs.fan_outs f where f.parent_job_id = any($1) or f.id = any($2)
                 order by f.id for update";
    transaction.rows(lock, &[(&ids, Type::UUID_ARRAY), (&fan_outs, Type::UUID_ARRAY)]).await?;
    let query = "update ebbtide_jobs.fan_outs f set status = 'cancelled', updated_at = statement_timestamp()
                  where f.parent_job_id = any($1) and f.status = 'pending'";
    transaction.rows(query, &[(&ids, Type::UUID_ARRAY)]).await?;
    const TALLY: &str = concat!(
        "with done as (select u.id as fan_out_id, 'cancelled' as status from unnest($1::uuid[]) as u (id)), ",
        tallied!(),
        " select 1 from tallied"
    );
    transaction.rows(TALLY, &[(&fan_outs, Type::UUID_ARRAY)]).await?;
    Ok(())
}

pub(super) async fn pause(session: &mut Session, id: JobId) -> Result<(), Error> {
    let transaction = session.begin().await?;
    match lock(&transaction, id).await?.status {
        JobStatus::Pending | JobStatus::Waiting => {}
        JobStatus::Paused => return Err(Error::JobAlreadyPaused(id)),
        status => return Err(Error::JobNotPausable { id, status }),
    }
    let query = "update ebbtide_jobs.jobs set previous_status = status, status = 'paused',
                        updated_at = statement_timestamp() where id = $1";
    transaction.rows(query, &[(&id.as_uuid(), Type::UUID)]).await?;
    transaction.commit().await
}

pub(super) async fn resume(session: &mut Session, id: JobId) -> Result<(), Error> {
    let transaction = session.begin().await?;
    let job = lock(&transaction, id).await?;
    if job.status != JobStatus::Paused {
        return Err(Error::JobNotPaused { id, status: job.status });
    }
    let status = job.previous_status.as_deref().unwrap_or("pending");
    let query = "update ebbtide_jobs.jobs set status = $2, previous_status = null,
                        updated_at = statement_timestamp() where id = $1";
    transaction.rows(query, &[(&id.as_uuid(), Type::UUID), (&status, Type::TEXT)]).await?;
    transaction.commit().await
}

pub(super) async fn requeue(session: &mut Session, id: JobId) -> Result<(), Error> {
    let transaction = session.begin().await?;
    let job = lock(&transaction, id).await?;
    if !matches!(job.status, JobStatus::Failed | JobStatus::Cancelled) {
        return Err(Error::JobNotRequeueable { id, status: job.status });
    }
    if job.parent.is_some() {
        return Err(Error::CannotRequeueSubJob(id));
    }
    if let Some(holder) = holder(&transaction, &job.unique_key).await? {
        return Err(Error::DuplicateJob { holder });
    }
    let below = locked_tree(&transaction, &[id.as_uuid()]).await?;
    delete_rows(&transaction, &below).await?;
    for query in [
        "delete from ebbtide_jobs.fan_outs where parent_job_id = $1",
        "delete from ebbtide_jobs.checkpoints where job_id = $1",
        "update ebbtide_jobs.jobs
            set status = 'pending', previous_status = null, attempt = 0, last_error = null, dead_lettered_at = null,
                dead_letter_reason = null, result = null, run_at = null, started_at = null, completed_at = null,
                locked_by = '', locked_until = null, last_heartbeat_at = null, dispatch_token = null,
                waiting_signal_name = '', updated_at = statement_timestamp()
          where id = $1",
    ] {
        transaction.rows(query, &[(&id.as_uuid(), Type::UUID)]).await?;
    }
    transaction.commit().await
}

async fn holder(transaction: &Transaction<'_>, key: &str) -> Result<Option<JobId>, Error> {
    let query = concat!(
        "select j.id from ebbtide_jobs.jobs j where j.unique_key = $1 and j.unique_key <> '' and j.status in ",
        live!()
    );
    let rows = transaction.rows(query, &[(&key, Type::TEXT)]).await?;
    rows.first().map(|row| row::id(row, "id")).transpose()
}

/// A child is not taken from a parent that may still collect it.
async fn check_parent(transaction: &Transaction<'_>, id: JobId, job: &Locked) -> Result<(), Error> {
    let query = concat!("select 1 from ebbtide_jobs.jobs p where p.id = $1 and p.status in ", live!());
    if transaction.rows(query, &[(&job.parent, Type::UUID)]).await?.is_empty() {
        return Ok(());
    }
    Err(Error::JobHasPendingParent(id))
}

pub(super) async fn delete(session: &mut Session, id: JobId) -> Result<(), Error> {
    let transaction = session.begin().await?;
    let job = lock(&transaction, id).await?;
    check_parent(&transaction, id, &job).await?;
    let query = "select 1 from ebbtide_jobs.jobs c where c.parent_job_id = $1
                 union all
                 select 1 from ebbtide_jobs.fan_outs f where f.parent_job_id = $1 and f.status = 'pending' limit 1";
    if !transaction.rows(query, &[(&id.as_uuid(), Type::UUID)]).await?.is_empty() {
        return Err(Error::JobHasChildren(id));
    }
    delete_rows(&transaction, &[id.as_uuid()]).await?;
    transaction.commit().await
}

pub(super) async fn delete_workflow(session: &mut Session, root: JobId) -> Result<u64, Error> {
    let transaction = session.begin().await?;
    let job = lock(&transaction, root).await?;
    check_parent(&transaction, root, &job).await?;
    let mut ids = locked_tree(&transaction, &[root.as_uuid()]).await?;
    ids.push(root.as_uuid());
    let deleted = delete_rows(&transaction, &ids).await?;
    transaction.commit().await?;
    Ok(deleted)
}

pub(super) async fn purge(
    session: &mut Session, queue: &QueueName, status: PurgeStatus, limit: u32,
) -> Result<u64, Error> {
    let transaction = session.begin().await?;
    let choice = concat!(
        "select j.id from ebbtide_jobs.jobs j where j.queue = $1 and j.status = $2 and ",
        deletable!("ebbtide_jobs."),
        " order by j.created_at desc limit $3 for update of j skip locked"
    );
    let (queue, status) = (queue.as_str(), status.status().as_str());
    let params = [(&queue as _, Type::TEXT), (&status as _, Type::TEXT), (&i64::from(limit) as _, Type::INT8)];
    let chosen = transaction.planned(choice, &params).await?;
    let ids = chosen.iter().map(|row| get(row, "id")).collect::<Result<Vec<Uuid>, _>>()?;
    // Again under the lock: a child may have come since the choice.
    let again = concat!(
        "select j.id from ebbtide_jobs.jobs j where j.id = any($1) and j.status = $2 and ",
        deletable!("ebbtide_jobs.")
    );
    let still = transaction.planned(again, &[(&ids, Type::UUID_ARRAY), (&status, Type::TEXT)]).await?;
    let ids = still.iter().map(|row| get(row, "id")).collect::<Result<Vec<Uuid>, _>>()?;
    let deleted = delete_rows(&transaction, &ids).await?;
    transaction.commit().await?;
    Ok(deleted)
}

pub(super) async fn set_queue_paused(
    session: &Session, queue: &QueueName, paused: bool, by: &str,
) -> Result<(), Error> {
    let query = "insert into ebbtide_jobs.queue_states as s (queue, paused, paused_at, paused_by)
                 values ($1, $2, case when $2 then statement_timestamp() end, $3)
                 on conflict (queue) do update
                    set paused = excluded.paused, paused_at = excluded.paused_at, paused_by = excluded.paused_by,
                        updated_at = statement_timestamp()
                  where s.paused <> excluded.paused";
    let params = [(&queue.as_str() as _, Type::TEXT), (&paused as _, Type::BOOL), (&by as _, Type::TEXT)];
    session.rows(query, &params).await?;
    Ok(())
}

pub(super) async fn paused_queues(session: &Session) -> Result<Vec<QueueName>, Error> {
    let query = "select queue from ebbtide_jobs.queue_states where paused order by queue";
    let rows = session.rows(query, &[]).await?;
    rows.iter().map(|row| Ok(QueueName::from_storage(get(row, "queue")?))).collect()
}
