//! Who may do what: each request's token ─► its roles ─► what its route asks for.

mod access;

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::{FromRequestParts, MatchedPath, Request, State};
use axum::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use metrics::counter;
use tracing::debug;

use crate::auth::{Auth, Identity};
use crate::error::Error;
pub(super) use access::roles;
use access::{Access, access};

/// Lets through what the token's roles allow, and says who sent it.
pub(super) async fn guard(
    State(auth): State<Arc<Auth>>, route: MatchedPath, mut request: Request, next: Next,
) -> Response {
    let access = access(request.method(), route.as_str());
    if access == Access::Public || auth.skips(request.uri().path()) {
        return next.run(request).await;
    }
    match admitted(&auth, access, request.headers()).await {
        Ok(identity) => {
            request.extensions_mut().insert(Producer(identity.subject));
            next.run(request).await
        }
        Err(error) => refused(route.as_str(), error),
    }
}

async fn admitted(auth: &Auth, access: Access, headers: &HeaderMap) -> Result<Identity, Error> {
    let identity = auth.identify(token(headers)?).await?;
    if access.is_open_to(identity.roles) { Ok(identity) } else { Err(Error::Forbidden) }
}

/// The token, after `Bearer` or bare.
fn token(headers: &HeaderMap) -> Result<&str, Error> {
    const MISSING: Error = Error::Unauthenticated("Authentication required");
    let mut given = headers.get_all(AUTHORIZATION).iter();
    let (Some(value), None) = (given.next(), given.next()) else { return Err(MISSING) };
    let value = value.to_str().map_err(|_| Error::Unauthenticated("the token is not a JWT"))?.trim();
    let token = match value.split_once(char::is_whitespace) {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("bearer") => rest.trim(),
        Some(_) => return Err(MISSING),
        None if value.eq_ignore_ascii_case("bearer") => "",
        None => value,
    };
    if token.is_empty() { Err(MISSING) } else { Ok(token) }
}

/// Not logged as a failure: it is the client's, or the fetch of the keys has said why.
fn refused(route: &str, error: Error) -> Response {
    let status = error.status();
    counter!("ebbtide_auth_refused_total", "status" => status.as_str().to_owned()).increment(1);
    debug!(target: "http", route, %error, "request refused");
    let is_challenge = matches!(error, Error::Unauthenticated(_));
    let mut response = error.into_response();
    if is_challenge {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

/// The `sub` of the token: who pushes what this request pushes. `None` without a token.
#[derive(Clone, Default)]
pub(super) struct Producer(pub(super) Option<Arc<str>>);

impl<S: Send + Sync> FromRequestParts<S> for Producer {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(value: &str) -> Option<String> {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, value.parse().expect("a header"));
        token(&headers).ok().map(str::to_owned)
    }

    #[test]
    fn a_token_comes_after_bearer_or_alone() {
        for value in ["Bearer a.b.c", "bearer a.b.c", "BEARER   a.b.c ", "a.b.c"] {
            assert_eq!(of(value).as_deref(), Some("a.b.c"), "{value}");
        }
        for value in ["", "Bearer", "Bearer ", "Basic a.b.c"] {
            assert_eq!(of(value), None, "{value}");
        }
        let mut two = HeaderMap::new();
        two.append(AUTHORIZATION, HeaderValue::from_static("a.b.c"));
        two.append(AUTHORIZATION, HeaderValue::from_static("d.e.f"));
        assert!(token(&two).is_err(), "which one counts must not be a matter of taste");
    }
}
