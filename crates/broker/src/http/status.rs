//! Status: what an operator looks at first, and the refresh of what is measured now and then.

mod shapes;

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::openapi::query::query;
use super::params::{Params, Slice, SliceQuery};
use super::path::Segments;
use super::range::{QueuesQuery, TimesQuery, filter};
use crate::db::analytics::get_pushed_series_v1;
use crate::db::resources::{Filter, log_queue_list_v1};
use crate::db::stats::stats_summary_v1;
use crate::db::status::{get_status_v1, log_partition_status_v1};
use crate::error::Error;
use crate::id::{DEFAULT_TENANT, checked_name};
use crate::telemetry::{Usage, measured_all};
use shapes::{Alive, Process, Pushed, QueueStatus, Refreshed, Status, StatusOfQueue, StatusOfQueues, Summary};

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(alive))
        .routes(routes!(process))
        .routes(routes!(status))
        .routes(routes!(queues))
        .routes(routes!(queue))
        .routes(routes!(pushed))
        .routes(routes!(refresh))
}

/// How long one request measures; what is left is measured in the background.
const REFRESH_MAX: Duration = Duration::from_secs(10);

/// Says that the server answers.
#[utoipa::path(get, path = "/status", responses((status = 200, body = Alive)))]
async fn alive() -> Json<Alive> {
    Json(Alive::default())
}

/// Shows what this server's process did and uses. `/metrics/prometheus` has more.
#[utoipa::path(get, path = "/metrics", responses((status = 200, body = Process)))]
async fn process(State(app): State<Arc<App>>) -> Json<Process> {
    Json(Process::new(app.started.elapsed(), app.telemetry.lifetime(), &app.db.status(), Usage::now()))
}

/// Shows what servers and queues did and hold: `limit` queues, the newest first.
#[utoipa::path(
    get, path = "/api/v1/status", params(TimesQuery, QueuesQuery, SliceQuery), responses((status = 200, body = Status))
)]
async fn status(State(app): State<Arc<App>>, params: Params) -> Result<Json<Status>, Error> {
    let (filter, Slice { limit, offset }) = (filter(&params)?, params.slice()?);
    get_status_v1(&app.db.conn().await?, &filter, limit, offset, DEFAULT_TENANT).await.map(Json)
}

/// Lists queues with what is in them, newest first.
#[utoipa::path(
    get, path = "/api/v1/status/queues", params(QueuesQuery, SliceQuery), responses((status = 200, body = StatusOfQueues<'_>))
)]
async fn queues(State(app): State<Arc<App>>, params: Params) -> Result<Response, Error> {
    let filter = Filter {
        name: params.name("queue")?,
        search: None,
        namespace: params.name("namespace")?,
        task: params.name("task")?,
    };
    let pagination = params.slice()?;
    let conn = app.db.conn().await?;
    let page = log_queue_list_v1(&conn, &filter, pagination.limit, pagination.offset, DEFAULT_TENANT).await?;
    let queues = page.rows.iter().map(QueueStatus::from).collect();
    Ok(Json(StatusOfQueues { queues, total: page.found, pagination }).into_response())
}

/// Shows a queue with its options, its partitions and its totals.
///
/// Totals are over all partitions, `limit` and `offset` choose which of them are listed.
#[utoipa::path(
    get, path = "/api/v1/status/queues/{queue}", params(SliceQuery),
    responses((status = 200, body = StatusOfQueue<'_>), (status = 404))
)]
async fn queue(
    State(app): State<Arc<App>>, Segments(name): Segments<String>, params: Params,
) -> Result<Response, Error> {
    let name = checked_name("queue", &name)?;
    let slice = params.slice()?;
    let conn = app.db.conn().await?;
    let filter = Filter { name: Some(name), ..Filter::default() };
    let mut found = log_queue_list_v1(&conn, &filter, 1, 0, DEFAULT_TENANT).await?;
    let queue = found.rows.pop().ok_or_else(|| Error::NotFound("Queue not found".to_owned()))?;
    let partitions = log_partition_status_v1(&conn, queue.id, slice.limit, slice.offset).await?;
    Ok(Json(StatusOfQueue::new(&queue, &partitions, slice)).into_response())
}

const INTERVALS: [&str; 3] = ["minute", "hour", "day"];

query!(PushedQuery:
    time("from", "Not before this; else a day before the end."),
    time("to", "Not after this; else now."),
    word("interval", &INTERVALS, "How long each point is.").or("hour"),
);

/// Shows how many messages were pushed, by time: the newest `limit` points, oldest first.
#[utoipa::path(
    get, path = "/api/v1/status/analytics", params(PushedQuery, QueuesQuery, SliceQuery),
    responses((status = 200, body = Pushed))
)]
async fn pushed(State(app): State<Arc<App>>, params: Params) -> Result<Json<Pushed>, Error> {
    let interval = params.text("interval").unwrap_or("hour");
    if !INTERVALS.contains(&interval) {
        return Err(Error::invalid("interval", "must be minute, hour or day"));
    }
    let (filter, Slice { limit, offset }) = (filter(&params)?, params.slice()?);
    let conn = app.db.conn().await?;
    get_pushed_series_v1(&conn, interval, &filter, limit, offset, DEFAULT_TENANT).await.map(Json)
}

/// Counts every queue anew, and measures what it retains.
///
/// Ends after 10 seconds; `complete` says whether every queue had its turn.
#[utoipa::path(post, path = "/api/v1/stats/refresh", responses((status = 200, body = Refreshed)))]
async fn refresh(State(app): State<Arc<App>>) -> Result<Json<Refreshed>, Error> {
    let (complete, queues) = measured_all(&app.db, REFRESH_MAX).await?;
    let summary: Summary = stats_summary_v1(&app.db.conn().await?, DEFAULT_TENANT).await?;
    Ok(Json(Refreshed::new(complete, queues, summary)))
}
