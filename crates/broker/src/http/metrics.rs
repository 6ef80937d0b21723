//! Prometheus text, and the counting of requests.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use ebbtide_sweep::{LineLimit, run_every};
use metrics::{Counter, Histogram, counter, histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::error;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use crate::error::Error;
use crate::telemetry;

/// Upper bounds in seconds, from a fast hit to a long poll that ran out.
const SECONDS_BUCKETS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// While the database is away every request may fail, as often as clients try again.
static AWAY_LINES: LazyLock<Mutex<LineLimit>> = LazyLock::new(|| Mutex::new(LineLimit::new(AWAY_LINE_INTERVAL)));
const AWAY_LINE_INTERVAL: Duration = Duration::from_secs(10);

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

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(render))
}

/// Requests, latencies, messages and deletions as Prometheus reads them.
#[utoipa::path(get, path = "/metrics/prometheus", responses((status = 200, body = String)))]
async fn render() -> String {
    let handle = RECORDER.get().expect("installed with the state");
    handle.run_upkeep();
    handle.render()
}

/// Folds what was recorded into its buckets, now and then. Between two folds each sample is kept.
pub(super) async fn keep_up(stop: CancellationToken) {
    let handle = RECORDER.get().expect("installed with the state");
    run_every(UPKEEP_INTERVAL, &stop, async |_| handle.run_upkeep()).await;
}

/// Counts each request and its time by route, method and status.
pub(super) async fn measure(State(app): State<Arc<App>>, path: MatchedPath, request: Request, next: Next) -> Response {
    let method = request.method().clone();
    app.telemetry.answered();
    if let Some(kind) = kind(path.as_str()) {
        app.telemetry.requested(kind);
    }
    let started = Instant::now();
    let response = next.run(request).await;
    if response.status().is_server_error() {
        app.telemetry.failed();
    }
    let seconds = started.elapsed().as_secs_f64();
    METERS.with_borrow_mut(|meters| meters.count(path.as_str(), &method, response.status(), seconds));
    response
}

thread_local! {
    static METERS: RefCell<Meters> = RefCell::default();
}

/// The meters this thread has used. Finding one in the recorder by its labels costs more than counting.
#[derive(Default)]
struct Meters(HashMap<String, Vec<(Method, StatusCode, Counter, Histogram)>>);

impl Meters {
    fn count(&mut self, route: &str, method: &Method, status: StatusCode, seconds: f64) {
        if !self.0.contains_key(route) {
            self.0.insert(route.to_owned(), Vec::new());
        }
        let meters = self.0.get_mut(route).expect("made above");
        let known = meters.iter().position(|(m, s, ..)| m == method && *s == status);
        let at = known.unwrap_or_else(|| {
            let (path, verb, code) = (route.to_owned(), method.to_string(), status.as_str().to_owned());
            let times = histogram!("ebbtide_http_request_seconds", "route" => path.clone(), "method" => verb.clone());
            let requests = counter!("ebbtide_http_requests_total", "route" => path, "method" => verb, "status" => code);
            meters.push((method.clone(), status, requests, times));
            meters.len() - 1
        });
        let (_, _, requests, times) = &meters[at];
        requests.increment(1);
        times.record(seconds);
    }
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
    if !error.is_away() {
        error!(target: "http", %error, "request failed");
    } else if let Some(suppressed) = AWAY_LINES.lock().unwrap_or_else(PoisonError::into_inner).admit() {
        error!(target: "http", %error, suppressed, "requests fail: the database is away");
    }
}
