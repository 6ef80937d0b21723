//! What analytics answer, as the stored functions make it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// From when to when, both inside.
#[derive(Serialize, Deserialize, ToSchema)]
pub(in crate::http) struct TimeRange {
    from: String,
    to: String,
}

/// A measurement over a number of samples.
#[derive(Serialize, Deserialize, ToSchema)]
struct Gauge {
    avg: f64,
    min: f64,
    max: f64,
    last: f64,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct SystemMetrics {
    time_range: TimeRange,
    replicas: Vec<Replica>,
    replica_count: i64,
    bucket_minutes: i32,
    /// Over all replicas.
    point_count: i64,
}

/// One server.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Replica {
    hostname: String,
    port: i32,
    worker_id: String,
    time_series: Vec<SystemPoint>,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct SystemPoint {
    timestamp: String,
    sample_count: i64,
    metrics: SystemUse,
}

/// What a process used; null where it was not measured.
#[derive(Serialize, Deserialize, ToSchema)]
struct SystemUse {
    cpu: CpuUse,
    memory: MemoryUse,
    database: PoolUse,
    timers: TimerLag,
}

/// Processor time since the process started.
#[derive(Serialize, Deserialize, ToSchema)]
struct CpuUse {
    user_us: Option<Gauge>,
    system_us: Option<Gauge>,
}

#[derive(Serialize, Deserialize, ToSchema)]
struct MemoryUse {
    rss_bytes: Option<Gauge>,
    virtual_bytes: Option<Gauge>,
}

/// Connections to the database.
#[derive(Serialize, Deserialize, ToSchema)]
struct PoolUse {
    pool_size: Option<Gauge>,
    pool_idle: Option<Gauge>,
    pool_active: Option<Gauge>,
    pool_waiting: Option<Gauge>,
}

/// How late timers were.
#[derive(Serialize, Deserialize, ToSchema)]
struct TimerLag {
    lag_ms: Option<Gauge>,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct WorkerMetrics {
    time_range: TimeRange,
    bucket_minutes: i32,
    point_count: i64,
    /// Newest first.
    time_series: Vec<WorkerPoint>,
    workers: Vec<Worker>,
    /// Those that were popped most, at most 100.
    queues: Vec<PoppedQueue>,
    summary: WorkerSummary,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct WorkerPoint {
    timestamp: String,
    push_messages: i64,
    pop_messages: i64,
    ack_messages: i64,
    push_requests: i64,
    pop_requests: i64,
    ack_requests: i64,
    transactions: i64,
    jobs_done: i64,
    push_per_second: f64,
    pop_per_second: f64,
    ack_per_second: f64,
    avg_event_loop_lag_ms: f64,
    max_event_loop_lag_ms: i64,
    avg_free_slots: f64,
    min_free_slots: i64,
    db_connections: i64,
    avg_job_queue_size: f64,
    max_job_queue_size: i64,
    backoff_size: i64,
    avg_lag_ms: i64,
    max_lag_ms: i64,
    lag_count: i64,
    db_errors: i64,
    ack_success: i64,
    ack_failed: i64,
    dlq_count: i64,
}

/// A server, as its last flush in the range says.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(in crate::http) struct Worker {
    hostname: String,
    worker_id: i32,
    pid: i32,
    last_seen: String,
    avg_event_loop_lag_ms: i64,
    max_event_loop_lag_ms: i64,
    free_slots: i64,
    db_connections: i64,
    job_queue_size: i64,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct PoppedQueue {
    queue_name: String,
    pop_count: i64,
    avg_lag_ms: i64,
    max_lag_ms: i64,
}

/// Sums over the range.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct WorkerSummary {
    total_push_messages: i64,
    total_pop_messages: i64,
    total_ack_messages: i64,
    total_push_requests: i64,
    total_pop_requests: i64,
    total_ack_requests: i64,
    total_transactions: i64,
    total_jobs_done: i64,
    total_db_errors: i64,
    total_ack_success: i64,
    total_ack_failed: i64,
    total_dlq: i64,
    max_lag_ms: i64,
    /// Now, in the queues that the filters let through.
    pending_messages: i64,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct QueueOps {
    time_range: TimeRange,
    bucket_minutes: i32,
    series: Vec<QueueOpsPoint>,
    queues: Vec<String>,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct QueueOpsPoint {
    bucket: String,
    queue_name: String,
    push_requests: i64,
    push_messages: i64,
    pop_messages: i64,
    pop_empty: i64,
    ack_requests: i64,
    ack_success: i64,
    ack_failed: i64,
    transactions: i64,
    partitions_created: i64,
    partitions_deleted: i64,
    /// After the last birth or death in the bucket; null without any.
    partition_count: Option<i64>,
    avg_lag_ms: i64,
    max_lag_ms: i64,
    push_per_second: f64,
    pop_per_second: f64,
    ack_per_second: f64,
    empty_per_second: f64,
    /// The most pops that waited, added up over servers.
    parked_count: i64,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct LagPoint {
    bucket: String,
    queue_name: String,
    namespace: Option<String>,
    task: Option<String>,
    pop_count: i64,
    /// Messages whose age is known.
    lag_count: i64,
    avg_lag_ms: i64,
    max_lag_ms: i64,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = ParkedReplicas)]
#[serde(rename_all = "camelCase")]
pub(super) struct Parked {
    time_range: TimeRange,
    bucket_minutes: i32,
    series: Vec<ParkedPoint>,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct ParkedPoint {
    bucket: String,
    queue_name: String,
    hostname: String,
    /// The server's port.
    worker_id: i32,
    parked_count: i64,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = RetentionSeries)]
#[serde(rename_all = "camelCase")]
pub(super) struct Retained {
    time_range: TimeRange,
    bucket_minutes: i32,
    series: Vec<RetentionPoint>,
    totals: Deleted,
}

#[derive(Serialize, Deserialize, ToSchema)]
struct RetentionPoint {
    bucket: String,
    #[serde(flatten)]
    deleted: Deleted,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = DeletedMessages)]
#[serde(rename_all = "camelCase")]
struct Deleted {
    retention_msgs: i64,
    completed_retention_msgs: i64,
    eviction_msgs: i64,
    /// Clearing by request is in here too.
    total_msgs: i64,
    /// Deleting transactions.
    event_count: i64,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = PostgresStats)]
pub(super) struct Postgres {
    timestamp: String,
    database: PostgresDatabase,
    activity: PostgresActivity,
    /// The largest first.
    tables: Vec<PostgresTable>,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct PostgresDatabase {
    name: String,
    version: String,
    size_bytes: i64,
    connections: i64,
    max_connections: i64,
    commits: i64,
    rollbacks: i64,
    deadlocks: i64,
    temporary_bytes: i64,
    /// Null until something was read.
    cache_hit_ratio: Option<f64>,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct PostgresActivity {
    active: i64,
    idle: i64,
    idle_in_transaction: i64,
    waiting_for_locks: i64,
    longest_transaction_seconds: f64,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct PostgresTable {
    name: String,
    total_bytes: i64,
    index_bytes: i64,
    live_rows: i64,
    dead_rows: i64,
    sequential_scans: i64,
    index_scans: i64,
    rows_inserted: i64,
    rows_updated: i64,
    rows_updated_in_place: i64,
    rows_deleted: i64,
    last_autovacuum: Option<String>,
    last_autoanalyze: Option<String>,
}
