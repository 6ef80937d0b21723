//! Consumer groups in lists: all of them, those that lag, one.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use jiff::Timestamp;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::super::App;
use super::super::instant::milliseconds;
use super::super::openapi::query::query;
use super::super::params::{Params, Slice, SliceQuery};
use super::super::path::Segments;
use crate::db::consumer_groups::{
    Group, GroupPartition, Subscription, log_conflating_v1, log_group_lag_v1, log_groups_v1,
};
use crate::error::Error;
use crate::id::{DEFAULT_TENANT, checked_name};

/// A group lags once its oldest pending message is older.
const LAGGING_SECONDS: i64 = 300;
const LAG_SECONDS_DEFAULT: i64 = 3600;

/// One queue of a group.
#[derive(Serialize, ToSchema)]
#[schema(as = ConsumerGroup)]
#[serde(rename_all = "camelCase")]
pub(super) struct Listed {
    name: String,
    #[schema(value_type = Vec<String>)]
    topics: [String; 1],
    queue_name: String,
    members: i64,
    partition_cursors: i64,
    partitions_with_lag: i64,
    total_lag: i64,
    max_time_lag: i64,
    /// Messages that were deleted before the group came to them.
    gone: i64,
    state: &'static str,
    storage: &'static str,
    subscription_mode: Option<String>,
    subscription_timestamp: Option<String>,
    subscription_created_at: Option<String>,
    conflation: bool,
}

impl Listed {
    fn new(group: Group, conflation: bool) -> Self {
        let subscription = group.subscription;
        let time = |time: fn(&Subscription) -> Timestamp| subscription.as_ref().map(time).map(milliseconds);
        Self {
            name: group.group,
            topics: [group.queue.clone()],
            queue_name: group.queue,
            members: group.cursors,
            partition_cursors: group.cursors,
            partitions_with_lag: group.partitions_lagging,
            total_lag: group.pending,
            max_time_lag: group.lag_seconds,
            gone: group.gone,
            state: match (group.cursors, group.lag_seconds) {
                (0, _) => "Dead",
                (_, lag) if LAGGING_SECONDS < lag => "Lagging",
                _ => "Stable",
            },
            storage: "segments",
            subscription_timestamp: time(|subscription| subscription.from),
            subscription_created_at: time(|subscription| subscription.since),
            subscription_mode: subscription.map(|subscription| subscription.mode),
            conflation,
        }
    }
}

/// Lists the queues of each group, with how far it has come.
#[utoipa::path(
    get, path = "/api/v1/consumer-groups", params(SliceQuery), responses((status = 200, body = Vec<Listed>))
)]
pub(super) async fn list(State(app): State<Arc<App>>, params: Params) -> Result<Json<Vec<Listed>>, Error> {
    let Slice { limit, offset } = params.slice()?;
    let conn = app.db.conn().await?;
    let groups = log_groups_v1(&conn, limit, offset, DEFAULT_TENANT).await?;
    let conflating = log_conflating_v1(&conn, None, None, DEFAULT_TENANT).await?;
    let listed = groups.into_iter().map(|group| {
        let conflation = conflating.contains(&(group.queue.clone(), group.group.clone()));
        Listed::new(group, conflation)
    });
    Ok(Json(listed.collect()))
}

/// A partition that a group is late in. These names have underscores.
#[derive(Serialize, ToSchema)]
#[schema(as = LaggingPartition)]
pub(super) struct Late {
    consumer_group: String,
    queue_name: String,
    partition_name: String,
    partition_id: Uuid,
    worker_id: Option<String>,
    offset_lag: i64,
    time_lag_seconds: i64,
    lag_hours: f64,
    oldest_unconsumed_at: Option<String>,
    last_consumed_at: Option<String>,
    gone: i64,
}

impl From<GroupPartition> for Late {
    fn from(late: GroupPartition) -> Self {
        Self {
            consumer_group: late.group,
            queue_name: late.queue,
            partition_name: late.partition,
            partition_id: late.partition_id,
            worker_id: late.worker,
            offset_lag: late.pending,
            time_lag_seconds: late.lag_seconds,
            lag_hours: (late.lag_seconds as f64 / 36.0).round() / 100.0,
            oldest_unconsumed_at: late.oldest_at.map(milliseconds),
            last_consumed_at: None, // nobody keeps it
            gone: late.gone,
        }
    }
}

query!(LagQuery:
    integer("minLagSeconds", 0..=i64::MAX, "Only where the oldest pending message is at least this old.")
        .or(LAG_SECONDS_DEFAULT),
);

/// Lists the partitions in which a group is late.
#[utoipa::path(
    get, path = "/api/v1/consumer-groups/lagging", params(LagQuery, SliceQuery),
    responses((status = 200, body = Vec<Late>))
)]
pub(super) async fn lagging(State(app): State<Arc<App>>, params: Params) -> Result<Json<Vec<Late>>, Error> {
    let seconds = params.integer("minLagSeconds", 0..=i64::MAX)?.unwrap_or(LAG_SECONDS_DEFAULT);
    let Slice { limit, offset } = params.slice()?;
    let conn = app.db.conn().await?;
    let late = log_group_lag_v1(&conn, None, Some(seconds), limit, offset, DEFAULT_TENANT).await?;
    Ok(Json(late.into_iter().map(Late::from).collect()))
}

/// A group in one queue.
#[derive(Serialize, ToSchema)]
#[schema(as = GroupInQueue)]
pub(super) struct InQueue {
    conflation: bool,
    partitions: Vec<InPartition>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = GroupInPartition)]
#[serde(rename_all = "camelCase")]
struct InPartition {
    partition: String,
    worker_id: Option<String>,
    last_consumed_at: Option<String>,
    total_consumed: i64,
    offset_lag: i64,
    time_lag_seconds: i64,
    lease_active: bool,
    gone: i64,
}

/// Shows one group, by queue.
///
/// A group that nobody knows is in no queue.
#[utoipa::path(
    get, path = "/api/v1/consumer-groups/{group}", params(SliceQuery),
    responses((status = 200, body = BTreeMap<String, InQueue>))
)]
pub(super) async fn one(
    State(app): State<Arc<App>>, Segments(group): Segments<String>, params: Params,
) -> Result<Json<BTreeMap<String, InQueue>>, Error> {
    let group = checked_name("consumerGroup", &group)?;
    let Slice { limit, offset } = params.slice()?;
    let conn = app.db.conn().await?;
    let rows = log_group_lag_v1(&conn, Some(group), None, limit, offset, DEFAULT_TENANT).await?;
    let conflating = log_conflating_v1(&conn, None, Some(group), DEFAULT_TENANT).await?;
    let mut queues: BTreeMap<String, InQueue> = BTreeMap::new();
    for row in rows {
        let conflation = conflating.contains(&(row.queue.clone(), row.group.clone()));
        let queue = queues.entry(row.queue).or_insert_with(|| InQueue { conflation, partitions: Vec::new() });
        queue.partitions.push(InPartition {
            partition: row.partition,
            worker_id: row.worker,
            last_consumed_at: None,
            total_consumed: row.consumed,
            offset_lag: row.pending,
            time_lag_seconds: row.lag_seconds,
            lease_active: row.is_leased,
            gone: row.gone,
        });
    }
    Ok(Json(queues))
}
