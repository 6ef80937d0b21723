//! Twins of `sql/procedures/resources.sql`.

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio_postgres::Row;
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::Sql;
use crate::error::Error;
use crate::id::{Offset, PartitionId, QueueId};

/// A page of a list, and how many there are on all pages together.
#[derive(Clone, Debug)]
pub struct Page<T> {
    pub found: i64,
    pub rows: Vec<T>,
}

impl<T> Page<T> {
    /// The first column counts; the last one says whether the row is more than that count.
    fn read(rows: &[Row], item: impl Fn(&Row) -> Result<T, tokio_postgres::Error>) -> Result<Self, Error> {
        let found = rows.first().map_or(Ok(0), |row| row.try_get(0))?;
        let mut page = Vec::with_capacity(rows.len());
        for row in rows {
            if row.try_get(row.len() - 1)? {
                page.push(item(row)?);
            }
        }
        Ok(Self { found, rows: page })
    }
}

/// How many messages there are, by what became of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    pub total: i64,
    pub pending: i64,
    pub processing: i64,
    pub completed: i64,
    pub dead: i64,
}

impl Counts {
    /// From five columns.
    pub(super) fn read(row: &Row, at: usize) -> Result<Self, tokio_postgres::Error> {
        Ok(Self {
            total: row.try_get(at)?,
            pending: row.try_get(at + 1)?,
            processing: row.try_get(at + 2)?,
            completed: row.try_get(at + 3)?,
            dead: row.try_get(at + 4)?,
        })
    }
}

/// The id of a queue, if there is one of that name.
///
/// # Errors
/// Whatever the database answered.
pub async fn queue_id(db: &(impl Sql + Sync), name: &str, tenant: Uuid) -> Result<Option<QueueId>, Error> {
    let query = "select id from queen.queues where tenant_id = $1 and name = $2";
    let rows = db.rows(query, &[(&tenant as _, Type::UUID), (&name as _, Type::TEXT)]).await?;
    Ok(rows.first().map(|row| row.try_get(0)).transpose()?.map(QueueId))
}

/// Which queues to list. `None` lets everything through.
#[derive(Clone, Copy, Debug, Default)]
pub struct Filter<'a> {
    pub name: Option<&'a str>,
    pub search: Option<&'a str>,
    pub namespace: Option<&'a str>,
    pub task: Option<&'a str>,
}

/// A queue with its counts.
#[derive(Clone, Debug)]
pub struct Queue {
    pub id: QueueId,
    pub name: String,
    pub namespace: Option<String>,
    pub task: Option<String>,
    pub created_at: Timestamp,
    pub options: Map<String, Value>,
    /// `None` if nobody has measured them.
    pub retained_bytes: Option<i64>,
    pub partitions: i64,
    pub counts: Counts,
}

/// `queen.log_queue_list_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn log_queue_list_v1(
    db: &(impl Sql + Sync), filter: &Filter<'_>, limit: i32, offset: i32, tenant: Uuid,
) -> Result<Page<Queue>, Error> {
    let query = "select r_found, r_id, r_name, r_namespace, r_task, r_created_at, r_options, r_retained_bytes,
            r_partitions, r_total, r_pending, r_processing, r_completed, r_dead, r_id is not null
        from queen.log_queue_list_v1($1, $2, $3, $4, $5, $6, $7)";
    let params = [
        (&filter.name as _, Type::TEXT),
        (&filter.search as _, Type::TEXT),
        (&filter.namespace as _, Type::TEXT),
        (&filter.task as _, Type::TEXT),
        (&limit as _, Type::INT4),
        (&offset as _, Type::INT4),
        (&tenant as _, Type::UUID),
    ];
    Page::read(&db.rows(query, &params).await?, |row| {
        let Json(options) = row.try_get(6)?;
        Ok(Queue {
            id: QueueId(row.try_get(1)?),
            name: row.try_get(2)?,
            namespace: row.try_get(3)?,
            task: row.try_get(4)?,
            created_at: row.try_get(5)?,
            options,
            retained_bytes: row.try_get(7)?,
            partitions: row.try_get(8)?,
            counts: Counts::read(row, 9)?,
        })
    })
}

/// A partition with its counts.
#[derive(Clone, Debug)]
pub struct Partition {
    pub id: PartitionId,
    pub queue: String,
    pub name: String,
    pub created_at: Timestamp,
    pub last_write_at: Timestamp,
    pub log_start: Offset,
    pub last_offset: Offset,
    pub oldest_at: Option<Timestamp>,
    pub newest_at: Option<Timestamp>,
    pub counts: Counts,
}

/// `queen.log_partition_list_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn log_partition_list_v1(
    db: &(impl Sql + Sync), queue: Option<&str>, limit: i32, offset: i32, tenant: Uuid,
) -> Result<Page<Partition>, Error> {
    let query = "select r_found, r_id, r_queue, r_name, r_created_at, r_last_write_at, r_log_start, r_last_offset,
            r_oldest_at, r_newest_at, r_total, r_pending, r_processing, r_completed, r_dead, r_id is not null
        from queen.log_partition_list_v1($1, $2, $3, $4)";
    let params =
        [(&queue as _, Type::TEXT), (&limit as _, Type::INT4), (&offset as _, Type::INT4), (&tenant as _, Type::UUID)];
    Page::read(&db.rows(query, &params).await?, |row| {
        Ok(Partition {
            id: PartitionId(row.try_get(1)?),
            queue: row.try_get(2)?,
            name: row.try_get(3)?,
            created_at: row.try_get(4)?,
            last_write_at: row.try_get(5)?,
            log_start: row.try_get(6)?,
            last_offset: row.try_get(7)?,
            oldest_at: row.try_get(8)?,
            newest_at: row.try_get(9)?,
            counts: Counts::read(row, 10)?,
        })
    })
}

