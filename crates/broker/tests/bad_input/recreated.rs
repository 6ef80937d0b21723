//! A queue that is deleted and made again while consumers wait for it.

use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::{Broker, PATIENCE, until, wait_until};

/// A pop that waits, in a task of its own.
fn park(b: &Broker, path_and_query: &str) -> JoinHandle<Value> {
    let url = format!("{}/api/v1/pop{path_and_query}wait=true&timeout=600000", b.url);
    tokio::spawn(async move {
        let answer = reqwest::get(url).await.expect("the server answers");
        serde_json::from_slice(&answer.bytes().await.expect("the body arrives")).expect("JSON")
    })
}

async fn parked(b: &Broker, count: usize) {
    until("so many pops are parked", || b.app.wake.parked() == count).await;
}

async fn data(pop: JoinHandle<Value>) -> Vec<Value> {
    let answer = tokio::time::timeout(PATIENCE, pop).await.expect("the pop was woken").expect("it ended");
    answer["messages"].as_array().expect("messages").iter().map(|message| message["data"].clone()).collect()
}

async fn push(b: &Broker, payload: u8) {
    let item = json!({"queue": "q", "partition": "p", "payload": payload, "transactionId": "t"});
    assert_eq!(b.post("/api/v1/push", json!({"items": [item]})).await.1[0]["status"], "queued");
}

async fn delete(b: &Broker) {
    assert_eq!(b.delete("/api/v1/resources/queues/q").await.1["deleted"], true);
}

/// Queue `q` with a message that everybody has consumed.
async fn consumed(b: &Broker) {
    let body = json!({"queue": "q", "namespace": "n", "task": "k"});
    assert_eq!(b.post("/api/v1/configure", body.clone()).await.0, 200);
    push(b, 1).await;
    for group in ["", "&consumerGroup=all&subscriptionMode=all"] {
        assert_eq!(b.get(&format!("/api/v1/pop/queue/q?autoAck=true{group}")).await.0, 200);
    }
}

#[tokio::test]
async fn a_waiting_consumer_gets_what_the_new_queue_is_sent() {
    for path in ["/queue/q?", "/queue/q/partition/p?", "/queue/q?consumerGroup=all&subscriptionMode=all&"] {
        let b = Broker::start().await;
        consumed(&b).await;
        let pop = park(&b, path);
        parked(&b, 1).await;
        delete(&b).await;
        // The same transaction id: the new queue remembers none of the old one's.
        push(&b, 2).await;
        assert_eq!(data(pop).await, [2], "{path}");
    }
}

#[tokio::test]
async fn a_waiting_discovery_finds_the_new_queue() {
    let b = Broker::start().await;
    consumed(&b).await;
    let pop = park(&b, "?namespace=n&task=k&");
    parked(&b, 1).await;
    delete(&b).await;
    assert_eq!(b.post("/api/v1/configure", json!({"queue": "q", "namespace": "n", "task": "k"})).await.0, 200);
    push(&b, 2).await;
    assert_eq!(data(pop).await, [2]);
}

#[tokio::test]
async fn a_waiting_group_that_wants_what_is_new_subscribes_again() {
    let b = Broker::start().await;
    consumed(&b).await;
    let pop = park(&b, "/queue/q?consumerGroup=new&");
    parked(&b, 1).await;
    delete(&b).await;
    // Its subscription went with the queue. The next look makes another one, as at any first contact.
    let subscribed = "select exists (select from queen.consumer_groups_metadata where consumer_group = 'new')";
    wait_until(&b.sql, "it has subscribed again", subscribed, &[]).await;
    push(&b, 2).await;
    assert_eq!(data(pop).await, [2]);
}

#[tokio::test]
async fn an_acknowledgement_of_the_old_queue_moves_nothing_in_the_new_one() {
    let b = Broker::start().await;
    push(&b, 1).await;
    let (_, old) = b.get("/api/v1/pop/queue/q").await;
    delete(&b).await;
    push(&b, 2).await;
    let message = &old["messages"][0];
    let ack = json!({"transactionId": "t", "partitionId": message["partitionId"], "leaseId": old["leaseId"]});
    let (_, answer) = b.post("/api/v1/ack", ack).await;
    assert_eq!((&answer[0]["success"], &answer[0]["error"]), (&json!(false), &json!("consumer not found")));
    let (_, new) = b.get("/api/v1/pop/queue/q").await;
    assert_eq!(new["messages"][0]["data"], 2, "the new message is still to be read");
}
