//! Twins of `sql/procedures/provision.sql` and `push.sql`.

use jiff::Timestamp;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::Sql;
use crate::error::Error;
use crate::id::{Offset, PartitionId};

/// `queen.log_provision_v1`: the ids in the order of the names; `None` for one that somebody deleted meanwhile.
pub async fn log_provision_v1(
    db: &(impl Sql + Sync), queues: &[&str], partitions: &[&str],
) -> Result<Vec<Option<PartitionId>>, Error> {
    let query = "select queen.log_provision_v1($1, $2)";
    let row = db.row(query, &[(&queues, Type::TEXT_ARRAY), (&partitions, Type::TEXT_ARRAY)]).await?;
    let ids: Vec<Option<Uuid>> = row.get(0);
    Ok(ids.into_iter().map(|id| id.map(PartitionId)).collect())
}

/// `queen.log_queue_encryption_v1`: whether each queue wants its payloads encrypted, in the order of the names.
///
/// # Errors
/// Whatever the database answers.
pub async fn log_queue_encryption_v1(db: &(impl Sql + Sync), queues: &[&str]) -> Result<Vec<bool>, Error> {
    let query = "select coalesce(queen.log_queue_encryption_v1($1), '{}')";
    let row = db.row(query, &[(&queues, Type::TEXT_ARRAY)]).await?;
    Ok(row.try_get(0)?)
}

/// Segments to append, one to each of several partitions: parallel columns, in any order.
#[derive(Default)]
pub struct Batch<'a> {
    pub partition_ids: Vec<Uuid>,
    pub counts: Vec<i32>,
    pub hashes: Vec<&'a [u8]>,
    pub blobs: Vec<&'a [u8]>,
    /// What the caller's index vouches for: none of the hashes is stored up to this offset…
    pub verified: Vec<Offset>,
    /// …within this many seconds.
    pub windows: Vec<i32>,
    /// Whether the payloads are encrypted; `None` where that is not compared with the queue.
    pub sealed: Option<Vec<bool>>,
}

/// What became of one element of a [`Batch`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// The queue's dedup window, in seconds; 0 is off.
    pub window_seconds: i32,
    pub written: Written,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Written {
    /// The whole segment, from this offset on.
    Base(Offset),
    /// Nothing, because these messages (by position) are stored already (at this offset).
    Duplicates(Vec<(usize, Offset)>),
}

/// `queen.log_push_batch_v1`: one transaction. Also says when the database stamped the segments.
///
/// With `lock_ms` a partition whose lock is held longer fails the whole batch with
/// [`Error::LockTimeout`], and one whose queue wants to be encrypted otherwise with [`Error::EncryptionChanged`]; nothing
/// is written then.
pub async fn log_push_batch_v1(
    db: &(impl Sql + Sync), batch: &Batch<'_>, lock_ms: Option<i32>,
) -> Result<(Vec<Pushed>, Timestamp), Error> {
    let query = "select o_bases, o_windows, o_created_at, o_dup_elements, o_dup_indexes, o_dup_offsets
        from queen.log_push_batch_v1($1, $2, $3, $4, $5, $6, $7, $8)";
    let row = db
        .row(
            query,
            &[
                (&batch.partition_ids, Type::UUID_ARRAY),
                (&batch.counts, Type::INT4_ARRAY),
                (&batch.hashes, Type::BYTEA_ARRAY),
                (&batch.blobs, Type::BYTEA_ARRAY),
                (&batch.verified, Type::INT8_ARRAY),
                (&batch.windows, Type::INT4_ARRAY),
                (&lock_ms, Type::INT4),
                (&batch.sealed, Type::BOOL_ARRAY),
            ],
        )
        .await?;
    let bases: Vec<Option<Offset>> = row.get(0);
    let windows: Vec<i32> = row.get(1);
    let written = |base: Option<Offset>| base.map_or_else(|| Written::Duplicates(Vec::new()), Written::Base);
    let mut pushed: Vec<Pushed> = bases
        .into_iter()
        .zip(windows)
        .map(|(base, window_seconds)| Pushed { window_seconds, written: written(base) })
        .collect();
    let elements: Option<Vec<i32>> = row.get(3);
    if let Some(elements) = elements {
        let indexes: Vec<i32> = row.get(4);
        let offsets: Vec<Offset> = row.get(5);
        for ((element, index), offset) in elements.into_iter().zip(indexes).zip(offsets) {
            let position = |n: i32| usize::try_from(n).expect("positions count up");
            match &mut pushed[position(element - 1)].written {
                Written::Duplicates(found) => found.push((position(index), offset)),
                Written::Base(_) => unreachable!("an element with a duplicate is not written"),
            }
        }
    }
    Ok((pushed, row.get(2)))
}

/// A stored segment.
#[derive(Clone, Debug)]
pub struct StoredSegment {
    pub base_offset: Offset,
    pub end_offset: Offset,
    pub created_at: Timestamp,
    pub blob: Vec<u8>,
}

/// `queen.log_segment_at_v1`: the segment that holds `offset`, unless retention has deleted it.
pub async fn log_segment_at_v1(
    db: &(impl Sql + Sync), pid: PartitionId, offset: Offset,
) -> Result<Option<StoredSegment>, Error> {
    let query = "select base_offset, end_offset, created_at, blob from queen.log_segment_at_v1($1, $2)";
    let rows = db.rows(query, &[(&pid.0, Type::UUID), (&offset, Type::INT8)]).await?;
    Ok(rows.first().map(|row| StoredSegment {
        base_offset: row.get(0),
        end_offset: row.get(1),
        created_at: row.get(2),
        blob: row.get(3),
    }))
}

/// `queen.log_txns_window_v1`: the first and the last offset of a partition's window.
pub async fn log_txns_window_v1(
    db: &(impl Sql + Sync), pid: PartitionId, window_seconds: i32,
) -> Result<Option<(Offset, Offset)>, Error> {
    let query = "select start_offset, last_offset from queen.log_txns_window_v1($1, $2)";
    let rows = db.rows(query, &[(&pid.0, Type::UUID), (&window_seconds, Type::INT4)]).await?;
    Ok(rows.first().map(|row| (row.get(0), row.get(1))))
}

/// A row of `queen.log_txns`.
#[derive(Clone, Debug)]
pub struct StoredHashes {
    pub base_offset: Offset,
    pub created_at: Timestamp,
    pub hashes: Vec<u8>,
}

/// `queen.log_txns_read_v1`: sidecar rows from an offset on, in order, at least one if there is one.
pub async fn log_txns_read_v1(
    db: &(impl Sql + Sync), pid: PartitionId, from: Offset, messages_max: i64,
) -> Result<Vec<StoredHashes>, Error> {
    let query = "select base_offset, created_at, hashes from queen.log_txns_read_v1($1, $2, $3)";
    let rows = db.rows(query, &[(&pid.0, Type::UUID), (&from, Type::INT8), (&messages_max, Type::INT8)]).await?;
    Ok(rows
        .iter()
        .map(|row| StoredHashes { base_offset: row.get(0), created_at: row.get(1), hashes: row.get(2) })
        .collect())
}
