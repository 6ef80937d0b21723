//! Queues and partitions with their counts, as JSON.

use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;
use uuid::Uuid;

use super::super::instant::milliseconds;
use super::super::params::Slice;
use crate::db::resources::{Counts, Labelled, Overview, Partition, Queue};
use crate::id::Offset;

/// How many messages there are, by what became of them.
#[derive(Serialize, ToSchema)]
#[schema(as = Counts)]
#[serde(rename_all = "camelCase")]
pub(super) struct Counted {
    total: i64,
    pending: i64,
    processing: i64,
    completed: i64,
    /// Failures are counted by cursor and not by message, so there is no number of failed ones.
    failed: Option<i64>,
    dead_letter: i64,
}

impl From<&Counts> for Counted {
    fn from(counts: &Counts) -> Self {
        let Counts { total, pending, processing, completed, dead } = *counts;
        Self { total, pending, processing, completed, failed: None, dead_letter: dead }
    }
}

#[derive(Serialize, ToSchema)]
#[schema(as = SegmentCounts)]
pub(super) struct Segments {
    /// There is no counter, and counting would read them.
    segments: Option<i64>,
    messages: i64,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct QueueRow<'a> {
    id: Uuid,
    name: &'a str,
    namespace: Option<&'a str>,
    task: Option<&'a str>,
    created_at: String,
    partitions: i64,
    /// Null while nobody measures them.
    retained_bytes: Option<i64>,
    messages: QueueMessages,
    segments: Segments,
}

#[derive(Serialize, ToSchema)]
pub(super) struct QueueMessages {
    total: i64,
    pending: i64,
    processing: i64,
}

impl<'a> From<&'a Queue> for QueueRow<'a> {
    fn from(queue: &'a Queue) -> Self {
        let Counts { total, pending, processing, .. } = queue.counts;
        Self {
            id: queue.id.0,
            name: &queue.name,
            namespace: queue.namespace.as_deref(),
            task: queue.task.as_deref(),
            created_at: milliseconds(queue.created_at),
            partitions: queue.partitions,
            retained_bytes: queue.retained_bytes,
            messages: QueueMessages { total, pending, processing },
            segments: Segments { segments: None, messages: total },
        }
    }
}

/// A queue with its partitions, or a page of them.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct QueueDetail<'a> {
    id: Uuid,
    name: &'a str,
    namespace: Option<&'a str>,
    task: Option<&'a str>,
    created_at: String,
    partitions: Vec<PartitionRow<'a>>,
    partition_count: i64,
    pagination: Slice,
    /// Over all partitions.
    totals: Counted,
    retained_bytes: Option<i64>,
    segments: Segments,
    #[schema(value_type = Object)]
    options: &'a Map<String, Value>,
}

impl<'a> QueueDetail<'a> {
    pub(super) fn new(queue: &'a Queue, partitions: &'a [Partition], pagination: Slice) -> Self {
        Self {
            id: queue.id.0,
            name: &queue.name,
            namespace: queue.namespace.as_deref(),
            task: queue.task.as_deref(),
            created_at: milliseconds(queue.created_at),
            partitions: partitions.iter().map(PartitionRow::from).collect(),
            partition_count: queue.partitions,
            pagination,
            totals: Counted::from(&queue.counts),
            retained_bytes: queue.retained_bytes,
            segments: Segments { segments: None, messages: queue.counts.total },
            options: &queue.options,
        }
    }
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct PartitionRow<'a> {
    id: Uuid,
    queue: &'a str,
    name: &'a str,
    created_at: String,
    last_write_at: String,
    #[schema(value_type = i64)]
    log_start: Offset,
    #[schema(value_type = i64)]
    last_offset: Offset,
    stats: Counted,
    oldest_message: Option<String>,
    newest_message: Option<String>,
}

impl<'a> From<&'a Partition> for PartitionRow<'a> {
    fn from(partition: &'a Partition) -> Self {
        Self {
            id: partition.id.0,
            queue: &partition.queue,
            name: &partition.name,
            created_at: milliseconds(partition.created_at),
            last_write_at: milliseconds(partition.last_write_at),
            log_start: partition.log_start,
            last_offset: partition.last_offset,
            stats: Counted::from(&partition.counts),
            oldest_message: partition.oldest_at.map(milliseconds),
            newest_message: partition.newest_at.map(milliseconds),
        }
    }
}

/// What is in the queues of one namespace or task.
#[derive(Serialize, ToSchema)]
pub(super) struct LabelCounts {
    queues: i64,
    partitions: i64,
    messages: LabelMessages,
}

#[derive(Serialize, ToSchema)]
pub(super) struct LabelMessages {
    total: i64,
    pending: i64,
}

impl From<&Labelled> for LabelCounts {
    fn from(row: &Labelled) -> Self {
        let messages = LabelMessages { total: row.total, pending: row.pending };
        Self { queues: row.queues, partitions: row.partitions, messages }
    }
}

/// Everything, counted.
#[derive(Serialize, ToSchema)]
#[schema(as = Overview)]
#[serde(rename_all = "camelCase")]
pub(super) struct Everything {
    queues: i64,
    partitions: i64,
    namespaces: i64,
    tasks: i64,
    messages: Counted,
    lag: Lags,
    throughput: Throughput,
    timestamp: String,
    /// Seconds since it was counted.
    stats_age: i64,
}

#[derive(Serialize, ToSchema)]
struct Lags {
    /// In seconds.
    time: Lag,
    /// In messages.
    offset: Lag,
}

#[derive(Serialize, ToSchema)]
struct Lag {
    avg: i64,
    median: i64,
    min: i64,
    max: i64,
}

impl From<[i64; 4]> for Lag {
    fn from([avg, median, min, max]: [i64; 4]) -> Self {
        Self { avg, median, min, max }
    }
}

/// Means of the last five minutes.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Throughput {
    ingested_per_second: f64,
    processed_per_second: f64,
}

impl Everything {
    pub(super) fn new(all: &Overview, timestamp: String) -> Self {
        Self {
            queues: all.queues,
            partitions: all.partitions,
            namespaces: all.namespaces,
            tasks: all.tasks,
            messages: Counted {
                total: all.total,
                pending: all.pending,
                processing: all.processing,
                completed: all.completed,
                failed: None,
                dead_letter: all.dead,
            },
            lag: Lags { time: all.time_lag.into(), offset: all.offset_lag.into() },
            throughput: Throughput {
                ingested_per_second: all.pushed_per_second,
                processed_per_second: all.acked_per_second,
            },
            timestamp,
            stats_age: 0, // counted for this answer
        }
    }
}
