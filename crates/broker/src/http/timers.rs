//! Timer routes: scheduling in batches, and cancelling, looking and listing by queue and key.

mod described;
mod request;

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Serialize;
use tracing::debug;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::App;
use super::auth::Producer;
use super::body::RawBody;
use super::coded::{Coded, Feature, Refusal};
use super::json::Operations;
use super::openapi::query::query;
use super::params::Params;
use super::path::Segments;
use super::pop::utc_text;
use crate::db::timers::{Done, Op, Pending, log_timer_peek_v1, log_timers_apply_v1, log_timers_list_v1};
use crate::error::Error;
use crate::id::{checked_name, checked_transaction_id};
pub(super) use described::Operation;
pub(super) use request::{Draft, checked_key, drafts, sealed};

/// Tries for a batch that lost a race, the first included.
const TRIES_MAX: usize = 5;
/// Rows of a page, and of one that does not say how many.
const PAGE_ROWS_MAX: i64 = 1000;
const PAGE_ROWS: i64 = 100;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(batch)).routes(routes!(list)).routes(routes!(peek, cancel))
}

/// One element of an answer.
#[derive(Serialize, ToSchema)]
#[schema(as = TimerResult)]
#[serde(rename_all = "camelCase")]
pub(super) struct Element {
    /// Position of the element among all, in a batch.
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    /// Position among the timer operations, in a transaction.
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    op_index: Option<usize>,
    /// Whether it happened.
    ok: bool,
    /// `scheduled`, `rescheduled`, `cancelled`, `absent`, or `too_late` if a server fires it already.
    status: String,
    queue: String,
    timer_key: String,
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    txn: Option<String>,
    /// Of the message that the timer will be.
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    message_id: Option<Uuid>,
    /// Not before.
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    deliver_at: Option<String>,
}

impl From<Done> for Element {
    fn from(done: Done) -> Self {
        let Done { ok, status, queue, timer_key, txn, message_id, deliver_at } = done;
        Self { index: None, op_index: None, ok, status, queue, timer_key, txn, message_id, deliver_at }
    }
}

impl Element {
    /// An element of a transaction, where `before` others stand before all of its kind.
    pub(super) fn riding(done: Done, before: usize, at: usize) -> Self {
        Self { index: Some(before + at), op_index: Some(at), ..Self::from(done) }
    }
}

/// What became of a batch, in the order of the operations.
#[derive(Serialize, ToSchema)]
#[schema(as = TimerAnswer)]
struct Answer {
    results: Vec<Element>,
}

/// Schedules, moves and cancels timers, in one transaction.
#[utoipa::path(
    post, path = "/api/v1/timers", request_body = Operations<Operation>,
    responses((status = 200, body = Answer), (status = 400, body = Coded), (status = 403, body = Coded),
        (status = 413, body = Coded), (status = 429, body = Coded), (status = 500, body = Coded), (status = 503, body = Coded))
)]
async fn batch(State(app): State<Arc<App>>, producer: Producer, body: Result<RawBody, Error>) -> Response {
    match carry_out(&app, &producer, body).await {
        Ok(results) => Json(Answer { results }).into_response(),
        Err(error) => refused(error),
    }
}

fn refused(error: Error) -> Response {
    Refusal::from(error).answer(Feature::Timers)
}

