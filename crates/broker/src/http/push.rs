//! Routes of push.

mod request;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::App;
use super::auth::Producer;
use super::body::RawBody;
use crate::bundle::{Answer, Outcome};
use crate::error::Error;
use request::{Body as Wire, Place, Push};

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(push))
}

/// Stores messages; those of one partition together or not at all, in order.
#[utoipa::path(
    post, path = "/api/v1/push", request_body = Wire<'_>, responses((status = 201, body = Vec<Item<'_>>), (status = 429), (status = 503))
)]
async fn push(
    State(app): State<Arc<App>>, Producer(producer): Producer, RawBody(body): RawBody,
) -> Result<Response, Error> {
    let Push { groups, places } = Push::parse(&body, producer)?;
    drop(body);
    let names: Vec<_> = groups.iter().map(|group| group.name.clone()).collect();
    let answers = app.spool.push(groups).await?;
    if let Some(error) = whole_failure(&answers) {
        return Ok(super::failed(&error));
    }
    let mut queued_by_queue = BTreeMap::new();
    for (name, answer) in names.iter().zip(&answers) {
        let outcomes = answer.as_ref().map(Vec::as_slice).unwrap_or_default();
        let queued = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Queued(_))).count();
        *queued_by_queue.entry(name.queue()).or_default() += queued as u64;
    }
    queued_by_queue.iter().for_each(|(queue, queued)| app.telemetry.pushed(queue, *queued));
    let items: Vec<Item<'_>> = places
        .iter()
        .enumerate()
        .map(|(index, place)| Item::new(index, place, names[place.group].queue(), &answers))
        .collect();
    let json = serde_json::to_vec(&items).expect("texts and numbers become JSON");
    Ok((StatusCode::CREATED, [(header::CONTENT_TYPE, "application/json")], Body::from(json)).into_response())
}

/// A client that pushes from a buffer looks only at the status: nothing stored must not look like success.
fn whole_failure(answers: &[Answer]) -> Option<Arc<Error>> {
    let mut failures = answers.iter().map(|answer| answer.as_ref().err().map(|failure| &failure.error));
    let first = failures.next()??;
    failures.all(|failure| failure.is_some()).then(|| first.clone())
}

/// One element of the answer.
#[derive(Serialize, ToSchema)]
#[schema(as = Pushed)]
struct Item<'a> {
    index: usize,
    message_id: Option<Uuid>,
    transaction_id: Option<std::borrow::Cow<'a, str>>,
    #[serde(rename = "queueName")]
    queue_name: &'a str,
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl<'a> Item<'a> {
    fn new(index: usize, place: &'a Place, queue_name: &'a str, answers: &[Answer]) -> Self {
        let given = place.transaction_id.as_deref().map(Into::into);
        match &answers[place.group] {
            Ok(outcomes) => {
                let (status, id) = match outcomes[place.position] {
                    Outcome::Queued(id) if place.is_first => ("queued", id),
                    Outcome::Buffered(id) if place.is_first => ("buffered", id),
                    Outcome::Queued(id) | Outcome::Duplicate(id) | Outcome::Buffered(id) => ("duplicate", id),
                };
                let transaction_id = given.or_else(|| Some(id.to_string().into()));
                Self { index, message_id: Some(id), transaction_id, queue_name, status, error: None }
            }
            Err(failure) => {
                let error = Some(failure.error.to_string());
                Self { index, message_id: None, transaction_id: given, queue_name, status: "failed", error }
            }
        }
    }
}
