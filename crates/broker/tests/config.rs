//! Settings: what is accepted, what is clamped, what stops the start, and that the documentation says the same.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use clap::{FromArgMatches, Parser};
use ebbtide::config::{
    Config, ConfigError, DatabaseSource, RawAuth, RawConfig, RawDatabase, RawMessaging, RawRetention, RawServer,
    SubscriptionMode,
};
use tokio_postgres::config::{Host, SslMode};

fn check(raw: RawConfig) -> Result<(Config, Vec<String>), ConfigError> {
    Config::check(raw, [])
}

fn text(value: &str) -> Option<String> {
    Some(value.to_owned())
}

fn with_retention(retention: RawRetention) -> RawConfig {
    RawConfig { retention, ..RawConfig::default() }
}

fn with_server(server: RawServer) -> RawConfig {
    RawConfig { server, ..RawConfig::default() }
}

fn with_database(database: RawDatabase) -> RawConfig {
    RawConfig { database, ..RawConfig::default() }
}

fn with_messaging(messaging: RawMessaging) -> RawConfig {
    RawConfig { messaging, ..RawConfig::default() }
}

#[test]
fn nothing_given_is_the_embedded_database_on_loopback() {
    let (config, warnings) = check(RawConfig::default()).unwrap();
    assert_eq!(warnings, Vec::<String>::new());
    assert_eq!(config.server.listen.to_string(), "127.0.0.1:6632");
    let DatabaseSource::Embedded(embedded) = &config.database.source else { panic!("embedded") };
    assert_eq!(embedded.data_dir.to_str(), Some("./ebbtide-data"));
    assert_eq!(config.database.pool_size, 160);
    assert_eq!((config.retention.interval_ms, config.retention.rows_max), (5000, 1000));
    assert_eq!(config.retention.partition_cleanup_days, Some(30));
    assert_eq!(config.messaging.dedup_cache_bytes, Some(64 << 20));
    assert_eq!(config.messaging.pop_timeout_ms, 30_000);
}

#[test]
fn empty_and_blank_mean_the_default() {
    let raw = RawRetention { retention_interval: text(""), metrics_retention_days: text("  "), ..Default::default() };
    let (config, warnings) = check(with_retention(raw)).unwrap();
    assert_eq!((config.retention.interval_ms, config.retention.metrics_retention_days), (5000, 90));
    assert!(warnings.is_empty(), "{warnings:?}");
}

#[test]
fn what_is_out_of_range_is_clamped_with_a_warning_that_names_it() {
    let cases = [
        ("0", 1, true),
        ("-7", 1, true),
        ("1", 1, false),
        ("36500", 36_500, false),
        ("36501", 36_500, true),
        ("99999999999999999999999", 36_500, true),
        ("-99999999999999999999999", 1, true),
    ];
    for (given, expected, warned) in cases {
        let raw = RawRetention { partition_cleanup_days: text(given), ..Default::default() };
        let (config, warnings) = check(with_retention(raw)).unwrap();
        assert_eq!(config.retention.partition_cleanup_days, Some(expected), "{given}");
        assert_eq!(warnings.len(), usize::from(warned), "{given}: {warnings:?}");
        assert!(warnings.iter().all(|line| line.contains("PARTITION_CLEANUP_DAYS") && line.contains(given)));
    }
}

#[test]
fn a_batch_beyond_32_bits_saturates() {
    let raw = RawRetention { retention_batch_size: text("4294967297"), ..Default::default() };
    let (config, warnings) = check(with_retention(raw)).unwrap();
    assert_eq!(config.retention.rows_max, i32::MAX);
    assert_eq!(warnings.len(), 1);
}

#[test]
fn every_mistake_is_named_with_its_value_and_range() {
    let raw = RawConfig {
        retention: RawRetention { retention_interval: text("5s"), ..Default::default() },
        server: RawServer { port: text("70000"), bind_addr: text("everywhere"), ..Default::default() },
        database: RawDatabase { statements: text("named"), ..Default::default() },
        messaging: RawMessaging { dedup_cache: text("maybe"), ..Default::default() },
        auth: RawAuth { jwt_algorithm: text("HS1"), ..Default::default() },
    };
    let lines = check(raw).unwrap_err().0;
    for parts in [
        ["RETENTION_INTERVAL", "5s", "1 to 86400000 ms"],
        ["PORT", "70000", "0 to 65535"],
        ["QUEEN_BIND_ADDR", "everywhere", "IP address"],
        ["EBBTIDE_STATEMENTS", "named", "prepared, unnamed"],
        ["QUEEN_DEDUP_CACHE", "maybe", "true/false"],
        ["JWT_ALGORITHM", "HS1", "RS256"],
    ] {
        assert!(lines.iter().any(|line| parts.iter().all(|part| line.contains(part))), "{parts:?} in {lines:?}");
    }
    assert_eq!(lines.len(), 6, "{lines:?}");
}

