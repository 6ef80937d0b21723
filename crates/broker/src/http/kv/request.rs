//! Key/value operations as they are sent ─► as they can be carried out.

use std::collections::HashSet;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::db::kv::{Kind, Op};
use crate::error::Error;
use crate::http::ack::element::text;
use crate::http::body::checked_depth;
use crate::http::coded::Refusal;
use crate::http::json::{self, placed};
use crate::http::message::present;

/// Longest value, in bytes.
const VALUE_BYTES_MAX: usize = 64 << 10;
/// Longest key, in bytes.
const KEY_BYTES_MAX: usize = 512;
/// Longest namespace, in bytes.
const NAMESPACE_BYTES_MAX: usize = 64;
/// Rows of a page, and of one that does not say how many.
const PAGE_ROWS_MAX: i64 = 1000;
const PAGE_ROWS: i64 = 100;
/// The longest time to live: a hundred years.
const TTL_SECONDS_MAX: i64 = 3_155_760_000;
/// Longest number, and most digits of its exponent: what can be added up exactly.
const NUMBER_BYTES_MAX: usize = 64;
const EXPONENT_DIGITS_MAX: usize = 2;

/// What one call may ask for.
#[derive(Clone, Copy, Debug)]
pub(in crate::http) struct Limits {
    ops_max: usize,
    keys_max: usize,
    has_pages: bool,
}

impl Limits {
    /// A batch of its own.
    pub(super) const ALONE: Self = Self { ops_max: 256, keys_max: 1024, has_pages: true };
    /// In a transaction, which holds locks.
    pub(in crate::http) const RIDING: Self = Self { ops_max: 64, keys_max: 256, has_pages: false };
}

/// The fields as they are sent, unread. Null is a value; of `expect` it is a wrong one.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Wire<'a> {
    #[serde(borrow, deserialize_with = "present")]
    op: Option<&'a RawValue>,
    #[serde(borrow, deserialize_with = "present")]
    ns: Option<&'a RawValue>,
    #[serde(borrow, deserialize_with = "present")]
    key: Option<&'a RawValue>,
    #[serde(borrow, deserialize_with = "present")]
    keys: Option<&'a RawValue>,
    #[serde(borrow, deserialize_with = "present")]
    prefix: Option<&'a RawValue>,
    #[serde(borrow)]
    after: Option<&'a RawValue>,
    #[serde(borrow)]
    limit: Option<&'a RawValue>,
    #[serde(borrow)]
    keys_only: Option<&'a RawValue>,
    #[serde(borrow, deserialize_with = "present")]
    value: Option<&'a RawValue>,
    #[serde(borrow)]
    ttl_seconds: Option<&'a RawValue>,
    #[serde(borrow)]
    forever: Option<&'a RawValue>,
    #[serde(borrow, deserialize_with = "present")]
    expect: Option<&'a RawValue>,
    #[serde(borrow)]
    required: Option<&'a RawValue>,
    #[serde(borrow, deserialize_with = "present")]
    delta: Option<&'a RawValue>,
    #[serde(borrow)]
    min: Option<&'a RawValue>,
    #[serde(borrow)]
    max: Option<&'a RawValue>,
}

/// # Errors
/// A [`Refusal`] that names the operation and the field.
pub(in crate::http) fn ops(list: &[&RawValue], limits: Limits) -> Result<Vec<Op>, Refusal> {
    if list.is_empty() || limits.ops_max < list.len() {
        let range = format!("must have 1 to {} operations, has {}", limits.ops_max, list.len());
        return Err(Error::invalid("operations", range).into());
    }
    let mut ops = Vec::with_capacity(list.len());
    let (mut written, mut keys) = (HashSet::new(), 0);
    for (index, raw) in list.iter().enumerate() {
        let place = format!("operations[{index}]");
        let in_place = |refusal: Refusal| Refusal { error: placed(&place, refusal.error), ..refusal };
        let op = op(raw, limits).map_err(in_place)?;
        keys += op.keys.len() + usize::from(op.key.is_some());
        if limits.keys_max < keys {
            return Err(Error::invalid("operations", format!("must name at most {} keys", limits.keys_max)).into());
        }
        let writes = matches!(op.kind, Kind::Put | Kind::Delete | Kind::Incr);
        if writes && !written.insert((op.ns.clone(), op.key.clone())) {
            let error = Error::invalid("key", "is written by another operation of this call already");
            return Err(in_place(Refusal { reason: Some("kv_duplicate_key_in_call"), error }));
        }
        ops.push(op);
    }
    Ok(ops)
}

