//! Records of steps, written only under the claim in force.

use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::row::get;
use super::session::{Session, Sql, Transaction};
use crate::error::Error;
use crate::job::{Claim, JobId};
use crate::storage::run::{Checkpoint, StoredError};

pub(super) async fn load(sql: &impl Sql, job: JobId) -> Result<Vec<Checkpoint>, Error> {
    let query = "select call_index, call_type, result, error, error_kind, error_cause, error_delay_nanos, span_end,
                        result_shape
                   from ebbtide_jobs.checkpoints where job_id = $1 order by call_index, call_type";
    let rows = sql.rows(query, &[(&job.as_uuid(), Type::UUID)]).await?;
    rows.iter().map(checkpoint).collect()
}

fn checkpoint(row: &Row) -> Result<Checkpoint, Error> {
    let (text, kind): (Option<String>, Option<String>) = (get(row, "error")?, get(row, "error_kind")?);
    let error = match (text, kind) {
        (None, None) => None,
        (text, kind) => Some(StoredError {
            text: text.unwrap_or_default(),
            kind: kind.unwrap_or_default(),
            cause: get(row, "error_cause")?,
            delay: get::<Option<i64>>(row, "error_delay_nanos")?
                .and_then(|nanos| u64::try_from(nanos).ok())
                .map(Duration::from_nanos),
        }),
    };
    Ok(Checkpoint {
        call_index: get(row, "call_index")?,
        call_type: get(row, "call_type")?,
        result: get(row, "result")?,
        error,
        span_end: get(row, "span_end")?,
        result_shape: get(row, "result_shape")?,
    })
}

// The row of the job is locked against everything that would end the claim, and the record is written only if it was
// found: one statement, all or nothing.
const SAVE: &str = "with owner as materialized (
        select j.id from ebbtide_jobs.jobs j
         where j.id = $1 and j.locked_by = $2 and j.dispatch_token = $3 and j.status = 'running'
           for no key update)
    insert into ebbtide_jobs.checkpoints as c (
        job_id, call_index, call_type, result, error, error_kind, error_cause, error_delay_nanos, span_end,
        result_shape)
    select owner.id, $4, $5, $6, $7, $8, $9, $10, $11, $12 from owner
    on conflict (job_id, call_index, call_type) do update
       set result = excluded.result, error = excluded.error, error_kind = excluded.error_kind,
           error_cause = excluded.error_cause, error_delay_nanos = excluded.error_delay_nanos,
           span_end = excluded.span_end, result_shape = excluded.result_shape
    returning 1";

pub(super) async fn save(sql: &impl Sql, claim: &Claim, checkpoint: &Checkpoint) -> Result<(), Error> {
    let error = checkpoint.error.as_ref();
    let delay = error.and_then(|error| error.delay).map(|d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX));
    let params = [
        (&claim.job_id.as_uuid() as _, Type::UUID),
        (&claim.worker.as_str() as _, Type::TEXT),
        (&claim.token.0 as _, Type::UUID),
        (&checkpoint.call_index as _, Type::INT4),
        (&checkpoint.call_type as _, Type::TEXT),
        (&checkpoint.result as _, Type::BYTEA),
        (&error.map(|error| error.text.as_str()) as _, Type::TEXT),
        (&error.map(|error| error.kind.as_str()) as _, Type::TEXT),
        (&error.and_then(|error| error.cause.as_deref()) as _, Type::TEXT),
        (&delay as _, Type::INT8),
        (&checkpoint.span_end as _, Type::INT4),
        (&checkpoint.result_shape as _, Type::TEXT),
    ];
    if sql.rows(SAVE, &params).await?.is_empty() {
        return Err(Error::JobNotOwned(claim.job_id));
    }
    Ok(())
}

/// Holds the job against everything that would end the claim, until the transaction ends. A signal that is being sent
/// to it is waited for, so that it is either seen here or finds what was written here.
pub(super) async fn own(transaction: &Transaction<'_>, claim: &Claim) -> Result<(), Error> {
    let query = "select 1 from ebbtide_jobs.jobs j
                  where j.id = $1 and j.locked_by = $2 and j.dispatch_token = $3 and j.status = 'running' for update";
    let params = [
        (&claim.job_id.as_uuid() as _, Type::UUID),
        (&claim.worker.as_str() as _, Type::TEXT),
        (&claim.token.0 as _, Type::UUID),
    ];
    if transaction.rows(query, &params).await?.is_empty() {
        return Err(Error::JobNotOwned(claim.job_id));
    }
    Ok(())
}

pub(super) async fn forget(
    session: &mut Session, claim: &Claim, call_index: i32, call_type: &str,
) -> Result<(), Error> {
    let transaction = session.begin().await?;
    own(&transaction, claim).await?;
    let query = "delete from ebbtide_jobs.checkpoints where job_id = $1 and call_index = $2 and call_type = $3";
    let params =
        [(&claim.job_id.as_uuid() as _, Type::UUID), (&call_index as _, Type::INT4), (&call_type as _, Type::TEXT)];
    transaction.rows(query, &params).await?;
    transaction.commit().await
}

/// Writes a checkpoint in the caller's own transaction: it is there once that commits, together with what the caller
/// wrote, and never if it does not. The claim is held until then.
///
/// # Errors
/// [`Error::JobNotOwned`] if the claim is over; the transaction can go on, and should be given up.
pub async fn save_checkpoint_in(
    transaction: &tokio_postgres::Transaction<'_>, claim: &Claim, checkpoint: &Checkpoint,
) -> Result<(), Error> {
    save(transaction, claim, checkpoint).await
}