#[test]
fn booleans_come_in_four_spellings_of_any_case() {
    for (on, off) in [("true", "false"), ("1", "0"), ("YES", "No"), ("On", "oFF")] {
        for (given, expected) in [(on, Some(30)), (off, None)] {
            let raw = RawRetention { partition_cleanup_enabled: text(given), ..Default::default() };
            assert_eq!(check(with_retention(raw)).unwrap().0.retention.partition_cleanup_days, expected, "{given}");
        }
    }
}

#[test]
fn settings_without_effect_say_so_once() {
    let raw = RawRetention { retention_parallelism: text("4"), stats_interval_ms: text("1"), ..Default::default() };
    let (_, warnings) = check(with_retention(raw)).unwrap();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].contains("RETENTION_PARALLELISM") && warnings[0].contains("no effect"));

    let names =
        ["QUEEN_MESH_PEERS", "QUEEN_HOTLIST_SHARDS", "QUEEN_V2_FUSION_FRAMES", "PORT", "QUEEN_DEDUP_CACHE", "HOME"];
    let (_, warnings) = Config::check(RawConfig::default(), names.map(str::to_owned)).unwrap();
    assert_eq!(warnings.len(), 3, "{warnings:?}");
}

#[test]
fn a_protection_that_is_missing_stops_the_start() {
    for raw in [
        RawServer { tenancy_header: text("on"), ..Default::default() },
        RawServer { encryption_key: text("deadbeef"), ..Default::default() },
    ] {
        let lines = check(with_server(raw)).unwrap_err().0;
        assert_eq!(lines.len(), 1);
        assert!(!lines[0].contains("deadbeef"), "a key is never printed: {lines:?}");
    }
    let key = "0123456789abcdef".repeat(4);
    let raw = RawServer { encryption_key: Some(key.clone()), ..Default::default() };
    let (config, warnings) = check(with_server(raw)).unwrap();
    assert!(config.server.encryption_key.is_some() && warnings.is_empty(), "{warnings:?}");
    assert!(!format!("{config:?}").contains(&key), "a key is never printed");
}

#[test]
fn an_open_address_is_warned_about() {
    for (given, warned) in [("127.0.0.1", 0), ("localhost", 0), ("::1", 0), ("[::1]", 0), ("0.0.0.0", 1), ("::", 1)] {
        let raw = RawServer { bind_addr: text(given), ..Default::default() };
        assert_eq!(check(with_server(raw)).unwrap().1.len(), warned, "{given}");
    }
}

#[test]
fn an_open_address_is_no_matter_where_tokens_are_asked_for() {
    let raw = RawConfig {
        server: RawServer { bind_addr: text("0.0.0.0"), ..Default::default() },
        auth: RawAuth { jwt_enabled: text("true"), jwt_secret: text(&"s".repeat(32)), ..Default::default() },
        ..RawConfig::default()
    };
    let (config, warnings) = check(raw).unwrap();
    assert!(config.auth.is_some() && warnings.is_empty(), "{warnings:?}");
}

fn with_auth(auth: RawAuth) -> RawConfig {
    RawConfig { auth: RawAuth { jwt_enabled: text("true"), ..auth }, ..RawConfig::default() }
}

#[test]
fn tokens_without_a_key_to_check_them_stop_the_start() {
    let url = || text("https://issuer.example/keys");
    for (auth, named) in [
        (RawAuth::default(), "JWT_SECRET"),
        (RawAuth { jwt_algorithm: text("RS256"), ..Default::default() }, "JWT_JWKS_URL"),
        (RawAuth { jwt_algorithm: text("auto"), ..Default::default() }, "JWT_SECRET, JWT_PUBLIC_KEY or JWT_JWKS_URL"),
        (
            RawAuth { jwt_algorithm: text("eddsa"), jwt_secret: text(&"s".repeat(32)), ..Default::default() },
            "JWT_PUBLIC",
        ),
        (RawAuth { jwt_jwks_url: url(), ..Default::default() }, "JWT_SECRET"),
        (
            RawAuth { jwt_algorithm: text("RS256"), jwt_jwks_url: text("issuer.example/keys"), ..Default::default() },
            "http",
        ),
        (
            RawAuth { jwt_algorithm: text("RS256"), jwt_jwks_url: text("file:///keys"), ..Default::default() },
            "JWT_JWKS_URL",
        ),
        (
            RawAuth { jwt_algorithm: text("RS256"), jwt_jwks_url: text("https://u:hunter2@h/"), ..Default::default() },
            "JWT_JWKS_URL",
        ),
        (RawAuth { jwt_secret: text("s"), jwt_role_admin: text("read-only"), ..Default::default() }, "JWT_ROLE_"),
        (RawAuth { jwt_secret: text("s"), jwt_skip_paths: text("/a,health"), ..Default::default() }, "JWT_SKIP_PATHS"),
    ] {
        let lines = check(with_auth(auth)).unwrap_err().0;
        assert!(lines.len() == 1 && lines[0].contains(named), "{named}: {lines:?}");
        assert!(!lines[0].contains("hunter2"), "{lines:?}");
    }
}

