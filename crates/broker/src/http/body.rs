//! Request bodies: bounded, read whole, parsed by content and never by their declared type.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use serde::Deserialize;
use tokio::time::timeout;

use super::budget::{Budget, Share};
use super::{App, Settings, json};
use crate::error::Error;

/// Deepest nesting of JSON that is stored: what common parsers take.
const DEPTH_MAX: usize = 128;

/// The body as it was sent. Absent is empty.
pub(super) struct RawBody(pub(super) Bytes);

impl FromRequest<Arc<App>> for RawBody {
    type Rejection = Error;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Error> {
        whole(request.into_body(), &app.settings, &app.bodies).await.map(Self)
    }
}

/// Collected by hand: a body in a million small pieces must not cost more memory than its bytes, and one that
/// stops coming must not be waited for.
async fn whole(mut body: Body, settings: &Settings, budget: &Budget) -> Result<Bytes, Error> {
    let pause_max = settings.body_pause_max;
    let mut share = Share::default();
    let mut read = Bytes::new();
    let mut joined = BytesMut::new();
    loop {
        let frame = timeout(pause_max, body.frame()).await.map_err(|_| Error::TooSlow(pause_max))?;
        let Some(frame) = frame else { break };
        // Why it broke off is between the client and its connection; nobody may be left to be told.
        let frame = frame.map_err(|_| Error::BadBody("the request body broke off or is badly framed".to_owned()))?;
        let Ok(data) = frame.into_data() else { continue };
        let bytes = read.len() + joined.len() + data.len();
        if settings.body_bytes_max < bytes {
            return Err(Error::TooLarge("the request body is larger than QUEEN_MAX_BODY_BYTES".to_owned()));
        }
        budget.grow(&mut share, bytes)?;
        if read.is_empty() && joined.is_empty() {
            read = data;
        } else {
            joined.extend_from_slice(&std::mem::take(&mut read));
            joined.extend_from_slice(&data);
        }
    }
    Ok(share.of(if joined.is_empty() { read } else { joined.freeze() }))
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

    /// The body as a JSON object.
    ///
    /// # Errors
    /// [`Error::BadBody`] naming the value that is wrong.
    pub(super) fn json<'a, T: Deserialize<'a>>(&'a self) -> Result<T, Error> {
        json::read(&self.0)
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
