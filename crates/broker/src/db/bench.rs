//! What the benchmark compares with: plain inserts into tables of its own, in a schema that it drops.

pub mod jobs;
pub mod retention;

use tokio_postgres::{Client, Error};
use uuid::Uuid;

/// Makes the tables. `segments` is shaped like the log's, `messages` holds one row a message.
pub async fn create(client: &Client) -> Result<(), Error> {
    client
        .batch_execute(
            "drop schema if exists ebbtide_bench cascade;
             create schema ebbtide_bench;
             create table ebbtide_bench.segments (like queen.log_segments including all);
             create table ebbtide_bench.messages (id uuid primary key, queue text not null, payload jsonb not null)",
        )
        .await
}

pub async fn remove(client: &Client) -> Result<(), Error> {
    client.batch_execute("drop schema if exists ebbtide_bench cascade").await
}

/// Empties the tables and writes out what the last measurement left behind, so that it burdens no other.
pub async fn settle(client: &Client) -> Result<(), Error> {
    client.batch_execute("truncate ebbtide_bench.segments, ebbtide_bench.messages").await?;
    client.batch_execute("checkpoint").await
}

pub async fn server_version(client: &Client) -> Result<String, Error> {
    Ok(client.query_one("select current_setting('server_version')", &[]).await?.get(0))
}

/// Commits so far in this database, and bytes of log written by the whole server.
pub async fn work_done(client: &Client) -> Result<(i64, i64), Error> {
    let query = "select xact_commit, pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint
                   from pg_stat_database where datname = current_database()";
    let row = client.query_one(query, &[]).await?;
    Ok((row.get(0), row.get(1)))
}

/// Stored blobs that hold exactly `messages` messages each.
pub async fn blobs(client: &Client, queue: &str, messages: i64, rows_max: i64) -> Result<Vec<Vec<u8>>, Error> {
    let query = "select s.blob from queen.log_segments s
                   join queen.log_partitions p on p.id = s.partition_id
                   join queen.queues q on q.id = p.queue_id
                  where q.name = $1 and s.end_offset - s.base_offset + 1 = $2 limit $3";
    Ok(client.query(query, &[&queue, &messages, &rows_max]).await?.iter().map(|row| row.get(0)).collect())
}

/// Messages stored in a queue.
pub async fn messages_stored(client: &Client, queue: &str) -> Result<i64, Error> {
    let query = "select coalesce(sum(s.end_offset - s.base_offset + 1), 0)::bigint from queen.log_segments s
                   join queen.log_partitions p on p.id = s.partition_id
                   join queen.queues q on q.id = p.queue_id where q.name = $1";
    Ok(client.query_one(query, &[&queue]).await?.get(0))
}

/// A session that inserts segments, one commit a call.
pub struct SegmentSession {
    client: Client,
    insert: tokio_postgres::Statement,
}

impl SegmentSession {
    pub async fn new(client: Client) -> Result<Self, Error> {
        let query = "insert into ebbtide_bench.segments (partition_id, base_offset, end_offset, created_at, blob)
                     select pid, base, ended, clock_timestamp(), blob
                       from unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::bytea[]) as t (pid, base, ended, blob)";
        let insert = client.prepare(query).await?;
        Ok(Self { client, insert })
    }

    /// The four lists are columns of the rows to insert.
    pub async fn insert(
        &self, partitions: &[Uuid], bases: &[i64], ends: &[i64], blobs: &[&[u8]],
    ) -> Result<u64, Error> {
        self.client.execute(&self.insert, &[&partitions, &bases, &ends, &blobs]).await
    }
}

/// A session that inserts single messages, one commit a call.
pub struct MessageSession {
    client: Client,
    insert: tokio_postgres::Statement,
}

impl MessageSession {
    pub async fn new(client: Client) -> Result<Self, Error> {
        let query = "insert into ebbtide_bench.messages (id, queue, payload) values ($1, $2, $3::text::jsonb)";
        let insert = client.prepare(query).await?;
        Ok(Self { client, insert })
    }

    pub async fn insert(&self, id: Uuid, queue: &str, payload: &str) -> Result<u64, Error> {
        self.client.execute(&self.insert, &[&id, &queue, &payload]).await
    }
}