/// How much of a queue is pending.
#[derive(Clone, Debug)]
pub struct Depth {
    pub pending: i64,
    pub partitions_pending: i64,
    /// Names with what is pending there.
    pub partitions: Vec<(String, i64)>,
}

/// `queen.log_depth_v1`: `None` if there is no such queue.
///
/// # Errors
/// Whatever the database answered.
pub async fn log_depth_v1(
    db: &(impl Sql + Sync), queue: &str, group: Option<&str>, limit: i32, offset: i32, tenant: Uuid,
) -> Result<Option<Depth>, Error> {
    let query = "select r_pending, r_partition, r_partition_pending, r_partitions_pending, r_partition is not null
        from queen.log_depth_v1($1, $2, $3, $4, $5)";
    let params = [
        (&queue as _, Type::TEXT),
        (&group as _, Type::TEXT),
        (&limit as _, Type::INT4),
        (&offset as _, Type::INT4),
        (&tenant as _, Type::UUID),
    ];
    let rows = db.rows(query, &params).await?;
    let Some(first) = rows.first() else { return Ok(None) };
    let page = Page::read(&rows, |row| Ok((row.try_get(1)?, row.try_get(2)?)))?;
    Ok(Some(Depth { pending: page.found, partitions_pending: first.try_get(3)?, partitions: page.rows }))
}

/// What queues are grouped by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Label {
    Namespace,
    Task,
}

/// What the queues of a namespace or task hold.
#[derive(Clone, Debug)]
pub struct Labelled {
    pub label: String,
    pub queues: i64,
    pub partitions: i64,
    pub total: i64,
    pub pending: i64,
}

/// `queen.log_label_list_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn log_label_list_v1(
    db: &(impl Sql + Sync), by: Label, limit: i32, offset: i32, tenant: Uuid,
) -> Result<Page<Labelled>, Error> {
    let query = "select r_found, r_label, r_queues, r_partitions, r_total, r_pending, r_label is not null
        from queen.log_label_list_v1($1, $2, $3, $4)";
    let by = match by {
        Label::Namespace => "namespace",
        Label::Task => "task",
    };
    let params =
        [(&by as _, Type::TEXT), (&limit as _, Type::INT4), (&offset as _, Type::INT4), (&tenant as _, Type::UUID)];
    Page::read(&db.rows(query, &params).await?, |row| {
        Ok(Labelled {
            label: row.try_get(1)?,
            queues: row.try_get(2)?,
            partitions: row.try_get(3)?,
            total: row.try_get(4)?,
            pending: row.try_get(5)?,
        })
    })
}

/// Everything in numbers. The lags are average, median, least and most.
#[derive(Clone, Debug, Deserialize)]
pub struct Overview {
    pub queues: i64,
    pub partitions: i64,
    pub namespaces: i64,
    pub tasks: i64,
    pub total: i64,
    pub pending: i64,
    pub processing: i64,
    pub completed: i64,
    pub dead: i64,
    /// In seconds.
    pub time_lag: [i64; 4],
    pub offset_lag: [i64; 4],
    pub pushed_per_second: f64,
    pub acked_per_second: f64,
}

/// `queen.log_overview_v1`, and the database's time.
///
/// # Errors
/// Whatever the database answered.
pub async fn log_overview_v1(db: &(impl Sql + Sync), tenant: Uuid) -> Result<(Overview, Timestamp), Error> {
    let row = db.row("select queen.log_overview_v1($1), now()", &[(&tenant as _, Type::UUID)]).await?;
    let Json(overview) = row.try_get(0)?;
    Ok((overview, row.try_get(1)?))
}

/// A partition that a clearing has work in.
#[derive(Clone, Debug)]
pub struct Uncleared {
    pub partition_id: PartitionId,
    pub name: String,
    pub last_offset: Offset,
}

/// `queen.log_clear_list_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn log_clear_list_v1(
    db: &(impl Sql + Sync), queue_id: QueueId, partition: Option<&str>, after: Option<&str>, rows_max: i32,
) -> Result<Vec<Uncleared>, Error> {
    let query = "select r_pid, r_name, r_last_offset from queen.log_clear_list_v1($1, $2, $3, $4)";
    let params = [
        (&queue_id.0 as _, Type::UUID),
        (&partition as _, Type::TEXT),
        (&after as _, Type::TEXT),
        (&rows_max as _, Type::INT4),
    ];
    let rows = db.rows(query, &params).await?;
    rows.iter()
        .map(|row| {
            Ok(Uncleared {
                partition_id: PartitionId(row.try_get(0)?),
                name: row.try_get(1)?,
                last_offset: row.try_get(2)?,
            })
        })
        .collect()
}

/// What one step of a clearing did.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct ClearStep {
    #[serde(rename = "deleted")]
    pub segments: i64,
    pub messages: i64,
    pub cursors: i64,
    pub done: bool,
}

/// `queen.log_clear_step_v1`
///
/// # Errors
/// Whatever the database answered; this step deleted nothing then.
pub async fn log_clear_step_v1(
    db: &(impl Sql + Sync), pid: PartitionId, last: Offset, rows_max: i32,
) -> Result<ClearStep, Error> {
    let query = "select queen.log_clear_step_v1($1, $2, $3)";
    let params = [(&pid.0 as _, Type::UUID), (&last as _, Type::INT8), (&rows_max as _, Type::INT4)];
    let Json(step) = db.row(query, &params).await?.try_get(0)?;
    Ok(step)
}
