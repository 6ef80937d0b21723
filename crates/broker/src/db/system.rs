//! Twins of `sql/procedures/system.sql`.

use tokio_postgres::types::Type;
use uuid::Uuid;

use super::Sql;
use crate::error::Error;

/// `queen.system_switches_v1`: the keys of the switches that are on.
///
/// # Errors
/// Whatever the database answers.
pub async fn system_switches_v1(db: &(impl Sql + Sync)) -> Result<Vec<String>, Error> {
    Ok(db.row("select queen.system_switches_v1()", &[]).await?.try_get(0)?)
}

/// `queen.system_switch_v1`
///
/// # Errors
/// Whatever the database answers.
pub async fn system_switch_v1(db: &(impl Sql + Sync), key: &str, is_on: bool) -> Result<(), Error> {
    db.rows("select queen.system_switch_v1($1, $2)", &[(&key, Type::TEXT), (&is_on, Type::BOOL)]).await?;
    Ok(())
}

/// What is declared of an ephemeral queue; `None` is the server's own.
#[derive(Clone, Debug, Default)]
pub struct Declared {
    pub name: String,
    pub max_bytes: Option<i64>,
    pub max_length: Option<i64>,
    pub drops_oldest: bool,
    pub ttl_seconds: Option<i64>,
    pub lease_seconds: Option<i64>,
    pub retry_limit: Option<i64>,
    pub window_ms: Option<i64>,
    pub window_count: Option<i64>,
}

/// `queen.ephemeral_declare_v1`
///
/// # Errors
/// Whatever the database answers.
pub async fn ephemeral_declare_v1(db: &(impl Sql + Sync), tenant: Uuid, queue: &Declared) -> Result<(), Error> {
    let query = "select queen.ephemeral_declare_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)";
    let params = [
        (&tenant as &(dyn tokio_postgres::types::ToSql + Sync), Type::UUID),
        (&queue.name, Type::TEXT),
        (&queue.max_bytes, Type::INT8),
        (&queue.max_length, Type::INT8),
        (&queue.drops_oldest, Type::BOOL),
        (&queue.ttl_seconds, Type::INT8),
        (&queue.lease_seconds, Type::INT8),
        (&queue.retry_limit, Type::INT8),
        (&queue.window_ms, Type::INT8),
        (&queue.window_count, Type::INT8),
    ];
    db.rows(query, &params).await?;
    Ok(())
}

/// `queen.ephemeral_delete_v1`: whether it was declared.
///
/// # Errors
/// Whatever the database answers.
pub async fn ephemeral_delete_v1(db: &(impl Sql + Sync), tenant: Uuid, name: &str) -> Result<bool, Error> {
    let query = "select queen.ephemeral_delete_v1($1, $2)";
    Ok(db.row(query, &[(&tenant, Type::UUID), (&name, Type::TEXT)]).await?.try_get(0)?)
}

/// `queen.ephemeral_declared_v1`
///
/// # Errors
/// Whatever the database answers.
pub async fn ephemeral_declared_v1(
    db: &(impl Sql + Sync), tenant: Uuid, rows_max: i32,
) -> Result<Vec<Declared>, Error> {
    let query = "select name, max_bytes, max_length, drops_oldest, ttl_seconds, lease_seconds, retry_limit, window_ms, window_count
        from queen.ephemeral_declared_v1($1, $2)";
    let rows = db.rows(query, &[(&tenant, Type::UUID), (&rows_max, Type::INT4)]).await?;
    Ok(rows
        .iter()
        .map(|row| Declared {
            name: row.get(0),
            max_bytes: row.get(1),
            max_length: row.get(2),
            drops_oldest: row.get(3),
            ttl_seconds: row.get(4),
            lease_seconds: row.get(5),
            retry_limit: row.get(6),
            window_ms: row.get(7),
            window_count: row.get(8),
        })
        .collect())
}
