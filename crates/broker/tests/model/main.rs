//! Random operations on a real server, each checked against a twin in memory.
//!
//! Time passes by moving every stamp in the database back, in steps that no window is a multiple of.

#[path = "../support/mod.rs"]
mod support;
#[allow(unreachable_pub, reason = "private to this test, public to its main file")]
mod twin;

use std::collections::BTreeMap;
use std::time::Duration;

use ebbtide::http::Settings;
use ebbtide::retention;
use ebbtide_sweep::Led;
use serde_json::{Value, json};
use support::Broker;
use support::random::Random;
use tokio_util::sync::CancellationToken;
use twin::{GROUPS, Lease, POLICIES, STEP_SECONDS, Signal, Twin};
use uuid::Uuid;

/// How many operations a run has.
const OPERATIONS: &str = "EBBTIDE_MODEL_OPERATIONS";
const OPERATIONS_DEFAULT: usize = 2000;
const PARTITIONS: [&str; 3] = ["a", "b", "c"];
/// Few enough to come again, within the deduplication window and after it.
const TRANSACTION_IDS: i64 = 40;
/// Small, so that one sweep takes several steps.
const ROWS_MAX: i32 = 3;

struct Run {
    broker: Broker,
    twin: Twin,
    random: Random,
    /// Leases as they were handed out, held or not.
    leases: Vec<Handed>,
}

/// What a consumer remembers of a pop.
struct Handed {
    queue: usize,
    partition: &'static str,
    partition_id: String,
    group: &'static str,
    lease: String,
    transaction_ids: Vec<String>,
}

#[tokio::test]
async fn a_server_does_what_its_twin_does() {
    let operations = std::env::var(OPERATIONS).map_or(OPERATIONS_DEFAULT, |text| text.parse().expect("a number"));
    let random = Random::seeded();
    let settings = Settings { partition_cleanup_days: Some(1), ..Settings::default() };
    let broker = Broker::with(settings).await;
    for (name, policy) in POLICIES {
        let (status, body) =
            broker.post("/api/v1/configure", json!({"queue": name, "options": policy.options()})).await;
        assert_eq!(status, 200, "{body}");
    }
    let mut run = Run { broker, twin: Twin::default(), random, leases: Vec::new() };
    for operation in 0..operations {
        let did = run.operate().await;
        run.check(&format!("operation {operation}: {did}")).await;
    }
}

impl Run {
    async fn operate(&mut self) -> String {
        match self.random.below(100) {
            0..30 => self.push().await,
            30..55 => self.pop().await,
            55..80 => self.acknowledge().await,
            80..83 => self.seek().await,
            83..93 => self.sweep().await,
            _ => self.age().await,
        }
    }

    fn lane(&mut self) -> (usize, &'static str) {
        let queue = self.random.below(POLICIES.len() as i64) as usize;
        (queue, PARTITIONS[self.random.below(PARTITIONS.len() as i64) as usize])
    }

    async fn push(&mut self) -> String {
        let (queue, partition) = self.lane();
        let count = 1 + self.random.below(5);
        let ids: Vec<String> = (0..count).map(|_| format!("t{}", self.random.below(TRANSACTION_IDS))).collect();
        let items: Vec<Value> = ids
            .iter()
            .map(|id| json!({"queue": POLICIES[queue].0, "partition": partition, "payload": id, "transactionId": id}))
            .collect();
        let (status, body) = self.broker.post("/api/v1/push", json!({"items": items})).await;
        assert_eq!(status, 201, "{body}");
        let expected = self.twin.push(queue, partition, &ids);
        let statuses: Vec<&str> = body.as_array().expect("items").iter().filter_map(|i| i["status"].as_str()).collect();
        assert_eq!(statuses, expected, "{ids:?} to {partition} of {}", POLICIES[queue].0);
        format!("push {ids:?} to {}/{partition}", POLICIES[queue].0)
    }

