//! Key/value routes: batches, and one key by its path.

mod described;
mod request;
mod single;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::value::RawValue;
use tracing::debug;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::body::RawBody;
use super::coded::{Coded, Feature, Refusal};
use super::json::Operations;
use crate::db::kv::{Done, Kind, Op, Row, Unmet, kv_apply_v1};
use crate::error::Error;
use crate::quota::KvDemand;
pub(super) use described::Operation;
pub(super) use request::{Limits, ops};

/// Tries for a batch that lost a race, the first included.
const TRIES_MAX: usize = 5;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(batch)).routes(routes!(single::get, single::put, single::delete))
}

/// One element of an answer; which fields there are follows from the operation.
#[derive(Serialize, ToSchema)]
#[schema(as = KvResult)]
#[serde(rename_all = "camelCase")]
pub(super) struct Element {
    /// Position of the element among all.
    index: usize,
    /// Position among the operations of its kind, in a transaction.
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    op_index: Option<usize>,
    op: &'static str,
    /// Of a read: whether there is a value.
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    found: Option<bool>,
    /// Of a write: whether it happened.
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    applied: Option<bool>,
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    /// As it was stored; after a write that did not happen, what is stored instead.
    #[schema(value_type = serde_json::Value, required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<Box<RawValue>>,
    /// 0 where there is no value.
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<i64>,
    /// Null is never.
    #[schema(value_type = Option<String>, required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<Option<String>>,
    #[schema(value_type = Option<String>, required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    updated_at: Option<Option<String>>,
    /// Why a write did not happen: `exists`, `version`, `absent`, `limit` or `type`.
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<Vec<Shown>>,
    /// Keys asked for that have no value.
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<Vec<String>>,
    /// Whether there is more than the rows show.
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    truncated: Option<bool>,
    /// What `after` has to be for the next page.
    #[schema(value_type = Option<String>, required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    next_after: Option<Option<String>>,
}

impl Element {
    /// The same in a transaction, where `before` elements stand before all of its kind.
    pub(super) fn riding(self, before: usize) -> Self {
        Self { index: before + self.index, op_index: Some(self.index), ..self }
    }
}

/// A stored value.
#[derive(Serialize, ToSchema)]
#[schema(as = KvRow)]
#[serde(rename_all = "camelCase")]
struct Shown {
    key: String,
    #[schema(value_type = serde_json::Value, required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<Box<RawValue>>,
    version: i64,
    expires_at: Option<String>,
    updated_at: Option<String>,
}

/// What became of a batch: its results, or why a required operation undid it.
#[derive(Serialize, ToSchema)]
#[schema(as = KvAnswer)]
#[serde(rename_all = "camelCase")]
struct Answer {
    /// In the order of the operations.
    #[schema(required = false)]
    results: Vec<Element>,
    /// False if nothing happened.
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    ok: Option<bool>,
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    /// The operation that did not apply.
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    failed_index: Option<usize>,
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_reason: Option<String>,
    #[schema(required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<i64>,
    #[schema(value_type = serde_json::Value, required = false)]
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<Box<RawValue>>,
}

/// Carries out operations in their order, in one transaction.
#[utoipa::path(
    post, path = "/api/v1/kv", request_body = Operations<Operation>,
    responses((status = 200, body = Answer), (status = 400, body = Coded), (status = 403, body = Coded),
        (status = 413, body = Coded), (status = 429, body = Coded), (status = 500, body = Coded),
        (status = 503, body = Coded))
)]
async fn batch(State(app): State<Arc<App>>, body: Result<RawBody, Error>) -> Response {
    match carry_out(&app, body).await {
        Ok(answer) => Json(answer).into_response(),
        Err(refusal) => refusal.answer(Feature::Kv),
    }
}

async fn carry_out(app: &App, body: Result<RawBody, Error>) -> Result<Answer, Refusal> {
    let RawBody(body) = body?;
    let ops = ops(&Operations::<()>::read(&body)?, Limits::ALONE)?;
    let nothing = Answer {
        results: Vec::new(),
        ok: None,
        reason: None,
        failed_index: None,
        kv_reason: None,
        version: None,
        value: None,
    };
    match apply(app, &ops).await {
        Ok(done) => Ok(Answer { results: elements(&ops, done), ..nothing }),
        Err(Error::KvUnmet(text)) => {
            let Unmet { failed_index, kv_reason, version, value } = unmet(&text)?;
            Ok(Answer {
                ok: Some(false),
                reason: Some("kv_precondition"),
                failed_index: Some(failed_index),
                kv_reason: Some(kv_reason),
                version: Some(version),
                value: Some(raw(value)),
                ..nothing
            })
        }
        Err(error) => Err(error.into()),
    }
}

