//! Twin of `sql/procedures/traces.sql`.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::{Param, Sql};
use crate::error::Error;
use crate::id::PartitionId;

/// What a consumer noted about a message.
pub struct NewTrace<'a> {
    pub partition_id: PartitionId,
    pub transaction_id: &'a str,
    /// JSON, kept as it is.
    pub data: &'a str,
    pub consumer_group: Option<&'a str>,
    pub trace_names: &'a [String],
    pub event_type: &'a str,
    pub worker_id: Option<&'a str>,
}

/// A trace as it was stored.
#[derive(Debug, Deserialize)]
pub struct Trace {
    pub id: Uuid,
    pub event_type: String,
    /// JSON, as it was given.
    pub data: String,
    pub consumer_group: Option<String>,
    pub worker_id: Option<String>,
    pub created_at: String,
    pub trace_names: Vec<String>,
}

/// A trace, and the message it is about.
#[derive(Debug, Deserialize)]
pub struct NamedTrace {
    #[serde(flatten)]
    pub trace: Trace,
    pub transaction_id: String,
    pub partition_id: Uuid,
    pub queue_name: String,
    pub partition_name: String,
}

/// A name, and how much it is used.
#[derive(Debug, Deserialize)]
pub struct TraceName {
    pub trace_name: String,
    pub trace_count: i64,
    pub message_count: i64,
    pub last_seen: String,
}

/// The part of a listing that was asked for.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    pub limit: i32,
    pub offset: i32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Recorded {
    trace_id: Uuid,
}

#[derive(Deserialize)]
struct Listed<T> {
    #[serde(alias = "trace_names")]
    traces: Vec<T>,
    total: i64,
}

async fn one<T: DeserializeOwned>(
    db: &(impl Sql + Sync), query: &'static str, params: &[Param<'_>],
) -> Result<T, Error> {
    let row = db.row(query, params).await?;
    let Json(value) = row.try_get(0).map_err(|error| Error::Corrupt(error.to_string()))?;
    Ok(value)
}

/// `queen.record_trace_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn record_trace_v1(db: &(impl Sql + Sync), trace: &NewTrace<'_>) -> Result<Uuid, Error> {
    let query = "select queen.record_trace_v1($1, $2, $3, $4, $5, $6, $7)";
    let NewTrace { partition_id, transaction_id, data, consumer_group, trace_names, event_type, worker_id } = trace;
    let params: [Param<'_>; 7] = [
        (&partition_id.0, Type::UUID),
        (transaction_id, Type::TEXT),
        (data, Type::TEXT),
        (consumer_group, Type::TEXT),
        (trace_names, Type::TEXT_ARRAY),
        (event_type, Type::TEXT),
        (worker_id, Type::TEXT),
    ];
    let Recorded { trace_id } = one(db, query, &params).await?;
    Ok(trace_id)
}

/// `queen.get_message_traces_v1`: one page, and how many there are.
///
/// # Errors
/// Whatever the database answered.
pub async fn get_message_traces_v1(
    db: &(impl Sql + Sync), pid: PartitionId, transaction_id: &str, page: Page,
) -> Result<(Vec<Trace>, i64), Error> {
    let query = "select queen.get_message_traces_v1($1, $2, $3, $4)";
    let params: [Param<'_>; 4] =
        [(&pid.0, Type::UUID), (&transaction_id, Type::TEXT), (&page.limit, Type::INT4), (&page.offset, Type::INT4)];
    let Listed { traces, total } = one(db, query, &params).await?;
    Ok((traces, total))
}

/// `queen.get_traces_by_name_v1`: one page, and how many there are.
///
/// # Errors
/// Whatever the database answered.
pub async fn get_traces_by_name_v1(
    db: &(impl Sql + Sync), trace_name: &str, page: Page, tenant: Uuid,
) -> Result<(Vec<NamedTrace>, i64), Error> {
    let query = "select queen.get_traces_by_name_v1($1, $2, $3, $4)";
    let params: [Param<'_>; 4] =
        [(&trace_name, Type::TEXT), (&page.limit, Type::INT4), (&page.offset, Type::INT4), (&tenant, Type::UUID)];
    let Listed { traces, total } = one(db, query, &params).await?;
    Ok((traces, total))
}

/// `queen.get_trace_names_v1`: one page, and how many there are.
///
/// # Errors
/// Whatever the database answered.
pub async fn get_trace_names_v1(db: &(impl Sql + Sync), page: Page) -> Result<(Vec<TraceName>, i64), Error> {
    let query = "select queen.get_trace_names_v1($1, $2)";
    let Listed { traces, total } = one(db, query, &[(&page.limit, Type::INT4), (&page.offset, Type::INT4)]).await?;
    Ok((traces, total))
}
