//! Twin of `sql/procedures/configure.sql`.

use serde::Deserialize;
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::Sql;
use crate::error::Error;

/// What a queue delete found and did.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub struct DeletedQueue {
    pub deleted: bool,
    pub existed: bool,
}

/// `queen.delete_queue_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn delete_queue_v1(db: &(impl Sql + Sync), name: &str, tenant: Uuid) -> Result<DeletedQueue, Error> {
    let query = "select queen.delete_queue_v1($1, $2)";
    let row = db.row(query, &[(&name, Type::TEXT), (&tenant, Type::UUID)]).await?;
    let Json(deleted) = row.get(0);
    Ok(deleted)
}
