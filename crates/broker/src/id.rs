//! Identifiers, checked once at the edge: ids, names, and the tenant.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use uuid::Uuid;

use crate::error::Error;

/// Longest queue, partition or consumer-group name, in characters.
pub const NAME_CHARS_MAX: usize = 255;
/// Longest transaction id, in bytes: its length travels as a `u16` in a frame.
pub const TRANSACTION_ID_BYTES_MAX: usize = u16::MAX as usize;
/// Bytes of a transaction id's hash in a sidecar row.
pub const HASH_BYTES: usize = 16;
/// The consumer group of a client that names none.
pub const QUEUE_MODE: &str = "__QUEUE_MODE__";
/// The partition of a message that names none.
pub const DEFAULT_PARTITION: &str = "Default";
/// The one tenant of a server without tenancy.
pub const DEFAULT_TENANT: Uuid = Uuid::from_u128(1);

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub Uuid);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Uuid::parse_str(text).map(Self)
            }
        }
    };
}

uuid_id!(
    /// A row of `queen.queues`.
    QueueId
);
uuid_id!(
    /// A row of `queen.log_partitions`. A partition that is deleted and made again has another id.
    PartitionId
);

uuid_id!(
    /// A row of `queen_streams.queries`.
    QueryId
);

/// A position in a partition's log, from 0.
pub type Offset = i64;

/// Separates the parts of a composed name; no name may contain it.
const SEPARATOR: char = '\u{1f}';

/// A queue's and a partition's name as one key. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartitionName(Arc<str>);

impl PartitionName {
    /// Both names are checked already.
    pub fn new(queue: &str, partition: &str) -> Self {
        let mut composed = String::with_capacity(queue.len() + 1 + partition.len());
        composed.push_str(queue);
        composed.push(SEPARATOR);
        composed.push_str(partition);
        Self(composed.into())
    }

    fn parts(&self) -> (&str, &str) {
        self.0.split_once(SEPARATOR).expect("composed with a separator")
    }

    pub fn queue(&self) -> &str {
        self.parts().0
    }

    pub fn partition(&self) -> &str {
        self.parts().1
    }
}

/// Checks a queue, partition or group name: 1 to 255 characters, none below U+0020.
///
/// # Errors
/// [`Error::Invalid`] naming `field` and the range.
pub fn checked_name<'a>(field: &'static str, name: &'a str) -> Result<&'a str, Error> {
    let chars = name.chars().count();
    if chars == 0 || chars > NAME_CHARS_MAX {
        return Err(Error::invalid(field, format!("must have 1 to {NAME_CHARS_MAX} characters, has {chars}")));
    }
    no_control(field, name)
}

/// Checks a transaction id: 1 to 65,535 bytes, no character below U+0020.
///
/// # Errors
/// [`Error::Invalid`] naming `field` and the range.
pub fn checked_transaction_id<'a>(field: &'static str, id: &'a str) -> Result<&'a str, Error> {
    if id.is_empty() || id.len() > TRANSACTION_ID_BYTES_MAX {
        return Err(Error::invalid(
            field,
            format!("must have 1 to {TRANSACTION_ID_BYTES_MAX} bytes, has {}", id.len()),
        ));
    }
    no_control(field, id)
}

fn no_control<'a>(field: &'static str, text: &'a str) -> Result<&'a str, Error> {
    if let Some(at) = text.bytes().position(|b| b < 0x20) {
        return Err(Error::invalid(
            field,
            format!("must not contain control characters, has U+{:04X} at byte {at}", text.as_bytes()[at]),
        ));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_1_to_255_characters() {
        assert!(checked_name("queue", "").is_err());
        assert!(checked_name("queue", &"é".repeat(255)).is_ok());
        assert!(checked_name("queue", &"é".repeat(256)).is_err());
    }

    #[test]
    fn control_characters_are_refused_by_name() {
        let error = checked_name("partition", "a\u{1f}b").expect_err("has a control character");
        assert!(error.to_string().contains("partition"), "{error}");
        assert!(checked_transaction_id("transactionId", "a\0").is_err());
    }

    #[test]
    fn a_transaction_id_has_at_most_65535_bytes() {
        assert!(checked_transaction_id("transactionId", &"x".repeat(65_535)).is_ok());
        assert!(checked_transaction_id("transactionId", &"x".repeat(65_536)).is_err());
    }
}
