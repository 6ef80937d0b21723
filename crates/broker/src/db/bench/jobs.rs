//! What the benchmark of jobs compares with, and the finished jobs that it lets retention delete.

use tokio_postgres::{Client, Error, Statement};
use uuid::Uuid;

/// Rows that one statement builds.
const BUILD_ROWS: i64 = 100_000;

/// Makes a table with the columns, defaults and indexes of the jobs.
pub async fn create(client: &Client) -> Result<(), Error> {
    client
        .batch_execute(
            "drop schema if exists ebbtide_bench cascade;
             create schema ebbtide_bench;
             create table ebbtide_bench.jobs (like ebbtide_jobs.jobs including all)",
        )
        .await
}

/// Writes out what the last measurement left behind, so that it burdens no other.
pub async fn settle(client: &Client) -> Result<(), Error> {
    client.batch_execute("truncate ebbtide_bench.jobs").await?;
    client.batch_execute("vacuum (analyze) ebbtide_jobs.jobs, ebbtide_jobs.checkpoints").await?;
    client.batch_execute("checkpoint").await
}

/// Jobs of `queue` that were completed forty days ago, each with a checkpoint.
pub async fn build_finished(client: &Client, queue: &str, jobs: i64) -> Result<(), Error> {
    let insert = "with made as (
            insert into ebbtide_jobs.jobs (type, args, queue, status, attempt, result, created_at, updated_at,
                                           started_at, completed_at)
            select 'noop', '1', $1, 'completed', 1, 'null', t.at, t.at, t.at, t.at
              from generate_series(1, $2::bigint) n,
                   lateral (select now() - interval '40 days' + n * interval '1 millisecond' as at) t
            returning id)
        insert into ebbtide_jobs.checkpoints (job_id, call_index, call_type, result, span_end)
        select id, 0, 'step', '{\"answer\":42}', 1 from made";
    let mut left = jobs;
    while 0 < left {
        let rows = left.min(BUILD_ROWS);
        client.execute(insert, &[&queue, &rows]).await?;
        left -= rows;
    }
    settle(client).await
}

/// A session that inserts one row, or claims and completes many, as barely as SQL allows.
pub struct JobSession {
    client: Client,
    insert_one: Statement,
    insert: Statement,
    update: Statement,
}

impl JobSession {
    pub async fn new(client: Client) -> Result<Self, Error> {
        let one = "insert into ebbtide_bench.jobs (id, type, args, queue) values ($1, 'noop', '1', 'default')";
        let insert = "insert into ebbtide_bench.jobs (id, type, args, queue)
                      select id, 'noop', '1', 'default' from unnest($1::uuid[]) id";
        let update = "update ebbtide_bench.jobs set status = $2::text, updated_at = statement_timestamp(),
                             completed_at = case when $2::text = 'completed' then statement_timestamp() end
                       where id = any($1)";
        let (insert_one, insert) = (client.prepare(one).await?, client.prepare(insert).await?);
        let update = client.prepare(update).await?;
        Ok(Self { client, insert_one, insert, update })
    }

    pub async fn insert_one(&self, id: Uuid) -> Result<u64, Error> {
        self.client.execute(&self.insert_one, &[&id]).await
    }

    pub async fn insert(&self, ids: &[Uuid]) -> Result<u64, Error> {
        self.client.execute(&self.insert, &[&ids]).await
    }

    /// The two writes that a job needs from its enqueue to its end.
    pub async fn pass(&self, ids: &[Uuid]) -> Result<u64, Error> {
        self.client.execute(&self.update, &[&ids, &"running"]).await?;
        self.client.execute(&self.update, &[&ids, &"completed"]).await
    }
}
