//! Twins of `sql/procedures/analytics.sql`. Each answers the object that the function made, as whatever it is read.

use jiff::Timestamp;
use serde::de::DeserializeOwned;
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::{Param, Sql};
use crate::error::Error;

/// Which times and queues. `None` means the function's default, and lets every queue through.
#[derive(Clone, Copy, Debug, Default)]
pub struct Filter<'a> {
    pub from: Option<Timestamp>,
    pub to: Option<Timestamp>,
    pub queue: Option<&'a str>,
    pub namespace: Option<&'a str>,
    pub task: Option<&'a str>,
}

impl Filter<'_> {
    pub(super) fn params(&self) -> [Param<'_>; 5] {
        [
            (&self.from, Type::TIMESTAMPTZ),
            (&self.to, Type::TIMESTAMPTZ),
            (&self.queue, Type::TEXT),
            (&self.namespace, Type::TEXT),
            (&self.task, Type::TEXT),
        ]
    }
}

pub(super) async fn object<T: DeserializeOwned>(
    db: &(impl Sql + Sync), query: &'static str, params: &[Param<'_>],
) -> Result<T, Error> {
    let Json(object) = db.row(query, params).await?.try_get(0)?;
    Ok(object)
}

/// `queen.get_worker_metrics_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn get_worker_metrics_v1<T: DeserializeOwned>(
    db: &(impl Sql + Sync), filter: &Filter<'_>, hostname: Option<&str>, worker: Option<i32>, tenant: Uuid,
) -> Result<T, Error> {
    let mut params = filter.params().to_vec();
    params.extend::<[Param<'_>; 3]>([(&hostname, Type::TEXT), (&worker, Type::INT4), (&tenant, Type::UUID)]);
    object(db, "select queen.get_worker_metrics_v1($1, $2, $3, $4, $5, $6, $7, $8)", &params).await
}

/// `queen.get_system_metrics_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn get_system_metrics_v1<T: DeserializeOwned>(
    db: &(impl Sql + Sync), from: Option<Timestamp>, to: Option<Timestamp>, hostname: Option<&str>,
    worker: Option<&str>,
) -> Result<T, Error> {
    let params: [Param<'_>; 4] =
        [(&from, Type::TIMESTAMPTZ), (&to, Type::TIMESTAMPTZ), (&hostname, Type::TEXT), (&worker, Type::TEXT)];
    object(db, "select queen.get_system_metrics_v1($1, $2, $3, $4)", &params).await
}

/// `queen.get_queue_ops_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn get_queue_ops_v1<T: DeserializeOwned>(
    db: &(impl Sql + Sync), filter: &Filter<'_>, limit: i32, offset: i32, tenant: Uuid,
) -> Result<T, Error> {
    let mut params = filter.params().to_vec();
    params.extend::<[Param<'_>; 3]>([(&limit, Type::INT4), (&offset, Type::INT4), (&tenant, Type::UUID)]);
    object(db, "select queen.get_queue_ops_v1($1, $2, $3, $4, $5, $6, $7, $8)", &params).await
}

/// `queen.get_queue_lag_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn get_queue_lag_v1<T: DeserializeOwned>(
    db: &(impl Sql + Sync), filter: &Filter<'_>, limit: i32, offset: i32, tenant: Uuid,
) -> Result<T, Error> {
    let mut params = filter.params().to_vec();
    params.extend::<[Param<'_>; 3]>([(&limit, Type::INT4), (&offset, Type::INT4), (&tenant, Type::UUID)]);
    object(db, "select queen.get_queue_lag_v1($1, $2, $3, $4, $5, $6, $7, $8)", &params).await
}

/// `queen.get_parked_replicas_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn get_parked_replicas_v1<T: DeserializeOwned>(
    db: &(impl Sql + Sync), filter: &Filter<'_>, hostname: Option<&str>, limit: i32, offset: i32, tenant: Uuid,
) -> Result<T, Error> {
    let mut params = filter.params().to_vec();
    params.extend::<[Param<'_>; 4]>([
        (&hostname, Type::TEXT),
        (&limit, Type::INT4),
        (&offset, Type::INT4),
        (&tenant, Type::UUID),
    ]);
    object(db, "select queen.get_parked_replicas_v1($1, $2, $3, $4, $5, $6, $7, $8, $9)", &params).await
}

/// `queen.get_pushed_series_v1`: `interval` is minute, hour or day.
///
/// # Errors
/// Whatever the database answered.
pub async fn get_pushed_series_v1<T: DeserializeOwned>(
    db: &(impl Sql + Sync), interval: &str, filter: &Filter<'_>, limit: i32, offset: i32, tenant: Uuid,
) -> Result<T, Error> {
    let mut params: Vec<Param<'_>> = vec![(&interval, Type::TEXT)];
    params.extend(filter.params());
    params.extend::<[Param<'_>; 3]>([(&limit, Type::INT4), (&offset, Type::INT4), (&tenant, Type::UUID)]);
    object(db, "select queen.get_pushed_series_v1($1, $2, $3, $4, $5, $6, $7, $8, $9)", &params).await
}

/// `queen.get_retention_timeseries_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn get_retention_timeseries_v1<T: DeserializeOwned>(
    db: &(impl Sql + Sync), filter: &Filter<'_>, tenant: Uuid,
) -> Result<T, Error> {
    let filters = serde_json::json!({
        "from": filter.from.map(|at| at.to_string()), "to": filter.to.map(|at| at.to_string()),
        "queue": filter.queue, "namespace": filter.namespace, "task": filter.task, "_tenant": tenant,
    });
    object(db, "select queen.get_retention_timeseries_v1($1)", &[(&filters, Type::JSONB)]).await
}

/// `queen.get_postgres_stats_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn get_postgres_stats_v1<T: DeserializeOwned>(db: &(impl Sql + Sync)) -> Result<T, Error> {
    object(db, "select queen.get_postgres_stats_v1()", &[]).await
}
