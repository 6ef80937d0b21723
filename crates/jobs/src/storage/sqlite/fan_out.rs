//! Children started in one transaction, counted by the transaction that finishes them, and joined by their parent.

use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, Row, params};
use uuid::Uuid;

use super::row::{self, get};
use super::threads::error;
use super::{SqliteStorage, control, enqueue};
use crate::enqueue::NewJob;
use crate::error::Error;
use crate::fan_out::{
    ChildOutcome, FAN_OUT_CHECKPOINT, FanOut, FanOutId, FanOutOutcome, FanOutScan, FanOutStatus, FanOutStore, Joined,
    Settled, WAITS_FOR_CHILDREN,
};
use crate::job::{Claim, Job, JobId, JobStatus};
use crate::limits::{JobType, QueueName, saturating_micros};
use crate::storage::fragment::{decided, live, terminal, woken};

/// The claimed job, if the claim is in force.
fn own(db: &Connection, claim: &Claim) -> Result<Job, Error> {
    let job = row::find(db, claim.job_id)?.filter(|job| job.claim().as_ref() == Some(claim));
    job.ok_or(Error::JobNotOwned(claim.job_id))
}

fn execute(db: &Connection, query: &str, params: &[&dyn rusqlite::ToSql]) -> Result<usize, Error> {
    db.prepare_cached(query).and_then(|mut query| query.execute(params)).map_err(error)
}

fn suspend(db: &Connection, claim: &Claim) -> Result<(), Error> {
    let query = "update jobs
                    set status = 'waiting', run_at = null, waiting_signal_name = ?2, locked_by = '',
                        locked_until = null, last_heartbeat_at = null, dispatch_token = null, updated_at = ?3
                  where id = ?1";
    execute(db, query, params![claim.job_id.as_uuid(), WAITS_FOR_CHILDREN, row::now(db)?])?;
    Ok(())
}

fn start(
    db: &Connection, claim: &Claim, call_index: i32, fan_out: &FanOut, children: &[NewJob],
) -> Result<FanOutId, Error> {
    let id = FanOutId(Uuid::now_v7());
    let children = fan_out.adopt(id, children)?;
    let parent = own(db, claim)?;
    let now = row::now(db)?;
    let query = "insert into fan_outs (id, parent_job_id, total_count, strategy, threshold, timeout_at,
                                       cancel_on_fail, created_at, updated_at)
                 values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?8)";
    let timeout_at = fan_out.decided_within.map(|wait| now.saturating_add(saturating_micros(wait)));
    let (strategy, parent_id) = (fan_out.strategy, parent.id.as_uuid());
    let total = u32::try_from(children.len()).expect("at most 10000 children");
    let (name, threshold) = (strategy.name(), strategy.threshold());
    execute(db, query, params![id.0, parent_id, total, name, threshold, timeout_at, fan_out.cancel_on_fail, now])?;
    let query = "insert into checkpoints (job_id, call_index, call_type, result, span_end)
                 values (?1, ?2, ?3, ?4, ?2 + 1)";
    execute(db, query, params![parent_id, call_index, FAN_OUT_CHECKPOINT, id.to_string().into_bytes()])?;
    let root = parent.root_job_id.unwrap_or(parent.id).as_uuid();
    let link = "update jobs set parent_job_id = ?2, root_job_id = ?3, fan_out_id = ?4, fan_out_index = ?5
                 where id = ?1";
    for (index, mut child) in (0_u32..).zip(children) {
        if child.tenant.is_empty() {
            child.tenant.clone_from(&parent.tenant);
        }
        if child.metadata.is_empty() {
            child.metadata.clone_from(&parent.metadata);
        }
        enqueue::insert(db, &child, now)?;
        execute(db, link, params![child.id.as_uuid(), parent_id, root, id.0, index])?;
    }
    suspend(db, claim)?;
    Ok(id)
}

