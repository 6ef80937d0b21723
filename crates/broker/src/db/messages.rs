//! Twins of `sql/procedures/messages.sql`.

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::Sql;
use crate::error::Error;
use crate::id::{Offset, PartitionId};

/// Which messages to list. `None` lets everything through, but for `from`, which is then an hour ago. Both ends of
/// the time span count.
#[derive(Clone, Copy, Debug, Default)]
pub struct Filter<'a> {
    pub queue: Option<&'a str>,
    pub partition: Option<&'a str>,
    pub namespace: Option<&'a str>,
    pub task: Option<&'a str>,
    pub status: Option<&'a str>,
    pub from: Option<Timestamp>,
    pub to: Option<Timestamp>,
}

/// A page, and what it is a page of.
pub struct Listing {
    /// How many messages the filters let through.
    pub total: i64,
    /// More partitions were written than one call looks at: those written last were.
    pub is_truncated: bool,
    /// Whether queue mode has a cursor in one of the partitions.
    pub has_queue_mode: bool,
    /// How many groups have one.
    pub groups: i64,
    pub page: Vec<Listed>,
}

/// A message as the sidecar knows it.
pub struct Listed {
    pub partition_id: Uuid,
    pub queue: String,
    pub partition: String,
    pub namespace: Option<String>,
    pub task: Option<String>,
    pub priority: Option<i32>,
    pub base_offset: Offset,
    pub offset: Offset,
    pub created_at: Timestamp,
    pub hash: Vec<u8>,
    pub status: String,
    pub queue_status: Option<String>,
    pub consumed_by: i32,
    pub groups: i32,
    pub lease_expires_at: Option<Timestamp>,
}

/// `queen.list_messages_v1`
///
/// # Errors
/// Whatever the database answers.
pub async fn list_messages_v1(db: &impl Sql, filter: &Filter<'_>, limit: i32, offset: i32) -> Result<Listing, Error> {
    let query =
        "select total, truncated, queue_mode, groups, partition_id, queue, partition, namespace, task, priority,
            base_offset, \"offset\", created_at, hash, status, queue_status, consumed_by, group_count, lease_expires_at
        from queen.list_messages_v1($1, $2, $3, $4, $5, $6, $7, $8, $9)";
    let Filter { queue, partition, namespace, task, status, from, to } = filter;
    let rows = db
        .rows(
            query,
            &[
                (queue, Type::TEXT),
                (partition, Type::TEXT),
                (namespace, Type::TEXT),
                (task, Type::TEXT),
                (status, Type::TEXT),
                (from, Type::TIMESTAMPTZ),
                (to, Type::TIMESTAMPTZ),
                (&limit, Type::INT4),
                (&offset, Type::INT4),
            ],
        )
        .await?;
    let first = rows.first().expect("one row at least, for the totals");
    let mut listing = Listing {
        total: first.try_get(0)?,
        is_truncated: first.try_get(1)?,
        has_queue_mode: first.try_get(2)?,
        groups: first.try_get(3)?,
        page: Vec::with_capacity(rows.len()),
    };
    for row in &rows {
        let partition_id: Option<Uuid> = row.try_get(4)?;
        let Some(partition_id) = partition_id else { continue };
        listing.page.push(Listed {
            partition_id,
            queue: row.try_get(5)?,
            partition: row.try_get(6)?,
            namespace: row.try_get(7)?,
            task: row.try_get(8)?,
            priority: row.try_get(9)?,
            base_offset: row.try_get(10)?,
            offset: row.try_get(11)?,
            created_at: row.try_get(12)?,
            hash: row.try_get(13)?,
            status: row.try_get(14)?,
            queue_status: row.try_get(15)?,
            consumed_by: row.try_get(16)?,
            groups: row.try_get(17)?,
            lease_expires_at: row.try_get(18)?,
        });
    }
    Ok(listing)
}

/// A segment of listed messages.
pub enum Stored {
    Blob(Vec<u8>),
    /// Retention has deleted it.
    Gone,
    /// It was left where it is, because those before it take all the memory that one answer may.
    Omitted,
}

/// `queen.log_message_segments_v1`: one answer per segment, which is named by any of its offsets.
///
/// # Errors
/// Whatever the database answers.
pub async fn log_message_segments_v1(
    db: &impl Sql, segments: &[(Uuid, Offset)], bytes: i64,
) -> Result<Vec<Stored>, Error> {
    let pids: Vec<Uuid> = segments.iter().map(|(pid, _)| *pid).collect();
    let offsets: Vec<Offset> = segments.iter().map(|(_, offset)| *offset).collect();
    let query = "select blob, is_omitted from queen.log_message_segments_v1($1, $2, $3)";
    let params = [(&pids as _, Type::UUID_ARRAY), (&offsets as _, Type::INT8_ARRAY), (&bytes as _, Type::INT8)];
    let rows = db.rows(query, &params).await?;
    rows.iter()
        .map(|row| {
            let blob: Option<Vec<u8>> = row.try_get(0)?;
            let is_omitted: bool = row.try_get(1)?;
            Ok(match blob {
                Some(blob) => Stored::Blob(blob),
                None if is_omitted => Stored::Omitted,
                None => Stored::Gone,
            })
        })
        .collect()
}

