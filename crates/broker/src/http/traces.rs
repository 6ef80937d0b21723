//! `POST /api/v1/traces`, and the three ways to list traces.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use uuid::Uuid;

use super::App;
use super::body::{RawBody, checked_depth};
use super::params::Params;
use super::path::Segments;
use crate::db::traces::{
    NamedTrace, NewTrace, Page, Trace, get_message_traces_v1, get_trace_names_v1, get_traces_by_name_v1,
    record_trace_v1,
};
use crate::error::Error;
use crate::id::{DEFAULT_TENANT, PartitionId, checked_name, checked_transaction_id};

/// Longest data of one trace, in bytes: with [`LIMIT_MAX`] it bounds an answer.
const DATA_BYTES_MAX: usize = 64 << 10;
/// Most names of one trace.
const NAMES_MAX: usize = 100;
/// Most rows of one answer.
const LIMIT_MAX: i64 = 1000;

pub(super) fn routes() -> Router<Arc<App>> {
    // Clients leave slashes in names and transaction ids as they are, hence the wildcards.
    Router::new()
        .route("/api/v1/traces", post(record))
        .route("/api/v1/traces/names", get(names))
        .route("/api/v1/traces/by-name/{*name}", get(by_name))
        .route("/api/v1/traces/{partition_id}/{*transaction_id}", get(of_message))
}

async fn record(State(app): State<Arc<App>>, body: RawBody) -> Result<(StatusCode, Json<Value>), Error> {
    let fields = Fields(body.json()?);
    let transaction_id: String = fields.required("transactionId", "must be a string")?;
    let partition_id: String = fields.required("partitionId", "must be a UUID")?;
    let event_type: Option<String> = fields.optional("eventType", "must be a string")?;
    let consumer_group = fields.name("consumerGroup")?;
    let worker_id = fields.name("workerId")?;
    let trace_names = checked_trace_names(fields.optional("traceNames", "must be a list of strings or null")?)?;
    let trace = NewTrace {
        partition_id: checked_partition_id(&partition_id)?,
        transaction_id: checked_transaction_id("transactionId", &transaction_id)?,
        data: checked_data(fields.0.get("data").map(|data| data.get()))?,
        consumer_group: consumer_group.as_deref(),
        trace_names: &trace_names,
        event_type: event_type.as_deref().map_or(Ok("info"), |kind| checked_name("eventType", kind))?,
        worker_id: worker_id.as_deref(),
    };
    let conn = app.db.conn().await?;
    let id = record_trace_v1(&conn, &trace).await?;
    Ok((StatusCode::CREATED, Json(json!({"success": true, "traceId": id}))))
}

/// The fields of an object, each still as it was sent.
struct Fields<'a>(BTreeMap<String, &'a RawValue>);

impl Fields<'_> {
    fn optional<'a, T: Deserialize<'a>>(&'a self, field: &'static str, reason: &str) -> Result<Option<T>, Error> {
        let Some(raw) = self.0.get(field) else { return Ok(None) };
        serde_json::from_str(raw.get()).map_err(|_| Error::invalid(field, reason))
    }

    fn required<'a, T: Deserialize<'a>>(&'a self, field: &'static str, reason: &str) -> Result<T, Error> {
        self.optional(field, reason)?.ok_or(Error::Missing(field))
    }

    fn name(&self, field: &'static str) -> Result<Option<String>, Error> {
        let name: Option<String> = self.optional(field, "must be a string")?;
        if let Some(name) = &name {
            checked_name(field, name)?;
        }
        Ok(name)
    }
}

fn checked_partition_id(text: &str) -> Result<PartitionId, Error> {
    PartitionId::from_str(text).map_err(|_| Error::invalid("partitionId", "must be a UUID"))
}

fn checked_trace_names(names: Option<Vec<String>>) -> Result<Vec<String>, Error> {
    let names = names.unwrap_or_default();
    if names.len() > NAMES_MAX {
        return Err(Error::invalid("traceNames", format!("must be at most {NAMES_MAX}, are {}", names.len())));
    }
    for name in &names {
        checked_name("traceNames", name)?;
    }
    Ok(names)
}

