//! Messages as an operator sees them: listed, read, deleted, replayed, moved to the dead letters.

mod act;
mod list;
mod read;
#[path = "../support/mod.rs"]
mod support;

use support::lane::Lane;
use uuid::Uuid;

/// A path can carry any transaction id.
pub(crate) fn escaped(id: &str) -> String {
    id.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

pub(crate) async fn commit(lane: &Lane<'_>, group: &str, committed: i64) {
    let query = "insert into queen.log_consumers (partition_id, consumer_group, committed) values ($1, $2, $3)
        on conflict (partition_id, consumer_group) do update set committed = excluded.committed";
    lane.broker.execute(query, &[&lane.id, &group, &committed]).await;
}

pub(crate) async fn file(lane: &Lane<'_>, group: &str, offset: i64, id: &str, payload: Option<&str>) -> Uuid {
    let query = "insert into queen.log_dlq (partition_id, consumer_group, \"offset\", transaction_id, payload, error)
        values ($1, $2, $3, $4, $5, 'boom') returning id";
    lane.broker.row(query, &[&lane.id, &group, &offset, &id, &payload]).await.get(0)
}
