//! Signals and sleeps: what a run consumes, and what it waits for.

use std::time::Duration;

use jiff::Timestamp;
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::checkpoints::{own, save};
use super::row::{self, get};
use super::session::{Session, Sql, Transaction};
use crate::error::Error;
use crate::job::{Claim, JobId};
use crate::limits::{QueueName, saturating_micros};
use crate::storage::run::{
    Checkpoint, DRAIN_MAX, ELAPSED, Received, SIGNAL, SIGNAL_DRAIN, SIGNAL_TIMEOUT, SLEEP, Slept, Until,
    WAITS_FOR_TIME, Woken, pack,
};

// The job's row is held, so that it cannot be deleted meanwhile: a pending signal without a job could never be swept.
const SEND: &str = "with target as materialized (select j.id from ebbtide_jobs.jobs j where j.id = $1 for key share)
    insert into ebbtide_jobs.signals (job_id, name, payload) select target.id, $2, $3 from target returning 1";

pub(super) async fn send(sql: &impl Sql, job: JobId, name: &str, payload: &[u8]) -> Result<(), Error> {
    let params = [(&job.as_uuid() as _, Type::UUID), (&name as _, Type::TEXT), (&payload as _, Type::BYTEA)];
    if sql.rows(SEND, &params).await?.is_empty() {
        return Err(Error::JobNotFound(job));
    }
    Ok(())
}

/// What every wake-up writes. It is not a new attempt.
macro_rules! woken {
    () => {
        "status = 'pending', attempt = greatest(j.attempt - 1, 0), run_at = null, waiting_signal_name = '', \
         updated_at = statement_timestamp()"
    };
}

pub(super) async fn wake(sql: &impl Sql, job: JobId, name: &str) -> Result<Option<QueueName>, Error> {
    const WAKE: &str = concat!(
        "update ebbtide_jobs.jobs j set ",
        woken!(),
        " where j.id = $1 and j.status = 'waiting' and j.waiting_signal_name in ('', $2) returning j.queue"
    );
    let rows = sql.rows(WAKE, &[(&job.as_uuid(), Type::UUID), (&name, Type::TEXT)]).await?;
    rows.first().map(|row| Ok(QueueName::from_storage(get(row, "queue")?))).transpose()
}

async fn clock(transaction: &Transaction<'_>) -> Result<Timestamp, Error> {
    get(row::only(&transaction.rows("select clock_timestamp() as now", &[]).await?)?, "now")
}

/// The deadline that the first call recorded, and whether the wait was over already.
async fn recorded(
    transaction: &Transaction<'_>, claim: &Claim, call_index: i32, call_type: &str,
) -> Result<Option<(Timestamp, bool)>, Error> {
    let query = "select result, error_kind from ebbtide_jobs.checkpoints
                  where job_id = $1 and call_index = $2 and call_type = $3";
    let params =
        [(&claim.job_id.as_uuid() as _, Type::UUID), (&call_index as _, Type::INT4), (&call_type as _, Type::TEXT)];
    let rows = transaction.rows(query, &params).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    let deadline = deadline(get::<Option<Vec<u8>>>(row, "result")?.as_deref())?;
    Ok(Some((deadline, get::<Option<&str>>(row, "error_kind")? == Some(ELAPSED))))
}

/// A deadline as a record holds it: microseconds since 1970.
fn deadline(result: Option<&[u8]>) -> Result<Timestamp, Error> {
    let micros = result.and_then(|text| std::str::from_utf8(text).ok()).and_then(|text| text.parse().ok());
    let deadline = micros.and_then(|micros| Timestamp::from_microsecond(micros).ok());
    deadline.ok_or_else(|| Error::Corrupt("a deadline's record".to_owned()))
}

fn record(call_index: i32, call_type: String, result: Option<Vec<u8>>) -> Checkpoint {
    let span_end = call_index + 1;
    Checkpoint { call_index, call_type, result, error: None, span_end, result_shape: String::new() }
}

fn record_of(call_index: i32, call_type: String, deadline: Timestamp) -> Checkpoint {
    record(call_index, call_type, Some(deadline.as_microsecond().to_string().into_bytes()))
}

async fn suspend(
    transaction: &Transaction<'_>, claim: &Claim, name: &str, until: Option<Timestamp>,
) -> Result<(), Error> {
    // A time left over from an earlier wait goes, or the job would wake for nothing.
    let query = "update ebbtide_jobs.jobs j
                    set status = 'waiting', run_at = $2, waiting_signal_name = $3, locked_by = '', locked_until = null,
                        last_heartbeat_at = null, dispatch_token = null, updated_at = statement_timestamp()
                  where j.id = $1";
    let params =
        [(&claim.job_id.as_uuid() as _, Type::UUID), (&until as _, Type::TIMESTAMPTZ), (&name as _, Type::TEXT)];
    transaction.rows(query, &params).await?;
    Ok(())
}

