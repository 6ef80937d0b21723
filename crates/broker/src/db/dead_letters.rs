//! Twins of `sql/procedures/dead_letters.sql`.

use jiff::Timestamp;
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::Sql;
use super::ack::{Acked, Target};
use crate::error::Error;
use crate::id::{Offset, PartitionId};

/// A message as it is filed. Its payload is `None` if it could not be had any more.
#[derive(Clone, Debug)]
pub struct Letter {
    pub offset: Offset,
    pub message_id: Option<Uuid>,
    pub transaction_id: String,
    pub payload: Option<String>,
    pub error: String,
    pub trace_id: Option<Uuid>,
    /// Who pushed it.
    pub producer: Option<String>,
    /// The payload is sealed for the message id.
    pub is_encrypted: bool,
}

/// `queen.log_dlq_head_multi_v1`
///
/// # Errors
/// Whatever the database answers; nothing was filed then.
pub async fn log_dlq_head_multi_v1(
    db: &(impl Sql + Sync), letters: &[(&Target, &Letter)],
) -> Result<Vec<Acked>, Error> {
    let pids: Vec<Uuid> = letters.iter().map(|(target, _)| target.partition_id.0).collect();
    let groups: Vec<&str> = letters.iter().map(|(target, _)| target.group.as_str()).collect();
    let workers: Vec<&str> = letters.iter().map(|(target, _)| target.worker.as_str()).collect();
    let offsets: Vec<Offset> = letters.iter().map(|(_, letter)| letter.offset).collect();
    let message_ids: Vec<Option<Uuid>> = letters.iter().map(|(_, letter)| letter.message_id).collect();
    let transaction_ids: Vec<&str> = letters.iter().map(|(_, letter)| letter.transaction_id.as_str()).collect();
    let payloads: Vec<Option<&str>> = letters.iter().map(|(_, letter)| letter.payload.as_deref()).collect();
    let errors: Vec<&str> = letters.iter().map(|(_, letter)| letter.error.as_str()).collect();
    let trace_ids: Vec<Option<Uuid>> = letters.iter().map(|(_, letter)| letter.trace_id).collect();
    let producers: Vec<Option<&str>> = letters.iter().map(|(_, letter)| letter.producer.as_deref()).collect();
    let are_encrypted: Vec<bool> = letters.iter().map(|(_, letter)| letter.is_encrypted).collect();
    let query = "select queen.log_dlq_head_multi_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";
    let row = db
        .row(
            query,
            &[
                (&pids, Type::UUID_ARRAY),
                (&groups, Type::TEXT_ARRAY),
                (&workers, Type::TEXT_ARRAY),
                (&offsets, Type::INT8_ARRAY),
                (&message_ids, Type::UUID_ARRAY),
                (&transaction_ids, Type::TEXT_ARRAY),
                (&payloads, Type::TEXT_ARRAY),
                (&errors, Type::TEXT_ARRAY),
                (&trace_ids, Type::UUID_ARRAY),
                (&producers, Type::TEXT_ARRAY),
                (&are_encrypted, Type::BOOL_ARRAY),
            ],
        )
        .await?;
    let Json(filed) = row.try_get(0)?;
    Ok(filed)
}

/// The segment that holds a message, and where in its partition it begins.
pub struct Covering {
    pub base_offset: Offset,
    pub blob: Vec<u8>,
}

/// `queen.log_dlq_segments_v1`: one answer per message, `None` where the segment is gone.
///
/// # Errors
/// Whatever the database answers.
pub async fn log_dlq_segments_v1(
    db: &impl Sql, messages: &[(PartitionId, Offset)],
) -> Result<Vec<Option<Covering>>, Error> {
    let pids: Vec<Uuid> = messages.iter().map(|(pid, _)| pid.0).collect();
    let offsets: Vec<Offset> = messages.iter().map(|(_, offset)| *offset).collect();
    let query = "select base_offset, blob from queen.log_dlq_segments_v1($1, $2)";
    let rows = db.rows(query, &[(&pids, Type::UUID_ARRAY), (&offsets, Type::INT8_ARRAY)]).await?;
    rows.iter()
        .map(|row| {
            let base_offset: Option<Offset> = row.try_get(0)?;
            Ok(match base_offset {
                Some(base_offset) => Some(Covering { base_offset, blob: row.try_get(1)? }),
                None => None,
            })
        })
        .collect()
}

/// Which dead letters to list. `None` lets everything through; both ends of the time span count.
#[derive(Clone, Copy, Debug, Default)]
pub struct Filter<'a> {
    pub queue: Option<&'a str>,
    pub group: Option<&'a str>,
    pub partition: Option<&'a str>,
    pub from: Option<Timestamp>,
    pub to: Option<Timestamp>,
}

/// A dead letter as it is listed.
pub struct Listed {
    pub id: Uuid,
    pub partition_id: Uuid,
    pub queue: String,
    pub partition: String,
    pub group: String,
    pub offset: Offset,
    pub message_id: Option<Uuid>,
    pub transaction_id: Option<String>,
    pub payload: Option<String>,
    pub error: Option<String>,
    pub retry_count: i32,
    pub failed_at: Timestamp,
    pub trace_id: Option<Uuid>,
    pub producer: Option<String>,
    pub is_encrypted: bool,
    /// The payload was left where it is, because those before it take all the memory that one answer may.
    pub is_omitted: bool,
}

/// `queen.log_dlq_list_v1`: how many there are in all, and a page of them, newest first.
///
/// # Errors
/// Whatever the database answers.
pub async fn log_dlq_list_v1(
    db: &impl Sql, filter: &Filter<'_>, limit: i32, offset: i32, bytes: i64,
) -> Result<(i64, Vec<Listed>), Error> {
    let query = "select total, id, partition_id, queue, partition, consumer_group, \"offset\", message_id,
            transaction_id, payload, error, coalesce(retry_count, 0), failed_at, trace_id, producer, is_encrypted,
            is_omitted
        from queen.log_dlq_list_v1($1, $2, $3, $4, $5, $6, $7, p_bytes => $8)";
    let rows = db
        .rows(
            query,
            &[
                (&filter.queue, Type::TEXT),
                (&filter.group, Type::TEXT),
                (&filter.partition, Type::TEXT),
                (&filter.from, Type::TIMESTAMPTZ),
                (&filter.to, Type::TIMESTAMPTZ),
                (&limit, Type::INT4),
                (&offset, Type::INT4),
                (&bytes, Type::INT8),
            ],
        )
        .await?;
    let total = rows.first().map_or(Ok(0), |row| row.try_get(0))?;
    let mut page = Vec::new();
    for row in &rows {
        let id: Option<Uuid> = row.try_get(1)?;
        let Some(id) = id else { continue };
        page.push(Listed {
            id,
            partition_id: row.try_get(2)?,
            queue: row.try_get(3)?,
            partition: row.try_get(4)?,
            group: row.try_get(5)?,
            offset: row.try_get(6)?,
            message_id: row.try_get(7)?,
            transaction_id: row.try_get(8)?,
            payload: row.try_get(9)?,
            error: row.try_get(10)?,
            retry_count: row.try_get(11)?,
            failed_at: row.try_get(12)?,
            trace_id: row.try_get(13)?,
            producer: row.try_get(14)?,
            is_encrypted: row.try_get(15)?,
            is_omitted: row.try_get(16)?,
        });
    }
    Ok((total, page))
}
