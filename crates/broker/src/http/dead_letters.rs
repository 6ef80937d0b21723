//! Dead letters: the list of them, what operators do with them, and the snapshots that they hold.

mod bulk;
pub(super) mod replay;
pub(super) mod snapshot;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::App;
use super::instant::instant;
use super::openapi::query::query;
use super::params::Params;
use crate::db::dead_letters::{Filter, Listed, log_dlq_list_v1};
use crate::error::Error;
use crate::seal::Sealer;

const LIMIT_DEFAULT: i64 = 100;
const LIMIT_MAX: i64 = 1000;
const OFFSET_MAX: i64 = i32::MAX as i64;
/// Payloads of one answer, but for the one that reaches it.
const PAYLOADS_BYTES_MAX: i64 = 32 << 20;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(list, bulk::delete)).routes(routes!(bulk::replay))
}

query!(ListQuery:
    name("queue", "Only of this queue."),
    name("consumerGroup", "Only those that this group gave up."),
    name("partition", "Only of partitions of this name."),
    time("from", "Given up at this time or later."),
    time("to", "Given up at this time or earlier."),
    integer("limit", 0..=LIMIT_MAX, "Most dead letters of the answer.").or(LIMIT_DEFAULT),
    integer("offset", 0..=OFFSET_MAX, "Dead letters to pass over.").or(0),
);

#[derive(Serialize, ToSchema)]
#[schema(as = DeadLetters)]
struct Page {
    messages: Vec<Message>,
    pagination: Pagination,
    /// How many the filters let through, on all pages together.
    total: i64,
}

#[derive(Serialize, ToSchema)]
#[schema(as = DeadLetterSlice)]
struct Pagination {
    limit: i64,
    offset: i64,
}

#[derive(Serialize, ToSchema)]
#[schema(as = DeadLetter)]
#[serde(rename_all = "camelCase")]
struct Message {
    id: Uuid,
    message_id: Option<Uuid>,
    transaction_id: Option<String>,
    partition_id: Uuid,
    queue: String,
    partition: String,
    consumer_group: String,
    offset: i64,
    error_message: Option<String>,
    retry_count: i32,
    #[schema(value_type = Option<serde_json::Value>)]
    data: Option<Box<RawValue>>,
    /// There is a payload, but this answer had no room for it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    payload_omitted: bool,
    /// `data` is still encrypted, because it does not open here.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    is_encrypted: bool,
    trace_id: Option<Uuid>,
    producer_sub: Option<String>,
    created_at: String,
    failed_at: String,
}

/// Lists dead letters, newest first.
#[utoipa::path(get, path = "/api/v1/dlq", params(ListQuery), responses((status = 200, body = Page)))]
async fn list(State(app): State<Arc<App>>, params: Params) -> Result<Json<Page>, Error> {
    let filter = Filter {
        queue: params.name("queue")?,
        group: params.name("consumerGroup")?,
        partition: params.name("partition")?,
        from: params.text("from").map(|text| instant("from", text)).transpose()?,
        to: params.text("to").map(|text| instant("to", text)).transpose()?,
    };
    let limit = params.integer("limit", 0..=LIMIT_MAX)?.unwrap_or(LIMIT_DEFAULT);
    let offset = params.integer("offset", 0..=OFFSET_MAX)?.unwrap_or(0);
    let conn = app.db.conn().await?;
    let within = |number: i64| i32::try_from(number).expect("the range was checked");
    let (total, page) = log_dlq_list_v1(&conn, &filter, within(limit), within(offset), PAYLOADS_BYTES_MAX).await?;
    drop(conn);
    let sealer = app.settings.sealer.clone();
    let messages =
        tokio::task::spawn_blocking(move || page.into_iter().map(|letter| Message::new(letter, &sealer)).collect());
    let messages = messages.await.expect("opening does not panic and is not aborted");
    Ok(Json(Page { messages, pagination: Pagination { limit, offset }, total }))
}

impl Message {
    fn new(row: Listed, sealer: &Sealer) -> Self {
        let shown = row.payload.map(|stored| Shown::new(stored, row.is_encrypted, row.message_id, sealer));
        let is_encrypted = shown.as_ref().is_some_and(|shown| shown.is_encrypted);
        let failed_at = format!("{:.6}", row.failed_at);
        Self {
            id: row.id,
            message_id: row.message_id,
            transaction_id: row.transaction_id,
            partition_id: row.partition_id,
            queue: row.queue,
            partition: row.partition,
            consumer_group: row.group,
            offset: row.offset,
            error_message: row.error,
            retry_count: row.retry_count,
            data: shown.map(|shown| shown.payload),
            payload_omitted: row.is_omitted,
            is_encrypted,
            trace_id: row.trace_id,
            producer_sub: row.producer,
            created_at: failed_at.clone(),
            failed_at,
        }
    }
}

/// A stored payload as it is shown to an operator.
pub(super) struct Shown {
    pub(super) payload: Box<RawValue>,
    /// It does not open here; what is shown is its sealed form.
    pub(super) is_encrypted: bool,
}

impl Shown {
    pub(super) fn new(stored: String, is_sealed: bool, message_id: Option<Uuid>, sealer: &Sealer) -> Self {
        if !is_sealed {
            return Self { payload: verbatim(stored), is_encrypted: false };
        }
        let opened = sealer.open(message_id.unwrap_or_default(), stored.as_bytes());
        match opened.ok().and_then(|clear| String::from_utf8(clear).ok()) {
            Some(clear) => Self { payload: verbatim(clear), is_encrypted: false },
            None => Self { payload: verbatim(stored), is_encrypted: true },
        }
    }
}

/// The payload as it was pushed. What is no JSON (nothing files such a thing) is shown as a string.
pub(super) fn verbatim(payload: String) -> Box<RawValue> {
    RawValue::from_string(payload.clone())
        .unwrap_or_else(|_| serde_json::value::to_raw_value(&payload).expect("a string is JSON"))
}
