//! Routes of pop: from one partition, from a queue, from every queue that matches.

mod answer;
mod autopilot;
mod command;
mod described;
mod leased;
mod wait;

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use metrics::counter;
use serde_json::{Value, json};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouterExt};
use utoipa_axum::routes;

use super::params::Params;
use super::{App, metrics as http_metrics};
use crate::error::Error;
pub(super) use answer::utc_text;
pub(super) use autopilot::Autopilot;
pub(super) use command::{BATCH_MAX, LEASE_SECONDS_MAX};
use command::{MatchingQuery, Pop, PopQuery, Source};
use wait::Waited;

/// When a client that could not be parked may come back.
const RETRY_AFTER_SECONDS: &str = "1";

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(from_matching).map(|route| route.head(only_get)))
        .routes(routes!(from_queue).map(|route| route.head(only_get)))
        .routes(routes!(from_partition).map(|route| route.head(only_get)))
}

/// A HEAD served as a GET without its body would claim messages and throw them away.
async fn only_get() -> StatusCode {
    StatusCode::METHOD_NOT_ALLOWED
}

/// Takes messages from the queues of a namespace, of a task, or of both.
#[utoipa::path(
    get, path = "/api/v1/pop", params(MatchingQuery, PopQuery),
    responses((status = 200, body = described::Popped), (status = 204), (status = 429), (status = 503))
)]
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

/// Takes messages from the partitions of a queue.
#[utoipa::path(
    get, path = "/api/v1/pop/queue/{queue}", params(PopQuery),
    responses((status = 200, body = described::Popped), (status = 204), (status = 429), (status = 503))
)]
async fn from_queue(
    State(app): State<Arc<App>>, path: Result<Path<String>, PathRejection>, params: Result<Params, Error>,
) -> Response {
    let command = params.and_then(|params| {
        let Path(queue) = path.map_err(bad_path)?;
        Pop::new(Source::queue(queue)?, &params, &app.settings)
    });
    respond(&app, command).await
}

/// Takes messages from one partition.
#[utoipa::path(
    get, path = "/api/v1/pop/queue/{queue}/partition/{partition}", params(PopQuery),
    responses((status = 200, body = described::Popped), (status = 204), (status = 429), (status = 503))
)]
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
    let mut pop = match command {
        Ok(pop) => pop,
        Err(error) => return refuse(&error),
    };
    let flight = pop.is_width_open.then(|| app.autopilot.board(&pop.source, &pop.claim.group));
    if let Some(flight) = &flight {
        pop.claim.partitions = flight.width;
    }
    let pop = Arc::new(pop);
    match wait::pop(app, &pop).await {
        Ok(Waited::Found(leased)) => {
            if let Some(flight) = flight {
                flight.found(leased.partitions());
            }
            for delivery in &leased.deliveries {
                app.telemetry.popped(&delivery.queue, delivery.take as u64, delivery.created_at);
            }
            answer::found(&app.settings.sealer, &pop, leased).await.unwrap_or_else(|error| refuse(&error))
        }
        Ok(Waited::Nothing(conflation)) => {
            if let Some(flight) = flight {
                flight.found(0);
            }
            if let Source::Queue(queue) | Source::Partition { queue, .. } = &pop.source {
                app.telemetry.popped_nothing(queue);
            }
            counter!("ebbtide_pop_empty_total").increment(1);
            match conflation {
                Some(conflation) if conflation.is_said() => answer::nothing(&pop, conflation.text()),
                // Without a word a client would take this for a server that knows no conflation.
                None if pop.claim.conflation => answer::nothing(&pop, answer::PAUSED),
                _ => StatusCode::NO_CONTENT.into_response(),
            }
        }
        Ok(Waited::Full) => {
            let body = failure("too many pops wait on this server");
            (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, RETRY_AFTER_SECONDS)], Json(body)).into_response()
        }
        Err(error) => refuse(&error),
    }
}

fn refuse(error: &Error) -> Response {
    if error.is_away() {
        http_metrics::failed(error);
        let body = failure(&error.to_string());
        return (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, RETRY_AFTER_SECONDS)], Json(body)).into_response();
    }
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
