//! Twins of `sql/procedures/pop.sql`: claims, and what a claim delivers.

use jiff::Timestamp;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::{Param, Sql};
use crate::error::Error;
use crate::id::{Offset, PartitionId};

/// What every form of pop says about its consumer and its bounds.
#[derive(Clone, Debug)]
pub struct Claim {
    pub group: String,
    /// Most partitions; the one-partition form ignores it.
    pub partitions: i32,
    /// Most messages.
    pub budget: i32,
    /// `None` leases as long as the queue says, else 60 seconds.
    pub lease_seconds: Option<i32>,
    pub worker: String,
    /// Commit at delivery and lease nothing: at most once. What a broken connection loses is lost.
    pub auto_ack: bool,
    pub sub_mode: String,
    pub sub_from: String,
    /// Only the newest message of each partition. What the group's subscription says wins.
    pub conflation: bool,
}

/// What a pop found.
#[derive(Debug, Default)]
pub struct Popped {
    pub deliveries: Vec<Delivery>,
    /// The group's subscription conflates.
    pub is_conflated: bool,
    /// The subscription and the request disagree about that.
    pub is_conflict: bool,
}

/// A segment, and which of its messages are delivered.
#[derive(Debug)]
pub struct Delivery {
    pub partition_id: PartitionId,
    pub partition: String,
    pub queue: String,
    pub base_offset: Offset,
    pub start_idx: usize,
    pub take: usize,
    /// All messages of the segment.
    pub msg_count: usize,
    pub created_at: Timestamp,
    pub blob: Vec<u8>,
}

/// `queen.log_pop_partition_v2`
pub async fn log_pop_partition_v2(
    db: &(impl Sql + Sync), queue: &str, partition: &str, claim: &Claim,
) -> Result<Popped, Error> {
    let query = "select * from queen.log_pop_partition_v2($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)";
    let params: &[Param<'_>] = &[
        (&queue, Type::TEXT),
        (&partition, Type::TEXT),
        (&claim.group, Type::TEXT),
        (&claim.budget, Type::INT4),
        (&claim.lease_seconds, Type::INT4),
        (&claim.worker, Type::TEXT),
        (&claim.auto_ack, Type::BOOL),
        (&claim.sub_mode, Type::TEXT),
        (&claim.sub_from, Type::TEXT),
        (&claim.conflation, Type::BOOL),
    ];
    popped(db.rows(query, params).await)
}

/// `queen.log_pop_queue_v2`
pub async fn log_pop_queue_v2(db: &(impl Sql + Sync), queue: &str, claim: &Claim) -> Result<Popped, Error> {
    let query = "select * from queen.log_pop_queue_v2($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)";
    let params: &[Param<'_>] = &[
        (&queue, Type::TEXT),
        (&claim.group, Type::TEXT),
        (&claim.partitions, Type::INT4),
        (&claim.budget, Type::INT4),
        (&claim.lease_seconds, Type::INT4),
        (&claim.worker, Type::TEXT),
        (&claim.auto_ack, Type::BOOL),
        (&claim.sub_mode, Type::TEXT),
        (&claim.sub_from, Type::TEXT),
        (&claim.conflation, Type::BOOL),
    ];
    popped(db.rows(query, params).await)
}

/// `queen.log_pop_discover_v2`
pub async fn log_pop_discover_v2(
    db: &(impl Sql + Sync), namespace: &str, task: &str, claim: &Claim,
) -> Result<Popped, Error> {
    let query = "select * from queen.log_pop_discover_v2($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";
    let params: &[Param<'_>] = &[
        (&namespace, Type::TEXT),
        (&task, Type::TEXT),
        (&claim.group, Type::TEXT),
        (&claim.partitions, Type::INT4),
        (&claim.budget, Type::INT4),
        (&claim.lease_seconds, Type::INT4),
        (&claim.worker, Type::TEXT),
        (&claim.auto_ack, Type::BOOL),
        (&claim.sub_mode, Type::TEXT),
        (&claim.sub_from, Type::TEXT),
        (&claim.conflation, Type::BOOL),
    ];
    popped(db.rows(query, params).await)
}

/// A row that refers to one deleted meanwhile means that there is nothing to pop.
fn popped(rows: Result<Vec<Row>, Error>) -> Result<Popped, Error> {
    let rows = match rows {
        Ok(rows) => rows,
        Err(Error::ForeignKey) => return Ok(Popped::default()),
        Err(error) => return Err(error),
    };
    let Some(first) = rows.first() else { return Ok(Popped::default()) };
    let (is_conflated, is_conflict) = (first.get("r_conflated"), first.get("r_conflict"));
    // A row without a partition says only that.
    let found = rows.iter().filter(|row| row.get::<_, Option<uuid::Uuid>>("r_pid").is_some());
    Ok(Popped { deliveries: found.map(delivery).collect::<Result<_, _>>()?, is_conflated, is_conflict })
}

fn delivery(row: &Row) -> Result<Delivery, Error> {
    let count = |name: &str| {
        let value: i32 = row.get(name);
        usize::try_from(value).map_err(|_| Error::Corrupt(format!("{name} of a segment is {value}")))
    };
    Ok(Delivery {
        partition_id: PartitionId(row.get("r_pid")),
        partition: row.get("r_partition"),
        queue: row.get("r_queue"),
        base_offset: row.get("r_base"),
        start_idx: count("r_start_idx")?,
        take: count("r_take")?,
        msg_count: count("r_msg_count")?,
        created_at: row.get("r_created_at"),
        blob: row.get("r_blob"),
    })
}