async fn apply(app: &App, ops: &[Op]) -> Result<Vec<Done>, Error> {
    app.quotas.admit_kv(demand(ops))?;
    let conn = app.db.conn().await?;
    let mut tries = 1;
    loop {
        match kv_apply_v1(&conn, ops).await {
            Err(error) if error.is_retryable() && tries < TRIES_MAX => {
                debug!(target: "http", %error, tries, "key/value batch again");
                tries += 1;
            }
            result => return result,
        }
    }
}

/// What the quotas are asked for.
pub(super) fn demand(ops: &[Op]) -> KvDemand {
    let mut demand = KvDemand::default();
    for op in ops {
        match op.kind {
            Kind::Get | Kind::GetMany | Kind::GetPrefix => demand.reads += 1,
            Kind::Put | Kind::Incr => (demand.writes, demand.adds) = (demand.writes + 1, true),
            Kind::Delete => demand.writes += 1,
        }
    }
    demand
}

/// # Errors
/// [`Error::Corrupt`] if it is not what the function writes.
pub(super) fn unmet(text: &str) -> Result<Unmet, Error> {
    serde_json::from_str(text).map_err(|error| Error::Corrupt(format!("unmet precondition: {error}")))
}

/// Stored JSON as JSON.
pub(super) fn raw(json: String) -> Box<RawValue> {
    RawValue::from_string(json).unwrap_or_else(|_| {
        // Somebody changed the row by hand; what is no JSON must not spoil the answer.
        RawValue::from_string("null".to_owned()).expect("is JSON")
    })
}

/// The answers to `ops`, in their order.
pub(super) fn elements(ops: &[Op], done: Vec<Done>) -> Vec<Element> {
    assert_eq!(ops.len(), done.len(), "one result an operation");
    ops.iter().zip(done).enumerate().map(|(index, (op, done))| element(index, op, done)).collect()
}

fn element(index: usize, op: &Op, done: Done) -> Element {
    let nothing = Element {
        index,
        op_index: None,
        op: name(op),
        found: None,
        applied: None,
        key: None,
        value: None,
        version: None,
        expires_at: None,
        updated_at: None,
        reason: None,
        rows: None,
        missing: None,
        truncated: None,
        next_after: None,
    };
    match done {
        Done::Written { applied, key, value, version, reason } => Element {
            applied: Some(applied),
            key: Some(key),
            value: Some(raw(value)),
            version: Some(version),
            reason,
            ..nothing
        },
        Done::Read { found, key, value, version, expires_at, updated_at } => Element {
            found: Some(found),
            key: Some(key),
            value: Some(raw(value.unwrap_or_else(|| "null".to_owned()))),
            version: Some(version),
            expires_at: Some(expires_at),
            updated_at: Some(updated_at),
            ..nothing
        },
        Done::Many { rows, missing, truncated } => {
            Element { rows: Some(shown(rows)), missing: Some(missing), truncated: Some(truncated), ..nothing }
        }
        Done::Page { rows, truncated, next_after } => {
            Element { rows: Some(shown(rows)), truncated: Some(truncated), next_after: Some(next_after), ..nothing }
        }
    }
}

/// As the client called it.
fn name(op: &Op) -> &'static str {
    match op.kind {
        Kind::Get => "get",
        Kind::GetMany => "getMany",
        Kind::GetPrefix => "getPrefix",
        Kind::Put if op.is_if_absent => "putIfAbsent",
        Kind::Put => "put",
        Kind::Delete => "delete",
        Kind::Incr => "incr",
    }
}

fn shown(rows: Vec<Row>) -> Vec<Shown> {
    let shown = |Row { key, value, version, expires_at, updated_at }: Row| Shown {
        key,
        value: value.map(raw),
        version,
        expires_at,
        updated_at,
    };
    rows.into_iter().map(shown).collect()
}

/// How a transaction says that a required operation did not apply. The value stays as it was stored.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct UnmetBody {
    #[serde(flatten)]
    body: serde_json::Value,
    ok: bool,
    failed_index: usize,
    kv_reason: String,
    version: i64,
    value: Box<RawValue>,
}

impl UnmetBody {
    /// `steps` elements stand before those of the operations.
    pub(super) fn new(body: serde_json::Value, unmet: Unmet, steps: usize) -> Self {
        let Unmet { failed_index, kv_reason, version, value } = unmet;
        Self { body, ok: false, failed_index: steps + failed_index, kv_reason, version, value: raw(value) }
    }
}
