//! Installs the schema: numbered table files once each, function files again when they change.
//!
//! One transaction under an advisory lock, so that servers that start at once take turns and a
//! crash leaves the old install. Functions belong to the newest release that installed them: an
//! older binary leaves them alone. Indexes of tables that may be large and busy are built after
//! it, while traffic goes on; until they are there, what needs them is slow and not wrong.

use tokio_postgres::{Client, Transaction};
use tracing::{info, warn};
use xxhash_rust::xxh3::xxh3_128;

use super::Target;
use crate::error::Error;

/// Serialises installs, on every server of the database.
const SCHEMA_LOCK: i64 = 778_120_010;
/// Lets one server build indexes at a time. Not the lock above: whoever waits for that one holds a snapshot, and
/// a concurrent build waits for all snapshots.
const INDEX_LOCK: i64 = 778_120_011;
/// How long an install waits for a table that traffic holds, before it gives up and says so.
const LOCK_TIMEOUT: &str = "30s";

macro_rules! sql_files {
    ($dir:literal: $($name:literal),* $(,)?) => {
        &[$(SqlFile { name: $name, text: include_str!(concat!("../../sql/", $dir, "/", $name)) }),*]
    };
}

struct SqlFile {
    name: &'static str,
    text: &'static str,
}

impl SqlFile {
    fn checksum(&self) -> String {
        format!("{:032x}", xxh3_128(self.text.as_bytes()))
    }

    fn stem(&self) -> &'static str {
        self.name.strip_suffix(".sql").expect("each is a .sql file")
    }
}

/// Applied once, in this order, and never edited.
const TABLES: &[SqlFile] = sql_files!("schema":
    "0001_queues.sql",
    "0002_log.sql",
    "0003_subscriptions.sql",
    "0004_metrics.sql",
    "0005_traces.sql",
    "0006_state.sql",
    "0007_dead_letter_lookup.sql",
    "0008_dead_letter_origin.sql",
    "0009_due.sql",
    "0010_kv.sql",
    "0011_timers.sql",
    "0012_measured.sql",
    "0013_streams.sql",
    "0014_conflation.sql",
    "0015_ephemeral.sql",
);

/// One `create index concurrently` a file, named as the index.
const INDEXES: &[SqlFile] = sql_files!("indexes":
    "log_partitions_live_idx.sql",
    "log_partitions_held_idx.sql",
    "log_partitions_recheck_idx.sql",
    "log_partitions_txn_idx.sql",
    "log_partitions_empty_idx.sql",
);

/// Applied again, in this order, whenever one of them differs from what is installed.
const PROCEDURES: &[SqlFile] = sql_files!("procedures":
    "due.sql",
    "provision.sql",
    "push.sql",
    "subscription.sql",
    "system.sql",
    "discovery.sql",
    "pop.sql",
    "conflation.sql",
    "ack.sql",
    "dead_letters.sql",
    "dead_letter_admin.sql",
    "lease.sql",
    "kv.sql",
    "timers.sql",
    "transaction.sql",
    "streams.sql",
    "configure.sql",
    "retention.sql",
    "cleanup.sql",
    "metrics.sql",
    "traces.sql",
    "consumer_groups.sql",
    "resources.sql",
    "messages.sql",
    "analytics.sql",
    "status.sql",
    "stats.sql",
);

/// What an install did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Installed {
    /// Table files applied.
    pub tables: usize,
    /// Function files applied.
    pub procedures: usize,
    /// A newer release installed the functions; they were left as they are.
    pub newer_present: bool,
}

/// Brings the database's schema to this binary's version. Doing it twice changes nothing.
///
/// # Errors
/// If a table file that was applied has another text now, if a lock cannot be had in time, or if
/// the database refuses a statement; nothing is changed then.
pub async fn migrate(target: &Target) -> Result<Installed, Error> {
    let mut client = target.connect("ebbtide-migrate").await?;
    let transaction = client.transaction().await?;
    let installed = install(&transaction).await?;
    transaction.commit().await?;
    build_indexes(&client).await?;
    if installed.newer_present {
        info!(target: "db", "a newer release installed the functions; left as they are");
    } else if installed.tables + installed.procedures > 0 {
        info!(target: "db", tables = installed.tables, procedures = installed.procedures, "schema installed");
    }
    Ok(installed)
}

