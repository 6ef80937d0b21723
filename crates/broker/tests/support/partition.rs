//! Partitions whose rows a test writes itself, each stamp as it likes, and the steps called on them by SQL.

use jiff::Timestamp;
use serde_json::Value;
use tokio_postgres::Client;
use uuid::Uuid;

use super::Database;

/// The cutoff of tests that pass one: fixtures are so many microseconds before or after it.
pub const CUTOFF_US: i64 = 1_767_225_600_000_000; // 2026-01-01
/// A microsecond: the finest step of a stamp.
pub const US: i64 = 1;
pub const SECOND: i64 = 1_000_000;
pub const DAY: i64 = 86_400 * SECOND;

/// The instant so many microseconds after the cutoff.
pub fn at(us: i64) -> Timestamp {
    Timestamp::from_microsecond(CUTOFF_US + us).expect("near 2026")
}

/// What a step answered: deleted, watermark, done.
pub type Answer = (i64, Option<i64>, bool);

pub fn answer(value: &Value, watermark: &str) -> Answer {
    let keys = value.as_object().expect("an object").keys().map(String::as_str);
    // What groups lost stands beside the contract's keys, and only if they lost something.
    let keys: Vec<&str> = keys.filter(|key| *key != "skipped").collect();
    assert_eq!(keys, ["deleted", "done", watermark], "exactly the contract's keys");
    assert!(value.get("skipped").is_none_or(|skipped| 0 < skipped.as_i64().expect("a count")), "{value}");
    (
        value["deleted"].as_i64().expect("a count"),
        value[watermark].as_i64(),
        value["done"].as_bool().expect("a boolean"),
    )
}

/// A database without a server.
pub struct Log {
    pub sql: Client,
    pub database: Database,
}

impl Log {
    pub async fn start() -> Self {
        let database = Database::create().await;
        Self { sql: database.client().await, database }
    }

    pub async fn execute(&self, query: &str) {
        self.sql.batch_execute(query).await.unwrap_or_else(|error| panic!("{query}: {error:?}"));
    }

    /// A queue of the default tenant with nothing but its name.
    pub async fn queue(&self, name: &str) -> Uuid {
        let query = "insert into queen.queues (name) values ($1) returning id";
        self.sql.query_one(query, &[&name]).await.expect("queue").get(0)
    }

    /// A partition in a queue of its own.
    pub async fn partition(&self) -> Partition<'_> {
        let queue = self.queue(&Uuid::now_v7().to_string()).await;
        self.partition_of(queue, "p").await
    }

    /// Created and last written at two ages, both long before the cutoff.
    pub async fn partition_of(&self, queue: Uuid, name: &str) -> Partition<'_> {
        self.partition_with_id(Uuid::now_v7(), queue, name).await
    }

    pub async fn partition_with_id(&self, id: Uuid, queue: Uuid, name: &str) -> Partition<'_> {
        let query = "insert into queen.log_partitions (id, queue_id, name, created_at, last_write_at)
            values ($1, $2, $3, $4, $5)";
        self.sql.execute(query, &[&id, &queue, &name, &at(-90 * DAY), &at(-80 * DAY)]).await.expect("partition");
        Partition { log: self, id }
    }

    pub async fn cleanup(&self, cutoff: Option<Timestamp>, rows_max: Option<i32>) -> (i64, bool) {
        let query = "select queen.log_partition_cleanup_step_v1($1, $2)";
        let value: Value = self.sql.query_one(query, &[&cutoff, &rows_max]).await.expect("cleanup").get(0);
        assert_eq!(value.as_object().expect("an object").len(), 2, "exactly the contract's keys");
        (value["deleted"].as_i64().expect("a count"), value["done"].as_bool().expect("a boolean"))
    }

    /// The names of the partitions that are there.
    pub async fn partitions(&self) -> Vec<String> {
        let rows = self.sql.query("select name from queen.log_partitions order by name", &[]).await.expect("names");
        rows.iter().map(|row| row.get(0)).collect()
    }

    pub async fn count(&self, query: &str) -> i64 {
        self.sql.query_one(query, &[]).await.unwrap_or_else(|error| panic!("{query}: {error:?}")).get(0)
    }
}

#[derive(Clone, Copy)]
pub struct Partition<'a> {
    pub log: &'a Log,
    pub id: Uuid,
}

