//! Is the server up, and does its database answer.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tokio::time::timeout;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(health))
}

/// How the server is.
#[derive(Serialize, ToSchema)]
struct Health {
    status: &'static str,
    database: &'static str,
    engine: &'static str,
    version: &'static str,
}

/// Longest wait for the database: whoever probes gives up soon after.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(5);

/// Whether the server is up and its database answers.
#[utoipa::path(get, path = "/health", responses((status = 200, body = Health), (status = 503, body = Health)))]
async fn health(State(app): State<Arc<App>>) -> Response {
    let (status, health, database) = if timeout(ANSWER_WAIT_MAX, app.db.answers()).await == Ok(true) {
        (StatusCode::OK, "healthy", "connected")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "unhealthy", "disconnected")
    };
    let body = Health { status: health, database, engine: "ebbtide", version: env!("CARGO_PKG_VERSION") };
    (status, Json(body)).into_response()
}
