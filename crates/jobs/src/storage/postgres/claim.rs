//! Claims, and the writes that a claim gives the right to. Each is one statement, and so one transaction.

use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::fan_out::tallied;
use super::row::{self, get};
use super::session::Sql;
use crate::error::Error;
use crate::job::{Claim, Job};
use crate::limits::{JobType, QueueName, saturating_micros};
use crate::outcome::{ClaimRequest, Completion, DeadLetterReason, Failure, Reclaim, Reclaimed, in_order};

// The innermost query locks one row at a time as the limit around it asks for more, so that no row is locked that
// is not claimed; materialized, so that it runs once. The recursive part skips from one priority to the next, and
// within a priority the due jobs are one range of the index: jobs of the future cost nothing. The update takes an array
// of ids: the planner expects a tenth of all jobs of a limit that it cannot see, and would read the table to join them.
const CLAIM: &str = concat!(
    "with due as materialized (
        select k.id
          from unnest($1::text[], $2::bigint[]) as share (queue, jobs_max)
         cross join lateral (
            with recursive lane (priority) as (
                (select j.priority from ebbtide_jobs.jobs j
                  where j.status = 'pending' and j.queue = share.queue
                  order by j.priority desc limit 1)
                union all
                select (select j.priority from ebbtide_jobs.jobs j
                         where j.status = 'pending' and j.queue = share.queue and j.priority < lane.priority
                         order by j.priority desc limit 1)
                  from lane where lane.priority is not null)
            select d.id
              from lane
             cross join lateral (
                select j.id from ebbtide_jobs.jobs j
                 where j.status = 'pending' and j.queue = share.queue and j.priority = lane.priority
                   and coalesce(j.run_at, j.created_at) <= statement_timestamp()
                 order by coalesce(j.run_at, j.created_at), j.id
                 for update skip locked) d
             limit share.jobs_max) k
         where not exists (select from ebbtide_jobs.queue_states s where s.queue = share.queue and s.paused))
    update ebbtide_jobs.jobs j
       set status = 'running', attempt = j.attempt + 1, started_at = statement_timestamp(),
           locked_by = $3, locked_until = statement_timestamp() + $4 * interval '1 microsecond',
           last_heartbeat_at = null, dispatch_token = gen_random_uuid(), updated_at = statement_timestamp()
     where j.id = any(array(select due.id from due))
    returning ",
    row::columns!()
);

pub(super) async fn claim(sql: &impl Sql, request: &ClaimRequest) -> Result<Vec<Job>, Error> {
    let queues: Vec<&str> = request.shares.iter().map(|share| share.queue.as_str()).collect();
    let limits: Vec<i64> = request.shares.iter().map(|share| i64::from(share.limit)).collect();
    let params = [
        (&queues as _, Type::TEXT_ARRAY),
        (&limits as _, Type::INT8_ARRAY),
        (&request.worker.as_str() as _, Type::TEXT),
        (&saturating_micros(request.lease) as _, Type::INT8),
    ];
    let rows = sql.rows(CLAIM, &params).await?;
    rows.iter().map(row::job).collect::<Result<_, _>>().map(in_order)
}

/// Whose writes count: the claim in force on a running job.
macro_rules! owned {
    () => {
        "j.id = $1 and j.locked_by = $2 and j.dispatch_token = $3 and j.status = 'running'"
    };
}

/// What every way out of a run clears.
macro_rules! unlocked {
    () => {
        "locked_by = '', locked_until = null, last_heartbeat_at = null, dispatch_token = null, \
         updated_at = statement_timestamp()"
    };
}

async fn write_owned(
    sql: &impl Sql, query: &str, claim: &Claim, more: &[(&(dyn ToSql + Sync), Type)],
) -> Result<(), Error> {
    owned_rows(sql, query, claim, more).await.map(|_| ())
}

async fn owned_rows(
    sql: &impl Sql, query: &str, claim: &Claim, more: &[(&(dyn ToSql + Sync), Type)],
) -> Result<Vec<Row>, Error> {
    let (id, worker, token) = (claim.job_id.as_uuid(), claim.worker.as_str(), claim.token.0);
    let mut params: Vec<(&(dyn ToSql + Sync), Type)> =
        vec![(&id, Type::UUID), (&worker, Type::TEXT), (&token, Type::UUID)];
    params.extend_from_slice(more);
    let rows = sql.rows(query, &params).await?;
    if rows.is_empty() {
        return Err(Error::JobNotOwned(claim.job_id));
    }
    Ok(rows)
}

