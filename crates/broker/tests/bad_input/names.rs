//! Any text of 1 to 255 characters is a name, on every route that takes one.

use serde_json::{Value, json};

use crate::support::Broker;
use crate::support::names::{encoded, hard_names};

/// The names, and the longest one of one byte a character. `.` and `..` alone are no segments that clients send: they
/// take them for steps between folders.
fn names() -> Vec<String> {
    let mut names = hard_names();
    names.push("x".repeat(255));
    names.extend(
        ["...", "null", "lagging", "_%", "a//b", "/", "名前", "'; drop table queen.queues; --"].map(str::to_owned),
    );
    names
}

struct Named<'a> {
    b: &'a Broker,
    name: String,
    /// As a segment of a path or a value in a query.
    n: String,
}

impl Named<'_> {
    async fn get(&self, path: &str) -> Value {
        let (status, answer) = self.b.get(&path.replace('$', &self.n)).await;
        assert_eq!(status, 200, "{:?} {path}: {answer}", self.name);
        answer
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let (status, answer) = self.b.post(&path.replace('$', &self.n), body).await;
        assert!((200..=201).contains(&status), "{:?} {path}: {answer}", self.name);
        answer
    }

    async fn delete(&self, path: &str) -> Value {
        let (status, answer) = self.b.delete(&path.replace('$', &self.n)).await;
        assert_eq!(status, 200, "{:?} {path}: {answer}", self.name);
        answer
    }

    /// The queue, its partition, the group, the message and its trace all have the name.
    async fn live(&self) {
        let name = self.name.as_str();
        let configured = self.post("/api/v1/configure", json!({"queue": name, "namespace": name, "task": name})).await;
        assert_eq!((&configured["queue"], &configured["namespace"]), (&json!(name), &json!(name)));
        let item = json!({"queue": name, "partition": name, "payload": name, "transactionId": name});
        let pushed = self.post("/api/v1/push", json!({"items": [item]})).await;
        assert_eq!((&pushed[0]["status"], &pushed[0]["queueName"]), (&json!("queued"), &json!(name)));
        let query = "consumerGroup=$&subscriptionMode=all&autoAck=false";
        let popped = self.get(&format!("/api/v1/pop/queue/$/partition/$?{query}")).await;
        let message = &popped["messages"][0];
        for field in ["transactionId", "queue", "partition", "consumerGroup", "data"] {
            assert_eq!(message[field], name, "{field}: {popped}");
        }
        let partition = message["partitionId"].as_str().expect("an id");
        self.read(partition).await;
        let ack = json!({"transactionId": name, "partitionId": partition, "consumerGroup": name,
            "leaseId": popped["leaseId"], "status": "dlq"});
        assert_eq!(self.post("/api/v1/ack", ack).await[0]["dlq"], true);
        let letters = self.get("/api/v1/dlq?queue=$&partition=$&consumerGroup=$").await;
        assert_eq!((&letters["total"], &letters["messages"][0]["transactionId"]), (&json!(1), &json!(name)));
        let retried = self.post(&format!("/api/v1/messages/{partition}/$/retry"), json!({})).await;
        assert_eq!((&retried["queue"], &retried["partition"]), (&json!(name), &json!(name)));
        let found = self.get("/api/v1/pop?namespace=$&task=$&consumerGroup=$").await;
        assert_eq!(found["messages"][0]["data"], name, "{found}");
    }

    async fn read(&self, partition: &str) {
        let name = self.name.as_str();
        assert_eq!(self.get(&format!("/api/v1/messages/{partition}/$")).await["transactionId"], name);
        let listed = self.get("/api/v1/messages?queue=$&partition=$&namespace=$&task=$").await;
        assert_eq!((&listed["total"], &listed["messages"][0]["transactionId"]), (&json!(1), &json!(name)));
        assert_eq!(self.get("/api/v1/resources/queues/$").await["name"], name);
        let queues = self.get("/api/v1/resources/queues?search=$&namespace=$&task=$").await;
        assert_eq!((&queues["total"], &queues["queues"][0]["name"]), (&json!(1), &json!(name)), "{queues}");
        assert_eq!(self.get("/api/v1/resources/queues/$/depth?group=$").await["pending"], 1);
        assert_eq!(self.get("/api/v1/resources/partitions?queue=$").await["partitions"][0]["name"], name);
        let trace = json!({"transactionId": name, "partitionId": partition, "data": name, "traceNames": [name],
            "consumerGroup": name, "eventType": name});
        self.post("/api/v1/traces", trace).await;
        assert_eq!(self.get("/api/v1/traces/by-name/$").await["traces"][0]["transaction_id"], name);
        assert_eq!(self.get(&format!("/api/v1/traces/{partition}/$")).await["traces"][0]["data"], name);
    }

    async fn administer(&self) {
        let name = self.name.as_str();
        let groups = self.get("/api/v1/consumer-groups").await;
        assert!(groups.as_array().expect("a list").iter().any(|group| group["name"] == name), "{groups}");
        if name != "lagging" {
            assert_eq!(self.get("/api/v1/consumer-groups/$").await[name]["partitions"][0]["partition"], name);
        }
        let to_end = json!({"toEnd": true});
        let sought = self.post("/api/v1/consumer-groups/$/queues/$/partitions/$/seek", to_end.clone()).await;
        assert_eq!((&sought["partitionName"], &sought["partitionsUpdated"]), (&json!(name), &json!(1)));
        assert_eq!(self.post("/api/v1/consumer-groups/$/queues/$/seek", to_end).await["queueName"], name);
        let from = json!({"subscriptionTimestamp": "2026-01-01T00:00:00Z"});
        assert_eq!(self.post("/api/v1/consumer-groups/$/subscription", from).await["rowsUpdated"], 1);
        assert_eq!(self.delete("/api/v1/queues/$/clear?partition=$").await["messagesDeleted"], 2);
        assert_eq!(self.delete("/api/v1/consumer-groups/$/queues/$").await["deletedPartitions"], 1);
        assert_eq!(self.delete("/api/v1/consumer-groups/$").await["consumerGroup"], name);
        assert_eq!(self.delete("/api/v1/resources/queues/$").await["deleted"], true);
        assert_eq!(self.get("/api/v1/resources/partitions?queue=$").await["total"], 0);
    }
}

