//! `ebbtide serve`: database, schema, retention, HTTP; and all of it down again in order.

use std::io::Write;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use ebbtide_sweep::pause;
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::database::{self, Opened};
use super::files;
use crate::bundle::Limits;
use crate::config::{Config, Messaging, Retention, Server, Spool, SubscriptionMode};
use crate::db::Db;
use crate::db::configure::encrypted_queues_v1;
use crate::ephemeral::Settings as EphemeralSettings;
use crate::error::Error;
use crate::http::{self, App, ConnectionLimits, PopWait, Settings};
use crate::retention;
use crate::seal::Sealer;
use crate::spool::Settings as SpoolSettings;
use crate::telemetry::{Flusher, Identity, measure_until};

/// How long requests under way may take to finish when the server stops.
const REQUESTS_WAIT: Duration = Duration::from_secs(10);
/// How long the deletion step in flight may take to finish.
const STEP_WAIT: Duration = Duration::from_secs(10);
/// Before another try with a database that went away during the start.
const RESTART_PAUSE: Duration = Duration::from_millis(500);

pub(super) async fn run(config: Config, stop: CancellationToken) -> anyhow::Result<()> {
    let Some(opened) = database::find(&config.database, &stop).await? else { return Ok(()) };
    let outcome = tokio::select! {
        outcome = serve(&config, &opened, &stop) => outcome,
        reason = opened.failed() => Err(anyhow::anyhow!("the embedded database failed: {reason}")),
    };
    stop.cancel();
    opened.close().await;
    info!(target: "serve", "stopped");
    outcome
}

/// Serves from the start, so that a server whose database is not there yet can say so and spool.
async fn serve(config: &Config, opened: &Opened, stop: &CancellationToken) -> anyhow::Result<()> {
    let app = make_app(config, opened)?;
    let listen = config.server.listen;
    let listener = match TcpListener::bind(listen).await {
        Ok(listener) => listener,
        Err(error) => bail!("cannot listen on {listen}: {error}; PORT and QUEEN_BIND_ADDR choose another"),
    };
    let address = listener.local_addr()?;
    info!(target: "serve", address = %address, "listening");
    tokio::spawn(app.ephemeral.clone().run(stop.clone()));
    let mut serving = std::pin::pin!(serve_requests(listener, app.clone(), stop));
    let up = tokio::select! {
        up = bring_up(config, opened, &app, stop) => up,
        () = &mut serving => return Ok(()),
    };
    let outcome = match up {
        Ok(true) => work(config, opened, &app, address, stop, serving.as_mut()).await,
        Ok(false) => Ok(()),
        Err(error) => Err(error),
    };
    stop.cancel();
    outcome
}

