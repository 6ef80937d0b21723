//! A transaction and its answer as the document shows them; [`super::plan`] reads the fields one by one, to name what is wrong.
#![expect(dead_code, reason = "these types only describe")]

use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Outcome;
use crate::http::ack::element;

/// What is to happen together or not at all.
#[derive(ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Transaction {
    #[schema(min_items = 1)]
    operations: Vec<Operation>,
    /// Leases under which acknowledgements that name none are made.
    required_leases: Option<Vec<String>>,
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
    /// Of a failure: `duplicate`, `ack_rejected`, `bad_request`, `payload_too_large` or `db_error`.
    #[schema(required = false)]
    reason: Option<String>,
    #[schema(required = false)]
    error: Option<String>,
    #[schema(value_type = Vec<Outcome<'static>>)]
    results: Vec<Value>,
}