#[tokio::test]
async fn any_name_lives_through_every_route() {
    let b = Broker::start().await;
    for name in names() {
        let named = Named { b: &b, n: encoded(&name), name };
        named.live().await;
        named.administer().await;
    }
}

#[tokio::test]
async fn names_that_differ_in_what_other_systems_fold_are_different() {
    let b = Broker::start().await;
    // Case, a space at the end, a composed and a decomposed letter, a full-width digit, a percent and what it escapes.
    let names = ["a", "A", "a ", "\u{e9}", "e\u{301}", "1", "\u{ff11}", "%41", "a%"];
    for name in names {
        let item = json!({"queue": name, "payload": name});
        assert_eq!(b.post("/api/v1/push", json!({"items": [item]})).await.0, 201);
    }
    for name in names {
        let (_, popped) = b.get(&format!("/api/v1/pop/queue/{}?batch=10", encoded(name))).await;
        let found: Vec<&Value> = popped["messages"].as_array().expect("a list").iter().map(|m| &m["data"]).collect();
        assert_eq!(found, [&json!(name)], "{name:?}");
    }
    assert_eq!(b.get("/api/v1/resources/queues").await.1["total"], names.len());
}

#[tokio::test]
async fn no_name_has_256_bytes_of_one_byte_characters() {
    let b = Broker::start().await;
    let long = "x".repeat(256);
    for (field, item) in [
        ("queue", json!({"queue": long, "payload": 1})),
        ("partition", json!({"queue": "q", "partition": long, "payload": 1})),
    ] {
        let (status, answer) = b.post("/api/v1/push", json!({"items": [item]})).await;
        let error = answer["error"].as_str().expect("text");
        assert!(status == 400 && error.contains(field) && error.contains("255") && error.contains("256"), "{error}");
    }
    assert_eq!(b.get("/api/v1/resources/queues").await.1["total"], 0, "nothing was made");
}
