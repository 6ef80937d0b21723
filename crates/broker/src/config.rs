//! Settings: what was given as text becomes a checked, typed [`Config`] that is passed down.

mod auth;
mod messaging;
mod raw;
mod setting;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use tokio_postgres::config::SslMode;

use crate::auth::Settings as Auth;
use crate::db::Statements;
use crate::quota::Limits;
use crate::seal::Key;
use raw::{GivenDatabase, GivenRetention, GivenServer};
pub use raw::{RawAuth, RawConfig, RawDatabase, RawMessaging, RawRetention, RawServer, UNBUILT, UNBUILT_FAMILIES};
pub use setting::{Findings, Row, Secret};

/// The settings in force.
#[derive(Debug, Clone)]
pub struct Config {
    pub server: Server,
    /// `None` when requests need no token.
    pub auth: Option<Auth>,
    pub log: Log,
    pub database: Database,
    pub retention: Retention,
    pub messaging: Messaging,
}

/// The settings that do not hold together; every mistake is named.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub struct ConfigError(pub Vec<String>);

#[derive(Debug, Clone)]
pub struct Server {
    pub listen: SocketAddr,
    pub max_body_bytes: usize,
    pub connections_max: usize,
    pub idle_timeout: Duration,
    pub bodies_bytes_max: usize,
    /// `None` when payloads are stored in clear.
    pub encryption_key: Option<Key>,
    pub spool: Spool,
}

/// Where pushes are kept while the database is away.
#[derive(Debug, Clone)]
pub struct Spool {
    /// `None` for the default, in the data folder.
    pub folder: Option<PathBuf>,
    pub bytes_max: u64,
    pub pause_first_ms: u64,
    pub batch_messages: usize,
    pub messages_per_file: usize,
}

#[derive(Debug, Clone)]
pub struct Log {
    /// Directives for the log filter.
    pub filter: String,
    pub json: bool,
}

#[derive(Debug, Clone)]
pub struct Database {
    pub source: DatabaseSource,
    pub tls: Tls,
    pub pool_size: usize,
    pub statement_timeout: Duration,
    pub statements: Statements,
    pub apply_schema: bool,
    /// Where a server keeps what is its own.
    pub data_dir: PathBuf,
}

/// Where the database is.
#[derive(Debug, Clone)]
pub enum DatabaseSource {
    /// A private PostgreSQL that the server starts and stops.
    Embedded(Embedded),
    External(Box<Addresses>),
}

#[derive(Debug, Clone)]
pub struct Embedded {
    pub data_dir: PathBuf,
    /// Folder of the server programs; searched for when `None`.
    pub bin_dir: Option<PathBuf>,
}

/// The two ways to one database. Their `Debug` shows no password.
#[derive(Debug, Clone)]
pub struct Addresses {
    /// For requests; may lead through a transaction-mode pooler.
    pub work: tokio_postgres::Config,
    /// For leader election, notifications and migrations, which need a session of their own.
    pub direct: tokio_postgres::Config,
}

#[derive(Debug, Clone)]
pub struct Tls {
    /// Whether an encrypted connection is required.
    pub required: bool,
    pub reject_unauthorized: bool,
    pub root_cert: Option<PathBuf>,
}

#[derive(Debug, Clone)]
pub struct Retention {
    pub interval_ms: u64,
    pub rows_max: i32,
    /// Partitions that one cycle takes on.
    pub due_max: i32,
    /// Period of the walk over all stamps; `None` walks once after the start.
    pub safety_walk: Option<Duration>,
    /// From one sweep of expired values to the next; `None` never deletes them.
    pub kv_sweep: Option<Duration>,
    pub lock_hold: Duration,
    /// Share of the time, above 0 and at most 1.
    pub shared_duty: f64,
    /// `None` where the log does not slow retention down.
    pub wal_bytes_per_second: Option<u64>,
    /// `None` where standbys do not slow retention down.
    pub replication_lag_bytes: Option<u64>,
    pub snapshot_age: Duration,
    pub vacuum: bool,
    /// `None` when empty partitions are never deleted: the switch and the window are one value.
    pub partition_cleanup_days: Option<i32>,
    pub metrics_retention_days: i32,
    pub metrics_flush_ms: u64,
    pub retained_bytes_interval_ms: u64,
}

/// Partitions that the largest plan of a cycle lists.
pub const DUE_MAX: i32 = 1_000_000;
/// Batches of partitions that a cycle takes on unless it is told.
const DUE_BATCHES: i32 = 5;

