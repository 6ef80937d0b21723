//! `GET /api/v1/messages`: what was pushed lately, newest first, and how far it has come.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::value::RawValue;
use tracing::warn;
use utoipa::ToSchema;
use uuid::Uuid;

use super::{Mode, Opened};
use crate::db::Sql;
use crate::db::messages::{Filter, Listed, Stored, list_messages_v1, log_message_segments_v1};
use crate::error::Error;
use crate::http::App;
use crate::http::instant::instant;
use crate::http::openapi::query::query;
use crate::http::params::Params;
use crate::http::pop::utc_text;
use crate::id::Offset;
use crate::seal::Sealer;
use crate::segment::Segment;

const LIMIT_DEFAULT: i64 = 200;
const LIMIT_MAX: i64 = 1000;
/// Deeper pages are reached by an earlier `to`.
const OFFSET_MAX: i64 = 10_000;
/// What the segments of one answer may unpack to, but for the one that reaches it.
const SEGMENTS_BYTES_MAX: i64 = 32 << 20;
const STATUSES: [&str; 4] = ["pending", "processing", "completed", "dead_letter"];

query!(pub(super) ListQuery:
    name("queue", "Only of this queue."),
    name("partition", "Only of partitions of this name."),
    name("namespace", "Only of queues of this namespace."),
    name("ns", "Short for namespace."),
    name("task", "Only of queues of this task."),
    word("status", &STATUSES, "Only those that have come this far."),
    time("from", "Pushed at this time or later; else within the last hour."),
    time("to", "Pushed at this time or earlier."),
    integer("limit", 0..=LIMIT_MAX, "Most messages of the answer.").or(LIMIT_DEFAULT),
    integer("offset", 0..=OFFSET_MAX, "Messages to pass over; go deeper with an earlier `to`.").or(0),
);

#[derive(Serialize, ToSchema)]
#[schema(as = Messages)]
struct Page<'a> {
    messages: Vec<Row<'a>>,
    mode: Mode,
    /// How many the filters let through, on all pages together.
    total: i64,
    /// Whether there are partitions that this call did not look at.
    truncated: bool,
    pagination: Pagination,
}

#[derive(Serialize, ToSchema)]
#[schema(as = MessageSlice)]
struct Pagination {
    limit: i64,
    offset: i64,
}

#[derive(Serialize, ToSchema)]
#[schema(as = ListedMessage)]
#[serde(rename_all = "camelCase")]
struct Row<'a> {
    id: Option<Uuid>,
    transaction_id: Option<&'a str>,
    txn_hash: String,
    partition_id: Uuid,
    queue_path: String,
    queue: &'a str,
    partition: &'a str,
    namespace: Option<&'a str>,
    task: Option<&'a str>,
    status: &'a str,
    queue_status: Option<&'a str>,
    bus_status: BusStatus,
    trace_id: Option<Uuid>,
    producer_sub: Option<&'a str>,
    queue_priority: i32,
    payload_available: bool,
    /// The payload is there, but this answer had no room to unpack it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    payload_omitted: bool,
    segment: Place,
    created_at: String,
    lease_expires_at: Option<String>,
    #[schema(value_type = Option<serde_json::Value>)]
    data: Option<&'a RawValue>,
    #[schema(value_type = Option<serde_json::Value>)]
    payload: Option<&'a RawValue>,
    is_encrypted: bool,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct BusStatus {
    consumed_by: i32,
    total_groups: i32,
}

#[derive(Serialize, ToSchema)]
#[schema(as = SegmentPlace)]
#[serde(rename_all = "camelCase")]
struct Place {
    #[schema(value_type = i64)]
    seq: Offset,
    #[schema(value_type = i64)]
    frame_idx: Offset,
}

/// What there is to show of a listed message.
enum Content {
    Open(Opened),
    Gone,
    Omitted,
}

/// Lists messages, newest first, and says how far each has come.
#[utoipa::path(get, path = "/api/v1/messages", params(ListQuery), responses((status = 200, body = Page<'_>)))]
pub(super) async fn list(State(app): State<Arc<App>>, params: Params) -> Result<Response, Error> {
    let filter = filter(&params)?;
    let limit = params.integer("limit", 0..=LIMIT_MAX)?.unwrap_or(LIMIT_DEFAULT);
    let offset = params.integer("offset", 0..=OFFSET_MAX)?.unwrap_or(0);
    let within = |number: i64| i32::try_from(number).expect("the range was checked");
    let conn = app.db.conn().await?;
    let listing = list_messages_v1(&conn, &filter, within(limit), within(offset)).await?;
    let contents = contents(&conn, &listing.page, &app.settings.sealer).await?;
    drop(conn);
    let page = Page {
        messages: listing.page.iter().zip(&contents).map(|(listed, content)| Row::new(listed, content)).collect(),
        mode: Mode::new(listing.has_queue_mode, listing.groups),
        total: listing.total,
        truncated: listing.is_truncated,
        pagination: Pagination { limit, offset },
    };
    let json = serde_json::to_vec(&page).expect("texts and numbers become JSON");
    Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response())
}