#[test]
fn settings_of_tokens_that_do_nothing_say_so() {
    let (config, warnings) = check(RawConfig {
        auth: RawAuth { jwt_secret: text("hunter2"), jwt_clock_skew: text("5"), ..Default::default() },
        ..RawConfig::default()
    })
    .unwrap();
    assert!(config.auth.is_none() && warnings.len() == 1, "{warnings:?}");
    for part in ["JWT_ENABLED is false", "JWT_SECRET", "JWT_CLOCK_SKEW"] {
        assert!(warnings[0].contains(part), "{warnings:?}");
    }
    for (auth, named) in [
        (RawAuth { jwt_secret: text("hunter2"), ..Default::default() }, "JWT_SECRET is set (7 bytes)"),
        (
            RawAuth { jwt_secret: text(&"hunter2".repeat(8)), jwt_public_key: text("x"), ..Default::default() },
            "JWT_PUBLIC_KEY has no effect",
        ),
        (
            RawAuth {
                jwt_algorithm: text("RS256"),
                jwt_secret: text("hunter2"),
                jwt_jwks_url: text("http://127.0.0.1/keys"),
                ..Default::default()
            },
            "JWT_SECRET has no effect",
        ),
        (
            RawAuth {
                jwt_algorithm: text("RS256"),
                jwt_jwks_url: text("http://issuer.example/"),
                ..Default::default()
            },
            "not https",
        ),
    ] {
        let (config, warnings) = check(with_auth(auth)).unwrap();
        assert!(warnings.len() == 1 && warnings[0].contains(named), "{warnings:?}");
        assert!(!format!("{config:?} {warnings:?}").contains("hunter2"));
    }
}

#[test]
fn any_part_of_an_address_means_an_external_database() {
    let external = [
        RawDatabase { pg_host: text("db"), ..Default::default() },
        RawDatabase { pg_port: text("5433"), ..Default::default() },
        RawDatabase { pg_database: text("orders"), ..Default::default() },
        RawDatabase { pg_db: text("orders"), ..Default::default() },
        RawDatabase { database_url: text("postgres://u@db/orders"), ..Default::default() },
    ];
    for raw in external {
        let (config, _) = check(with_database(raw)).unwrap();
        assert!(matches!(config.database.source, DatabaseSource::External(_)));
    }
    let raw = RawDatabase { pg_user: text("u"), pg_host: text(""), ..Default::default() };
    let (config, warnings) = check(with_database(raw)).unwrap();
    assert!(matches!(config.database.source, DatabaseSource::Embedded(_)));
    assert!(warnings[0].contains("PG_USER"), "{warnings:?}");
}

#[test]
fn the_parts_make_an_address() {
    let raw = RawDatabase {
        pg_host: text("db"),
        pg_password: text("hunter2"),
        pg_db: text("second"),
        pg_use_ssl: text("yes"),
        direct_database_url: text("postgres://u:hunter3@primary:5433/orders"),
        ..Default::default()
    };
    let (config, _) = check(with_database(raw)).unwrap();
    let shown = format!("{config:?}");
    assert!(!shown.contains("hunter"), "no password in {shown}");
    let DatabaseSource::External(addresses) = config.database.source else { panic!("external") };
    assert_eq!(addresses.work.get_hosts(), [Host::Tcp("db".to_owned())]);
    assert_eq!(addresses.work.get_dbname(), Some("second"));
    assert_eq!(addresses.work.get_password(), Some(b"hunter2".as_slice()));
    assert_eq!(addresses.work.get_ssl_mode(), SslMode::Require);
    assert_eq!(addresses.direct.get_hosts(), [Host::Tcp("primary".to_owned())]);
    assert_eq!(addresses.direct.get_ssl_mode(), SslMode::Require);
}

