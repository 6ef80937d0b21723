//! Every setting there is: its variable, its flag, its range and its help, in one list.

use super::setting::{Choice, Flag, Given, Hidden, Inert, Int, Kind, Port, Real, Row, Text};

/// What `--help` says: the meaning, what is accepted, and the default.
fn help_line(help: &str, kind: &impl Kind) -> String {
    let (help, accepts, default) = (help.trim(), kind.accepts(), kind.default_text());
    if default.is_empty() { format!("{help} [{accepts}]") } else { format!("{help} [{accepts}; default {default}]") }
}

/// Declares a group of settings: the flags that clap reads, the same fields as [`Given`] values, and the rows
/// of the documentation. One field, one place.
macro_rules! settings {
    (
        $(#[$group_doc:meta])*
        $raw:ident => $given:ident, $title:literal;
        $( $(#[doc = $help:literal])+ $field:ident = $variable:literal : $kind:ident $rule:tt ; )+
    ) => {
        $(#[$group_doc])*
        #[derive(clap::Args, Clone, Default)]
        pub struct $raw {
            $(
                #[arg(
                    long, env = $variable, hide_env_values = true, allow_hyphen_values = true,
                    help = help_line(concat!($($help),+), &$kind $rule), value_name = <$kind as Kind>::VALUE_NAME, help_heading = $title
                )]
                pub $field: Option<String>,
            )+
        }

        pub struct $given {
            $(pub $field: Given<$kind>,)+
        }

        impl $raw {
            pub const TITLE: &'static str = $title;

            pub fn given(self) -> $given {
                let $raw { $($field),+ } = self;
                $given { $($field: Given::new($variable, $kind $rule, $field),)+ }
            }

            pub fn rows() -> Vec<Row> {
                vec![$(Row {
                    variable: $variable,
                    flag: format!("--{}", stringify!($field).replace('_', "-")),
                    default: ($kind $rule).default_text(),
                    accepts: ($kind $rule).accepts(),
                    help: concat!($($help),+).trim().to_owned(),
                },)+]
            }
        }
    };
}

settings! {
    /// Retention and maintenance.
    RawRetention => GivenRetention, "Retention and maintenance";

    /// Period of the retention cycle, from the start of one to the start of the next.
    retention_interval = "RETENTION_INTERVAL": Int { default: 5000, min: 1, max: 86_400_000, unit: "ms" };
    /// Rows that one retention step may delete; also the batch of the metrics purge.
    retention_batch_size = "RETENTION_BATCH_SIZE": Int { default: 1000, min: 1, max: 2_147_483_647, unit: "rows" };
    /// Silence after which an empty partition is deleted.
    partition_cleanup_days = "PARTITION_CLEANUP_DAYS": Int { default: 30, min: 1, max: 36_500, unit: "days" };
    /// Whether empty partitions are deleted at all.
    partition_cleanup_enabled = "QUEEN_PARTITION_CLEANUP_ENABLED": Flag { default: true };
    /// How long worker and system metrics are kept.
    metrics_retention_days = "METRICS_RETENTION_DAYS": Int { default: 90, min: 1, max: 36_500, unit: "days" };
    /// How often each server writes its metrics to the database.
    metrics_flush_ms = "METRICS_FLUSH_MS": Int { default: 60_000, min: 1000, max: 86_400_000, unit: "ms" };
    /// Retention workers.
    retention_parallelism = "RETENTION_PARALLELISM": Inert { why: "retention runs one bounded step at a time" };
    /// Refresh of the queue statistics.
    stats_interval_ms = "STATS_INTERVAL_MS": Inert { why: "statistics are computed when they are asked for" };
    /// How often the bytes that each queue retains are measured.
    retained_bytes_interval_ms = "RETAINED_BYTES_INTERVAL_MS":
        Int { default: 600_000, min: 1000, max: 86_400_000, unit: "ms" };
    /// Partitions that one cycle takes on at most; 0 takes five times the batch. The rest has its turn at once after.
    retention_due_cap = "QUEEN_RETENTION_DUE_CAP": Int { default: 0, min: 0, max: 1_000_000, unit: "partitions" };
    /// Period of the walk that checks when each partition comes due; 0 walks once after the start.
    retention_safety_walk_ms = "QUEEN_RETENTION_SAFETY_WALK_MS":
        Int { default: 86_400_000, min: 0, max: 31_536_000_000, unit: "ms" };
    /// Period of the deletion of expired key/value rows; 0 keeps them. They are invisible either way.
    kv_sweep_seconds = "EBBTIDE_KV_SWEEP_SECONDS": Int { default: 30, min: 0, max: 86_400, unit: "s" };
    /// The longest that a retention step should hold a partition's lock; its batch is cut until it does not.
    retention_lock_ms = "EBBTIDE_RETENTION_LOCK_MS": Int { default: 10, min: 1, max: 60_000, unit: "ms" };
    /// Share of the time that retention steps may run while others use the database. Alone they take all of it.
    retention_duty = "EBBTIDE_RETENTION_DUTY_PERCENT": Int { default: 50, min: 1, max: 100, unit: "%" };
    /// Write-ahead log of all sessions together from which on retention slows down while others are at work; 0 never.
    retention_wal = "EBBTIDE_RETENTION_WAL_MB_PER_SECOND": Int { default: 256, min: 0, max: 1_000_000, unit: "MiB/s" };
    /// Log that the slowest standby may be behind before retention slows down; 0 never.
    retention_replication_lag = "EBBTIDE_RETENTION_REPLICATION_LAG_MB":
        Int { default: 64, min: 0, max: 1_000_000, unit: "MiB" };
    /// Age from which on a snapshot that keeps deleted rows on disk slows retention down.
    retention_snapshot_age = "EBBTIDE_RETENTION_SNAPSHOT_SECONDS": Int { default: 60, min: 1, max: 86_400, unit: "s" };
    /// Whether the leader vacuums the tables that it deleted from.
    retention_vacuum = "EBBTIDE_RETENTION_VACUUM": Flag { default: true };
}

settings! {
    /// The HTTP server and the log.
    RawServer => GivenServer, "Server";

    /// Port of the HTTP API; 0 takes any free one.
    port = "PORT": Port { default: 6632, min: 0 };
    /// Address to listen on. Without `JWT_ENABLED` there is no authentication, so anything but loopback is for trusted
    /// networks only.
    bind_addr = "QUEEN_BIND_ADDR": Text { default: "127.0.0.1", accepts: "an IP address, or localhost" };
    /// Largest request body; a larger one gets 413.
    max_body_bytes = "QUEEN_MAX_BODY_BYTES": Int { default: 67_108_864, min: 1024, max: 1_073_741_824, unit: "bytes" };
    /// Connections at once; more wait until one ends. Capped by the files that the process may open, and the start says so.
    connections_max = "EBBTIDE_CONNECTIONS_MAX": Int { default: 20_000, min: 1, max: 1_000_000, unit: "" };
    /// How long a connection may stand still before its next request is there; then it is closed. Longer than clients
    /// keep theirs.
    idle_timeout_ms = "EBBTIDE_IDLE_TIMEOUT_MS": Int { default: 75_000, min: 1000, max: 3_600_000, unit: "ms" };
    /// Memory for all request bodies together, but at least for one. Where it is used up, large ones get 503.
    bodies_bytes_max = "EBBTIDE_BODIES_BYTES_MAX": Int { default: 268_435_456, min: 1_048_576, max: 1_099_511_627_776, unit: "bytes" };
    /// What to log, for example `info,retention=debug`. Wins over LOG_LEVEL.
    rust_log = "RUST_LOG": Text { default: "", accepts: "a level, or target=level pairs" };
    /// What to log when RUST_LOG is not set.
    log_level = "LOG_LEVEL": Text { default: "info", accepts: "a level, or target=level pairs" };
    /// Log one JSON object a line.
    log_json = "QUEEN_LOG_JSON": Flag { default: false };
    /// Period of the rate report.
    log_rates_ms = "QUEEN_LOG_RATES_MS": Inert { why: "rates are read from /metrics/prometheus" };
    /// Queues named in the rate report.
    log_topn_queues = "QUEEN_LOG_TOPN_QUEUES": Inert { why: "rates are read from /metrics/prometheus" };
    /// Key that encrypts the payloads of queues with `encryptionEnabled`. Every server of a database needs the same one;
    /// without it what is encrypted cannot be read, and what is pushed is stored in clear.
    encryption_key = "QUEEN_ENCRYPTION_KEY": Hidden { accepts: "64 hex digits" };
    /// Tenants by request header. Asking for it stops the start: this version serves one tenant.
    tenancy_header = "QUEEN_TENANCY_HEADER": Flag { default: false };
    /// Folder of the disk spool, which keeps pushes while the database is away. Each server needs its own.
    file_buffer_dir = "FILE_BUFFER_DIR": Text { default: "", accepts: "a folder; default: `buffers` in EBBTIDE_DATA_DIR, made when it is needed" };
    /// Bytes that the spool may take on disk; a push beyond them gets 503.
    file_buffer_max_bytes = "EBBTIDE_FILE_BUFFER_MAX_BYTES": Int { default: 1_073_741_824, min: 65_536, max: 1_099_511_627_776, unit: "bytes" };
    /// First pause between two looks for a database that is away; each further one is twice as long, up to 5 s.
    file_buffer_flush_ms = "FILE_BUFFER_FLUSH_MS": Int { default: 100, min: 1, max: 5000, unit: "ms" };
    /// Messages of the spool that are replayed at once.
    file_buffer_max_batch = "FILE_BUFFER_MAX_BATCH": Int { default: 100, min: 1, max: 10_000, unit: "messages" };
    /// Messages after which the spool begins another file; a file goes when all of it is replayed.
    file_buffer_events_per_file = "FILE_BUFFER_EVENTS_PER_FILE": Int { default: 10_000, min: 1, max: 1_000_000, unit: "messages" };
}

settings! {
    /// Who may do what.
    RawAuth => GivenAuth, "Authentication";

    /// Require a token with every request but those to the skipped paths.
    jwt_enabled = "JWT_ENABLED": Flag { default: false };
    /// How tokens are signed; any other algorithm is refused. `auto` takes all that there are keys for.
    jwt_algorithm = "JWT_ALGORITHM": Choice { default: "HS256", words: &["HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "EdDSA", "auto"] };
    /// Secret of the HS algorithms.
    jwt_secret = "JWT_SECRET": Hidden { accepts: "text, at least 32 bytes of it" };
    /// Public key of the RS algorithms or of EdDSA.
    jwt_public_key = "JWT_PUBLIC_KEY": Text { default: "", accepts: "PEM: RSA of 2048 bits and more, or Ed25519; line ends may be written \\n" };
    /// Where the issuer publishes its public keys, as a JSON Web Key Set. Redirects are not followed.
    jwt_jwks_url = "JWT_JWKS_URL": Text { default: "", accepts: "http(s)://host/path" };
    /// Age at which the published keys are fetched again. A token with an unknown key fetches them at once, at most every
    /// 10 s.
    jwt_jwks_refresh_interval = "JWT_JWKS_REFRESH_INTERVAL": Int { default: 3600, min: 10, max: 2_592_000, unit: "s" };
    /// How long one such fetch may take.
    jwt_jwks_timeout_ms = "JWT_JWKS_TIMEOUT_MS": Int { default: 5000, min: 100, max: 60_000, unit: "ms" };
    /// By how much the clocks of issuer and server may differ.
    jwt_clock_skew = "JWT_CLOCK_SKEW": Int { default: 30, min: 0, max: 3600, unit: "s" };
    /// What `iss` of a token must be; not checked when not set.
    jwt_issuer = "JWT_ISSUER": Text { default: "", accepts: "text" };
    /// What `aud` of a token must be or contain; not checked when not set.
    jwt_audience = "JWT_AUDIENCE": Text { default: "", accepts: "text" };
    /// Paths that need no token, exactly as written; one that ends in a slash stands for all that begin with it.
    jwt_skip_paths = "JWT_SKIP_PATHS": Text { default: "/health,/metrics/prometheus,/metrics,/", accepts: "paths, separated by commas" };
    /// Claim that names a role, or a list of roles.
    jwt_roles_claim = "JWT_ROLES_CLAIM": Text { default: "role", accepts: "a name" };
    /// A second such claim.
    jwt_roles_array_claim = "JWT_ROLES_ARRAY_CLAIM": Text { default: "roles", accepts: "a name" };
    /// What the role is called that may do everything.
    jwt_role_admin = "JWT_ROLE_ADMIN": Text { default: "admin", accepts: "a name" };
    /// What the role is called that may push, pop, configure and look.
    jwt_role_read_write = "JWT_ROLE_READ_WRITE": Text { default: "read-write", accepts: "a name" };
    /// What the role is called that may look.
    jwt_role_read_only = "JWT_ROLE_READ_ONLY": Text { default: "read-only", accepts: "a name" };
    /// What the role is called that may push.
    jwt_role_write_only = "JWT_ROLE_WRITE_ONLY": Text { default: "write-only", accepts: "a name" };
}

settings! {
    /// The database, external or embedded.
    RawDatabase => GivenDatabase, "Database";

    /// Address of an external database. Wins over the PG_ settings.
    database_url = "EBBTIDE_DATABASE_URL": Hidden { accepts: "postgres://user:password@host:port/database" };
    /// Address that reaches the database directly where the other one is a transaction-mode pooler: for leader
    /// election, notifications and migrations. Default: the same address.
    direct_database_url = "EBBTIDE_DIRECT_DATABASE_URL": Hidden { accepts: "postgres://user:password@host:port/database" };
    /// Host of an external database, or the folder of its socket.
    pg_host = "PG_HOST": Text { default: "localhost", accepts: "a host name, an address, or an absolute path" };
    /// Port of an external database.
    pg_port = "PG_PORT": Port { default: 5432, min: 1 };
    /// Database role.
    pg_user = "PG_USER": Text { default: "postgres", accepts: "a role" };
    /// Password of the role.
    pg_password = "PG_PASSWORD": Hidden { accepts: "text; default postgres" };
    /// Name of the database. Wins over PG_DB.
    pg_database = "PG_DATABASE": Text { default: "postgres", accepts: "a name" };
    /// Name of the database when PG_DATABASE is not set.
    pg_db = "PG_DB": Text { default: "", accepts: "a name" };
    /// Require TLS to the database.
    pg_use_ssl = "PG_USE_SSL": Flag { default: false };
    /// Refuse a database whose certificate cannot be verified.
    pg_ssl_reject_unauthorized = "PG_SSL_REJECT_UNAUTHORIZED": Flag { default: true };
    /// PEM file of the authority that signed the database's certificate.
    pg_ssl_root_cert = "PG_SSL_ROOT_CERT": Text { default: "", accepts: "a file; default: the system's authorities" };
    /// Connections for requests, at most; capped by what the database has free.
    db_pool_size = "DB_POOL_SIZE": Int { default: 160, min: 4, max: 1000, unit: "" };
    /// How long a statement of a request may take before it is cancelled.
    stmt_timeout_ms = "QUEEN_STMT_TIMEOUT_MS": Int { default: 30_000, min: 100, max: 3_600_000, unit: "ms" };
    /// How statements are sent; `unnamed` is safe behind a transaction-mode pooler and a little slower.
    statements = "EBBTIDE_STATEMENTS": Choice { default: "prepared", words: &["prepared", "unnamed"] };
    /// Install or upgrade the schema at start.
    apply_schema = "QUEEN_APPLY_SCHEMA": Flag { default: true };
    /// Folder of the embedded database, used when no external one is named.
    data_dir = "EBBTIDE_DATA_DIR": Text { default: "./ebbtide-data", accepts: "a folder" };
    /// Folder of the PostgreSQL server programs for the embedded database.
    postgres_bin_dir = "EBBTIDE_POSTGRES_BIN_DIR": Text { default: "", accepts: "a folder; default: searched" };
}

settings! {
    /// Pushing and popping.
    RawMessaging => GivenMessaging, "Push and pop";

    /// Level of segment compression; 1 is cheaper at high rates.
    zstd_level = "QUEEN_V2_ZSTD_LEVEL": Int { default: 3, min: 1, max: 19, unit: "" };
    /// Lanes in which concurrent pushes are committed together.
    push_lanes = "QUEEN_V2_FUSION_SHARDS": Int { default: 8, min: 1, max: 64, unit: "" };
    /// Keep an index of recent transaction ids, which spares the database the duplicate probe.
    dedup_cache = "QUEEN_DEDUP_CACHE": Flag { default: true };
    /// Memory of that index.
    dedup_cache_mb = "QUEEN_DEDUP_CACHE_MB": Int { default: 64, min: 1, max: 64, unit: "MiB" };
    /// Fire timers on this server. Another one of the same database can do it.
    sweeper = "QUEEN_SWEEPER": Flag { default: true };
    /// How long a pop with `wait=true` waits when the request names no timeout. Wins over POP_DEFAULT_TIMEOUT_MS.
    default_timeout = "DEFAULT_TIMEOUT": Int { default: 30_000, min: 1, max: 3_600_000, unit: "ms" };
    /// The same, when DEFAULT_TIMEOUT is not set.
    pop_default_timeout_ms = "POP_DEFAULT_TIMEOUT_MS": Int { default: 30_000, min: 1, max: 3_600_000, unit: "ms" };
    /// Where a new consumer group starts when the pop does not say. `new`, `new-only`, `new_only` and `newonly` start
    /// at the end; anything else starts at the first message kept.
    default_subscription_mode = "DEFAULT_SUBSCRIPTION_MODE": Text { default: "new", accepts: "new or all" };
    /// First interval at which a waiting pop looks again without having been woken.
    pop_wait_initial_interval_ms = "POP_WAIT_INITIAL_INTERVAL_MS": Int { default: 100, min: 1, max: 60_000, unit: "ms" };
    /// Misses before that interval starts to grow.
    pop_wait_backoff_threshold = "POP_WAIT_BACKOFF_THRESHOLD": Int { default: 3, min: 0, max: 1000, unit: "" };
    /// Factor by which it grows at every further miss.
    pop_wait_backoff_multiplier = "POP_WAIT_BACKOFF_MULTIPLIER": Real { default: 2.0, min: 1.0, max: 100.0 };
    /// Longest such interval.
    pop_wait_max_interval_ms = "POP_WAIT_MAX_INTERVAL_MS": Int { default: 1000, min: 1, max: 60_000, unit: "ms" };

    /// Values by key beyond which none is added, by the database's statistics; 0 is no limit.
    kv_max_rows = "QUEEN_KV_MAX_ROWS": Int { default: 0, min: 0, max: 1_000_000_000_000, unit: "rows" };
    /// Pending timers beyond which none is scheduled, by the database's statistics; 0 is no limit.
    timers_max_rows = "QUEEN_TIMERS_MAX_ROWS": Int { default: 0, min: 0, max: 1_000_000_000_000, unit: "rows" };
    /// Key/value reads a second that this server carries out, with twice that at once; the rest gets 429. 0 is no limit.
    kv_read_rate = "QUEEN_KV_READ_RATE": Int { default: 0, min: 0, max: 1_000_000_000, unit: "/s" };
    /// Key/value writes a second, in the same way.
    kv_write_rate = "QUEEN_KV_WRITE_RATE": Int { default: 0, min: 0, max: 1_000_000_000, unit: "/s" };
    /// Timers scheduled a second, in the same way.
    timers_rate = "QUEEN_TIMERS_RATE": Int { default: 0, min: 0, max: 1_000_000_000, unit: "/s" };
    /// Messages pushed to ephemeral queues a second, in the same way.
    ephemeral_rate = "QUEEN_EPHEMERAL_RATE": Int { default: 0, min: 0, max: 1_000_000_000, unit: "/s" };
    /// Memory of all ephemeral queues of a server; a push beyond it gets 503.
    ephemeral_max_bytes = "QUEEN_EPHEMERAL_MAX_BYTES": Int { default: 268_435_456, min: 65_536, max: 1_099_511_627_776, unit: "bytes" };
    /// Memory of an ephemeral queue that says nothing else.
    ephemeral_queue_max_bytes = "QUEEN_EPHEMERAL_QUEUE_MAX_BYTES": Int { default: 16_777_216, min: 1024, max: 1_099_511_627_776, unit: "bytes" };
    /// Messages of an ephemeral queue that says nothing else.
    ephemeral_queue_max_length = "QUEEN_EPHEMERAL_QUEUE_MAX_LENGTH": Int { default: 10_000, min: 1, max: 10_000_000, unit: "messages" };
    /// Lease of an ephemeral queue that says nothing else.
    ephemeral_lease_s = "QUEEN_EPHEMERAL_LEASE_S": Int { default: 30, min: 1, max: 86_400, unit: "s" };
    /// Retries of a message of an ephemeral queue that says nothing else; then it is dropped.
    ephemeral_retry_limit = "QUEEN_EPHEMERAL_RETRY_LIMIT": Int { default: 5, min: 1, max: 1000, unit: "" };
    /// Silence after which an ephemeral queue that nobody declared is forgotten with all that is in it, and a group.
    ephemeral_implicit_idle_s = "QUEEN_EPHEMERAL_IMPLICIT_IDLE_S": Int { default: 300, min: 1, max: 31_536_000, unit: "s" };
}

/// Variables of features that this version does not have, and that have no flag here. Setting one is
/// harmless, and is said once at start.
pub const UNBUILT: &[&str] = &[
    "QUEEN_V2_FUSION_HOLD_MS",
    "QUEEN_V2_FUSION_FRAMES",
    "QUEEN_V2_FUSION_MIN_FRAMES",
    "QUEEN_V2_BUNDLE_MAX",
    "QUEEN_V2_BUNDLE_LOG",
    "QUEEN_POP_PENDING_GATE",
    "QUEEN_SERVER_ID",
    "QUEEN_CACHE_REFRESH_INTERVAL_MS",
    "QUEEN_UDP_NOTIFY_PORT",
    "QUEEN_UDP_PEERS",
    "QUEEN_EPHEMERAL_RATE",
    "QUEEN_EPHEMERAL_BURST",
];

/// The same, by the start of the name.
pub const UNBUILT_FAMILIES: &[&str] = &[
    "QUEEN_ACK_",
    "QUEEN_POP_FUSION",
    "QUEEN_HOTLIST",
    "QUEEN_ADMISSION_",
    "QUEEN_SYNC_",
    "QUEEN_MESH_",
    "QUEEN_KV_",
    "QUEEN_TIMERS_",
    "QUEEN_SWEEPER_",
];

/// Every setting of `ebbtide serve`, as text: each from a flag or from its environment variable, the flag first.
#[derive(clap::Args, Clone, Default)]
pub struct RawConfig {
    #[command(flatten)]
    pub retention: RawRetention,
    #[command(flatten)]
    pub server: RawServer,
    #[command(flatten)]
    pub auth: RawAuth,
    #[command(flatten)]
    pub database: RawDatabase,
    #[command(flatten)]
    pub messaging: RawMessaging,
}

impl RawConfig {
    /// The documentation of every setting, by group.
    pub fn tables() -> [(&'static str, Vec<Row>); 5] {
        [
            (RawServer::TITLE, RawServer::rows()),
            (RawAuth::TITLE, RawAuth::rows()),
            (RawDatabase::TITLE, RawDatabase::rows()),
            (RawRetention::TITLE, RawRetention::rows()),
            (RawMessaging::TITLE, RawMessaging::rows()),
        ]
    }
}
