//! `/openapi.json`: put together from what stands at the handlers, and completed with what all of them share.

pub(super) mod query;

use std::sync::{Arc, LazyLock};

use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use utoipa::openapi::path::{Operation, Parameter, ParameterBuilder, ParameterIn, PathItem};
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, SchemaFormat, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Components, Content, Header, InfoBuilder, OpenApi, Ref, RefOr, Required};
use utoipa::{PartialSchema, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{App, auth};

/// What the document calls the tokens.
const TOKEN: &str = "token";
/// The error statuses of a route that needs a token, on a server that asks for them.
const WITH_TOKEN: [StatusCode; 3] = [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN, StatusCode::SERVICE_UNAVAILABLE];
/// The error statuses that any route may answer.
const ANYWHERE: [StatusCode; 2] = [StatusCode::BAD_REQUEST, StatusCode::INTERNAL_SERVER_ERROR];
/// Those that any route with a body may answer.
const WITH_BODY: [StatusCode; 3] =
    [StatusCode::REQUEST_TIMEOUT, StatusCode::PAYLOAD_TOO_LARGE, StatusCode::SERVICE_UNAVAILABLE];
/// Those after which the same request may succeed; `Retry-After` says when.
const PASSING: [StatusCode; 2] = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];

/// How the HTTP layer itself refuses, without a body, what is too long to be read.
const TOO_LONG: [StatusCode; 2] = [StatusCode::URI_TOO_LONG, StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE];

/// Computed once: it is the same for every server of this version.
static DOCUMENT: LazyLock<Bytes> =
    LazyLock::new(|| super::families().into_openapi().to_json().expect("texts and numbers become JSON").into());

/// The answer to a request that failed as a whole. Some routes say more in it.
#[derive(ToSchema)]
#[expect(dead_code, reason = "errors are written in one place, and not as a structure")]
struct Refusal {
    /// What is wrong, by the name of the field and its range where one is at fault.
    error: String,
    /// Says that there is no such route.
    code: Option<String>,
}

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(document))
}

/// This document.
#[utoipa::path(get, path = "/openapi.json", responses((status = 200, body = serde_json::Value)))]
async fn document() -> Response {
    const JSON: HeaderValue = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, JSON)], DOCUMENT.clone()).into_response()
}

/// Adds the routes of one family, under its heading.
///
/// # Panics
/// If two families give different types the same name.
pub(super) fn family(
    all: OpenApiRouter<Arc<App>>, (tag, mut routes): (&str, OpenApiRouter<Arc<App>>),
) -> OpenApiRouter<Arc<App>> {
    let document = routes.get_openapi_mut();
    for operation in document.paths.paths.values_mut().flat_map(operations) {
        operation.tags = Some(vec![tag.to_owned()]);
        let name = operation.operation_id.take().unwrap_or_default();
        operation.operation_id = Some(format!("{}_{name}", tag.to_lowercase().replace(' ', "_")));
    }
    let known = all.get_openapi().components.as_ref().map(|components| &components.schemas);
    for (name, schema) in document.components.iter().flat_map(|components| &components.schemas) {
        let other = known.and_then(|known| known.get(name)).filter(|other| *other != schema);
        assert!(other.is_none(), "two wire types are called {name}; give one another name with #[schema(as = …)]");
    }
    all.merge(routes)
}

/// Completes what the handlers say of themselves.
pub(super) fn complete(document: &mut OpenApi) {
    document.info = InfoBuilder::new()
        .title("Ebbtide")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some("Messages on PostgreSQL. The routes are explained in docs/http.md."))
        .build();
    let paths = std::mem::take(&mut document.paths.paths);
    // In a document a wildcard is a parameter like others.
    document.paths.paths = paths.into_iter().map(|(path, item)| (path.replace("{*", "{"), item)).collect();
    for (path, item) in &mut document.paths.paths {
        name_access(path, item);
        for operation in operations(item) {
            name_segments(path, operation);
            name_failures(operation);
        }
    }
    let components = document.components.get_or_insert_with(Components::new);
    components.schemas.insert(Refusal::name().into_owned(), Refusal::schema());
    let token = HttpBuilder::new()
        .scheme(HttpAuthScheme::Bearer)
        .bearer_format("JWT")
        .description(Some("Asked for where the server runs with JWT_ENABLED."))
        .build();
    components.add_security_scheme(TOKEN, SecurityScheme::Http(token));
}

