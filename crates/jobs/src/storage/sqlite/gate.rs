//! Slots and spans of a fleet. Nobody else writes meanwhile, so that a count is as good as a lock.

use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, Params, params};

use super::SqliteStorage;
use super::row;
use super::threads::error;
use crate::error::Error;
use crate::gate::{Rated, slot_owner};
use crate::job::Claim;
use crate::limits::saturating_micros;
use crate::storage::GateStore;

const SECOND_US: i64 = 1_000_000;

fn execute(db: &Connection, query: &str, params: impl Params) -> Result<u64, Error> {
    let written = db.prepare_cached(query).and_then(|mut query| query.execute(params)).map_err(error)?;
    Ok(written as u64)
}

fn take_slot(db: &Connection, name: &str, limit: u32, claim: &Claim, ttl: Duration) -> Result<bool, Error> {
    let now = row::now(db)?;
    let query = "insert into concurrency_slots (slot_name, job_id, worker_id, expires_at)
                 select ?1, ?2, ?3, ?4
                  where (select count(*) from concurrency_slots
                          where slot_name = ?1 and expires_at > ?5 and job_id <> ?2) < ?6
                 on conflict (slot_name, job_id) do update
                    set worker_id = excluded.worker_id, expires_at = excluded.expires_at";
    let until = now.saturating_add(saturating_micros(ttl));
    let params = params![name, claim.job_id.as_uuid(), slot_owner(claim), until, now, limit];
    Ok(execute(db, query, params)? == 1)
}

fn free_slots(db: &Connection, claim: &Claim) -> Result<(), Error> {
    let query = "delete from concurrency_slots where job_id = ?1 and worker_id = ?2";
    execute(db, query, params![claim.job_id.as_uuid(), slot_owner(claim)]).map(|_| ())
}

fn renew_slots(db: &Connection, claim: &Claim, ttl: Duration) -> Result<(), Error> {
    let until = row::now(db)?.saturating_add(saturating_micros(ttl));
    let query = "update concurrency_slots set expires_at = ?3 where job_id = ?1 and worker_id = ?2";
    execute(db, query, params![claim.job_id.as_uuid(), slot_owner(claim), until]).map(|_| ())
}

fn sweep_slots(db: &Connection, limit: u32) -> Result<u64, Error> {
    let query = "delete from concurrency_slots where rowid in (
                    select rowid from concurrency_slots where expires_at <= ?1 limit ?2)";
    execute(db, query, params![row::now(db)?, limit])
}

fn take_rate(db: &Connection, name: &str, limit: i64, seconds: u32) -> Result<Rated, Error> {
    let now = row::now(db)?;
    let length = i64::from(seconds) * SECOND_US;
    let start = now.div_euclid(length) * length;
    let old = "delete from rate_limit_windows where limit_name = ?1 and window_start < ?2";
    execute(db, old, params![name, start])?;
    let query = "insert into rate_limit_windows (limit_name, window_start, count, created_at, updated_at)
                 values (?1, ?2, 1, ?3, ?3)
                 on conflict (limit_name, window_start) do update
                    set count = count + 1, updated_at = excluded.updated_at where count < ?4";
    if execute(db, query, params![name, start, now, limit])? == 1 {
        return Ok(Rated::Granted { span: start / SECOND_US });
    }
    let wait = u64::try_from(start + length - now).unwrap_or(0).max(1);
    Ok(Rated::Full { wait: Duration::from_micros(wait) })
}

fn refund_rate(db: &Connection, name: &str, span: i64) -> Result<(), Error> {
    let query = "update rate_limit_windows set count = count - 1
                  where limit_name = ?1 and window_start = ?2 and count > 0";
    execute(db, query, params![name, span * SECOND_US]).map(|_| ())
}

fn put_back(db: &Connection, claim: &Claim, delay: Duration) -> Result<(), Error> {
    let now = row::now(db)?;
    let query = "update jobs
                    set status = 'pending', attempt = max(attempt - 1, 0), started_at = null, run_at = ?4,
                        locked_by = '', locked_until = null, last_heartbeat_at = null, dispatch_token = null,
                        updated_at = ?5
                  where id = ?1 and locked_by = ?2 and dispatch_token = ?3 and status = 'running'";
    let run_at = now.saturating_add(saturating_micros(delay));
    let params = params![claim.job_id.as_uuid(), claim.worker.as_str(), claim.token.0, run_at, now];
    if execute(db, query, params)? == 1 { Ok(()) } else { Err(Error::JobNotOwned(claim.job_id)) }
}

#[async_trait]
impl GateStore for SqliteStorage {
    async fn take_slot(&self, name: &str, limit: u32, claim: &Claim, ttl: Duration) -> Result<bool, Error> {
        let (name, claim) = (name.to_owned(), claim.clone());
        self.writer.run(move |db| take_slot(db, &name, limit, &claim, ttl)).await
    }

    async fn free_slots(&self, claim: &Claim) -> Result<(), Error> {
        let claim = claim.clone();
        self.writer.run(move |db| free_slots(db, &claim)).await
    }

    async fn renew_slots(&self, claim: &Claim, ttl: Duration) -> Result<(), Error> {
        let claim = claim.clone();
        self.writer.run(move |db| renew_slots(db, &claim, ttl)).await
    }

    async fn sweep_slots(&self, limit: u32) -> Result<u64, Error> {
        self.writer.run(move |db| sweep_slots(db, limit)).await
    }

    async fn take_rate(&self, name: &str, limit: i64, seconds: u32) -> Result<Rated, Error> {
        let name = name.to_owned();
        self.writer.run(move |db| take_rate(db, &name, limit, seconds)).await
    }

    async fn refund_rate(&self, name: &str, span: i64) -> Result<(), Error> {
        let name = name.to_owned();
        self.writer.run(move |db| refund_rate(db, &name, span)).await
    }

    async fn put_back(&self, claim: &Claim, delay: Duration) -> Result<(), Error> {
        let claim = claim.clone();
        self.writer.run(move |db| put_back(db, &claim, delay)).await
    }
}