async fn set_elapsed(
    transaction: &Transaction<'_>, claim: &Claim, call_index: i32, call_type: &str,
) -> Result<(), Error> {
    let query = "update ebbtide_jobs.checkpoints set error_kind = $4
                  where job_id = $1 and call_index = $2 and call_type = $3";
    let params = [
        (&claim.job_id.as_uuid() as _, Type::UUID),
        (&call_index as _, Type::INT4),
        (&call_type as _, Type::TEXT),
        (&ELAPSED as _, Type::TEXT),
    ];
    transaction.rows(query, &params).await?;
    Ok(())
}

struct Pending {
    id: Uuid,
    payload: Vec<u8>,
}

async fn pending(
    transaction: &Transaction<'_>, job: JobId, name: &str, until: Option<Timestamp>, limit: i64,
) -> Result<Vec<Pending>, Error> {
    let query = "select s.id, s.payload from ebbtide_jobs.signals s
                  where s.job_id = $1 and s.name = $2 and s.consumed_at is null
                    and ($3::timestamptz is null or s.created_at <= $3)
                  order by s.created_at, s.id limit $4 for update";
    let params = [
        (&job.as_uuid() as _, Type::UUID),
        (&name as _, Type::TEXT),
        (&until as _, Type::TIMESTAMPTZ),
        (&limit as _, Type::INT8),
    ];
    let rows = transaction.rows(query, &params).await?;
    let pending = |row: &Row| {
        Ok(Pending { id: get(row, "id")?, payload: get::<Option<Vec<u8>>>(row, "payload")?.unwrap_or_default() })
    };
    rows.iter().map(pending).collect()
}

async fn consume(transaction: &Transaction<'_>, signals: &[Pending]) -> Result<(), Error> {
    let ids: Vec<Uuid> = signals.iter().map(|signal| signal.id).collect();
    let query = "update ebbtide_jobs.signals set consumed_at = clock_timestamp() where id = any($1)";
    transaction.rows(query, &[(&ids, Type::UUID_ARRAY)]).await?;
    Ok(())
}

pub(super) async fn receive(
    session: &mut Session, claim: &Claim, call_index: i32, name: &str, timeout: Option<Duration>,
) -> Result<Received, Error> {
    let transaction = session.begin().await?;
    own(&transaction, claim).await?;
    let timed = format!("{SIGNAL_TIMEOUT}{name}");
    let now = clock(&transaction).await?;
    let mut until = None;
    if let Some(timeout) = timeout {
        let deadline = match recorded(&transaction, claim, call_index, &timed).await? {
            Some((_, true)) => return Ok(Received::TimedOut),
            Some((deadline, false)) => deadline,
            None => {
                let deadline = later(now, timeout);
                save(&transaction, claim, &record_of(call_index, timed.clone(), deadline)).await?;
                deadline
            }
        };
        until = Some(deadline);
    }
    let mut found = pending(&transaction, claim.job_id, name, until, 1).await?;
    let received = if let Some(signal) = found.pop() {
        consume(&transaction, std::slice::from_ref(&signal)).await?;
        let taken = record(call_index, format!("{SIGNAL}{name}"), Some(signal.payload.clone()));
        save(&transaction, claim, &taken).await?;
        Received::Signal(signal.payload)
    } else if until.is_some_and(|until| until <= now) {
        set_elapsed(&transaction, claim, call_index, &timed).await?;
        Received::TimedOut
    } else {
        suspend(&transaction, claim, name, until).await?;
        Received::Suspended
    };
    transaction.commit().await?;
    Ok(received)
}

fn later(now: Timestamp, by: Duration) -> Timestamp {
    let micros = now.as_microsecond().saturating_add(saturating_micros(by));
    Timestamp::from_microsecond(micros).unwrap_or(Timestamp::MAX)
}

pub(super) async fn peek(sql: &impl Sql, job: JobId, name: &str) -> Result<Option<Vec<u8>>, Error> {
    let query = "select s.payload from ebbtide_jobs.signals s
                  where s.job_id = $1 and s.name = $2 and s.consumed_at is null order by s.created_at, s.id limit 1";
    let rows = sql.rows(query, &[(&job.as_uuid(), Type::UUID), (&name, Type::TEXT)]).await?;
    let payload = |row: &Row| Ok(get::<Option<Vec<u8>>>(row, "payload")?.unwrap_or_default());
    rows.first().map(payload).transpose()
}

