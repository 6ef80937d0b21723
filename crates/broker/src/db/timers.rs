//! Twins of `sql/procedures/timers.sql`.

use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_postgres::Row;
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::Sql;
use crate::error::Error;

/// What becomes of a timer.
#[derive(Clone, Debug)]
pub enum Op {
    /// Sets it, whether or not there is one.
    Schedule(Schedule),
    Cancel {
        queue: String,
        timer_key: String,
        txn: Option<String>,
    },
}

/// A timer as it is to be.
#[derive(Clone, Debug)]
pub struct Schedule {
    pub queue: String,
    pub timer_key: String,
    pub partition: String,
    /// From the database's clock on; below zero is at once.
    pub delay_ms: i64,
    pub txn: String,
    pub message_id: Uuid,
    /// As it is stored: packed with zstd or sealed, if it is.
    pub payload: Vec<u8>,
    pub payload_zstd: bool,
    /// Once it is unpacked.
    pub payload_bytes: i32,
    pub encrypted: bool,
    /// Whether `encrypted` must be what the queue wants.
    pub compared: bool,
    pub producer: Option<String>,
}

impl Op {
    /// As `queen.log_timers_apply_v1` reads it.
    pub(super) fn wire(&self) -> Value {
        match self {
            Self::Schedule(schedule) => json!({
                "op": "schedule",
                "queue": schedule.queue,
                "timerKey": schedule.timer_key,
                "partition": schedule.partition,
                "delayMs": schedule.delay_ms,
                "txn": schedule.txn,
                "messageId": schedule.message_id,
                "payload": BASE64_STANDARD.encode(&schedule.payload),
                "payloadZstd": schedule.payload_zstd,
                "payloadBytes": schedule.payload_bytes,
                "encrypted": schedule.encrypted,
                "compared": schedule.compared,
                "producer": schedule.producer,
            }),
            Self::Cancel { queue, timer_key, txn } => {
                json!({"op": "cancel", "queue": queue, "timerKey": timer_key, "txn": txn})
            }
        }
    }
}

/// What came of an [`Op`].
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Done {
    pub ok: bool,
    pub status: String,
    pub queue: String,
    pub timer_key: String,
    pub txn: Option<String>,
    pub message_id: Option<Uuid>,
    pub deliver_at: Option<String>,
}

/// `queen.log_timers_apply_v1`: one transaction.
///
/// # Errors
/// [`Error::Paused`], or whatever else the database answers. Nothing happened then.
pub async fn log_timers_apply_v1(db: &(impl Sql + Sync), ops: &[Op]) -> Result<Vec<Done>, Error> {
    let ops: Vec<Value> = ops.iter().map(Op::wire).collect();
    let row = db.row("select queen.log_timers_apply_v1($1)", &[(&Json(ops), Type::JSONB)]).await?;
    let Json(done) = row.try_get(0)?;
    Ok(done)
}

/// `queen.log_timers_due_v1`: how long until a timer is due; `None` if nothing is to be fired at all.
///
/// # Errors
/// Whatever the database answers.
pub async fn log_timers_due_v1(db: &(impl Sql + Sync)) -> Result<Option<Duration>, Error> {
    let row = db.row("select queen.log_timers_due_v1()", &[]).await?;
    let due_ms: Option<i64> = row.try_get(0)?;
    Ok(due_ms.map(|ms| Duration::from_millis(u64::try_from(ms).unwrap_or(0))))
}

/// A timer that one server has taken to fire it.
#[derive(Clone, Debug)]
pub struct Claimed {
    pub queue: String,
    pub timer_key: String,
    pub partition: String,
    pub txn: String,
    pub message_id: Uuid,
    pub payload: Vec<u8>,
    pub payload_zstd: bool,
    pub encrypted: bool,
    pub producer: Option<String>,
    pub attempts: i32,
}

/// `queen.log_timers_claim_v1`: at most `rows_max` due timers, of at most `bytes_max` payload but for the first.
///
/// # Errors
/// Whatever the database answers.
pub async fn log_timers_claim_v1(
    db: &(impl Sql + Sync), token: Uuid, lease_ms: i32, rows_max: i32, bytes_max: i64,
) -> Result<Vec<Claimed>, Error> {
    let query = "select queue, timer_key, partition, txn, message_id, payload, payload_zstd, encrypted, producer_sub,
            attempts
        from queen.log_timers_claim_v1($1, $2, $3, $4)";
    let params = [
        (&token as _, Type::UUID),
        (&lease_ms as _, Type::INT4),
        (&rows_max as _, Type::INT4),
        (&bytes_max as _, Type::INT8),
    ];
    let claimed = |row: &Row| {
        Ok(Claimed {
            queue: row.try_get(0)?,
            timer_key: row.try_get(1)?,
            partition: row.try_get(2)?,
            txn: row.try_get(3)?,
            message_id: row.try_get(4)?,
            payload: row.try_get(5)?,
            payload_zstd: row.try_get(6)?,
            encrypted: row.try_get(7)?,
            producer: row.try_get(8)?,
            attempts: row.try_get(9)?,
        })
    };
    db.rows(query, &params).await?.iter().map(claimed).collect()
}

/// Segments to push, and the timers that they stand for: parallel columns.
#[derive(Default)]
pub struct Batch<'a> {
    pub queues: Vec<&'a str>,
    pub partitions: Vec<&'a str>,
    pub counts: Vec<i32>,
    pub hashes: Vec<Vec<u8>>,
    pub blobs: Vec<Vec<u8>>,
    /// Whether the payloads are encrypted; `None` where that is not compared with the queue.
    pub sealed: Option<Vec<bool>>,
    /// Of each timer, in frame order: its segment, counted from 1, its key, and its message's id.
    pub lanes: Vec<i32>,
    pub keys: Vec<&'a str>,
    pub ids: Vec<Uuid>,
}

