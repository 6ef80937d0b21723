//! What ephemeral queues hold.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::super::App;
use super::super::openapi::query::query;
use super::super::params::Params;
use super::failure::Failure;
use super::group;
use super::options::InForce;
use crate::ephemeral::Listed;
use crate::error::Error;
use crate::id::checked_name;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(depth))
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = EphemeralQueues)]
struct Queues {
    queues: Vec<QueueWire>,
    count: usize,
    /// Bytes of all of them.
    cell_bytes: usize,
}

#[derive(Serialize, ToSchema)]
#[schema(as = EphemeralQueue)]
struct QueueWire {
    queue: String,
    /// `declared`, or `implicit`: made by a push or a pop, and forgotten when it is idle.
    tier: &'static str,
    depth: usize,
    bytes: usize,
    partitions: usize,
    groups: usize,
    drops: DropsWire,
    options: InForce,
}

/// Messages that went without having been done, by why.
#[derive(Serialize, ToSchema)]
#[schema(as = EphemeralDrops)]
struct DropsWire {
    bounds: u64,
    ttl: u64,
    retry: u64,
}

fn tier(is_declared: bool) -> &'static str {
    if is_declared { "declared" } else { "implicit" }
}

impl From<Listed> for QueueWire {
    fn from(listed: Listed) -> Self {
        let drops = listed.drops;
        Self {
            queue: listed.name,
            tier: tier(listed.is_declared),
            depth: listed.length,
            bytes: listed.bytes,
            partitions: listed.partitions,
            groups: listed.groups,
            drops: DropsWire { bounds: drops.bounds, ttl: drops.ttl, retry: drops.retry },
            options: InForce::of(&listed.rules),
        }
    }
}

/// Lists the ephemeral queues of this server.
#[utoipa::path(get, path = "/api/v1/ephemeral/queues", responses((status = 200, body = Queues)))]
async fn list(State(app): State<Arc<App>>) -> Json<Queues> {
    let queues: Vec<QueueWire> = app.ephemeral.list().into_iter().map(QueueWire::from).collect();
    Json(Queues { count: queues.len(), queues, cell_bytes: app.ephemeral.bytes() })
}

query!(DepthQuery: name("group", "Whose messages are counted; else those of consumers without a group."));

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = EphemeralDepth)]
struct DepthWire {
    queue: String,
    group: String,
    tier: &'static str,
    pending: usize,
    partitions_pending: usize,
    bytes: usize,
    partitions: Vec<PartitionDepth>,
    groups: Vec<GroupDepth>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = EphemeralPartitionDepth)]
struct PartitionDepth {
    partition: String,
    pending: usize,
    bytes: usize,
}

#[derive(Serialize, ToSchema)]
#[schema(as = EphemeralGroupDepth)]
struct GroupDepth {
    group: String,
    pending: usize,
    /// Dropped before the group was done with them.
    skipped: u64,
}

/// Counts what is pending in a queue.
#[utoipa::path(
    get, path = "/api/v1/ephemeral/queues/{queue}/depth", params(DepthQuery),
    responses((status = 200, body = DepthWire), (status = 404))
)]
async fn depth(
    State(app): State<Arc<App>>, path: Result<Path<String>, PathRejection>, params: Result<Params, Error>,
) -> Result<Json<DepthWire>, Failure> {
    let Path(queue) = path?;
    checked_name("queue", &queue)?;
    let group = group("group", params?.name("group")?)?;
    let depth = app.ephemeral.depth(&queue, &group).ok_or_else(Failure::unknown_queue)?;
    Ok(Json(DepthWire {
        queue,
        group,
        tier: tier(depth.is_declared),
        pending: depth.pending,
        partitions_pending: depth.partitions.iter().filter(|(_, pending, _)| 0 < *pending).count(),
        bytes: depth.bytes,
        partitions: depth
            .partitions
            .into_iter()
            .map(|(partition, pending, bytes)| PartitionDepth { partition, pending, bytes })
            .collect(),
        groups: depth
            .groups
            .into_iter()
            .map(|(group, pending, skipped)| GroupDepth { group, pending, skipped })
            .collect(),
    }))
}
