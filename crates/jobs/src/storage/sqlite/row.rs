//! Rows of `jobs` as jobs, and the clock.

use std::time::Duration;

use jiff::Timestamp;
use rusqlite::types::FromSql;
use rusqlite::{Connection, OptionalExtension, Row};
use uuid::Uuid;

use super::threads::error;
use crate::error::Error;
use crate::fan_out::FanOutId;
use crate::job::{Determinism, DispatchToken, Job, JobId, JobStatus, metadata_from_storage};
use crate::limits::{JobType, QueueName};

/// The columns that [`job`] reads, of a table called `j`.
macro_rules! columns {
    () => {
        "j.id, j.type, j.args, j.queue, j.tenant, j.metadata, j.priority, j.status, j.previous_status, j.attempt, \
         j.max_retries, j.timeout, j.determinism, j.last_error, j.dead_lettered_at, j.dead_letter_reason, j.run_at, \
         j.started_at, j.completed_at, j.created_at, j.updated_at, j.locked_by, j.locked_until, \
         j.last_heartbeat_at, j.dispatch_token, j.unique_key, j.parent_job_id, j.root_job_id, \
         j.fan_out_id, j.fan_out_index, j.waiting_signal_name, j.result, j.trace_context"
    };
}

pub(super) use columns;

/// The clock that judges every age: SQLite's own, in microseconds of which it fills the milliseconds.
pub(super) fn now(db: &Connection) -> Result<i64, Error> {
    let mut query =
        db.prepare_cached("select cast(round(unixepoch('subsec') * 1000) as integer) * 1000").map_err(error)?;
    query.query_row([], |row| row.get(0)).map_err(error)
}

pub(super) fn time(micros: i64) -> Result<Timestamp, Error> {
    Timestamp::from_microsecond(micros).map_err(|_| Error::Corrupt(format!("time {micros}")))
}

pub(super) fn find(db: &Connection, id: JobId) -> Result<Option<Job>, Error> {
    let mut query = db.prepare_cached(concat!("select ", columns!(), " from jobs j where j.id = ?1")).map_err(error)?;
    query.query_row([id.as_uuid()], |row| Ok(job(row))).optional().map_err(error)?.transpose()
}

pub(super) fn get<T: FromSql>(row: &Row<'_>, column: &str) -> Result<T, Error> {
    row.get(column).map_err(error)
}

pub(super) fn id(row: &Row<'_>, column: &str) -> Result<JobId, Error> {
    JobId::from_uuid(get(row, column)?).ok_or_else(|| Error::Corrupt("an all-zero id".to_owned()))
}

fn some_time(row: &Row<'_>, column: &str) -> Result<Option<Timestamp>, Error> {
    get::<Option<i64>>(row, column)?.map(time).transpose()
}

fn some_text(row: &Row<'_>, column: &str) -> Result<Option<String>, Error> {
    let text: String = get(row, column)?;
    Ok((!text.is_empty()).then_some(text))
}

fn some_id(row: &Row<'_>, column: &str) -> Result<Option<JobId>, Error> {
    Ok(get::<Option<Uuid>>(row, column)?.and_then(JobId::from_uuid))
}

fn status(name: &str) -> Result<JobStatus, Error> {
    name.parse().map_err(|_| Error::Corrupt(format!("status {name}")))
}

fn count(row: &Row<'_>, column: &str) -> Result<u32, Error> {
    let number: i64 = get(row, column)?;
    // Another program may have written a negative one, which means none.
    Ok(u32::try_from(number.max(0)).unwrap_or(u32::MAX))
}

pub(super) fn job(row: &Row<'_>) -> Result<Job, Error> {
    let metadata: Option<String> = get(row, "metadata")?;
    let timeout = u64::try_from(get::<i64>(row, "timeout")?).unwrap_or(0);
    let previous_status: Option<String> = get(row, "previous_status")?;
    Ok(Job {
        id: id(row, "id")?,
        job_type: JobType::from_storage(get(row, "type")?),
        args: get(row, "args")?,
        queue: QueueName::from_storage(get(row, "queue")?),
        tenant: get(row, "tenant")?,
        metadata: metadata_from_storage(metadata.as_deref()),
        priority: get(row, "priority")?,
        status: status(&get::<String>(row, "status")?)?,
        previous_status: previous_status.as_deref().map(status).transpose()?,
        attempt: count(row, "attempt")?,
        max_retries: count(row, "max_retries")?,
        timeout: (0 < timeout).then(|| Duration::from_nanos(timeout)),
        determinism: Determinism::from_i32(get(row, "determinism")?)?,
        last_error: get(row, "last_error")?,
        dead_lettered_at: some_time(row, "dead_lettered_at")?,
        dead_letter_reason: get(row, "dead_letter_reason")?,
        run_at: some_time(row, "run_at")?,
        started_at: some_time(row, "started_at")?,
        completed_at: some_time(row, "completed_at")?,
        created_at: time(get(row, "created_at")?)?,
        updated_at: time(get(row, "updated_at")?)?,
        locked_by: some_text(row, "locked_by")?,
        locked_until: some_time(row, "locked_until")?,
        last_heartbeat_at: some_time(row, "last_heartbeat_at")?,
        dispatch_token: get::<Option<Uuid>>(row, "dispatch_token")?.map(DispatchToken),
        unique_key: some_text(row, "unique_key")?,
        parent_job_id: some_id(row, "parent_job_id")?,
        root_job_id: some_id(row, "root_job_id")?,
        fan_out_id: get::<Option<Uuid>>(row, "fan_out_id")?.map(FanOutId),
        fan_out_index: count(row, "fan_out_index")?,
        waiting_signal_name: some_text(row, "waiting_signal_name")?,
        result: get(row, "result")?,
        trace_context: get(row, "trace_context")?,
    })
}