pub(super) async fn heartbeat(sql: &impl Sql, claim: &Claim, lease: Duration) -> Result<(), Error> {
    const HEARTBEAT: &str = concat!(
        "update ebbtide_jobs.jobs j set last_heartbeat_at = statement_timestamp(),
                locked_until = statement_timestamp() + $4 * interval '1 microsecond'
          where ",
        owned!(),
        " returning 1"
    );
    write_owned(sql, HEARTBEAT, claim, &[(&saturating_micros(lease), Type::INT8)]).await
}

pub(super) async fn retry(sql: &impl Sql, claim: &Claim, failure: &Failure, delay: Duration) -> Result<(), Error> {
    const RETRY: &str = concat!(
        "update ebbtide_jobs.jobs j set status = 'pending', last_error = $4,
                run_at = statement_timestamp() + $5 * interval '1 microsecond', ",
        unlocked!(),
        " where ",
        owned!(),
        " returning 1"
    );
    let delay = saturating_micros(delay);
    write_owned(sql, RETRY, claim, &[(&failure.error, Type::TEXT), (&delay, Type::INT8)]).await
}

/// The queues of the parents that a statement woke.
fn woken(rows: &[Row]) -> Result<Vec<QueueName>, Error> {
    let queues = rows.iter().map(|row| get::<Option<String>>(row, "queue")).collect::<Result<Vec<_>, _>>()?;
    Ok(queues.into_iter().flatten().map(QueueName::from_storage).collect())
}

/// Answers the queues of the parents that this woke.
pub(super) async fn fail(
    sql: &impl Sql, claim: &Claim, failure: &Failure, reason: DeadLetterReason,
) -> Result<Vec<QueueName>, Error> {
    const FAIL: &str = concat!(
        "with done as (
            update ebbtide_jobs.jobs j set status = 'failed', last_error = $4, dead_letter_reason = $5,
                   dead_lettered_at = statement_timestamp(), completed_at = statement_timestamp(), ",
        unlocked!(),
        " where ",
        owned!(),
        " returning j.id, j.fan_out_id, j.status), ",
        tallied!(),
        " select null::text as queue from done union all select queue from woken"
    );
    let more = [(&failure.error as _, Type::TEXT), (&reason.as_str() as _, Type::TEXT)];
    woken(&owned_rows(sql, FAIL, claim, &more).await?)
}

pub(super) async fn release(sql: &impl Sql, claim: &Claim) -> Result<(), Error> {
    const RELEASE: &str = concat!(
        "update ebbtide_jobs.jobs j set status = 'pending', attempt = greatest(j.attempt - 1, 0),
                started_at = null, ",
        unlocked!(),
        " where ",
        owned!(),
        " returning 1"
    );
    write_owned(sql, RELEASE, claim, &[]).await
}

/// Completes the runs of a list `c`, those of `c` that are named by `$ids`. The checkpoints go only with a status that
/// was flipped here, and both in this one statement.
macro_rules! complete {
    ($list:literal, $ids:literal) => {
        concat!(
            "with done as (
                update ebbtide_jobs.jobs j
                   set status = 'completed', result = c.result, completed_at = statement_timestamp(), ",
            unlocked!(),
            " from ",
            $list,
            " where ",
            $ids,
            " and j.id = c.id and j.locked_by = c.worker and j.dispatch_token = c.token and j.status = 'running'
                returning j.id, j.fan_out_id, j.status, c.deletes),
            gone as (
                delete from ebbtide_jobs.checkpoints p using done where done.deletes and p.job_id = done.id), ",
            tallied!(),
            " select id, null::text as queue from done union all select null, queue from woken"
        )
    };
}

// An array from a subquery is looked up by index, however many the planner takes a thousand rows to be.
const COMPLETE: &str = complete!(
    "unnest($1::uuid[], $2::text[], $3::uuid[], $4::bytea[], $5::boolean[]) as c (id, worker, token, result, deletes)",
    "j.id = any(array(select unnest($1::uuid[])))"
);

