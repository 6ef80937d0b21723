//! Twins of `sql/procedures/dead_letter_admin.sql`.

use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::Sql;
use super::ack::Acked;
use super::dead_letters::{Filter, Letter};
use crate::error::Error;
use crate::id::{Offset, PartitionId};

/// `queen.log_dlq_move_v1`
///
/// # Errors
/// Whatever the database answers; nothing was filed then.
pub async fn log_dlq_move_v1(
    db: &(impl Sql + Sync), pid: PartitionId, group: &str, letter: &Letter,
) -> Result<Acked, Error> {
    let query = "select queen.log_dlq_move_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)";
    let row = db
        .row(
            query,
            &[
                (&pid.0, Type::UUID),
                (&group, Type::TEXT),
                (&letter.offset, Type::INT8),
                (&letter.message_id, Type::UUID),
                (&letter.transaction_id, Type::TEXT),
                (&letter.payload, Type::TEXT),
                (&letter.error, Type::TEXT),
                (&letter.trace_id, Type::UUID),
                (&letter.producer, Type::TEXT),
                (&letter.is_encrypted, Type::BOOL),
            ],
        )
        .await?;
    let Json(moved) = row.try_get(0)?;
    Ok(moved)
}

/// `queen.log_dlq_of_message_v1`
///
/// # Errors
/// Whatever the database answers.
pub async fn log_dlq_of_message_v1(
    db: &(impl Sql + Sync), pid: PartitionId, transaction_id: &str,
) -> Result<Vec<Uuid>, Error> {
    let query = "select queen.log_dlq_of_message_v1($1, $2)";
    let row = db.row(query, &[(&pid.0, Type::UUID), (&transaction_id, Type::TEXT)]).await?;
    Ok(row.try_get(0)?)
}

/// What was picked, oldest first, of how many.
pub struct Picked {
    pub ids: Vec<Uuid>,
    /// All that the filters let through.
    pub matched: i64,
    /// Those of them that have no payload.
    pub lost: i64,
}

/// `queen.log_dlq_pick_v1`
///
/// # Errors
/// Whatever the database answers.
pub async fn log_dlq_pick_v1(
    db: &(impl Sql + Sync), filter: &Filter<'_>, ids: Option<&[Uuid]>, is_replay: bool, limit: i32,
) -> Result<Picked, Error> {
    let query = "select ids, matched, lost from queen.log_dlq_pick_v1($1, $2, $3, $4, $5, $6, $7, $8)";
    let row = db
        .row(
            query,
            &[
                (&filter.queue, Type::TEXT),
                (&filter.group, Type::TEXT),
                (&filter.partition, Type::TEXT),
                (&filter.from, Type::TIMESTAMPTZ),
                (&filter.to, Type::TIMESTAMPTZ),
                (&ids, Type::UUID_ARRAY),
                (&is_replay, Type::BOOL),
                (&limit, Type::INT4),
            ],
        )
        .await?;
    Ok(Picked { ids: row.try_get(0)?, matched: row.try_get(1)?, lost: row.try_get(2)? })
}

/// `queen.log_dlq_delete_v1`: how many were deleted.
///
/// # Errors
/// Whatever the database answers; nothing was deleted then.
pub async fn log_dlq_delete_v1(db: &(impl Sql + Sync), ids: &[Uuid]) -> Result<i32, Error> {
    let row = db.row("select queen.log_dlq_delete_v1($1)", &[(&ids, Type::UUID_ARRAY)]).await?;
    Ok(row.try_get(0)?)
}

/// A dead letter that is about to be replayed.
pub struct Replayable {
    /// Position of its id among those asked for, from 1.
    pub ordinal: i64,
    pub id: Uuid,
    pub partition_id: Uuid,
    pub queue: String,
    pub partition: String,
    pub offset: Offset,
    /// `None` if it was lost before it was filed.
    pub payload: Option<String>,
    pub message_id: Option<Uuid>,
    pub trace_id: Option<Uuid>,
    pub producer: Option<String>,
    /// The payload is sealed for the message id.
    pub is_encrypted: bool,
    /// Whether the queue wants its payloads sealed.
    pub queue_is_encrypted: bool,
}

/// `queen.log_dlq_letters_v1`: those that still exist, by partition and offset, as far as `bytes` of payload go.
///
/// # Errors
/// Whatever the database answers.
pub async fn log_dlq_letters_v1(db: &(impl Sql + Sync), ids: &[Uuid], bytes: i64) -> Result<Vec<Replayable>, Error> {
    let query = "select ordinal, id, partition_id, queue, partition, \"offset\", payload, message_id, trace_id,
            producer, is_encrypted, queue_is_encrypted
        from queen.log_dlq_letters_v1($1, $2)";
    let rows = db.rows(query, &[(&ids, Type::UUID_ARRAY), (&bytes, Type::INT8)]).await?;
    rows.iter()
        .map(|row| {
            Ok(Replayable {
                ordinal: row.try_get(0)?,
                id: row.try_get(1)?,
                partition_id: row.try_get(2)?,
                queue: row.try_get(3)?,
                partition: row.try_get(4)?,
                offset: row.try_get(5)?,
                payload: row.try_get(6)?,
                message_id: row.try_get(7)?,
                trace_id: row.try_get(8)?,
                producer: row.try_get(9)?,
                is_encrypted: row.try_get(10)?,
                queue_is_encrypted: row.try_get(11)?,
            })
        })
        .collect()
}

/// Segments of replayed messages, one to each of several partitions, and the dead letters that they were.
#[derive(Default)]
pub struct Replay {
    pub letters: Vec<Uuid>,
    pub partition_ids: Vec<Uuid>,
    pub counts: Vec<i32>,
    pub hashes: Vec<Vec<u8>>,
    pub blobs: Vec<Vec<u8>>,
    /// Whether the payloads are encrypted; `None` where that is not compared with the queue.
    pub sealed: Vec<Option<bool>>,
}

/// `queen.log_dlq_replay_v1`
///
/// # Errors
/// [`Error::Retryable`] if a dead letter or a partition is gone, [`Error::EncryptionChanged`], or whatever else the database answers; nothing
/// happened then.
pub async fn log_dlq_replay_v1(db: &(impl Sql + Sync), replay: &Replay) -> Result<(), Error> {
    let query = "select queen.log_dlq_replay_v1($1, $2, $3, $4, $5, $6)";
    db.row(
        query,
        &[
            (&replay.letters, Type::UUID_ARRAY),
            (&replay.partition_ids, Type::UUID_ARRAY),
            (&replay.counts, Type::INT4_ARRAY),
            (&replay.hashes, Type::BYTEA_ARRAY),
            (&replay.blobs, Type::BYTEA_ARRAY),
            (&replay.sealed, Type::BOOL_ARRAY),
        ],
    )
    .await?;
    Ok(())
}
