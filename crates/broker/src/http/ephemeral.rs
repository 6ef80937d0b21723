//! Routes of ephemeral queues: messages in the memory of one server.

mod failure;
mod listing;
pub(super) mod options;

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::extract::rejection::PathRejection;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouterExt};
use utoipa_axum::routes;

use super::App;
use super::body::{RawBody, checked_depth};
use super::message::present;
use super::openapi::query::query;
use super::params::Params;
use crate::db::system::{ephemeral_declare_v1, ephemeral_delete_v1};
use crate::ephemeral::{Ack, Delivered, Outcome, Pop};
use crate::error::Error;
use crate::id::{DEFAULT_PARTITION, DEFAULT_TENANT, QUEUE_MODE, checked_name};
use crate::switches::Switch;
use failure::Failure;
use options::{InForce, Wire as OptionsWire};

/// Messages of one push, one pop or one ack.
const BATCH_MAX: i64 = 10_000;
const TIMEOUT_MS_MAX: i64 = 300_000;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(configure))
        .routes(routes!(reset))
        .routes(routes!(push))
        .routes(routes!(pop).map(|route| route.head(only_get)))
        .routes(routes!(ack))
        .routes(routes!(delete))
        .merge(listing::routes())
}

/// A HEAD served as a GET without its body would take messages and throw them away.
async fn only_get() -> StatusCode {
    StatusCode::METHOD_NOT_ALLOWED
}

/// # Errors
/// If an operator has paused ephemeral queues.
fn admitted(app: &App) -> Result<(), Failure> {
    if !app.switches.is_on(Switch::EphemeralPaused) {
        return Ok(());
    }
    let text = "ephemeral queues are paused".to_owned();
    Err(Failure::paused(text))
}

fn name<'a>(field: &'static str, given: Option<&'a String>) -> Result<&'a str, Failure> {
    let given = given.ok_or_else(|| Failure::bad(format!("{field} is required")))?;
    Ok(checked_name(field, given)?)
}

fn group(field: &'static str, given: Option<&str>) -> Result<String, Failure> {
    given.map_or_else(|| Ok(QUEUE_MODE.to_owned()), |group| Ok(checked_name(field, group)?.to_owned()))
}

/// A queue, and what is to hold for it.
#[derive(Deserialize, ToSchema)]
#[schema(as = EphemeralConfigure)]
struct Configure {
    #[schema(required, min_length = 1, max_length = 255)]
    queue: Option<String>,
    options: Option<OptionsWire>,
}

/// A declared queue.
#[derive(Serialize, ToSchema)]
#[schema(as = EphemeralConfigured)]
struct Configured {
    queue: String,
    declared: bool,
    options: InForce,
}

/// Declares an ephemeral queue, or replaces its options. They are kept; what is pushed never is.
#[utoipa::path(
    post, path = "/api/v1/ephemeral/configure", request_body = Configure,
    responses((status = 201, body = Configured), (status = 503))
)]
async fn configure(State(app): State<Arc<App>>, body: RawBody) -> Result<(StatusCode, Json<Configured>), Failure> {
    admitted(&app)?;
    let Configure { queue, options } = body.json()?;
    let queue = name("queue", queue.as_ref())?;
    let declared = options.unwrap_or_default().checked(queue)?;
    ephemeral_declare_v1(&app.db.conn().await?, DEFAULT_TENANT, &declared).await?;
    let rules = app.ephemeral.declare(queue, &options::of(&declared));
    app.wake.switched();
    let options = InForce::of(&rules);
    Ok((StatusCode::CREATED, Json(Configured { queue: queue.to_owned(), declared: true, options })))
}

#[derive(Deserialize, ToSchema)]
#[schema(as = EphemeralReset)]
struct ResetWire {
    #[schema(required, min_length = 1, max_length = 255)]
    queue: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = EphemeralResetDone)]
struct ResetDone {
    queue: String,
    /// Messages that went.
    dropped: usize,
}

/// Drops every message of a queue; leases and cursors with them.
#[utoipa::path(
    post, path = "/api/v1/ephemeral/reset", request_body = ResetWire,
    responses((status = 200, body = ResetDone), (status = 503))
)]
async fn reset(State(app): State<Arc<App>>, body: RawBody) -> Result<Json<ResetDone>, Failure> {
    admitted(&app)?;
    let ResetWire { queue } = body.json()?;
    let queue = name("queue", queue.as_ref())?;
    Ok(Json(ResetDone { queue: queue.to_owned(), dropped: app.ephemeral.reset(queue) }))
}