async fn carry_out(app: &App, producer: &Producer, body: Result<RawBody, Error>) -> Result<Vec<Element>, Error> {
    let RawBody(body) = body?;
    let drafts = drafts(&Operations::<()>::read(&body)?)?;
    let (mut tries, mut is_admitted) = (1, false);
    loop {
        let ops = match sealed(&drafts, &app.sealing, producer.0.as_ref()) {
            Ok(ops) => ops,
            Err(unknown) if tries < TRIES_MAX => {
                let unknown: Vec<&str> = unknown.iter().map(String::as_str).collect();
                app.sealing.ask(&app.db.conn().await?, &unknown).await?;
                tries += 1;
                continue;
            }
            Err(_) => return Err(Error::EncryptionChanged),
        };
        if !std::mem::replace(&mut is_admitted, true) {
            app.quotas.admit_timers(demand(&ops))?;
        }
        match apply(app, &ops).await {
            Err(Error::EncryptionChanged) if tries < TRIES_MAX => {
                drafts.iter().for_each(|draft| app.sealing.forget(draft.queue()));
            }
            Err(error) if error.is_retryable() && tries < TRIES_MAX => {
                debug!(target: "http", %error, tries, "timers again");
            }
            done => {
                let elements = done?.into_iter().map(Element::from).enumerate();
                return Ok(elements.map(|(index, element)| Element { index: Some(index), ..element }).collect());
            }
        }
        tries += 1;
    }
}

async fn apply(app: &App, ops: &[Op]) -> Result<Vec<Done>, Error> {
    let done = log_timers_apply_v1(&app.db.conn().await?, ops).await?;
    ring(app, ops);
    Ok(done)
}

/// What the quotas are asked for: cancelling is free.
pub(super) fn demand(ops: &[Op]) -> u64 {
    ops.iter().filter(|op| matches!(op, Op::Schedule(_))).count() as u64
}

/// Has this server look when the first of `ops`, committed, comes due.
pub(super) fn ring(app: &App, ops: &[Op]) {
    let delays = ops.iter().filter_map(|op| match op {
        Op::Schedule(schedule) => Some(u64::try_from(schedule.delay_ms).unwrap_or(0)),
        Op::Cancel { .. } => None,
    });
    if let Some(delay_ms) = delays.min() {
        app.alarm.ring_in(Duration::from_millis(delay_ms));
    }
}

query!(CancelQuery: text("txn", "Echoed if there is no timer, to look for its message."));

/// Cancels one timer. This is never paused.
#[utoipa::path(
    delete, path = "/api/v1/timers/{queue}/{*key}", params(CancelQuery),
    responses((status = 200, body = Element), (status = 400, body = Coded), (status = 500, body = Coded),
        (status = 503, body = Coded))
)]
async fn cancel(
    State(app): State<Arc<App>>, path: Result<Segments<(String, String)>, Error>, params: Result<Params, Error>,
) -> Response {
    let cancelled = async {
        let (queue, timer_key) = named(path)?;
        let txn = params?.text("txn").map(|txn| checked_transaction_id("txn", txn).map(str::to_owned)).transpose()?;
        let done = apply(&app, &[Op::Cancel { queue, timer_key, txn }]).await?.pop();
        Ok(Element::from(done.expect("one result an operation")))
    };
    match cancelled.await {
        Ok(element) => Json(element).into_response(),
        Err(error) => refused(error),
    }
}

fn named(path: Result<Segments<(String, String)>, Error>) -> Result<(String, String), Error> {
    let Segments((queue, key)) = path?;
    checked_name("queue", &queue)?;
    Ok((queue, checked_key(key)?))
}

/// A timer as it is stored.
#[derive(Serialize, ToSchema)]
#[schema(as = TimerRow)]
#[serde(rename_all = "camelCase")]
struct Row {
    queue: String,
    timer_key: String,
    partition: String,
    /// Not before.
    deliver_at: String,
    /// The transaction id that the message will have.
    txn: String,
    message_id: Uuid,
    /// Whether the payload is packed with zstd.
    payload_zstd: bool,
    /// Whether the payload is encrypted.
    encrypted: bool,
    producer_sub: Option<String>,
    /// Failures so far.
    attempts: i32,
    last_error: Option<String>,
    /// Whether a server fires it now.
    claimed: bool,
    created_at: String,
    updated_at: String,
}

