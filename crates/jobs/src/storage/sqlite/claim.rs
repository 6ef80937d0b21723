//! Claims, and the writes that a claim gives the right to.

use std::time::Duration;

use rusqlite::{Connection, Row, ToSql, named_params, params};
use uuid::Uuid;

use super::fan_out::{stop_losers, tally_job};
use super::row::{self, get};
use super::threads::error;
use crate::error::Error;
use crate::job::{Claim, Job, JobId, JobStatus};
use crate::limits::{JobType, QueueName, saturating_micros};
use crate::outcome::{ClaimRequest, Completion, DeadLetterReason, Failure, QueueShare, Reclaim, Reclaimed, in_order};

/// Failed fan-outs of which one failing job cancels the remaining children.
const FAIL_SETTLES_MAX: u32 = 4;

pub(super) fn claim(db: &Connection, request: &ClaimRequest) -> Result<Vec<Job>, Error> {
    let now = row::now(db)?;
    let locked_until = now.saturating_add(saturating_micros(request.lease));
    let update = "update jobs
                     set status = 'running', attempt = attempt + 1, started_at = ?2, locked_by = ?3,
                         locked_until = ?4, last_heartbeat_at = null, dispatch_token = ?5, updated_at = ?2
                   where id = ?1";
    let mut update = db.prepare_cached(update).map_err(error)?;
    let mut claimed = Vec::new();
    for share in &request.shares {
        for id in due(db, share, now)? {
            let params = params![id.as_uuid(), now, request.worker.as_str(), locked_until, Uuid::new_v4()];
            update.execute(params).map_err(error)?;
            claimed.extend(row::find(db, id)?);
        }
    }
    Ok(in_order(claimed))
}

/// The due jobs of one queue, best first. From one priority it skips to the next, and within a priority the due jobs
/// are one range of the index: jobs of the future cost nothing.
fn due(db: &Connection, share: &QueueShare, now: i64) -> Result<Vec<JobId>, Error> {
    let paused = "select 1 from queue_states where queue = ?1 and paused";
    let paused = db.prepare_cached(paused).and_then(|mut query| query.exists([share.queue.as_str()]));
    if paused.map_err(error)? {
        return Ok(Vec::new());
    }
    let next_priority = "select max(priority) from jobs where status = 'pending' and queue = ?1 and priority < ?2";
    let mut next_priority = db.prepare_cached(next_priority).map_err(error)?;
    let in_lane = "select id from jobs
                    where status = 'pending' and queue = ?1 and priority = ?2 and coalesce(run_at, created_at) <= ?3
                    order by coalesce(run_at, created_at), id limit ?4";
    let mut in_lane = db.prepare_cached(in_lane).map_err(error)?;
    let mut ids = Vec::new();
    let mut above = i64::from(i32::MAX) + 1;
    let limit = share.limit as usize;
    while ids.len() < limit {
        let next: Option<i64> =
            next_priority.query_row(params![share.queue.as_str(), above], |row| row.get(0)).map_err(error)?;
        let Some(priority) = next else { break };
        let room = i64::try_from(limit - ids.len()).expect("a limit of 32 bits");
        let params = params![share.queue.as_str(), priority, now, room];
        let lane = in_lane.query_map(params, |row| Ok(row::id(row, "id"))).map_err(error)?;
        for id in lane {
            ids.push(id.map_err(error)??);
        }
        above = priority;
    }
    Ok(ids)
}

/// Whose writes count: the claim in force on a running job.
macro_rules! owned {
    () => {
        "id = :id and locked_by = :worker and dispatch_token = :token and status = 'running'"
    };
}

/// What every way out of a run clears.
macro_rules! unlocked {
    () => {
        "locked_by = '', locked_until = null, last_heartbeat_at = null, dispatch_token = null, updated_at = :now"
    };
}

fn is_written(db: &Connection, query: &str, claim: &Claim, more: &[(&str, &dyn ToSql)]) -> Result<bool, Error> {
    let (id, worker, token) = (claim.job_id.as_uuid(), claim.worker.as_str(), claim.token.0);
    let mut params: Vec<(&str, &dyn ToSql)> = vec![(":id", &id), (":worker", &worker), (":token", &token)];
    params.extend_from_slice(more);
    let written = db.prepare_cached(query).and_then(|mut query| query.execute(params.as_slice()));
    Ok(written.map_err(error)? == 1)
}

fn write_owned(db: &Connection, query: &str, claim: &Claim, more: &[(&str, &dyn ToSql)]) -> Result<(), Error> {
    if is_written(db, query, claim, more)? { Ok(()) } else { Err(Error::JobNotOwned(claim.job_id)) }
}

pub(super) fn heartbeat(db: &Connection, claim: &Claim, lease: Duration) -> Result<(), Error> {
    const HEARTBEAT: &str = concat!("update jobs set last_heartbeat_at = :now, locked_until = :until where ", owned!());
    let now = row::now(db)?;
    let until = now.saturating_add(saturating_micros(lease));
    write_owned(db, HEARTBEAT, claim, &[(":now", &now), (":until", &until)])
}

