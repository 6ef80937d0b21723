//! What a queue's options amount to: the deletion rules in force, and combinations that look like mistakes.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::error::Error;

/// Below this many seconds the hashes of transaction ids are never purged.
const SIDECAR_SECONDS_MIN: i64 = 900;

/// The options that decide what is deleted and when.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Effect {
    lease_time: i64,
    retention_enabled: bool,
    retention_seconds: i64,
    completed_retention_seconds: i64,
    max_wait_time_seconds: i64,
    dedup_window_seconds: i64,
    encryption_enabled: bool,
}

/// The window of each rule in seconds, null for a rule that is off.
#[derive(Serialize, ToSchema)]
#[schema(as = RetentionInForce)]
#[serde(rename_all = "camelCase")]
pub(super) struct InForce {
    retention_seconds: Option<i64>,
    completed_retention_seconds: Option<i64>,
    max_wait_time_seconds: Option<i64>,
    /// How long transaction ids are known.
    sidecar_seconds: i64,
}

impl Effect {
    /// # Errors
    /// [`Error::Corrupt`] if the stored options are not those of this version.
    pub(super) fn of(options: &Map<String, Value>) -> Result<Self, Error> {
        serde_json::from_value(Value::Object(options.clone())).map_err(|error| Error::Corrupt(error.to_string()))
    }

    fn retention(&self) -> Option<i64> {
        (self.retention_enabled && self.retention_seconds > 0).then_some(self.retention_seconds)
    }

    fn completed_retention(&self) -> Option<i64> {
        (self.retention_enabled && self.completed_retention_seconds > 0).then_some(self.completed_retention_seconds)
    }

    fn max_wait(&self) -> Option<i64> {
        (self.max_wait_time_seconds > 0).then_some(self.max_wait_time_seconds)
    }

    /// How long a transaction id is known: for duplicates, and for acknowledgements that come late.
    fn sidecar(&self) -> i64 {
        self.dedup_window_seconds.max(self.completed_retention_seconds).max(SIDECAR_SECONDS_MIN)
    }

    pub(super) fn in_force(&self) -> InForce {
        InForce {
            retention_seconds: self.retention(),
            completed_retention_seconds: self.completed_retention(),
            max_wait_time_seconds: self.max_wait(),
            sidecar_seconds: self.sidecar(),
        }
    }

    pub(super) fn warnings(&self, cleanup_seconds: Option<i64>, has_key: bool) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.encryption_enabled && !has_key {
            warnings.push(
                "encryptionEnabled is true, but this server has no QUEEN_ENCRYPTION_KEY: it stores payloads in clear"
                    .to_owned(),
            );
        }
        if !self.retention_enabled && (self.retention_seconds > 0 || self.completed_retention_seconds > 0) {
            warnings.push(
                "retentionEnabled is false, so retentionSeconds and completedRetentionSeconds delete nothing"
                    .to_owned(),
            );
        }
        let lease = self.lease_time;
        for (name, window) in [("retentionSeconds", self.retention()), ("maxWaitTimeSeconds", self.max_wait())] {
            if let Some(window) = window.filter(|window| *window < lease) {
                warnings.push(format!(
                    "{name} is {window}, shorter than leaseTime, {lease}: messages may be deleted while they are leased"
                ));
            }
        }
        let sidecar = self.sidecar();
        if lease > sidecar {
            warnings.push(format!(
                "leaseTime is {lease}, longer than transaction ids are known, {sidecar} seconds: \
                 a later acknowledgement is refused and the message delivered again"
            ));
        }
        if let Some(cleanup) = cleanup_seconds.filter(|cleanup| self.dedup_window_seconds > *cleanup) {
            warnings.push(format!(
                "dedupWindowSeconds is {}, longer than PARTITION_CLEANUP_DAYS, {cleanup} seconds: \
                 a partition that is cleaned up forgets its transaction ids",
                self.dedup_window_seconds
            ));
        }
        warnings
    }
}
