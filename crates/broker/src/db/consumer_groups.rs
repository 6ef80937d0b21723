//! Twins of `sql/procedures/consumer_groups.sql`.

use std::collections::HashSet;

use jiff::Timestamp;
use serde::Deserialize;
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::{Param, Sql};
use crate::error::Error;
use crate::id::QueueId;

/// What one step of a seek did.
#[derive(Clone, Debug, Deserialize)]
pub struct SeekStep {
    pub moved: i64,
    pub clamped_to_start: i64,
    pub clamped_to_end: i64,
    /// Where the next step goes on.
    pub last: Option<String>,
    pub done: bool,
}

/// Which cursors a seek sets, and where.
#[derive(Clone, Copy, Debug)]
pub struct Seek<'a> {
    pub queue_id: QueueId,
    /// `None` is all of them.
    pub partition: Option<&'a str>,
    pub group: &'a str,
    /// `None` is the tail.
    pub at: Option<Timestamp>,
}

/// `queen.log_seek_step_v1`
///
/// # Errors
/// Whatever the database answered; this step moved nothing then.
pub async fn log_seek_step_v1(
    db: &(impl Sql + Sync), seek: &Seek<'_>, after: Option<&str>, rows_max: i32,
) -> Result<SeekStep, Error> {
    let query = "select queen.log_seek_step_v1($1, $2, $3, $4, $5, $6)";
    let params = [
        (&seek.queue_id.0 as _, Type::UUID),
        (&seek.partition as _, Type::TEXT),
        (&seek.group as _, Type::TEXT),
        (&seek.at as _, Type::TIMESTAMPTZ),
        (&after as _, Type::TEXT),
        (&rows_max as _, Type::INT4),
    ];
    let Json(step) = db.row(query, &params).await?.try_get(0)?;
    Ok(step)
}

/// `queen.log_group_unsubscribe_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn log_group_unsubscribe_v1(
    db: &(impl Sql + Sync), group: &str, queue_id: Option<QueueId>, tenant: Uuid,
) -> Result<i64, Error> {
    let query = "select queen.log_group_unsubscribe_v1($1, $2, $3)";
    let queue_id = queue_id.map(|id| id.0);
    let params = [(&group as _, Type::TEXT), (&queue_id as _, Type::UUID), (&tenant as _, Type::UUID)];
    Ok(db.row(query, &params).await?.try_get(0)?)
}

/// What one step of a group delete did.
#[derive(Clone, Debug, Deserialize)]
pub struct DeleteStep {
    pub deleted: i64,
    /// Queues that had a cursor of the group in this step.
    pub queues: Vec<String>,
    /// Where the next step goes on.
    pub last: Option<String>,
    pub done: bool,
}

/// `queen.log_group_delete_step_v1`
///
/// # Errors
/// Whatever the database answered; this step deleted nothing then.
pub async fn log_group_delete_step_v1(
    db: &(impl Sql + Sync), group: &str, queue_id: Option<QueueId>, after: Option<&str>, rows_max: i32, tenant: Uuid,
) -> Result<DeleteStep, Error> {
    let query = "select queen.log_group_delete_step_v1($1, $2, $3, $4, $5)";
    let queue_id = queue_id.map(|id| id.0);
    let params = [
        (&group as _, Type::TEXT),
        (&queue_id as _, Type::UUID),
        (&after as _, Type::TEXT),
        (&rows_max as _, Type::INT4),
        (&tenant as _, Type::UUID),
    ];
    let Json(step) = db.row(query, &params).await?.try_get(0)?;
    Ok(step)
}

/// `queen.log_group_resubscribe_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn log_group_resubscribe_v1(
    db: &(impl Sql + Sync), group: &str, from: Timestamp, tenant: Uuid,
) -> Result<i64, Error> {
    let query = "select queen.log_group_resubscribe_v1($1, $2, $3)";
    let params = [(&group as _, Type::TEXT), (&from as _, Type::TIMESTAMPTZ), (&tenant as _, Type::UUID)];
    Ok(db.row(query, &params).await?.try_get(0)?)
}

