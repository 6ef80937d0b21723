//! Acknowledgement of delivered messages, one or many.

mod carry_out;
pub(super) mod element;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::body::RawBody;
use super::json::Object;
use crate::error::Error;
use element::Wire;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(one)).routes(routes!(many))
}

/// Acknowledgements, and the group of those that do not name theirs.
#[derive(Deserialize, ToSchema)]
#[schema(as = AcknowledgeMany)]
#[serde(rename_all = "camelCase")]
struct Many<'a> {
    #[serde(borrow)]
    #[schema(value_type = Vec<Wire<'a>>)]
    acknowledgments: Vec<Object<Wire<'a>>>,
    #[serde(borrow)]
    #[schema(value_type = Option<String>, max_length = 255)]
    consumer_group: Option<&'a RawValue>,
}

/// The answer to one acknowledgement.
#[derive(Debug, Default, Serialize, ToSchema)]
#[schema(as = Acknowledged)]
#[serde(rename_all = "camelCase")]
struct Reply {
    index: usize,
    transaction_id: Option<String>,
    success: bool,
    error: Option<String>,
    lease_released: bool,
    dlq: bool,
    noop: bool,
}

/// Acknowledges one message, and with it everything before it in its lease.
#[utoipa::path(
    post, path = "/api/v1/ack", request_body = Wire<'_>, responses((status = 200, body = Vec<Reply>))
)]
async fn one(State(app): State<Arc<App>>, body: RawBody) -> Result<Json<Vec<Reply>>, Error> {
    let wire: Wire<'_> = body.json()?;
    answer(&app, &[Object(wire)], None).await
}

/// Acknowledges messages; one that cannot be resolved fails alone.
#[utoipa::path(
    post, path = "/api/v1/ack/batch", request_body = Many<'_>, responses((status = 200, body = Vec<Reply>))
)]
async fn many(State(app): State<Arc<App>>, body: RawBody) -> Result<Json<Vec<Reply>>, Error> {
    let Many { acknowledgments, consumer_group } = body.json()?;
    let group = element::text("consumerGroup", consumer_group)?;
    element::group_or_queue_mode(group.as_deref())?;
    answer(&app, &acknowledgments, group.as_deref()).await
}

async fn answer(app: &App, sent: &[Object<Wire<'_>>], group: Option<&str>) -> Result<Json<Vec<Reply>>, Error> {
    let mut replies: Vec<Reply> = (0..sent.len()).map(|index| Reply { index, ..Reply::default() }).collect();
    let mut elements = Vec::with_capacity(sent.len());
    for (Object(wire), reply) in sent.iter().zip(&mut replies) {
        reply.transaction_id = wire.echoed_id();
        match wire.checked(group) {
            Ok(element) => elements.push((reply.index, element)),
            Err(error) => reply.error = Some(error.to_string()),
        }
    }
    carry_out::carry_out(app, &elements, &mut replies).await?;
    Ok(Json(replies))
}
