//! The HTTP edge: routes, limits, error bodies. A request becomes a command here, or fails to.

mod ack;
mod analytics;
mod auth;
mod body;
mod budget;
mod coded;
mod configure;
mod connections;
mod consumer_groups;
mod current;
mod dead_letters;
mod ephemeral;
mod features;
mod health;
mod instant;
mod json;
mod kv;
mod lease;
mod message;
mod messages;
mod metrics;
mod openapi;
mod params;
mod path;
mod pop;
mod push;
mod range;
mod resources;
mod retry;
mod status;
mod streams;
mod system;
mod timers;
mod traces;
mod transaction;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tower::Layer;
use tower_http::catch_panic::CatchPanicLayer;
use tracing::error;
use utoipa_axum::router::OpenApiRouter;

use crate::auth::{Auth, Settings as TokenSettings};
use crate::bundle::{Bundler, Limits};
use crate::db::Db;
use crate::ephemeral::{Ephemeral, Settings as EphemeralSettings};
use crate::error::Error;
use crate::quota::{Limits as QuotaLimits, Quotas};
use crate::seal::{Sealer, Sealing};
use crate::spool::{Settings as SpoolSettings, Spool};
use crate::switches::Switches;
use crate::telemetry::Telemetry;
use crate::timers::{Alarm, Sweeper};
use crate::wake::Wake;
pub use budget::Budget;
pub use connections::ConnectionLimits;
pub use lease::Leases;

/// What the edge needs to know; everything else it asks the database.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Largest request body, in bytes; a larger one is answered 413.
    pub body_bytes_max: usize,
    /// How long a request body may stop coming; then it is answered 408.
    pub body_pause_max: Duration,
    /// Memory for all request bodies together, but at least for one; where it is used up, large ones are answered 503.
    pub bodies_bytes_max: usize,
    pub connections: ConnectionLimits,
    /// How long a waiting pop waits when the request does not say.
    pub pop_timeout: Duration,
    /// Whether a consumer group that does not say starts at the tail (else at the oldest message).
    pub subscribe_to_new: bool,
    /// Pauses between the looks of a waiting pop that nobody wakes.
    pub pop_wait: PopWait,
    /// After how many days an empty partition is deleted; `None` when never. It forgets its
    /// transaction ids then, so no deduplication window may be longer.
    pub partition_cleanup_days: Option<i32>,
    /// How pushes are committed.
    pub push: Limits,
    /// Encrypts payloads at rest, if there is a key.
    pub sealer: Sealer,
    /// How tokens are checked; `None` when requests need none.
    pub auth: Option<TokenSettings>,
    /// Where pushes go while the database is away; `None` when they fail.
    pub spool: Option<SpoolSettings>,
    /// Bounds of ephemeral queues.
    pub ephemeral: EphemeralSettings,
    /// Bounds of key/value, timers and ephemeral pushes.
    pub quotas: QuotaLimits,
}

/// A waiting pop looks again after `initial`, `threshold` times; then each pause is `multiplier`
/// times longer, up to `longest`. A wake-up starts over.
#[derive(Clone, Copy, Debug)]
pub struct PopWait {
    pub initial: Duration,
    pub threshold: u32,
    pub multiplier: f64,
    pub longest: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            body_bytes_max: 64 << 20,
            body_pause_max: Duration::from_secs(30),
            bodies_bytes_max: 256 << 20,
            connections: ConnectionLimits::default(),
            pop_timeout: Duration::from_secs(30),
            subscribe_to_new: true,
            pop_wait: PopWait {
                initial: Duration::from_millis(100),
                threshold: 3,
                multiplier: 2.0,
                longest: Duration::from_secs(1),
            },
            partition_cleanup_days: Some(30),
            push: Limits::default(),
            sealer: Sealer::default(),
            auth: None,
            spool: None,
            ephemeral: EphemeralSettings::default(),
            quotas: QuotaLimits::default(),
        }
    }
}

/// What every handler shares.
pub struct App {
    pub db: Db,
    pub settings: Settings,
    /// Told after each commit that may give a waiting pop something.
    pub wake: Wake,
    pub leases: Leases,
    pub telemetry: Arc<Telemetry>,
    /// Takes pushes, whatever becomes of the database.
    pub spool: Spool,
    /// Messages in memory.
    pub ephemeral: Arc<Ephemeral>,
    /// What operators have paused.
    pub switches: Switches,
    /// What the stores beside the queues may hold, and how often they may be asked.
    pub quotas: Quotas,
    /// What encrypts payloads at rest, and which queues want it.
    pub sealing: Arc<Sealing>,
    /// `None` when requests need no token.
    pub auth: Option<Arc<Auth>>,
    /// What is left for request bodies.
    pub bodies: Budget,
    /// Told of timers that are scheduled here.
    pub alarm: Alarm,
    pub started: Instant,
    autopilot: pop::Autopilot,
}

