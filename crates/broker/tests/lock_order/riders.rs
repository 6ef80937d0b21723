//! Keys, then timers, then partitions: by transactions, by firing, and by everything at once.

use serde_json::{Value, json};

use super::support::random::Random;
use super::support::{Broker, wait_until};

const PAYLOAD: &str = "MQ==";
const ROUNDS: usize = 25;

fn incr(key: &str) -> Value {
    json!({"op": "incr", "ns": "n", "key": key, "delta": 1, "ttlSeconds": 1000})
}

fn schedule(key: &str, delay_ms: i64, txn: &str) -> Value {
    json!({"op": "schedule", "queue": "q", "timerKey": key, "payload": PAYLOAD, "delayMs": delay_ms, "txn": txn})
}

fn push(partition: &str) -> Value {
    json!({"type": "push", "queue": "q", "partition": partition, "payload": 1})
}

async fn is_free(broker: &Broker, what: &str) -> bool {
    broker.sql.execute(&format!("select from {what} for update nowait"), &[]).await.is_ok()
}

#[tokio::test]
async fn a_transaction_locks_keys_then_timers_then_partitions() {
    const KEY: &str = "queen.kv where key = 'k'";
    const TIMER: &str = "queen.log_timers where timer_key = 't'";
    const PARTITION: &str = "queen.log_partitions where name = 'p'";
    let broker = Broker::start().await;
    let body = json!({"operations": [push("p")], "kv": [incr("k")], "timers": [schedule("t", 3_600_000, "x")]});
    assert_eq!(broker.post("/api/v1/transaction", body.clone()).await.1["success"], true);
    // Whoever waits for the first has nothing, who waits for the second has the first, and so on.
    for (at, held) in [KEY, TIMER, PARTITION].into_iter().enumerate() {
        let blocker = broker.database.client().await;
        blocker.batch_execute(&format!("begin; select from {held} for update")).await.expect("held");
        let ((_, answer), ()) = tokio::join!(broker.post("/api/v1/transaction", body.clone()), async {
            let query = "select exists (select from pg_stat_activity where datname = current_database()
                and application_name = 'ebbtide' and wait_event_type = 'Lock')";
            wait_until(&broker.sql, "the transaction waits", query, &[]).await;
            for (other, what) in [KEY, TIMER, PARTITION].into_iter().enumerate() {
                assert_eq!(is_free(&broker, what).await, at < other, "{what} while it waits for {held}");
            }
            blocker.batch_execute("commit").await.expect("let go");
        });
        assert_eq!(answer["success"], true, "{answer}");
    }
}

/// Transactions with riders over the same few names, in any order.
async fn transact(broker: &Broker, mut random: Random, worker: usize) -> usize {
    let mut scheduled = 0;
    for round in 0..ROUNDS {
        let mut names = ["a", "b", "c", "d"];
        random.shuffle(&mut names);
        let kv: Vec<Value> = names.iter().map(|name| incr(name)).collect();
        random.shuffle(&mut names);
        let mut timers: Vec<Value> =
            names.iter().map(|name| json!({"op": "cancel", "queue": "q", "timerKey": name})).collect();
        let own = format!("{worker}-{round}");
        timers.push(schedule(&own, -1, &own));
        random.shuffle(&mut timers);
        random.shuffle(&mut names);
        let operations: Vec<Value> = names.iter().map(|name| push(name)).collect();
        let body = json!({"operations": operations, "kv": kv, "timers": timers});
        let (_, answer) = broker.post("/api/v1/transaction", body).await;
        assert_eq!(answer["success"], true, "{answer}");
        scheduled += 1;
        let again: Vec<Value> = names.iter().map(|name| schedule(name, -1, &format!("{own}-{name}"))).collect();
        assert_eq!(broker.post("/api/v1/timers", json!({"operations": again})).await.0, 200);
    }
    scheduled
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_with_riders_firing_and_sweeps_never_deadlock() {
    let broker = Broker::start().await;
    let mut random = Random::seeded();
    let sweeper = broker.database.client().await;
    let stop = tokio_util::sync::CancellationToken::new();
    let background = async {
        while !stop.is_cancelled() {
            broker.app.sweeper().fire_due().await.expect("fires");
            sweeper.execute("update queen.kv set expires_at = now() where key = 'a'", &[]).await.expect("expires");
            sweeper.execute("select queen.kv_sweep_step_v1(clock_timestamp(), 10)", &[]).await.expect("sweeps");
        }
    };
    let workers: Vec<_> = (0..4).map(|worker| transact(&broker, Random::from_seed(random.next()), worker)).collect();
    let (scheduled, ()) = tokio::join!(
        async {
            let scheduled: usize = futures_util::future::join_all(workers).await.into_iter().sum();
            stop.cancel();
            scheduled
        },
        background
    );
    broker.app.sweeper().fire_due().await.expect("fires");
    broker.execute("select pg_stat_force_next_flush()", &[]).await;
    let query = "select deadlocks from pg_stat_database where datname = current_database()";
    assert_eq!(broker.row(query, &[]).await.get::<_, i64>(0), 0);
    let mut fired = std::collections::HashSet::new();
    for row in broker.rows("select blob from queen.log_segments", &[]).await {
        let segment = ebbtide::segment::Segment::unpack(row.get(0)).expect("a segment");
        for frame in segment.frames().filter(|frame| frame.transaction_id.len() < 8) {
            assert!(fired.insert(frame.transaction_id.to_owned()), "{} is there twice", frame.transaction_id);
        }
    }
    let own = fired.iter().filter(|id| id.matches('-').count() == 1).count();
    assert_eq!(own, scheduled, "what nobody cancelled was fired");
}
