//! Cancelling, pausing, requeueing and deleting. Nobody else writes meanwhile, so that a look is as good as a lock.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, ToSql, params};
use uuid::Uuid;

use super::enqueue::holder_of_key;
use super::fan_out::tally;
use super::row;
use super::threads::error;
use crate::control::PurgeStatus;
use crate::error::Error;
use crate::job::{Job, JobId, JobStatus};
use crate::limits::{DELETE_CHUNK, QueueName, SUBTREE_DEPTH_MAX};
use crate::storage::fragment::{deletable, live};

fn find(db: &Connection, id: JobId) -> Result<Job, Error> {
    row::find(db, id)?.ok_or(Error::JobNotFound(id))
}

fn execute(db: &Connection, query: &str, params: &[&dyn ToSql]) -> Result<u64, Error> {
    let written = db.prepare_cached(query).and_then(|mut query| query.execute(params)).map_err(error)?;
    Ok(written as u64)
}

const TREE: &str = "
    with recursive tree (id, depth) as (
        select j.id, 1 from jobs j where j.parent_job_id = ?1
        union all
        select j.id, tree.depth + 1 from tree join jobs j on j.parent_job_id = tree.id where tree.depth <= ?2)
    select id, depth from tree where id <> ?1
    union all
    select j.id, 0 from jobs j where j.root_job_id = ?1 and j.id <> ?1";

/// Everything below a job.
fn tree(db: &Connection, root: JobId) -> Result<BTreeSet<Uuid>, Error> {
    let mut query = db.prepare_cached(TREE).map_err(error)?;
    let rows = query.query_map(params![root.as_uuid(), SUBTREE_DEPTH_MAX], |row| Ok((row.get(0)?, row.get(1)?)));
    let mut ids = BTreeSet::new();
    for row in rows.map_err(error)? {
        let (id, depth): (Uuid, u32) = row.map_err(error)?;
        if SUBTREE_DEPTH_MAX < depth {
            return Err(Error::SubtreeTooDeep(root));
        }
        ids.insert(id);
    }
    Ok(ids)
}

fn lists(ids: impl IntoIterator<Item = Uuid>) -> Vec<Rc<Vec<Value>>> {
    let ids: Vec<Value> = ids.into_iter().map(|id| Value::Blob(id.as_bytes().to_vec())).collect();
    ids.chunks(DELETE_CHUNK).map(|chunk| Rc::new(chunk.to_vec())).collect()
}

/// Deletes jobs with all that hangs off them, their deduplication windows included.
fn delete_rows(db: &Connection, ids: impl IntoIterator<Item = Uuid>) -> Result<u64, Error> {
    let mut deleted = 0;
    for list in lists(ids) {
        for query in [
            "delete from fan_outs where parent_job_id in (select value from rarray(?1))",
            "delete from checkpoints where job_id in (select value from rarray(?1))",
            "delete from signals where job_id in (select value from rarray(?1))",
            "delete from unique_locks where job_id in (select value from rarray(?1))",
            "delete from concurrency_slots where job_id in (select value from rarray(?1))",
        ] {
            execute(db, query, params![list])?;
        }
        deleted += execute(db, "delete from jobs where id in (select value from rarray(?1))", params![list])?;
    }
    Ok(deleted)
}

pub(super) fn cancel(db: &Connection, id: JobId) -> Result<u64, Error> {
    match find(db, id)?.status {
        JobStatus::Cancelled => return Ok(0),
        status if status.is_terminal() => return Err(Error::JobNotCancellable { id, status }),
        _ => {}
    }
    stop(db, [id.as_uuid()])
}

/// Cancels what is unfinished of these jobs and of everything below them, and counts it in the fan-outs above.
pub(super) fn stop(db: &Connection, roots: impl IntoIterator<Item = Uuid>) -> Result<u64, Error> {
    let mut ids = BTreeSet::new();
    for root in roots {
        ids.extend(tree(db, JobId::from_uuid(root).ok_or_else(|| Error::Corrupt("an all-zero id".to_owned()))?)?);
        ids.insert(root);
    }
    let now = row::now(db)?;
    let mut counts = BTreeMap::<Uuid, u32>::new();
    let mut cancelled = 0;
    for list in lists(ids) {
        execute(db, "delete from concurrency_slots where job_id in (select value from rarray(?1))", params![list])?;
        // The owner's name stays: by it the owner learns that the run is to be stopped.
        let query = concat!(
            "update jobs set status = 'cancelled', previous_status = null, completed_at = ?2,
                    last_error = 'cancelled by user', updated_at = ?2
              where id in (select value from rarray(?1)) and status in ",
            live!(),
            " returning fan_out_id"
        );
        let mut query = db.prepare_cached(query).map_err(error)?;
        let stopped = query.query_map(params![list, now], |row| row.get::<_, Option<Uuid>>(0)).map_err(error)?;
        for fan_out in stopped {
            cancelled += 1;
            if let Some(fan_out) = fan_out.map_err(error)? {
                *counts.entry(fan_out).or_default() += 1;
            }
        }
        let query = "update fan_outs set status = 'cancelled', updated_at = ?2
                      where parent_job_id in (select value from rarray(?1)) and status = 'pending'";
        execute(db, query, params![list, now])?;
    }
    for (fan_out, count) in counts {
        tally(db, fan_out, JobStatus::Cancelled, count)?;
    }
    Ok(cancelled)
}