/// What a call of one key asks for.
///
/// # Errors
/// As [`ops`].
pub(super) fn single(kind: &str, ns: &str, key: &str, body: &RawValue) -> Result<Op, Refusal> {
    let mut wire: Wire<'_> = json::read(body.get().as_bytes())?;
    for (name, field) in [("op", wire.op), ("ns", wire.ns), ("key", wire.key)] {
        if field.is_some() {
            return Err(Error::invalid(name, "is in the path").into());
        }
    }
    let quoted = |text: &str| serde_json::value::to_raw_value(text).expect("text becomes JSON");
    let (kind, ns, key) = (quoted(kind), quoted(ns), quoted(key));
    (wire.op, wire.ns, wire.key) = (Some(&*kind), Some(&*ns), Some(&*key));
    checked(&wire, Limits::ALONE)
}

fn op(raw: &RawValue, limits: Limits) -> Result<Op, Refusal> {
    checked(&json::read(raw.get().as_bytes())?, limits)
}

fn checked(wire: &Wire<'_>, limits: Limits) -> Result<Op, Refusal> {
    let kind = text("op", wire.op)?.ok_or(Error::Missing("op"))?;
    let (op, is_if_absent, fields): (_, _, &[&str]) = match kind.as_str() {
        "get" => (Kind::Get, false, &["key"]),
        "getMany" => (Kind::GetMany, false, &["keys"]),
        "getPrefix" if limits.has_pages => (Kind::GetPrefix, false, &["prefix", "after", "limit", "keysOnly"]),
        "getPrefix" => return Err(Error::invalid("op", "must not be getPrefix in a transaction").into()),
        "put" => (Kind::Put, false, &["key", "value", "ttlSeconds", "forever", "expect", "required"]),
        "putIfAbsent" => (Kind::Put, true, &["key", "value", "ttlSeconds", "forever", "required"]),
        "delete" => (Kind::Delete, false, &["key", "expect", "required"]),
        "incr" => (Kind::Incr, false, &["key", "delta", "min", "max", "ttlSeconds", "forever", "required"]),
        _ => {
            return Err(
                Error::invalid("op", "must be get, getMany, getPrefix, put, putIfAbsent, delete or incr").into()
            );
        }
    };
    refuse_others(wire, &kind, fields)?;
    let prefix = text("prefix", wire.prefix)?.map(|prefix| checked_key("prefix", prefix)).transpose()?;
    let has_expiry = matches!(op, Kind::Put | Kind::Incr);
    let checked = Op {
        kind: op,
        is_if_absent,
        ns: namespace(text("ns", wire.ns)?.ok_or(Error::Missing("ns"))?)?,
        key: text("key", wire.key)?.map(|key| checked_key("key", key)).transpose()?,
        keys: keys(wire.keys, limits)?,
        end: prefix.as_deref().and_then(end),
        prefix,
        after: text("after", wire.after)?.map(|after| checked_key("after", after)).transpose()?,
        limit: limit(wire.limit)?,
        keys_only: flag("keysOnly", wire.keys_only)?,
        value: wire.value.map(value).transpose()?,
        ttl: if has_expiry { ttl(wire.ttl_seconds, wire.forever)? } else { None },
        expect: if is_if_absent { Some(0) } else { expect(wire.expect)? },
        delta: number("delta", wire.delta)?,
        min: number("min", wire.min)?,
        max: number("max", wire.max)?,
        required: flag("required", wire.required)?,
    };
    let missing = match op {
        Kind::GetMany => checked.keys.is_empty().then_some("keys"),
        Kind::GetPrefix => checked.prefix.is_none().then_some("prefix"),
        _ if checked.key.is_none() => Some("key"),
        Kind::Put => checked.value.is_none().then_some("value"),
        Kind::Incr => checked.delta.is_none().then_some("delta"),
        Kind::Get | Kind::Delete => None,
    };
    missing.map_or(Ok(checked), |field| Err(Error::Missing(field).into()))
}

