//! Routes of the server itself: its spool.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(buffers))
}

/// The spool of the server that answers.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Buffers {
    /// Messages that wait to be replayed.
    pending: usize,
    /// Messages that the database refused for good; they are in `failed.jsonl`.
    failed: usize,
    /// The database answered when it was last needed.
    db_healthy: bool,
    /// Always 0: a server has one spool.
    worker: u32,
}

/// What this server keeps on its disk while the database is away.
#[utoipa::path(get, path = "/api/v1/status/buffers", responses((status = 200, body = Buffers)))]
async fn buffers(State(app): State<Arc<App>>) -> Json<Buffers> {
    let status = app.spool.status();
    Json(Buffers { pending: status.pending, failed: status.failed, db_healthy: status.is_database_there, worker: 0 })
}