/// What became of a [`Batch`]. Timers in neither list are as they were.
#[derive(Debug)]
pub struct Fired {
    pub stored: Vec<Uuid>,
    pub duplicates: Vec<Uuid>,
}

/// `queen.log_timers_fire_v1`: one transaction.
///
/// # Errors
/// [`Error::ClaimLost`], or whatever else the database answers. Nothing happened then.
pub async fn log_timers_fire_v1(
    db: &(impl Sql + Sync), token: Uuid, batch: &Batch<'_>, lock_ms: i32,
) -> Result<Fired, Error> {
    let query =
        "select o_stored, o_duplicates from queen.log_timers_fire_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";
    let params = [
        (&token as _, Type::UUID),
        (&batch.queues as _, Type::TEXT_ARRAY),
        (&batch.partitions as _, Type::TEXT_ARRAY),
        (&batch.counts as _, Type::INT4_ARRAY),
        (&batch.hashes as _, Type::BYTEA_ARRAY),
        (&batch.blobs as _, Type::BYTEA_ARRAY),
        (&batch.sealed as _, Type::BOOL_ARRAY),
        (&batch.lanes as _, Type::INT4_ARRAY),
        (&batch.keys as _, Type::TEXT_ARRAY),
        (&batch.ids as _, Type::UUID_ARRAY),
        (&lock_ms as _, Type::INT4),
    ];
    let row = db.row(query, &params).await?;
    Ok(Fired { stored: row.try_get(0)?, duplicates: row.try_get(1)? })
}

/// Why a claimed timer was not fired, and what is to come of it.
pub struct Failure<'a> {
    pub timer: &'a Claimed,
    pub error: &'a str,
    /// Whether it was the timer's fault.
    pub counts: bool,
    /// So many attempts make a dead letter.
    pub attempts_max: i32,
    /// Until the next attempt.
    pub pause_ms: i32,
    /// For the dead letter, and whether it is encrypted.
    pub payload: Option<&'a str>,
    pub encrypted: bool,
}

/// `queen.log_timers_failed_v1`: `paused`, `dead` or `lost`.
///
/// # Errors
/// Whatever the database answers.
pub async fn log_timers_failed_v1(db: &(impl Sql + Sync), token: Uuid, failure: &Failure<'_>) -> Result<String, Error> {
    let query = "select queen.log_timers_failed_v1($1, $2, $3, $4, $5, $6, $7, $8, $9)";
    let params = [
        (&token as _, Type::UUID),
        (&failure.timer.queue as _, Type::TEXT),
        (&failure.timer.timer_key as _, Type::TEXT),
        (&failure.error as _, Type::TEXT),
        (&failure.counts as _, Type::BOOL),
        (&failure.attempts_max as _, Type::INT4),
        (&failure.pause_ms as _, Type::INT4),
        (&failure.payload as _, Type::TEXT),
        (&failure.encrypted as _, Type::BOOL),
    ];
    Ok(db.row(query, &params).await?.try_get(0)?)
}

/// A timer as it is shown.
#[derive(Clone, Debug)]
pub struct Pending {
    pub timer_key: String,
    pub partition: String,
    pub deliver_at: Timestamp,
    pub txn: String,
    pub message_id: Uuid,
    /// Not in lists.
    pub payload: Option<Vec<u8>>,
    pub payload_zstd: bool,
    pub encrypted: bool,
    pub producer_sub: Option<String>,
    pub attempts: i32,
    pub last_error: Option<String>,
    pub claimed: bool,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

/// `queen.log_timers_list_v1`
///
/// # Errors
/// Whatever the database answers.
pub async fn log_timers_list_v1(
    db: &(impl Sql + Sync), queue: &str, after: Option<&str>, limit: i32,
) -> Result<Vec<Pending>, Error> {
    let query = "select * from queen.log_timers_list_v1($1, $2, $3)";
    let rows = db.rows(query, &[(&queue, Type::TEXT), (&after, Type::TEXT), (&limit, Type::INT4)]).await?;
    rows.iter().map(pending).collect()
}

/// `queen.log_timer_peek_v1`
///
/// # Errors
/// Whatever the database answers.
pub async fn log_timer_peek_v1(db: &(impl Sql + Sync), queue: &str, key: &str) -> Result<Option<Pending>, Error> {
    let query = "select * from queen.log_timer_peek_v1($1, $2)";
    let rows = db.rows(query, &[(&queue, Type::TEXT), (&key, Type::TEXT)]).await?;
    rows.first().map(pending).transpose()
}

fn pending(row: &Row) -> Result<Pending, Error> {
    Ok(Pending {
        timer_key: row.try_get(0)?,
        partition: row.try_get(1)?,
        deliver_at: row.try_get(2)?,
        txn: row.try_get(3)?,
        message_id: row.try_get(4)?,
        payload: row.try_get(5)?,
        payload_zstd: row.try_get(6)?,
        encrypted: row.try_get(7)?,
        producer_sub: row.try_get(8)?,
        attempts: row.try_get(9)?,
        last_error: row.try_get(10)?,
        claimed: row.try_get(11)?,
        created_at: row.try_get(12)?,
        updated_at: row.try_get(13)?,
    })
}
