//! Which claims were lost, and leases of the fleet.

use std::time::Duration;

use tokio_postgres::types::Type;
use uuid::Uuid;

use super::row;
use super::session::Sql;
use crate::error::Error;
use crate::job::{Claim, JobId};
use crate::limits::{WorkerId, saturating_micros};

const LOST: &str = "select c.id from unnest($1::uuid[], $2::uuid[]) as c (id, token)
      left join ebbtide_jobs.jobs j on j.id = c.id
     where j.id is null or j.status = 'cancelled' or (j.status = 'running' and j.dispatch_token <> c.token)";

pub(super) async fn lost(sql: &impl Sql, claims: &[Claim]) -> Result<Vec<JobId>, Error> {
    let ids: Vec<Uuid> = claims.iter().map(|claim| claim.job_id.as_uuid()).collect();
    let tokens: Vec<Uuid> = claims.iter().map(|claim| claim.token.0).collect();
    let rows = sql.rows(LOST, &[(&ids, Type::UUID_ARRAY), (&tokens, Type::UUID_ARRAY)]).await?;
    rows.iter().map(|lost| row::id(lost, "id")).collect()
}

const ACQUIRE: &str = "insert into ebbtide_jobs.leases as l (name, owner, expires_at)
    values ($1, $2, clock_timestamp() + $3 * interval '1 microsecond')
    on conflict (name) do update set owner = excluded.owner, expires_at = excluded.expires_at
     where l.owner = excluded.owner or l.expires_at <= clock_timestamp()
    returning 1";

pub(super) async fn acquire(sql: &impl Sql, name: &str, owner: &WorkerId, length: Duration) -> Result<bool, Error> {
    let params =
        [(&name as _, Type::TEXT), (&owner.as_str() as _, Type::TEXT), (&saturating_micros(length) as _, Type::INT8)];
    Ok(!sql.rows(ACQUIRE, &params).await?.is_empty())
}

pub(super) async fn release(sql: &impl Sql, name: &str, owner: &WorkerId) -> Result<(), Error> {
    let query = "delete from ebbtide_jobs.leases where name = $1 and owner = $2";
    sql.rows(query, &[(&name as _, Type::TEXT), (&owner.as_str() as _, Type::TEXT)]).await?;
    Ok(())
}
