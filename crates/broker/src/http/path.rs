//! Path segments: percent-decoded after splitting, and refused as JSON like everything else.

use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use crate::error::Error;

/// The captured segments of the path, decoded. What is not UTF-8 after that is a 400.
pub(super) struct Segments<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Segments<T> {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let path: Result<Path<T>, PathRejection> = Path::from_request_parts(parts, state).await;
        path.map(|Path(segments)| Self(segments)).map_err(|error| Error::invalid("path", error.body_text()))
    }
}
