//! Queue options: one table of names, types and ranges, and the reading of a request against it.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};
use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::error::Error;
use crate::id::NAME_CHARS_MAX;

/// What a value must be.
enum Kind {
    /// A whole number within the range; anything else is refused.
    Whole(RangeInclusive<i64>),
    /// A whole number, moved into the range.
    Clamped(RangeInclusive<i64>),
    Switch,
}

const INT_MAX: i64 = i32::MAX as i64;
/// One year: a batch that nobody finished is not delivered again before.
const LEASE_SECONDS_MAX: i64 = 31_536_000;

/// Defaults stand in `queen.queue_option_defaults`; 0 switches a window off.
const OPTIONS: &[(&str, Kind)] = &[
    ("leaseTime", Kind::Whole(1..=LEASE_SECONDS_MAX)),
    ("retryLimit", Kind::Whole(0..=INT_MAX)),
    ("retryDelay", Kind::Whole(0..=INT_MAX)),
    ("maxSize", Kind::Whole(0..=INT_MAX)),
    ("ttl", Kind::Whole(0..=INT_MAX)),
    ("priority", Kind::Whole(0..=INT_MAX)),
    ("deadLetterQueue", Kind::Switch),
    ("dlqAfterMaxRetries", Kind::Switch),
    ("delayedProcessing", Kind::Whole(0..=INT_MAX)),
    ("windowBuffer", Kind::Whole(0..=INT_MAX)),
    ("minPopWaitTime", Kind::Clamped(0..=60_000)),
    ("retentionEnabled", Kind::Switch),
    ("retentionSeconds", Kind::Whole(0..=INT_MAX)),
    ("completedRetentionSeconds", Kind::Whole(0..=INT_MAX)),
    ("maxWaitTimeSeconds", Kind::Whole(0..=INT_MAX)),
    ("encryptionEnabled", Kind::Switch),
    ("dedupWindowSeconds", Kind::Whole(0..=INT_MAX)),
];

/// The body of a configure, as the document shows it.
pub(super) enum Body {}

impl ToSchema for Body {
    fn name() -> std::borrow::Cow<'static, str> {
        "Configure".into()
    }
}

impl PartialSchema for Body {
    fn schema() -> RefOr<Schema> {
        let name = || ObjectBuilder::new().schema_type(Type::String).max_length(Some(NAME_CHARS_MAX));
        let optional = |name: ObjectBuilder| name.schema_type(SchemaType::from_iter([Type::String, Type::Null]));
        let modes = ObjectBuilder::new().schema_type(Type::String).enum_values(Some(["replace", "merge"]));
        let options = OPTIONS.iter().fold(ObjectBuilder::new(), |all, (name, kind)| all.property(*name, kind.schema()));
        ObjectBuilder::new()
            .property("queue", name().min_length(Some(1)))
            .property("namespace", optional(name()))
            .property("task", optional(name()))
            .property("mode", modes.default(Some("replace".into())))
            .property("options", options.description(Some("Each may also stand at the top level.")))
            .required("queue")
            .into()
    }
}

/// The known options of a request, from its `options` and from its top level.
///
/// # Errors
/// [`Error::Invalid`] naming the option and what it must be.
pub(super) fn read(body: &Map<String, Value>) -> Result<Map<String, Value>, Error> {
    let nested = match body.get("options") {
        None | Some(Value::Null) => &Map::new(),
        Some(Value::Object(options)) => options,
        Some(_) => return Err(Error::invalid("options", "must be an object")),
    };
    let mut read = Map::new();
    for (name, kind) in OPTIONS {
        let value = match (nested.get(*name), body.get(*name)) {
            (None, None) => continue,
            (Some(value), None) | (None, Some(value)) => value,
            (Some(one), Some(other)) if one == other => one,
            _ => return Err(Error::invalid(name, "is given twice, with two values")),
        };
        read.insert((*name).to_owned(), kind.checked(name, value)?);
    }
    Ok(read)
}

impl Kind {
    /// Null stands for the default.
    fn schema(&self) -> ObjectBuilder {
        let nullable = |kind: Type| ObjectBuilder::new().schema_type(SchemaType::from_iter([kind, Type::Null]));
        match self {
            Self::Whole(range) => nullable(Type::Integer).minimum(Some(*range.start())).maximum(Some(*range.end())),
            Self::Clamped(range) => nullable(Type::Integer).description(Some(format!(
                "Moved into the range from {} to {}.",
                range.start(),
                range.end()
            ))),
            Self::Switch => nullable(Type::Boolean),
        }
    }

    /// The value to store. `null` stands for the default and passes.
    fn checked(&self, name: &'static str, value: &Value) -> Result<Value, Error> {
        match (self, value) {
            (_, Value::Null) => Ok(Value::Null),
            (Self::Whole(range), value) => match value.as_i64() {
                Some(number) if range.contains(&number) => Ok(number.into()),
                _ => {
                    let (low, high) = (range.start(), range.end());
                    Err(Error::invalid(name, format!("must be a whole number from {low} to {high}")))
                }
            },
            (Self::Clamped(range), value) => {
                let above = value.as_u64().map(|number| i64::try_from(number).unwrap_or(i64::MAX));
                let number = value.as_i64().or(above);
                let number = number.ok_or_else(|| Error::invalid(name, "must be a whole number"))?;
                Ok(number.clamp(*range.start(), *range.end()).into())
            }
            (Self::Switch, Value::Bool(on)) => Ok((*on).into()),
            (Self::Switch, _) => Err(Error::invalid(name, "must be true or false")),
        }
    }
}