fn refuse_others(wire: &Wire<'_>, kind: &str, fields: &[&str]) -> Result<(), Error> {
    let given = [
        ("key", wire.key),
        ("keys", wire.keys),
        ("prefix", wire.prefix),
        ("after", wire.after),
        ("limit", wire.limit),
        ("keysOnly", wire.keys_only),
        ("value", wire.value),
        ("ttlSeconds", wire.ttl_seconds),
        ("forever", wire.forever),
        ("expect", wire.expect),
        ("required", wire.required),
        ("delta", wire.delta),
        ("min", wire.min),
        ("max", wire.max),
    ];
    match given.into_iter().find(|(name, field)| field.is_some() && !fields.contains(name)) {
        Some((name, _)) => Err(Error::invalid(name, format!("is no field of {kind}"))),
        None => Ok(()),
    }
}

fn namespace(ns: String) -> Result<String, Error> {
    let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = ns.as_bytes();
    let is_valid = bytes.first().is_some_and(|first| is_letter(*first))
        && bytes.len() <= NAMESPACE_BYTES_MAX
        && bytes.iter().all(|byte| is_letter(*byte) || b"._-".contains(byte));
    if is_valid {
        return Ok(ns);
    }
    Err(Error::invalid(
        "ns",
        format!(
            "must have 1 to {NAMESPACE_BYTES_MAX} of the characters a-z, 0-9, dot, underscore and hyphen, \
             and begin with a letter or digit"
        ),
    ))
}

fn checked_key(field: &'static str, key: String) -> Result<String, Error> {
    if key.is_empty() || KEY_BYTES_MAX < key.len() {
        return Err(Error::invalid(field, format!("must have 1 to {KEY_BYTES_MAX} bytes, has {}", key.len())));
    }
    if key.bytes().any(|byte| byte < 0x20) {
        return Err(Error::invalid(field, "must not contain control characters"));
    }
    Ok(key)
}

fn keys(raw: Option<&RawValue>, limits: Limits) -> Result<Vec<String>, Error> {
    let Some(raw) = raw else { return Ok(Vec::new()) };
    let range = || Error::invalid("keys", format!("must be a list of 1 to {} keys", limits.keys_max));
    let keys: Vec<String> = serde_json::from_str(raw.get()).map_err(|_| range())?;
    if keys.is_empty() || limits.keys_max < keys.len() {
        return Err(range());
    }
    keys.into_iter().map(|key| checked_key("keys", key)).collect()
}

/// The first text behind all that begin with `prefix`, by bytes; `None` if there is none. In UTF-8 bytes and
/// characters have the same order.
fn end(prefix: &str) -> Option<String> {
    let mut chars: Vec<char> = prefix.chars().collect();
    while let Some(last) = chars.pop() {
        let next = (u32::from(last) + 1..=u32::from(char::MAX)).find_map(char::from_u32);
        if let Some(next) = next {
            chars.push(next);
            return Some(chars.into_iter().collect());
        }
    }
    None
}

/// Brought into its range and never refused: the client asks again for what did not fit.
fn limit(raw: Option<&RawValue>) -> Result<i32, Error> {
    let rows = whole("limit", raw)?.unwrap_or(PAGE_ROWS).clamp(1, PAGE_ROWS_MAX);
    Ok(i32::try_from(rows).expect("within its range"))
}

fn value(raw: &RawValue) -> Result<String, Error> {
    let json = raw.get();
    if VALUE_BYTES_MAX < json.len() {
        return Err(Error::TooLarge(format!("value: must have at most {VALUE_BYTES_MAX} bytes, has {}", json.len())));
    }
    Ok(checked_depth("value", json)?.to_owned())
}

