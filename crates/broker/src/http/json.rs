//! Reading JSON objects, and saying which value is wrong: a position alone helps nobody who built the text from objects.

use std::fmt::{self, Write as _};
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::error::Error;

/// Most characters of a request that its refusal quotes.
const QUOTED_MAX: usize = 200;
/// Most levels of the path that a refusal names.
const LEVELS_MAX: usize = 8;

/// A `T` that is written as an object. A list would fill the fields of a structure in their order.
pub(super) struct Object<T>(pub(super) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields)).map(Object)
            }
        }

        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

/// The object that `bytes` are the JSON of.
///
/// # Errors
/// [`Error::BadBody`] naming the value that is wrong.
pub(super) fn read<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, Error> {
    let text = std::str::from_utf8(bytes).map_err(|error| Error::BadBody(error.to_string()))?;
    match serde_json::from_str(text) {
        Ok(Object(value)) => Ok(value),
        Err(error) => Err(Error::BadBody(explained(text, &error))),
    }
}

/// The parser's words, after the path of the value that it stumbled over.
fn explained(text: &str, error: &serde_json::Error) -> String {
    let line_start: usize = text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum();
    // Broken syntax is reported behind the character that broke it, which may close the value's own list or object.
    let place = (line_start + error.column()).saturating_sub(usize::from(error.is_syntax()));
    let mut steps = path_at(text, place.min(text.len()));
    let reason = error.to_string();
    if reason.starts_with("unknown field") || reason.starts_with("duplicate field") {
        steps.pop(); // the reason names it already
    }
    let path = shown(&steps);
    let separator = if path.is_empty() { "" } else { ": " };
    format!("{path}{separator}{}", cut(&reason))
}

/// `text`, without its middle if it is long: the reason and the place stand at its ends.
fn cut(text: &str) -> String {
    let half = QUOTED_MAX / 2;
    let (mut head, mut tail) = (half, text.len().saturating_sub(half));
    if tail <= head {
        return text.to_owned();
    }
    while !text.is_char_boundary(head) {
        head -= 1;
    }
    while !text.is_char_boundary(tail) {
        tail += 1;
    }
    format!("{}…{}", &text[..head], &text[tail..])
}

/// `error` with the place of what it is about.
pub(super) fn placed(place: impl fmt::Display, error: Error) -> Error {
    match error {
        // Says its place already, further in.
        Error::BadBody(reason) => Error::BadBody(format!("{place}.{reason}")),
        Error::TooLarge(reason) => Error::TooLarge(format!("{place}.{reason}")),
        Error::HorizonExceeded(reason) => Error::HorizonExceeded(format!("{place}.{reason}")),
        error => Error::BadBody(format!("{place}: {error}")),
    }
}

/// A list of operations, alone or in an object.
#[derive(ToSchema)]
#[expect(dead_code, reason = "this type only describes; the list is read whole or by its name")]
pub(super) struct Operations<T> {
    /// In this order.
    #[schema(min_items = 1, max_items = 256)]
    operations: Vec<T>,
}

impl<T> Operations<T> {
    /// # Errors
    /// [`Error::BadBody`] naming the value that is wrong.
    pub(super) fn read(body: &[u8]) -> Result<Vec<&RawValue>, Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Wire<'a> {
            #[serde(borrow)]
            operations: Vec<&'a RawValue>,
        }
        if body.trim_ascii_start().first() == Some(&b'[') {
            let text = std::str::from_utf8(body).map_err(|error| Error::BadBody(error.to_string()))?;
            return serde_json::from_str(text).map_err(|error| Error::BadBody(explained(text, &error)));
        }
        read::<Wire<'_>>(body).map(|wire| wire.operations)
    }
}

enum Step<'a> {
    Key(&'a str),
    Index(usize),
}

