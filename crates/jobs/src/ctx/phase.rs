//! Named values of a run, and versions of its code.

use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::call::parse;
use super::{Ctx, lock};
use crate::codec;
use crate::error::Error;
use crate::job_error::JobError;
use crate::limits::{JobType, RESULT_BYTES_MAX};
use crate::storage::Checkpoint;

/// The version of a run that began before the change existed.
pub const DEFAULT_VERSION: i32 = -1;

/// Records of versions; the name of the change follows.
const VERSION: &str = "jobs.version:";
/// The place of phases and versions, which no step has.
const NO_INDEX: i32 = -1;

impl Ctx {
    /// Records a value under a name, for later runs of this job. It has no place among the steps.
    ///
    /// # Errors
    /// [`Error::DuplicatePhaseName`], without retries, if this run has saved the name before; [`Error::Invalid`] if
    /// it is no name or the value is larger than 1 MiB.
    pub async fn save_phase<T: Serialize>(&self, name: &str, value: &T) -> Result<(), JobError> {
        let record = self.phase(name, value).await?;
        self.save(record).await
    }

    /// The record of a phase, to be written in the caller's own transaction with `save_checkpoint_in` of the storage
    /// and the right that [`Ctx::claim`] gives: the phase is then recorded exactly if that transaction commits.
    ///
    /// # Errors
    /// As [`Ctx::save_phase`].
    pub async fn phase<T: Serialize>(&self, name: &str, value: &T) -> Result<Checkpoint, JobError> {
        JobType::new(name)?;
        let value = serde_json::to_vec(value).map_err(JobError::no_retry)?;
        if RESULT_BYTES_MAX < value.len() {
            return Err(Error::invalid("phase", "is at most 1 MiB of JSON").into());
        }
        let records = self.records().await?;
        if !lock(records).saved_phases.insert(name.to_owned()) {
            return Err(Error::DuplicatePhaseName(name.to_owned()).into());
        }
        Ok(at_no_index(name.to_owned(), codec::encode(self.0.queue.codec(), value)?))
    }

    /// The value that this run or an earlier one recorded under the name; `None` if there is none.
    ///
    /// # Errors
    /// [`Error::PayloadDecode`], without retries, if there is one of another type.
    pub async fn load_phase<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, JobError> {
        let records = self.records().await?;
        let found = lock(records).find(NO_INDEX, name).cloned();
        let Some(record) = found else { return Ok(None) };
        let stored = record.result.as_deref().unwrap_or(b"null");
        parse(name, &codec::decode(self.0.queue.codec(), stored)?).map(Some)
    }

    /// The version of a change with which this job goes on: the newest one of `versions` if the run comes here for
    /// the first time, which is recorded; afterwards the recorded one. A job that has recorded later steps without
    /// coming through here began before the change, and goes on with [`DEFAULT_VERSION`].
    ///
    /// # Errors
    /// [`Error::UnsupportedWorkflowVersion`], without retries, if the job's version is not one of `versions`.
    pub async fn version(&self, change: &str, versions: RangeInclusive<i32>) -> Result<i32, JobError> {
        JobType::new(change)?;
        let call_type = format!("{VERSION}{change}");
        let records = self.records().await?;
        let (recorded, is_past) = {
            let records = lock(records);
            let recorded = records.find(NO_INDEX, &call_type).cloned();
            (recorded, self.0.next_index.load(Ordering::Relaxed) <= records.last_replayable)
        };
        let is_known = recorded.is_some();
        let version = match recorded {
            Some(record) => parse(&call_type, record.result.as_deref().unwrap_or(b"null"))?,
            None if is_past => DEFAULT_VERSION,
            None => *versions.end(),
        };
        if !versions.contains(&version) {
            return Err(Error::UnsupportedWorkflowVersion { change: change.to_owned(), recorded: version }.into());
        }
        if !is_known {
            // The default is recorded as well: this place would otherwise look different after more steps.
            self.save(at_no_index(call_type, version.to_string().into_bytes())).await?;
        }
        Ok(version)
    }
}

fn at_no_index(call_type: String, result: Vec<u8>) -> Checkpoint {
    let result_shape = String::new();
    Checkpoint { call_index: NO_INDEX, call_type, result: Some(result), error: None, span_end: 0, result_shape }
}
