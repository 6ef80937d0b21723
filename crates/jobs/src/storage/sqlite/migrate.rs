//! Installs the schema inside one write transaction, which keeps other processes out.

use rusqlite::{Connection, params};

use super::row::get;
use super::threads::error;
use crate::error::Error;
use crate::storage::Migrated;
use crate::storage::migration::{Migration, migrations, missing};

const TABLES: &[Migration] = migrations!("sqlite":
    1 "0001_jobs.sql",
    2 "0002_fleet.sql",
    3 "0003_waits.sql",
    4 "0004_fan_out.sql",
    5 "0005_schedules.sql",
);

const BOOKS: &str = "
    create table if not exists schema_migrations (
        version    integer primary key,
        name       text not null,
        checksum   text not null,
        applied_at integer not null default (cast(round(unixepoch('subsec') * 1000) as integer) * 1000)
    ) strict;";

pub(super) fn migrate(db: &Connection) -> Result<Migrated, Error> {
    db.execute_batch(BOOKS).map_err(error)?;
    let mut query = db.prepare("select version, checksum from schema_migrations").map_err(error)?;
    let rows =
        query.query_map([], |row| Ok(get(row, "version").and_then(|version| Ok((version, get(row, "checksum")?)))));
    let installed: Vec<_> = rows.map_err(error)?.map(|row| row.map_err(error)?).collect::<Result<_, Error>>()?;
    let missing = missing(TABLES, &installed)?;
    for migration in &missing {
        db.execute_batch(migration.text).map_err(error)?;
        let insert = "insert into schema_migrations (version, name, checksum) values (?1, ?2, ?3)";
        db.execute(insert, params![migration.version, migration.name, migration.checksum()]).map_err(error)?;
    }
    let version = TABLES.last().map_or(0, |migration| migration.version);
    Ok(Migrated { applied: missing.len(), version })
}