/// The path of the value in which the byte at `place` lies, as `items[3].queue`.
fn path_at(text: &str, place: usize) -> Vec<Step<'_>> {
    let mut steps: Vec<Step<'_>> = Vec::new();
    let mut is_key_next = false;
    let mut at = 0;
    while at < place {
        match text.as_bytes()[at] {
            b'{' => {
                steps.push(Step::Key(""));
                is_key_next = true;
            }
            b'[' => steps.push(Step::Index(0)),
            b'}' | b']' => drop(steps.pop()),
            b',' => match steps.last_mut() {
                Some(Step::Index(index)) => *index += 1,
                Some(Step::Key(key)) => {
                    *key = "";
                    is_key_next = true;
                }
                None => {}
            },
            b'"' => {
                let end = string_end(text, at + 1, place);
                if is_key_next && let Some(Step::Key(key)) = steps.last_mut() {
                    *key = text.get(at + 1..end).unwrap_or("");
                    is_key_next = false;
                }
                at = end;
            }
            _ => {}
        }
        at += 1;
    }
    steps
}

/// Where the string that starts at `at` ends, `place` at the latest.
fn string_end(text: &str, mut at: usize, place: usize) -> usize {
    let bytes = text.as_bytes();
    while at < place && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    at.min(place)
}

fn shown(steps: &[Step<'_>]) -> String {
    let mut path = String::new();
    for step in steps.iter().take(LEVELS_MAX) {
        match step {
            Step::Key("") => break,
            Step::Key(key) => {
                if !path.is_empty() {
                    path.push('.');
                }
                path.push_str(&cut(key));
            }
            Step::Index(index) => write!(path, "[{index}]").expect("a string takes all text"),
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Map, Value};

    #[derive(Debug, serde::Deserialize)]
    #[allow(dead_code, reason = "only its reading is tested")]
    struct Wire {
        name: Option<String>,
        list: Option<Vec<Map<String, Value>>>,
    }

    fn refused<'a, T: Deserialize<'a> + fmt::Debug>(text: &'a str) -> String {
        read::<T>(text.as_bytes()).expect_err(text).to_string()
    }

    #[test]
    fn the_value_that_is_wrong_is_named() {
        let deep = format!(r#"{{"options": {{"a": 1, "x": {}}}}}"#, "[".repeat(1000));
        for (text, path) in [
            (r#"{"a": "x, {[", "leaseTime": 1e400}"#, "leaseTime: "),
            (r#"{"options": {"a": [1, {"b": "\ud800"}]}}"#, "options.a[1].b: "),
            ("{\"a\": 1,\n \"q\\\"uote\": nul}", "q\\\"uote: "),
            (deep.as_str(), "options.x[0][0][0]"),
            ("{\"é\": {\"ü\": -}}", "é.ü: "),
        ] {
            let error = refused::<Map<String, Value>>(text);
            assert!(error.starts_with(&format!("bad body: {path}")), "{text}: {error}");
        }
        assert!(refused::<Wire>(r#"{"name": 7}"#).starts_with("bad body: name: "));
        assert!(refused::<Wire>(r#"{"list": [{}, 7]}"#).starts_with("bad body: list[1]: "));
        let error = refused::<Wire>(r#"{"name": "a", "name": "b"}"#);
        assert!(error.starts_with("bad body: duplicate field `name`"), "{error}");
        assert!(refused::<Wire>(r#"{"list": {}}"#).starts_with("bad body: list: "));
    }

    #[test]
    fn only_an_object_is_one() {
        for text in ["[\"n\", null]", "7", "null", "\"x\""] {
            assert!(refused::<Wire>(text).contains("expected an object"), "{text}");
        }
        for text in ["", "{", "{} x", "\u{feff}{}"] {
            refused::<Wire>(text);
        }
        assert!(read::<Wire>(b"{\"other\": \"\xFF\"}").is_err(), "not UTF-8, even where it is ignored");
        assert!(read::<Wire>(b" {} ").is_ok());
    }

    #[test]
    fn a_refusal_quotes_little_of_the_request() {
        let long = "é".repeat(100_000);
        let error = refused::<Wire>(&format!(r#"{{"list": "{long}"}}"#));
        assert!(error.len() < 500 && error.contains("expected a sequence"), "{error}");
        let error = refused::<Map<String, Value>>(&format!(r#"{{"{long}": nul}}"#));
        assert!(error.len() < 600, "{error}");
    }
}
