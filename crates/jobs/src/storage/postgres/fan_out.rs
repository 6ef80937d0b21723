//! Children started in one transaction, counted by the statement that finishes them, and joined by their parent.

use std::time::Duration;

use async_trait::async_trait;
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::row::{self, get};
use super::session::{Session, Sql as _, Transaction};
use super::{PostgresStorage, control};
use crate::enqueue::NewJob;
use crate::error::Error;
use crate::fan_out::{
    ChildOutcome, FAN_OUT_CHECKPOINT, FanOut, FanOutId, FanOutOutcome, FanOutScan, FanOutStatus, FanOutStore, Joined,
    Settled, WAITS_FOR_CHILDREN,
};
use crate::job::{Claim, JobStatus};
use crate::limits::{JobType, QueueName, saturating_micros};
use crate::storage::fragment::{decided, live, terminal};

/// Wakes the parents of the fan-outs of `settled`: `id`, `parent_job_id`, `status`. A parent that somebody has locked
/// is passed over, since waiting for it could close a circle; the recovery finds it.
macro_rules! awake {
    ($settled:literal) => {
        concat!(
            "parents as materialized (
                select p.id from ebbtide_jobs.jobs p
                 where p.id in (select s.parent_job_id from ",
            $settled,
            " s where s.status <> 'pending')
                   and p.status = 'waiting' and p.waiting_signal_name = '_fanout'
                   and not exists (select from ebbtide_jobs.fan_outs o
                                    where o.parent_job_id = p.id and o.status = 'pending'
                                      and o.id not in (select s.id from ",
            $settled,
            " s where s.status <> 'pending'))
                   for no key update of p skip locked),
            woken as (
                update ebbtide_jobs.jobs p set ",
            $crate::storage::fragment::woken!("statement_timestamp()", "greatest(p.attempt - 1, 0)"),
            " from parents where p.id = parents.id returning p.queue)"
        )
    };
}

/// Counts the finished jobs of a query called `done`, with `fan_out_id` and `status`, in their fan-outs, decides those
/// and wakes their parents. Fan-outs are locked by ascending id, so that two batches cannot wait for each other.
macro_rules! tallied {
    () => {
        concat!(
            "owners as materialized (
                select f.id from ebbtide_jobs.fan_outs f
                 where f.id in (select d.fan_out_id from done d where d.fan_out_id is not null)
                 order by f.id for update),
            tallied as (
                update ebbtide_jobs.fan_outs f
                   set completed_count = f.completed_count + n.completed,
                       failed_count = f.failed_count + n.failed,
                       cancelled_count = f.cancelled_count + n.cancelled,
                       status = case when f.status <> 'pending' then f.status else ",
            $crate::storage::fragment::decided!(
                "f.completed_count + n.completed",
                "f.failed_count + n.failed + f.cancelled_count + n.cancelled"
            ),
            " end, updated_at = statement_timestamp()
                  from (select d.fan_out_id as id,
                               (count(*) filter (where d.status = 'completed'))::int as completed,
                               (count(*) filter (where d.status = 'failed'))::int as failed,
                               (count(*) filter (where d.status = 'cancelled'))::int as cancelled
                          from done d group by d.fan_out_id) n
                  join owners on owners.id = n.id
                 where f.id = n.id
                returning f.id, f.parent_job_id, f.status), ",
            $crate::storage::postgres::fan_out::awake!("tallied")
        )
    };
}

pub(super) use {awake, tallied};

/// What a parent hands on to its children.
struct Parent {
    root: Uuid,
    tenant: String,
    metadata: Option<String>,
}

async fn own(transaction: &Transaction<'_>, claim: &Claim) -> Result<Parent, Error> {
    let query = "select coalesce(j.root_job_id, j.id) as root, j.tenant, j.metadata::text as metadata
                   from ebbtide_jobs.jobs j
                  where j.id = $1 and j.locked_by = $2 and j.dispatch_token = $3 and j.status = 'running'
                    for no key update";
    let params = [
        (&claim.job_id.as_uuid() as _, Type::UUID),
        (&claim.worker.as_str() as _, Type::TEXT),
        (&claim.token.0 as _, Type::UUID),
    ];
    let rows = transaction.rows(query, &params).await?;
    let row = rows.first().ok_or(Error::JobNotOwned(claim.job_id))?;
    Ok(Parent { root: get(row, "root")?, tenant: get(row, "tenant")?, metadata: get(row, "metadata")? })
}

async fn suspend(transaction: &Transaction<'_>, claim: &Claim) -> Result<(), Error> {
    let query = "update ebbtide_jobs.jobs j
                    set status = 'waiting', run_at = null, waiting_signal_name = $2, locked_by = '',
                        locked_until = null, last_heartbeat_at = null, dispatch_token = null,
                        updated_at = statement_timestamp()
                  where j.id = $1";
    transaction.rows(query, &[(&claim.job_id.as_uuid(), Type::UUID), (&WAITS_FOR_CHILDREN, Type::TEXT)]).await?;
    Ok(())
}

const FAN_OUT: &str = "
    insert into ebbtide_jobs.fan_outs (
        id, parent_job_id, total_count, strategy, threshold, timeout_at, cancel_on_fail)
    values ($1, $2, $3, $4, $5, clock_timestamp() + $6 * interval '1 microsecond', $7)";

const CHECKPOINT: &str = "
    insert into ebbtide_jobs.checkpoints (job_id, call_index, call_type, result, span_end)
    values ($1, $2, $3, $4, $2 + 1)";

const CHILDREN: &str = "
    insert into ebbtide_jobs.jobs (
        id, type, args, queue, tenant, metadata, priority, max_retries, timeout, determinism, run_at,
        unique_key, trace_context, created_at, updated_at, parent_job_id, root_job_id, fan_out_id, fan_out_index)
    select b.id, b.type, b.args, b.queue, coalesce(nullif(b.tenant, ''), $15),
           coalesce(b.metadata, $16)::jsonb, b.priority, b.max_retries, b.timeout, b.determinism,
           case when b.delay_us > 0 then c.now + b.delay_us * interval '1 microsecond'
                when b.run_at > c.now then b.run_at end,
           b.unique_key, b.trace_context, c.now, c.now, $17, $18, $19, b.place - 1
      from unnest($1::uuid[], $2::text[], $3::bytea[], $4::text[], $5::text[], $6::text[], $7::int[], $8::int[],
                  $9::bigint[], $10::int[], $11::timestamptz[], $12::bigint[], $13::text[], $14::bytea[])
           with ordinality as b (id, type, args, queue, tenant, metadata, priority, max_retries, timeout,
                                 determinism, run_at, delay_us, unique_key, trace_context, place),
           (select clock_timestamp() as now offset 0) c";

async fn insert_children(
    transaction: &Transaction<'_>, parent: &Parent, claim: &Claim, id: FanOutId, children: &[NewJob],
) -> Result<(), Error> {
    let children: Vec<&NewJob> = children.iter().collect();
    let columns = super::enqueue::Columns::of(&children);
    let mut params = columns.params();
    let parent_id = claim.job_id.as_uuid();
    params.extend([
        (&parent.tenant as _, Type::TEXT),
        (&parent.metadata as _, Type::TEXT),
        (&parent_id as _, Type::UUID),
        (&parent.root as _, Type::UUID),
        (&id.0 as _, Type::UUID),
    ]);
    transaction.rows(CHILDREN, &params).await?;
    Ok(())
}

async fn start(
    session: &mut Session, claim: &Claim, call_index: i32, fan_out: &FanOut, children: &[NewJob],
) -> Result<FanOutId, Error> {
    let id = FanOutId(Uuid::now_v7());
    let children = fan_out.adopt(id, children)?;
    let transaction = session.begin().await?;
    let parent = own(&transaction, claim).await?;
    let total = i32::try_from(children.len()).expect("at most 10000 children");
    let params = [
        (&id.0 as _, Type::UUID),
        (&claim.job_id.as_uuid() as _, Type::UUID),
        (&total as _, Type::INT4),
        (&fan_out.strategy.name() as _, Type::TEXT),
        (&fan_out.strategy.threshold() as _, Type::FLOAT8),
        (&fan_out.decided_within.map(saturating_micros) as _, Type::INT8),
        (&fan_out.cancel_on_fail as _, Type::BOOL),
    ];
    transaction.rows(FAN_OUT, &params).await?;
    let record = id.to_string().into_bytes();
    let params = [
        (&claim.job_id.as_uuid() as _, Type::UUID),
        (&call_index as _, Type::INT4),
        (&FAN_OUT_CHECKPOINT as _, Type::TEXT),
        (&record as _, Type::BYTEA),
    ];
    transaction.rows(CHECKPOINT, &params).await?;
    insert_children(&transaction, &parent, claim, id, &children).await?;
    suspend(&transaction, claim).await?;
    transaction.commit().await?;
    Ok(id)
}

fn child(row: &Row) -> Result<ChildOutcome, Error> {
    let status: &str = get(row, "status")?;
    Ok(ChildOutcome {
        index: u32::try_from(get::<i32>(row, "fan_out_index")?).unwrap_or(0),
        id: row::id(row, "id")?,
        job_type: JobType::from_storage(get(row, "type")?),
        status: status.parse::<JobStatus>().map_err(|_| Error::Corrupt(format!("status {status}")))?,
        result: get(row, "result")?,
        error: get(row, "last_error")?,
    })
}

async fn join(session: &mut Session, claim: &Claim, id: FanOutId) -> Result<Joined, Error> {
    let transaction = session.begin().await?;
    own(&transaction, claim).await?;
    // Under the lock: whoever decides it afterwards finds the parent waiting.
    let query = "select f.status, f.total_count from ebbtide_jobs.fan_outs f
                  where f.id = $1 and f.parent_job_id = $2 for update";
    let rows = transaction.rows(query, &[(&id.0, Type::UUID), (&claim.job_id.as_uuid(), Type::UUID)]).await?;
    let row = rows.first().ok_or(Error::FanOutNotFound(id))?;
    let status = FanOutStatus::from_storage(get(row, "status")?)?;
    if status == FanOutStatus::Pending {
        suspend(&transaction, claim).await?;
        transaction.commit().await?;
        return Ok(Joined::Suspended);
    }
    let total = u32::try_from(get::<i32>(row, "total_count")?).unwrap_or(0);
    let query = "select j.id, j.type, j.status, j.result, j.last_error, j.fan_out_index from ebbtide_jobs.jobs j
                  where j.fan_out_id = $1 order by j.fan_out_index, j.id";
    let rows = transaction.rows(query, &[(&id.0, Type::UUID)]).await?;
    let children = rows.iter().map(child).collect::<Result<_, _>>()?;
    Ok(Joined::Decided(FanOutOutcome { status, total, children }))
}

/// A statement that decides the pending fan-outs `f` which the condition names, as the expression says.
macro_rules! settling {
    ($status:expr, $condition:expr) => {
        concat!(
            "with due as materialized (
                select f.id from ebbtide_jobs.fan_outs f
                 where f.status = 'pending' and ($2::bigint is not null) and ",
            $condition,
            " order by f.created_at limit $1 for update of f skip locked),
            settled as (
                update ebbtide_jobs.fan_outs f set status = ",
            $status,
            ", updated_at = statement_timestamp()
                  from due where f.id = due.id and f.status = 'pending'
                returning f.id, f.parent_job_id, f.status), ",
            awake!("settled"),
            " select (select count(*) from settled) as settled, (select array_agg(distinct queue) from woken) as queues"
        )
    };
}

const COUNTED: &str = settling!(
    decided!("f.completed_count", "f.failed_count + f.cancelled_count"),
    "f.total_count <= f.completed_count + f.failed_count + f.cancelled_count"
);

const TIMED_OUT: &str = settling!("'failed'", "f.timeout_at <= statement_timestamp()");

const INCOMPLETE: &str = settling!(
    "'failed'",
    concat!(
        "f.created_at < statement_timestamp() - $2 * interval '1 microsecond'
         and (select count(*) from ebbtide_jobs.jobs c where c.fan_out_id = f.id) < f.total_count
         and (select 1 from ebbtide_jobs.jobs p where p.id = f.parent_job_id and p.status in ",
        live!(),
        ") is not null"
    )
);

const ABANDONED: &str = settling!(
    "'cancelled'",
    concat!(
        "f.created_at < statement_timestamp() - $2 * interval '1 microsecond'
         and not exists (select from ebbtide_jobs.jobs c where c.fan_out_id = f.id)
         and (select 1 from ebbtide_jobs.jobs p where p.id = f.parent_job_id and p.status in ",
        terminal!(),
        ") is not null"
    )
);

const JOINABLE: &str = concat!(
    "with due as materialized (
        select p.id from ebbtide_jobs.jobs p
         where p.status = 'waiting' and p.waiting_signal_name = '_fanout' and ($2::bigint is not null)
           and not exists (select from ebbtide_jobs.fan_outs o where o.parent_job_id = p.id and o.status = 'pending')
         order by p.id limit $1 for no key update of p skip locked),
    woken as (
        update ebbtide_jobs.jobs p set ",
    crate::storage::fragment::woken!("statement_timestamp()", "greatest(p.attempt - 1, 0)"),
    " from due where p.id = due.id returning p.queue)
    select (select count(*) from woken) as settled, (select array_agg(distinct queue) from woken) as queues"
);

async fn scan(session: &Session, query: &str, stale_age: Duration, limit: u32) -> Result<Settled, Error> {
    let params = [(&i64::from(limit) as _, Type::INT8), (&saturating_micros(stale_age) as _, Type::INT8)];
    let rows = session.rows(query, &params).await?;
    let row = row::only(&rows)?;
    let queues: Option<Vec<String>> = get(row, "queues")?;
    Ok(Settled {
        rows: u64::try_from(get::<i64>(row, "settled")?).unwrap_or(0),
        woken: queues.unwrap_or_default().into_iter().map(QueueName::from_storage).collect(),
    })
}

/// Cancels the unfinished children of failed fan-outs that ask for it. The children are locked before their fan-outs,
/// as whoever finishes one does.
pub(super) async fn stop_losers(session: &mut Session, limit: u32) -> Result<Settled, Error> {
    let transaction = session.begin().await?;
    let query = "select f.id from ebbtide_jobs.fan_outs f
                  where f.status = 'failed' and f.cancel_on_fail and not f.is_settled order by f.id limit $1";
    let rows = transaction.rows(query, &[(&i64::from(limit), Type::INT8)]).await?;
    let fan_outs = rows.iter().map(|row| get(row, "id")).collect::<Result<Vec<Uuid>, _>>()?;
    if fan_outs.is_empty() {
        return Ok(Settled::default());
    }
    let query = concat!(
        "select j.id from ebbtide_jobs.jobs j where j.fan_out_id = any($1) and j.status in ",
        live!(),
        " order by j.id for update"
    );
    let rows = transaction.rows(query, &[(&fan_outs, Type::UUID_ARRAY)]).await?;
    let children = rows.iter().map(|row| get(row, "id")).collect::<Result<Vec<Uuid>, _>>()?;
    if !children.is_empty() {
        control::stop(&transaction, &children).await?;
    }
    let query = "update ebbtide_jobs.fan_outs f set is_settled = true where f.id = any($1)";
    transaction.rows(query, &[(&fan_outs, Type::UUID_ARRAY)]).await?;
    transaction.commit().await?;
    Ok(Settled { rows: fan_outs.len() as u64, woken: Vec::new() })
}

#[async_trait]
impl FanOutStore for PostgresStorage {
    async fn start(
        &self, claim: &Claim, call_index: i32, fan_out: &FanOut, children: &[NewJob],
    ) -> Result<FanOutId, Error> {
        start(&mut self.session().await?, claim, call_index, fan_out, children).await
    }

    async fn join(&self, claim: &Claim, id: FanOutId) -> Result<Joined, Error> {
        join(&mut self.session().await?, claim, id).await
    }

    async fn settle(&self, what: FanOutScan, stale_age: Duration, limit: u32) -> Result<Settled, Error> {
        let mut session = self.session().await?;
        let query = match what {
            FanOutScan::Counted => COUNTED,
            FanOutScan::TimedOut => TIMED_OUT,
            FanOutScan::Incomplete => INCOMPLETE,
            FanOutScan::Abandoned => ABANDONED,
            FanOutScan::Joinable => JOINABLE,
            FanOutScan::Losers => return stop_losers(&mut session, limit).await,
        };
        scan(&session, query, stale_age, limit).await
    }
}