pub(super) async fn drain(
    session: &mut Session, claim: &Claim, call_index: i32, name: &str,
) -> Result<Vec<Vec<u8>>, Error> {
    let transaction = session.begin().await?;
    own(&transaction, claim).await?;
    let found = pending(&transaction, claim.job_id, name, None, DRAIN_MAX).await?;
    consume(&transaction, &found).await?;
    let payloads: Vec<Vec<u8>> = found.into_iter().map(|signal| signal.payload).collect();
    save(&transaction, claim, &record(call_index, format!("{SIGNAL_DRAIN}{name}"), Some(pack(&payloads)))).await?;
    transaction.commit().await?;
    Ok(payloads)
}

pub(super) async fn sleep(session: &mut Session, claim: &Claim, call_index: i32, until: Until) -> Result<Slept, Error> {
    let transaction = session.begin().await?;
    own(&transaction, claim).await?;
    let now = clock(&transaction).await?;
    let deadline = match recorded(&transaction, claim, call_index, SLEEP).await? {
        Some((_, true)) => return Ok(Slept::Elapsed),
        Some((deadline, false)) => deadline,
        None => {
            let deadline = match until {
                Until::After(wait) => later(now, wait),
                Until::At(at) => at,
            };
            save(&transaction, claim, &record_of(call_index, SLEEP.to_owned(), deadline)).await?;
            deadline
        }
    };
    let slept = if deadline <= now {
        set_elapsed(&transaction, claim, call_index, SLEEP).await?;
        Slept::Elapsed
    } else {
        suspend(&transaction, claim, WAITS_FOR_TIME, Some(deadline)).await?;
        Slept::Suspended
    };
    transaction.commit().await?;
    Ok(slept)
}

pub(super) async fn wake_due(sql: &impl Sql, limit: u32) -> Result<Woken, Error> {
    const DUE: &str = concat!(
        "with due as materialized (
            select j.id from ebbtide_jobs.jobs j
             where j.status = 'waiting' and j.run_at is not null and j.run_at <= statement_timestamp()
             order by j.run_at limit $1 for update skip locked)
         update ebbtide_jobs.jobs j set ",
        woken!(),
        " from due where j.id = due.id returning j.queue"
    );
    woken(&sql.rows(DUE, &[(&i64::from(limit), Type::INT8)]).await?)
}

pub(super) fn woken(rows: &[Row]) -> Result<Woken, Error> {
    let mut queues = Vec::new();
    for row in rows {
        queues.push(QueueName::from_storage(get(row, "queue")?));
    }
    queues.sort_unstable();
    queues.dedup();
    Ok(Woken { jobs: rows.len() as u64, queues })
}

const SIGNALLED: &str = concat!(
    "with looked as materialized (
        select j.id, j.waiting_signal_name from ebbtide_jobs.jobs j
         where j.status = 'waiting' and j.id > $1 order by j.id limit $2),
    due as materialized (
        select j.id from looked join ebbtide_jobs.jobs j on j.id = looked.id and j.status = 'waiting'
         where exists (select from ebbtide_jobs.signals s
                        where s.job_id = looked.id and s.consumed_at is null
                          and looked.waiting_signal_name in ('', s.name)
                          and (j.run_at is null or s.created_at <= j.run_at))
           for update of j skip locked),
    woken as (
        update ebbtide_jobs.jobs j set ",
    woken!(),
    " from due where j.id = due.id returning j.queue)
    select queue, null::uuid as last from woken
    union all
    select null, (select id from looked order by id desc limit 1) where (select count(*) from looked) = $2"
);

pub(super) async fn wake_signalled(
    sql: &impl Sql, after: Option<JobId>, limit: u32,
) -> Result<(Woken, Option<JobId>), Error> {
    let after = after.map_or(Uuid::nil(), |id| id.as_uuid());
    let rows = sql.rows(SIGNALLED, &[(&after, Type::UUID), (&i64::from(limit), Type::INT8)]).await?;
    let mut last = None;
    let mut queues = Vec::new();
    let mut jobs = 0;
    for row in &rows {
        match get::<Option<String>>(row, "queue")? {
            Some(queue) => {
                jobs += 1;
                queues.push(QueueName::from_storage(queue));
            }
            None => last = get::<Option<Uuid>>(row, "last")?.and_then(JobId::from_uuid),
        }
    }
    queues.sort_unstable();
    queues.dedup();
    Ok((Woken { jobs, queues }, last))
}
