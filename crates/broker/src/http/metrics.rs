//! Prometheus text, and the counting of requests.

use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use axum::routing::get;
use metrics::{counter, histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::time::Instant;
use tracing::error;

use super::App;
use crate::error::Error;
use crate::telemetry;

/// Upper bounds in seconds, from a fast hit to a long poll that ran out.
const SECONDS_BUCKETS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();

/// Makes the process's recorder, once; later calls change nothing.
pub(super) fn install() {
    RECORDER.get_or_init(|| {
        PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), SECONDS_BUCKETS)
            .expect("the list of buckets is not empty")
            .install_recorder()
            .expect("nothing else in this process installs a recorder")
    });
}

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new().route("/metrics/prometheus", get(render))
}

async fn render() -> String {
    let handle = RECORDER.get().expect("installed with the state");
    handle.run_upkeep();
    handle.render()
}

/// Counts each request and its time by route, method and status.
pub(super) async fn measure(State(app): State<Arc<App>>, path: MatchedPath, request: Request, next: Next) -> Response {
    let method = request.method().as_str().to_owned();
    let route = path.as_str().to_owned();
    if let Some(kind) = kind(&route) {
        app.telemetry.requested(kind);
    }
    let started = Instant::now();
    let response = next.run(request).await;
    if response.status().is_server_error() {
        app.telemetry.failed();
    }
    let status = response.status().as_u16().to_string();
    histogram!("ebbtide_http_request_seconds", "route" => route.clone(), "method" => method.clone())
        .record(started.elapsed().as_secs_f64());
    counter!("ebbtide_http_requests_total", "route" => route, "method" => method, "status" => status).increment(1);
    response
}

fn kind(route: &str) -> Option<telemetry::Request> {
    let path = route.strip_prefix("/api/v1/")?;
    match path.split('/').next()? {
        "push" => Some(telemetry::Request::Push),
        "pop" => Some(telemetry::Request::Pop),
        "ack" => Some(telemetry::Request::Ack),
        "transaction" => Some(telemetry::Request::Transaction),
        _ => None,
    }
}

/// Counts and logs a failure that is the server's.
pub(super) fn failed(error: &Error) {
    counter!("ebbtide_errors_total").increment(1);
    error!(target: "http", %error, "request failed");
}
