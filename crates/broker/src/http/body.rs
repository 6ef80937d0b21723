//! Request bodies: bounded, read whole, parsed by content and never by their declared type.

use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use bytes::Bytes;
use serde::Deserialize;

use crate::error::Error;

/// The body as it was sent. Absent is empty.
pub(super) struct RawBody(pub(super) Bytes);

impl<S: Send + Sync> FromRequest<S> for RawBody {
    type Rejection = Error;

    async fn from_request(request: Request, state: &S) -> Result<Self, Error> {
        match Bytes::from_request(request, state).await {
            Ok(bytes) => Ok(Self(bytes)),
            Err(rejection) => Err(refused(&rejection)),
        }
    }
}

fn refused(rejection: &BytesRejection) -> Error {
    if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
        Error::TooLarge("the request body is larger than QUEEN_MAX_BODY_BYTES".to_owned())
    } else {
        Error::BadBody(rejection.body_text())
    }
}

impl RawBody {
    /// The body as JSON.
    ///
    /// # Errors
    /// [`Error::BadBody`] with the place of the mistake.
    pub(super) fn json<'a, T: Deserialize<'a>>(&'a self) -> Result<T, Error> {
        serde_json::from_slice(&self.0).map_err(|error| Error::BadBody(error.to_string()))
    }
}
