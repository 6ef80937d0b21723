//! Signals and sleeps: what a run consumes, and what it waits for. Nobody else writes meanwhile.

use std::time::Duration;

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};
use uuid::Uuid;

use super::checkpoints::{own, save};
use super::row;
use super::threads::error;
use crate::error::Error;
use crate::job::{Claim, JobId};
use crate::limits::{QueueName, saturating_micros};
use crate::storage::run::{
    Checkpoint, DRAIN_MAX, ELAPSED, Received, SIGNAL, SIGNAL_DRAIN, SIGNAL_TIMEOUT, SLEEP, Slept, Until,
    WAITS_FOR_TIME, Woken, pack,
};

pub(super) fn send(db: &Connection, job: JobId, name: &str, payload: &[u8]) -> Result<(), Error> {
    // From the job's row, so that a signal never comes without one; foreign keys may be off.
    let query = "insert into signals (id, job_id, name, payload, created_at)
                 select ?5, id, ?2, ?3, ?4 from jobs where id = ?1";
    // The clock counts milliseconds; among signals of one, the id keeps the order in which they were sent.
    let params = params![job.as_uuid(), name, payload, row::now(db)?, Uuid::now_v7()];
    let stored = db.prepare_cached(query).and_then(|mut query| query.execute(params)).map_err(error)?;
    if stored == 1 { Ok(()) } else { Err(Error::JobNotFound(job)) }
}

/// What every wake-up writes. It is not a new attempt.
macro_rules! woken {
    () => {
        "status = 'pending', attempt = max(attempt - 1, 0), run_at = null, waiting_signal_name = '', updated_at = :now"
    };
}

pub(super) fn wake(db: &Connection, job: JobId, name: &str) -> Result<Option<QueueName>, Error> {
    const WAKE: &str = concat!(
        "update jobs set ",
        woken!(),
        " where id = :id and status = 'waiting' and waiting_signal_name in ('', :name) returning queue"
    );
    let mut query = db.prepare_cached(WAKE).map_err(error)?;
    let params = rusqlite::named_params! { ":id": job.as_uuid(), ":name": name, ":now": row::now(db)? };
    let queue: Option<String> = query.query_row(params, |row| row.get(0)).optional().map_err(error)?;
    Ok(queue.map(QueueName::from_storage))
}

/// The deadline that the first call recorded, and whether the wait was over already.
fn recorded(db: &Connection, claim: &Claim, call_index: i32, call_type: &str) -> Result<Option<(i64, bool)>, Error> {
    let query = "select result, error_kind from checkpoints where job_id = ?1 and call_index = ?2 and call_type = ?3";
    let params = params![claim.job_id.as_uuid(), call_index, call_type];
    let found: Option<(Option<Vec<u8>>, Option<String>)> = db
        .prepare_cached(query)
        .and_then(|mut query| query.query_row(params, |row| Ok((row.get(0)?, row.get(1)?))).optional())
        .map_err(error)?;
    let Some((result, kind)) = found else { return Ok(None) };
    let text = result.as_deref().and_then(|text| std::str::from_utf8(text).ok());
    let deadline = text.and_then(|text| text.parse().ok());
    let deadline = deadline.ok_or_else(|| Error::Corrupt("a deadline's record".to_owned()))?;
    Ok(Some((deadline, kind.as_deref() == Some(ELAPSED))))
}

fn record(call_index: i32, call_type: String, result: Vec<u8>) -> Checkpoint {
    let (span_end, result_shape) = (call_index + 1, String::new());
    Checkpoint { call_index, call_type, result: Some(result), error: None, span_end, result_shape }
}

fn suspend(db: &Connection, claim: &Claim, name: &str, until: Option<i64>) -> Result<(), Error> {
    // A time left over from an earlier wait goes, or the job would wake for nothing.
    let query = "update jobs
                    set status = 'waiting', run_at = ?2, waiting_signal_name = ?3, locked_by = '', locked_until = null,
                        last_heartbeat_at = null, dispatch_token = null, updated_at = ?4
                  where id = ?1";
    let params = params![claim.job_id.as_uuid(), until, name, row::now(db)?];
    db.prepare_cached(query).and_then(|mut query| query.execute(params)).map_err(error)?;
    Ok(())
}

fn set_elapsed(db: &Connection, claim: &Claim, call_index: i32, call_type: &str) -> Result<(), Error> {
    let query = "update checkpoints set error_kind = ?4 where job_id = ?1 and call_index = ?2 and call_type = ?3";
    let params = params![claim.job_id.as_uuid(), call_index, call_type, ELAPSED];
    db.prepare_cached(query).and_then(|mut query| query.execute(params)).map_err(error)?;
    Ok(())
}

type Pending = (Uuid, Vec<u8>);

fn pending(db: &Connection, job: JobId, name: &str, until: Option<i64>, limit: i64) -> Result<Vec<Pending>, Error> {
    let query = "select id, coalesce(payload, x'') from signals
                  where job_id = ?1 and name = ?2 and consumed_at is null and (?3 is null or created_at <= ?3)
                  order by created_at, id limit ?4";
    let mut query = db.prepare_cached(query).map_err(error)?;
    let rows = query.query_map(params![job.as_uuid(), name, until, limit], |row| Ok((row.get(0)?, row.get(1)?)));
    rows.map_err(error)?.collect::<Result<_, _>>().map_err(error)
}

fn consume(db: &Connection, signals: &[Pending]) -> Result<(), Error> {
    let now = row::now(db)?;
    let mut query = db.prepare_cached("update signals set consumed_at = ?2 where id = ?1").map_err(error)?;
    for (id, _) in signals {
        query.execute(params![id, now]).map_err(error)?;
    }
    Ok(())
}

