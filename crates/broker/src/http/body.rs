//! Request bodies: bounded, read whole, parsed by content and never by their declared type.

use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use bytes::Bytes;
use serde::Deserialize;

use crate::error::Error;

/// Deepest nesting of JSON that is stored: what common parsers take.
const DEPTH_MAX: usize = 128;

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
    /// The body as a JSON object; absent is an empty one. A list would fill the fields of `T` in their order.
    ///
    /// # Errors
    /// [`Error::BadBody`] with the place of the mistake.
    pub(super) fn object<'a, T: Default + Deserialize<'a>>(&'a self) -> Result<T, Error> {
        match self.0.trim_ascii_start().first() {
            None => Ok(T::default()),
            Some(b'[') => Err(Error::BadBody("must be an object".to_owned())),
            Some(_) => self.json(),
        }
    }

    /// The body as JSON.
    ///
    /// # Errors
    /// [`Error::BadBody`] with the place of the mistake.
    pub(super) fn json<'a, T: Deserialize<'a>>(&'a self) -> Result<T, Error> {
        serde_json::from_slice(&self.0).map_err(|error| Error::BadBody(error.to_string()))
    }
}

/// Stored JSON, refused if a reader's parser could not take it.
///
/// # Errors
/// [`Error::Invalid`] naming `field` and how deep it nests.
pub(super) fn checked_depth<'a>(field: &'static str, json: &'a str) -> Result<&'a str, Error> {
    let depth = nesting(json);
    if depth > DEPTH_MAX {
        return Err(Error::invalid(field, format!("must nest at most {DEPTH_MAX} deep, nests {depth}")));
    }
    Ok(json)
}

/// How deep arrays and objects are nested in valid JSON.
fn nesting(json: &str) -> usize {
    let opens = json.bytes().filter(|b| matches!(b, b'[' | b'{')).count();
    if opens <= DEPTH_MAX {
        return opens; // an upper bound, and enough to let it pass
    }
    let (mut depth, mut deepest) = (0_usize, 0);
    let mut bytes = json.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'[' | b'{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' => depth -= 1,
            b'"' => skip_string(&mut bytes),
            _ => {}
        }
    }
    deepest
}

fn skip_string(bytes: &mut std::str::Bytes<'_>) {
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => return,
            b'\\' => {
                bytes.next();
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nesting_counts_levels_and_not_brackets() {
        assert_eq!(nesting(&"[".repeat(128)), 128);
        let deep = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        assert_eq!(nesting(&deep(129)), 129);
        assert_eq!(nesting(&deep(100_000)), 100_000);
        let wide = format!("[{}]", vec![r#"{"a":"[[\"[{"}"#; 300].join(","));
        assert_eq!(nesting(&wide), 2);
    }
}
