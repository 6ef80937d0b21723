//! `GET /api/v1/messages/{partitionId}/{transactionId}`: the live message, or what its dead letter kept of it.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::{Mode, Name, Opened, not_found};
use crate::db::Sql;
use crate::db::messages::{Found, FoundLetter, get_message_v1};
use crate::error::Error;
use crate::http::App;
use crate::http::dead_letters::Shown;
use crate::http::path::Segments;
use crate::http::pop::utc_text;
use crate::id::{Offset, QUEUE_MODE};
use crate::seal::Sealer;
use crate::segment::{Segment, hash};

#[derive(Serialize, ToSchema)]
#[schema(as = Message)]
#[serde(rename_all = "camelCase")]
struct Detail<'a> {
    id: Option<Uuid>,
    transaction_id: &'a str,
    #[schema(value_type = Option<serde_json::Value>)]
    data: Option<&'a RawValue>,
    #[schema(value_type = Option<serde_json::Value>)]
    payload: Option<&'a RawValue>,
    trace_id: Option<Uuid>,
    producer_sub: Option<&'a str>,
    created_at: String,
    partition_id: Uuid,
    partition: &'a str,
    #[schema(value_type = i64)]
    offset: Offset,
    is_encrypted: bool,
    queue: &'a str,
    queue_path: String,
    namespace: Option<&'a str>,
    task: Option<&'a str>,
    status: &'a str,
    error_message: Option<&'a str>,
    retry_count: i32,
    lease_expires_at: Option<String>,
    #[schema(value_type = Value)]
    queue_config: &'a Value,
    mode: Mode,
    consumer_groups: Vec<Group<'a>>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = MessageGroup)]
#[serde(rename_all = "camelCase")]
struct Group<'a> {
    name: &'a str,
    consumed: bool,
    lease_expires_at: Option<String>,
}

/// A message that exists, live or as a dead letter.
pub(super) struct Subject {
    found: Found,
    /// Of a live message, what its segment holds; an error if that cannot be read.
    live: Option<(Offset, Result<Opened, Error>)>,
}

impl Subject {
    pub(super) fn live_offset(&self) -> Option<Offset> {
        self.live.as_ref().map(|(offset, _)| *offset)
    }
}

/// # Errors
/// [`Error::NotFound`] if there is neither the message nor a dead letter of it.
pub(super) async fn find(db: &impl Sql, name: &Name, sealer: &Sealer) -> Result<Subject, Error> {
    let hash = hash(&name.transaction_id);
    let found = get_message_v1(db, name.partition_id, &name.transaction_id, &hash).await?;
    let mut found = found.ok_or_else(not_found)?;
    let mut live = None;
    if let Some(stored) = found.live.take() {
        let index = usize::try_from(stored.offset - stored.base_offset).expect("the segment covers it");
        let sealer = sealer.clone();
        let opened = tokio::task::spawn_blocking(move || {
            let opened = Segment::unpack(&stored.blob).and_then(|segment| Opened::new(&segment, index, &sealer));
            (stored, opened)
        });
        let (mut stored, opened) = opened.await.expect("unpacking does not panic and is not aborted");
        stored.blob = Vec::new();
        // Two transaction ids may, though none ever did, have one hash.
        if opened.as_ref().map_or(true, |opened| opened.transaction_id == name.transaction_id) {
            live = Some((stored.offset, opened));
            found.live = Some(stored);
        }
    }
    if live.is_none() && found.letter.is_none() {
        return Err(not_found());
    }
    Ok(Subject { found, live })
}

/// Reads one message: the newest live one with that id, else what its dead letter kept.
#[utoipa::path(
    get, path = "/api/v1/messages/{partitionId}/{*transactionId}",
    responses((status = 200, body = Detail<'_>), (status = 404))
)]
pub(super) async fn read(
    State(app): State<Arc<App>>, Segments(path): Segments<(String, String)>,
) -> Result<Response, Error> {
    let name = Name::parse(path)?;
    let sealer = &app.settings.sealer;
    let Subject { found, live } = find(&app.db.conn().await?, &name, sealer).await?;
    let json = match live {
        Some((offset, opened)) => {
            let opened = opened?;
            let letter = found.letter.as_ref().filter(|letter| letter.offset == offset);
            let created_at = found.live.as_ref().expect("kept beside what it holds").created_at;
            let detail = Detail {
                id: Some(opened.id),
                data: Some(&opened.shown.payload),
                payload: Some(&opened.shown.payload),
                trace_id: opened.trace_id,
                producer_sub: opened.producer.as_deref(),
                is_encrypted: opened.shown.is_encrypted,
                created_at: utc_text(created_at),
                ..detail(&name, &found, offset, letter)
            };
            serde_json::to_vec(&detail)
        }
        None => {
            let letter = found.letter.as_ref().expect("one of the two exists");
            let shown = letter.payload.clone();
            let shown = shown.map(|stored| Shown::new(stored, letter.is_encrypted, letter.message_id, sealer));
            let payload = shown.as_ref().map(|shown| &*shown.payload);
            let detail = Detail {
                id: letter.message_id,
                data: payload,
                payload,
                trace_id: letter.trace_id,
                producer_sub: letter.producer.as_deref(),
                is_encrypted: shown.as_ref().is_some_and(|shown| shown.is_encrypted),
                created_at: utc_text(letter.failed_at),
                ..detail(&name, &found, letter.offset, Some(letter))
            };
            serde_json::to_vec(&detail)
        }
    };
    let json = json.expect("texts and numbers become JSON");
    Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response())
}

/// What is the same whether the message lives or only its dead letter does.
fn detail<'a>(name: &'a Name, found: &'a Found, offset: Offset, letter: Option<&'a FoundLetter>) -> Detail<'a> {
    let has_queue_mode = found.groups.iter().any(|group| group.name == QUEUE_MODE);
    let named = found.groups.len() - usize::from(has_queue_mode);
    let groups = found.groups.iter().map(|group| Group {
        name: &group.name,
        consumed: group.is_consumed,
        lease_expires_at: group.lease_expires_at.map(utc_text),
    });
    Detail {
        id: None,
        transaction_id: &name.transaction_id,
        data: None,
        payload: None,
        trace_id: None,
        producer_sub: None,
        created_at: String::new(),
        partition_id: name.partition_id.0,
        partition: &found.partition,
        offset,
        is_encrypted: false,
        queue: &found.queue,
        queue_path: format!("{}/{}", found.queue, found.partition),
        namespace: found.namespace.as_deref(),
        task: found.task.as_deref(),
        status: &found.status,
        error_message: letter.and_then(|letter| letter.error.as_deref()),
        retry_count: letter.map_or(found.retry_count, |letter| letter.retry_count),
        lease_expires_at: found.lease_expires_at.map(utc_text),
        queue_config: &found.options,
        mode: Mode::new(has_queue_mode, i64::try_from(named).expect("fits in memory")),
        consumer_groups: groups.collect(),
    }
}
