//! Rows of `ebbtide_jobs.jobs` as jobs.

use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::FromSql;
use uuid::Uuid;

use super::session;
use crate::error::Error;
use crate::fan_out::FanOutId;
use crate::job::{Determinism, DispatchToken, Job, JobId, JobStatus, metadata_from_storage};
use crate::limits::{JobType, QueueName};

/// The columns that [`job`] reads, of a table called `j`.
macro_rules! columns {
    () => {
        "j.id, j.type, j.args, j.queue, j.tenant, j.metadata::text as metadata, j.priority, j.status, \
         j.previous_status, j.attempt, j.max_retries, j.timeout, j.determinism, j.last_error, j.dead_lettered_at, \
         j.dead_letter_reason, j.run_at, j.started_at, j.completed_at, j.created_at, j.updated_at, j.locked_by, \
         j.locked_until, j.last_heartbeat_at, j.dispatch_token, j.unique_key, j.parent_job_id, j.root_job_id, \
         j.fan_out_id, j.fan_out_index, j.waiting_signal_name, j.result, j.trace_context"
    };
}

pub(super) use columns;

pub(super) fn only(rows: &[Row]) -> Result<&Row, Error> {
    rows.first().ok_or_else(|| Error::Corrupt("a statement that answers always did not".to_owned()))
}

pub(super) fn get<'a, T: FromSql<'a>>(row: &'a Row, column: &str) -> Result<T, Error> {
    row.try_get(column).map_err(session::error)
}

pub(super) fn id(row: &Row, column: &str) -> Result<JobId, Error> {
    JobId::from_uuid(get(row, column)?).ok_or_else(|| Error::Corrupt("an all-zero id".to_owned()))
}

fn some_text(row: &Row, column: &str) -> Result<Option<String>, Error> {
    let text: String = get(row, column)?;
    Ok((!text.is_empty()).then_some(text))
}

fn some_id(row: &Row, column: &str) -> Result<Option<JobId>, Error> {
    Ok(get::<Option<Uuid>>(row, column)?.and_then(JobId::from_uuid))
}

fn status(name: &str) -> Result<JobStatus, Error> {
    name.parse().map_err(|_| Error::Corrupt(format!("status {name}")))
}

fn count(row: &Row, column: &str) -> Result<u32, Error> {
    let number: i32 = get(row, column)?;
    // Another program may have written a negative one, which means none.
    Ok(u32::try_from(number).unwrap_or(0))
}

pub(super) fn job(row: &Row) -> Result<Job, Error> {
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
        status: status(get(row, "status")?)?,
        previous_status: previous_status.as_deref().map(status).transpose()?,
        attempt: count(row, "attempt")?,
        max_retries: count(row, "max_retries")?,
        timeout: (0 < timeout).then(|| Duration::from_nanos(timeout)),
        determinism: Determinism::from_i32(get(row, "determinism")?)?,
        last_error: get(row, "last_error")?,
        dead_lettered_at: get(row, "dead_lettered_at")?,
        dead_letter_reason: get(row, "dead_letter_reason")?,
        run_at: get(row, "run_at")?,
        started_at: get(row, "started_at")?,
        completed_at: get(row, "completed_at")?,
        created_at: get(row, "created_at")?,
        updated_at: get(row, "updated_at")?,
        locked_by: some_text(row, "locked_by")?,
        locked_until: get(row, "locked_until")?,
        last_heartbeat_at: get(row, "last_heartbeat_at")?,
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