/// Counts `count` children that finished in one way, decides their fan-out and wakes its parent.
pub(super) fn tally(db: &Connection, fan_out: Uuid, status: JobStatus, count: u32) -> Result<(), Error> {
    const TALLY: &str = concat!(
        "update fan_outs as f
            set completed_count = f.completed_count + ?2, failed_count = f.failed_count + ?3,
                cancelled_count = f.cancelled_count + ?4,
                status = case when f.status <> 'pending' then f.status else ",
        decided!("(f.completed_count + ?2)", "(f.failed_count + ?3 + f.cancelled_count + ?4)"),
        " end, updated_at = ?5
          where f.id = ?1 returning parent_job_id, status <> 'pending'"
    );
    let by = |kind| if status == kind { count } else { 0 };
    let counts =
        params![fan_out, by(JobStatus::Completed), by(JobStatus::Failed), by(JobStatus::Cancelled), row::now(db)?];
    let mut query = db.prepare_cached(TALLY).map_err(error)?;
    let tallied = query.query_row(counts, |row| Ok((row.get(0)?, row.get(1)?))).optional().map_err(error)?;
    if let Some((parent, true)) = tallied {
        wake(db, parent)?;
    }
    Ok(())
}

/// Counts a job that has just finished, if it is a child.
pub(super) fn tally_job(db: &Connection, id: JobId, status: JobStatus) -> Result<(), Error> {
    let mut query = db.prepare_cached("select fan_out_id from jobs where id = ?1").map_err(error)?;
    let fan_out: Option<Uuid> = query.query_row([id.as_uuid()], |row| row.get(0)).map_err(error)?;
    fan_out.map_or(Ok(()), |fan_out| tally(db, fan_out, status, 1))
}

/// Wakes a parent that waits and has nothing left to wait for. Answers its queue.
fn wake(db: &Connection, parent: Uuid) -> Result<Option<QueueName>, Error> {
    const WAKE: &str = concat!(
        "update jobs as p set ",
        woken!("?2", "max(p.attempt - 1, 0)"),
        " where p.id = ?1 and p.status = 'waiting' and p.waiting_signal_name = '_fanout'
            and not exists (select 1 from fan_outs o where o.parent_job_id = p.id and o.status = 'pending')
          returning queue"
    );
    let mut query = db.prepare_cached(WAKE).map_err(error)?;
    let queue = query.query_row(params![parent, row::now(db)?], |row| row.get(0)).optional().map_err(error)?;
    Ok(queue.map(QueueName::from_storage))
}

fn child(row: &Row<'_>) -> Result<ChildOutcome, Error> {
    let status: String = get(row, "status")?;
    Ok(ChildOutcome {
        index: u32::try_from(get::<i64>(row, "fan_out_index")?).unwrap_or(0),
        id: row::id(row, "id")?,
        job_type: JobType::from_storage(get(row, "type")?),
        status: status.parse().map_err(|_| Error::Corrupt(format!("status {status}")))?,
        result: get(row, "result")?,
        error: get(row, "last_error")?,
    })
}

