//! Which claims were lost, and leases of the fleet.

use std::time::Duration;

use rusqlite::{Connection, params};

use super::row;
use super::threads::error;
use crate::error::Error;
use crate::job::{Claim, JobId};
use crate::limits::{WorkerId, saturating_micros};

pub(super) fn lost(db: &Connection, claims: &[Claim]) -> Result<Vec<JobId>, Error> {
    // One that is not lost is there, and neither cancelled nor claimed by somebody else.
    let query = "select 1 from jobs where id = ?1 and status <> 'cancelled'
                    and not (status = 'running' and dispatch_token <> ?2)";
    let mut query = db.prepare_cached(query).map_err(error)?;
    let mut lost = Vec::new();
    for claim in claims {
        if !query.exists(params![claim.job_id.as_uuid(), claim.token.0]).map_err(error)? {
            lost.push(claim.job_id);
        }
    }
    Ok(lost)
}

pub(super) fn acquire(db: &Connection, name: &str, owner: &WorkerId, length: Duration) -> Result<bool, Error> {
    let now = row::now(db)?;
    let query = "insert into leases (name, owner, expires_at) values (?1, ?2, ?3)
                 on conflict (name) do update set owner = excluded.owner, expires_at = excluded.expires_at
                  where leases.owner = excluded.owner or leases.expires_at <= ?4";
    let params = params![name, owner.as_str(), now.saturating_add(saturating_micros(length)), now];
    let taken = db.prepare_cached(query).and_then(|mut query| query.execute(params)).map_err(error)?;
    Ok(taken == 1)
}

pub(super) fn release(db: &Connection, name: &str, owner: &WorkerId) -> Result<(), Error> {
    let query = "delete from leases where name = ?1 and owner = ?2";
    let params = params![name, owner.as_str()];
    db.prepare_cached(query).and_then(|mut query| query.execute(params)).map_err(error)?;
    Ok(())
}
