//! Twins of `sql/procedures/stats.sql`.

use jiff::Timestamp;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::{Param, Sql};
use crate::error::Error;

/// What one step counted.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Counted {
    /// Queues that were counted earlier are due.
    #[serde(deserialize_with = "time")]
    pub before: Timestamp,
    pub partitions: i64,
    /// Queues that were finished.
    pub queues: i64,
    pub done: bool,
}

fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Timestamp, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}

/// `queen.stats_count_v1`
///
/// # Errors
/// Whatever the database answered; [`Error::ForeignKey`] if the queue was deleted meanwhile.
pub async fn stats_count_v1(
    db: &(impl Sql + Sync), before: Option<Timestamp>, age_seconds: f64, rows_max: i32, waits: bool, tenant: Uuid,
) -> Result<Counted, Error> {
    let query = "select queen.stats_count_v1($1, $2, $3, $4, $5)";
    let params: [Param<'_>; 5] = [
        (&before, Type::TIMESTAMPTZ),
        (&age_seconds, Type::FLOAT8),
        (&rows_max, Type::INT4),
        (&waits, Type::BOOL),
        (&tenant, Type::UUID),
    ];
    let Json(counted) = db.row(query, &params).await?.try_get(0)?;
    Ok(counted)
}

/// `queen.stats_summary_v1`: the object as it is made there.
///
/// # Errors
/// Whatever the database answered.
pub async fn stats_summary_v1<T: DeserializeOwned>(db: &(impl Sql + Sync), tenant: Uuid) -> Result<T, Error> {
    let row = db.row("select queen.stats_summary_v1($1)", &[(&tenant, Type::UUID)]).await?;
    let Json(summary) = row.try_get(0)?;
    Ok(summary)
}
