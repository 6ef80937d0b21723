//! Administration of consumer groups: lists with lag, seek, delete, another start time.

mod listing;
mod seek;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouterExt};
use utoipa_axum::routes;

use super::App;
use super::body::RawBody;
use super::instant::instant;
use super::openapi::query::query;
use super::params::Params;
use super::path::Segments;
use super::retry::retried;
use crate::db::consumer_groups::{log_group_delete_step_v1, log_group_resubscribe_v1, log_group_unsubscribe_v1};
use crate::db::resources::queue_id;
use crate::error::Error;
use crate::id::{DEFAULT_TENANT, QueueId, checked_name};

/// Partitions of one step of a delete: one transaction, and what a caller may have to wait for.
const DELETE_ROWS_MAX: i32 = 1000;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(listing::list))
        // Wins over a group of that name, but only where a group is read.
        .routes(routes!(listing::lagging).map(|route| route.delete(delete_lagging)))
        .routes(routes!(listing::one, delete_group))
        .routes(routes!(delete_in_queue))
        .routes(routes!(resubscribe))
        .routes(routes!(seek::in_queue))
        .routes(routes!(seek::in_partition))
}

query!(DeleteQuery:
    flag("deleteMetadata", "Whether the subscriptions go as well.").or(true),
);

/// What went of a group.
#[derive(Serialize, ToSchema)]
#[schema(as = GroupDeleted)]
#[serde(rename_all = "camelCase")]
struct Gone {
    success: bool,
    consumer_group: String,
    /// Where it was asked for one queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    queue_name: Option<String>,
    /// How many cursors.
    deleted_partitions: i64,
    /// Whether there were subscriptions to delete.
    metadata_deleted: bool,
}

impl Gone {
    fn new(consumer_group: String, queue_name: Option<String>, deleted: &Deleted) -> Self {
        Self {
            success: true,
            consumer_group,
            queue_name,
            deleted_partitions: deleted.cursors,
            metadata_deleted: 0 < deleted.subscriptions,
        }
    }
}

/// The name of a group that is called as the list is.
async fn delete_lagging(state: State<Arc<App>>, params: Params) -> Result<Json<Gone>, Error> {
    delete_group(state, Segments("lagging".to_owned()), params).await
}

/// Deletes the cursors of a group with their leases.
#[utoipa::path(
    delete, path = "/api/v1/consumer-groups/{group}", params(DeleteQuery), responses((status = 200, body = Gone))
)]
async fn delete_group(
    State(app): State<Arc<App>>, Segments(group): Segments<String>, params: Params,
) -> Result<Json<Gone>, Error> {
    checked_name("consumerGroup", &group)?;
    let deleted = delete_all(&app, &group, None, deletes_metadata(&params)?).await?;
    Ok(Json(Gone::new(group, None, &deleted)))
}

/// Deletes the cursors of a group in one queue.
///
/// Nothing is to be deleted from a queue that does not exist.
#[utoipa::path(
    delete, path = "/api/v1/consumer-groups/{group}/queues/{queue}", params(DeleteQuery),
    responses((status = 200, body = Gone))
)]
async fn delete_in_queue(
    State(app): State<Arc<App>>, Segments((group, queue)): Segments<(String, String)>, params: Params,
) -> Result<Json<Gone>, Error> {
    checked_name("consumerGroup", &group)?;
    checked_name("queue", &queue)?;
    let with_metadata = deletes_metadata(&params)?;
    let id = queue_id(&app.db.conn().await?, &queue, DEFAULT_TENANT).await?;
    let deleted = match id {
        Some(id) => delete_all(&app, &group, Some(id), with_metadata).await?,
        None => Deleted::default(),
    };
    Ok(Json(Gone::new(group, Some(queue), &deleted)))
}

fn deletes_metadata(params: &Params) -> Result<bool, Error> {
    Ok(params.text("deleteMetadata").is_none() || params.flag("deleteMetadata")?)
}

#[derive(Default)]
struct Deleted {
    subscriptions: i64,
    cursors: i64,
}

/// Subscriptions first: a pop that comes meanwhile makes a new one, and what it finds is as at any first contact.
async fn delete_all(app: &App, group: &str, queue_id: Option<QueueId>, with_metadata: bool) -> Result<Deleted, Error> {
    let mut deleted = Deleted::default();
    if with_metadata {
        let conn = app.db.conn().await?;
        deleted.subscriptions = log_group_unsubscribe_v1(&conn, group, queue_id, DEFAULT_TENANT).await?;
    }
    let mut after = None;
    loop {
        let conn = app.db.conn().await?;
        let from = after.as_deref();
        let step =
            retried(|| log_group_delete_step_v1(&conn, group, queue_id, from, DELETE_ROWS_MAX, DEFAULT_TENANT)).await?;
        deleted.cursors += step.deleted;
        for queue in &step.queues {
            app.wake.moved(queue, group, step.deleted.unsigned_abs().try_into().unwrap_or(usize::MAX));
        }
        if step.done {
            return Ok(deleted);
        }
        after = step.last;
    }
}

/// From when on.
#[derive(ToSchema)]
#[serde(rename_all = "camelCase")]
#[expect(dead_code, reason = "the handler reads its one field by hand, to name what is wrong with it")]
struct Resubscribe {
    /// A time without a zone is UTC.
    #[schema(format = DateTime)]
    subscription_timestamp: String,
}

/// What a group subscribes to from when on.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Resubscribed {
    success: bool,
    consumer_group: String,
    new_timestamp: String,
    /// How many subscriptions.
    rows_updated: i64,
}

/// Sets the time from which the subscriptions of a group count.
#[utoipa::path(
    post, path = "/api/v1/consumer-groups/{group}/subscription", request_body = Resubscribe,
    responses((status = 200, body = Resubscribed))
)]
async fn resubscribe(
    State(app): State<Arc<App>>, Segments(group): Segments<String>, body: RawBody,
) -> Result<Json<Resubscribed>, Error> {
    checked_name("consumerGroup", &group)?;
    let body: Map<String, Value> = if body.0.is_empty() { Map::new() } else { body.json()? };
    let text = match body.get("subscriptionTimestamp") {
        None | Some(Value::Null) => return Err(Error::Missing("subscriptionTimestamp")),
        Some(Value::String(text)) => text,
        Some(_) => return Err(Error::invalid("subscriptionTimestamp", "must be an ISO 8601 time")),
    };
    let from = instant("subscriptionTimestamp", text)?;
    let updated = log_group_resubscribe_v1(&app.db.conn().await?, &group, from, DEFAULT_TENANT).await?;
    let new_timestamp = text.clone();
    Ok(Json(Resubscribed { success: true, consumer_group: group, new_timestamp, rows_updated: updated }))
}