impl Partition<'_> {
    /// Adds segments `(base, end, created)`, the last one being the newest message of the partition.
    pub async fn segments(self, segments: &[(i64, i64, i64)]) -> Self {
        for &(base, end, created) in segments {
            let query = "insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
                values ($1, $2, $3, $4, '\\x00')";
            self.log.sql.execute(query, &[&self.id, &base, &end, &at(created)]).await.expect("segment");
            self.set("last_offset = greatest(last_offset, $2)", end).await;
        }
        self
    }

    /// Adds sidecar rows `(base, end, created)`.
    pub async fn txns(self, rows: &[(i64, i64, i64)]) -> Self {
        for &(base, end, created) in rows {
            let query = "insert into queen.log_txns (partition_id, base_offset, end_offset, created_at, hashes)
                values ($1, $2, $3, $4, '\\x00')";
            self.log.sql.execute(query, &[&self.id, &base, &end, &at(created)]).await.expect("sidecar row");
        }
        self
    }

    /// A cursor without a lease; one that exists is moved.
    pub async fn cursor(self, group: &str, committed: i64) -> Self {
        let query = "insert into queen.log_consumers (partition_id, consumer_group, committed, created_at)
            values ($1, $2, $3, $4)
            on conflict (partition_id, consumer_group) do update set committed = excluded.committed";
        self.log.sql.execute(query, &[&self.id, &group, &committed, &at(-70 * DAY)]).await.expect("cursor");
        self
    }

    pub async fn set(self, assignment: &str, value: i64) -> Self {
        let query = format!("update queen.log_partitions set {assignment} where id = $1");
        self.log.sql.execute(&query, &[&self.id, &value]).await.expect("partition updated");
        self
    }

    pub async fn stamp(self, column: &str, us: i64) -> Self {
        let query = format!("update queen.log_partitions set {column} = $2 where id = $1");
        self.log.sql.execute(&query, &[&self.id, &at(us)]).await.expect("partition updated");
        self
    }

    pub async fn step(self, all: Option<Timestamp>, completed: Option<Timestamp>, rows_max: i32) -> Answer {
        let query = "select queen.log_retention_step_v1($1, $2, $3, $4)";
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 4] = [&self.id, &all, &completed, &rows_max];
        answer(&self.log.sql.query_one(query, &params).await.expect("step").get(0), "new_log_start")
    }

    pub async fn evict(self, cutoff: Option<Timestamp>, rows_max: i32) -> Answer {
        let query = "select queen.log_evict_max_wait_step_v1($1, $2, $3)";
        let row = self.log.sql.query_one(query, &[&self.id, &cutoff, &rows_max]).await.expect("eviction");
        answer(&row.get(0), "new_log_start")
    }

    pub async fn purge(self, cutoff: Option<Timestamp>, rows_max: i32) -> Answer {
        let query = "select queen.log_txns_purge_step_v1($1, $2, $3)";
        let row = self.log.sql.query_one(query, &[&self.id, &cutoff, &rows_max]).await.expect("purge");
        answer(&row.get(0), "new_txns_start")
    }

    pub async fn is_dead(self, cutoff: Option<Timestamp>) -> Option<bool> {
        let query = "select queen.log_partition_dead_v1($1, $2)";
        self.log.sql.query_one(query, &[&self.id, &cutoff]).await.expect("predicate").get(0)
    }

    /// The base offsets of the segments that are left.
    pub async fn live(self) -> Vec<i64> {
        let query = "select base_offset from queen.log_segments where partition_id = $1 order by 1";
        self.bases(query).await
    }

    /// The base offsets of the sidecar rows that are left.
    pub async fn hashes(self) -> Vec<i64> {
        let query = "select base_offset from queen.log_txns where partition_id = $1 order by 1";
        self.bases(query).await
    }

    async fn bases(self, query: &str) -> Vec<i64> {
        let rows = self.log.sql.query(query, &[&self.id]).await.expect("offsets");
        rows.iter().map(|row| row.get(0)).collect()
    }

    pub async fn number(self, column: &str) -> i64 {
        let query = format!("select {column} from queen.log_partitions where id = $1");
        self.log.sql.query_one(&query, &[&self.id]).await.expect("partition").get(0)
    }

    /// What the audit says of this partition, oldest first.
    pub async fn history(self) -> Vec<(i32, String)> {
        let query = "select messages_deleted, retention_type from queen.retention_history
            where partition_id = $1 order by executed_at";
        let rows = self.log.sql.query(query, &[&self.id]).await.expect("history");
        rows.iter().map(|row| (row.get(0), row.get(1))).collect()
    }
}
