//! Streams: a query registers, reads its state, and commits cycles of state, results and acknowledgement.

mod cycle;
mod plan;

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::App;
use super::ack::element::text;
use super::body::RawBody;
use super::retry::retried;
use crate::db::streams::{Bounds, Filter, Query, Row, log_streams_register_v1, log_streams_state_v1};
use crate::error::Error;
use crate::id::{PartitionId, QueryId, checked_name};

/// Longest key of a row of state, in bytes: it has to fit into an entry of an index.
const KEY_BYTES_MAX: usize = 2048;
/// Most rows of state in one answer, and most operations on state in one cycle: what was read together can be deleted
/// together.
const STATE_ROWS_MAX: i32 = 100_000;
/// Most bytes of keys and values in one answer.
const STATE_BYTES_MAX: i64 = 64 << 20;
/// Most keys that are asked for by name.
const STATE_KEYS_MAX: usize = 10_000;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(register)).routes(routes!(state)).routes(routes!(cycle::cycle))
}

/// Why nothing came of a request.
enum Failure {
    /// Understood and refused: answered 200 with `success` false.
    Refused(String),
    Failed(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::AckRejected(text) => Self::Refused(text),
            error => Self::Failed(error),
        }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        match self {
            Self::Refused(error) => Json(json!({"success": false, "error": error})).into_response(),
            Self::Failed(error) => {
                let (parts, _) = super::failed(&error).into_parts();
                let body = json!({"success": false, "error": error.to_string()});
                Response::from_parts(parts, Body::from(body.to_string()))
            }
        }
    }
}

/// A query, by the name that its runners share.
#[derive(Deserialize, ToSchema)]
#[schema(as = StreamsQuery)]
struct Registration<'a> {
    #[serde(borrow)]
    #[schema(value_type = String, required, min_length = 1, max_length = 255)]
    name: Option<&'a RawValue>,
    #[serde(borrow)]
    #[schema(value_type = String, required, min_length = 1, max_length = 255)]
    source_queue: Option<&'a RawValue>,
    /// Tells whether stored state fits: another one than before needs `reset`.
    #[serde(borrow)]
    #[schema(value_type = String, required, min_length = 1, max_length = 255)]
    config_hash: Option<&'a RawValue>,
    #[serde(borrow)]
    #[schema(value_type = Option<String>, max_length = 255)]
    sink_queue: Option<&'a RawValue>,
    /// Deletes all state of the query.
    #[serde(borrow)]
    #[schema(value_type = Option<bool>, default = false)]
    reset: Option<&'a RawValue>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = StreamsRegistered)]
struct Registered {
    success: bool,
    query_id: Uuid,
    name: String,
    config_hash: String,
    /// Whether the query was made.
    fresh: bool,
    /// Whether its state was deleted.
    reset: bool,
}

/// Registers a query, or finds the one of this name.
#[utoipa::path(
    post, path = "/streams/v1/queries", request_body = Registration<'_>,
    responses((status = 200, body = Registered), (status = 409))
)]
async fn register(State(app): State<Arc<App>>, body: RawBody) -> Result<Json<Registered>, Failure> {
    let wire: Registration<'_> = body.json()?;
    let name = required_name("name", wire.name)?;
    let source_queue = required_name("source_queue", wire.source_queue)?;
    let config_hash = required_name("config_hash", wire.config_hash)?;
    let sink_queue = text("sink_queue", wire.sink_queue)?.filter(|name| !name.is_empty());
    let sink_queue = sink_queue.as_deref().map(|name| checked_name("sink_queue", name)).transpose()?;
    let reset = flag("reset", wire.reset)?.unwrap_or(false);
    let query = Query { name: &name, source_queue: &source_queue, sink_queue, config_hash: &config_hash };
    let conn = app.db.conn().await?;
    let registered = retried(|| log_streams_register_v1(&conn, &query, reset)).await?;
    let Some(query_id) = registered.query_id else {
        let text = format!("config_hash mismatch: the query {name} runs with another one; reset deletes its state");
        return Err(Error::Conflict(text).into());
    };
    let (fresh, reset) = (registered.fresh, registered.reset);
    Ok(Json(Registered { success: true, query_id, name, config_hash, fresh, reset }))
}