/// What is known of one transaction id in one partition.
pub struct Found {
    pub queue: String,
    pub partition: String,
    pub namespace: Option<String>,
    pub task: Option<String>,
    /// The queue's options as `/configure` shows them.
    pub options: Value,
    pub live: Option<Live>,
    pub status: String,
    pub lease_expires_at: Option<Timestamp>,
    /// Failures charged to the message where it is the next one.
    pub retry_count: i32,
    pub groups: Vec<Group>,
    pub letter: Option<FoundLetter>,
}

/// The segment that holds the message.
pub struct Live {
    pub base_offset: Offset,
    pub offset: Offset,
    pub created_at: Timestamp,
    pub blob: Vec<u8>,
}

/// How far one group has come with the message.
pub struct Group {
    pub name: String,
    pub is_consumed: bool,
    pub lease_expires_at: Option<Timestamp>,
}

/// The newest dead letter with the transaction id.
pub struct FoundLetter {
    pub id: Uuid,
    pub offset: Offset,
    pub message_id: Option<Uuid>,
    pub payload: Option<String>,
    pub error: Option<String>,
    pub retry_count: i32,
    pub failed_at: Timestamp,
    pub trace_id: Option<Uuid>,
    pub producer: Option<String>,
    pub is_encrypted: bool,
}

/// `queen.get_message_v1`: `None` if there is no such partition.
///
/// # Errors
/// Whatever the database answers.
pub async fn get_message_v1(
    db: &impl Sql, pid: PartitionId, transaction_id: &str, hash: &[u8],
) -> Result<Option<Found>, Error> {
    let query = "select queue, partition, namespace, task, options, base_offset, \"offset\", created_at, blob, status,
            lease_expires_at, retry_count, group_names, group_consumed, group_leases, letter_id, letter_offset,
            letter_message_id, letter_payload, letter_error, letter_retry_count, letter_failed_at, letter_trace_id,
            letter_producer, letter_is_encrypted
        from queen.get_message_v1($1, $2, $3)";
    let params = [(&pid.0 as _, Type::UUID), (&transaction_id as _, Type::TEXT), (&hash as _, Type::BYTEA)];
    let rows = db.rows(query, &params).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    let Json(options) = row.try_get(4)?;
    let blob: Option<Vec<u8>> = row.try_get(8)?;
    let live = match blob {
        Some(blob) => {
            Some(Live { base_offset: row.try_get(5)?, offset: row.try_get(6)?, created_at: row.try_get(7)?, blob })
        }
        None => None,
    };
    let letter_id: Option<Uuid> = row.try_get(15)?;
    let letter = match letter_id {
        Some(id) => Some(FoundLetter {
            id,
            offset: row.try_get(16)?,
            message_id: row.try_get(17)?,
            payload: row.try_get(18)?,
            error: row.try_get(19)?,
            retry_count: row.try_get(20)?,
            failed_at: row.try_get(21)?,
            trace_id: row.try_get(22)?,
            producer: row.try_get(23)?,
            is_encrypted: row.try_get(24)?,
        }),
        None => None,
    };
    Ok(Some(Found {
        queue: row.try_get(0)?,
        partition: row.try_get(1)?,
        namespace: row.try_get(2)?,
        task: row.try_get(3)?,
        options,
        live,
        status: row.try_get(9)?,
        lease_expires_at: row.try_get(10)?,
        retry_count: row.try_get(11)?,
        groups: groups(row.try_get(12)?, row.try_get(13)?, row.try_get(14)?),
        letter,
    }))
}

/// Parallel columns, all `None` if nobody consumes the partition.
fn groups(
    names: Option<Vec<String>>, consumed: Option<Vec<bool>>, leases: Option<Vec<Option<Timestamp>>>,
) -> Vec<Group> {
    let consumed = consumed.unwrap_or_default();
    let leases = leases.unwrap_or_default();
    names
        .unwrap_or_default()
        .into_iter()
        .zip(consumed)
        .zip(leases)
        .map(|((name, is_consumed), lease_expires_at)| Group { name, is_consumed, lease_expires_at })
        .collect()
}

#[derive(Deserialize)]
struct Deleted {
    deleted: i64,
}

/// `queen.delete_message_v1`: how many dead letters were deleted.
///
/// # Errors
/// Whatever the database answers; nothing was deleted then.
pub async fn delete_message_v1(db: &(impl Sql + Sync), pid: PartitionId, transaction_id: &str) -> Result<i64, Error> {
    let query = "select queen.delete_message_v1($1, $2)";
    let row = db.row(query, &[(&pid.0, Type::UUID), (&transaction_id, Type::TEXT)]).await?;
    let Json(Deleted { deleted }) = row.try_get(0)?;
    Ok(deleted)
}
