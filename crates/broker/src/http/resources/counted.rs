//! Queues and partitions with their counts, as JSON.

use serde_json::{Value, json};

use super::super::instant::milliseconds;
use crate::db::resources::{Counts, Partition, Queue};

/// Failures are counted by cursor and not by message, so there is no number of failed ones.
pub(super) fn counts(counts: &Counts) -> Value {
    json!({
        "total": counts.total,
        "pending": counts.pending,
        "processing": counts.processing,
        "completed": counts.completed,
        "failed": null,
        "deadLetter": counts.dead,
    })
}

/// Segments are not counted: there is no counter, and counting would read them.
pub(super) fn queue_row(queue: &Queue) -> Value {
    let Counts { total, pending, processing, .. } = queue.counts;
    json!({
        "id": queue.id.0,
        "name": queue.name,
        "namespace": queue.namespace,
        "task": queue.task,
        "createdAt": milliseconds(queue.created_at),
        "partitions": queue.partitions,
        "retainedBytes": queue.retained_bytes,
        "messages": {"total": total, "pending": pending, "processing": processing},
        "segments": {"segments": null, "messages": total},
    })
}

pub(super) fn partition(partition: &Partition) -> Value {
    json!({
        "id": partition.id.0,
        "queue": partition.queue,
        "name": partition.name,
        "createdAt": milliseconds(partition.created_at),
        "lastWriteAt": milliseconds(partition.last_write_at),
        "logStart": partition.log_start,
        "lastOffset": partition.last_offset,
        "stats": counts(&partition.counts),
        "oldestMessage": partition.oldest_at.map(milliseconds),
        "newestMessage": partition.newest_at.map(milliseconds),
    })
}