fn checked_data(data: Option<&str>) -> Result<&str, Error> {
    let data = data.filter(|data| *data != "null").ok_or(Error::Missing("data"))?;
    if data.len() > DATA_BYTES_MAX {
        return Err(Error::invalid("data", format!("must have at most {DATA_BYTES_MAX} bytes, has {}", data.len())));
    }
    checked_depth("data", data)
}

fn page(params: &Params, default_limit: i32) -> Result<Page, Error> {
    let integer = |name, range, default: i32| -> Result<i32, Error> {
        let given = params.integer(name, range)?;
        Ok(given.map_or(default, |value| i32::try_from(value).expect("the range is within it")))
    };
    Ok(Page {
        limit: integer("limit", 1..=LIMIT_MAX, default_limit)?,
        offset: integer("offset", 0..=i64::from(i32::MAX), 0)?,
    })
}

#[derive(Serialize)]
struct Pagination {
    limit: i32,
    offset: i32,
}

#[derive(Serialize)]
struct TraceRow {
    id: Uuid,
    event_type: String,
    data: Box<RawValue>,
    consumer_group: Option<String>,
    worker_id: Option<String>,
    created_at: String,
    trace_names: Vec<String>,
    #[serde(flatten)]
    of: Option<TraceOf>,
}

/// The message that a trace is about, where the request does not say.
#[derive(Serialize)]
struct TraceOf {
    transaction_id: String,
    partition_id: Uuid,
    queue_name: String,
    partition_name: String,
    message_payload: (),
}

#[derive(Serialize)]
struct TraceList {
    traces: Vec<TraceRow>,
    total: i64,
    pagination: Pagination,
}

impl TraceRow {
    fn new(trace: Trace, of: Option<TraceOf>) -> Result<Self, Error> {
        let Trace { id, event_type, data, consumer_group, worker_id, created_at, trace_names } = trace;
        let data = RawValue::from_string(data).map_err(|error| Error::Corrupt(format!("trace {id}: {error}")))?;
        Ok(Self { id, event_type, data, consumer_group, worker_id, created_at, trace_names, of })
    }
}

impl TraceList {
    fn new(rows: impl Iterator<Item = Result<TraceRow, Error>>, total: i64, page: Page) -> Result<Json<Self>, Error> {
        let Page { limit, offset } = page;
        Ok(Json(Self { traces: rows.collect::<Result<_, _>>()?, total, pagination: Pagination { limit, offset } }))
    }
}

async fn of_message(
    State(app): State<Arc<App>>, Segments((pid, transaction_id)): Segments<(String, String)>, params: Params,
) -> Result<Json<TraceList>, Error> {
    let pid = checked_partition_id(&pid)?;
    let transaction_id = checked_transaction_id("transactionId", &transaction_id)?;
    let page = page(&params, 1000)?;
    let conn = app.db.conn().await?;
    let (traces, total) = get_message_traces_v1(&conn, pid, transaction_id, page).await?;
    TraceList::new(traces.into_iter().map(|trace| TraceRow::new(trace, None)), total, page)
}

async fn by_name(
    State(app): State<Arc<App>>, Segments(name): Segments<String>, params: Params,
) -> Result<Json<TraceList>, Error> {
    let name = checked_name("name", &name)?;
    let page = page(&params, 100)?;
    let conn = app.db.conn().await?;
    let (traces, total) = get_traces_by_name_v1(&conn, name, page, DEFAULT_TENANT).await?;
    let rows = traces.into_iter().map(|named| {
        let NamedTrace { trace, transaction_id, partition_id, queue_name, partition_name } = named;
        let of = TraceOf { transaction_id, partition_id, queue_name, partition_name, message_payload: () };
        TraceRow::new(trace, Some(of))
    });
    TraceList::new(rows, total, page)
}

async fn names(State(app): State<Arc<App>>, params: Params) -> Result<Json<Value>, Error> {
    let page = page(&params, 50)?;
    let conn = app.db.conn().await?;
    let (names, total) = get_trace_names_v1(&conn, page).await?;
    let rows: Vec<Value> = names
        .into_iter()
        .map(|name| {
            json!({
                "trace_name": name.trace_name, "trace_count": name.trace_count,
                "message_count": name.message_count, "last_seen": name.last_seen,
            })
        })
        .collect();
    Ok(Json(json!({
        "trace_names": rows, "total": total,
        "pagination": Pagination { limit: page.limit, offset: page.offset },
    })))
}
