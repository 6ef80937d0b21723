//! Resources: queues, partitions, namespaces and tasks with their counts.

mod clear;
mod counted;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::instant::milliseconds;
use super::openapi::query::query;
use super::params::{Params, Slice, SliceQuery};
use super::path::Segments;
use crate::db::resources::{
    Filter, Label, log_depth_v1, log_label_list_v1, log_overview_v1, log_partition_list_v1, log_queue_list_v1,
};
use crate::error::Error;
use crate::id::{DEFAULT_TENANT, checked_name};
use counted::{counts, partition, queue_row};

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(queues))
        .routes(routes!(queue))
        .routes(routes!(depth))
        .routes(routes!(partitions))
        .routes(routes!(namespaces))
        .routes(routes!(tasks))
        .routes(routes!(overview))
        .routes(routes!(clear::clear))
}

fn no_such_queue() -> Error {
    Error::NotFound("Queue not found".to_owned())
}

query!(QueuesQuery:
    name("search", "Only queues with this in their name."),
    name("namespace", "Only of this namespace."),
    name("task", "Only of this task."),
);

/// Lists queues with their counts, newest first.
#[utoipa::path(
    get, path = "/api/v1/resources/queues", params(QueuesQuery, SliceQuery), responses((status = 200, body = Value))
)]
async fn queues(State(app): State<Arc<App>>, params: Params) -> Result<Json<Value>, Error> {
    let filter = Filter {
        name: None,
        search: params.name("search")?,
        namespace: params.name("namespace")?,
        task: params.name("task")?,
    };
    let slice = params.slice()?;
    let conn = app.db.conn().await?;
    let page = log_queue_list_v1(&conn, &filter, slice.limit, slice.offset, DEFAULT_TENANT).await?;
    let queues: Vec<Value> = page.rows.iter().map(queue_row).collect();
    // There are no such stores, so nothing is counted in them.
    Ok(Json(json!({
        "queues": queues,
        "total": page.found,
        "pagination": slice,
        "kvRows": null,
        "kvBytes": null,
        "timerRows": null,
        "timerBytes": null,
    })))
}

/// Shows a queue with its partitions, totals and options.
///
/// Totals are over all partitions, `limit` and `offset` choose which of them are listed.
#[utoipa::path(
    get, path = "/api/v1/resources/queues/{queue}", params(SliceQuery),
    responses((status = 200, body = Value), (status = 404))
)]
async fn queue(
    State(app): State<Arc<App>>, Segments(name): Segments<String>, params: Params,
) -> Result<Json<Value>, Error> {
    let name = checked_name("queue", &name)?;
    let slice = params.slice()?;
    let conn = app.db.conn().await?;
    let filter = Filter { name: Some(name), ..Filter::default() };
    let mut found = log_queue_list_v1(&conn, &filter, 1, 0, DEFAULT_TENANT).await?;
    let queue = found.rows.pop().ok_or_else(no_such_queue)?;
    let page = log_partition_list_v1(&conn, Some(name), slice.limit, slice.offset, DEFAULT_TENANT).await?;
    let partitions: Vec<Value> = page.rows.iter().map(partition).collect();
    Ok(Json(json!({
        "id": queue.id.0,
        "name": queue.name,
        "namespace": queue.namespace,
        "task": queue.task,
        "createdAt": milliseconds(queue.created_at),
        "partitions": partitions,
        "partitionCount": queue.partitions,
        "pagination": slice,
        "totals": counts(&queue.counts),
        "retainedBytes": queue.retained_bytes,
        "segments": {"segments": null, "messages": queue.counts.total},
        "options": queue.options,
    })))
}

query!(DepthQuery:
    name("group", "For this group; else for the slowest."),
);

