//! Twins of `sql/procedures/provision.sql` and `push.sql`.

use jiff::Timestamp;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::Sql;
use crate::error::Error;
use crate::id::{Offset, PartitionId};

/// `queen.log_provision_v1`
pub async fn log_provision_v1(db: &(impl Sql + Sync), queues: &[&str], partitions: &[&str]) -> Result<(), Error> {
    let query = "select queen.log_provision_v1($1, $2)";
    db.rows(query, &[(&queues, Type::TEXT_ARRAY), (&partitions, Type::TEXT_ARRAY)]).await?;
    Ok(())
}

/// Segments to append, one to each of several partitions: parallel columns, in any order.
#[derive(Default)]
pub struct Batch<'a> {
    pub queues: Vec<&'a str>,
    pub partitions: Vec<&'a str>,
    pub counts: Vec<i32>,
    pub hashes: Vec<&'a [u8]>,
    pub blobs: Vec<&'a [u8]>,
    /// What the caller's index knows: of this partition…
    pub known: Vec<Option<Uuid>>,
    /// …every hash up to this offset…
    pub verified: Vec<Offset>,
    /// …within this many seconds.
    pub windows: Vec<i32>,
}

/// What became of one element of a [`Batch`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pushed {
    pub partition_id: PartitionId,
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
/// [`Error::LockTimeout`]; nothing is written then.
pub async fn log_push_batch_v1(
    db: &(impl Sql + Sync), batch: &Batch<'_>, lock_ms: Option<i32>,
) -> Result<(Vec<Pushed>, Timestamp), Error> {
    let query = "select o_pids, o_bases, o_windows, o_created_at, o_dup_elements, o_dup_indexes, o_dup_offsets
        from queen.log_push_batch_v1($1, $2, $3, $4, $5, $6, $7, $8, null, $9)";
    let row = db
        .row(
            query,
            &[
                (&batch.queues, Type::TEXT_ARRAY),
                (&batch.partitions, Type::TEXT_ARRAY),
                (&batch.counts, Type::INT4_ARRAY),
                (&batch.hashes, Type::BYTEA_ARRAY),
                (&batch.blobs, Type::BYTEA_ARRAY),
                (&batch.known, Type::UUID_ARRAY),
                (&batch.verified, Type::INT8_ARRAY),
                (&batch.windows, Type::INT4_ARRAY),
                (&lock_ms, Type::INT4),
            ],
        )
        .await?;
    let pids: Vec<Uuid> = row.get(0);
    let bases: Vec<Option<Offset>> = row.get(1);
    let windows: Vec<i32> = row.get(2);
    let mut pushed: Vec<Pushed> = pids
        .into_iter()
        .zip(bases)
        .zip(windows)
        .map(|((pid, base), window_seconds)| Pushed {
            partition_id: PartitionId(pid),
            window_seconds,
            written: base.map_or_else(|| Written::Duplicates(Vec::new()), Written::Base),
        })
        .collect();
    let elements: Option<Vec<i32>> = row.get(4);
    if let Some(elements) = elements {
        let indexes: Vec<i32> = row.get(5);
        let offsets: Vec<Offset> = row.get(6);
        for ((element, index), offset) in elements.into_iter().zip(indexes).zip(offsets) {
            let position = |n: i32| usize::try_from(n).expect("positions count up");
            match &mut pushed[position(element - 1)].written {
                Written::Duplicates(found) => found.push((position(index), offset)),
                Written::Base(_) => unreachable!("an element with a duplicate is not written"),
            }
        }
    }
    Ok((pushed, row.get(3)))
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
