//! Twin of `sql/procedures/metrics.sql`.

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::{Param, Sql};
use crate::error::Error;

/// What one server counted and measured since its last flush.
pub struct ServerMetrics<'a> {
    pub hostname: &'a str,
    pub port: i32,
    pub worker_id: i32,
    pub pid: i32,
    /// Columns of `queen.worker_metrics`; one that is left out is 0.
    pub counts: &'a Value,
    pub sample_count: i32,
    pub system: &'a Value,
}

#[derive(Deserialize)]
struct Flushed {
    at: String,
}

/// What one call folded.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub struct Folded {
    pub folded: i64,
    pub done: bool,
}

/// `queen.flush_server_metrics_v1`: the database's time.
///
/// # Errors
/// Whatever the database answered.
pub async fn flush_server_metrics_v1(db: &(impl Sql + Sync), metrics: &ServerMetrics<'_>) -> Result<Timestamp, Error> {
    let query = "select queen.flush_server_metrics_v1($1, $2, $3, $4, $5, $6, $7)";
    let ServerMetrics { hostname, port, worker_id, pid, counts, sample_count, system } = metrics;
    let params: [Param<'_>; 7] = [
        (hostname, Type::TEXT),
        (port, Type::INT4),
        (worker_id, Type::INT4),
        (pid, Type::INT4),
        (counts, Type::JSONB),
        (sample_count, Type::INT4),
        (system, Type::JSONB),
    ];
    let Json(Flushed { at }) = db.row(query, &params).await?.get(0);
    at.parse().map_err(|error| Error::Corrupt(format!("the time of a flush, {at}: {error}")))
}

/// `queen.flush_queue_metrics_v1`; every element of `counts` has every key.
///
/// # Errors
/// Whatever the database answered.
pub async fn flush_queue_metrics_v1(db: &(impl Sql + Sync), counts: &[Value], tenant: Uuid) -> Result<(), Error> {
    let query = "select queen.flush_queue_metrics_v1($1, $2)";
    db.row(query, &[(&Json(counts), Type::JSONB), (&tenant, Type::UUID)]).await?;
    Ok(())
}

/// `queen.flush_parked_v1`; each element of `parked` has a queue and a count.
///
/// # Errors
/// Whatever the database answered.
pub async fn flush_parked_v1(
    db: &(impl Sql + Sync), hostname: &str, worker_id: i32, parked: &[Value], tenant: Uuid,
) -> Result<(), Error> {
    let query = "select queen.flush_parked_v1($1, $2, $3, $4)";
    let params: [Param<'_>; 4] =
        [(&hostname, Type::TEXT), (&worker_id, Type::INT4), (&Json(parked), Type::JSONB), (&tenant, Type::UUID)];
    db.row(query, &params).await?;
    Ok(())
}

/// `queen.fold_partition_events_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn fold_partition_events_v1(db: &(impl Sql + Sync), rows_max: i32) -> Result<Folded, Error> {
    let row = db.row("select queen.fold_partition_events_v1($1)", &[(&rows_max, Type::INT4)]).await?;
    let Json(folded) = row.get(0);
    Ok(folded)
}