/// Whose state, and which of it. What is given must all hold.
#[derive(Deserialize, ToSchema)]
#[schema(as = StreamsStateQuery)]
struct Which<'a> {
    #[serde(borrow)]
    #[schema(value_type = Uuid, required)]
    query_id: Option<&'a RawValue>,
    #[serde(borrow)]
    #[schema(value_type = Uuid, required)]
    partition_id: Option<&'a RawValue>,
    /// None or an empty list lets all through.
    #[serde(borrow)]
    #[schema(value_type = Option<Vec<String>>, max_items = 10_000)]
    keys: Option<&'a RawValue>,
    #[serde(borrow)]
    #[schema(value_type = Option<String>, max_length = 2048)]
    key_prefix: Option<&'a RawValue>,
    /// Lets through objects whose `windowEnd` is a number up to this one: milliseconds since 1970.
    #[serde(borrow)]
    #[schema(value_type = Option<f64>)]
    ripe_at_or_before: Option<&'a RawValue>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = StreamsState)]
struct Rows {
    success: bool,
    /// In the order of the keys' bytes.
    rows: Vec<StateRow>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = StreamsStateRow)]
struct StateRow {
    key: String,
    #[schema(value_type = serde_json::Value)]
    value: Box<RawValue>,
    #[schema(format = DateTime)]
    updated_at: String,
}

/// Reads state of a query in a partition.
#[utoipa::path(
    post, path = "/streams/v1/state/get", request_body = Which<'_>, responses((status = 200, body = Rows))
)]
async fn state(State(app): State<Arc<App>>, body: RawBody) -> Result<Json<Rows>, Failure> {
    let wire: Which<'_> = body.json()?;
    let query_id = QueryId(id("query_id", wire.query_id)?);
    let partition_id = PartitionId(id("partition_id", wire.partition_id)?);
    let keys: Vec<String> = optional("keys", wire.keys, "must be a list of strings")?.unwrap_or_default();
    if STATE_KEYS_MAX < keys.len() {
        return Err(Error::invalid("keys", format!("must have at most {STATE_KEYS_MAX}, has {}", keys.len())).into());
    }
    let prefix = text("key_prefix", wire.key_prefix)?.filter(|prefix| !prefix.is_empty());
    let filter = Filter {
        keys: (!keys.is_empty()).then(|| keys.iter().map(String::as_bytes).collect()),
        prefix: prefix.as_deref().map(str::as_bytes),
        ripe_at_or_before: optional("ripe_at_or_before", wire.ripe_at_or_before, "must be a number")?,
    };
    let conn = app.db.conn().await?;
    let bounds = Bounds { rows_max: STATE_ROWS_MAX, bytes_max: STATE_BYTES_MAX };
    let rows = log_streams_state_v1(&conn, query_id, partition_id, &filter, bounds).await?;
    let rows = rows.into_iter().map(StateRow::new).collect::<Result<_, _>>()?;
    Ok(Json(Rows { success: true, rows }))
}

impl StateRow {
    fn new(row: Row) -> Result<Self, Error> {
        let Row { key, value, updated_at } = row;
        let value =
            RawValue::from_string(value).map_err(|error| Error::Corrupt(format!("value of state {key:?}: {error}")))?;
        Ok(Self { key, value, updated_at: format!("{updated_at:.6}") })
    }
}

/// # Errors
/// [`Error::Invalid`] naming `field`, for `reason`.
fn optional<'a, T: Deserialize<'a>>(
    field: &'static str, raw: Option<&'a RawValue>, reason: &'static str,
) -> Result<Option<T>, Error> {
    raw.map(|raw| serde_json::from_str(raw.get()).map_err(|_| Error::invalid(field, reason))).transpose()
}

fn flag(field: &'static str, raw: Option<&RawValue>) -> Result<Option<bool>, Error> {
    optional(field, raw, "must be true or false")
}

fn required_name(field: &'static str, raw: Option<&RawValue>) -> Result<String, Error> {
    let name = text(field, raw)?.filter(|name| !name.is_empty()).ok_or(Error::Missing(field))?;
    checked_name(field, &name)?;
    Ok(name)
}

fn id(field: &'static str, raw: Option<&RawValue>) -> Result<Uuid, Error> {
    let text = text(field, raw)?.ok_or(Error::Missing(field))?;
    Uuid::parse_str(&text).map_err(|_| Error::invalid(field, "must be a UUID"))
}
