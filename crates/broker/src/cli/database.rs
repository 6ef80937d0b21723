//! Brings up the database that the settings name, and waits until it answers.

use std::time::Duration;

use anyhow::{Context, bail};
use ebbtide_sweep::{LineLimit, pause};
use tokio::time::timeout;
use tokio_postgres::config::{Host, SslMode};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::config::{Addresses, Database, DatabaseSource, Tls};
use crate::db::{Target, TlsSettings, migrate};
use crate::embedded::Cluster;

const CONNECT_WAIT: Duration = Duration::from_secs(10);
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
const WAITING_LINE_INTERVAL: Duration = Duration::from_secs(15);

/// A database that answers.
pub(super) struct Opened {
    /// For requests.
    pub(super) work: Target,
    /// For leader election, notifications and migrations.
    pub(super) direct: Target,
    /// For a person; without the password.
    pub(super) shown: String,
    cluster: Option<Cluster>,
}

impl Opened {
    /// Ends only if the embedded PostgreSQL has failed for good.
    pub(super) async fn failed(&self) -> String {
        match &self.cluster {
            Some(cluster) => cluster.failed().await,
            None => std::future::pending().await,
        }
    }

    pub(super) async fn close(self) {
        if let Some(cluster) = self.cluster {
            cluster.stop().await;
        }
    }
}

/// Starts the embedded database, or takes the address of another. `None` if it was told to stop meanwhile.
pub(super) async fn find(settings: &Database, stop: &CancellationToken) -> anyhow::Result<Option<Opened>> {
    match &settings.source {
        DatabaseSource::Embedded(embedded) => {
            let start = Cluster::start(&embedded.data_dir, embedded.bin_dir.as_deref(), settings.pool_size);
            let cluster = tokio::select! {
                cluster = start => cluster.context("the embedded database")?,
                () = stop.cancelled() => return Ok(None),
            };
            let target = Target { config: cluster.address(), tls: TlsSettings::unused() };
            let shown = format!("embedded in {}", cluster.folder().display());
            Ok(Some(Opened { work: target.clone(), direct: target, shown, cluster: Some(cluster) }))
        }
        DatabaseSource::External(addresses) => external(addresses, &settings.tls).map(Some),
    }
}

/// Waits until the database answers. `false` if it was told to stop before.
pub(super) async fn await_answer(opened: &Opened, stop: &CancellationToken) -> anyhow::Result<bool> {
    Ok(answers(&opened.direct, stop).await? && answers(&opened.work, stop).await?)
}

/// A database that answers. `None` if it was told to stop before.
pub(super) async fn open(settings: &Database, stop: &CancellationToken) -> anyhow::Result<Option<Opened>> {
    let Some(opened) = find(settings, stop).await? else { return Ok(None) };
    if await_answer(&opened, stop).await? {
        return Ok(Some(opened));
    }
    opened.close().await;
    Ok(None)
}

/// Installs or upgrades the schema, or, when told not to, makes sure that it is there.
pub(super) async fn prepare_schema(opened: &Opened, apply: bool) -> anyhow::Result<()> {
    if apply {
        migrate::migrate(&opened.direct).await.context("the schema could not be installed")?;
        return Ok(());
    }
    let client = opened.direct.connect("ebbtide-start").await?;
    if !migrate::is_installed(&client).await? {
        bail!("the database has not this version's schema: run `ebbtide migrate`, or leave QUEEN_APPLY_SCHEMA on");
    }
    Ok(())
}

fn external(addresses: &Addresses, tls: &Tls) -> anyhow::Result<Opened> {
    let used = [&addresses.work, &addresses.direct].iter().any(|address| address.get_ssl_mode() != SslMode::Disable);
    let tls =
        if used { TlsSettings::new(tls.reject_unauthorized, tls.root_cert.as_ref())? } else { TlsSettings::unused() };
    let target = |config: &tokio_postgres::Config| Target { config: config.clone(), tls: tls.clone() };
    let shown = show(&addresses.work);
    Ok(Opened { work: target(&addresses.work), direct: target(&addresses.direct), shown, cluster: None })
}

/// Host, port, database and role.
fn show(address: &tokio_postgres::Config) -> String {
    let host = match address.get_hosts().first() {
        Some(Host::Tcp(name)) => name.clone(),
        Some(Host::Unix(path)) => path.display().to_string(),
        None => "localhost".to_owned(),
    };
    let port = address.get_ports().first().copied().unwrap_or(5432);
    let user = address.get_user().unwrap_or("postgres");
    format!("{host}:{port}/{} as {user}", address.get_dbname().unwrap_or(user))
}

/// Waits for a database that is not there yet. One that is there and refuses us will not change its mind: that
/// is an error.
async fn answers(target: &Target, stop: &CancellationToken) -> anyhow::Result<bool> {
    let mut line = LineLimit::new(WAITING_LINE_INTERVAL);
    let mut waited = false;
    loop {
        let reason = match timeout(CONNECT_WAIT, target.config.connect(target.connector())).await {
            Ok(Ok(_)) => {
                if waited {
                    info!(target: "db", "the database answers");
                }
                return Ok(true);
            }
            Ok(Err(error)) if is_final(&error) => {
                return Err(error).with_context(|| format!("the database {} refuses", show(&target.config)));
            }
            Ok(Err(error)) => format!("{:#}", anyhow::Error::from(error)),
            Err(_) => format!("no answer within {} s", CONNECT_WAIT.as_secs()),
        };
        waited = true;
        if let Some(suppressed) = line.admit() {
            warn!(target: "db", database = show(&target.config), reason, suppressed, "waiting for the database");
        }
        if !pause(RETRY_INTERVAL, stop).await {
            return Ok(false);
        }
    }
}

/// A wrong login, a database or role that does not exist, TLS that cannot be had. Everything else may pass:
/// a database that starts, stops, fails over, or has no connection free.
fn is_final(error: &tokio_postgres::Error) -> bool {
    if let Some(code) = error.code() {
        return ["28", "3D", "0A"].contains(&&code.code()[..2]);
    }
    let source = std::error::Error::source(error);
    let is_io = source.is_some_and(|source| {
        source.downcast_ref::<std::io::Error>().is_some_and(|io| io.kind() != std::io::ErrorKind::InvalidData)
    });
    !is_io && !error.is_closed()
}
