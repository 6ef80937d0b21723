//! Twins of `sql/procedures/kv.sql`.

use ebbtide_sweep::StepOutcome;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_postgres::types::{Json, Type};

use super::Sql;
use crate::error::Error;

/// Bytes of values and keys that the lists of one batch answer at most, but for one row each.
pub const READ_BYTES_MAX: i64 = 4 << 20;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Get,
    GetMany,
    GetPrefix,
    Put,
    Delete,
    Incr,
}

/// One operation, checked. Which fields count follows from its kind.
#[derive(Clone, Debug)]
pub struct Op {
    pub kind: Kind,
    /// Whether a put was asked for by the name that says so.
    pub is_if_absent: bool,
    pub ns: String,
    pub key: Option<String>,
    pub keys: Vec<String>,
    pub prefix: Option<String>,
    /// The first text behind all that begin with the prefix; `None` if nothing is.
    pub end: Option<String>,
    pub after: Option<String>,
    pub limit: i32,
    pub keys_only: bool,
    /// JSON, as it was sent.
    pub value: Option<String>,
    /// Seconds; `None` is for ever.
    pub ttl: Option<i64>,
    pub expect: Option<i64>,
    /// A decimal number, and the bounds of the sum.
    pub delta: Option<String>,
    pub min: Option<String>,
    pub max: Option<String>,
    /// Whether nothing of the batch may happen if this does not apply.
    pub required: bool,
}

impl Op {
    /// As `queen.kv_apply_v1` reads it.
    pub(super) fn wire(&self) -> Value {
        let Self { kind, is_if_absent: _, ns, key, keys, prefix, end, after, limit, keys_only, .. } = self;
        let Self { value, ttl, expect, delta, min, max, required, .. } = self;
        match kind {
            Kind::Get => json!({"op": "get", "ns": ns, "key": key}),
            Kind::GetMany => json!({"op": "getMany", "ns": ns, "keys": keys}),
            Kind::GetPrefix => json!({
                "op": "getPrefix", "ns": ns, "prefix": prefix, "end": end, "after": after, "limit": limit,
                "keysOnly": keys_only,
            }),
            Kind::Put => json!({
                "op": "put", "ns": ns, "key": key, "value": value, "ttl": ttl, "expect": expect, "required": required,
            }),
            Kind::Delete => json!({"op": "delete", "ns": ns, "key": key, "expect": expect, "required": required}),
            Kind::Incr => json!({
                "op": "incr", "ns": ns, "key": key, "delta": delta, "min": min, "max": max, "ttl": ttl,
                "required": required,
            }),
        }
    }
}

/// A stored value.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    pub key: String,
    /// JSON, as it was sent; `None` where only keys were asked for.
    #[serde(default)]
    pub value: Option<String>,
    pub version: i64,
    pub expires_at: Option<String>,
    pub updated_at: Option<String>,
}

/// What came of an operation; which variant follows from its kind.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Done {
    #[serde(rename_all = "camelCase")]
    Written {
        applied: bool,
        key: String,
        value: String,
        version: i64,
        reason: Option<String>,
    },
    #[serde(rename_all = "camelCase")]
    Read {
        found: bool,
        key: String,
        value: Option<String>,
        version: i64,
        expires_at: Option<String>,
        updated_at: Option<String>,
    },
    Many {
        rows: Vec<Row>,
        missing: Vec<String>,
        truncated: bool,
    },
    #[serde(rename_all = "camelCase")]
    Page {
        rows: Vec<Row>,
        truncated: bool,
        next_after: Option<String>,
    },
}

/// Why a required operation undid its batch.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Unmet {
    pub failed_index: usize,
    pub kv_reason: String,
    pub version: i64,
    /// JSON.
    pub value: String,
}

/// `queen.kv_apply_v1`: one transaction.
///
/// # Errors
/// [`Error::KvUnmet`], [`Error::Paused`], or whatever else the database answers. Nothing happened then.
pub async fn kv_apply_v1(db: &(impl Sql + Sync), ops: &[Op]) -> Result<Vec<Done>, Error> {
    let query = "select queen.kv_apply_v1($1, $2)";
    let ops: Vec<Value> = ops.iter().map(Op::wire).collect();
    let row = db.row(query, &[(&Json(ops), Type::JSONB), (&READ_BYTES_MAX, Type::INT8)]).await?;
    let Json(done) = row.try_get(0)?;
    Ok(done)
}

/// `queen.kv_sweep_step_v1`: at most one batch of values that expired before `cutoff`; `None` deletes nothing.
///
/// # Errors
/// Whatever the database answers.
pub async fn kv_sweep_step_v1(
    db: &(impl Sql + Sync), cutoff: Option<Timestamp>, rows_max: i32,
) -> Result<StepOutcome, Error> {
    #[derive(Deserialize)]
    struct Swept {
        deleted: u64,
        done: bool,
    }
    let query = "select queen.kv_sweep_step_v1($1, $2)";
    let row = db.row(query, &[(&cutoff, Type::TIMESTAMPTZ), (&rows_max, Type::INT4)]).await?;
    let Json(Swept { deleted, done }) = row.try_get(0)?;
    Ok(StepOutcome { deleted, done })
}

/// Which features are paused, on all servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Paused {
    pub kv: bool,
    pub timers_schedule: bool,
    pub timers_fire: bool,
}

/// `queen.features_paused_v1`
///
/// # Errors
/// Whatever the database answers.
pub async fn features_paused_v1(db: &(impl Sql + Sync)) -> Result<Paused, Error> {
    let query = "select o_kv, o_timers_schedule, o_timers_fire from queen.features_paused_v1()";
    let row = db.row(query, &[]).await?;
    Ok(Paused { kv: row.try_get(0)?, timers_schedule: row.try_get(1)?, timers_fire: row.try_get(2)? })
}

/// `queen.pause_features_v1`: `None` leaves a feature as it is.
///
/// # Errors
/// Whatever the database answers.
pub async fn pause_features_v1(
    db: &(impl Sql + Sync), kv: Option<bool>, timers_schedule: Option<bool>, timers_fire: Option<bool>,
) -> Result<(), Error> {
    let query = "select queen.pause_features_v1($1, $2, $3)";
    db.row(query, &[(&kv, Type::BOOL), (&timers_schedule, Type::BOOL), (&timers_fire, Type::BOOL)]).await?;
    Ok(())
}