/// Builds the indexes that are missing or were left half built. One that cannot be had now, because an old
/// transaction never ends, is left for the next start.
async fn build_indexes(client: &Client) -> Result<(), Error> {
    let query = "select to_regclass('queen.' || n) is not null, coalesce(i.indisvalid, false)
        from unnest($1::text[]) with ordinality u (n, ord)
        left join pg_index i on i.indexrelid = to_regclass('queen.' || n) order by ord";
    let names: Vec<&str> = INDEXES.iter().map(SqlFile::stem).collect();
    let states = client.query(query, &[&names]).await?;
    if states.iter().all(|state| state.get(1)) {
        return Ok(());
    }
    let locked: bool = client.query_one("select pg_try_advisory_lock($1)", &[&INDEX_LOCK]).await?.get(0);
    if !locked {
        info!(target: "db", "another server builds the indexes");
        return Ok(());
    }
    client.batch_execute(&format!("set lock_timeout = '{LOCK_TIMEOUT}'")).await?;
    for (file, state) in INDEXES.iter().zip(&states) {
        let (exists, valid): (bool, bool) = (state.get(0), state.get(1));
        if valid {
            continue;
        }
        if exists {
            client.batch_execute(&format!("drop index concurrently if exists queen.{}", file.stem())).await?;
        }
        if let Err(error) = client.batch_execute(file.text).await {
            warn!(target: "db", index = file.stem(), %error,
                "an index could not be built; retention is slower until a later start builds it");
        }
    }
    client.execute("select pg_advisory_unlock($1)", &[&INDEX_LOCK]).await?;
    Ok(())
}

async fn install(transaction: &Transaction<'_>) -> Result<Installed, Error> {
    transaction.batch_execute(&format!("set local lock_timeout = '{LOCK_TIMEOUT}'")).await?;
    transaction.execute("select pg_advisory_xact_lock($1)", &[&SCHEMA_LOCK]).await?;
    transaction
        .batch_execute(
            "create schema if not exists queen;
             create table if not exists queen.installed_files (
                 name       text primary key,
                 checksum   text not null,
                 version    int[] not null,
                 applied_at timestamptz not null default now()
             );",
        )
        .await?;
    let tables = install_tables(transaction).await?;
    if newest_version(transaction).await?.is_some_and(|newest| newest > own_version()) {
        return Ok(Installed { tables, procedures: 0, newer_present: true });
    }
    let procedures = install_procedures(transaction).await?;
    Ok(Installed { tables, procedures, newer_present: false })
}

async fn install_tables(transaction: &Transaction<'_>) -> Result<usize, Error> {
    let mut applied = 0;
    for file in TABLES {
        match installed_checksum(transaction, file.name).await? {
            Some(checksum) if checksum == file.checksum() => {}
            Some(_) => {
                return Err(Error::Corrupt(format!("{} was installed with another text", file.name)));
            }
            None => {
                apply(transaction, file).await?;
                applied += 1;
            }
        }
    }
    Ok(applied)
}

/// All of them or none: a function may rely on a type or function of another file.
async fn install_procedures(transaction: &Transaction<'_>) -> Result<usize, Error> {
    let mut changed = 0;
    for file in PROCEDURES {
        if installed_checksum(transaction, file.name).await?.as_deref() != Some(&file.checksum()) {
            changed += 1;
        }
    }
    if changed > 0 {
        for file in PROCEDURES {
            apply(transaction, file).await?;
        }
    }
    Ok(changed)
}

async fn installed_checksum(transaction: &Transaction<'_>, name: &str) -> Result<Option<String>, Error> {
    let query = "select checksum from queen.installed_files where name = $1";
    Ok(transaction.query_opt(query, &[&name]).await?.map(|row| row.get(0)))
}

async fn newest_version(transaction: &Transaction<'_>) -> Result<Option<Vec<i32>>, Error> {
    Ok(transaction.query_one("select max(version) from queen.installed_files", &[]).await?.get(0))
}

async fn apply(transaction: &Transaction<'_>, file: &SqlFile) -> Result<(), Error> {
    transaction.batch_execute(file.text).await?;
    transaction
        .execute(
            "insert into queen.installed_files (name, checksum, version) values ($1, $2, $3)
             on conflict (name) do update set checksum = excluded.checksum, version = excluded.version, applied_at = now()",
            &[&file.name, &file.checksum(), &own_version()],
        )
        .await?;
    Ok(())
}

fn own_version() -> Vec<i32> {
    env!("CARGO_PKG_VERSION").split('.').map(|part| part.parse().expect("cargo checks the version")).collect()
}

/// Names this binary's schema: two binaries with the same fingerprint install the same.
pub fn fingerprint() -> String {
    let all: String =
        TABLES.iter().chain(PROCEDURES).chain(INDEXES).map(|file| file.name.to_owned() + file.text).collect();
    format!("{:032x}", xxh3_128(all.as_bytes()))
}

/// Whether this binary's schema is the one installed, for a server told not to install it.
///
/// # Errors
/// If the database cannot be asked.
pub async fn is_installed(client: &Client) -> Result<bool, Error> {
    let exists: bool = client.query_one("select to_regclass('queen.installed_files') is not null", &[]).await?.get(0);
    if !exists {
        return Ok(false);
    }
    let names: Vec<&str> = TABLES.iter().chain(PROCEDURES).map(|file| file.name).collect();
    let query = "select count(*) = cardinality($1::text[]) from queen.installed_files where name = any($1)";
    Ok(client.query_one(query, &[&names]).await?.get(0))
}