// One run by itself: a plan that suits every value is kept, where each list would be planned anew.
const COMPLETE_ONE: &str = complete!(
    "(select $1::uuid as id, $2::text as worker, $3::uuid as token, $4::bytea as result, $5::boolean as deletes) as c",
    "j.id = $1"
);

/// Whether each completion was written: those whose claim is over are not, and have no effect of any kind.
/// With them the queues of the parents that this woke.
pub(super) async fn complete(sql: &impl Sql, completions: &[Completion]) -> Result<(Vec<bool>, Vec<QueueName>), Error> {
    fn each<'a, T>(completions: &'a [Completion], f: impl Fn(&'a Completion) -> T) -> Vec<T> {
        completions.iter().map(f).collect()
    }
    let rows = if let [one] = completions {
        let (id, worker, token) = (one.claim.job_id.as_uuid(), one.claim.worker.as_str(), one.claim.token.0);
        let params = [
            (&id as _, Type::UUID),
            (&worker as _, Type::TEXT),
            (&token as _, Type::UUID),
            (&one.result as _, Type::BYTEA),
            (&one.delete_checkpoints as _, Type::BOOL),
        ];
        sql.rows(COMPLETE_ONE, &params).await?
    } else {
        let params = [
            (&each(completions, |c| c.claim.job_id.as_uuid()) as _, Type::UUID_ARRAY),
            (&each(completions, |c| c.claim.worker.as_str()) as _, Type::TEXT_ARRAY),
            (&each(completions, |c| c.claim.token.0) as _, Type::UUID_ARRAY),
            (&each(completions, |c| c.result.as_deref()) as _, Type::BYTEA_ARRAY),
            (&each(completions, |c| c.delete_checkpoints) as _, Type::BOOL_ARRAY),
        ];
        sql.rows(COMPLETE, &params).await?
    };
    let ids = rows.iter().map(|done| get::<Option<Uuid>>(done, "id"));
    let done = ids.collect::<Result<std::collections::HashSet<_>, _>>()?;
    Ok((each(completions, |c| done.contains(&Some(c.claim.job_id.as_uuid()))), woken(&rows)?))
}

const RECLAIM: &str = concat!(
    "with stale as materialized (
        select j.id, j.attempt > j.max_retries + $3::bigint as is_dead from ebbtide_jobs.jobs j
         where j.status = 'running'
           and coalesce(j.last_heartbeat_at, j.started_at, j.locked_until)
               < statement_timestamp() - $1 * interval '1 microsecond'
         order by coalesce(j.last_heartbeat_at, j.started_at, j.locked_until)
         limit $2 for update skip locked),
    taken as (
    update ebbtide_jobs.jobs j
       set status = case when stale.is_dead then 'failed' else 'pending' end,
           completed_at = case when stale.is_dead then statement_timestamp() end,
           dead_lettered_at = case when stale.is_dead then statement_timestamp() end,
           dead_letter_reason = case when stale.is_dead then $4 end,
           last_error = 'the worker was lost during run ' || j.attempt, ",
    unlocked!(),
    " from stale where j.id = stale.id
    returning j.id, j.type, j.queue, j.attempt, stale.is_dead, j.fan_out_id, j.status),
    done as (select * from taken where is_dead), ",
    tallied!(),
    " select id, type, queue, attempt, is_dead from taken"
);

pub(super) async fn reclaim(sql: &impl Sql, reclaim: &Reclaim) -> Result<Vec<Reclaimed>, Error> {
    let params = [
        (&saturating_micros(reclaim.age) as _, Type::INT8),
        (&i64::from(reclaim.limit) as _, Type::INT8),
        (&i64::from(reclaim.margin) as _, Type::INT8),
        (&DeadLetterReason::WorkerLost.as_str() as _, Type::TEXT),
    ];
    let rows = sql.rows(RECLAIM, &params).await?;
    rows.iter().map(reclaimed).collect()
}

fn reclaimed(row: &Row) -> Result<Reclaimed, Error> {
    Ok(Reclaimed {
        id: row::id(row, "id")?,
        job_type: JobType::from_storage(get(row, "type")?),
        queue: QueueName::from_storage(get(row, "queue")?),
        attempt: u32::try_from(get::<i32>(row, "attempt")?).unwrap_or(0),
        is_dead: get(row, "is_dead")?,
    })
}
