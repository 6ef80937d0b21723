//! `ebbtide serve`: database, schema, retention, HTTP; and all of it down again in order.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::database::{self, Opened};
use super::files;
use crate::bundle::Limits;
use crate::config::{Config, Messaging, Retention, Server, SubscriptionMode};
use crate::db::Db;
use crate::db::configure::encrypted_queues_v1;
use crate::http::{self, App, ConnectionLimits, PopWait, Settings};
use crate::retention;
use crate::seal::Sealer;
use crate::telemetry::{Flusher, Identity};

/// How long requests under way may take to finish when the server stops.
const REQUESTS_WAIT: Duration = Duration::from_secs(10);
/// How long the deletion step in flight may take to finish.
const STEP_WAIT: Duration = Duration::from_secs(10);

pub(super) async fn run(config: Config, stop: CancellationToken) -> anyhow::Result<()> {
    let Some(opened) = database::open(&config.database, &stop).await? else { return Ok(()) };
    let outcome = tokio::select! {
        outcome = serve(&config, &opened, &stop) => outcome,
        reason = opened.failed() => Err(anyhow::anyhow!("the embedded database failed: {reason}")),
    };
    stop.cancel();
    opened.close().await;
    info!(target: "serve", "stopped");
    outcome
}

async fn serve(config: &Config, opened: &Opened, stop: &CancellationToken) -> anyhow::Result<()> {
    let prepared = tokio::select! {
        prepared = prepare(config, opened) => prepared?,
        () = stop.cancelled() => return Ok(()),
    };
    let (listener, app) = prepared;
    tokio::spawn(app.wake.clone().listen(opened.direct.clone(), stop.clone()));
    if let Some(auth) = app.auth.clone() {
        // It bounds its own time.
        tokio::spawn(async move { auth.warm_up().await });
    }
    let address = listener.local_addr()?;
    let flusher = Flusher::new(app.telemetry.clone(), app.db.clone(), Identity::new(address.port()));
    let interval = Duration::from_millis(config.retention.metrics_flush_ms);
    let flushing = tokio::spawn(flusher.run(interval, stop.clone()));
    let sweeping = retention::spawn(opened.direct.clone(), (&config.retention).into(), stop.clone());
    say_ready(config, address, &opened.shown);
    serve_requests(listener, app, stop).await;
    stop.cancel();
    if timeout(STEP_WAIT, sweeping).await.is_err() {
        warn!(target: "serve", "a deletion step was cut off that did not finish in time");
    }
    // Before the database goes; it bounds its own time.
    flushing.await.context("the metrics flush panicked")
}

async fn serve_requests(listener: TcpListener, app: Arc<App>, stop: &CancellationToken) {
    let serving = http::serve(listener, app, stop.clone().cancelled_owned());
    let mut serving = std::pin::pin!(serving);
    tokio::select! {
        () = &mut serving => return,
        () = stop.cancelled() => {}
    }
    if timeout(REQUESTS_WAIT, serving).await.is_err() {
        warn!(target: "serve", "requests were cut off that did not finish in time");
    }
}

async fn prepare(config: &Config, opened: &Opened) -> anyhow::Result<(TcpListener, Arc<App>)> {
    let Config { server, auth, log: _, database, retention, messaging } = config;
    database::prepare_schema(opened, database.apply_schema).await?;
    let db = Db::open(&opened.work, database.pool_size, database.statements, database.statement_timeout).await?;
    let mut settings = Settings { auth: auth.clone(), ..http_settings(server, messaging, retention) };
    settings.connections.most = files::room_for(server.connections_max, db.status().max_size);
    let app = App::new(db, settings);
    warn_about_clear_text(&app).await?;
    let listener = match TcpListener::bind(server.listen).await {
        Ok(listener) => listener,
        Err(error) => bail!("cannot listen on {}: {error}; PORT and QUEEN_BIND_ADDR choose another", server.listen),
    };
    Ok((listener, app))
}

/// A queue that asks for encryption gets none from a server without the key.
async fn warn_about_clear_text(app: &App) -> anyhow::Result<()> {
    if app.settings.sealer.has_key() {
        return Ok(());
    }
    let queues = encrypted_queues_v1(&app.db.conn().await?).await?;
    if 0 < queues {
        warn!(
            target: "serve",
            queues,
            "queues want their payloads encrypted, but QUEEN_ENCRYPTION_KEY is not set: this server stores them in clear \
             and cannot read what is encrypted"
        );
    }
    Ok(())
}

fn http_settings(server: &Server, messaging: &Messaging, retention: &Retention) -> Settings {
    let wait = messaging.pop_wait;
    Settings {
        body_bytes_max: server.max_body_bytes,
        bodies_bytes_max: server.bodies_bytes_max,
        connections: ConnectionLimits { idle_max: server.idle_timeout, ..ConnectionLimits::default() },
        pop_timeout: Duration::from_millis(messaging.pop_timeout_ms),
        subscribe_to_new: messaging.subscription_mode == SubscriptionMode::New,
        pop_wait: PopWait {
            initial: Duration::from_millis(wait.initial_interval_ms),
            threshold: u32::try_from(wait.backoff_threshold).unwrap_or(u32::MAX),
            multiplier: wait.backoff_multiplier,
            longest: Duration::from_millis(wait.max_interval_ms),
        },
        partition_cleanup_days: retention.partition_cleanup_days,
        push: Limits {
            lanes: messaging.push_lanes,
            zstd_level: messaging.zstd_level,
            dedup_bytes_max: messaging.dedup_cache_bytes.unwrap_or(0),
        },
        sealer: Sealer::new(server.encryption_key.as_ref()),
        ..Settings::default()
    }
}

/// The one line on standard output: scripts wait for it.
fn say_ready(config: &Config, address: std::net::SocketAddr, database: &str) {
    let retention = &config.retention;
    let line = if config.log.json {
        serde_json::json!({
            "ready": true, "version": env!("CARGO_PKG_VERSION"), "address": format!("http://{address}"),
            "database": database, "retention": {
                "intervalMs": retention.interval_ms, "batchSize": retention.rows_max,
                "partitionCleanupDays": retention.partition_cleanup_days,
                "metricsRetentionDays": retention.metrics_retention_days,
            },
        })
        .to_string()
    } else {
        let version = env!("CARGO_PKG_VERSION");
        format!("ebbtide {version} ready: http://{address}, database {database}, {}", show_retention(retention))
    };
    // Nobody may be reading; the server runs all the same.
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn show_retention(retention: &Retention) -> String {
    let cleanup = retention.partition_cleanup_days.map_or_else(
        || "empty partitions kept for ever".to_owned(),
        |days| format!("empty partitions go after {days} days"),
    );
    format!(
        "retention every {} ms by {} rows, {cleanup}, metrics go after {} days",
        retention.interval_ms, retention.rows_max, retention.metrics_retention_days
    )
}