    async fn pop(&mut self) -> String {
        let (queue, partition) = self.lane();
        let group = GROUPS[self.random.below(GROUPS.len() as i64) as usize];
        let batch = 1 + self.random.below(8);
        let auto_ack = self.random.below(4) == 0;
        let name = POLICIES[queue].0;
        let (status, body) = self
            .broker
            .get(&format!(
                "/api/v1/pop/queue/{name}/partition/{partition}?batch={batch}&autoAck={auto_ack}&subscriptionMode=all{}",
                if group.starts_with("__") { String::new() } else { format!("&consumerGroup={group}") }
            ))
            .await;
        let did = format!("pop {batch} from {name}/{partition} for {group}, autoAck {auto_ack}");
        let expected = self.twin.pop(queue, partition, group, batch, auto_ack);
        let messages = body["messages"].as_array().cloned().unwrap_or_default();
        let got: Vec<&str> = messages.iter().filter_map(|m| m["transactionId"].as_str()).collect();
        assert_eq!(got, expected, "{did}");
        assert_eq!(status, if expected.is_empty() { 204 } else { 200 }, "{did}");
        for message in &messages {
            assert_eq!(message["data"], message["transactionId"], "{did}");
        }
        if !auto_ack && !messages.is_empty() {
            let lease = body["leaseId"].as_str().expect("a lease").to_owned();
            let partition_id = body["partitionId"].as_str().expect("an id").to_owned();
            self.twin.lease_is(queue, partition, group, &lease);
            self.leases.push(Handed { queue, partition, partition_id, group, lease, transaction_ids: expected });
        }
        did
    }

    async fn acknowledge(&mut self) -> String {
        if self.leases.is_empty() {
            return "nothing to acknowledge".to_owned();
        }
        // Mostly the newest ones, whose leases are mostly live.
        let recent = self.random.below(4).min(self.leases.len() as i64 - 1) as usize;
        let at = self.leases.len() - 1 - recent;
        let handed = self.leases.remove(at);
        let mut signals = Vec::new();
        for id in &handed.transaction_ids {
            let signal = match self.random.below(12) {
                0 => Signal::Failed,
                1 => Signal::Retry,
                2 => Signal::Dlq,
                3..6 => continue,
                _ => Signal::Completed,
            };
            signals.push((id.clone(), signal));
        }
        let elements: Vec<Value> = signals
            .iter()
            .map(|(id, signal)| {
                json!({"transactionId": id, "partitionId": handed.partition_id, "leaseId": handed.lease, "status": signal.name()})
            })
            .collect();
        let body = json!({"acknowledgments": elements, "consumerGroup": handed.group});
        let (status, body) = self.broker.post("/api/v1/ack/batch", body).await;
        let did = format!(
            "acknowledge {signals:?} of {}/{} for {}",
            POLICIES[handed.queue].0, handed.partition, handed.group
        );
        assert_eq!(status, 200, "{did}: {body}");
        let accepted: Vec<bool> =
            body.as_array().expect("items").iter().filter_map(|i| i["success"].as_bool()).collect();
        let lease = Lease { id: handed.lease.clone(), partition_id: handed.partition_id.clone() };
        let expected = self.twin.acknowledge(handed.queue, handed.partition, handed.group, &lease, &signals);
        assert_eq!(accepted, expected, "{did}: {body}");
        if self.random.below(3) > 0 {
            self.leases.insert(at, handed);
        }
        did
    }

    /// What a seek does: the cursor moves, its lease and its failures are forgotten.
    async fn seek(&mut self) -> String {
        let (queue, partition) = self.lane();
        let group = GROUPS[self.random.below(GROUPS.len() as i64) as usize];
        let name = POLICIES[queue].0;
        let Some(to) = self.twin.seek(queue, partition, group, &mut self.random) else {
            return "nothing to seek".to_owned();
        };
        self.broker
            .execute(
                "update queen.log_consumers c
                 set committed = $4, batch_end = null, worker_id = null, lease_expires_at = null, lease_acquired_at = null,
                     batch_retry_count = 0
                 from queen.log_partitions p join queen.queues q on q.id = p.queue_id
                 where c.partition_id = p.id and q.name = $1 and p.name = $2 and c.consumer_group = $3",
                &[&name, &partition, &group, &to],
            )
            .await;
        format!("seek {group} of {name}/{partition} to {to}")
    }