#[derive(Debug, Clone)]
pub struct Messaging {
    pub zstd_level: i32,
    pub push_lanes: usize,
    /// `None` when there is no index of recent transaction ids.
    pub dedup_cache_bytes: Option<usize>,
    /// Whether this server fires timers.
    pub fires_timers: bool,
    pub pop_timeout_ms: u64,
    pub subscription_mode: SubscriptionMode,
    pub pop_wait: PopWait,
    pub ephemeral: Ephemeral,
    pub quotas: Limits,
}

/// Bounds of the messages in memory.
#[derive(Debug, Clone)]
pub struct Ephemeral {
    pub bytes_max: usize,
    pub queue_bytes_max: usize,
    pub queue_length_max: usize,
    pub lease_seconds: u64,
    pub retry_limit: u32,
    pub idle_seconds: u64,
}

/// Where a consumer group starts that has not consumed before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubscriptionMode {
    New,
    All,
}

/// How a waiting pop looks again when nothing wakes it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PopWait {
    pub initial_interval_ms: u64,
    pub backoff_threshold: u64,
    pub backoff_multiplier: f64,
    pub max_interval_ms: u64,
}

impl Config {
    /// Checks what was given, and returns the warnings that the start has to log.
    ///
    /// `variables` are the names of the non-empty environment variables: those that belong to a feature
    /// that is not here get a warning.
    pub fn check(
        raw: RawConfig, variables: impl IntoIterator<Item = String>,
    ) -> Result<(Config, Vec<String>), ConfigError> {
        let RawConfig { retention, server, auth, database, messaging } = raw;
        let mut findings = Findings::default();
        let auth = auth::check(auth.given(), &mut findings);
        let (server, log) = check_server(server.given(), auth.is_some(), &mut findings);
        let config = Config {
            server,
            auth,
            log,
            database: check_database(database.given(), &mut findings),
            retention: check_retention(retention.given(), &mut findings),
            messaging: messaging::check(messaging.given(), &mut findings),
        };
        findings.warnings.extend(
            variables
                .into_iter()
                .filter(|name| is_unbuilt(name))
                .map(|name| format!("{name} has no effect in this version: what it sets is fixed, or not built")),
        );
        let Findings { errors, warnings } = findings;
        if errors.is_empty() { Ok((config, warnings)) } else { Err(ConfigError(errors)) }
    }
}

/// The names of the environment variables that are set to something.
pub fn set_variables() -> impl Iterator<Item = String> {
    let set = std::env::vars_os().filter(|(_, value)| !value.is_empty());
    set.filter_map(|(name, _)| name.into_string().ok())
}

fn is_unbuilt(name: &str) -> bool {
    let in_family = UNBUILT_FAMILIES.iter().any(|family| name.starts_with(family));
    in_family || UNBUILT.contains(&name)
}

fn check_retention(given: GivenRetention, findings: &mut Findings) -> Retention {
    let GivenRetention {
        retention_interval,
        retention_batch_size,
        partition_cleanup_days,
        partition_cleanup_enabled,
        metrics_retention_days,
        metrics_flush_ms,
        retention_parallelism,
        stats_interval_ms,
        retained_bytes_interval_ms,
        retention_due_cap,
        retention_safety_walk_ms,
        kv_sweep_seconds,
        retention_lock_ms,
        retention_duty,
        retention_wal,
        retention_replication_lag,
        retention_snapshot_age,
        retention_vacuum,
    } = given;
    for inert in [retention_parallelism, stats_interval_ms] {
        inert.read(findings);
    }
    let cleanup_days = partition_cleanup_days.read_i32(findings);
    let rows_max = retention_batch_size.read_i32(findings);
    let due_max = match retention_due_cap.read_i32(findings) {
        0 => rows_max.saturating_mul(DUE_BATCHES).min(DUE_MAX),
        due_max => due_max,
    };
    let walk_ms = retention_safety_walk_ms.read_u64(findings);
    let kv_seconds = kv_sweep_seconds.read_u64(findings);
    Retention {
        interval_ms: retention_interval.read_u64(findings),
        rows_max,
        due_max,
        lock_hold: Duration::from_millis(retention_lock_ms.read_u64(findings)),
        shared_duty: f64::from(retention_duty.read_i32(findings)) / 100.0,
        wal_bytes_per_second: retention_wal.read_mebibytes(findings),
        replication_lag_bytes: retention_replication_lag.read_mebibytes(findings),
        snapshot_age: Duration::from_secs(retention_snapshot_age.read_u64(findings)),
        vacuum: retention_vacuum.read(findings),
        safety_walk: (0 < walk_ms).then(|| Duration::from_millis(walk_ms)),
        kv_sweep: (0 < kv_seconds).then(|| Duration::from_secs(kv_seconds)),
        partition_cleanup_days: partition_cleanup_enabled.read(findings).then_some(cleanup_days),
        metrics_retention_days: metrics_retention_days.read_i32(findings),
        metrics_flush_ms: metrics_flush_ms.read_u64(findings),
        retained_bytes_interval_ms: retained_bytes_interval_ms.read_u64(findings),
    }
}