/// Seconds; `None` is for ever. One of both must be said, so that nothing lives on by mistake.
fn ttl(seconds: Option<&RawValue>, forever: Option<&RawValue>) -> Result<Option<i64>, Refusal> {
    let refused =
        |field, reason: &str| Refusal { reason: Some("kv_expiry_not_specified"), error: Error::invalid(field, reason) };
    match (seconds, forever.map(RawValue::get)) {
        (Some(seconds), None) => match seconds.get().parse() {
            Ok(seconds @ 1..=TTL_SECONDS_MAX) => Ok(Some(seconds)),
            _ => Err(refused("ttlSeconds", &format!("must be a whole number from 1 to {TTL_SECONDS_MAX}"))),
        },
        (None, Some("true")) => Ok(None),
        (None, Some(_)) => Err(refused("forever", "must be true if it is given")),
        _ => Err(refused("ttlSeconds", "or forever must be given, and not both")),
    }
}

fn expect(raw: Option<&RawValue>) -> Result<Option<i64>, Error> {
    let Some(raw) = raw else { return Ok(None) };
    match raw.get().parse() {
        Ok(version @ 0..) => Ok(Some(version)),
        _ => Err(Error::invalid("expect", format!("must be a whole number from 0 to {}", i64::MAX))),
    }
}

fn whole(field: &'static str, raw: Option<&RawValue>) -> Result<Option<i64>, Error> {
    let read = |raw: &RawValue| raw.get().parse().map_err(|_| Error::invalid(field, "must be a whole number"));
    raw.map(read).transpose()
}

fn flag(field: &'static str, raw: Option<&RawValue>) -> Result<bool, Error> {
    match raw.map(RawValue::get) {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(_) => Err(Error::invalid(field, "must be true or false")),
    }
}