    async fn sweep(&mut self) -> String {
        let settings = retention::Settings {
            interval: Duration::from_secs(5),
            rows_max: ROWS_MAX,
            cleanup_days: Some(1),
            metrics_days: 36_500,
            lock_wait: std::time::Duration::from_secs(60),
            ..support::unpaced()
        };
        let led = retention::once(self.broker.database.target.clone(), &settings, &CancellationToken::new()).await;
        let Ok(Led::Ran(swept)) = led else { panic!("nobody else leads: {led:?}") };
        assert!(swept.report.first_error().is_none(), "{swept:?}");
        self.twin.sweep();
        "sweep".to_owned()
    }

    async fn age(&mut self) -> String {
        let steps = if self.random.below(12) == 0 { 1 + self.random.below(90) } else { 1 + self.random.below(3) };
        let seconds = steps * STEP_SECONDS;
        self.broker
            .sql
            .batch_execute(&format!(
                "update queen.log_segments set created_at = created_at - interval '{seconds} s';
                 update queen.log_txns set created_at = created_at - interval '{seconds} s';
                 update queen.log_partitions set created_at = created_at - interval '{seconds} s',
                     last_write_at = last_write_at - interval '{seconds} s';
                 update queen.log_consumers set created_at = created_at - interval '{seconds} s',
                     lease_acquired_at = lease_acquired_at - interval '{seconds} s',
                     lease_expires_at = lease_expires_at - interval '{seconds} s';"
            ))
            .await
            .expect("stamps move");
        self.twin.now += seconds;
        format!("{seconds} s pass")
    }

    /// Compares every partition, and what history says with what went.
    async fn check(&mut self, did: &str) {
        let query = "select q.name, p.name, p.id, p.last_offset, p.log_start, p.txns_start,
                array(select (s.base_offset, s.end_offset)::text from queen.log_segments s where s.partition_id = p.id order by s.base_offset),
                array(select (t.base_offset, t.end_offset)::text from queen.log_txns t where t.partition_id = p.id order by t.base_offset),
                array(select (c.consumer_group, c.committed, coalesce(c.batch_end, -9), c.batch_retry_count)::text
                      from queen.log_consumers c where c.partition_id = p.id order by c.consumer_group),
                array(select (d.consumer_group, d.\"offset\", d.payload is not null)::text
                      from queen.log_dlq d where d.partition_id = p.id order by d.consumer_group, d.\"offset\", d.id),
                (select count(*) from queen.log_segments s where s.partition_id = p.id and s.base_offset < p.log_start)
            from queen.log_partitions p join queen.queues q on q.id = p.queue_id order by 1, 2";
        let mut found = BTreeMap::new();
        for row in self.broker.rows(query, &[]).await {
            let texts = |column: usize| row.get::<_, Vec<String>>(column).join(" ");
            assert_eq!(row.get::<_, i64>(10), 0, "{did}: a segment below log_start");
            let state = format!(
                "last {} start {} txns {} | {} | {} | {} | {}",
                row.get::<_, i64>(3),
                row.get::<_, i64>(4),
                row.get::<_, i64>(5),
                texts(6),
                texts(7),
                texts(8),
                texts(9)
            );
            found.insert((row.get::<_, String>(0), row.get::<_, String>(1)), state);
            self.twin.id_is(row.get(0), row.get(1), row.get::<_, Uuid>(2).to_string());
        }
        assert_eq!(found, self.twin.state(), "{did}");
        let query = "select coalesce(sum(messages_deleted), 0)::bigint, count(*) filter (where retention_type = '__partition_deleted__'),
            coalesce(max(messages_deleted), 0) from queen.retention_history";
        let row = self.broker.row(query, &[]).await;
        let history = (row.get::<_, i64>(0), row.get::<_, i64>(1));
        assert_eq!(history, (self.twin.messages_deleted, self.twin.partitions_deleted), "{did}");
        assert!(row.get::<_, i32>(2) <= ROWS_MAX * 5, "{did}: a step deletes at most its batch of segments");
    }
}