/// A group on one queue, with its lag.
#[derive(Clone, Debug)]
pub struct Group {
    pub group: String,
    pub queue: String,
    pub cursors: i64,
    pub subscription: Option<Subscription>,
    pub partitions_lagging: i64,
    pub pending: i64,
    pub gone: i64,
    pub lag_seconds: i64,
}

/// What a group asked for at first contact.
#[derive(Clone, Debug)]
pub struct Subscription {
    pub mode: String,
    pub from: Timestamp,
    pub since: Timestamp,
}

/// `queen.log_groups_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn log_groups_v1(db: &(impl Sql + Sync), limit: i32, offset: i32, tenant: Uuid) -> Result<Vec<Group>, Error> {
    let query =
        "select r_group, r_queue, r_cursors, r_mode, r_from, r_since, r_lagging, r_pending, r_gone, r_lag_seconds
        from queen.log_groups_v1($1, $2, $3)";
    let rows =
        db.rows(query, &[(&limit as _, Type::INT4), (&offset as _, Type::INT4), (&tenant as _, Type::UUID)]).await?;
    rows.iter()
        .map(|row| {
            let mode: Option<String> = row.try_get(3)?;
            let subscription = match mode {
                Some(mode) => Some(Subscription { mode, from: row.try_get(4)?, since: row.try_get(5)? }),
                None => None,
            };
            Ok(Group {
                group: row.try_get(0)?,
                queue: row.try_get(1)?,
                cursors: row.try_get(2)?,
                subscription,
                partitions_lagging: row.try_get(6)?,
                pending: row.try_get(7)?,
                gone: row.try_get(8)?,
                lag_seconds: row.try_get(9)?,
            })
        })
        .collect()
}

/// A group in one partition.
#[derive(Clone, Debug)]
pub struct GroupPartition {
    pub group: String,
    pub queue: String,
    pub partition_id: Uuid,
    pub partition: String,
    pub worker: Option<String>,
    pub is_leased: bool,
    pub consumed: i64,
    pub pending: i64,
    pub gone: i64,
    pub oldest_at: Option<Timestamp>,
    pub lag_seconds: i64,
}

/// `queen.log_group_lag_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn log_group_lag_v1(
    db: &(impl Sql + Sync), group: Option<&str>, lag_seconds: Option<i64>, limit: i32, offset: i32, tenant: Uuid,
) -> Result<Vec<GroupPartition>, Error> {
    let query = "select r_group, r_queue, r_pid, r_partition, r_worker, r_is_leased, r_consumed, r_pending, r_gone,
            r_oldest_at, r_lag_seconds
        from queen.log_group_lag_v1($1, $2, $3, $4, $5)";
    let params = [
        (&group as _, Type::TEXT),
        (&lag_seconds as _, Type::INT8),
        (&limit as _, Type::INT4),
        (&offset as _, Type::INT4),
        (&tenant as _, Type::UUID),
    ];
    let rows = db.rows(query, &params).await?;
    rows.iter()
        .map(|row| {
            Ok(GroupPartition {
                group: row.try_get(0)?,
                queue: row.try_get(1)?,
                partition_id: row.try_get(2)?,
                partition: row.try_get(3)?,
                worker: row.try_get(4)?,
                is_leased: row.try_get(5)?,
                consumed: row.try_get(6)?,
                pending: row.try_get(7)?,
                gone: row.try_get(8)?,
                oldest_at: row.try_get(9)?,
                lag_seconds: row.try_get(10)?,
            })
        })
        .collect()
}

/// `queen.log_conflating_v1`: queue and group of each subscription that conflates.
///
/// # Errors
/// Whatever the database answered.
pub async fn log_conflating_v1(
    db: &(impl Sql + Sync), queue: Option<&str>, group: Option<&str>, tenant: Uuid,
) -> Result<HashSet<(String, String)>, Error> {
    let query = "select r_queue, r_group from queen.log_conflating_v1($1, $2, $3)";
    let params: [Param<'_>; 3] = [(&queue, Type::TEXT), (&group, Type::TEXT), (&tenant, Type::UUID)];
    let rows = db.rows(query, &params).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}