/// Messages for one partition.
#[derive(Deserialize, ToSchema)]
#[schema(as = EphemeralPush)]
struct PushWire<'a> {
    #[schema(required, min_length = 1, max_length = 255)]
    queue: Option<String>,
    #[schema(min_length = 1, max_length = 255, default = "Default")]
    partition: Option<String>,
    #[serde(borrow)]
    #[schema(required, max_items = 10_000)]
    messages: Option<Vec<MessageWire<'a>>>,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = EphemeralMessage)]
struct MessageWire<'a> {
    #[serde(borrow, default, deserialize_with = "present")]
    #[schema(value_type = serde_json::Value, required)]
    payload: Option<&'a RawValue>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = EphemeralPushed)]
struct Pushed {
    pushed: usize,
}

/// Pushes messages into the memory of this server, all or none.
#[utoipa::path(
    post, path = "/api/v1/ephemeral/push", request_body = PushWire<'_>,
    responses((status = 201, body = Pushed), (status = 403), (status = 429), (status = 503))
)]
async fn push(State(app): State<Arc<App>>, body: RawBody) -> Result<(StatusCode, Json<Pushed>), Failure> {
    admitted(&app)?;
    let PushWire { queue, partition, messages } = body.json()?;
    let queue = name("queue", queue.as_ref())?;
    let partition = partition.as_deref().unwrap_or(DEFAULT_PARTITION);
    checked_name("partition", partition)?;
    let messages = messages.ok_or_else(|| Failure::bad("messages is required".to_owned()))?;
    if BATCH_MAX < messages.len() as i64 {
        return Err(Failure::bad(format!("messages: must be at most {BATCH_MAX}, are {}", messages.len())));
    }
    let payload = |(index, message): (usize, &MessageWire<'_>)| {
        let payload = message.payload.ok_or_else(|| Failure::bad(format!("messages[{index}].payload: is required")))?;
        checked_depth("payload", payload.get()).map_err(|error| Failure::bad(format!("messages[{index}].{error}")))?;
        Ok(Arc::from(payload.to_owned()))
    };
    let payloads = messages.iter().enumerate().map(payload).collect::<Result<Vec<_>, Failure>>()?;
    let pushed = payloads.len();
    app.quotas.admit_ephemeral(pushed as u64)?;
    if pushed != 0 {
        app.ephemeral.push(queue, partition, payloads)?;
    }
    Ok((StatusCode::CREATED, Json(Pushed { pushed })))
}

query!(PopQuery:
    name("queue", "The queue; required."),
    name("partition", "Only from this partition."),
    integer("batch", 1..=BATCH_MAX, "Most messages of the answer.").or(1),
    flag("wait", "Wait for a message if there is none.").or(false),
    integer("timeout", 0..=TIMEOUT_MS_MAX, "How long to wait, in milliseconds.").or(30_000),
    name("group", "Who takes: a group has cursors of its own."),
    flag("autoAck", "Done with at delivery: what a broken connection loses is lost.").or(false),
);

/// Messages, possibly none.
#[derive(Serialize, ToSchema)]
#[schema(as = EphemeralPopped)]
struct Popped<'a> {
    queue: &'a str,
    messages: Vec<Message<'a>>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = EphemeralDelivered)]
struct Message<'a> {
    id: &'a str,
    partition: &'a str,
    /// Deliveries, this one included.
    attempts: u32,
    #[schema(value_type = serde_json::Value)]
    payload: &'a RawValue,
}

/// Takes messages from the memory of this server.
#[utoipa::path(
    get, path = "/api/v1/ephemeral/pop", params(PopQuery),
    responses((status = 200, body = Popped<'_>), (status = 403), (status = 429), (status = 503))
)]
async fn pop(State(app): State<Arc<App>>, params: Result<Params, Error>) -> Result<Response, Failure> {
    admitted(&app)?;
    let params = params?;
    let queue = params.name("queue")?.ok_or_else(|| Failure::bad("queue is required".to_owned()))?.to_owned();
    let timeout_ms = params.integer("timeout", 0..=TIMEOUT_MS_MAX)?.unwrap_or(30_000);
    let wait = params.flag("wait")?.then(|| Duration::from_millis(timeout_ms.unsigned_abs()));
    let batch = params.integer("batch", 1..=BATCH_MAX)?.unwrap_or(1);
    let pop = Pop {
        queue,
        partition: params.name("partition")?.map(str::to_owned),
        group: group("group", params.name("group")?)?,
        batch: usize::try_from(batch).expect("the range was checked"),
        auto_ack: params.flag("autoAck")?,
        wait,
    };
    let taken = app.ephemeral.pop(&pop).await?;
    let messages = taken
        .iter()
        .map(|Delivered { id, partition, attempts, payload }| Message { id, partition, attempts: *attempts, payload })
        .collect();
    Ok(Json(Popped { queue: &pop.queue, messages }).into_response())
}

