//! Twins of `sql/procedures/due.sql`, and the count of what is held.

use serde_json::Value;
use tokio_postgres::types::Type;

use super::Sql;
use crate::error::Error;
use crate::id::PartitionId;

/// One look at the stamps of some partitions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Walked {
    pub scanned: u64,
    /// The partition to go on after; `None` at the end.
    pub last: Option<PartitionId>,
    /// Partitions whose stamps are not what their rows say.
    pub wrong: Vec<PartitionId>,
}

/// `queen.log_stamps_walk_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn log_stamps_walk_v1(db: &(impl Sql + Sync), after: PartitionId, rows_max: i32) -> Result<Walked, Error> {
    let query = "select o_scanned, o_last, o_wrong from queen.log_stamps_walk_v1($1, $2)";
    let row = db.row(query, &[(&after.0 as _, Type::UUID), (&rows_max as _, Type::INT4)]).await?;
    let wrong: Option<Vec<uuid::Uuid>> = row.get(2);
    Ok(Walked {
        scanned: u64::try_from(row.get::<_, i32>(0)).expect("a count is not negative"),
        last: row.get::<_, Option<uuid::Uuid>>(1).map(PartitionId),
        wrong: wrong.unwrap_or_default().into_iter().map(PartitionId).collect(),
    })
}

/// `queen.log_stamps_repair_v1`: whether the stamps were wrong.
///
/// # Errors
/// Whatever the database answered.
pub async fn log_stamps_repair_v1(db: &(impl Sql + Sync), pid: PartitionId) -> Result<bool, Error> {
    let row = db.row("select queen.log_stamps_repair_v1($1)", &[(&pid.0 as _, Type::UUID)]).await?;
    let answer: Value = row.get(0);
    Ok(answer["repaired"].as_bool().unwrap_or(false))
}

/// How many partitions wait for a consumer group, counted up to `count_max`.
///
/// # Errors
/// Whatever the database answered.
pub async fn held(db: &(impl Sql + Sync), count_max: i64) -> Result<u64, Error> {
    let query = "select count(*) from (select from queen.log_partitions where held_next is not null limit $1) h";
    let row = db.row(query, &[(&count_max as _, Type::INT8)]).await?;
    Ok(u64::try_from(row.get::<_, i64>(0)).expect("a count is not negative"))
}
