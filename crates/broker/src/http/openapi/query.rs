//! Query parameters as the document lists them: from the same names, ranges and defaults that handlers read them by.

use std::ops::RangeInclusive;

use serde_json::Value;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, SchemaFormat, Type};

use crate::id::NAME_CHARS_MAX;

/// One parameter.
pub(in crate::http) struct Query {
    name: &'static str,
    about: &'static str,
    schema: ObjectBuilder,
}

/// Names a set of query parameters, to be listed in a handler's `params(…)`: one parameter a line, as
/// `kind("name", …, "what it is for")`, with `.or(value)` if there is a default. The kinds are the functions of
/// [`crate::http::openapi::query`].
macro_rules! query {
    ($(#[$about:meta])* $vis:vis $set:ident: $($kind:ident($($given:expr),+ $(,)?) $(.or($default:expr))?),+ $(,)?) => {
        $(#[$about])*
        $vis enum $set {}

        impl utoipa::IntoParams for $set {
            fn into_params(
                _: impl Fn() -> Option<utoipa::openapi::path::ParameterIn>,
            ) -> Vec<utoipa::openapi::path::Parameter> {
                vec![$($crate::http::openapi::query::$kind($($given),+)$(.or($default))?.into()),+]
            }
        }
    };
}
pub(in crate::http) use query;

fn new(name: &'static str, kind: Type, about: &'static str) -> Query {
    Query { name, about, schema: ObjectBuilder::new().schema_type(kind) }
}

/// Any text.
pub(in crate::http) fn text(name: &'static str, about: &'static str) -> Query {
    new(name, Type::String, about)
}

/// A name that a queue, partition or group can have.
pub(in crate::http) fn name(name: &'static str, about: &'static str) -> Query {
    let mut query = text(name, about);
    query.schema = query.schema.max_length(Some(NAME_CHARS_MAX));
    query
}

/// An ISO 8601 time.
pub(in crate::http) fn time(name: &'static str, about: &'static str) -> Query {
    let mut query = text(name, about);
    query.schema = query.schema.format(Some(SchemaFormat::KnownFormat(KnownFormat::DateTime)));
    query
}

/// One of some words.
pub(in crate::http) fn word(name: &'static str, words: &[&'static str], about: &'static str) -> Query {
    let mut query = text(name, about);
    query.schema = query.schema.enum_values(Some(words.iter().copied()));
    query
}

/// `true` or `false`.
pub(in crate::http) fn flag(name: &'static str, about: &'static str) -> Query {
    new(name, Type::Boolean, about)
}

/// A whole number; outside its range it is refused.
pub(in crate::http) fn integer(name: &'static str, range: RangeInclusive<i64>, about: &'static str) -> Query {
    let mut query = new(name, Type::Integer, about);
    query.schema =
        query.schema.minimum(Some(*range.start())).format(Some(SchemaFormat::KnownFormat(KnownFormat::Int64)));
    if *range.end() < i64::MAX {
        query.schema = query.schema.maximum(Some(*range.end()));
    }
    query
}

/// A whole number that is brought into its range and never refused for lying outside.
pub(in crate::http) fn whole(name: &'static str, about: &'static str) -> Query {
    let mut query = new(name, Type::Integer, about);
    query.schema = query.schema.format(Some(SchemaFormat::KnownFormat(KnownFormat::Int64)));
    query
}

impl Query {
    /// What counts where the parameter is not given.
    pub(in crate::http) fn or(mut self, default: impl Into<Value>) -> Self {
        self.schema = self.schema.default(Some(default.into()));
        self
    }
}

impl From<Query> for Parameter {
    fn from(Query { name, about, schema }: Query) -> Self {
        ParameterBuilder::new()
            .name(name)
            .parameter_in(ParameterIn::Query)
            .description(Some(about))
            .schema(Some(schema))
            .build()
    }
}
