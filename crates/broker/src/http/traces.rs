//! `POST /api/v1/traces`, and the three ways to list traces.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::App;
use super::body::{RawBody, checked_depth};
use super::openapi::query::query;
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
const OFFSET_MAX: i64 = i32::MAX as i64;
/// Rows of an answer to a request that does not say how many.
const OF_MESSAGE_DEFAULT: i32 = 1000;
const BY_NAME_DEFAULT: i32 = 100;
const NAMES_DEFAULT: i32 = 50;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    // Clients leave slashes in names and transaction ids as they are, hence the wildcards.
    OpenApiRouter::new()
        .routes(routes!(record))
        .routes(routes!(names))
        .routes(routes!(by_name))
        .routes(routes!(of_message))
}

/// What happened to which message.
#[derive(ToSchema)]
#[serde(rename_all = "camelCase")]
#[expect(dead_code, reason = "`Fields` reads each by its name, to say which is wrong")]
struct Record {
    #[schema(min_length = 1, max_length = 65_535)]
    transaction_id: String,
    partition_id: Uuid,
    /// Any JSON but null.
    #[schema(value_type = serde_json::Value)]
    data: Box<RawValue>,
    #[schema(min_length = 1, max_length = 255)]
    consumer_group: Option<String>,
    #[schema(max_items = 100)]
    trace_names: Option<Vec<String>>,
    #[schema(min_length = 1, max_length = 255, default = "info")]
    event_type: Option<String>,
    #[schema(min_length = 1, max_length = 255)]
    worker_id: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Recorded {
    success: bool,
    trace_id: Uuid,
}

/// Records what happened to a message.
#[utoipa::path(post, path = "/api/v1/traces", request_body = Record, responses((status = 201, body = Recorded)))]
async fn record(State(app): State<Arc<App>>, body: RawBody) -> Result<(StatusCode, Json<Recorded>), Error> {
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
    Ok((StatusCode::CREATED, Json(Recorded { success: true, trace_id: id })))
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

query!(OfMessageQuery:
    integer("limit", 1..=LIMIT_MAX, "Most traces of the answer.").or(OF_MESSAGE_DEFAULT),
    integer("offset", 0..=OFFSET_MAX, "Traces to pass over.").or(0),
);

query!(ByNameQuery:
    integer("limit", 1..=LIMIT_MAX, "Most traces of the answer.").or(BY_NAME_DEFAULT),
    integer("offset", 0..=OFFSET_MAX, "Traces to pass over.").or(0),
);

query!(NamesQuery:
    integer("limit", 1..=LIMIT_MAX, "Most names of the answer.").or(NAMES_DEFAULT),
    integer("offset", 0..=OFFSET_MAX, "Names to pass over.").or(0),
);

fn page(params: &Params, default_limit: i32) -> Result<Page, Error> {
    let integer = |name, range, default: i32| -> Result<i32, Error> {
        let given = params.integer(name, range)?;
        Ok(given.map_or(default, |value| i32::try_from(value).expect("the range is within it")))
    };
    Ok(Page { limit: integer("limit", 1..=LIMIT_MAX, default_limit)?, offset: integer("offset", 0..=OFFSET_MAX, 0)? })
}

#[derive(Serialize, ToSchema)]
#[schema(as = TraceSlice)]
struct Pagination {
    limit: i32,
    offset: i32,
}

#[derive(Serialize, ToSchema)]
struct TraceRow {
    id: Uuid,
    event_type: String,
    #[schema(value_type = serde_json::Value)]
    data: Box<RawValue>,
    consumer_group: Option<String>,
    worker_id: Option<String>,
    created_at: String,
    trace_names: Vec<String>,
    #[serde(flatten)]
    of: TraceOf,
}

/// The message that a trace is about, where the request does not say.
#[derive(Default, Serialize, ToSchema)]
struct TraceOf {
    #[serde(skip_serializing_if = "Option::is_none")]
    transaction_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    partition_id: Option<Uuid>,
    #[serde(skip_serializing_if = "Option::is_none")]
    queue_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    partition_name: Option<String>,
    /// Always null: a trace does not keep the payload.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    message_payload: Option<()>,
}

#[derive(Serialize, ToSchema)]
struct TraceList {
    traces: Vec<TraceRow>,
    total: i64,
    pagination: Pagination,
}

impl TraceRow {
    fn new(trace: Trace, of: TraceOf) -> Result<Self, Error> {
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

/// Lists the traces of a message, oldest first.
#[utoipa::path(
    get, path = "/api/v1/traces/{partitionId}/{*transactionId}", params(OfMessageQuery),
    responses((status = 200, body = TraceList))
)]
async fn of_message(
    State(app): State<Arc<App>>, Segments((pid, transaction_id)): Segments<(String, String)>, params: Params,
) -> Result<Json<TraceList>, Error> {
    let pid = checked_partition_id(&pid)?;
    let transaction_id = checked_transaction_id("transactionId", &transaction_id)?;
    let page = page(&params, OF_MESSAGE_DEFAULT)?;
    let conn = app.db.conn().await?;
    let (traces, total) = get_message_traces_v1(&conn, pid, transaction_id, page).await?;
    TraceList::new(traces.into_iter().map(|trace| TraceRow::new(trace, TraceOf::default())), total, page)
}

/// Lists the traces that have a name, oldest first.
#[utoipa::path(
    get, path = "/api/v1/traces/by-name/{*name}", params(ByNameQuery), responses((status = 200, body = TraceList))
)]
async fn by_name(
    State(app): State<Arc<App>>, Segments(name): Segments<String>, params: Params,
) -> Result<Json<TraceList>, Error> {
    let name = checked_name("name", &name)?;
    let page = page(&params, BY_NAME_DEFAULT)?;
    let conn = app.db.conn().await?;
    let (traces, total) = get_traces_by_name_v1(&conn, name, page, DEFAULT_TENANT).await?;
    let rows = traces.into_iter().map(|named| {
        let NamedTrace { trace, transaction_id, partition_id, queue_name, partition_name } = named;
        let of = TraceOf {
            transaction_id: Some(transaction_id),
            partition_id: Some(partition_id),
            queue_name: Some(queue_name),
            partition_name: Some(partition_name),
            message_payload: Some(()),
        };
        TraceRow::new(trace, of)
    });
    TraceList::new(rows, total, page)
}

/// Names of traces.
#[derive(Serialize, ToSchema)]
struct TraceNames {
    trace_names: Vec<TraceName>,
    /// On all pages.
    total: i64,
    pagination: Pagination,
}

#[derive(Serialize, ToSchema)]
struct TraceName {
    trace_name: String,
    trace_count: i64,
    message_count: i64,
    last_seen: String,
}

/// Lists the names of traces, last used first.
#[utoipa::path(get, path = "/api/v1/traces/names", params(NamesQuery), responses((status = 200, body = TraceNames)))]
async fn names(State(app): State<Arc<App>>, params: Params) -> Result<Json<TraceNames>, Error> {
    let page = page(&params, NAMES_DEFAULT)?;
    let conn = app.db.conn().await?;
    let (names, total) = get_trace_names_v1(&conn, page).await?;
    let rows = names.into_iter().map(|name| TraceName {
        trace_name: name.trace_name,
        trace_count: name.trace_count,
        message_count: name.message_count,
        last_seen: name.last_seen,
    });
    let pagination = Pagination { limit: page.limit, offset: page.offset };
    Ok(Json(TraceNames { trace_names: rows.collect(), total, pagination }))
}
