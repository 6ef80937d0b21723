//! One acknowledgement as it is sent, and as it is meant.

use serde::Deserialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::db::ack::{Status, Target, TransactionHash};
use crate::error::Error;
use crate::id::{PartitionId, QUEUE_MODE, checked_name};
use crate::segment::hash;

/// The fields of an acknowledgement, unread: what is wrong with one must not spoil its neighbours.
#[derive(Deserialize, ToSchema)]
#[schema(as = Acknowledge)]
#[serde(rename_all = "camelCase")]
pub(in crate::http) struct Wire<'a> {
    #[serde(borrow)]
    #[schema(value_type = String, required)]
    pub(in crate::http) transaction_id: Option<&'a RawValue>,
    #[serde(borrow)]
    #[schema(value_type = uuid::Uuid, required)]
    pub(in crate::http) partition_id: Option<&'a RawValue>,
    #[serde(borrow)]
    #[schema(value_type = Option<String>)]
    pub(in crate::http) status: Option<&'a RawValue>,
    #[serde(borrow)]
    #[schema(value_type = Option<serde_json::Value>)]
    pub(in crate::http) error: Option<&'a RawValue>,
    #[serde(borrow)]
    #[schema(value_type = Option<String>, max_length = 255)]
    pub(in crate::http) consumer_group: Option<&'a RawValue>,
    #[serde(borrow)]
    #[schema(value_type = Option<String>)]
    pub(in crate::http) lease_id: Option<&'a RawValue>,
}

/// An acknowledgement that can be carried out.
#[derive(Debug)]
pub(in crate::http) struct Element {
    pub(in crate::http) transaction_id: String,
    pub(in crate::http) hash: TransactionHash,
    pub(in crate::http) target: Target,
    pub(in crate::http) status: Status,
    /// Why it failed, if the consumer said so.
    pub(in crate::http) reason: Option<String>,
}

impl Wire<'_> {
    /// The transaction id, to be echoed even where the rest is wrong.
    pub(in crate::http) fn echoed_id(&self) -> Option<String> {
        self.transaction_id.and_then(|raw| serde_json::from_str(raw.get()).ok())
    }

    /// # Errors
    /// [`Error::Invalid`] naming the first field that is missing or of the wrong kind.
    pub(in crate::http) fn checked(&self, group: Option<&str>) -> Result<Element, Error> {
        let transaction_id =
            text("transactionId", self.transaction_id)?.ok_or_else(|| Error::Missing("transactionId"))?;
        let partition_id = text("partitionId", self.partition_id)?
            .ok_or_else(|| Error::Missing("partitionId"))?
            .parse::<PartitionId>()
            .map_err(|_| Error::invalid("partitionId", "must be a UUID"))?;
        let own_group = text("consumerGroup", self.consumer_group)?;
        let group = group_or_queue_mode(own_group.as_deref().or(group))?;
        let worker = storable(text("leaseId", self.lease_id)?.unwrap_or_default());
        Ok(Element {
            hash: TransactionHash(hash(&transaction_id)),
            transaction_id,
            target: Target { partition_id, group, worker },
            status: text("status", self.status)?.map_or(Status::Completed, |status| parse_status(&status)),
            reason: self.error.map(lenient_text).filter(|reason| !reason.is_empty()),
        })
    }
}

/// # Errors
/// [`Error::Invalid`] if it is no name that a group can have.
pub(super) fn group_or_queue_mode(group: Option<&str>) -> Result<String, Error> {
    match group {
        None | Some("") => Ok(QUEUE_MODE.to_owned()),
        Some(group) => checked_name("consumerGroup", group).map(str::to_owned),
    }
}

pub(in crate::http) fn parse_status(status: &str) -> Status {
    match status {
        "" | "completed" | "success" | "acked" | "ok" => Status::Completed,
        "retry" => Status::Retry,
        "dlq" => Status::Dlq,
        _ => Status::Failed,
    }
}

/// # Errors
/// [`Error::Invalid`] if it is no text.
pub(in crate::http) fn text(field: &'static str, raw: Option<&RawValue>) -> Result<Option<String>, Error> {
    raw.map(|raw| serde_json::from_str(raw.get()).map_err(|_| Error::invalid(field, "must be a string"))).transpose()
}

/// Whatever JSON a consumer gives as the reason of a failure. It must never be the reason that the
/// failure cannot be recorded, so what is no valid text is kept as it was written, escapes included.
fn lenient_text(raw: &RawValue) -> String {
    let text = serde_json::from_str(raw.get()).unwrap_or_else(|_| raw.get().trim_matches('"').to_owned());
    storable(text)
}

/// PostgreSQL text holds every character but U+0000; that one is written as its JSON escape.
pub(in crate::http) fn storable(text: String) -> String {
    if text.contains('\0') { text.replace('\0', "\\u0000") } else { text }
}

/// What is filed if the consumer gave no reason.
pub(in crate::http) fn default_reason(status: Status) -> &'static str {
    match status {
        Status::Dlq => "Dead-lettered by the consumer",
        Status::Completed | Status::Retry | Status::Failed => "Retries exhausted",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn element(json: &str) -> Result<Element, Error> {
        serde_json::from_str::<Wire<'_>>(json).expect("an object").checked(None)
    }

    const IDS: &str = r#""transactionId": "t", "partitionId": "00000000-0000-0000-0000-000000000007""#;

    #[test]
    fn statuses_are_read_as_consumers_write_them() {
        for status in ["", "completed", "success", "acked", "ok"] {
            let read = element(&format!(r#"{{{IDS}, "status": "{status}"}}"#)).expect("valid");
            assert_eq!(read.status, Status::Completed, "{status}");
        }
        assert_eq!(element(&format!("{{{IDS}}}")).expect("valid").status, Status::Completed);
        for (status, meant) in
            [("retry", Status::Retry), ("dlq", Status::Dlq), ("failed", Status::Failed), ("Completed", Status::Failed)]
        {
            let read = element(&format!(r#"{{{IDS}, "status": "{status}"}}"#)).expect("valid");
            assert_eq!(read.status, meant, "{status}");
        }
    }

    #[test]
    fn any_reason_can_be_stored() {
        for (sent, kept) in [
            (r#""a\u0000b""#, "a\\u0000b"),
            (r#""lone \ud800""#, "lone \\ud800"),
            (r#"{"code": 7}"#, r#"{"code": 7}"#),
            ("1e400", "1e400"),
        ] {
            let read = element(&format!(r#"{{{IDS}, "error": {sent}}}"#)).expect("valid");
            assert_eq!(read.reason.as_deref(), Some(kept));
        }
        for none in ["null", r#""""#] {
            assert_eq!(element(&format!(r#"{{{IDS}, "error": {none}}}"#)).expect("valid").reason, None);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (json, field) in [
            (r#"{"partitionId": "x"}"#, "transactionId"),
            (r#"{"transactionId": "t"}"#, "partitionId"),
            (r#"{"transactionId": "t", "partitionId": "x"}"#, "partitionId"),
            (r#"{"transactionId": 7, "partitionId": "x"}"#, "transactionId"),
        ] {
            let error = element(json).expect_err("wrong").to_string();
            assert!(error.starts_with(field), "{error}");
        }
        assert!(element(&format!(r#"{{{IDS}, "consumerGroup": "a\u0001"}}"#)).is_err());
        assert!(element(&format!(r#"{{{IDS}, "leaseId": 7}}"#)).is_err());
    }
}