pub(super) fn receive(
    db: &Connection, claim: &Claim, call_index: i32, name: &str, timeout: Option<Duration>,
) -> Result<Received, Error> {
    own(db, claim)?;
    let timed = format!("{SIGNAL_TIMEOUT}{name}");
    let now = row::now(db)?;
    let mut until = None;
    if let Some(timeout) = timeout {
        let deadline = match recorded(db, claim, call_index, &timed)? {
            Some((_, true)) => return Ok(Received::TimedOut),
            Some((deadline, false)) => deadline,
            None => {
                let deadline = now.saturating_add(saturating_micros(timeout));
                save(db, claim, &record(call_index, timed.clone(), deadline.to_string().into_bytes()))?;
                deadline
            }
        };
        until = Some(deadline);
    }
    if let Some(signal) = pending(db, claim.job_id, name, until, 1)?.pop() {
        consume(db, std::slice::from_ref(&signal))?;
        save(db, claim, &record(call_index, format!("{SIGNAL}{name}"), signal.1.clone()))?;
        return Ok(Received::Signal(signal.1));
    }
    if until.is_some_and(|until| until <= now) {
        set_elapsed(db, claim, call_index, &timed)?;
        return Ok(Received::TimedOut);
    }
    suspend(db, claim, name, until)?;
    Ok(Received::Suspended)
}

pub(super) fn peek(db: &Connection, job: JobId, name: &str) -> Result<Option<Vec<u8>>, Error> {
    Ok(pending(db, job, name, None, 1)?.pop().map(|(_, payload)| payload))
}

pub(super) fn drain(db: &Connection, claim: &Claim, call_index: i32, name: &str) -> Result<Vec<Vec<u8>>, Error> {
    own(db, claim)?;
    let found = pending(db, claim.job_id, name, None, DRAIN_MAX)?;
    consume(db, &found)?;
    let payloads: Vec<Vec<u8>> = found.into_iter().map(|(_, payload)| payload).collect();
    save(db, claim, &record(call_index, format!("{SIGNAL_DRAIN}{name}"), pack(&payloads)))?;
    Ok(payloads)
}

pub(super) fn sleep(db: &Connection, claim: &Claim, call_index: i32, until: Until) -> Result<Slept, Error> {
    own(db, claim)?;
    let now = row::now(db)?;
    let deadline = match recorded(db, claim, call_index, SLEEP)? {
        Some((_, true)) => return Ok(Slept::Elapsed),
        Some((deadline, false)) => deadline,
        None => {
            let deadline = match until {
                Until::After(wait) => now.saturating_add(saturating_micros(wait)).min(latest()),
                Until::At(at) => at.as_microsecond(),
            };
            save(db, claim, &record(call_index, SLEEP.to_owned(), deadline.to_string().into_bytes()))?;
            deadline
        }
    };
    if deadline <= now {
        set_elapsed(db, claim, call_index, SLEEP)?;
        return Ok(Slept::Elapsed);
    }
    suspend(db, claim, WAITS_FOR_TIME, Some(deadline))?;
    Ok(Slept::Suspended)
}

fn latest() -> i64 {
    Timestamp::MAX.as_microsecond()
}

pub(super) fn wake_due(db: &Connection, limit: u32) -> Result<Woken, Error> {
    let now = row::now(db)?;
    let query = "select id from jobs where status = 'waiting' and run_at is not null and run_at <= ?1
                  order by run_at limit ?2";
    let mut query = db.prepare_cached(query).map_err(error)?;
    let ids = query.query_map(params![now, limit], |row| row.get(0)).map_err(error)?;
    let ids: Vec<Uuid> = ids.collect::<Result<_, _>>().map_err(error)?;
    wake_all(db, &ids, now)
}

fn wake_all(db: &Connection, ids: &[Uuid], now: i64) -> Result<Woken, Error> {
    const WAKE: &str = concat!("update jobs set ", woken!(), " where id = :id and status = 'waiting' returning queue");
    let mut query = db.prepare_cached(WAKE).map_err(error)?;
    let mut woken = Woken::default();
    for id in ids {
        let params = rusqlite::named_params! { ":id": id, ":now": now };
        let queue: Option<String> = query.query_row(params, |row| row.get(0)).optional().map_err(error)?;
        woken.jobs += u64::from(queue.is_some());
        woken.queues.extend(queue.map(QueueName::from_storage));
    }
    woken.queues.sort_unstable();
    woken.queues.dedup();
    Ok(woken)
}

pub(super) fn wake_signalled(
    db: &Connection, after: Option<JobId>, limit: u32,
) -> Result<(Woken, Option<JobId>), Error> {
    let after = after.map_or(Uuid::nil(), |id| id.as_uuid());
    let query = "select j.id, exists (
                    select 1 from signals s
                     where s.job_id = j.id and s.consumed_at is null and j.waiting_signal_name in ('', s.name)
                       and (j.run_at is null or s.created_at <= j.run_at))
                   from jobs j where j.status = 'waiting' and j.id > ?1 order by j.id limit ?2";
    let mut query = db.prepare_cached(query).map_err(error)?;
    let rows = query.query_map(params![after, limit], |row| Ok((row.get(0)?, row.get(1)?))).map_err(error)?;
    let looked: Vec<(Uuid, bool)> = rows.collect::<Result<_, _>>().map_err(error)?;
    let ids: Vec<Uuid> = looked.iter().filter(|(_, is_due)| *is_due).map(|(id, _)| *id).collect();
    let woken = wake_all(db, &ids, row::now(db)?)?;
    let is_full = looked.len() as u64 == u64::from(limit);
    let last = looked.last().filter(|_| is_full).and_then(|(id, _)| JobId::from_uuid(*id));
    Ok((woken, last))
}