/// What became of messages.
#[derive(Deserialize, ToSchema)]
#[schema(as = EphemeralAck)]
struct AckWire {
    #[schema(required, min_length = 1, max_length = 255)]
    queue: Option<String>,
    #[schema(min_length = 1, max_length = 255)]
    group: Option<String>,
    #[schema(required, max_items = 10_000)]
    acks: Option<Vec<OneAck>>,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = EphemeralOneAck)]
struct OneAck {
    #[schema(required)]
    id: Option<String>,
    #[serde(default)]
    status: Status,
    /// Not kept.
    #[serde(default, rename = "error")]
    _error: Option<String>,
}

#[derive(Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = EphemeralAckStatus)]
enum Status {
    #[default]
    Completed,
    Failed,
    Retry,
}

#[derive(Serialize, ToSchema)]
#[schema(as = EphemeralAcked)]
struct Acked {
    results: Vec<AckResult>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = EphemeralAckResult)]
struct AckResult {
    id: String,
    outcome: OutcomeWire,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = EphemeralOutcome)]
enum OutcomeWire {
    Acked,
    Redelivered,
    Stale,
    Unknown,
}

/// Says what became of messages. One that failed comes again, until it has had its tries.
#[utoipa::path(
    post, path = "/api/v1/ephemeral/ack", request_body = AckWire, responses((status = 200, body = Acked), (status = 503))
)]
async fn ack(State(app): State<Arc<App>>, body: RawBody) -> Result<Json<Acked>, Failure> {
    admitted(&app)?;
    let AckWire { queue, group: given, acks } = body.json()?;
    let queue = name("queue", queue.as_ref())?;
    let group = group("group", given.as_deref())?;
    let acks = acks.ok_or_else(|| Failure::bad("acks is required".to_owned()))?;
    if BATCH_MAX < acks.len() as i64 {
        return Err(Failure::bad(format!("acks: must be at most {BATCH_MAX}, are {}", acks.len())));
    }
    let one = |(index, ack): (usize, OneAck)| {
        let id = ack.id.ok_or_else(|| Failure::bad(format!("acks[{index}].id: is required")))?;
        Ok(Ack { id, is_done: matches!(ack.status, Status::Completed) })
    };
    let acks = acks.into_iter().enumerate().map(one).collect::<Result<Vec<_>, Failure>>()?;
    let outcomes = app.ephemeral.ack(queue, &group, &acks);
    let result = |(ack, outcome): (Ack, Outcome)| AckResult {
        id: ack.id,
        outcome: match outcome {
            Outcome::Acked => OutcomeWire::Acked,
            Outcome::Redelivered => OutcomeWire::Redelivered,
            Outcome::Stale => OutcomeWire::Stale,
            Outcome::Unknown => OutcomeWire::Unknown,
        },
    };
    Ok(Json(Acked { results: acks.into_iter().zip(outcomes).map(result).collect() }))
}

#[derive(Serialize, ToSchema)]
#[schema(as = EphemeralDeleted)]
struct Deleted {
    queue: String,
    /// There was such a queue here.
    deleted: bool,
    /// It was declared.
    declared: bool,
}

/// Deletes a queue: what is in it, and what was declared.
#[utoipa::path(
    delete, path = "/api/v1/ephemeral/queue/{queue}", responses((status = 200, body = Deleted), (status = 503))
)]
async fn delete(
    State(app): State<Arc<App>>, path: Result<axum::extract::Path<String>, PathRejection>,
) -> Result<Json<Deleted>, Failure> {
    admitted(&app)?;
    let axum::extract::Path(queue) = path?;
    checked_name("queue", &queue)?;
    let declared = ephemeral_delete_v1(&app.db.conn().await?, DEFAULT_TENANT, &queue).await?;
    let deleted = app.ephemeral.delete(&queue).is_some();
    app.wake.switched();
    Ok(Json(Deleted { queue, deleted: deleted || declared, declared }))
}
