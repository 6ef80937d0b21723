//! Inserts of jobs, with both kinds of deduplication.

use rusqlite::{Connection, OptionalExtension, Transaction, named_params, params};
use uuid::Uuid;

use super::row;
use super::threads::error;
use crate::enqueue::{Enqueued, NewJob, TxEnqueuer};
use crate::error::Error;
use crate::job::JobId;
use crate::storage::fragment::live;
use crate::unique::Scope;

/// Enqueues in the caller's own transaction: the job is there once that commits, and never if it does not. Every
/// rule of deduplication applies inside it.
///
/// Begin it as an immediate transaction: a deferred one that has read already may find, on its first write, that
/// another program wrote meanwhile, and is then refused with [`Error::Busy`].
///
/// # Errors
/// [`Error::DuplicateJob`] if an unfinished job has the same unique key; the transaction can go on.
pub fn enqueue_in(transaction: &Transaction<'_>, job: &NewJob) -> Result<Enqueued, Error> {
    enqueue(transaction, job)
}

impl TxEnqueuer for Transaction<'_> {
    async fn enqueue_job(&self, job: &NewJob) -> Result<Enqueued, Error> {
        enqueue(self, job)
    }

    async fn enqueue_jobs(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, Error> {
        enqueue_batch(self, jobs)
    }
}

pub(super) fn enqueue(db: &Connection, job: &NewJob) -> Result<Enqueued, Error> {
    // Looked up before the window is touched, so that there is nothing to give back. Nobody else writes meanwhile.
    let held = holder_of_key(db, &job.unique_key)?;
    let now = row::now(db)?;
    if let Some(scope) = &job.scope {
        if let Some(holder) = holder_of_window(db, scope, now, job.takes_over)? {
            return Ok(Enqueued::Duplicate(holder));
        }
        if held.is_none() {
            take_window(db, scope, job.id, now)?;
        }
    }
    if let Some(holder) = held {
        return Err(Error::DuplicateJob { holder });
    }
    insert(db, job, now)?;
    Ok(Enqueued::New(job.id))
}

pub(super) fn enqueue_batch(db: &Connection, jobs: &[NewJob]) -> Result<Vec<Enqueued>, Error> {
    crate::enqueue::check_batch(jobs)?;
    let now = row::now(db)?;
    let each = jobs.iter().map(|job| match holder_of_key(db, &job.unique_key)? {
        Some(holder) => Ok(Enqueued::Duplicate(holder)),
        None => insert(db, job, now).map(|()| Enqueued::New(job.id)),
    });
    each.collect()
}

pub(super) fn holder_of_key(db: &Connection, key: &str) -> Result<Option<JobId>, Error> {
    if key.is_empty() {
        return Ok(None);
    }
    const HOLDER: &str =
        concat!("select id from jobs where unique_key = ?1 and unique_key <> '' and status in ", live!());
    let mut query = db.prepare_cached(HOLDER).map_err(error)?;
    let holder: Option<Uuid> = query.query_row([key], |row| row.get(0)).optional().map_err(error)?;
    Ok(holder.and_then(JobId::from_uuid))
}

/// The job that keeps the window from being taken. One whose row is gone keeps it as well, until it expires.
fn holder_of_window(db: &Connection, scope: &Scope, now: i64, takes_over: bool) -> Result<Option<JobId>, Error> {
    let query = "select l.job_id, coalesce(j.status in ('failed', 'cancelled'), 0)
                   from unique_locks l left join jobs j on j.id = l.job_id
                  where l.scope_hash = ?1 and l.expires_at > ?2";
    let mut query = db.prepare_cached(query).map_err(error)?;
    let found: Option<(Uuid, bool)> =
        query.query_row(params![scope.hash, now], |row| Ok((row.get(0)?, row.get(1)?))).optional().map_err(error)?;
    let holder = found.filter(|(_, is_over)| !(takes_over && *is_over));
    Ok(holder.and_then(|(id, _)| JobId::from_uuid(id)))
}

fn take_window(db: &Connection, scope: &Scope, id: JobId, now: i64) -> Result<(), Error> {
    let query = "insert into unique_locks (scope_hash, job_id, expires_at, created_at) values (?1, ?2, ?3, ?4)
                 on conflict (scope_hash) do update
                     set job_id = excluded.job_id, expires_at = excluded.expires_at, created_at = excluded.created_at";
    let mut query = db.prepare_cached(query).map_err(error)?;
    let expires_at = now.saturating_add(scope.window_us);
    query.execute(params![scope.hash, id.as_uuid(), expires_at, now]).map_err(error)?;
    Ok(())
}

pub(super) fn insert(db: &Connection, job: &NewJob, now: i64) -> Result<(), Error> {
    let query = "insert into jobs (
            id, type, args, queue, tenant, metadata, priority, max_retries, timeout, determinism, run_at,
            unique_key, trace_context, created_at, updated_at)
        values (
            :id, :type, :args, :queue, :tenant, :metadata, :priority, :max_retries, :timeout, :determinism, :run_at,
            :unique_key, :trace_context, :now, :now)";
    let run_at = match (job.delay_us(), job.run_at()) {
        (Some(delay), _) => Some(now.saturating_add(delay)),
        (None, at) => at.map(|at| at.as_microsecond()).filter(|at| now < *at),
    };
    let mut query = db.prepare_cached(query).map_err(error)?;
    let params = named_params! {
        ":id": job.id.as_uuid(),
        ":type": job.job_type.as_str(),
        ":args": job.args,
        ":queue": job.queue.as_str(),
        ":tenant": job.tenant,
        ":metadata": job.metadata_json(),
        ":priority": job.priority,
        ":max_retries": job.max_retries_i32(),
        ":timeout": job.timeout_nanos(),
        ":determinism": job.determinism.as_i32(),
        ":run_at": run_at,
        ":unique_key": job.unique_key,
        ":trace_context": job.trace_context,
        ":now": now,
    };
    query.execute(params).map_err(error)?;
    Ok(())
}