pub(super) fn retry(db: &Connection, claim: &Claim, failure: &Failure, delay: Duration) -> Result<(), Error> {
    const RETRY: &str = concat!(
        "update jobs set status = 'pending', last_error = :error, run_at = :run_at, ",
        unlocked!(),
        " where ",
        owned!()
    );
    let now = row::now(db)?;
    let run_at = now.saturating_add(saturating_micros(delay));
    write_owned(db, RETRY, claim, &[(":error", &failure.error), (":run_at", &run_at), (":now", &now)])
}

pub(super) fn fail(db: &Connection, claim: &Claim, failure: &Failure, reason: DeadLetterReason) -> Result<(), Error> {
    const FAIL: &str = concat!(
        "update jobs set status = 'failed', last_error = :error, dead_letter_reason = :reason,
                dead_lettered_at = :now, completed_at = :now, ",
        unlocked!(),
        " where ",
        owned!()
    );
    let (now, reason) = (row::now(db)?, reason.as_str());
    write_owned(db, FAIL, claim, &[(":error", &failure.error), (":reason", &reason), (":now", &now)])?;
    tally_job(db, claim.job_id, JobStatus::Failed)?;
    stop_losers(db, FAIL_SETTLES_MAX)?;
    Ok(())
}

pub(super) fn release(db: &Connection, claim: &Claim) -> Result<(), Error> {
    const RELEASE: &str = concat!(
        "update jobs set status = 'pending', attempt = max(attempt - 1, 0), started_at = null, ",
        unlocked!(),
        " where ",
        owned!()
    );
    write_owned(db, RELEASE, claim, &[(":now", &row::now(db)?)])
}

/// Whether each completion was written: those whose claim is over are not, and have no effect of any kind.
pub(super) fn complete(db: &Connection, completions: &[Completion]) -> Result<Vec<bool>, Error> {
    const COMPLETE: &str = concat!(
        "update jobs set status = 'completed', result = :result, completed_at = :now, ",
        unlocked!(),
        " where ",
        owned!()
    );
    let now = row::now(db)?;
    let mut checkpoints = db.prepare_cached("delete from checkpoints where job_id = ?1").map_err(error)?;
    let mut written = Vec::with_capacity(completions.len());
    for completion in completions {
        let is_done = is_written(db, COMPLETE, &completion.claim, &[(":result", &completion.result), (":now", &now)])?;
        // Only with a status that was flipped here.
        if is_done && completion.delete_checkpoints {
            checkpoints.execute([completion.claim.job_id.as_uuid()]).map_err(error)?;
        }
        if is_done {
            tally_job(db, completion.claim.job_id, JobStatus::Completed)?;
        }
        written.push(is_done);
    }
    Ok(written)
}

pub(super) fn reclaim(db: &Connection, reclaim: &Reclaim) -> Result<Vec<Reclaimed>, Error> {
    let now = row::now(db)?;
    let before = now.saturating_sub(saturating_micros(reclaim.age));
    let query = "select id, type, queue, attempt, attempt > max_retries + ?3 as is_dead from jobs
                  where status = 'running' and coalesce(last_heartbeat_at, started_at, locked_until) < ?1
                  order by coalesce(last_heartbeat_at, started_at, locked_until) limit ?2";
    let mut query = db.prepare_cached(query).map_err(error)?;
    let stale = query.query_map(params![before, reclaim.limit, reclaim.margin], |row| Ok(reclaimed(row)));
    let stale: Vec<Reclaimed> = stale.map_err(error)?.map(|row| row.map_err(error)?).collect::<Result<_, Error>>()?;
    const RECLAIM: &str = concat!(
        "update jobs
            set status = iif(:is_dead, 'failed', 'pending'), completed_at = iif(:is_dead, :now, null),
                dead_lettered_at = iif(:is_dead, :now, null), dead_letter_reason = iif(:is_dead, :reason, null),
                last_error = 'the worker was lost during run ' || attempt, ",
        unlocked!(),
        " where id = :id"
    );
    let mut update = db.prepare_cached(RECLAIM).map_err(error)?;
    for job in &stale {
        let params = named_params! {
            ":id": job.id.as_uuid(),
            ":is_dead": job.is_dead,
            ":reason": DeadLetterReason::WorkerLost.as_str(),
            ":now": now,
        };
        update.execute(params).map_err(error)?;
        if job.is_dead {
            tally_job(db, job.id, JobStatus::Failed)?;
        }
    }
    Ok(stale)
}

fn reclaimed(row: &Row<'_>) -> Result<Reclaimed, Error> {
    Ok(Reclaimed {
        id: row::id(row, "id")?,
        job_type: JobType::from_storage(get(row, "type")?),
        queue: QueueName::from_storage(get(row, "queue")?),
        attempt: u32::try_from(get::<i64>(row, "attempt")?).unwrap_or(0),
        is_dead: get(row, "is_dead")?,
    })
}
