//! `DELETE /api/v1/queues/{queue}/clear`: deletes the messages of a queue, step by step.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use super::super::App;
use super::super::openapi::query::query;
use super::super::params::Params;
use super::super::path::Segments;
use super::super::retry::retried;
use super::no_such_queue;
use crate::db::resources::{Uncleared, log_clear_list_v1, log_clear_step_v1, queue_id};
use crate::db::{Conn, Db};
use crate::error::Error;
use crate::id::{DEFAULT_TENANT, QueueId, checked_name};

/// Segments of one step: what a push to that partition may have to wait for.
const STEP_ROWS_MAX: i32 = 1000;
/// Partitions that are looked up at once.
const PAGE_ROWS_MAX: i32 = 1000;

#[derive(Default)]
struct Cleared {
    partitions: i64,
    segments: i64,
    messages: i64,
    cursors: i64,
}

query!(ClearQuery:
    name("partition", "Only of this partition."),
);

/// What was cleared.
#[derive(Serialize, ToSchema)]
#[schema(as = Cleared)]
#[serde(rename_all = "camelCase")]
pub(super) struct Answer {
    success: bool,
    queue: String,
    partition: Option<String>,
    partitions_cleared: i64,
    messages_deleted: i64,
    segments_deleted: i64,
    cursors_moved: i64,
}

/// Deletes the messages of a queue, for every group.
///
/// What was pushed before the clearing came to its partition is deleted, for every group. Each step is a transaction
/// of one partition: when one fails, those before it stay done, and the same request again does the rest.
#[utoipa::path(
    delete, path = "/api/v1/queues/{queue}/clear", params(ClearQuery),
    responses((status = 200, body = Answer), (status = 404))
)]
pub(super) async fn clear(
    State(app): State<Arc<App>>, Segments(queue): Segments<String>, params: Params,
) -> Result<Json<Answer>, Error> {
    checked_name("queue", &queue)?;
    let partition = params.name("partition")?;
    let id = queue_id(&app.db.conn().await?, &queue, DEFAULT_TENANT).await?.ok_or_else(no_such_queue)?;
    let cleared = clear_all(&app.db, id, partition).await?;
    Ok(Json(Answer {
        success: true,
        queue,
        partition: partition.map(str::to_owned),
        partitions_cleared: cleared.partitions,
        messages_deleted: cleared.messages,
        segments_deleted: cleared.segments,
        cursors_moved: cleared.cursors,
    }))
}

async fn clear_all(db: &Db, queue_id: QueueId, partition: Option<&str>) -> Result<Cleared, Error> {
    let mut cleared = Cleared::default();
    let mut after = None;
    loop {
        let conn = db.conn().await?;
        let page = log_clear_list_v1(&conn, queue_id, partition, after.as_deref(), PAGE_ROWS_MAX).await?;
        for lane in &page {
            clear_partition(&conn, lane, &mut cleared).await?;
        }
        if page.len() < PAGE_ROWS_MAX.unsigned_abs() as usize {
            return Ok(cleared);
        }
        after = page.into_iter().next_back().map(|lane| lane.name);
    }
}

/// Ends, however fast messages are pushed: each step that does not end it deletes some of those that were there.
async fn clear_partition(conn: &Conn, lane: &Uncleared, cleared: &mut Cleared) -> Result<(), Error> {
    let mut messages = 0;
    loop {
        let step = retried(|| log_clear_step_v1(conn, lane.partition_id, lane.last_offset, STEP_ROWS_MAX)).await?;
        cleared.segments += step.segments;
        cleared.cursors += step.cursors;
        messages += step.messages;
        if step.done {
            break;
        }
    }
    cleared.messages += messages;
    cleared.partitions += i64::from(0 < messages);
    Ok(())
}