/// A decimal number as it is written: it is added up exactly.
fn number(field: &'static str, raw: Option<&RawValue>) -> Result<Option<String>, Error> {
    let Some(text) = raw.map(RawValue::get) else { return Ok(None) };
    let is_number = text.starts_with(|first: char| first == '-' || first.is_ascii_digit());
    let exponent = text.split_once(['e', 'E']).map_or("", |(_, exponent)| exponent.trim_start_matches(['+', '-']));
    if is_number && text.len() <= NUMBER_BYTES_MAX && exponent.len() <= EXPONENT_DIGITS_MAX {
        return Ok(Some(text.to_owned()));
    }
    Err(Error::invalid(
        field,
        format!(
            "must be a number of at most {NUMBER_BYTES_MAX} characters, with an exponent of at most {EXPONENT_DIGITS_MAX} digits"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str, limits: Limits) -> Result<Vec<Op>, Refusal> {
        let list: Vec<&RawValue> = serde_json::from_str(json).expect("a list");
        ops(&list, limits)
    }

    #[test]
    fn the_end_of_a_prefix_lies_behind_all_that_begin_with_it() {
        for (prefix, expected) in [
            ("a", Some("b")),
            ("user:", Some("user;")),
            ("é", Some("ê")),
            ("\u{d7ff}", Some("\u{e000}")),
            ("a\u{10ffff}", Some("b")),
            ("\u{10ffff}\u{10ffff}", None),
        ] {
            assert_eq!(end(prefix).as_deref(), expected, "{prefix}");
        }
    }

    #[test]
    fn values_and_numbers_stay_as_they_are_written() {
        let ops = read(
            r#"[{"op":"put","ns":"n","key":"k","value":{"b": 1.0,"a":"\u0000"},"forever":true},
                {"op":"incr","ns":"n","key":"i","delta":1.10,"ttlSeconds":5}]"#,
            Limits::ALONE,
        )
        .expect("reads");
        assert_eq!(ops[0].value.as_deref(), Some(r#"{"b": 1.0,"a":"\u0000"}"#));
        assert_eq!((ops[1].delta.as_deref(), ops[1].ttl), (Some("1.10"), Some(5)));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let long = "x".repeat(513);
        for (op, reason, words) in [
            (r#"{"op":"get","ns":"A","key":"k"}"#.to_owned(), None, "ns"),
            (r#"{"op":"get","ns":"n"}"#.to_owned(), None, "key is required"),
            (format!(r#"{{"op":"get","ns":"n","key":"{long}"}}"#), None, "1 to 512"),
            (r#"{"op":"get","ns":"n","key":"k","value":1}"#.to_owned(), None, "value: is no field of get"),
            (r#"{"op":"get","ns":"n","key":"k","other":1}"#.to_owned(), None, "other"),
            (r#"{"op":"getPrefix","ns":"n","prefix":""}"#.to_owned(), None, "prefix"),
            (r#"{"op":"getMany","ns":"n","keys":[]}"#.to_owned(), None, "keys"),
            (r#"{"op":"delete","ns":"n","key":"k","expect":null}"#.to_owned(), None, "expect"),
            (r#"{"op":"delete","ns":"n","key":"k","expect":-1}"#.to_owned(), None, "expect"),
            (r#"{"op":"put","ns":"n","key":"k","forever":true}"#.to_owned(), None, "value is required"),
            (r#"{"op":"incr","ns":"n","key":"k","delta":"1","forever":true}"#.to_owned(), None, "delta"),
            (r#"{"op":"incr","ns":"n","key":"k","delta":1e999,"forever":true}"#.to_owned(), None, "delta"),
            (r#"{"op":"put","ns":"n","key":"k","value":1}"#.to_owned(), Some("kv_expiry_not_specified"), "forever"),
            (
                r#"{"op":"put","ns":"n","key":"k","value":1,"ttlSeconds":1,"forever":true}"#.to_owned(),
                Some("kv_expiry_not_specified"),
                "not both",
            ),
            (
                r#"{"op":"put","ns":"n","key":"k","value":1,"ttlSeconds":0}"#.to_owned(),
                Some("kv_expiry_not_specified"),
                "from 1 to",
            ),
            ("7".to_owned(), None, "object"),
        ] {
            let refusal = read(&format!("[{op}]"), Limits::ALONE).expect_err(&op);
            let words_found = refusal.error.to_string();
            assert!(words_found.contains("operations[0]") && words_found.contains(words), "{op}: {words_found}");
            assert_eq!(refusal.reason, reason, "{op}");
        }
    }

    #[test]
    fn calls_are_bounded() {
        let get = |count: usize| format!("[{}]", vec![r#"{"op":"get","ns":"n","key":"k"}"#; count].join(","));
        assert!(read(&get(256), Limits::ALONE).is_ok() && read(&get(257), Limits::ALONE).is_err());
        assert!(read(&get(64), Limits::RIDING).is_ok() && read(&get(65), Limits::RIDING).is_err());
        assert!(read("[]", Limits::ALONE).is_err());
        let many = |count: usize| format!(r#"{{"op":"getMany","ns":"n","keys":{:?}}}"#, vec!["k"; count]);
        assert!(read(&format!("[{},{}]", many(1000), many(24)), Limits::ALONE).is_ok());
        assert!(read(&format!("[{},{}]", many(1000), many(25)), Limits::ALONE).is_err());
        assert!(read(&format!("[{}]", many(257)), Limits::RIDING).is_err());
        assert!(read(r#"[{"op":"getPrefix","ns":"n","prefix":"p"}]"#, Limits::RIDING).is_err());
    }

    #[test]
    fn a_key_is_written_once_a_call() {
        let twice = r#"[{"op":"delete","ns":"n","key":"k"},{"op":"incr","ns":"n","key":"k","delta":1,"forever":true}]"#;
        assert_eq!(read(twice, Limits::ALONE).expect_err("twice").reason, Some("kv_duplicate_key_in_call"));
        assert!(read(&twice.replacen("\"n\"", "\"m\"", 1), Limits::ALONE).is_ok(), "in another namespace");
    }
}