/// Which roles may call what, and how a token is refused. A server without tokens lets everybody.
fn name_access(path: &str, item: &mut PathItem) {
    let PathItem { get, put, post, delete, patch, .. } = item;
    for (method, operation) in
        [(Method::GET, get), (Method::PUT, put), (Method::POST, post), (Method::DELETE, delete), (Method::PATCH, patch)]
    {
        let Some(operation) = operation else { continue };
        let roles = auth::roles(&method, path);
        if roles.is_empty() {
            continue;
        }
        let words = format!("Where tokens are asked for, one of these roles is needed: {}.", roles.join(", "));
        let given = operation.description.take().filter(|given| !given.is_empty());
        operation.description = Some(given.map_or_else(|| words.clone(), |given| format!("{given}\n\n{words}")));
        operation.security =
            Some(vec![SecurityRequirement::new::<_, [&str; 0], &str>(TOKEN, []), SecurityRequirement::default()]);
        for status in WITH_TOKEN {
            let responses = &mut operation.responses.responses;
            let absent = || RefOr::T(utoipa::openapi::Response::default());
            responses.entry(status.as_str().to_owned()).or_insert_with(absent);
        }
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [&mut item.get, &mut item.put, &mut item.post, &mut item.delete, &mut item.patch].into_iter().flatten()
}

/// The segments of the path that stand for something.
fn name_segments(path: &str, operation: &mut Operation) {
    let names = path.split('{').skip(1).filter_map(|rest| rest.split('}').next());
    let segments = names.map(|name| RefOr::T(segment(name)));
    let given = operation.parameters.take().unwrap_or_default();
    operation.parameters = Some(segments.chain(given).collect());
}

fn segment(name: &str) -> Parameter {
    let text = ObjectBuilder::new().schema_type(Type::String).min_length(Some(1));
    let schema = match name {
        "partitionId" => text.format(Some(SchemaFormat::KnownFormat(KnownFormat::Uuid))),
        // Of a value or a timer; its 512 are bytes.
        "key" => text.max_length(Some(512)),
        "ns" => text.pattern(Some("^[a-z0-9][a-z0-9._-]{0,63}$")),
        "transactionId" => text.max_length(Some(crate::id::TRANSACTION_ID_BYTES_MAX)),
        _ => text.max_length(Some(crate::id::NAME_CHARS_MAX)),
    };
    ParameterBuilder::new()
        .name(name)
        .parameter_in(ParameterIn::Path)
        .required(Required::True)
        .schema(Some(schema))
        .build()
}

/// Adds the failures that a handler need not mention, and gives all of them their body.
fn name_failures(operation: &mut Operation) {
    let with_body: &[StatusCode] = if operation.request_body.is_some() { &WITH_BODY } else { &[] };
    let has_parameters = operation.parameters.as_ref().is_some_and(|parameters| !parameters.is_empty());
    let too_long: &[StatusCode] = if has_parameters { &TOO_LONG } else { &[] };
    let responses = &mut operation.responses.responses;
    for status in ANYWHERE.iter().chain(with_body).chain(too_long) {
        responses.entry(status.as_str().to_owned()).or_insert_with(|| RefOr::T(utoipa::openapi::Response::default()));
    }
    for (status, response) in responses {
        let RefOr::T(response) = response else { continue };
        let status: StatusCode = status.parse().expect("handlers name whole statuses");
        if response.description.is_empty() {
            response.description = status.canonical_reason().unwrap_or_default().to_owned();
        }
        if PASSING.contains(&status) {
            let mut seconds = Header::new(ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(1)));
            seconds.description = Some("Seconds.".to_owned());
            response.headers.insert("Retry-After".to_owned(), seconds.into());
        }
        let is_failure = status.is_client_error() || status.is_server_error();
        if is_failure && response.content.is_empty() && !TOO_LONG.contains(&status) {
            let schema = Ref::from_schema_name(Refusal::name());
            response.content.insert("application/json".to_owned(), Content::new(Some(schema)).into());
        }
    }
}
