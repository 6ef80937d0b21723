//! Twin of `sql/procedures/configure.sql`.

use serde::Deserialize;
use serde_json::{Map, Value};
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::Sql;
use crate::error::Error;
use crate::id::QueueId;

/// A queue as it is stored.
#[derive(Clone, Debug)]
pub struct ConfiguredQueue {
    pub queue_id: QueueId,
    pub namespace: String,
    pub task: String,
    /// How messages are stored.
    pub storage: String,
    /// Every option in force, by name.
    pub options: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Configured {
    queue_id: Uuid,
    namespace: String,
    task: String,
    storage: String,
    options: Map<String, Value>,
}

/// `queen.configure_queue_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn configure_queue_v1(
    db: &(impl Sql + Sync), name: &str, options: &Map<String, Value>, tenant: Uuid,
) -> Result<ConfiguredQueue, Error> {
    let query = "select queen.configure_queue_v1($1, $2, $3)";
    let params = [(&name as _, Type::TEXT), (&Json(options) as _, Type::JSONB), (&tenant as _, Type::UUID)];
    let Json(configured) = db.row(query, &params).await?.get(0);
    let Configured { queue_id, namespace, task, storage, options } = configured;
    Ok(ConfiguredQueue { queue_id: QueueId(queue_id), namespace, task, storage, options })
}

/// `queen.encrypted_queues_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn encrypted_queues_v1(db: &(impl Sql + Sync)) -> Result<i64, Error> {
    Ok(db.row("select queen.encrypted_queues_v1()", &[]).await?.try_get(0)?)
}

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
