//! Slots and spans of a fleet.

use std::time::Duration;

use async_trait::async_trait;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::PostgresStorage;
use super::row::{self, get};
use super::session::{Session, Sql};
use crate::error::Error;
use crate::gate::{Rated, slot_owner};
use crate::job::Claim;
use crate::limits::saturating_micros;
use crate::storage::GateStore;

/// Whoever wants a slot of a name first holds its row without a job, so that two never count at once.
const HOLD: &str = "insert into ebbtide_jobs.concurrency_slots as s (slot_name, job_id, worker_id, expires_at)
    values ($1, $2, '', 'infinity') on conflict (slot_name, job_id) do update set worker_id = '' returning 1";

const TAKE: &str = "insert into ebbtide_jobs.concurrency_slots (slot_name, job_id, worker_id, expires_at)
    select $1, $2, $3, clock_timestamp() + $4 * interval '1 microsecond'
     where (select count(*) from ebbtide_jobs.concurrency_slots s
             where s.slot_name = $1 and s.expires_at > clock_timestamp() and s.job_id not in ($2, $6)) < $5
    on conflict (slot_name, job_id) do update set worker_id = excluded.worker_id, expires_at = excluded.expires_at
    returning 1";

async fn take_slot(session: &mut Session, name: &str, limit: u32, claim: &Claim, ttl: Duration) -> Result<bool, Error> {
    let transaction = session.begin().await?;
    let nobody = Uuid::nil();
    transaction.rows(HOLD, &[(&name, Type::TEXT), (&nobody, Type::UUID)]).await?;
    let params = [
        (&name as _, Type::TEXT),
        (&claim.job_id.as_uuid() as _, Type::UUID),
        (&slot_owner(claim) as _, Type::TEXT),
        (&saturating_micros(ttl) as _, Type::INT8),
        (&i64::from(limit) as _, Type::INT8),
        (&nobody as _, Type::UUID),
    ];
    let is_taken = !transaction.rows(TAKE, &params).await?.is_empty();
    transaction.commit().await?;
    Ok(is_taken)
}

async fn free_slots(sql: &impl Sql, claim: &Claim) -> Result<(), Error> {
    let query = "delete from ebbtide_jobs.concurrency_slots where job_id = $1 and worker_id = $2";
    let params = [(&claim.job_id.as_uuid() as _, Type::UUID), (&slot_owner(claim) as _, Type::TEXT)];
    sql.rows(query, &params).await?;
    Ok(())
}

async fn renew_slots(sql: &impl Sql, claim: &Claim, ttl: Duration) -> Result<(), Error> {
    let query = "update ebbtide_jobs.concurrency_slots
                    set expires_at = clock_timestamp() + $3 * interval '1 microsecond'
                  where job_id = $1 and worker_id = $2";
    let params = [
        (&claim.job_id.as_uuid() as _, Type::UUID),
        (&slot_owner(claim) as _, Type::TEXT),
        (&saturating_micros(ttl) as _, Type::INT8),
    ];
    sql.rows(query, &params).await?;
    Ok(())
}

async fn sweep_slots(sql: &impl Sql, limit: u32) -> Result<u64, Error> {
    let query = "with old as materialized (
            select slot_name, job_id from ebbtide_jobs.concurrency_slots
             where expires_at <= clock_timestamp() limit $1 for update skip locked)
        delete from ebbtide_jobs.concurrency_slots s using old
         where s.slot_name = old.slot_name and s.job_id = old.job_id returning 1";
    Ok(sql.rows(query, &[(&i64::from(limit), Type::INT8)]).await?.len() as u64)
}

const RATE: &str = "with span as materialized (
        select floor(extract(epoch from clock_timestamp()) / $3)::bigint * $3 as start),
    gone as (
        delete from ebbtide_jobs.rate_limit_windows o using span
         where o.limit_name = $1 and o.window_start < to_timestamp(span.start)),
    counted as (
        insert into ebbtide_jobs.rate_limit_windows as r (limit_name, window_start, count)
        select $1, to_timestamp(span.start), 1 from span
        on conflict (limit_name, window_start) do update
           set count = r.count + 1, updated_at = clock_timestamp() where r.count < $2
        returning 1)
    select span.start, exists (select from counted) as is_granted,
           greatest(((span.start + $3 - extract(epoch from clock_timestamp())) * 1000000)::bigint, 1) as wait_us
      from span";

async fn take_rate(sql: &impl Sql, name: &str, limit: i64, seconds: u32) -> Result<Rated, Error> {
    let params = [(&name as _, Type::TEXT), (&limit as _, Type::INT8), (&i64::from(seconds) as _, Type::INT8)];
    let rows = sql.rows(RATE, &params).await?;
    let row = row::only(&rows)?;
    if get(row, "is_granted")? {
        return Ok(Rated::Granted { span: get(row, "start")? });
    }
    let wait = u64::try_from(get::<i64>(row, "wait_us")?).unwrap_or(1);
    Ok(Rated::Full { wait: Duration::from_micros(wait) })
}

async fn refund_rate(sql: &impl Sql, name: &str, span: i64) -> Result<(), Error> {
    let query = "update ebbtide_jobs.rate_limit_windows set count = count - 1
                  where limit_name = $1 and window_start = to_timestamp($2::bigint) and count > 0";
    sql.rows(query, &[(&name as _, Type::TEXT), (&span as _, Type::INT8)]).await?;
    Ok(())
}

async fn put_back(sql: &impl Sql, claim: &Claim, delay: Duration) -> Result<(), Error> {
    let query = "update ebbtide_jobs.jobs j
                    set status = 'pending', attempt = greatest(j.attempt - 1, 0), started_at = null,
                        run_at = statement_timestamp() + $4 * interval '1 microsecond', locked_by = '',
                        locked_until = null, last_heartbeat_at = null, dispatch_token = null,
                        updated_at = statement_timestamp()
                  where j.id = $1 and j.locked_by = $2 and j.dispatch_token = $3 and j.status = 'running' returning 1";
    let params = [
        (&claim.job_id.as_uuid() as _, Type::UUID),
        (&claim.worker.as_str() as _, Type::TEXT),
        (&claim.token.0 as _, Type::UUID),
        (&saturating_micros(delay) as _, Type::INT8),
    ];
    if sql.rows(query, &params).await?.is_empty() {
        return Err(Error::JobNotOwned(claim.job_id));
    }
    Ok(())
}

#[async_trait]
impl GateStore for PostgresStorage {
    async fn take_slot(&self, name: &str, limit: u32, claim: &Claim, ttl: Duration) -> Result<bool, Error> {
        take_slot(&mut self.session().await?, name, limit, claim, ttl).await
    }

    async fn free_slots(&self, claim: &Claim) -> Result<(), Error> {
        free_slots(&self.session().await?, claim).await
    }

    async fn renew_slots(&self, claim: &Claim, ttl: Duration) -> Result<(), Error> {
        renew_slots(&self.session().await?, claim, ttl).await
    }

    async fn sweep_slots(&self, limit: u32) -> Result<u64, Error> {
        sweep_slots(&self.session().await?, limit).await
    }

    async fn take_rate(&self, name: &str, limit: i64, seconds: u32) -> Result<Rated, Error> {
        take_rate(&self.session().await?, name, limit, seconds).await
    }

    async fn refund_rate(&self, name: &str, span: i64) -> Result<(), Error> {
        refund_rate(&self.session().await?, name, span).await
    }

    async fn put_back(&self, claim: &Claim, delay: Duration) -> Result<(), Error> {
        put_back(&self.session().await?, claim, delay).await
    }
}
