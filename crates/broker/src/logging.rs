//! The log: to standard error, as text or as one JSON object a line.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::config::Log;

/// Starts the log of this process; once.
///
/// # Errors
/// If the filter cannot be read, or there is a log already.
pub fn init(settings: &Log) -> anyhow::Result<()> {
    let mut filter = EnvFilter::builder().parse(&settings.filter)?;
    if !settings.filter.contains("tokio_postgres") {
        // The driver passes on every NOTICE, and `if not exists` gives one each.
        filter = filter.add_directive("tokio_postgres=warn".parse()?);
    }
    if !settings.filter.contains("deadpool") {
        // A database that restarts breaks a pool full of connections, a line or two for each; the requests that
        // suffer from it are logged where they fail.
        filter = filter.add_directive("deadpool.postgres=error".parse()?);
    }
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = if settings.json {
        log.json().flatten_event(true).with_current_span(false).with_span_list(false).try_init()
    } else {
        log.with_ansi(std::io::stderr().is_terminal()).try_init()
    };
    started.map_err(|error| anyhow::anyhow!("could not start the log: {error}"))
}

/// Whether there is a log, so that an error need not be printed bare.
pub fn is_on() -> bool {
    tracing::dispatcher::has_been_set()
}