fn check_server(given: GivenServer, needs_token: bool, findings: &mut Findings) -> (Server, Log) {
    let GivenServer {
        port,
        bind_addr,
        max_body_bytes,
        connections_max,
        idle_timeout_ms,
        bodies_bytes_max,
        rust_log,
        log_level,
        log_json,
        log_rates_ms,
        log_topn_queues,
        encryption_key,
        tenancy_header,
        file_buffer_dir,
        file_buffer_max_bytes,
        file_buffer_flush_ms,
        file_buffer_max_batch,
        file_buffer_events_per_file,
    } = given;
    for inert in [log_rates_ms, log_topn_queues] {
        inert.read(findings);
    }
    let encryption_key = check_encryption_key(&encryption_key.read(), findings);
    // Starting without a protection that was asked for would be worse than not starting.
    if tenancy_header.read(findings) {
        let line = format!("{} asks for tenants, which this version does not have", tenancy_header.variable());
        findings.errors.push(line);
    }
    let ip = check_bind_addr(&bind_addr.read(), needs_token, findings);
    let server = Server {
        listen: SocketAddr::new(ip, port.read(findings)),
        max_body_bytes: max_body_bytes.read_usize(findings),
        connections_max: connections_max.read_usize(findings),
        idle_timeout: Duration::from_millis(idle_timeout_ms.read_u64(findings)),
        bodies_bytes_max: bodies_bytes_max.read_usize(findings),
        encryption_key,
        spool: Spool {
            folder: file_buffer_dir.read_given().map(PathBuf::from),
            bytes_max: file_buffer_max_bytes.read_u64(findings),
            pause_first_ms: file_buffer_flush_ms.read_u64(findings),
            batch_messages: file_buffer_max_batch.read_usize(findings),
            messages_per_file: file_buffer_events_per_file.read_usize(findings),
        },
    };
    let filter = rust_log.read_given().unwrap_or_else(|| log_level.read());
    if let Err(error) = tracing_subscriber::EnvFilter::builder().parse(&filter) {
        findings.errors.push(format!("RUST_LOG or LOG_LEVEL={filter:?} is not a log filter: {error}"));
    }
    (server, Log { filter, json: log_json.read(findings) })
}

fn check_bind_addr(text: &str, needs_token: bool, findings: &mut Findings) -> IpAddr {
    let localhost = IpAddr::V4(Ipv4Addr::LOCALHOST);
    if text.eq_ignore_ascii_case("localhost") {
        return localhost;
    }
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let ip = bare.parse::<IpAddr>().unwrap_or_else(|_| {
        findings.errors.push(format!("QUEEN_BIND_ADDR={text:?} is not an IP address or localhost"));
        localhost
    });
    if !ip.is_loopback() && !needs_token {
        findings.warnings.push(format!(
            "QUEEN_BIND_ADDR={ip} is not a loopback address and JWT_ENABLED is false: \
             whoever reaches this port can read, add and delete every message"
        ));
    }
    ip
}

fn check_encryption_key(key: &Secret, findings: &mut Findings) -> Option<Key> {
    let key_read = Key::from_hex(key.reveal()?);
    if key_read.is_none() {
        findings.errors.push(format!("QUEEN_ENCRYPTION_KEY is {key:?}; it must be 64 hex digits"));
    }
    key_read
}