impl App {
    /// # Errors
    /// If the spool's folder cannot be used.
    pub fn new(db: Db, settings: Settings) -> std::io::Result<Arc<Self>> {
        metrics::install();
        let wake = Wake::new();
        let woken = wake.clone();
        let sealing = Arc::new(Sealing::new(settings.sealer.clone()));
        let bundler = Bundler::new(db.clone(), settings.push, sealing.clone(), move |name| {
            woken.pushed(name.queue(), name.partition());
        });
        let telemetry = Arc::new(Telemetry::new());
        let spool = match settings.spool.clone() {
            Some(spool) => Spool::open(spool, bundler, db.clone(), settings.sealer.clone(), telemetry.clone())?,
            None => Spool::none(bundler, db.clone(), telemetry.clone()),
        };
        let bodies = Budget::new(settings.bodies_bytes_max.max(settings.body_bytes_max));
        let auth = settings.auth.clone().map(|settings| Arc::new(Auth::new(settings)));
        let (leases, alarm, started) = (Leases::default(), Alarm::default(), Instant::now());
        let autopilot = pop::Autopilot::default();
        let ephemeral = Arc::new(Ephemeral::new(settings.ephemeral));
        let switches = Switches::default();
        let quotas = Quotas::new(settings.quotas);
        Ok(Arc::new(Self {
            db,
            settings,
            wake,
            leases,
            telemetry,
            spool,
            ephemeral,
            switches,
            quotas,
            sealing,
            auth,
            bodies,
            alarm,
            started,
            autopilot,
        }))
    }

    /// What fires timers on this server, while it runs.
    pub fn sweeper(&self) -> Sweeper {
        Sweeper {
            db: self.db.clone(),
            sealing: self.sealing.clone(),
            wake: self.wake.clone(),
            telemetry: self.telemetry.clone(),
            alarm: self.alarm.clone(),
            zstd_level: self.settings.push.zstd_level,
        }
    }
}

/// Every route, and the document that lists them. One family a file; each file says its own paths.
fn families() -> OpenApiRouter<Arc<App>> {
    let families = [
        ("Push", push::routes()),
        ("Pop", pop::routes()),
        ("Acknowledge", ack::routes()),
        ("Leases", lease::routes()),
        ("Transactions", transaction::routes()),
        ("Key/value", kv::routes()),
        ("Timers", timers::routes()),
        ("Pauses", features::routes()),
        ("Configure", configure::routes()),
        ("Messages", messages::routes()),
        ("Dead letters", dead_letters::routes()),
        ("Consumer groups", consumer_groups::routes()),
        ("Resources", resources::routes()),
        ("Traces", traces::routes()),
        ("Streams", streams::routes()),
        ("Ephemeral queues", ephemeral::routes()),
        ("System", system::routes()),
        ("Status", status::routes()),
        ("Analytics", analytics::routes()),
        ("Health", health::routes()),
        ("Metrics", metrics::routes()),
        ("Document", openapi::routes()),
    ];
    let mut all = families.into_iter().fold(OpenApiRouter::new(), openapi::family);
    openapi::complete(all.get_openapi_mut());
    all
}

/// What answers requests.
pub fn router(app: Arc<App>) -> Router {
    let routes = Router::from(families()).fallback(no_such_route).method_not_allowed_fallback(no_such_route);
    let guarded = match &app.auth {
        Some(auth) => routes.route_layer(axum::middleware::from_fn_with_state(auth.clone(), auth::guard)),
        None => routes,
    };
    guarded
        .route_layer(axum::middleware::from_fn_with_state(app.clone(), metrics::measure))
        .layer(CatchPanicLayer::custom(panicked))
        .with_state(app)
}

/// Answers requests on `listener` until `stop` ends, then finishes those under way.
pub async fn serve(listener: TcpListener, app: Arc<App>, stop: impl Future<Output = ()> + Send + 'static) {
    let wake = app.wake.clone();
    let stop = async move {
        stop.await;
        // A parked pop would otherwise hold the stop up until its time is over.
        wake.close();
    };
    let upkeep = CancellationToken::new();
    tokio::spawn(metrics::keep_up(upkeep.clone()));
    let _ends_with_the_server = upkeep.drop_guard();
    let limits = app.settings.connections;
    let service = tower::util::MapRequestLayer::new(one_leading_slash).layer(router(app));
    connections::answer(listener, service, limits, stop).await;
}

/// A base URL that ends in a slash makes paths that begin with two.
fn one_leading_slash(mut request: Request) -> Request {
    let given = request.uri().path_and_query().map_or("", |path| path.as_str());
    if given.starts_with("//") {
        let path = format!("/{}", given.trim_start_matches('/'));
        if let Ok(uri) = path.parse::<Uri>() {
            *request.uri_mut() = uri;
        }
    }
    request
}

async fn no_such_route() -> Response {
    let body = serde_json::json!({"error": "Not Found", "code": "no_such_route"});
    (StatusCode::NOT_FOUND, axum::Json(body)).into_response()
}

fn panicked(panic: Box<dyn std::any::Any + Send>) -> Response {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message");
    error!(target: "http", panic = text, "a handler panicked");
    let body = serde_json::json!({"error": "internal error"});
    (StatusCode::INTERNAL_SERVER_ERROR, axum::Json(body)).into_response()
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        failed(&self)
    }
}

/// The answer to a request that failed as a whole.
fn failed(error: &Error) -> Response {
    let status = error.status();
    // That there is no room, or no key, is counted and said where it happens.
    if status.is_server_error() && status != StatusCode::SERVICE_UNAVAILABLE {
        metrics::failed(error);
    }
    let mut response = (status, axum::Json(serde_json::json!({"error": error.to_string()}))).into_response();
    if let Some(seconds) = error.retry_after() {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}
