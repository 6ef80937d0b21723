//! Why something is still there: reads for a person, never for a step.

use jiff::Timestamp;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::Sql;
use crate::error::Error;

/// Partitions whose oldest segment is old enough for rule 2, and the group that has not read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unread {
    pub tenant_id: Uuid,
    pub queue: String,
    /// The slowest group; `None` where nobody has consumed at all.
    pub consumer_group: Option<String>,
    pub partitions: i64,
}

/// What holds rule 2 back, most partitions first, at most `rows_max` lines.
///
/// # Errors
/// Whatever the database answered.
pub async fn unread(db: &(impl Sql + Sync), as_of: Timestamp, rows_max: i64) -> Result<Vec<Unread>, Error> {
    let query = "select qq.tenant_id, qq.name, slow.consumer_group, count(*)
          from queen.log_partitions p
          join queen.queues qq on p.queue_id = qq.id
         cross join lateral (
                select s.created_at, s.end_offset from queen.log_segments s
                 where s.partition_id = p.id and s.base_offset >= p.log_start
                 order by s.base_offset limit 1) head
          left join lateral (
                select c.consumer_group, c.committed from queen.log_consumers c
                 where c.partition_id = p.id
                 order by c.committed, c.consumer_group limit 1) slow on true
         where qq.retention_enabled and qq.completed_retention_seconds > 0
           and head.created_at < $1 - make_interval(secs => qq.completed_retention_seconds)
           and coalesce(slow.committed < head.end_offset, true)
         group by qq.tenant_id, qq.name, slow.consumer_group
         order by count(*) desc, qq.name, slow.consumer_group
         limit $2";
    let rows = db.rows(query, &[(&as_of as _, Type::TIMESTAMPTZ), (&rows_max as _, Type::INT8)]).await?;
    let unread = rows.iter().map(|row| Unread {
        tenant_id: row.get(0),
        queue: row.get(1),
        consumer_group: row.get(2),
        partitions: row.get(3),
    });
    Ok(unread.collect())
}

/// Partitions that have been silent for the whole cleanup window and stay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Silent {
    /// The first veto, in the order in which a person would want to hear of it.
    pub reason: String,
    pub partitions: i64,
}

/// What vetoes the cleanup of silent partitions. "in use" are those that were locked when they were looked at.
///
/// # Errors
/// Whatever the database answered.
pub async fn silent(db: &(impl Sql + Sync), cutoff: Timestamp) -> Result<Vec<Silent>, Error> {
    let query = "select case
                when exists (select from queen.log_segments s where s.partition_id = p.id) then 'messages'
                when exists (select from queen.log_dlq d where d.partition_id = p.id) then 'dead letters'
                when exists (select from queen_streams.state t where t.partition_id = p.id) then 'streams state'
                when not queen.log_partition_dead_v1(p.id, $1) then 'consumer activity'
                else 'in use' end as reason,
            count(*)
          from queen.log_partitions p
         where p.created_at < $1 and p.last_write_at < $1
         group by reason
         order by count(*) desc, reason";
    let rows = db.rows(query, &[(&cutoff as _, Type::TIMESTAMPTZ)]).await?;
    Ok(rows.iter().map(|row| Silent { reason: row.get(0), partitions: row.get(1) }).collect())
}
