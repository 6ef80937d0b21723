//! What status routes answer.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;
use uuid::Uuid;

use super::super::analytics::{TimeRange, Worker};
use super::super::instant::milliseconds;
use super::super::params::Slice;
use crate::db::resources::{Counts, Queue};
use crate::db::status::PartitionStatus;
use crate::id::Offset;
use crate::telemetry::{Lifetime, Usage};

const ENGINE: &str = "ebbtide";

#[derive(Serialize, ToSchema)]
pub(super) struct Alive {
    status: &'static str,
    engine: &'static str,
    version: &'static str,
}

impl Default for Alive {
    fn default() -> Self {
        Self { status: "ok", engine: ENGINE, version: env!("CARGO_PKG_VERSION") }
    }
}

/// What one process did since it started, and uses.
#[derive(Serialize, ToSchema)]
#[schema(as = ProcessMetrics)]
pub(super) struct Process {
    /// Seconds.
    uptime: f64,
    requests: Rate,
    /// Stored or delivered.
    messages: Rate,
    database: Pool,
    memory: Memory,
    cpu: Cpu,
}

#[derive(Serialize, ToSchema)]
struct Rate {
    total: u64,
    /// A second, since the start.
    rate: f64,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Pool {
    pool_size: usize,
    idle_connections: usize,
    waiting_requests: usize,
}

/// In bytes; null where the system does not say.
#[derive(Serialize, ToSchema)]
struct Memory {
    rss: Option<u64>,
    r#virtual: Option<u64>,
}

/// Microseconds of processor time; null where the system does not say.
#[derive(Serialize, ToSchema)]
struct Cpu {
    user: Option<u64>,
    system: Option<u64>,
}

impl Process {
    pub(super) fn new(up: Duration, done: Lifetime, pool: &deadpool_postgres::Status, usage: Usage) -> Self {
        #[allow(clippy::cast_precision_loss, reason = "a rate to look at")]
        let rate = |total: u64| Rate { total, rate: total as f64 / up.as_secs_f64().max(1.0) };
        let Usage { user_us, system_us, rss_bytes, virtual_bytes } = usage;
        Self {
            uptime: up.as_secs_f64(),
            requests: rate(done.requests),
            messages: rate(done.messages),
            database: Pool { pool_size: pool.size, idle_connections: pool.available, waiting_requests: pool.waiting },
            memory: Memory { rss: rss_bytes, r#virtual: virtual_bytes },
            cpu: Cpu { user: user_us, system: system_us },
        }
    }
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Status {
    time_range: TimeRange,
    bucket_minutes: i32,
    point_count: i64,
    /// Newest first; a bucket in which nothing was flushed is left out.
    throughput: Vec<Throughput>,
    queues: Vec<ConsumedQueue>,
    messages: Messages,
    leases: Leases,
    dead_letter_queue: DeadLetters,
    workers: Vec<Worker>,
    errors: Errors,
    /// Seconds since the messages were counted: they are counted for the answer.
    #[serde(default)]
    stats_age: i64,
}

/// Counts of a bucket, with what servers used in it; null where nobody measured that.
#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = StatusThroughput)]
#[serde(rename_all = "camelCase")]
struct Throughput {
    timestamp: String,
    ingested: i64,
    processed: i64,
    pop_messages: i64,
    ingested_per_second: f64,
    processed_per_second: f64,
    pop_per_second: f64,
    avg_lag_ms: i64,
    max_lag_ms: i64,
    avg_event_loop_lag_ms: Option<f64>,
    max_event_loop_lag_ms: Option<i64>,
    min_free_slots: Option<i64>,
    db_errors: i64,
    ack_failed: i64,
    dlq_count: i64,
    /// Of one processor, the mean of all servers.
    queen_cpu_user_pct: Option<f64>,
    queen_cpu_sys_pct: Option<f64>,
    /// The largest server's.
    queen_rss_mb: Option<f64>,
    db_pool_active: Option<i64>,
    db_pool_idle: Option<i64>,
    db_pool_size: Option<i64>,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct ConsumedQueue {
    id: Uuid,
    name: String,
    namespace: Option<String>,
    task: Option<String>,
    partitions: i64,
    /// By all groups together.
    total_consumed: i64,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = StatusMessages)]
#[serde(rename_all = "camelCase")]
struct Messages {
    total: i64,
    pending: i64,
    processing: i64,
    completed: i64,
    /// Failures are counted by cursor and not by message, so there is no number of failed ones.
    failed: Option<i64>,
    dead_letter: i64,
    requests: Requests,
    batch_efficiency: Efficiency,
}

/// In the range. With a filter there is no number of pops: one may look into many queues.
#[derive(Serialize, Deserialize, ToSchema)]
struct Requests {
    push: i64,
    pop: Option<i64>,
    ack: i64,
}

/// Messages of a request, on average; null without requests.
#[derive(Serialize, Deserialize, ToSchema)]
struct Efficiency {
    push: Option<f64>,
    pop: Option<f64>,
    ack: Option<f64>,
}

/// What is leased now.
#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = LiveLeases)]
#[serde(rename_all = "camelCase")]
struct Leases {
    active: i64,
    partitions_with_leases: i64,
    total_batch_size: i64,
    total_acked: i64,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = StatusDeadLetters)]
#[serde(rename_all = "camelCase")]
struct DeadLetters {
    total_messages: i64,
    current_messages: i64,
    affected_partitions: i64,
    /// Of the newest 10,000.
    top_errors: Vec<CountedError>,
}

#[derive(Serialize, Deserialize, ToSchema)]
struct CountedError {
    error: String,
    count: i64,
}

/// In the range.
#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = StatusErrors)]
#[serde(rename_all = "camelCase")]
struct Errors {
    db_errors: i64,
    ack_failed: i64,
    dlq_messages: i64,
}

#[derive(Serialize, ToSchema)]
pub(super) struct StatusOfQueues<'a> {
    pub(super) queues: Vec<QueueStatus<'a>>,
    /// On all pages.
    pub(super) total: i64,
    pub(super) pagination: Slice,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct QueueCounts {
    total: i64,
    pending: i64,
    processing: i64,
    completed: i64,
    dead_letter: i64,
}

impl From<Counts> for QueueCounts {
    fn from(counts: Counts) -> Self {
        let Counts { total, pending, processing, completed, dead } = counts;
        Self { total, pending, processing, completed, dead_letter: dead }
    }
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct QueueStatus<'a> {
    id: Uuid,
    name: &'a str,
    namespace: Option<&'a str>,
    task: Option<&'a str>,
    created_at: String,
    partitions: i64,
    messages: QueueCounts,
}

impl<'a> From<&'a Queue> for QueueStatus<'a> {
    fn from(queue: &'a Queue) -> Self {
        Self {
            id: queue.id.0,
            name: &queue.name,
            namespace: queue.namespace.as_deref(),
            task: queue.task.as_deref(),
            created_at: milliseconds(queue.created_at),
            partitions: queue.partitions,
            messages: queue.counts.into(),
        }
    }
}

/// A queue with its partitions, or a page of them.
#[derive(Serialize, ToSchema)]
pub(super) struct StatusOfQueue<'a> {
    queue: ConfiguredQueue<'a>,
    partitions: Vec<PartitionState<'a>>,
    /// Over all partitions.
    totals: Totals,
    pagination: Slice,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct ConfiguredQueue<'a> {
    id: Uuid,
    name: &'a str,
    namespace: Option<&'a str>,
    task: Option<&'a str>,
    #[schema(value_type = i64)]
    priority: &'a Value,
    created_at: String,
    #[schema(value_type = Object)]
    config: &'a Map<String, Value>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = QueueTotals)]
struct Totals {
    messages: QueueCounts,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct PartitionState<'a> {
    id: Uuid,
    name: &'a str,
    created_at: String,
    messages: QueueCounts,
    stats: Positions,
    cursor: Consumed,
    last_activity: String,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Positions {
    #[schema(value_type = i64)]
    log_start: Offset,
    #[schema(value_type = i64)]
    last_offset: Offset,
}

/// By all groups together.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Consumed {
    total_consumed: i64,
    /// Batches are not counted.
    batches_consumed: i64,
}

impl<'a> StatusOfQueue<'a> {
    pub(super) fn new(queue: &'a Queue, partitions: &'a [PartitionStatus], pagination: Slice) -> Self {
        let partitions = partitions.iter().map(|partition| PartitionState {
            id: partition.id.0,
            name: &partition.name,
            created_at: milliseconds(partition.created_at),
            messages: partition.counts.into(),
            stats: Positions { log_start: partition.log_start, last_offset: partition.last_offset },
            cursor: Consumed { total_consumed: partition.consumed, batches_consumed: 0 },
            last_activity: milliseconds(partition.last_write_at),
        });
        Self {
            queue: ConfiguredQueue {
                id: queue.id.0,
                name: &queue.name,
                namespace: queue.namespace.as_deref(),
                task: queue.task.as_deref(),
                priority: queue.options.get("priority").unwrap_or(&Value::Null),
                created_at: milliseconds(queue.created_at),
                config: &queue.options,
            },
            partitions: partitions.collect(),
            totals: Totals { messages: queue.counts.into() },
            pagination,
        }
    }
}

#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = PushedMessages)]
#[serde(rename_all = "camelCase")]
pub(super) struct Pushed {
    data_points: Vec<PushedPoint>,
    interval: String,
    from: String,
    to: String,
}

#[derive(Serialize, Deserialize, ToSchema)]
struct PushedPoint {
    timestamp: String,
    messages: i64,
}

/// What the refreshed statistics add up to.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Summary {
    partitions: i64,
    messages: i64,
    retained_bytes: i64,
    refreshed_at: String,
}

#[derive(Serialize, ToSchema)]
#[schema(as = RefreshedStats)]
#[serde(rename_all = "camelCase")]
pub(super) struct Refreshed {
    engine: &'static str,
    /// Whether every queue had its turn in time.
    complete: bool,
    queues_updated: i64,
    seg_partitions: i64,
    messages: i64,
    retained_bytes: i64,
    refreshed_at: String,
}

impl Refreshed {
    pub(super) fn new(complete: bool, queues_updated: i64, summary: Summary) -> Self {
        let Summary { partitions, messages, retained_bytes, refreshed_at } = summary;
        Self {
            engine: ENGINE,
            complete,
            queues_updated,
            seg_partitions: partitions,
            messages,
            retained_bytes,
            refreshed_at,
        }
    }
}
