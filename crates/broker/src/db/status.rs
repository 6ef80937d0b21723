//! Twins of `sql/procedures/status.sql`.

use jiff::Timestamp;
use serde::de::DeserializeOwned;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::analytics::{Filter, object};
use super::resources::Counts;
use super::{Param, Sql};
use crate::error::Error;
use crate::id::{Offset, PartitionId, QueueId};

/// `queen.get_status_v1`: the object as it is made there.
///
/// # Errors
/// Whatever the database answered.
pub async fn get_status_v1<T: DeserializeOwned>(
    db: &(impl Sql + Sync), filter: &Filter<'_>, limit: i32, offset: i32, tenant: Uuid,
) -> Result<T, Error> {
    let mut params = filter.params().to_vec();
    params.extend::<[Param<'_>; 3]>([(&limit, Type::INT4), (&offset, Type::INT4), (&tenant, Type::UUID)]);
    object(db, "select queen.get_status_v1($1, $2, $3, $4, $5, $6, $7, $8)", &params).await
}

/// A partition with what was done in it.
#[derive(Clone, Debug)]
pub struct PartitionStatus {
    pub id: PartitionId,
    pub name: String,
    pub created_at: Timestamp,
    pub last_write_at: Timestamp,
    pub log_start: Offset,
    pub last_offset: Offset,
    pub consumed: i64,
    pub counts: Counts,
}

/// `queen.log_partition_status_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn log_partition_status_v1(
    db: &(impl Sql + Sync), queue_id: QueueId, limit: i32, offset: i32,
) -> Result<Vec<PartitionStatus>, Error> {
    let query = "select r_id, r_name, r_created_at, r_last_write_at, r_log_start, r_last_offset, r_consumed,
            r_total, r_pending, r_processing, r_completed, r_dead
        from queen.log_partition_status_v1($1, $2, $3)";
    let params: [Param<'_>; 3] = [(&queue_id.0, Type::UUID), (&limit, Type::INT4), (&offset, Type::INT4)];
    let rows = db.rows(query, &params).await?;
    let read = rows.iter().map(|row| {
        Ok(PartitionStatus {
            id: PartitionId(row.try_get(0)?),
            name: row.try_get(1)?,
            created_at: row.try_get(2)?,
            last_write_at: row.try_get(3)?,
            log_start: row.try_get(4)?,
            last_offset: row.try_get(5)?,
            consumed: row.try_get(6)?,
            counts: Counts::read(row, 7)?,
        })
    });
    read.collect()
}