#[test]
fn a_bad_url_is_named_but_not_shown() {
    for url in ["mysql://u:hunter2@db/x", "postgres://u:hunter2@db:port/x", "postgres:///x?hunter2"] {
        let raw = RawDatabase { database_url: text(url), ..Default::default() };
        let lines = check(with_database(raw)).unwrap_err().0;
        assert!(lines[0].contains("EBBTIDE_DATABASE_URL") && !lines[0].contains("hunter2"), "{lines:?}");
    }
    let raw = RawDatabase { direct_database_url: text("postgres://u@db/x"), ..Default::default() };
    let lines = check(with_database(raw)).unwrap_err().0;
    assert!(lines[0].contains("EBBTIDE_DIRECT_DATABASE_URL"), "{lines:?}");
}

#[test]
fn the_pop_timeout_has_two_names() {
    for (first, second, expected) in
        [(None, None, 30_000), (None, text("7"), 7), (text("8"), text("7"), 8), (text(""), text("7"), 7)]
    {
        let raw = RawMessaging { default_timeout: first, pop_default_timeout_ms: second, ..Default::default() };
        assert_eq!(check(with_messaging(raw)).unwrap().0.messaging.pop_timeout_ms, expected);
    }
}

#[test]
fn an_unknown_subscription_mode_reads_as_all() {
    for (given, mode, warned) in [
        ("New_Only", SubscriptionMode::New, 0),
        ("all", SubscriptionMode::All, 0),
        ("earliest", SubscriptionMode::All, 1),
    ] {
        let raw = RawMessaging { default_subscription_mode: text(given), ..Default::default() };
        let (config, warnings) = check(with_messaging(raw)).unwrap();
        assert_eq!((config.messaging.subscription_mode, warnings.len()), (mode, warned), "{given}");
    }
}

#[derive(Parser)]
struct Program {
    #[command(flatten)]
    raw: RawConfig,
}

#[test]
fn every_setting_is_a_flag_and_a_variable() {
    let command = <Program as clap::CommandFactory>::command();
    for (_, rows) in RawConfig::tables() {
        for row in rows {
            let arg = command.get_arguments().find(|arg| format!("--{}", arg.get_long().unwrap()) == row.flag);
            let arg = arg.unwrap_or_else(|| panic!("no flag {}", row.flag));
            assert_eq!(arg.get_env().and_then(|name| name.to_str()), Some(row.variable));
            assert!(arg.is_hide_env_values_set(), "--help shows the value of {}", row.variable);
            assert!(arg.get_help().is_some(), "{} has no help", row.variable);
        }
    }
    let arguments = ["ebbtide", "--retention-interval", "-5", "--port=1"];
    let program = Program::from_arg_matches(&command.get_matches_from(arguments)).unwrap();
    assert_eq!(program.raw.retention.retention_interval.as_deref(), Some("-5"));
}

/// The text of `docs/config.md`.
fn rendered() -> String {
    let mut page = String::from(
        "# Settings\n\n\
         Every setting of `ebbtide serve` is an environment variable and a flag; the flag wins. A variable that is set but \
         empty means\nthe default. What cannot be read stops the start and is named; a number outside its range is moved to \
         the nearest end, with a\nwarning. `ebbtide migrate` takes the same settings. A variable that belongs to a feature \
         this version does not have is never\ndropped in silence: the start logs one line for it.\n\n\
         With none of `EBBTIDE_DATABASE_URL`, `PG_HOST`, `PG_PORT`, `PG_DATABASE` and `PG_DB`, the server runs a PostgreSQL \
         of its own in\n`EBBTIDE_DATA_DIR`.\n\n\
         This page is generated: `EBBTIDE_WRITE_DOCS=1 cargo test -p ebbtide --test config` writes it anew.\n",
    );
    for (title, rows) in RawConfig::tables() {
        page.push_str(&format!(
            "\n## {title}\n\n| Variable | Flag | Default | Accepts | Meaning |\n| --- | --- | --- | --- | --- |\n"
        ));
        for row in rows {
            let default = if row.default.is_empty() { "–".to_owned() } else { format!("`{}`", row.default) };
            let accepts = row.accepts.replace('|', "\\|");
            page.push_str(&format!("| `{}` | `{}` | {default} | {accepts} | {} |\n", row.variable, row.flag, row.help));
        }
    }
    page
}

#[test]
fn the_documentation_says_what_the_code_does() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/config.md");
    if std::env::var_os("EBBTIDE_WRITE_DOCS").is_some() {
        std::fs::write(path, rendered()).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap();
    assert!(written == rendered(), "docs/config.md differs; EBBTIDE_WRITE_DOCS=1 writes it anew");
}
