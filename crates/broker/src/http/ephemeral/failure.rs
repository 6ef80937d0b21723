//! Failures of ephemeral queues, with the codes that clients branch on.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};

use super::super::metrics;
use crate::ephemeral::Refusal;
use crate::error::Error;

/// A failure of this family: clients branch on its code.
pub(in crate::http) struct Failure {
    status: StatusCode,
    code: &'static str,
    text: String,
    retry_after: u64,
}

impl Failure {
    fn new(status: StatusCode, code: &'static str, text: String) -> Self {
        Self { status, code, text, retry_after: 1 }
    }

    pub(super) fn paused(text: String) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "ephemeral_disabled", text)
    }

    pub(super) fn unknown_queue() -> Self {
        let text = "there is no such ephemeral queue on this server".to_owned();
        Self::new(StatusCode::NOT_FOUND, "ephemeral_queue_not_found", text)
    }

    pub(super) fn bad(text: String) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "ephemeral_bad_request", text)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = error.status();
        if error.is_away() {
            metrics::failed(&error);
            let text = "the database that keeps the options does not answer".to_owned();
            return Self::new(StatusCode::SERVICE_UNAVAILABLE, "ephemeral_unavailable", text);
        }
        if status.is_server_error() {
            metrics::failed(&error);
        }
        let code = match &error {
            Error::RateLimited { .. } => "rate_limited",
            _ if status.is_client_error() => "ephemeral_bad_request",
            _ => "ephemeral_unavailable",
        };
        Self { status, code, text: error.to_string(), retry_after: error.retry_after().unwrap_or(1) }
    }
}

impl From<PathRejection> for Failure {
    fn from(rejection: PathRejection) -> Self {
        Self::bad(rejection.body_text())
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        let (status, code, text) = match refusal {
            Refusal::QueueFull => {
                (StatusCode::TOO_MANY_REQUESTS, "queue_full", "the queue has no room for these messages".to_owned())
            }
            Refusal::ServerFull => {
                let text = "ephemeral queues take all the memory that they may (QUEEN_EPHEMERAL_MAX_BYTES)";
                (StatusCode::SERVICE_UNAVAILABLE, "ephemeral_unavailable", text.to_owned())
            }
            Refusal::TooMany(what) => {
                (StatusCode::FORBIDDEN, "ephemeral_quota_exceeded", format!("there are too many {what}"))
            }
            Refusal::TooManyWaiting => {
                let text = "too many pops wait on this server".to_owned();
                (StatusCode::TOO_MANY_REQUESTS, "rate_limited", text)
            }
        };
        Self::new(status, code, text)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let Self { status, code, text, retry_after } = self;
        let mut response = (status, Json(serde_json::json!({"error": text, "code": code}))).into_response();
        if status == StatusCode::TOO_MANY_REQUESTS || status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(retry_after));
        }
        response
    }
}
