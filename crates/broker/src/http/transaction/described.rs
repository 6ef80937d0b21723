//! A transaction and its answer as the document shows them; [`super::plan`] reads the fields one by one, to name what is wrong.
#![expect(dead_code, reason = "these types only describe")]

use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Outcome;
use crate::http::ack::element;
use crate::http::{kv, timers};

/// What is to happen together or not at all.
#[derive(ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Transaction {
    /// May be left out if something rides along.
    operations: Option<Vec<Operation>>,
    /// Leases under which acknowledgements that name none are made.
    required_leases: Option<Vec<String>>,
    /// Key/value operations that ride along; no getPrefix, and at most 256 keys.
    #[schema(max_items = 64)]
    kv: Option<Vec<kv::Operation>>,
    /// Timer operations that ride along.
    #[schema(max_items = 256)]
    timers: Option<Vec<timers::Operation>>,
}

#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Operation {
    Ack(element::Wire<'static>),
    Push(Push),
}

/// Messages: those in `items`, or the one that the operation itself is.
#[derive(ToSchema)]
#[schema(as = TransactionPush)]
#[serde(rename_all = "camelCase")]
struct Push {
    #[schema(min_items = 1)]
    items: Vec<Item>,
}

#[derive(ToSchema)]
#[schema(as = TransactionItem)]
#[serde(rename_all = "camelCase")]
struct Item {
    #[schema(min_length = 1, max_length = 255)]
    queue: String,
    #[schema(min_length = 1, max_length = 255, default = "Default")]
    partition: Option<String>,
    /// May be called `data`.
    payload: Value,
    #[schema(min_length = 1, max_length = 65_535)]
    transaction_id: Option<String>,
    trace_id: Option<Uuid>,
}

/// What happened: everything, or nothing and why.
#[derive(ToSchema)]
#[schema(as = TransactionAnswer)]
#[serde(rename_all = "camelCase")]
pub(super) struct Answer {
    transaction_id: Uuid,
    success: bool,
    /// Of a failure: `duplicate`, `ack_rejected`, `kv_precondition`, `bad_request`, `payload_too_large`,
    /// `timer_horizon_exceeded`, `kv_disabled`, `timers_disabled` or `db_error`.
    #[schema(required = false)]
    reason: Option<String>,
    #[schema(required = false)]
    error: Option<String>,
    #[schema(value_type = Vec<Outcome<'static>>)]
    results: Vec<Value>,
    /// False with `kv_precondition`.
    #[schema(required = false)]
    ok: Option<bool>,
    /// With `kv_precondition`: the element that did not apply, counted among all results.
    #[schema(required = false)]
    failed_index: Option<usize>,
    #[schema(required = false)]
    kv_reason: Option<String>,
    #[schema(required = false)]
    version: Option<i64>,
    #[schema(required = false)]
    value: Value,
    /// Of a feature that is paused, the same as `reason`.
    #[schema(required = false)]
    code: Option<String>,
}
