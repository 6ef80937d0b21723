//! Twins of `sql/procedures/streams.sql`.

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::Sql;
use super::transaction::{Push, hex};
use crate::error::Error;
use crate::id::{PartitionId, QueryId};

/// A query as its runner describes it.
pub struct Query<'a> {
    pub name: &'a str,
    pub source_queue: &'a str,
    pub sink_queue: Option<&'a str>,
    /// Tells whether stored state fits what the runner would do with it.
    pub config_hash: &'a str,
}

/// What became of a registration.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Registered {
    /// `None` if the query runs with another hash; nothing was changed then.
    pub query_id: Option<Uuid>,
    pub fresh: bool,
    pub reset: bool,
}

/// `queen.log_streams_register_v1`
///
/// # Errors
/// Whatever the database answers; nothing was changed then.
pub async fn log_streams_register_v1(
    db: &(impl Sql + Sync), query: &Query<'_>, reset: bool,
) -> Result<Registered, Error> {
    let call = "select queen.log_streams_register_v1($1, $2, $3, $4, $5)";
    let row = db
        .row(
            call,
            &[
                (&query.name, Type::TEXT),
                (&query.source_queue, Type::TEXT),
                (&query.sink_queue, Type::TEXT),
                (&query.config_hash, Type::TEXT),
                (&reset, Type::BOOL),
            ],
        )
        .await?;
    let Json(registered) = row.try_get(0)?;
    Ok(registered)
}

/// Which rows of state to read. `None` lets all through; what is given must all hold.
#[derive(Default)]
pub struct Filter<'a> {
    pub keys: Option<Vec<&'a [u8]>>,
    pub prefix: Option<&'a [u8]>,
    /// Windows that ended at or before this, in milliseconds since 1970.
    pub ripe_at_or_before: Option<f64>,
}

/// One row of state.
pub struct Row {
    pub key: String,
    /// JSON exactly as it was sent.
    pub value: String,
    pub updated_at: Timestamp,
}

/// Most that is read at once.
#[derive(Clone, Copy)]
pub struct Bounds {
    pub rows_max: i32,
    pub bytes_max: i64,
}

/// `queen.log_streams_state_v1`
///
/// # Errors
/// [`Error::TooLarge`] if there is more than `bounds` allow, or whatever the database answers.
pub async fn log_streams_state_v1(
    db: &(impl Sql + Sync), query: QueryId, pid: PartitionId, filter: &Filter<'_>, bounds: Bounds,
) -> Result<Vec<Row>, Error> {
    let call = "select key, value, updated_at from queen.log_streams_state_v1($1, $2, $3, $4, $5, $6, $7)";
    let rows = db
        .rows(
            call,
            &[
                (&query.0, Type::UUID),
                (&pid.0, Type::UUID),
                (&filter.keys, Type::BYTEA_ARRAY),
                (&filter.prefix, Type::BYTEA),
                (&filter.ripe_at_or_before, Type::FLOAT8),
                (&bounds.rows_max, Type::INT4),
                (&bounds.bytes_max, Type::INT8),
            ],
        )
        .await?;
    let mut bytes = 0;
    let mut state = Vec::with_capacity(rows.len());
    for row in &rows {
        let (key, value): (&[u8], &str) = (row.try_get(0)?, row.try_get(1)?);
        bytes += key.len() + value.len();
        let key = std::str::from_utf8(key).map_err(|error| Error::Corrupt(format!("key of state: {error}")))?;
        state.push(Row { key: key.to_owned(), value: value.to_owned(), updated_at: row.try_get(2)? });
    }
    let is_within = |count: usize, max: i64| i64::try_from(count).is_ok_and(|count| count <= max);
    if !is_within(state.len(), bounds.rows_max.into()) || !is_within(bytes, bounds.bytes_max) {
        let Bounds { rows_max, bytes_max } = bounds;
        let text = format!("the state is larger than {rows_max} rows or {bytes_max} bytes; ask for a part of it");
        return Err(Error::TooLarge(text));
    }
    Ok(state)
}

/// State to write.
pub struct Upsert {
    pub key: String,
    /// JSON exactly as it was sent.
    pub value: String,
    /// The number `windowEnd` of a value that has one.
    pub window_end: Option<f64>,
}

/// How the source's batch ends.
pub struct CycleAck {
    /// The lease that must be held.
    pub worker: String,
    /// Whether the messages are done; else they are given back.
    pub completed: bool,
    /// How many of them, where the lease is kept.
    pub count: Option<i64>,
}

/// State, results and an acknowledgement that happen together or not at all.
pub struct Cycle {
    pub query_id: QueryId,
    pub partition_id: PartitionId,
    pub group: String,
    /// Whether a completed batch ends the lease.
    pub release: bool,
    /// No key stands twice in these two.
    pub upserts: Vec<Upsert>,
    pub deletes: Vec<String>,
    /// Keys that must exist.
    pub expected: Vec<String>,
    pub pushes: Vec<Push>,
    pub ack: Option<CycleAck>,
}

/// What a cycle answered.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum Cycled {
    Done(Done),
    /// The query or the partition does not exist.
    Refused {
        error: String,
    },
}

#[derive(Deserialize)]
pub struct Done {
    /// The source's.
    pub queue: String,
    pub partition: String,
    pub ack: Option<Moved>,
}

/// What became of the source's cursor.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Moved {
    pub count: i64,
    pub lease_released: bool,
    /// Whether messages are left for another pop.
    pub wake: bool,
}

/// `queen.log_streams_cycle_v1`
///
/// # Errors
/// [`Error::AckRejected`] if the lease is not held or the work is done already, or whatever else the database answers.
/// Nothing happened then.
pub async fn log_streams_cycle_v1(db: &(impl Sql + Sync), cycle: &Cycle) -> Result<Cycled, Error> {
    let request = wire(cycle);
    let row = db.row("select queen.log_streams_cycle_v1($1)", &[(&Json(&request), Type::JSONB)]).await?;
    let Json(cycled) = row.try_get(0)?;
    Ok(cycled)
}

fn wire(cycle: &Cycle) -> Value {
    let keys = |keys: &[String]| keys.iter().map(|key| hex(key.as_bytes())).collect::<Vec<_>>();
    let upserts = cycle.upserts.iter().map(
        |upsert| json!({"key": hex(upsert.key.as_bytes()), "value": upsert.value, "windowEnd": upsert.window_end}),
    );
    let pushes = cycle.pushes.iter().map(|push| {
        json!({
            "queue": push.queue,
            "partition": push.partition,
            "count": push.count,
            "hashes": hex(&push.hashes),
            "blob": hex(&push.blob),
            "sealed": push.sealed,
        })
    });
    let ack =
        cycle.ack.as_ref().map(|ack| json!({"worker": ack.worker, "completed": ack.completed, "count": ack.count}));
    json!({
        "queryId": cycle.query_id.0,
        "partitionId": cycle.partition_id.0,
        "group": cycle.group,
        "release": cycle.release,
        "upserts": upserts.collect::<Vec<_>>(),
        "deletes": keys(&cycle.deletes),
        "expected": keys(&cycle.expected),
        "pushes": pushes.collect::<Vec<_>>(),
        "ack": ack,
    })
}
