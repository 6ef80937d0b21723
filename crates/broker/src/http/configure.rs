//! `POST /api/v1/configure` and `DELETE /api/v1/resources/queues/{queue}`.

use std::sync::Arc;

use axum::extract::State;
use axum::routing::delete;
use axum::{Json, Router};
use serde_json::{Value, json};

use super::App;
use super::path::Segments;
use crate::db::configure::delete_queue_v1;
use crate::error::Error;
use crate::id::{DEFAULT_TENANT, checked_name};

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new().route("/api/v1/resources/queues/{queue}", delete(delete_queue))
}

/// One transaction, however large the queue: past the statement time-out nothing of it is deleted.
async fn delete_queue(State(app): State<Arc<App>>, Segments(queue): Segments<String>) -> Result<Json<Value>, Error> {
    let queue = checked_name("queue", &queue)?;
    let conn = app.db.conn().await?;
    let result = match delete_queue_v1(&conn, queue, DEFAULT_TENANT).await {
        // Once more: whoever won the race has ended by now.
        Err(error) if error.is_retryable() => delete_queue_v1(&conn, queue, DEFAULT_TENANT).await,
        result => result,
    }?;
    let message =
        if result.existed { "the queue and all that was in it are deleted" } else { "there is no such queue" };
    Ok(Json(json!({
        "deleted": result.deleted,
        "existed": result.existed,
        "queue": queue,
        "message": message,
    })))
}
