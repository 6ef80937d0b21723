//! Jobs as JSON, and anything as a table.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ebbtide_jobs::Job;
use jiff::Timestamp;
use serde_json::{Map, Value, json};

pub(super) fn time(time: Option<Timestamp>) -> Value {
    time.map_or(Value::Null, |time| json!(time.to_string()))
}

/// Bytes under a key, as the JSON that they are, or in base64 under another key.
fn put_bytes(object: &mut Map<String, Value>, key: &str, bytes: Option<&[u8]>) {
    match bytes.map(serde_json::from_slice::<Value>) {
        None => object.insert(key.to_owned(), Value::Null),
        Some(Ok(value)) => object.insert(key.to_owned(), value),
        Some(Err(_)) => object.insert(format!("{key}Base64"), json!(STANDARD.encode(bytes.unwrap_or_default()))),
    };
}

/// Everything about a job.
pub(super) fn job(job: &Job) -> Value {
    let text = |value: Option<String>| value.map_or(Value::Null, Value::from);
    let mut object = Map::new();
    let mut put = |key: &str, value: Value| object.insert(key.to_owned(), value);
    put("id", json!(job.id.to_string()));
    put("type", json!(job.job_type.as_str()));
    put("queue", json!(job.queue.as_str()));
    put("tenant", json!(job.tenant));
    put("metadata", json!(job.metadata));
    put("priority", json!(job.priority));
    put("status", json!(job.status.as_str()));
    put("previousStatus", job.previous_status.map_or(Value::Null, |status| json!(status.as_str())));
    put("attempt", json!(job.attempt));
    put("maxRetries", json!(job.max_retries));
    put("timeoutMs", job.timeout.map_or(Value::Null, |timeout| json!(timeout.as_millis())));
    put("lastError", text(job.last_error.clone()));
    put("deadLetteredAt", time(job.dead_lettered_at));
    put("deadLetterReason", text(job.dead_letter_reason.clone()));
    put("runAt", time(job.run_at));
    put("startedAt", time(job.started_at));
    put("completedAt", time(job.completed_at));
    put("createdAt", time(Some(job.created_at)));
    put("updatedAt", time(Some(job.updated_at)));
    put("lockedBy", text(job.locked_by.clone()));
    put("lockedUntil", time(job.locked_until));
    put("lastHeartbeatAt", time(job.last_heartbeat_at));
    put("uniqueKey", text(job.unique_key.clone()));
    put("parentJobId", text(job.parent_job_id.map(|id| id.to_string())));
    put("rootJobId", text(job.root_job_id.map(|id| id.to_string())));
    put("fanOutId", text(job.fan_out_id.map(|id| id.to_string())));
    put("fanOutIndex", job.fan_out_id.map_or(Value::Null, |_| json!(job.fan_out_index)));
    put("waitingSignalName", text(job.waiting_signal_name.clone()));
    put_bytes(&mut object, "args", Some(&job.args));
    put_bytes(&mut object, "result", job.result.as_deref());
    Value::Object(object)
}

/// Jobs in rows.
pub(super) fn jobs(jobs: &[Job]) -> String {
    let row = |job: &Job| {
        let error: String = job.last_error.as_deref().unwrap_or_default().chars().take(60).collect();
        vec![
            job.id.to_string(),
            job.job_type.to_string(),
            job.queue.to_string(),
            job.status.to_string(),
            job.attempt.to_string(),
            format!("{:.0}", job.created_at),
            error,
        ]
    };
    let rows: Vec<_> = jobs.iter().map(row).collect();
    table(&["id", "type", "queue", "status", "attempt", "created", "last error"], &rows)
}

/// A JSON object, one member a line.
pub(super) fn members(value: &Value) -> String {
    let Some(object) = value.as_object() else { return format!("{value}\n") };
    let width = object.keys().map(String::len).max().unwrap_or(0);
    let line = |(key, value): (&String, &Value)| match value {
        Value::Null => String::new(),
        Value::String(text) => format!("{key:width$}  {text}\n"),
        other => format!("{key:width$}  {other}\n"),
    };
    object.iter().map(line).collect()
}

/// Columns as wide as what stands in them.
pub(super) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([head[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        format!("{}\n", padded.collect::<Vec<_>>().join("  ").trim_end())
    };
    let body = rows.iter().map(|row| line(row.iter().map(String::as_str).collect()));
    [line(head.to_vec())].into_iter().chain(body).collect()
}
