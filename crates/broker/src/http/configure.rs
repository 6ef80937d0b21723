//! `POST /api/v1/configure` and `DELETE /api/v1/resources/queues/{queue}`.

mod effect;
mod options;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use uuid::Uuid;

use super::App;
use super::body::RawBody;
use super::path::Segments;
use super::retry::retried;
use crate::db::configure::{configure_queue_v1, delete_queue_v1};
use crate::error::Error;
use crate::id::{DEFAULT_TENANT, checked_name};
use effect::{Effect, InForce};

const SECONDS_PER_DAY: i64 = 86_400;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(configure)).routes(routes!(delete_queue))
}

/// The queue as it is from now on.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Configured {
    configured: bool,
    queue_id: Uuid,
    /// Null: an option holds for all partitions.
    partition_id: Option<Uuid>,
    queue: String,
    namespace: String,
    task: String,
    storage: String,
    /// Every option, given or not.
    #[schema(value_type = Object)]
    options: Map<String, Value>,
    retention: InForce,
    /// Combinations that probably are mistakes.
    warnings: Vec<String>,
}

/// Creates a queue, or replaces its options.
#[utoipa::path(
    post, path = "/api/v1/configure", request_body = options::Body, responses((status = 200, body = Configured))
)]
async fn configure(State(app): State<Arc<App>>, body: RawBody) -> Result<Json<Configured>, Error> {
    let cleanup_seconds = app.settings.partition_cleanup_days.map(|days| i64::from(days) * SECONDS_PER_DAY);
    let Configure { queue, options } = Configure::read(&body.json()?, cleanup_seconds)?;
    let conn = app.db.conn().await?;
    let stored = configure_queue_v1(&conn, &queue, &options, DEFAULT_TENANT).await?;
    app.sealing.forget(&queue);
    let effect = Effect::of(&stored.options)?;
    Ok(Json(Configured {
        configured: true,
        queue_id: stored.queue_id.0,
        partition_id: None,
        queue,
        namespace: stored.namespace,
        task: stored.task,
        storage: stored.storage,
        options: stored.options,
        retention: effect.in_force(),
        warnings: effect.warnings(cleanup_seconds, app.settings.sealer.has_key()),
    }))
}

/// A request whose every value is one that the queue may have.
struct Configure {
    queue: String,
    /// Argument of `configure_queue_v1`: what is not given is not in it.
    options: Map<String, Value>,
}

impl Configure {
    fn read(body: &Map<String, Value>, cleanup_seconds: Option<i64>) -> Result<Self, Error> {
        let queue = text(body, "queue")?.ok_or(Error::Missing("queue"))?;
        checked_name("queue", queue)?;
        let mut options = options::read(body)?;
        if let (Some(dedup), Some(cleanup)) =
            (options.get("dedupWindowSeconds").and_then(Value::as_i64), cleanup_seconds)
            && dedup > cleanup
        {
            let reason = format!("must be at most {cleanup}, the seconds of PARTITION_CLEANUP_DAYS");
            return Err(Error::invalid("dedupWindowSeconds", reason));
        }
        for field in ["namespace", "task"] {
            if let Some(name) = text(body, field)?.filter(|name| !name.is_empty()) {
                options.insert(field.to_owned(), checked_name(field, name)?.into());
            }
        }
        match text(body, "mode")? {
            None | Some("replace") => {}
            Some("merge") => {
                options.insert("mode".to_owned(), "merge".into());
            }
            Some(_) => return Err(Error::invalid("mode", "must be \"replace\" or \"merge\"")),
        }
        Ok(Self { queue: queue.to_owned(), options })
    }
}

/// The text of `field`; absent and `null` are both `None`.
fn text<'a>(body: &'a Map<String, Value>, field: &'static str) -> Result<Option<&'a str>, Error> {
    match body.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(Error::invalid(field, "must be a string")),
    }
}

/// Whether there was such a queue.
#[derive(Serialize, ToSchema)]
struct QueueDeleted {
    deleted: bool,
    existed: bool,
    queue: String,
    message: &'static str,
}

/// Deletes a queue and all that is in it.
///
/// One transaction, however large the queue: past the statement time-out nothing of it is deleted.
#[utoipa::path(delete, path = "/api/v1/resources/queues/{queue}", responses((status = 200, body = QueueDeleted)))]
async fn delete_queue(
    State(app): State<Arc<App>>, Segments(queue): Segments<String>,
) -> Result<Json<QueueDeleted>, Error> {
    checked_name("queue", &queue)?;
    let conn = app.db.conn().await?;
    let result = retried(|| delete_queue_v1(&conn, &queue, DEFAULT_TENANT)).await?;
    let message =
        if result.existed { "the queue and all that was in it are deleted" } else { "there is no such queue" };
    Ok(Json(QueueDeleted { deleted: result.deleted, existed: result.existed, queue, message }))
}
