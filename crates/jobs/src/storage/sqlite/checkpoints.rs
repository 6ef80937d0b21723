//! Records of steps, written only under the claim in force.

use std::time::Duration;

use rusqlite::{Connection, Row, Transaction, params};

use super::row::get;
use super::threads::error;
use crate::error::Error;
use crate::job::{Claim, JobId};
use crate::storage::run::{Checkpoint, StoredError};

pub(super) fn load(db: &Connection, job: JobId) -> Result<Vec<Checkpoint>, Error> {
    let query = "select call_index, call_type, result, error, error_kind, error_cause, error_delay_nanos, span_end,
                        result_shape
                   from checkpoints where job_id = ?1 order by call_index, call_type";
    let mut query = db.prepare_cached(query).map_err(error)?;
    let rows = query.query_map([job.as_uuid()], |row| Ok(checkpoint(row))).map_err(error)?;
    rows.map(|row| row.map_err(error)?).collect()
}

fn checkpoint(row: &Row<'_>) -> Result<Checkpoint, Error> {
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

/// Whether the claim is in force. Nobody else writes until the transaction ends.
pub(super) fn own(db: &Connection, claim: &Claim) -> Result<(), Error> {
    let query = "select 1 from jobs where id = ?1 and locked_by = ?2 and dispatch_token = ?3 and status = 'running'";
    let params = params![claim.job_id.as_uuid(), claim.worker.as_str(), claim.token.0];
    let is_owner = db.prepare_cached(query).and_then(|mut query| query.exists(params)).map_err(error)?;
    if is_owner { Ok(()) } else { Err(Error::JobNotOwned(claim.job_id)) }
}

pub(super) fn save(db: &Connection, claim: &Claim, checkpoint: &Checkpoint) -> Result<(), Error> {
    own(db, claim)?;
    let query = "insert into checkpoints (
            job_id, call_index, call_type, result, error, error_kind, error_cause, error_delay_nanos, span_end,
            result_shape)
        values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
        on conflict (job_id, call_index, call_type) do update
           set result = excluded.result, error = excluded.error, error_kind = excluded.error_kind,
               error_cause = excluded.error_cause, error_delay_nanos = excluded.error_delay_nanos,
               span_end = excluded.span_end, result_shape = excluded.result_shape";
    let failed = checkpoint.error.as_ref();
    let params = params![
        claim.job_id.as_uuid(),
        checkpoint.call_index,
        checkpoint.call_type,
        checkpoint.result,
        failed.map(|failed| failed.text.as_str()),
        failed.map(|failed| failed.kind.as_str()),
        failed.and_then(|failed| failed.cause.as_deref()),
        failed.and_then(|failed| failed.delay).map(|d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX)),
        checkpoint.span_end,
        checkpoint.result_shape,
    ];
    db.prepare_cached(query).and_then(|mut query| query.execute(params)).map_err(error)?;
    Ok(())
}

pub(super) fn forget(db: &Connection, claim: &Claim, call_index: i32, call_type: &str) -> Result<(), Error> {
    own(db, claim)?;
    let query = "delete from checkpoints where job_id = ?1 and call_index = ?2 and call_type = ?3";
    let params = params![claim.job_id.as_uuid(), call_index, call_type];
    db.prepare_cached(query).and_then(|mut query| query.execute(params)).map_err(error)?;
    Ok(())
}

/// Writes a checkpoint in the caller's own transaction: it is there once that commits, together with what the caller
/// wrote, and never if it does not. Begin it as an immediate transaction, so that the claim cannot end meanwhile.
///
/// # Errors
/// [`Error::JobNotOwned`] if the claim is over; the transaction can go on, and should be given up.
pub fn save_checkpoint_in(transaction: &Transaction<'_>, claim: &Claim, checkpoint: &Checkpoint) -> Result<(), Error> {
    save(transaction, claim, checkpoint)
}
