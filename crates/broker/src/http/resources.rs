//! Resources: queues, partitions, namespaces and tasks with their counts.

mod clear;
mod counted;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::instant::milliseconds;
use super::openapi::query::query;
use super::params::{Params, Slice, SliceQuery};
use super::path::Segments;
use crate::db::consumer_groups::log_conflating_v1;
use crate::db::resources::{
    Filter, Label, Labelled, Page, log_depth_v1, log_label_list_v1, log_overview_v1, log_partition_list_v1,
    log_queue_list_v1,
};
use crate::db::space::{Usage, usage};
use crate::error::Error;
use crate::id::{DEFAULT_TENANT, checked_name};
use counted::{Everything, LabelCounts, PartitionRow, QueueDetail, QueueRow};

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

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Queues<'a> {
    queues: Vec<QueueRow<'a>>,
    /// On all pages.
    total: i64,
    pagination: Slice,
    /// Values stored by key, by the database's statistics.
    kv_rows: u64,
    /// Bytes of their table, with indexes and dead rows.
    kv_bytes: u64,
    /// Timers that have not fired.
    timer_rows: u64,
    timer_bytes: u64,
}

/// Lists queues with their counts, newest first.
#[utoipa::path(
    get, path = "/api/v1/resources/queues", params(QueuesQuery, SliceQuery),
    responses((status = 200, body = Queues<'_>))
)]
async fn queues(State(app): State<Arc<App>>, params: Params) -> Result<Response, Error> {
    let filter = Filter {
        name: None,
        search: params.name("search")?,
        namespace: params.name("namespace")?,
        task: params.name("task")?,
    };
    let pagination = params.slice()?;
    let conn = app.db.conn().await?;
    let page = log_queue_list_v1(&conn, &filter, pagination.limit, pagination.offset, DEFAULT_TENANT).await?;
    let Usage { kv_rows, kv_bytes, timer_rows, timer_bytes } = usage(&conn).await?;
    let queues = Queues {
        queues: page.rows.iter().map(QueueRow::from).collect(),
        total: page.found,
        pagination,
        kv_rows,
        kv_bytes,
        timer_rows,
        timer_bytes,
    };
    Ok(Json(queues).into_response())
}

/// Shows a queue with its partitions, totals and options.
///
/// Totals are over all partitions, `limit` and `offset` choose which of them are listed.
#[utoipa::path(
    get, path = "/api/v1/resources/queues/{queue}", params(SliceQuery),
    responses((status = 200, body = QueueDetail<'_>), (status = 404))
)]
async fn queue(
    State(app): State<Arc<App>>, Segments(name): Segments<String>, params: Params,
) -> Result<Response, Error> {
    let name = checked_name("queue", &name)?;
    let slice = params.slice()?;
    let conn = app.db.conn().await?;
    let filter = Filter { name: Some(name), ..Filter::default() };
    let mut found = log_queue_list_v1(&conn, &filter, 1, 0, DEFAULT_TENANT).await?;
    let queue = found.rows.pop().ok_or_else(no_such_queue)?;
    let page = log_partition_list_v1(&conn, Some(name), slice.limit, slice.offset, DEFAULT_TENANT).await?;
    Ok(Json(QueueDetail::new(&queue, &page.rows, slice)).into_response())
}

query!(DepthQuery:
    name("group", "For this group; else for the slowest."),
);

/// What is pending in a queue. For a group that conflates a partition is effectively one message.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct QueueDepth {
    queue: String,
    group: Option<String>,
    pending: i64,
    partitions_pending: i64,
    conflation: bool,
    effective_pending: i64,
    partitions: Vec<PartitionDepth>,
}

#[derive(Serialize, ToSchema)]
struct PartitionDepth {
    partition: String,
    pending: i64,
}

