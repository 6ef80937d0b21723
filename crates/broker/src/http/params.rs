//! Query parameters: typed, ranged, and refused by name.

use std::ops::RangeInclusive;

use axum::extract::{FromRequestParts, RawQuery};
use axum::http::request::Parts;
use serde::Serialize;
use utoipa::ToSchema;

use super::openapi::query::query;
use crate::error::Error;
use crate::id::checked_name;

/// Rows of a list that does not say how many, and the most that one may ask for.
const LIMIT_MAX: i64 = 10_000;
const OFFSET_MAX: i64 = i32::MAX as i64;

/// The query string. A parameter given twice counts once, the last time.
pub(super) struct Params(Vec<(String, String)>);

impl<S: Send + Sync> FromRequestParts<S> for Params {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let RawQuery(query) = RawQuery::from_request_parts(parts, state).await.expect("cannot fail");
        let query = query.as_deref().unwrap_or_default();
        if !decodes(query) {
            return Err(Error::invalid("query", "must be UTF-8 after percent-decoding"));
        }
        serde_urlencoded::from_str(query).map(Self).map_err(|error| Error::invalid("query", error.to_string()))
    }
}

/// Whether `query` is UTF-8 once its escapes are decoded. The form decoder puts U+FFFD in the place of what is
/// not, and two different names would become one.
fn decodes(query: &str) -> bool {
    let (mut decoded, mut rest) = (Vec::with_capacity(query.len()), query.as_bytes());
    while let [first, after @ ..] = rest {
        let escaped = match (first, after) {
            (b'%', [high, low, after @ ..]) => hex(*high).zip(hex(*low)).map(|(high, low)| (high * 16 + low, after)),
            _ => None,
        };
        let (byte, after) = escaped.unwrap_or((*first, after));
        decoded.push(byte);
        rest = after;
    }
    std::str::from_utf8(&decoded).is_ok()
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok())
}

query!(pub(super) SliceQuery:
    integer("limit", 0..=LIMIT_MAX, "Most rows of the answer.").or(LIMIT_MAX),
    integer("offset", 0..=OFFSET_MAX, "Rows to pass over.").or(0),
);

/// Which rows of a list to answer.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(super) struct Slice {
    pub(super) limit: i32,
    pub(super) offset: i32,
}

impl Params {
    /// The text of `name`; absent and empty are both `None`.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.0.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.as_str()).filter(|v| !v.is_empty())
    }

    /// What was given, by name, in order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }

    /// `name` as `true` or `false`, `false` if absent.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the parameter.
    pub(super) fn flag(&self, name: &'static str) -> Result<bool, Error> {
        match self.text(name).map(str::to_ascii_lowercase).as_deref() {
            None | Some("false" | "0") => Ok(false),
            Some("true" | "1") => Ok(true),
            Some(_) => Err(Error::invalid(name, "must be true or false")),
        }
    }

    /// `name` as a whole number within `range`.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the parameter and the range.
    pub(super) fn integer(&self, name: &'static str, range: RangeInclusive<i64>) -> Result<Option<i64>, Error> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.parse::<i64>() {
            Ok(value) if range.contains(&value) => Ok(Some(value)),
            _ => {
                let (low, high) = range.into_inner();
                Err(Error::invalid(name, format!("must be a whole number from {low} to {high}")))
            }
        }
    }

    /// The text of `name`, which a queue, partition or group must be able to have.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the parameter.
    pub(super) fn name(&self, name: &'static str) -> Result<Option<&str>, Error> {
        self.text(name).map(|text| checked_name(name, text)).transpose()
    }

    /// `limit` and `offset` of a list.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the parameter and its range.
    pub(super) fn slice(&self) -> Result<Slice, Error> {
        let within = |number: i64| i32::try_from(number).expect("the range was checked");
        Ok(Slice {
            limit: within(self.integer("limit", 0..=LIMIT_MAX)?.unwrap_or(LIMIT_MAX)),
            offset: within(self.integer("offset", 0..=OFFSET_MAX)?.unwrap_or(0)),
        })
    }
}
