//! Messages one by one: read, delete and replay the dead letter of one, move one to the dead letters.

mod list;
mod read;

use std::str::FromStr;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{OpenApi, ToSchema};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouterExt};
use utoipa_axum::routes;
use uuid::Uuid;

use super::App;
use super::ack::element::storable;
use super::body::RawBody;
use super::dead_letters::snapshot::{self, Condemned};
use super::dead_letters::{Shown, replay};
use super::path::Segments;
use super::retry::retried;
use crate::db::dead_letter_admin::log_dlq_move_v1;
use crate::db::messages::delete_message_v1;
use crate::error::Error;
use crate::id::{Offset, PartitionId, QUEUE_MODE, checked_name, checked_transaction_id};
use crate::seal::Sealer;

/// What is filed if the operator gives no reason.
const REASON_DEFAULT: &str = "Dead-lettered by an operator";
/// Longest reason, in bytes.
const REASON_BYTES_MAX: usize = 64 << 10;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    // Clients leave slashes in transaction ids as they are, hence the wildcard; so the action of a POST is its end.
    OpenApiRouter::with_openapi(Acts::openapi())
        .routes(routes!(list::list))
        .routes(routes!(read::read, delete).map(|route| route.post(act)))
}

/// What [`act`] does, as the routes that they are to a client.
#[derive(OpenApi)]
#[openapi(paths(retry, move_away))]
struct Acts;

/// A message as a path names it.
struct Name {
    partition_id: PartitionId,
    transaction_id: String,
}

impl Name {
    fn parse((partition_id, transaction_id): (String, String)) -> Result<Self, Error> {
        let partition_id =
            PartitionId::from_str(&partition_id).map_err(|_| Error::invalid("partitionId", "must be a UUID"))?;
        checked_transaction_id("transactionId", &transaction_id)?;
        Ok(Self { partition_id, transaction_id })
    }
}

fn not_found() -> Error {
    Error::NotFound("Message not found".to_owned())
}

/// What was deleted of a message.
#[derive(Serialize, ToSchema)]
#[schema(as = MessageDeleted)]
#[serde(rename_all = "camelCase")]
struct Deleted {
    success: bool,
    partition_id: Uuid,
    transaction_id: String,
    /// How many dead letters.
    deleted: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'static str>,
}

/// Deletes the dead letters of a message, those of all groups.
#[utoipa::path(
    delete, path = "/api/v1/messages/{partitionId}/{*transactionId}",
    responses((status = 200, body = Deleted), (status = 404, body = Deleted))
)]
async fn delete(State(app): State<Arc<App>>, Segments(path): Segments<(String, String)>) -> Result<Response, Error> {
    let Name { partition_id, transaction_id } = Name::parse(path)?;
    let conn = app.db.conn().await?;
    let deleted = retried(|| delete_message_v1(&conn, partition_id, &transaction_id)).await?;
    let (status, error, message) = if deleted == 0 {
        (StatusCode::NOT_FOUND, Some("Dead letter not found; a live message cannot be deleted"), None)
    } else {
        (StatusCode::OK, None, Some("Dead letter deleted"))
    };
    let partition_id = partition_id.0;
    let body = Deleted { success: 0 < deleted, partition_id, transaction_id, deleted, error, message };
    Ok((status, Json(body)).into_response())
}

/// `…/retry` and `…/dlq`. An escaped slash before these words belongs to the transaction id.
async fn act(
    State(app): State<Arc<App>>, uri: Uri, Segments((partition_id, rest)): Segments<(String, String)>, body: RawBody,
) -> Result<Response, Error> {
    let name = |action: &str| {
        let transaction_id = rest.strip_suffix(action).filter(|_| uri.path().ends_with(action))?;
        Some(Name::parse((partition_id.clone(), transaction_id.to_owned())))
    };
    if let Some(name) = name("/retry") {
        return retry(&app, &name?, &body).await.map(IntoResponse::into_response);
    }
    match name("/dlq") {
        Some(name) => move_away(&app, name?, &body).await.map(IntoResponse::into_response),
        None => Ok(super::no_such_route().await),
    }
}

/// Takes nothing, but a client may say so.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Nothing {}

/// A dead letter that is a message again.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Retried {
    success: bool,
    queue: String,
    partition: String,
    replayed_as: PushedAgain,
    dlq_row_removed: bool,
    /// Several, where several groups had given it up.
    dlq_rows_removed: usize,
}

/// As the answer of a push says it.
#[derive(Serialize, ToSchema)]
struct PushedAgain {
    index: usize,
    message_id: Uuid,
    transaction_id: String,
    #[serde(rename = "queueName")]
    queue_name: String,
    status: &'static str,
}

