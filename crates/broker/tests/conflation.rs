//! Groups that want only the newest message of each partition.

mod support;

use serde_json::{Value, json};
use support::Broker;
use support::log::ids;

const G: &str = "consumerGroup=g&subscriptionMode=all&conflation=true";

fn flags(body: &Value) -> (bool, bool) {
    (body["conflation"] == true, body["conflationConflict"] == true)
}

async fn ack(broker: &Broker, body: &Value, status: &str) -> Value {
    let message = &body["messages"][0];
    let ack = json!({"transactionId": message["transactionId"], "partitionId": message["partitionId"],
        "leaseId": message["leaseId"], "consumerGroup": "g", "status": status, "error": "on purpose"});
    broker.post("/api/v1/ack", ack).await.1[0].clone()
}

#[tokio::test]
async fn the_newest_message_stands_for_all_that_are_pending() {
    let broker = Broker::start().await;
    let stored = broker.store("q", "p", 3).await;
    broker.store("q", "p", 2).await;
    broker.store("q", "r", 1).await;
    let (status, body) = broker.pop(&format!("queue/q?{G}")).await;
    assert_eq!((status, flags(&body)), (200, (true, false)), "{body}");
    let mut got = ids(&body);
    got.sort();
    assert_eq!(got, ["p-4", "r-0"], "as many partitions as the batch allows");
    let (committed, end, ..) = broker.cursor(stored.partition_id, "g").await.expect("a cursor");
    assert_eq!((committed, end), (-1, Some(4)), "everything up to it is leased");
    let (status, body) = broker.pop(&format!("queue/q?{G}")).await;
    assert_eq!((status, ids(&body), flags(&body)), (200, vec![], (true, false)), "an empty answer says it too");
}

#[tokio::test]
async fn its_acknowledgement_commits_what_it_stands_for() {
    let broker = Broker::start().await;
    let stored = broker.store("q", "p", 5).await;
    let (_, body) = broker.pop(&format!("queue/q/partition/p?{G}")).await;
    assert_eq!(ids(&body), ["p-4"]);
    broker.store("q", "p", 2).await;
    assert_eq!(ack(&broker, &body, "completed").await["success"], true);
    assert_eq!(broker.cursor(stored.partition_id, "g").await.map(|cursor| (cursor.0, cursor.1)), Some((4, None)));
    let (_, body) = broker.pop(&format!("queue/q?{G}")).await;
    assert_eq!(ids(&body), ["p-6"]);
    assert_eq!(ack(&broker, &body, "retry").await["success"], true);
    let (_, again) = broker.pop(&format!("queue/q?{G}")).await;
    assert_eq!(ids(&again), ["p-6"], "given back, it comes again");
    assert_eq!(ack(&broker, &again, "dlq").await["dlq"], true);
    assert_eq!(broker.cursor(stored.partition_id, "g").await.map(|cursor| cursor.0), Some(6));
}

#[tokio::test]
async fn a_newer_message_has_not_failed_yet() {
    let broker = Broker::start().await;
    broker.store("q", "p", 1).await;
    for _ in 0..3 {
        let (_, body) = broker.pop(&format!("queue/q?{G}")).await;
        assert_eq!(ack(&broker, &body, "failed").await["dlq"], false);
    }
    broker.store("q", "p", 1).await;
    let (_, body) = broker.pop(&format!("queue/q?{G}")).await;
    assert_eq!(ids(&body), ["p-1"]);
    assert_eq!(ack(&broker, &body, "failed").await["dlq"], false, "its own retries are left");
}

#[tokio::test]
async fn what_is_recorded_wins_and_says_so() {
    let broker = Broker::start().await;
    broker.store("q", "p", 3).await;
    let (_, body) = broker.pop(&format!("queue/q?{G}")).await;
    assert_eq!((ids(&body), flags(&body)), (vec!["p-2".to_owned()], (true, false)));
    ack(&broker, &body, "completed").await;
    broker.store("q", "p", 2).await;
    let (_, body) = broker.pop("queue/q?consumerGroup=g").await;
    assert_eq!((ids(&body), flags(&body)), (vec!["p-4".to_owned()], (true, true)), "a request that forgets it");

    let plain = "consumerGroup=plain&subscriptionMode=all";
    assert_eq!(broker.pop_ids(&format!("queue/q?{plain}&batch=2")).await.len(), 2);
    let (status, body) = broker.pop(&format!("queue/q?{plain}&conflation=true")).await;
    assert_eq!((status, flags(&body)), (200, (false, true)), "{body}");
    assert_eq!(broker.pop("queue/q?consumerGroup=other").await.0, 204, "others are not concerned");
}

#[tokio::test]
async fn partitions_made_later_and_sought_cursors_conflate_too() {
    let broker = Broker::start().await;
    broker.store("q", "p", 1).await;
    broker.pop(&format!("queue/q?{G}")).await;
    broker.store("q", "later", 3).await;
    let (_, body) = broker.pop("queue/q?consumerGroup=g").await;
    assert_eq!(ids(&body), ["later-2"]);
    let seek = json!({"timestamp": "2001-01-01T00:00:00Z"});
    let (status, _) = broker.post("/api/v1/consumer-groups/g/queues/q/seek", seek).await;
    assert_eq!(status, 200);
    let (_, body) = broker.pop("queue/q?consumerGroup=g&partitions=5").await;
    assert_eq!(ids(&body).len(), 2, "one of each partition");
}

#[tokio::test]
async fn a_message_that_is_not_visible_yet_does_not_count_as_the_newest() {
    let broker = Broker::start().await;
    broker.store_aged("q", "p", 2, 100.0).await;
    broker.store("q", "p", 1).await;
    broker.execute("update queen.queues set delayed_processing = 50", &[]).await;
    let (_, body) = broker.pop(&format!("queue/q?{G}")).await;
    assert_eq!(ids(&body), ["p-1"]);
}

#[tokio::test]
async fn lists_say_who_conflates() {
    let broker = Broker::start().await;
    broker.store("q", "p", 3).await;
    broker.store("q", "r", 3).await;
    broker.pop(&format!("queue/q?{G}&partitions=1")).await;
    let (_, depth) = broker.get("/api/v1/resources/queues/q/depth?group=g").await;
    let seen = (&depth["conflation"], &depth["pending"], &depth["effectivePending"]);
    assert_eq!(seen, (&json!(true), &json!(6), &json!(2)), "{depth}");
    assert_eq!(broker.get("/api/v1/consumer-groups").await.1[0]["conflation"], true);
    assert_eq!(broker.get("/api/v1/consumer-groups/g").await.1["q"]["conflation"], true);
}

#[tokio::test]
async fn a_pop_by_namespace_conflates() {
    let broker = Broker::start().await;
    broker.store("n.q", "p", 3).await;
    broker.execute("update queen.queues set namespace = 'n'", &[]).await;
    let (_, body) = broker.get(&format!("/api/v1/pop?namespace=n&{G}")).await;
    assert_eq!((ids(&body), flags(&body)), (vec!["p-2".to_owned()], (true, false)), "{body}");
}
