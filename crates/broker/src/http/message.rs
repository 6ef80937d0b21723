//! A message that is pushed, alone or in a transaction: the rules are the same.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::body::checked_depth;
use crate::error::Error;
use crate::id::{DEFAULT_PARTITION, checked_name, checked_transaction_id};

/// The fields as they are sent, unread. What is not listed is ignored.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Wire<'a> {
    #[serde(borrow)]
    pub(super) queue: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) partition: Option<&'a RawValue>,
    /// JSON null is a payload; only a missing field is none.
    #[serde(borrow, deserialize_with = "present")]
    pub(super) payload: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) transaction_id: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) trace_id: Option<&'a RawValue>,
}

/// A message that can be stored.
#[derive(Debug)]
pub(super) struct Message<'a> {
    pub(super) queue: Cow<'a, str>,
    pub(super) partition: Cow<'a, str>,
    /// `None` takes the message's id.
    pub(super) transaction_id: Option<Cow<'a, str>>,
    pub(super) trace_id: Option<Uuid>,
    /// As it was sent.
    pub(super) payload: &'a str,
}

/// For a field of which null is a value.
pub(super) fn present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

impl<'a> Wire<'a> {
    /// # Errors
    /// [`Error::Missing`] or [`Error::Invalid`] naming the field.
    pub(super) fn checked(&self) -> Result<Message<'a>, Error> {
        let queue = text("queue", self.queue)?.ok_or(Error::Missing("queue"))?;
        checked_name("queue", &queue)?;
        let partition = text("partition", self.partition)?.unwrap_or(Cow::Borrowed(DEFAULT_PARTITION));
        checked_name("partition", &partition)?;
        let transaction_id = text("transactionId", self.transaction_id)?;
        if let Some(id) = &transaction_id {
            checked_transaction_id("transactionId", id)?;
        }
        let trace_id = text("traceId", self.trace_id)?
            .map(|id| Uuid::parse_str(&id).map_err(|_| Error::invalid("traceId", "must be a UUID")))
            .transpose()?;
        let payload = self.payload.ok_or(Error::Missing("payload"))?.get();
        Ok(Message { queue, partition, transaction_id, trace_id, payload: checked_depth("payload", payload)? })
    }
}

/// A string that is borrowed from the request unless it has escapes; null counts as missing.
fn text<'a>(field: &'static str, raw: Option<&'a RawValue>) -> Result<Option<Cow<'a, str>>, Error> {
    #[derive(Deserialize)]
    struct Text<'a>(#[serde(borrow)] Cow<'a, str>);
    raw.map(|raw| serde_json::from_str::<Text<'a>>(raw.get()))
        .transpose()
        .map(|text| text.map(|Text(text)| text))
        .map_err(|_| Error::invalid(field, "must be a string"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(json: &str) -> Result<Message<'_>, Error> {
        serde_json::from_str::<Wire<'_>>(json).expect("an object").checked()
    }

    #[test]
    fn a_message_needs_a_queue_and_a_payload_which_may_be_null() {
        let message = checked(r#"{"queue": "q", "payload": null, "partition": null, "other": [1]}"#).expect("valid");
        assert_eq!((message.queue.as_ref(), message.partition.as_ref(), message.payload), ("q", "Default", "null"));
        assert!(message.transaction_id.is_none() && message.trace_id.is_none());
        assert!(matches!(checked(r#"{"payload": 1}"#), Err(Error::Missing("queue"))));
        assert!(matches!(checked(r#"{"queue": "q"}"#), Err(Error::Missing("payload"))));
    }

    #[test]
    fn the_payload_is_kept_as_it_was_sent() {
        let sent = r#"{ "b": 1.0, "a": "\u0000\ud800", "b": -0 }"#;
        let body = format!(r#"{{"queue": "q\u00e9", "payload": {sent}, "transactionId": "t"}}"#);
        let message = checked(&body).expect("valid");
        assert_eq!((message.queue.as_ref(), message.payload), ("qé", sent));
        assert!(matches!(message.transaction_id, Some(Cow::Borrowed("t"))), "not copied");
    }

    #[test]
    fn what_is_wrong_is_named() {
        let deep = |n| format!(r#"{{"queue": "q", "payload": {}{}}}"#, "[".repeat(n), "]".repeat(n));
        assert!(checked(&deep(128)).is_ok());
        for (json, field) in [
            (r#"{"queue": "", "payload": 1}"#.to_owned(), "queue"),
            (r#"{"queue": 7, "payload": 1}"#.to_owned(), "queue"),
            (r#"{"queue": "q", "payload": 1, "partition": "a\u001fb"}"#.to_owned(), "partition"),
            (r#"{"queue": "q", "payload": 1, "transactionId": ""}"#.to_owned(), "transactionId"),
            (r#"{"queue": "q", "payload": 1, "traceId": "x"}"#.to_owned(), "traceId"),
            (deep(129), "payload"),
        ] {
            let error = checked(&json).expect_err("wrong").to_string();
            assert!(error.starts_with(field), "{error}");
        }
    }
}
