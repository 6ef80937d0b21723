//! Twins of `sql/procedures/lease.sql`: who holds what, keep it longer, give it back.

use jiff::Timestamp;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::{Param, Sql};
use crate::error::Error;
use crate::id::PartitionId;

/// What one pop leased: partitions of one group, under one lease id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    pub group: String,
    pub partitions: Vec<PartitionId>,
}

impl Holding {
    fn ids(&self) -> Vec<Uuid> {
        self.partitions.iter().map(|id| id.0).collect()
    }
}

/// What a renewal did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renewal {
    pub renewed: i32,
    pub expires_at: Option<Timestamp>,
}

/// `queen.log_lease_holders_v1`: reads every cursor, so ask for many workers at once, and seldom.
pub async fn log_lease_holders_v1(db: &(impl Sql + Sync), workers: &[String]) -> Result<Vec<(String, Holding)>, Error> {
    let query = "select r_worker, r_group, r_pids from queen.log_lease_holders_v1($1)";
    let rows = db.rows(query, &[(&workers, Type::TEXT_ARRAY)]).await?;
    let holding = |row: &tokio_postgres::Row| {
        let partitions: Vec<Uuid> = row.get(2);
        (row.get(0), Holding { group: row.get(1), partitions: partitions.into_iter().map(PartitionId).collect() })
    };
    Ok(rows.iter().map(holding).collect())
}

/// `queen.log_renew_lease_v1`
pub async fn log_renew_lease_v1(
    db: &(impl Sql + Sync), worker: &str, seconds: i32, holding: &Holding,
) -> Result<Renewal, Error> {
    let query = "select r_renewed, r_expires_at from queen.log_renew_lease_v1($1, $2, $3, $4)";
    let ids = holding.ids();
    let params: &[Param<'_>] =
        &[(&worker, Type::TEXT), (&seconds, Type::INT4), (&holding.group, Type::TEXT), (&ids, Type::UUID_ARRAY)];
    let row = db.row(query, params).await?;
    Ok(Renewal { renewed: row.get(0), expires_at: row.get(1) })
}

/// `queen.log_release_lease_v1`
pub async fn log_release_lease_v1(db: &(impl Sql + Sync), worker: &str, holding: &Holding) -> Result<i32, Error> {
    let query = "select queen.log_release_lease_v1($1, $2, $3)";
    let ids = holding.ids();
    let row = db.row(query, &[(&worker, Type::TEXT), (&holding.group, Type::TEXT), (&ids, Type::UUID_ARRAY)]).await?;
    Ok(row.get(0))
}
