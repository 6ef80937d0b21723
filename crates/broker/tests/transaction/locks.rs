//! Transactions that meet: on each other, on a push, on a partition that vanishes.

use serde_json::{Value, json};
use uuid::Uuid;

use super::support::lane::Lane;
use super::support::{Broker, wait_until};
use super::{ack, post, stored};

/// Waits until `count` of the server's sessions wait for a lock.
async fn waiting(broker: &Broker, count: i64) {
    let query = "select count(*) = $1 from pg_stat_activity where datname = current_database()
        and application_name = 'ebbtide' and wait_event_type = 'Lock'";
    wait_until(&broker.sql, "the transactions wait", query, &[&count]).await;
}

async fn deadlocks(broker: &Broker) -> i64 {
    broker.execute("select pg_stat_force_next_flush()", &[]).await;
    let query = "select deadlocks from pg_stat_database where datname = current_database()";
    broker.row(query, &[]).await.get(0)
}

fn push_to(partitions: &[&str], id: &str) -> Value {
    let items: Vec<Value> = partitions
        .iter()
        .map(|partition| json!({"queue": "q", "partition": partition, "payload": 1, "transactionId": id}))
        .collect();
    json!({"type": "push", "items": items})
}

/// Two empty partitions, by ascending id, with their names.
async fn two_lanes(broker: &Broker) -> [(Lane<'_>, &'static str); 2] {
    let mut lanes = [(Lane::empty(broker, "a").await, "a"), (Lane::empty(broker, "b").await, "b")];
    lanes.sort_by_key(|(lane, _)| lane.id);
    lanes
}

/// Locks one partition, lets `one` and `other` run into it, checks that neither has taken the
/// partition `free` meanwhile, and lets go.
async fn meet(broker: &Broker, held: Uuid, free: Uuid, one: Value, other: Value) {
    let blocker = broker.database.client().await;
    blocker.batch_execute("begin").await.expect("begins");
    let lock = "select from queen.log_partitions where id = $1 for update";
    blocker.execute(lock, &[&held]).await.expect("locked");
    let (one, other, ()) =
        tokio::join!(post(broker, json!({"operations": one})), post(broker, json!({"operations": other})), async {
            waiting(broker, 2).await;
            let probe = "select from queen.log_partitions where id = $1 for update nowait";
            broker.sql.execute(probe, &[&free]).await.expect("nobody holds the higher partition");
            blocker.batch_execute("commit").await.expect("let go");
        });
    assert_eq!((&one["success"], &other["success"]), (&json!(true), &json!(true)), "{one} {other}");
    assert_eq!(deadlocks(broker).await, 0);
}

#[tokio::test]
async fn two_that_name_their_partitions_in_opposite_order_take_turns() {
    let broker = Broker::start().await;
    let [(low, a), (high, b)] = two_lanes(&broker).await;
    let (one, other) = (json!([push_to(&[a, b], "1")]), json!([push_to(&[b, a], "2")]));
    meet(&broker, low.id, high.id, one, other).await;
    assert_eq!(stored(&broker, "q").await.len(), 4);
}

#[tokio::test]
async fn a_partition_that_may_get_a_dead_letter_is_locked_in_the_same_order() {
    let broker = Broker::start().await;
    let [(low, a), (high, b)] = two_lanes(&broker).await;
    low.append(1).await;
    low.lease(0).await;
    let one = json!([push_to(&[b], "1"), ack(&low, "m0", "dlq")]);
    meet(&broker, low.id, high.id, one, json!([push_to(&[b, a], "2")])).await;
    assert_eq!(low.filed().await.len(), 1);
}

#[tokio::test]
async fn a_partition_that_vanishes_under_it_is_made_again() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "a").await;
    let blocker = broker.database.client().await;
    blocker.batch_execute("begin; delete from queen.log_partitions").await.expect("deleted");
    let (body, ()) = tokio::join!(post(&broker, json!({"operations": [push_to(&["a"], "t")]})), async {
        waiting(&broker, 1).await;
        blocker.batch_execute("commit").await.expect("gone");
    });
    assert_eq!(body["success"], true, "{body}");
    let id: Uuid = broker.row("select id from queen.log_partitions", &[]).await.get(0);
    assert_ne!(id, lane.id);
    assert_eq!(stored(&broker, "q").await.len(), 1);
}

#[tokio::test]
async fn an_acknowledged_partition_that_vanishes_refuses_the_transaction() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    let blocker = broker.database.client().await;
    blocker.batch_execute("begin; delete from queen.log_partitions").await.expect("deleted");
    let (body, ()) = tokio::join!(post(&broker, json!({"operations": [ack(&lane, "m0", "completed")]})), async {
        waiting(&broker, 1).await;
        blocker.batch_execute("commit").await.expect("gone");
    });
    assert_eq!((&body["success"], &body["reason"]), (&json!(false), &json!("ack_rejected")), "{body}");
}