/// Shows what is pending in a queue, the deepest partition first.
#[utoipa::path(
    get, path = "/api/v1/resources/queues/{queue}/depth", params(DepthQuery, SliceQuery),
    responses((status = 200, body = QueueDepth), (status = 404))
)]
async fn depth(
    State(app): State<Arc<App>>, Segments(queue): Segments<String>, params: Params,
) -> Result<Json<QueueDepth>, Error> {
    checked_name("queue", &queue)?;
    let group = params.name("group")?;
    let Slice { limit, offset } = params.slice()?;
    let conn = app.db.conn().await?;
    let depth = log_depth_v1(&conn, &queue, group, limit, offset, DEFAULT_TENANT).await?.ok_or_else(no_such_queue)?;
    let conflation = match group {
        Some(group) => !log_conflating_v1(&conn, Some(&queue), Some(group), DEFAULT_TENANT).await?.is_empty(),
        None => false,
    };
    let partitions = depth.partitions.into_iter().map(|(partition, pending)| PartitionDepth { partition, pending });
    Ok(Json(QueueDepth {
        group: group.map(str::to_owned),
        pending: depth.pending,
        partitions_pending: depth.partitions_pending,
        conflation,
        effective_pending: if conflation { depth.partitions_pending } else { depth.pending },
        partitions: partitions.collect(),
        queue,
    }))
}

query!(PartitionsQuery:
    name("queue", "Only of this queue."),
);

#[derive(Serialize, ToSchema)]
struct Partitions<'a> {
    partitions: Vec<PartitionRow<'a>>,
    /// On all pages.
    total: i64,
    pagination: Slice,
}

/// Lists partitions with their counts.
#[utoipa::path(
    get, path = "/api/v1/resources/partitions", params(PartitionsQuery, SliceQuery),
    responses((status = 200, body = Partitions<'_>))
)]
async fn partitions(State(app): State<Arc<App>>, params: Params) -> Result<Response, Error> {
    let queue = params.name("queue")?;
    let pagination = params.slice()?;
    let conn = app.db.conn().await?;
    let page = log_partition_list_v1(&conn, queue, pagination.limit, pagination.offset, DEFAULT_TENANT).await?;
    let partitions = page.rows.iter().map(PartitionRow::from).collect();
    Ok(Json(Partitions { partitions, total: page.found, pagination }).into_response())
}

#[derive(Serialize, ToSchema)]
struct Namespaces {
    namespaces: Vec<Namespace>,
    /// On all pages.
    total: i64,
    pagination: Slice,
}

#[derive(Serialize, ToSchema)]
struct Namespace {
    namespace: String,
    #[serde(flatten)]
    counts: LabelCounts,
}

/// Lists namespaces with their counts.
#[utoipa::path(
    get, path = "/api/v1/resources/namespaces", params(SliceQuery), responses((status = 200, body = Namespaces))
)]
async fn namespaces(State(app): State<Arc<App>>, params: Params) -> Result<Json<Namespaces>, Error> {
    let (pagination, page) = labels(&app, &params, Label::Namespace).await?;
    let namespace = |row: Labelled| Namespace { counts: LabelCounts::from(&row), namespace: row.label };
    let namespaces = page.rows.into_iter().map(namespace).collect();
    Ok(Json(Namespaces { namespaces, total: page.found, pagination }))
}

#[derive(Serialize, ToSchema)]
struct Tasks {
    tasks: Vec<Task>,
    /// On all pages.
    total: i64,
    pagination: Slice,
}

#[derive(Serialize, ToSchema)]
struct Task {
    task: String,
    #[serde(flatten)]
    counts: LabelCounts,
}

/// Lists tasks with their counts.
#[utoipa::path(get, path = "/api/v1/resources/tasks", params(SliceQuery), responses((status = 200, body = Tasks)))]
async fn tasks(State(app): State<Arc<App>>, params: Params) -> Result<Json<Tasks>, Error> {
    let (pagination, page) = labels(&app, &params, Label::Task).await?;
    let task = |row: Labelled| Task { counts: LabelCounts::from(&row), task: row.label };
    Ok(Json(Tasks { tasks: page.rows.into_iter().map(task).collect(), total: page.found, pagination }))
}

async fn labels(app: &App, params: &Params, by: Label) -> Result<(Slice, Page<Labelled>), Error> {
    let slice = params.slice()?;
    let page = log_label_list_v1(&app.db.conn().await?, by, slice.limit, slice.offset, DEFAULT_TENANT).await?;
    Ok((slice, page))
}

/// Counts everything.
#[utoipa::path(get, path = "/api/v1/resources/overview", responses((status = 200, body = Everything)))]
async fn overview(State(app): State<Arc<App>>) -> Result<Json<Everything>, Error> {
    let (all, at) = log_overview_v1(&app.db.conn().await?, DEFAULT_TENANT).await?;
    Ok(Json(Everything::new(&all, milliseconds(at))))
}
