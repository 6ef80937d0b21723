//! Is the server up, and does its database answer.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::json;
use tokio::time::timeout;

use super::App;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new().route("/health", get(health))
}

/// Longest wait for the database: whoever probes gives up soon after.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(5);

async fn health(State(app): State<Arc<App>>) -> Response {
    let (status, health, database) = if timeout(ANSWER_WAIT_MAX, app.db.answers()).await == Ok(true) {
        (StatusCode::OK, "healthy", "connected")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "unhealthy", "disconnected")
    };
    let body = json!({
        "status": health,
        "database": database,
        "engine": "ebbtide",
        "version": env!("CARGO_PKG_VERSION"),
    });
    (status, Json(body)).into_response()
}