fn join(db: &Connection, claim: &Claim, id: FanOutId) -> Result<Joined, Error> {
    own(db, claim)?;
    let query = "select status, total_count from fan_outs where id = ?1 and parent_job_id = ?2";
    let mut query = db.prepare_cached(query).map_err(error)?;
    let found: Option<(String, u32)> = query
        .query_row(params![id.0, claim.job_id.as_uuid()], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()
        .map_err(error)?;
    let (status, total) = found.ok_or(Error::FanOutNotFound(id))?;
    let status = FanOutStatus::from_storage(&status)?;
    if status == FanOutStatus::Pending {
        suspend(db, claim)?;
        return Ok(Joined::Suspended);
    }
    let query = "select id, type, status, result, last_error, fan_out_index from jobs
                  where fan_out_id = ?1 order by fan_out_index, id";
    let mut query = db.prepare_cached(query).map_err(error)?;
    let rows = query.query_map([id.0], |row| Ok(child(row))).map_err(error)?;
    let children = rows.map(|row| row.map_err(error)?).collect::<Result<_, Error>>()?;
    Ok(Joined::Decided(FanOutOutcome { status, total, children }))
}

/// Decides the pending fan-outs `f` that the condition names, as the expression says.
macro_rules! settling {
    ($status:expr, $condition:expr) => {
        concat!(
            "update fan_outs as f set status = ",
            $status,
            ", updated_at = ?3
              where f.status = 'pending' and f.id in (
                select f.id from fan_outs f where f.status = 'pending' and ?2 is not null and ?3 is not null and ",
            $condition,
            " order by f.created_at limit ?1)
             returning parent_job_id"
        )
    };
}

const COUNTED: &str = settling!(
    decided!("f.completed_count", "(f.failed_count + f.cancelled_count)"),
    "f.total_count <= f.completed_count + f.failed_count + f.cancelled_count"
);

const TIMED_OUT: &str = settling!("'failed'", "f.timeout_at <= ?3");

const INCOMPLETE: &str = settling!(
    "'failed'",
    concat!(
        "f.created_at < ?2 and (select count(*) from jobs c where c.fan_out_id = f.id) < f.total_count
         and (select 1 from jobs p where p.id = f.parent_job_id and p.status in ",
        live!(),
        ") is not null"
    )
);

const ABANDONED: &str = settling!(
    "'cancelled'",
    concat!(
        "f.created_at < ?2 and not exists (select 1 from jobs c where c.fan_out_id = f.id)
         and (select 1 from jobs p where p.id = f.parent_job_id and p.status in ",
        terminal!(),
        ") is not null"
    )
);

fn scan(db: &Connection, query: &str, stale_age: Duration, limit: u32) -> Result<Settled, Error> {
    let now = row::now(db)?;
    let before = now.saturating_sub(saturating_micros(stale_age));
    let parents = ids(db, query, params![limit, before, now])?;
    Ok(Settled { rows: parents.len() as u64, woken: wake_all(db, parents)? })
}

fn ids(db: &Connection, query: &str, params: &[&dyn rusqlite::ToSql]) -> Result<Vec<Uuid>, Error> {
    let mut query = db.prepare_cached(query).map_err(error)?;
    let rows = query.query_map(params, |row| row.get(0)).map_err(error)?;
    rows.collect::<Result<_, _>>().map_err(error)
}

fn wake_all(db: &Connection, parents: Vec<Uuid>) -> Result<Vec<QueueName>, Error> {
    let woken = parents.into_iter().map(|parent| wake(db, parent)).collect::<Result<Vec<_>, _>>()?;
    let mut queues: Vec<QueueName> = woken.into_iter().flatten().collect();
    queues.sort_unstable();
    queues.dedup();
    Ok(queues)
}

fn wake_joinable(db: &Connection, limit: u32) -> Result<Settled, Error> {
    let query = "select p.id from jobs p
                  where p.status = 'waiting' and p.waiting_signal_name = '_fanout'
                    and not exists (select 1 from fan_outs o where o.parent_job_id = p.id and o.status = 'pending')
                  order by p.id limit ?1";
    let parents = ids(db, query, params![limit])?;
    Ok(Settled { rows: parents.len() as u64, woken: wake_all(db, parents)? })
}

/// Cancels the unfinished children of failed fan-outs that ask for it.
pub(super) fn stop_losers(db: &Connection, limit: u32) -> Result<Settled, Error> {
    let query = "select f.id from fan_outs f
                  where f.status = 'failed' and f.cancel_on_fail and not f.is_settled order by f.id limit ?1";
    let fan_outs = ids(db, query, params![limit])?;
    for fan_out in &fan_outs {
        let query = concat!("select id from jobs where fan_out_id = ?1 and status in ", live!());
        control::stop(db, ids(db, query, params![fan_out])?)?;
        execute(db, "update fan_outs set is_settled = 1 where id = ?1", params![fan_out])?;
    }
    Ok(Settled { rows: fan_outs.len() as u64, woken: Vec::new() })
}

#[async_trait]
impl FanOutStore for SqliteStorage {
    async fn start(
        &self, claim: &Claim, call_index: i32, fan_out: &FanOut, children: &[NewJob],
    ) -> Result<FanOutId, Error> {
        let (claim, fan_out, children) = (claim.clone(), fan_out.clone(), children.to_vec());
        self.writer.run(move |db| start(db, &claim, call_index, &fan_out, &children)).await
    }

    async fn join(&self, claim: &Claim, id: FanOutId) -> Result<Joined, Error> {
        let claim = claim.clone();
        self.writer.run(move |db| join(db, &claim, id)).await
    }

    async fn settle(&self, what: FanOutScan, stale_age: Duration, limit: u32) -> Result<Settled, Error> {
        self.writer
            .run(move |db| match what {
                FanOutScan::Counted => scan(db, COUNTED, stale_age, limit),
                FanOutScan::TimedOut => scan(db, TIMED_OUT, stale_age, limit),
                FanOutScan::Incomplete => scan(db, INCOMPLETE, stale_age, limit),
                FanOutScan::Abandoned => scan(db, ABANDONED, stale_age, limit),
                FanOutScan::Losers => stop_losers(db, limit),
                FanOutScan::Joinable => wake_joinable(db, limit),
            })
            .await
    }
}
