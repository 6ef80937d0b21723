//! One key by its path, with its version as the entity tag.

use std::sync::Arc;

use axum::Json;
use axum::extract::{RawQuery, State};
use axum::http::header::{ETAG, IF_MATCH, IF_NONE_MATCH};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::value::RawValue;

use super::{App, Coded, Element, Feature, RawBody, Refusal, apply, elements, request};
use crate::db::kv::{Done, Op};
use crate::error::Error;
use crate::http::path::Segments;

/// Answers one value; 404 if there is none.
#[utoipa::path(
    get, path = "/api/v1/kv/{ns}/{*key}",
    responses((status = 200, body = Element), (status = 304), (status = 404, body = Element),
        (status = 400, body = Coded), (status = 500, body = Coded), (status = 503, body = Coded))
)]
pub(super) async fn get(
    State(app): State<Arc<App>>, path: Result<Segments<(String, String)>, Error>, query: RawQuery, headers: HeaderMap,
) -> Response {
    let done = async {
        let op = op("get", path, &query, "{}")?;
        carry_out(&app, op).await
    };
    match done.await {
        Ok((_, Done::Read { found: true, version, .. })) if is_named(&headers, version) => {
            tagged(StatusCode::NOT_MODIFIED.into_response(), version)
        }
        Ok((op, done)) => {
            let status = if is_there(&done) { StatusCode::OK } else { StatusCode::NOT_FOUND };
            answer(status, &op, done)
        }
        Err(refusal) => refusal.answer(Feature::Kv),
    }
}

/// Stores one value, if `If-Match` or `If-None-Match: *` allow it.
#[utoipa::path(
    put, path = "/api/v1/kv/{ns}/{*key}", request_body = super::described::Body,
    responses((status = 200, body = Element), (status = 412, body = Element), (status = 400, body = Coded),
        (status = 413, body = Coded), (status = 500, body = Coded), (status = 503, body = Coded))
)]
pub(super) async fn put(
    State(app): State<Arc<App>>, path: Result<Segments<(String, String)>, Error>, query: RawQuery, headers: HeaderMap,
    body: Result<RawBody, Error>,
) -> Response {
    let written = async {
        let RawBody(body) = body?;
        let text = std::str::from_utf8(&body).map_err(|error| Error::BadBody(error.to_string()))?;
        write(&app, op("put", path, &query, text)?, &headers).await
    };
    written.await.unwrap_or_else(|refusal| refusal.answer(Feature::Kv))
}

/// Deletes one value, if `If-Match` allows it.
#[utoipa::path(
    delete, path = "/api/v1/kv/{ns}/{*key}",
    responses((status = 200, body = Element), (status = 412, body = Element), (status = 400, body = Coded),
        (status = 500, body = Coded), (status = 503, body = Coded))
)]
pub(super) async fn delete(
    State(app): State<Arc<App>>, path: Result<Segments<(String, String)>, Error>, query: RawQuery, headers: HeaderMap,
) -> Response {
    let written = async { write(&app, op("delete", path, &query, "{}")?, &headers).await };
    written.await.unwrap_or_else(|refusal| refusal.answer(Feature::Kv))
}

fn op(
    kind: &str, path: Result<Segments<(String, String)>, Error>, RawQuery(query): &RawQuery, body: &str,
) -> Result<Op, Refusal> {
    let Segments((ns, key)) = path?;
    if query.as_deref().is_some_and(|query| !query.is_empty()) {
        return Err(Error::invalid("query", "is not allowed here").into());
    }
    let body: &RawValue = serde_json::from_str(body).map_err(|error| Error::BadBody(error.to_string()))?;
    request::single(kind, &ns, &key, body)
}

async fn carry_out(app: &App, op: Op) -> Result<(Op, Done), Refusal> {
    let ops = [op];
    let done = apply(app, &ops).await?.pop().expect("one result an operation");
    let [op] = ops;
    Ok((op, done))
}

async fn write(app: &App, mut op: Op, headers: &HeaderMap) -> Result<Response, Refusal> {
    let expected = expected(headers)?;
    if expected.is_some() && op.expect.is_some() {
        return Err(Error::invalid("expect", "must not be given with If-Match or If-None-Match").into());
    }
    op.expect = op.expect.or(expected);
    // Of one operation, required only changes how its failure is told.
    op.required = false;
    let (op, done) = carry_out(app, op).await?;
    let is_refused = expected.is_some() && !is_there(&done);
    Ok(answer(if is_refused { StatusCode::PRECONDITION_FAILED } else { StatusCode::OK }, &op, done))
}

fn is_there(done: &Done) -> bool {
    matches!(done, Done::Read { found: true, .. } | Done::Written { applied: true, .. })
}

fn answer(status: StatusCode, op: &Op, done: Done) -> Response {
    let version = match &done {
        Done::Read { version, .. } | Done::Written { version, .. } => *version,
        Done::Many { .. } | Done::Page { .. } => 0,
    };
    let element = elements(std::slice::from_ref(op), vec![done]).pop().expect("one result an operation");
    let response = (status, Json(element)).into_response();
    if 0 < version { tagged(response, version) } else { response }
}

fn tagged(mut response: Response, version: i64) -> Response {
    let tag = HeaderValue::from_str(&format!("\"{version}\"")).expect("digits in quotes");
    response.headers_mut().insert(ETAG, tag);
    response
}

/// Whether `If-None-Match` names `version`.
fn is_named(headers: &HeaderMap, version: i64) -> bool {
    let Some(tags) = headers.get(IF_NONE_MATCH).and_then(|value| value.to_str().ok()) else { return false };
    tags.split(',')
        .map(|tag| tag.trim().trim_start_matches("W/"))
        .any(|tag| tag == "*" || tag == format!("\"{version}\""))
}

/// The version that the headers ask for; 0 is none.
fn expected(headers: &HeaderMap) -> Result<Option<i64>, Error> {
    match (headers.get(IF_MATCH), headers.get(IF_NONE_MATCH)) {
        (None, None) => Ok(None),
        (None, Some(value)) if value == "*" => Ok(Some(0)),
        (None, Some(_)) => Err(Error::invalid("If-None-Match", "must be *")),
        (Some(value), None) => {
            let tag = value.to_str().ok().and_then(|tag| tag.strip_prefix('"')?.strip_suffix('"'));
            let version = tag.and_then(|tag| tag.parse().ok()).filter(|version| 0 < *version);
            version.map(Some).ok_or_else(|| Error::invalid("If-Match", "must be one entity tag as a GET answers it"))
        }
        (Some(_), Some(_)) => Err(Error::invalid("If-Match", "must not be given with If-None-Match")),
    }
}
