//! Installs the schema in one transaction under an advisory lock, so that processes that start at once take turns.
//!
//! Table files are applied once. Functions are replaced when they change, and belong to the newest release that
//! installed them: an older one leaves them alone.

use tokio_postgres::types::Type;

use super::row::get;
use super::session::{Session, Sql as _, Transaction};
use crate::error::Error;
use crate::storage::Migrated;
use crate::storage::migration::{Migration, checksum, migrations, missing};

/// Serialises installations, on every program that uses the database.
const SCHEMA_LOCK: i64 = 778_120_011;

const TABLES: &[Migration] = migrations!("postgres":
    1 "0001_jobs.sql",
    2 "0002_fleet.sql",
    3 "0003_waits.sql",
    4 "0004_fan_out.sql",
    5 "0005_schedules.sql",
);

const FUNCTIONS: &str = include_str!("../../../sql/postgres/enqueue.sql");

const BOOKS: &str = "
    create schema if not exists ebbtide_jobs;
    create table if not exists ebbtide_jobs.schema_migrations (
        version    bigint primary key,
        name       text not null,
        checksum   text not null,
        applied_at timestamptz not null default clock_timestamp()
    );
    create table if not exists ebbtide_jobs.schema_functions (
        release    int[] primary key,
        checksum   text not null,
        applied_at timestamptz not null default clock_timestamp()
    );";

pub(super) async fn migrate(session: &mut Session) -> Result<Migrated, Error> {
    let transaction = session.begin().await?;
    transaction.script("set local lock_timeout = '30s'").await?;
    transaction.rows("select pg_advisory_xact_lock($1)", &[(&SCHEMA_LOCK, Type::INT8)]).await?;
    transaction.script(BOOKS).await?;
    let applied = tables(&transaction).await?;
    functions(&transaction).await?;
    transaction.commit().await?;
    let version = TABLES.last().map_or(0, |migration| migration.version);
    Ok(Migrated { applied, version })
}

async fn tables(transaction: &Transaction<'_>) -> Result<usize, Error> {
    let rows = transaction.rows("select version, checksum from ebbtide_jobs.schema_migrations", &[]).await?;
    let installed = rows.iter().map(|row| Ok((get(row, "version")?, get(row, "checksum")?)));
    let missing = missing(TABLES, &installed.collect::<Result<Vec<_>, Error>>()?)?;
    for migration in &missing {
        transaction.script(migration.text).await?;
        let query = "insert into ebbtide_jobs.schema_migrations (version, name, checksum) values ($1, $2, $3)";
        let checksum = migration.checksum();
        let params =
            [(&migration.version as _, Type::INT8), (&migration.name as _, Type::TEXT), (&checksum as _, Type::TEXT)];
        transaction.rows(query, &params).await?;
    }
    Ok(missing.len())
}

async fn functions(transaction: &Transaction<'_>) -> Result<(), Error> {
    let query = "select release, checksum from ebbtide_jobs.schema_functions order by release desc limit 1";
    let rows = transaction.rows(query, &[]).await?;
    let (release, checksum) = (own_release(), checksum(FUNCTIONS));
    if let Some(row) = rows.first() {
        let (newest, installed): (Vec<i32>, String) = (get(row, "release")?, get(row, "checksum")?);
        if release < newest || installed == checksum {
            return Ok(());
        }
    }
    transaction.script(FUNCTIONS).await?;
    let query = "insert into ebbtide_jobs.schema_functions (release, checksum) values ($1, $2)
                 on conflict (release) do update set checksum = excluded.checksum, applied_at = clock_timestamp()";
    transaction.rows(query, &[(&release, Type::INT4_ARRAY), (&checksum, Type::TEXT)]).await?;
    Ok(())
}

fn own_release() -> Vec<i32> {
    env!("CARGO_PKG_VERSION").split('.').map(|part| part.parse().expect("cargo checks the version")).collect()
}