fn filter(params: &Params) -> Result<Filter<'_>, Error> {
    let time = |field| params.text(field).map(|text| instant(field, text)).transpose();
    let namespace = match (params.name("namespace")?, params.name("ns")?) {
        (Some(long), Some(short)) if long != short => {
            return Err(Error::invalid("ns", "is short for namespace, which says something else"));
        }
        (long, short) => long.or(short),
    };
    let status = params.text("status");
    if status.is_some_and(|status| !STATUSES.contains(&status)) {
        return Err(Error::invalid("status", format!("must be one of {}", STATUSES.join(", "))));
    }
    Ok(Filter {
        queue: params.name("queue")?,
        partition: params.name("partition")?,
        namespace,
        task: params.name("task")?,
        status,
        from: time("from")?,
        to: time("to")?,
    })
}

/// Of each listed message; the messages of one segment open it once.
async fn contents(db: &impl Sql, page: &[Listed], sealer: &Sealer) -> Result<Vec<Content>, Error> {
    let mut segments: Vec<(Uuid, Offset)> = Vec::new();
    let mut numbers: HashMap<(Uuid, Offset), usize> = HashMap::new();
    let mut wanted = Vec::with_capacity(page.len());
    for listed in page {
        let segment = (listed.partition_id, listed.base_offset);
        let number = *numbers.entry(segment).or_insert_with(|| {
            segments.push(segment);
            segments.len() - 1
        });
        wanted.push((number, usize::try_from(listed.offset - listed.base_offset).expect("the row covers it")));
    }
    let stored = log_message_segments_v1(db, &segments, SEGMENTS_BYTES_MAX).await?;
    let sealer = sealer.clone();
    let opened = tokio::task::spawn_blocking(move || open_all(&stored, &wanted, &sealer));
    Ok(opened.await.expect("unpacking does not panic and is not aborted"))
}

fn open_all(stored: &[Stored], wanted: &[(usize, usize)], sealer: &Sealer) -> Vec<Content> {
    let mut contents: Vec<Content> = Vec::new();
    contents.resize_with(wanted.len(), || Content::Gone);
    let mut rows: Vec<Vec<usize>> = vec![Vec::new(); stored.len()];
    for (row, (number, _)) in wanted.iter().enumerate() {
        rows[*number].push(row);
    }
    // Segment by segment, so that no two are unpacked at once.
    for (stored, rows) in stored.iter().zip(rows) {
        let unpacked = match stored {
            Stored::Blob(blob) => Segment::unpack(blob),
            Stored::Gone => continue,
            Stored::Omitted => {
                rows.into_iter().for_each(|row| contents[row] = Content::Omitted);
                continue;
            }
        };
        for row in rows {
            match unpacked
                .as_ref()
                .map_err(ToString::to_string)
                .and_then(|segment| Opened::new(segment, wanted[row].1, sealer).map_err(|error| error.to_string()))
            {
                Ok(opened) => contents[row] = Content::Open(opened),
                Err(why) => warn!(target: "http", why, "a listed message cannot be read"),
            }
        }
    }
    contents
}

impl<'a> Row<'a> {
    fn new(listed: &'a Listed, content: &'a Content) -> Self {
        let opened = if let Content::Open(opened) = content { Some(opened) } else { None };
        Self {
            id: opened.map(|opened| opened.id),
            transaction_id: opened.map(|opened| opened.transaction_id.as_str()),
            txn_hash: listed.hash.iter().map(|byte| format!("{byte:02x}")).collect(),
            partition_id: listed.partition_id,
            queue_path: format!("{}/{}", listed.queue, listed.partition),
            queue: &listed.queue,
            partition: &listed.partition,
            namespace: listed.namespace.as_deref(),
            task: listed.task.as_deref(),
            status: &listed.status,
            queue_status: listed.queue_status.as_deref(),
            bus_status: BusStatus { consumed_by: listed.consumed_by, total_groups: listed.groups },
            trace_id: opened.and_then(|opened| opened.trace_id),
            producer_sub: opened.and_then(|opened| opened.producer.as_deref()),
            queue_priority: listed.priority.unwrap_or(0),
            payload_available: !matches!(content, Content::Gone),
            payload_omitted: matches!(content, Content::Omitted),
            segment: Place { seq: listed.base_offset, frame_idx: listed.offset - listed.base_offset },
            created_at: utc_text(listed.created_at),
            lease_expires_at: listed.lease_expires_at.map(utc_text),
            data: opened.map(|opened| &*opened.shown.payload),
            payload: opened.map(|opened| &*opened.shown.payload),
            is_encrypted: opened.is_some_and(|opened| opened.shown.is_encrypted),
        }
    }
}