fn check_database(given: GivenDatabase, findings: &mut Findings) -> Database {
    let GivenDatabase {
        database_url,
        direct_database_url,
        pg_host,
        pg_port,
        pg_user,
        pg_password,
        pg_database,
        pg_db,
        pg_use_ssl,
        pg_ssl_reject_unauthorized,
        pg_ssl_root_cert,
        db_pool_size,
        stmt_timeout_ms,
        statements,
        apply_schema,
        data_dir,
        postgres_bin_dir,
    } = given;
    let data_dir = PathBuf::from(data_dir.read());
    let url_given = database_url.is_set();
    let parts_given = pg_host.is_set() || pg_port.is_set() || pg_database.is_set() || pg_db.is_set();
    let login_given = pg_user.is_set() || pg_password.is_set();
    let parts = Parts {
        host: pg_host.read(),
        port: pg_port.read(findings),
        user: pg_user.read(),
        password: pg_password.read(),
        database: pg_database.read_given().or(pg_db.read_given()).unwrap_or_else(|| "postgres".to_owned()),
    };
    let tls = Tls {
        required: pg_use_ssl.read(findings),
        reject_unauthorized: pg_ssl_reject_unauthorized.read(findings),
        root_cert: pg_ssl_root_cert.read_given().map(PathBuf::from),
    };
    let direct = direct_database_url.read();
    let source = if url_given || parts_given {
        if url_given && (parts_given || login_given) {
            findings
                .warnings
                .push("EBBTIDE_DATABASE_URL is set, so the PG_ address settings have no effect".to_owned());
        }
        let work = match database_url.read().reveal() {
            Some(url) => read_url("EBBTIDE_DATABASE_URL", url, &tls, findings),
            None => parts.address(&tls),
        };
        let direct = direct.reveal().map(|url| read_url("EBBTIDE_DIRECT_DATABASE_URL", url, &tls, findings));
        let direct = direct.unwrap_or_else(|| work.clone());
        DatabaseSource::External(Box::new(Addresses { work, direct }))
    } else {
        note_embedded(login_given, tls.required, &direct, findings);
        DatabaseSource::Embedded(Embedded {
            data_dir: data_dir.clone(),
            bin_dir: postgres_bin_dir.read_given().map(PathBuf::from),
        })
    };
    Database {
        source,
        tls,
        pool_size: db_pool_size.read_usize(findings),
        statement_timeout: Duration::from_millis(stmt_timeout_ms.read_u64(findings)),
        statements: match statements.read(findings) {
            "unnamed" => Statements::Unnamed,
            _ => Statements::Prepared,
        },
        apply_schema: apply_schema.read(findings),
        data_dir,
    }
}

fn note_embedded(login_given: bool, tls: bool, direct: &Secret, findings: &mut Findings) {
    if direct.reveal().is_some() {
        findings.errors.push(
            "EBBTIDE_DIRECT_DATABASE_URL is set without EBBTIDE_DATABASE_URL or PG_HOST: \
             it only names a second way to an external database"
                .to_owned(),
        );
    }
    if login_given {
        findings.warnings.push(
            "PG_USER and PG_PASSWORD have no effect: no PG_HOST, PG_PORT, PG_DATABASE or \
             EBBTIDE_DATABASE_URL is set, so the embedded database is used"
                .to_owned(),
        );
    }
    if tls {
        findings
            .warnings
            .push("PG_USE_SSL has no effect: the embedded database is reached through a private socket".to_owned());
    }
}

struct Parts {
    host: String,
    port: u16,
    user: String,
    password: Secret,
    database: String,
}

impl Parts {
    fn address(&self, tls: &Tls) -> tokio_postgres::Config {
        let mut address = tokio_postgres::Config::new();
        address.host(&self.host).port(self.port).user(&self.user).dbname(&self.database);
        address.password(self.password.reveal().unwrap_or("postgres"));
        address.ssl_mode(if tls.required { SslMode::Require } else { SslMode::Disable });
        address
    }
}

/// An error of the URL's parser names a part of it, never the password.
fn read_url(variable: &str, url: &str, tls: &Tls, findings: &mut Findings) -> tokio_postgres::Config {
    match url.parse::<tokio_postgres::Config>() {
        Ok(mut address) => {
            if address.get_hosts().is_empty() {
                findings.errors.push(format!("{variable} names no host"));
            }
            if tls.required {
                address.ssl_mode(SslMode::Require);
            }
            address
        }
        Err(error) => {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            let cause = cause.unwrap_or_else(|| error.to_string());
            findings.errors.push(format!(
                "{variable} (set, {} bytes) is not postgres://user:password@host:port/database: {cause}",
                url.len()
            ));
            tokio_postgres::Config::new()
        }
    }
}
