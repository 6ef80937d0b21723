//! Connections: so many at once, and none that stands still for ever.

mod patience;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use ebbtide_sweep::LineLimit;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use metrics::gauge;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tower::Layer;
use tower::Service;
use tower::util::MapRequestLayer;
use tracing::{debug, warn};

use patience::Patient;

/// Between two tries to take a connection where the process has no room for one.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
/// Between two log lines that say the same.
const LINE_GAP: Duration = Duration::from_secs(60);

/// What a connection may cost.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Connections at once. More wait in the listener's queue until one ends.
    pub most: usize,
    /// From the end of an answer, or from the beginning, to the end of the next request's head; then it is closed.
    pub idle_max: Duration,
    /// How long a client may take nothing of an answer; then it is closed.
    pub write_pause_max: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self { most: 20_000, idle_max: Duration::from_secs(75), write_pause_max: Duration::from_secs(60) }
    }
}

/// Takes connections and answers their requests by `service` until `stop` ends, then finishes what is under way.
pub(super) async fn answer<S>(
    listener: TcpListener, service: S, limits: ConnectionLimits, stop: impl Future<Output = ()>,
) where
    S: Service<Request, Response = Response, Error = Infallible, Future: Send> + Clone + Send + 'static,
{
    let service = MapRequestLayer::new(|request: hyper::Request<Incoming>| request.map(Body::new)).layer(service);
    let service = TowerToHyperService::new(service);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.idle_max);
    let under_way = GracefulShutdown::new();
    let mut door = Door { listener, room: Arc::new(Semaphore::new(limits.most)), limit: LineLimit::new(LINE_GAP) };
    let mut stop = std::pin::pin!(stop);
    loop {
        let (stream, place) = tokio::select! {
            taken = door.take() => taken,
            () = &mut stop => break,
        };
        let stream = TokioIo::new(Patient::new(stream, limits.write_pause_max));
        let connection = under_way.watch(http.serve_connection(stream, service.clone()));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                debug!(target: "http", %error, "a connection ended early");
            }
            drop(place);
        });
    }
    drop(door);
    under_way.shutdown().await;
}

/// Where connections come in.
struct Door {
    listener: TcpListener,
    room: Arc<Semaphore>,
    limit: LineLimit,
}

/// One of the connections that there may be, in the gauge too.
struct Place {
    _permit: OwnedSemaphorePermit,
}

impl Place {
    fn new(permit: OwnedSemaphorePermit) -> Self {
        gauge!("ebbtide_connections").increment(1.0);
        Self { _permit: permit }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        gauge!("ebbtide_connections").decrement(1.0);
    }
}

impl Door {
    /// The next connection, once there is room for it.
    async fn take(&mut self) -> (TcpStream, Place) {
        if self.room.available_permits() == 0
            && let Some(suppressed) = self.limit.admit()
        {
            warn!(target: "http", suppressed, "as many connections as there may be (EBBTIDE_CONNECTIONS_MAX); others wait");
        }
        let permit = self.room.clone().acquire_owned().await.expect("never closed");
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    // Answers are written whole; waiting for more to send would only delay them.
                    drop(stream.set_nodelay(true));
                    return (stream, Place::new(permit));
                }
                // It went away while it waited.
                Err(error) if is_of_the_connection(&error) => {}
                Err(error) => {
                    if let Some(suppressed) = self.limit.admit() {
                        warn!(target: "http", %error, suppressed, "a connection cannot be taken");
                    }
                    // Out of files or memory: others have to end first, and asking at once again would only burn time.
                    let _ = timeout(ACCEPT_PAUSE, std::future::pending::<()>()).await;
                }
            }
        }
    }
}

fn is_of_the_connection(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}