impl Row {
    fn new(queue: String, pending: Pending) -> Self {
        let Pending {
            timer_key,
            partition,
            deliver_at,
            txn,
            message_id,
            payload: _,
            payload_zstd,
            encrypted,
            producer_sub,
            attempts,
            last_error,
            claimed,
            created_at,
            updated_at,
        } = pending;
        let (deliver_at, created_at, updated_at) = (utc_text(deliver_at), utc_text(created_at), utc_text(updated_at));
        Self {
            queue,
            timer_key,
            partition,
            deliver_at,
            txn,
            message_id,
            payload_zstd,
            encrypted,
            producer_sub,
            attempts,
            last_error,
            claimed,
            created_at,
            updated_at,
        }
    }
}

/// One timer, or that there is none.
#[derive(Serialize)]
#[serde(untagged)]
#[expect(clippy::large_enum_variant, reason = "one is made an answer, and it is written at once")]
enum Peek {
    Pending {
        found: bool,
        payload: String,
        #[serde(flatten)]
        row: Row,
    },
    #[serde(rename_all = "camelCase")]
    Absent { found: bool, queue: String, timer_key: String },
}

/// Answers one timer with its payload.
#[utoipa::path(
    get, path = "/api/v1/timers/{queue}/{*key}",
    responses((status = 200, body = described::Peek), (status = 400, body = Coded), (status = 500, body = Coded),
        (status = 503, body = Coded))
)]
async fn peek(State(app): State<Arc<App>>, path: Result<Segments<(String, String)>, Error>) -> Response {
    let peeked = async {
        let (queue, timer_key) = named(path)?;
        let Some(pending) = log_timer_peek_v1(&app.db.conn().await?, &queue, &timer_key).await? else {
            return Ok(Peek::Absent { found: false, queue, timer_key });
        };
        let payload = BASE64_STANDARD.encode(pending.payload.as_deref().unwrap_or_default());
        Ok(Peek::Pending { found: true, payload, row: Row::new(queue, pending) })
    };
    match peeked.await {
        Ok(peek) => Json(peek).into_response(),
        Err(error) => refused(error),
    }
}

query!(ListQuery:
    text("after", "The last key of the page before."),
    whole("limit", "Most rows; brought into 1 to 1000.").or(PAGE_ROWS),
);

/// Timers of a queue in the order of their keys.
#[derive(Serialize, ToSchema)]
#[schema(as = TimerPage)]
#[serde(rename_all = "camelCase")]
struct Page {
    rows: Vec<Row>,
    /// Whether there are more.
    truncated: bool,
    /// What `after` has to be for the next page.
    next_after: Option<String>,
}

/// Lists the timers of a queue, without their payloads.
#[utoipa::path(
    get, path = "/api/v1/timers/{queue}", params(ListQuery),
    responses((status = 200, body = Page), (status = 400, body = Coded), (status = 500, body = Coded),
        (status = 503, body = Coded))
)]
async fn list(
    State(app): State<Arc<App>>, path: Result<Segments<String>, Error>, params: Result<Params, Error>,
) -> Response {
    let listed = async {
        let Segments(queue) = path?;
        checked_name("queue", &queue)?;
        let params = params?;
        let after = params.text("after").map(|after| checked_key(after.to_owned())).transpose()?;
        let limit = params.integer("limit", i64::MIN..=i64::MAX)?.unwrap_or(PAGE_ROWS).clamp(1, PAGE_ROWS_MAX);
        let limit = i32::try_from(limit).expect("within its range");
        // One more than shown says whether there is more.
        let mut pending = log_timers_list_v1(&app.db.conn().await?, &queue, after.as_deref(), limit + 1).await?;
        let shown = usize::try_from(limit).expect("at least 1");
        let truncated = shown < pending.len();
        pending.truncate(shown);
        let rows: Vec<Row> = pending.into_iter().map(|pending| Row::new(queue.clone(), pending)).collect();
        let next_after = rows.last().filter(|_| truncated).map(|row| row.timer_key.clone());
        Ok(Page { rows, truncated, next_after })
    };
    match listed.await {
        Ok(page) => Json(page).into_response(),
        Err(error) => refused(error),
    }
}