/// Shows what is pending in a queue, the deepest partition first.
///
/// Every message is pending by itself, since no group conflates.
#[utoipa::path(
    get, path = "/api/v1/resources/queues/{queue}/depth", params(DepthQuery, SliceQuery),
    responses((status = 200, body = Value), (status = 404))
)]
async fn depth(
    State(app): State<Arc<App>>, Segments(queue): Segments<String>, params: Params,
) -> Result<Json<Value>, Error> {
    let queue = checked_name("queue", &queue)?;
    let group = params.name("group")?;
    let Slice { limit, offset } = params.slice()?;
    let conn = app.db.conn().await?;
    let depth = log_depth_v1(&conn, queue, group, limit, offset, DEFAULT_TENANT).await?.ok_or_else(no_such_queue)?;
    let partitions: Vec<Value> = depth
        .partitions
        .iter()
        .map(|(partition, pending)| json!({"partition": partition, "pending": pending}))
        .collect();
    Ok(Json(json!({
        "queue": queue,
        "group": group,
        "pending": depth.pending,
        "partitionsPending": depth.partitions_pending,
        "conflation": false,
        "effectivePending": depth.pending,
        "partitions": partitions,
    })))
}

query!(PartitionsQuery:
    name("queue", "Only of this queue."),
);

/// Lists partitions with their counts.
#[utoipa::path(
    get, path = "/api/v1/resources/partitions", params(PartitionsQuery, SliceQuery),
    responses((status = 200, body = Value))
)]
async fn partitions(State(app): State<Arc<App>>, params: Params) -> Result<Json<Value>, Error> {
    let queue = params.name("queue")?;
    let slice = params.slice()?;
    let conn = app.db.conn().await?;
    let page = log_partition_list_v1(&conn, queue, slice.limit, slice.offset, DEFAULT_TENANT).await?;
    let partitions: Vec<Value> = page.rows.iter().map(partition).collect();
    Ok(Json(json!({"partitions": partitions, "total": page.found, "pagination": slice})))
}

/// Lists namespaces with their counts.
#[utoipa::path(
    get, path = "/api/v1/resources/namespaces", params(SliceQuery), responses((status = 200, body = Value))
)]
async fn namespaces(State(app): State<Arc<App>>, params: Params) -> Result<Json<Value>, Error> {
    labels(&app, &params, Label::Namespace, "namespaces", "namespace").await
}

/// Lists tasks with their counts.
#[utoipa::path(get, path = "/api/v1/resources/tasks", params(SliceQuery), responses((status = 200, body = Value)))]
async fn tasks(State(app): State<Arc<App>>, params: Params) -> Result<Json<Value>, Error> {
    labels(&app, &params, Label::Task, "tasks", "task").await
}

async fn labels(app: &App, params: &Params, by: Label, many: &str, one: &str) -> Result<Json<Value>, Error> {
    let slice = params.slice()?;
    let page = log_label_list_v1(&app.db.conn().await?, by, slice.limit, slice.offset, DEFAULT_TENANT).await?;
    let rows = page.rows.iter().map(|row| {
        json!({
            one: row.label,
            "queues": row.queues,
            "partitions": row.partitions,
            "messages": {"total": row.total, "pending": row.pending},
        })
    });
    let rows: Vec<Value> = rows.collect();
    Ok(Json(json!({many: rows, "total": page.found, "pagination": slice})))
}

/// Counts everything.
#[utoipa::path(get, path = "/api/v1/resources/overview", responses((status = 200, body = Value)))]
async fn overview(State(app): State<Arc<App>>) -> Result<Json<Value>, Error> {
    let (all, at) = log_overview_v1(&app.db.conn().await?, DEFAULT_TENANT).await?;
    let lag = |[avg, median, min, max]: [i64; 4]| json!({"avg": avg, "median": median, "min": min, "max": max});
    Ok(Json(json!({
        "queues": all.queues,
        "partitions": all.partitions,
        "namespaces": all.namespaces,
        "tasks": all.tasks,
        "messages": {
            "total": all.total,
            "pending": all.pending,
            "processing": all.processing,
            "completed": all.completed,
            "failed": null,
            "deadLetter": all.dead,
        },
        "lag": {"time": lag(all.time_lag), "offset": lag(all.offset_lag)},
        "throughput": {"ingestedPerSecond": all.pushed_per_second, "processedPerSecond": all.acked_per_second},
        "timestamp": milliseconds(at),
        // Counted for this answer.
        "statsAge": 0,
    })))
}