/// Pushes the dead letter of a message again, under a new transaction id.
#[utoipa::path(
    post, path = "/api/v1/messages/{partitionId}/{transactionId}/retry", request_body = Option<Nothing>,
    responses((status = 200, body = Retried), (status = 404), (status = 409))
)]
async fn retry(app: &App, name: &Name, body: &RawBody) -> Result<Json<Retried>, Error> {
    body.object::<Nothing>()?;
    let conn = app.db.conn().await?;
    let step = replay::message(app, &conn, name.partition_id, &name.transaction_id).await?;
    let message = step.messages.into_iter().next().expect("replayed");
    Ok(Json(Retried {
        success: true,
        queue: message.queue.clone(),
        partition: message.partition,
        replayed_as: PushedAgain {
            index: 0,
            message_id: message.message_id,
            transaction_id: message.message_id.to_string(),
            queue_name: message.queue,
            status: "queued",
        },
        dlq_row_removed: true,
        dlq_rows_removed: step.letters,
    }))
}

/// To whose dead letters, and why.
#[derive(Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Move {
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255)]
    consumer_group: Option<Value>,
    #[schema(value_type = Option<String>)]
    error: Option<Value>,
}

impl Move {
    fn parse(body: &RawBody) -> Result<(String, String), Error> {
        let wire: Self = body.object()?;
        let text = |field: &'static str, value: Option<Value>| match value {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(Error::invalid(field, "must be a string")),
        };
        let group = text("consumerGroup", wire.consumer_group)?.unwrap_or_else(|| QUEUE_MODE.to_owned());
        checked_name("consumerGroup", &group)?;
        let reason = text("error", wire.error)?.filter(|text| !text.is_empty());
        let reason = reason.unwrap_or_else(|| REASON_DEFAULT.to_owned());
        if REASON_BYTES_MAX < reason.len() {
            return Err(Error::invalid("error", format!("must have at most {REASON_BYTES_MAX} bytes")));
        }
        Ok((group, storable(reason)))
    }
}

/// Where a message went.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Moved {
    success: bool,
    partition_id: Uuid,
    transaction_id: String,
    consumer_group: String,
    #[schema(value_type = i64)]
    offset: Offset,
    message: &'static str,
}

/// Moves the message that a group wants next to the dead letters of that group.
#[utoipa::path(
    post, path = "/api/v1/messages/{partitionId}/{transactionId}/dlq", request_body = Option<Move>,
    responses((status = 200, body = Moved), (status = 404), (status = 409))
)]
async fn move_away(app: &App, name: Name, body: &RawBody) -> Result<Json<Moved>, Error> {
    let (group, reason) = Move::parse(body)?;
    let conn = app.db.conn().await?;
    let found = read::find(&conn, &name, &app.settings.sealer).await?;
    let Some(offset) = found.live_offset() else {
        return Err(Error::Conflict("the message is a dead letter already, and its segment is gone".to_owned()));
    };
    let Name { partition_id, transaction_id } = name;
    let condemned = Condemned { partition_id, offset, transaction_id, reason };
    let letters = snapshot::letters(&conn, std::slice::from_ref(&condemned)).await?;
    let letter = letters.first().expect("one for each message");
    let moved = retried(|| log_dlq_move_v1(&conn, partition_id, &group, letter)).await?;
    if !moved.success {
        return Err(Error::Conflict(moved.error.unwrap_or_default()));
    }
    app.telemetry.dead_lettered(1);
    if let Some(lane) = moved.wake {
        app.wake.released(&lane.queue, &lane.partition, &group);
    }
    Ok(Json(Moved {
        success: true,
        partition_id: partition_id.0,
        transaction_id: condemned.transaction_id,
        consumer_group: group,
        offset,
        message: "Moved to the dead letters",
    }))
}

/// By whom messages are consumed.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Mode {
    has_queue_mode: bool,
    bus_groups_count: i64,
    r#type: &'static str,
}

impl Mode {
    fn new(has_queue_mode: bool, bus_groups_count: i64) -> Self {
        let r#type = match (has_queue_mode, bus_groups_count) {
            (false, 0) => "none",
            (true, 0) => "queue",
            (false, _) => "bus",
            (true, _) => "hybrid",
        };
        Self { has_queue_mode, bus_groups_count, r#type }
    }
}

/// A message as its segment holds it.
struct Opened {
    id: Uuid,
    transaction_id: String,
    trace_id: Option<Uuid>,
    producer: Option<String>,
    shown: Shown,
}

impl Opened {
    fn new(segment: &crate::segment::Segment, index: usize, sealer: &Sealer) -> Result<Self, Error> {
        let corrupt = |what: &str| Error::Corrupt(format!("segment: {what}"));
        let frame = segment.frame(index).ok_or_else(|| corrupt("it has too few frames"))?;
        let payload = std::str::from_utf8(frame.payload).map_err(|_| corrupt("a payload is not UTF-8"))?;
        Ok(Self {
            id: frame.message_id,
            transaction_id: frame.transaction_id.to_owned(),
            trace_id: frame.trace_id,
            producer: frame.producer.map(str::to_owned),
            shown: Shown::new(payload.to_owned(), frame.is_encrypted, Some(frame.message_id), sealer),
        })
    }
}
