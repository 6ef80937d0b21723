//! Seek: set the cursors of a group to the tail or to a time, step by step.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::super::App;
use super::super::body::RawBody;
use super::super::instant::instant;
use super::super::path::Segments;
use super::super::retry::retried;
use crate::db::consumer_groups::{Seek, log_seek_step_v1};
use crate::db::resources::queue_id;
use crate::error::Error;
use crate::id::{DEFAULT_TENANT, checked_name};

/// Partitions of one step: one transaction, which retention and cleanup of these partitions wait for.
const SEEK_ROWS_MAX: i32 = 500;

/// Where to: to the tail, or to a time.
#[derive(ToSchema)]
#[serde(rename_all = "camelCase")]
#[expect(dead_code, reason = "`Target::read` reads its fields by hand, since they exclude each other")]
struct SeekTo {
    to_end: Option<bool>,
    /// Before the first segment that was created then or later. Not together with `toEnd`.
    #[schema(format = DateTime)]
    timestamp: Option<String>,
}

/// Where to.
#[derive(Debug, PartialEq, Eq)]
enum Target {
    End,
    At { text: String, time: Timestamp },
}

impl Target {
    /// `None` if the body names neither.
    fn read(body: &Map<String, Value>) -> Result<Option<Self>, Error> {
        let to_end = match body.get("toEnd") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(to_end)) => *to_end,
            Some(_) => return Err(Error::invalid("toEnd", "must be true or false")),
        };
        match body.get("timestamp") {
            None | Some(Value::Null) => Ok(to_end.then_some(Self::End)),
            Some(_) if to_end => Err(Error::invalid("timestamp", "must not be given together with toEnd")),
            Some(Value::String(text)) => Ok(Some(Self::At { text: text.clone(), time: instant("timestamp", text)? })),
            Some(_) => Err(Error::invalid("timestamp", "must be an ISO 8601 time")),
        }
    }

    fn time(&self) -> Option<Timestamp> {
        match self {
            Self::End => None,
            Self::At { time, .. } => Some(*time),
        }
    }

    fn text(&self) -> Option<&str> {
        match self {
            Self::End => None,
            Self::At { text, .. } => Some(text),
        }
    }
}

fn neither() -> Response {
    let body = json!({"error": "Must specify toEnd=true or a timestamp"});
    (StatusCode::BAD_REQUEST, Json(body)).into_response()
}

/// Sets the cursors of a group in a queue to the tail or to a time.
#[utoipa::path(
    post, path = "/api/v1/consumer-groups/{group}/queues/{queue}/seek", request_body = SeekTo,
    responses((status = 200, body = Sought<'_>), (status = 404))
)]
pub(super) async fn in_queue(
    State(app): State<Arc<App>>, Segments((group, queue)): Segments<(String, String)>, body: RawBody,
) -> Result<Response, Error> {
    let group = checked_name("consumerGroup", &group)?;
    let queue = checked_name("queue", &queue)?;
    let target = if body.0.is_empty() { None } else { Target::read(&body.json()?)? };
    let Some(target) = target else { return Ok(neither()) };
    let moved = seek(&app, group, queue, None, &target).await?;
    if moved.partitions == 0 {
        return Err(Error::NotFound("Queue not found or has no partitions".to_owned()));
    }
    Ok(Json(moved.answer(group, queue, None, &target)).into_response())
}

/// Sets the cursor of a group in one partition to the tail or to a time.
///
/// Without a body it is the tail.
#[utoipa::path(
    post, path = "/api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek",
    request_body = Option<SeekTo>, responses((status = 200, body = Sought<'_>), (status = 404))
)]
pub(super) async fn in_partition(
    State(app): State<Arc<App>>, Segments((group, queue, partition)): Segments<(String, String, String)>, body: RawBody,
) -> Result<Response, Error> {
    let group = checked_name("consumerGroup", &group)?;
    let queue = checked_name("queue", &queue)?;
    let partition = checked_name("partition", &partition)?;
    let target = if body.0.is_empty() { Some(Target::End) } else { Target::read(&body.json()?)? };
    let Some(target) = target else { return Ok(neither()) };
    let moved = seek(&app, group, queue, Some(partition), &target).await?;
    if moved.partitions == 0 {
        return Err(Error::NotFound("Partition not found".to_owned()));
    }
    Ok(Json(moved.answer(group, queue, Some(partition), &target)).into_response())
}

#[derive(Default)]
struct Moved {
    partitions: i64,
    clamped_to_start: i64,
    clamped_to_end: i64,
}

/// Where the cursors stand.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Sought<'a> {
    success: bool,
    consumer_group: &'a str,
    queue_name: &'a str,
    /// Where it was asked for one partition; then `updated` is there too.
    #[serde(skip_serializing_if = "Option::is_none")]
    partition_name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    updated: Option<bool>,
    seek_to_end: bool,
    target_timestamp: Option<&'a str>,
    partitions_updated: i64,
    /// Whether any partition has no message on one side of the time.
    clamped: bool,
    clamped_to_start: i64,
    clamped_to_end: i64,
}

impl Moved {
    fn answer<'a>(
        &self, consumer_group: &'a str, queue_name: &'a str, partition_name: Option<&'a str>, target: &'a Target,
    ) -> Sought<'a> {
        Sought {
            success: true,
            consumer_group,
            queue_name,
            partition_name,
            updated: partition_name.map(|_| true),
            seek_to_end: *target == Target::End,
            target_timestamp: target.text(),
            partitions_updated: self.partitions,
            clamped: 0 < self.clamped_to_start + self.clamped_to_end,
            clamped_to_start: self.clamped_to_start,
            clamped_to_end: self.clamped_to_end,
        }
    }
}

/// A step is a transaction, and memory holds one step: when a later one fails, those before it stay done, and the
/// same request again does the rest.
async fn seek(app: &App, group: &str, queue: &str, partition: Option<&str>, target: &Target) -> Result<Moved, Error> {
    let mut moved = Moved::default();
    let Some(queue_id) = queue_id(&app.db.conn().await?, queue, DEFAULT_TENANT).await? else { return Ok(moved) };
    let seek = Seek { queue_id, partition, group, at: target.time() };
    let mut after = None;
    loop {
        let conn = app.db.conn().await?;
        let step = retried(|| log_seek_step_v1(&conn, &seek, after.as_deref(), SEEK_ROWS_MAX)).await?;
        moved.partitions += step.moved;
        moved.clamped_to_start += step.clamped_to_start;
        moved.clamped_to_end += step.clamped_to_end;
        if 0 < step.moved {
            app.wake.moved(queue, group, usize::try_from(step.moved).expect("a step is small"));
        }
        if step.done {
            return Ok(moved);
        }
        after = step.last;
    }
}
