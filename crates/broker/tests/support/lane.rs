//! One partition with messages in it, written as a push leaves them but without one.

use ebbtide::segment::{Frame, Packer, new_message_id};
use serde_json::{Value, json};
use uuid::Uuid;

use super::Broker;

/// The lease of every test that does not name another.
pub const LEASE: &str = "lease-1";
pub const GROUP: &str = "g";

pub struct Lane<'a> {
    pub broker: &'a Broker,
    pub id: Uuid,
}

/// A cursor, with its lease if it has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor {
    pub committed: i64,
    pub batch_end: Option<i64>,
    pub worker: Option<String>,
    pub failures: i32,
}

/// A row of `queen.log_dlq`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filed {
    pub offset: i64,
    pub transaction_id: String,
    pub payload: Option<String>,
    pub error: String,
    pub retries: i32,
}

impl<'a> Lane<'a> {
    /// Partition `name` of queue `q`, empty.
    pub async fn empty(broker: &'a Broker, name: &str) -> Self {
        broker.execute("insert into queen.queues (name) values ('q') on conflict do nothing", &[]).await;
        let query = "insert into queen.log_partitions (queue_id, name)
            select id, $1 from queen.queues where name = 'q' returning id";
        Self { broker, id: broker.row(query, &[&name]).await.get(0) }
    }

    /// Partition `p` of queue `q` with messages `m0`, `m1`, … in one segment, all of them leased.
    pub async fn leased(broker: &'a Broker, count: i64) -> Self {
        let lane = Self::empty(broker, "p").await;
        lane.append(count).await;
        lane.lease(count - 1).await;
        lane
    }

    /// A segment of `count` messages, numbered on from those that are there.
    pub async fn append(&self, count: i64) {
        let query = "select last_offset + 1 from queen.log_partitions where id = $1";
        let base: i64 = self.broker.row(query, &[&self.id]).await.get(0);
        let messages: Vec<(String, String)> =
            (base..base + count).map(|n| (format!("m{n}"), format!("{{\"n\": {n}}}"))).collect();
        let borrowed: Vec<(&str, &str)> = messages.iter().map(|(id, data)| (id.as_str(), data.as_str())).collect();
        self.write(&borrowed).await;
    }

    /// A segment of messages with the given transaction ids and payloads.
    pub async fn write(&self, messages: &[(&str, &str)]) {
        let frames = messages.iter().map(|(transaction_id, payload)| Frame {
            message_id: new_message_id(),
            trace_id: None,
            transaction_id,
            producer: None,
            is_encrypted: false,
            payload: payload.as_bytes(),
        });
        let packed = Packer::new(1).pack(frames).expect("fits");
        let query = "with p as (
                update queen.log_partitions set last_offset = last_offset + $2 where id = $1 returning last_offset
            ), s as (
                insert into queen.log_segments
                select $1, last_offset - $2 + 1, last_offset, clock_timestamp(), $3 from p
            )
            insert into queen.log_txns select $1, last_offset - $2 + 1, last_offset, clock_timestamp(), $4 from p";
        self.broker.execute(query, &[&self.id, &i64::from(packed.count), &packed.blob, &packed.hashes]).await;
    }

    /// Leases everything after the cursor up to `end` to [`LEASE`], as a pop would.
    pub async fn lease(&self, end: i64) {
        self.lease_as(GROUP, LEASE, end, 60.0).await;
    }

    pub async fn lease_as(&self, group: &str, worker: &str, end: i64, seconds: f64) {
        let query = "insert into queen.log_consumers as c (partition_id, consumer_group, batch_end, worker_id,
                lease_acquired_at, lease_expires_at)
            values ($1, $2, $3, $4, now(), now() + make_interval(secs => $5))
            on conflict (partition_id, consumer_group) do update set batch_end = excluded.batch_end,
                worker_id = excluded.worker_id, lease_acquired_at = excluded.lease_acquired_at,
                lease_expires_at = excluded.lease_expires_at";
        self.broker.execute(query, &[&self.id, &group, &end, &worker, &seconds]).await;
    }

    pub async fn cursor(&self) -> Cursor {
        let query = "select committed, batch_end, worker_id, batch_retry_count from queen.log_consumers
            where partition_id = $1 and consumer_group = $2";
        let row = self.broker.row(query, &[&self.id, &GROUP]).await;
        Cursor { committed: row.get(0), batch_end: row.get(1), worker: row.get(2), failures: row.get(3) }
    }

    /// Asserts where the cursor stands, with no lease.
    pub async fn free_at(&self, committed: i64, failures: i32) {
        assert_eq!(self.cursor().await, Cursor { committed, batch_end: None, worker: None, failures });
    }

    /// Asserts where the cursor stands, with the lease of [`LEASE`] up to `end`.
    pub async fn leased_at(&self, committed: i64, end: i64) {
        let worker = Some(LEASE.to_owned());
        assert_eq!(self.cursor().await, Cursor { committed, batch_end: Some(end), worker, failures: 0 });
    }

    pub async fn filed(&self) -> Vec<Filed> {
        let query = "select \"offset\", transaction_id, payload, error, retry_count from queen.log_dlq
            where partition_id = $1 order by \"offset\"";
        let rows = self.broker.rows(query, &[&self.id]).await;
        rows.iter()
            .map(|row| Filed {
                offset: row.get(0),
                transaction_id: row.get(1),
                payload: row.get(2),
                error: row.get(3),
                retries: row.get(4),
            })
            .collect()
    }

    /// An acknowledgement as a client writes it.
    pub fn element(&self, id: &str, status: &str) -> Value {
        json!({"transactionId": id, "partitionId": self.id, "status": status, "consumerGroup": GROUP, "leaseId": LEASE})
    }

    /// Acknowledges in one request, all under [`LEASE`].
    pub async fn ack(&self, elements: &[(&str, &str)]) -> Vec<Value> {
        let elements = elements.iter().map(|(id, status)| self.element(id, status)).collect();
        send(self.broker, elements).await
    }
}

/// Posts acknowledgements and returns their answers, which are as many and in the same order.
pub async fn send(broker: &Broker, elements: Vec<Value>) -> Vec<Value> {
    let count = elements.len();
    let (status, body) = broker.post("/api/v1/ack/batch", json!({"acknowledgments": elements})).await;
    assert_eq!(status, 200, "{body}");
    let replies = body.as_array().expect("an array").clone();
    assert_eq!(replies.len(), count);
    for (index, reply) in replies.iter().enumerate() {
        assert_eq!(reply["index"], index);
    }
    replies
}

/// The texts of the errors, in order.
pub fn errors(replies: &[Value]) -> Vec<Option<&str>> {
    replies.iter().map(|reply| reply["error"].as_str()).collect()
}
