//! The scope of a deduplication window: a hash that is the same wherever the same job is enqueued.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::limits::{JobType, QueueName, check_text, saturating_micros};

/// Deepest nesting of arguments that can be deduplicated by their value.
const DEPTH_MAX: u32 = 128;

/// A window as it was asked for.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    /// `None` deduplicates by the arguments.
    pub(crate) key: Option<String>,
    pub(crate) length: Duration,
}

/// A checked window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scope {
    /// SHA-256 in lower-case hexadecimal.
    pub(crate) hash: String,
    pub(crate) window_us: i64,
}

impl Scope {
    pub(crate) fn new(queue: &QueueName, job_type: &JobType, args: &[u8], window: &Window) -> Result<Self, Error> {
        if window.length.is_zero() || window.key.as_deref() == Some("") {
            return Err(Error::InvalidWindowedDedup);
        }
        let (kind, value) = match &window.key {
            Some(key) => {
                check_text("idempotency key", key)?;
                ("key", key.clone())
            }
            None => {
                let mut canonical = String::with_capacity(args.len());
                canonicalize(serde_json::from_slice(args)?, &mut canonical, 0)?;
                ("args", canonical)
            }
        };
        let hash = scope_hash(&[queue.as_str(), job_type.as_str(), kind, &value]);
        Ok(Self { hash, window_us: saturating_micros(window.length).max(1) })
    }
}

/// Every part is preceded by its length, so that no two lists of parts run into the same bytes.
fn scope_hash(parts: &[&str]) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part.as_bytes());
    }
    let mut hex = String::with_capacity(64);
    for byte in hasher.finalize() {
        write!(hex, "{byte:02x}").expect("a string takes everything");
    }
    hex
}

/// Writes JSON with sorted keys and without blanks.
///
/// Numbers keep their text: read as floats, two large ones could become equal, and a job would be lost.
fn canonicalize(json: &RawValue, out: &mut String, depth: u32) -> Result<(), Error> {
    if DEPTH_MAX < depth {
        return Err(Error::invalid("args", "are nested at most 128 deep to be deduplicated by value"));
    }
    let text = json.get();
    match text.as_bytes().first() {
        Some(b'{') => {
            let members: BTreeMap<String, &RawValue> = serde_json::from_str(text)?;
            out.push('{');
            for (index, (key, value)) in members.into_iter().enumerate() {
                if 0 < index {
                    out.push(',');
                }
                out.push_str(&serde_json::to_string(&key)?);
                out.push(':');
                canonicalize(value, out, depth + 1)?;
            }
            out.push('}');
        }
        Some(b'[') => {
            let items: Vec<&RawValue> = serde_json::from_str(text)?;
            out.push('[');
            for (index, item) in items.into_iter().enumerate() {
                if 0 < index {
                    out.push(',');
                }
                canonicalize(item, out, depth + 1)?;
            }
            out.push(']');
        }
        Some(b'"') => out.push_str(&serde_json::to_string(&serde_json::from_str::<String>(text)?)?),
        _ => out.push_str(text),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(queue: &str, job_type: &str, args: &str, key: Option<&str>) -> String {
        let window = Window { key: key.map(str::to_owned), length: Duration::from_secs(1) };
        let (queue, job_type) = (QueueName::new(queue).unwrap(), JobType::new(job_type).unwrap());
        Scope::new(&queue, &job_type, args.as_bytes(), &window).unwrap().hash
    }

    #[test]
    fn key_order_blanks_and_escapes_do_not_matter() {
        let one = scope("q", "t", r#"{"a":1,"b":{"c":[1,2],"d":"é"}}"#, None);
        assert_eq!(one, scope("q", "t", "{ \"b\" : {\"d\":\"\\u00e9\", \"c\":[1, 2]}, \"a\" : 1 }", None));
        assert_ne!(one, scope("q", "t", r#"{"a":1,"b":{"c":[2,1],"d":"é"}}"#, None));
    }

    #[test]
    fn large_numbers_stay_apart() {
        assert_ne!(scope("q", "t", "18446744073709551616", None), scope("q", "t", "18446744073709551617", None));
    }

    #[test]
    fn parts_do_not_run_into_each_other() {
        assert_ne!(scope("ab", "c", "1", Some("k")), scope("a", "bc", "1", Some("k")));
        assert_ne!(scope("q", "t", "1", Some("1")), scope("q", "t", "1", None));
        assert_ne!(scope("q", "t", "1", Some("k")), scope("q", "t", "1", Some("K")));
    }

    #[test]
    fn the_hash_is_the_documented_one() {
        let bytes = b"\0\0\0\0\0\0\0\x01q\0\0\0\0\0\0\0\x01t\0\0\0\0\0\0\0\x03key\0\0\0\0\0\0\0\x01k";
        let expected: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(scope("q", "t", "1", Some("k")), expected);
    }

    #[test]
    fn a_window_needs_a_key_and_a_length() {
        let (queue, job_type) = (QueueName::default_queue(), JobType::new("t").unwrap());
        for (key, length) in [(Some(""), 1), (Some("k"), 0), (None, 0)] {
            let window = Window { key: key.map(str::to_owned), length: Duration::from_secs(length) };
            let refused = Scope::new(&queue, &job_type, b"1", &window);
            assert!(matches!(refused, Err(Error::InvalidWindowedDedup)), "{window:?}");
        }
    }

    #[test]
    fn nesting_is_bounded() {
        let (queue, job_type) = (QueueName::default_queue(), JobType::new("t").unwrap());
        let window = Window { key: None, length: Duration::from_secs(1) };
        let deep = "[".repeat(200) + &"]".repeat(200);
        assert!(Scope::new(&queue, &job_type, deep.as_bytes(), &window).is_err());
    }
}
