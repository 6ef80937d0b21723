//! The answer of a pop as the document shows it; [`super::answer`] writes it by hand around the payloads.
#![expect(dead_code, reason = "these types only describe")]

use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

/// Messages, and the lease that they are under.
#[derive(ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Popped {
    success: bool,
    /// Empty if the request named no queue.
    queue: String,
    /// That of the first message; null without one.
    #[schema(required)]
    partition: Option<String>,
    #[schema(required)]
    partition_id: Option<Uuid>,
    /// Empty after `autoAck`, and without messages.
    lease_id: String,
    consumer_group: String,
    partitions_claimed: i64,
    /// None only where conflation has to be said; else that is a 204.
    messages: Vec<Message>,
    #[schema(required = false)]
    autopilot: Option<Autopilot>,
    /// There if the group is given only the newest message of each partition.
    #[schema(required = false)]
    conflation: bool,
    /// There if the group's subscription says something else about conflation than the request.
    #[schema(required = false)]
    conflation_conflict: bool,
    /// There if conflation was asked for while pops are paused, so that no group was looked at.
    #[schema(required = false)]
    paused: bool,
}

/// In order of its partition.
#[derive(ToSchema)]
#[schema(as = PoppedMessage)]
#[serde(rename_all = "camelCase")]
struct Message {
    id: Uuid,
    transaction_id: String,
    #[schema(required)]
    trace_id: Option<Uuid>,
    /// The payload, as it was sent.
    data: Value,
    #[schema(required)]
    producer_sub: Option<String>,
    created_at: String,
    queue: String,
    partition_id: Uuid,
    partition: String,
    lease_id: String,
    consumer_group: String,
}

/// What the server chose.
#[derive(ToSchema)]
#[serde(rename_all = "camelCase")]
struct Autopilot {
    partitions: i64,
    batch: i64,
    wait_ms: i64,
}