pub(super) fn pause(db: &Connection, id: JobId) -> Result<(), Error> {
    match find(db, id)?.status {
        JobStatus::Pending | JobStatus::Waiting => {}
        JobStatus::Paused => return Err(Error::JobAlreadyPaused(id)),
        status => return Err(Error::JobNotPausable { id, status }),
    }
    let query = "update jobs set previous_status = status, status = 'paused', updated_at = ?2 where id = ?1";
    execute(db, query, params![id.as_uuid(), row::now(db)?])?;
    Ok(())
}

pub(super) fn resume(db: &Connection, id: JobId) -> Result<(), Error> {
    let job = find(db, id)?;
    if job.status != JobStatus::Paused {
        return Err(Error::JobNotPaused { id, status: job.status });
    }
    let status = job.previous_status.unwrap_or(JobStatus::Pending).as_str();
    let query = "update jobs set status = ?2, previous_status = null, updated_at = ?3 where id = ?1";
    execute(db, query, params![id.as_uuid(), status, row::now(db)?])?;
    Ok(())
}

pub(super) fn requeue(db: &Connection, id: JobId) -> Result<(), Error> {
    let job = find(db, id)?;
    if !matches!(job.status, JobStatus::Failed | JobStatus::Cancelled) {
        return Err(Error::JobNotRequeueable { id, status: job.status });
    }
    if job.parent_job_id.is_some() {
        return Err(Error::CannotRequeueSubJob(id));
    }
    if let Some(holder) = holder_of_key(db, job.unique_key.as_deref().unwrap_or_default())? {
        return Err(Error::DuplicateJob { holder });
    }
    delete_rows(db, tree(db, id)?)?;
    execute(db, "delete from fan_outs where parent_job_id = ?1", params![id.as_uuid()])?;
    execute(db, "delete from checkpoints where job_id = ?1", params![id.as_uuid()])?;
    let query = "update jobs
            set status = 'pending', previous_status = null, attempt = 0, last_error = null, dead_lettered_at = null,
                dead_letter_reason = null, result = null, run_at = null, started_at = null, completed_at = null,
                locked_by = '', locked_until = null, last_heartbeat_at = null, dispatch_token = null,
                waiting_signal_name = '', updated_at = ?2
          where id = ?1";
    execute(db, query, params![id.as_uuid(), row::now(db)?])?;
    Ok(())
}

/// A child is not taken from a parent that may still collect it.
fn check_parent(db: &Connection, job: &Job) -> Result<(), Error> {
    let Some(parent) = job.parent_job_id else { return Ok(()) };
    match row::find(db, parent)? {
        Some(parent) if !parent.status.is_terminal() => Err(Error::JobHasPendingParent(job.id)),
        _ => Ok(()),
    }
}

pub(super) fn delete(db: &Connection, id: JobId) -> Result<(), Error> {
    check_parent(db, &find(db, id)?)?;
    let query = "select 1 from jobs c where c.parent_job_id = ?1
                 union all
                 select 1 from fan_outs f where f.parent_job_id = ?1 and f.status = 'pending' limit 1";
    let mut query = db.prepare_cached(query).map_err(error)?;
    let child: Option<i64> = query.query_row([id.as_uuid()], |row| row.get(0)).optional().map_err(error)?;
    if child.is_some() {
        return Err(Error::JobHasChildren(id));
    }
    delete_rows(db, [id.as_uuid()])?;
    Ok(())
}

pub(super) fn delete_workflow(db: &Connection, root: JobId) -> Result<u64, Error> {
    check_parent(db, &find(db, root)?)?;
    let mut ids = tree(db, root)?;
    ids.insert(root.as_uuid());
    delete_rows(db, ids)
}

pub(super) fn purge(db: &Connection, queue: &QueueName, status: PurgeStatus, limit: u32) -> Result<u64, Error> {
    let choice = concat!(
        "select j.id from jobs j where j.queue = ?1 and j.status = ?2 and ",
        deletable!(""),
        " order by j.created_at desc limit ?3"
    );
    let mut query = db.prepare_cached(choice).map_err(error)?;
    let chosen = query.query_map(params![queue.as_str(), status.status().as_str(), limit], |row| row.get(0));
    let ids: Vec<Uuid> = chosen.map_err(error)?.collect::<Result<_, _>>().map_err(error)?;
    delete_rows(db, ids)
}

pub(super) fn set_queue_paused(db: &Connection, queue: &QueueName, paused: bool, by: &str) -> Result<(), Error> {
    let query = "insert into queue_states (queue, paused, paused_at, paused_by, updated_at)
                 values (?1, ?2, iif(?2, ?4, null), ?3, ?4)
                 on conflict (queue) do update
                    set paused = excluded.paused, paused_at = excluded.paused_at, paused_by = excluded.paused_by,
                        updated_at = excluded.updated_at
                  where paused <> excluded.paused";
    execute(db, query, params![queue.as_str(), paused, by, row::now(db)?])?;
    Ok(())
}

pub(super) fn paused_queues(db: &Connection) -> Result<Vec<QueueName>, Error> {
    let query = "select queue from queue_states where paused order by queue";
    let mut query = db.prepare_cached(query).map_err(error)?;
    let queues = query.query_map([], |row| row.get(0).map(QueueName::from_storage)).map_err(error)?;
    queues.map(|queue| queue.map_err(error)).collect()
}