/// From the database's first answer to the end.
async fn work(
    config: &Config, opened: &Opened, app: &Arc<App>, address: std::net::SocketAddr, stop: &CancellationToken,
    serving: Pin<&mut (impl Future<Output = ()> + Send)>,
) -> anyhow::Result<()> {
    tokio::spawn(app.wake.clone().listen(opened.direct.clone(), stop.clone()));
    if let Some(auth) = app.auth.clone() {
        // It bounds its own time.
        tokio::spawn(async move { auth.warm_up().await });
    }
    let wake = app.wake.clone();
    let flusher = Flusher::new(app.telemetry.clone(), app.db.clone(), Identity::new(address.port()))
        .with_parked(move |most| wake.parked_by_queue(most));
    let interval = Duration::from_millis(config.retention.metrics_flush_ms);
    let flushing = tokio::spawn(flusher.run(interval, stop.clone()));
    let measured = Duration::from_millis(config.retention.retained_bytes_interval_ms);
    tokio::spawn(measure_until(app.db.clone(), measured, stop.clone()));
    tokio::spawn(app.clone().keep_current(stop.clone()));
    let replaying = tokio::spawn(app.spool.clone().replay(stop.clone()));
    let firing = config.messaging.fires_timers.then(|| tokio::spawn(app.sweeper().run(stop.clone())));
    let sweeping = retention::spawn(opened.direct.clone(), (&config.retention).into(), stop.clone());
    say_ready(config, address, &opened.shown);
    serving.await;
    stop.cancel();
    if timeout(STEP_WAIT, sweeping).await.is_err() {
        warn!(target: "serve", "a deletion step was cut off that did not finish in time");
    }
    if timeout(STEP_WAIT, replaying).await.is_err() {
        warn!(target: "serve", "a replay of the spool was cut off; it begins again at the next start");
    }
    if let Some(firing) = firing
        && timeout(STEP_WAIT, firing).await.is_err()
    {
        warn!(target: "serve", "timers that were being fired were left to their next claim");
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

/// What answers requests. It needs no database yet: it refuses or spools until there is one.
fn make_app(config: &Config, opened: &Opened) -> anyhow::Result<Arc<App>> {
    let Config { server, auth, log: _, database, retention, messaging } = config;
    let db = Db::closed(&opened.work, database.pool_size, database.statements, database.statement_timeout);
    let spool = spool_settings(&server.spool, &database.data_dir);
    let folder = spool.folder.display().to_string();
    let is_optional = !spool.make_at_once;
    let mut settings = Settings { auth: auth.clone(), ..http_settings(server, messaging, retention) };
    settings.connections.most = files::room_for(server.connections_max, db.status().max_size);
    let app = match App::new(db.clone(), Settings { spool: Some(spool), ..settings.clone() }) {
        Err(error) if is_optional => {
            warn!(target: "serve", folder, %error, "no spool: pushes fail while the database is away; FILE_BUFFER_DIR names another folder");
            App::new(db, settings)?
        }
        app => app.with_context(|| format!("FILE_BUFFER_DIR: the spool in {folder} cannot be used"))?,
    };
    app.spool.expect(false);
    Ok(app)
}

fn spool_settings(spool: &Spool, data_dir: &Path) -> SpoolSettings {
    SpoolSettings {
        folder: spool.folder.clone().unwrap_or_else(|| data_dir.join("buffers")),
        make_at_once: spool.folder.is_some(),
        bytes_max: spool.bytes_max,
        messages_per_file: spool.messages_per_file,
        batch_messages: spool.batch_messages,
        pause_first: Duration::from_millis(spool.pause_first_ms),
    }
}

/// Waits for the database, makes its schema fit, and lets requests in. `false` if it was told to stop before.
async fn bring_up(config: &Config, opened: &Opened, app: &Arc<App>, stop: &CancellationToken) -> anyhow::Result<bool> {
    loop {
        if !database::await_answer(opened, stop).await? {
            return Ok(false);
        }
        let prepared = async {
            database::prepare_schema(opened, config.database.apply_schema).await?;
            app.db.cap(&opened.work).await?;
            // A request must not pass a switch that this server has not heard of yet.
            app.refresh_on(&app.db.early_conn().await?).await?;
            app.spool.expect(true);
            app.db.let_in();
            warn_about_clear_text(app).await
        };
        let prepared = tokio::select! {
            prepared = prepared => prepared,
            () = stop.cancelled() => return Ok(false),
        };
        match prepared {
            // It went away again at once.
            Err(error) if error.downcast_ref::<Error>().is_some_and(Error::is_away) => {
                warn!(target: "serve", error = format!("{error:#}"), "the database went away during the start");
                app.spool.expect(false);
                if !pause(RESTART_PAUSE, stop).await {
                    return Ok(false);
                }
            }
            prepared => return prepared.map(|()| true),
        }
    }
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
        ephemeral: EphemeralSettings {
            bytes_max: messaging.ephemeral.bytes_max,
            queue_bytes_max: messaging.ephemeral.queue_bytes_max,
            queue_length_max: messaging.ephemeral.queue_length_max,
            lease: Duration::from_secs(messaging.ephemeral.lease_seconds),
            retry_limit: messaging.ephemeral.retry_limit,
            idle: Duration::from_secs(messaging.ephemeral.idle_seconds),
        },
        quotas: messaging.quotas,
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
