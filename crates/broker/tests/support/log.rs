//! Messages put straight into the log, so that a test can give them any age.

use ebbtide::segment::{Frame, Packer, new_message_id};
use serde_json::Value;
use uuid::Uuid;

use super::Broker;

/// One stored segment.
#[derive(Clone, Copy, Debug)]
pub struct Stored {
    pub partition_id: Uuid,
    pub base: i64,
}

impl Broker {
    /// Stores one segment, written `age` seconds ago, and wakes whoever waits for it. Transaction ids
    /// are `partition-offset`.
    pub async fn store_payloads(&self, queue: &str, partition: &str, age: f64, payloads: &[&str]) -> Stored {
        let count = i64::try_from(payloads.len()).expect("few");
        self.execute("insert into queen.queues (name) values ($1) on conflict do nothing", &[&queue]).await;
        self.execute(
            "insert into queen.log_partitions (queue_id, name)
             select id, $2 from queen.queues where name = $1 on conflict do nothing",
            &[&queue, &partition],
        )
        .await;
        let row = self
            .row(
                "update queen.log_partitions p set last_offset = last_offset + $3,
                     last_write_at = clock_timestamp() - make_interval(secs => $4)
                 from queen.queues q where q.id = p.queue_id and q.name = $1 and p.name = $2
                 returning p.id, p.last_offset - $3 + 1",
                &[&queue, &partition, &count, &age],
            )
            .await;
        let stored = Stored { partition_id: row.get(0), base: row.get(1) };
        let ids: Vec<String> =
            (stored.base..stored.base + count).map(|offset| format!("{partition}-{offset}")).collect();
        let frames = ids.iter().zip(payloads).map(|(id, payload)| Frame {
            message_id: new_message_id(),
            trace_id: None,
            transaction_id: id,
            producer: None,
            is_encrypted: false,
            payload: payload.as_bytes(),
        });
        let packed = Packer::new(1).pack(frames).expect("small");
        self.execute(
            "with stamp as (select clock_timestamp() - make_interval(secs => $6) as at),
             segment as (
                 insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
                 select $1, $2, $3, at, $4 from stamp)
             insert into queen.log_txns (partition_id, base_offset, end_offset, created_at, hashes)
             select $1, $2, $3, at, $5 from stamp",
            &[&stored.partition_id, &stored.base, &(stored.base + count - 1), &packed.blob, &packed.hashes, &age],
        )
        .await;
        self.app.wake.pushed(queue, partition);
        stored
    }

    /// Stores `count` messages in one segment.
    pub async fn store(&self, queue: &str, partition: &str, count: usize) -> Stored {
        self.store_aged(queue, partition, count, 0.0).await
    }

    pub async fn store_aged(&self, queue: &str, partition: &str, count: usize, age: f64) -> Stored {
        self.store_payloads(queue, partition, age, &vec!["{}"; count]).await
    }

    /// Deletes the segments below `boundary`, as retention does.
    pub async fn delete_below(&self, partition_id: Uuid, boundary: i64) {
        self.execute(
            "delete from queen.log_segments where partition_id = $1 and end_offset < $2",
            &[&partition_id, &boundary],
        )
        .await;
        self.execute("update queen.log_partitions set log_start = $2 where id = $1", &[&partition_id, &boundary]).await;
    }

    /// Pops and says what came: transaction ids, in order. Empty when there was nothing.
    pub async fn pop_ids(&self, path_and_query: &str) -> Vec<String> {
        let (status, body) = self.pop(path_and_query).await;
        assert!(status == 200 || status == 204, "{status} {body}");
        ids(&body)
    }

    /// `pop` of `queue/…?…`, relative to the pop route.
    pub async fn pop(&self, path_and_query: &str) -> (u16, Value) {
        self.get(&format!("/api/v1/pop/{path_and_query}")).await
    }

    /// The cursor of a group: committed, batch end, attempts, whether a worker holds it.
    pub async fn cursor(&self, partition_id: Uuid, group: &str) -> Option<(i64, Option<i64>, i32, bool)> {
        let rows = self
            .rows(
                "select committed, batch_end, attempt_count, worker_id is not null from queen.log_consumers
                 where partition_id = $1 and consumer_group = $2",
                &[&partition_id, &group],
            )
            .await;
        rows.first().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3)))
    }

    /// Lets every lease run out.
    pub async fn expire_leases(&self) {
        self.execute("update queen.log_consumers set lease_expires_at = now() - interval '1 second'", &[]).await;
    }

    /// Acknowledges all that is leased.
    pub async fn complete_leases(&self) {
        self.execute(
            "update queen.log_consumers set committed = coalesce(batch_end, committed), batch_end = null,
                 worker_id = null, lease_expires_at = null",
            &[],
        )
        .await;
    }
}

/// Transaction ids of an answer, in order.
pub fn ids(body: &Value) -> Vec<String> {
    let messages = body["messages"].as_array().cloned().unwrap_or_default();
    messages.iter().map(|message| message["transactionId"].as_str().expect("an id").to_owned()).collect()
}

/// The partition of each message of an answer.
pub fn partitions(body: &Value) -> Vec<String> {
    let messages = body["messages"].as_array().cloned().unwrap_or_default();
    messages.iter().map(|message| message["partition"].as_str().expect("a name").to_owned()).collect()
}
