//! Failures of key/value and timer routes: a code that clients match, a reason, and words.

use axum::Json;
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::metrics;
use crate::error::Error;

/// The feature whose codes a failure has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Feature {
    Kv,
    Timers,
}

/// What is wrong, and the reason by name if there is one more exact than the code.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) reason: Option<&'static str>,
    pub(super) error: Error,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self { reason: None, error }
    }
}

/// A failure with its code.
#[derive(Serialize, ToSchema)]
pub(super) struct Coded {
    /// What clients match: `kv_bad_request`, `timers_bad_request`, `payload_too_large`, `timer_horizon_exceeded`,
    /// `rate_limited`, `kv_quota_exceeded`, `timers_quota_exceeded`, `kv_disabled`, `timers_disabled`, `kv_unavailable`, `timers_unavailable`, `kv_failed` or `timers_failed`.
    error: String,
    /// The same, or more exact: `kv_expiry_not_specified`, `kv_duplicate_key_in_call`, `timers_duplicate_key_in_call`.
    reason: String,
    /// What is wrong, in words.
    detail: String,
}

impl Refusal {
    pub(super) fn answer(&self, feature: Feature) -> Response {
        let (status, code) = code(feature, &self.error);
        if status == StatusCode::INTERNAL_SERVER_ERROR {
            metrics::failed(&self.error);
        }
        let reason = self.reason.unwrap_or(&code).to_owned();
        let mut answer = (status, Json(Coded { reason, detail: self.error.to_string(), error: code })).into_response();
        let again = self.error.retry_after().or((status == StatusCode::SERVICE_UNAVAILABLE).then_some(1));
        if let Some(seconds) = again {
            answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        answer
    }
}

fn code(feature: Feature, error: &Error) -> (StatusCode, String) {
    let named = |what: &str| match feature {
        Feature::Kv => format!("kv_{what}"),
        Feature::Timers => format!("timers_{what}"),
    };
    let status = error.status();
    match error {
        Error::TooLarge(_) => (status, "payload_too_large".to_owned()),
        Error::HorizonExceeded(_) => (status, "timer_horizon_exceeded".to_owned()),
        Error::Paused(code) => (status, code.clone()),
        Error::RateLimited { .. } => (status, "rate_limited".to_owned()),
        Error::QuotaExceeded { code, .. } => (status, (*code).to_owned()),
        Error::Pool
        | Error::Disconnected
        | Error::StatementTimeout
        | Error::LockTimeout
        | Error::Retryable(_)
        | Error::EncryptionChanged => (StatusCode::SERVICE_UNAVAILABLE, named("unavailable")),
        _ if status.is_client_error() => (status, named("bad_request")),
        _ => (status, named("failed")),
    }
}
