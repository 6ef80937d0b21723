//! Analytics: time lines of what servers flushed, and what PostgreSQL says about itself.

mod shapes;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::openapi::query::query;
use super::params::{Params, Slice, SliceQuery};
use super::range::{QueuesQuery, TimesQuery, filter, times};
use crate::db::analytics::{
    get_parked_replicas_v1, get_postgres_stats_v1, get_queue_lag_v1, get_queue_ops_v1, get_retention_timeseries_v1,
    get_system_metrics_v1, get_worker_metrics_v1,
};
use crate::error::Error;
use crate::id::DEFAULT_TENANT;
use shapes::{LagPoint, Parked, Postgres, QueueOps, Retained, SystemMetrics, WorkerMetrics};
pub(super) use shapes::{TimeRange, Worker};

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(system_metrics))
        .routes(routes!(worker_metrics))
        .routes(routes!(queue_ops))
        .routes(routes!(queue_lag))
        .routes(routes!(parked))
        .routes(routes!(retention))
        .routes(routes!(postgres_stats))
}

const WORKER_MAX: i64 = i32::MAX as i64;

query!(HostQuery: name("hostname", "Only servers on this machine."));
query!(WorkerQuery: integer("workerId", 0..=WORKER_MAX, "Only this worker of a server."));

fn worker(params: &Params) -> Result<Option<i32>, Error> {
    let given = params.integer("workerId", 0..=WORKER_MAX)?;
    Ok(given.map(|worker| i32::try_from(worker).expect("the range was checked")))
}

/// Shows what the processes of servers used, by server and time.
#[utoipa::path(
    get, path = "/api/v1/analytics/system-metrics", params(TimesQuery, HostQuery, WorkerQuery),
    responses((status = 200, body = SystemMetrics))
)]
async fn system_metrics(State(app): State<Arc<App>>, params: Params) -> Result<Json<SystemMetrics>, Error> {
    let (filter, hostname) = (times(&params)?, params.name("hostname")?);
    let worker = worker(&params)?.map(|worker| worker.to_string());
    let conn = app.db.conn().await?;
    get_system_metrics_v1(&conn, filter.from, filter.to, hostname, worker.as_deref()).await.map(Json)
}

/// Shows what servers did, by time, newest first.
///
/// A server's counts are of all queues together; the filters by queue are for the list of queues and for what is pending.
#[utoipa::path(
    get, path = "/api/v1/analytics/worker-metrics", params(TimesQuery, QueuesQuery, HostQuery, WorkerQuery),
    responses((status = 200, body = WorkerMetrics))
)]
async fn worker_metrics(State(app): State<Arc<App>>, params: Params) -> Result<Json<WorkerMetrics>, Error> {
    let (filter, hostname, worker) = (filter(&params)?, params.name("hostname")?, worker(&params)?);
    let conn = app.db.conn().await?;
    get_worker_metrics_v1(&conn, &filter, hostname, worker, DEFAULT_TENANT).await.map(Json)
}

/// Shows what was done to queues, by time: `limit` queues, those with the most messages first.
#[utoipa::path(
    get, path = "/api/v1/analytics/queue-ops", params(TimesQuery, QueuesQuery, SliceQuery),
    responses((status = 200, body = QueueOps))
)]
async fn queue_ops(State(app): State<Arc<App>>, params: Params) -> Result<Json<QueueOps>, Error> {
    let (filter, Slice { limit, offset }) = (filter(&params)?, params.slice()?);
    get_queue_ops_v1(&app.db.conn().await?, &filter, limit, offset, DEFAULT_TENANT).await.map(Json)
}

/// Shows how old messages were when they were delivered, by queue and time.
#[utoipa::path(
    get, path = "/api/v1/analytics/queue-lag", params(TimesQuery, QueuesQuery, SliceQuery),
    responses((status = 200, body = [LagPoint]))
)]
async fn queue_lag(State(app): State<Arc<App>>, params: Params) -> Result<Json<Vec<LagPoint>>, Error> {
    let (filter, Slice { limit, offset }) = (filter(&params)?, params.slice()?);
    get_queue_lag_v1(&app.db.conn().await?, &filter, limit, offset, DEFAULT_TENANT).await.map(Json)
}

/// Shows how many pops waited, by queue, server and time.
#[utoipa::path(
    get, path = "/api/v1/analytics/queue-parked-replicas", params(TimesQuery, QueuesQuery, HostQuery, SliceQuery),
    responses((status = 200, body = Parked))
)]
async fn parked(State(app): State<Arc<App>>, params: Params) -> Result<Json<Parked>, Error> {
    let (filter, hostname) = (filter(&params)?, params.name("hostname")?);
    let Slice { limit, offset } = params.slice()?;
    let conn = app.db.conn().await?;
    get_parked_replicas_v1(&conn, &filter, hostname, limit, offset, DEFAULT_TENANT).await.map(Json)
}

/// Shows what retention deleted, by rule and time.
#[utoipa::path(
    get, path = "/api/v1/analytics/retention", params(TimesQuery, QueuesQuery), responses((status = 200, body = Retained))
)]
async fn retention(State(app): State<Arc<App>>, params: Params) -> Result<Json<Retained>, Error> {
    let filter = filter(&params)?;
    get_retention_timeseries_v1(&app.db.conn().await?, &filter, DEFAULT_TENANT).await.map(Json)
}

/// Shows what PostgreSQL says about itself and about the tables of the broker.
#[utoipa::path(get, path = "/api/v1/analytics/postgres-stats", responses((status = 200, body = Postgres)))]
async fn postgres_stats(State(app): State<Arc<App>>) -> Result<Json<Postgres>, Error> {
    get_postgres_stats_v1(&app.db.conn().await?).await.map(Json)
}
