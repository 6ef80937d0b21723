//! Routes of pop: from one partition, from a queue, from every queue that matches.

mod answer;
mod command;
mod leased;
mod wait;

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use metrics::counter;
use serde_json::{Value, json};

use super::params::Params;
use super::{App, metrics as http_metrics};
use crate::error::Error;
pub(super) use answer::utc_text;
pub(super) use command::LEASE_SECONDS_MAX;
use command::{Pop, Source};
use wait::Waited;

/// When a client that could not be parked may come back.
const RETRY_AFTER_SECONDS: &str = "1";

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/api/v1/pop", get(from_matching).head(only_get))
        .route("/api/v1/pop/queue/{queue}", get(from_queue).head(only_get))
        .route("/api/v1/pop/queue/{queue}/partition/{partition}", get(from_partition).head(only_get))
}

/// A HEAD served as a GET without its body would claim messages and throw them away.
async fn only_get() -> StatusCode {
    StatusCode::METHOD_NOT_ALLOWED
}

async fn from_matching(State(app): State<Arc<App>>, params: Result<Params, Error>) -> Response {
    let command = params.and_then(|params| {
        let source = Source::matching(&params)?;
        source.map(|source| Pop::new(source, &params, &app.settings)).transpose()
    });
    match command.transpose() {
        Some(command) => respond(&app, command).await,
        None => (StatusCode::BAD_REQUEST, Json(failure("namespace or task is required"))).into_response(),
    }
}

async fn from_queue(
    State(app): State<Arc<App>>, path: Result<Path<String>, PathRejection>, params: Result<Params, Error>,
) -> Response {
    let command = params.and_then(|params| {
        let Path(queue) = path.map_err(bad_path)?;
        Pop::new(Source::queue(queue)?, &params, &app.settings)
    });
    respond(&app, command).await
}

async fn from_partition(
    State(app): State<Arc<App>>, path: Result<Path<(String, String)>, PathRejection>, params: Result<Params, Error>,
) -> Response {
    let command = params.and_then(|params| {
        let Path((queue, partition)) = path.map_err(bad_path)?;
        Pop::new(Source::partition(queue, partition)?, &params, &app.settings)
    });
    respond(&app, command).await
}

fn bad_path(rejection: PathRejection) -> Error {
    Error::invalid("path", rejection.body_text())
}

async fn respond(app: &Arc<App>, command: Result<Pop, Error>) -> Response {
    let pop = match command {
        Ok(pop) => Arc::new(pop),
        Err(error) => return refuse(&error),
    };
    match wait::pop(app, &pop).await {
        Ok(Waited::Found(leased)) => {
            for delivery in &leased.deliveries {
                app.telemetry.popped(&delivery.queue, delivery.take as u64, delivery.created_at);
            }
            answer::found(&app.settings.sealer, &pop, leased).await.unwrap_or_else(|error| refuse(&error))
        }
        Ok(Waited::Nothing) => {
            if let Source::Queue(queue) | Source::Partition { queue, .. } = &pop.source {
                app.telemetry.popped_nothing(queue);
            }
            counter!("ebbtide_pop_empty_total").increment(1);
            StatusCode::NO_CONTENT.into_response()
        }
        Ok(Waited::Full) => {
            let body = failure("too many pops wait on this server");
            (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, RETRY_AFTER_SECONDS)], Json(body)).into_response()
        }
        Err(error) => refuse(&error),
    }
}

fn refuse(error: &Error) -> Response {
    let status = error.status();
    if status.is_server_error() {
        http_metrics::failed(error);
    }
    (status, Json(failure(&error.to_string()))).into_response()
}

/// A consumer that only looks at `messages` sees none.
fn failure(text: &str) -> Value {
    json!({"success": false, "error": text, "messages": []})
}
