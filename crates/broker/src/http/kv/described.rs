//! Operations as the document shows them; [`super::request`] reads the fields one by one, to name what is wrong.
#![expect(dead_code, reason = "these types only describe")]

use serde_json::Value;
use utoipa::ToSchema;

/// What is to be read or written, and under which condition.
#[derive(ToSchema)]
#[schema(as = KvOperation)]
#[serde(tag = "op", rename_all = "camelCase")]
pub(in crate::http) enum Operation {
    Get(Key),
    GetMany(Keys),
    GetPrefix(Prefix),
    Put(Put),
    PutIfAbsent(PutIfAbsent),
    Delete(Delete),
    Incr(Incr),
}

#[derive(ToSchema)]
#[schema(as = KvGet)]
pub(in crate::http) struct Key {
    #[schema(pattern = "^[a-z0-9][a-z0-9._-]{0,63}$")]
    ns: String,
    #[schema(min_length = 1, max_length = 512)]
    key: String,
}

#[derive(ToSchema)]
#[schema(as = KvGetMany)]
pub(in crate::http) struct Keys {
    #[schema(pattern = "^[a-z0-9][a-z0-9._-]{0,63}$")]
    ns: String,
    #[schema(min_items = 1, max_items = 1024)]
    keys: Vec<String>,
}

/// A page of the keys that begin with `prefix`, in the order of their bytes.
#[derive(ToSchema)]
#[schema(as = KvGetPrefix)]
#[serde(rename_all = "camelCase")]
pub(in crate::http) struct Prefix {
    #[schema(pattern = "^[a-z0-9][a-z0-9._-]{0,63}$")]
    ns: String,
    #[schema(min_length = 1, max_length = 512)]
    prefix: String,
    /// The last key of the page before.
    #[schema(min_length = 1, max_length = 512)]
    after: Option<String>,
    /// Brought into 1 to 1000.
    #[schema(default = 100)]
    limit: Option<i64>,
    keys_only: Option<bool>,
}

/// Exactly one of `ttlSeconds` and `forever` is given.
#[derive(ToSchema)]
#[schema(as = KvPut)]
#[serde(rename_all = "camelCase")]
pub(in crate::http) struct Put {
    #[schema(pattern = "^[a-z0-9][a-z0-9._-]{0,63}$")]
    ns: String,
    #[schema(min_length = 1, max_length = 512)]
    key: String,
    value: Value,
    #[schema(minimum = 1, maximum = 3_155_760_000_i64)]
    ttl_seconds: Option<i64>,
    /// Must be true if it is given.
    forever: Option<bool>,
    /// The version that must be stored; 0 if none may be.
    #[schema(minimum = 0)]
    expect: Option<i64>,
    /// Nothing of the call happens if this does not apply.
    required: Option<bool>,
}

#[derive(ToSchema)]
#[schema(as = KvPutIfAbsent)]
#[serde(rename_all = "camelCase")]
pub(in crate::http) struct PutIfAbsent {
    #[schema(pattern = "^[a-z0-9][a-z0-9._-]{0,63}$")]
    ns: String,
    #[schema(min_length = 1, max_length = 512)]
    key: String,
    value: Value,
    #[schema(minimum = 1, maximum = 3_155_760_000_i64)]
    ttl_seconds: Option<i64>,
    forever: Option<bool>,
    required: Option<bool>,
}

#[derive(ToSchema)]
#[schema(as = KvDelete)]
pub(in crate::http) struct Delete {
    #[schema(pattern = "^[a-z0-9][a-z0-9._-]{0,63}$")]
    ns: String,
    #[schema(min_length = 1, max_length = 512)]
    key: String,
    #[schema(minimum = 0)]
    expect: Option<i64>,
    required: Option<bool>,
}

/// Adds to a number. The expiry counts only if the key is created.
#[derive(ToSchema)]
#[schema(as = KvIncr)]
#[serde(rename_all = "camelCase")]
pub(in crate::http) struct Incr {
    #[schema(pattern = "^[a-z0-9][a-z0-9._-]{0,63}$")]
    ns: String,
    #[schema(min_length = 1, max_length = 512)]
    key: String,
    delta: f64,
    /// The sum must not lie below; otherwise nothing is added.
    min: Option<f64>,
    /// The sum must not lie above.
    max: Option<f64>,
    #[schema(minimum = 1, maximum = 3_155_760_000_i64)]
    ttl_seconds: Option<i64>,
    forever: Option<bool>,
    required: Option<bool>,
}

/// What is to be stored under the key of the path. Exactly one of `ttlSeconds` and `forever` is given.
#[derive(ToSchema)]
#[schema(as = KvValue)]
#[serde(rename_all = "camelCase")]
pub(super) struct Body {
    value: Value,
    #[schema(minimum = 1, maximum = 3_155_760_000_i64)]
    ttl_seconds: Option<i64>,
    forever: Option<bool>,
    #[schema(minimum = 0)]
    expect: Option<i64>,
}
