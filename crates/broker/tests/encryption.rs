//! Payloads at rest: sealed wherever they are stored, whole wherever they are read, and lost nowhere.

mod support;

use ebbtide::http::Settings;
use ebbtide::seal::{Key, Sealer};
use ebbtide::segment::Segment;
use serde_json::{Value, json};
use support::{Broker, Database};
use uuid::Uuid;

/// Escapes, number spelling and spaces that a parser would not keep.
const PAYLOAD: &str = r#"{ "secret": "swordfish", "n": 1.50, "z": "\u0000" }"#;
const TRACE: &str = "00000000-0000-4000-8000-000000000001";

fn with_key(digit: &str) -> Settings {
    let key = Key::from_hex(&digit.repeat(64)).expect("64 digits");
    Settings { sealer: Sealer::new(Some(&key)), ..Settings::default() }
}

/// A second server on the first one's database, which it takes with it when it goes.
async fn beside(first: &Broker, settings: Settings) -> Broker {
    let Database { name, target } = &first.database;
    Broker::on(Database { name: name.clone(), target: target.clone() }, settings).await
}

async fn configure(broker: &Broker, queue: &str, encrypted: bool) -> Value {
    let options = json!({"encryptionEnabled": encrypted, "retryLimit": 0});
    let (status, answer) = broker.post("/api/v1/configure", json!({"queue": queue, "options": options})).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["options"]["encryptionEnabled"], json!(encrypted));
    answer
}

async fn push(broker: &Broker, queue: &str, id: &str) {
    let body = format!(
        r#"{{"items":[{{"queue":"{queue}","transactionId":"{id}","traceId":"{TRACE}","payload":{PAYLOAD}}}]}}"#
    );
    let (status, answer) = broker.post_raw("/api/v1/push", body).await;
    assert_eq!((status, &answer[0]["status"]), (201, &json!("queued")), "{answer}");
}

/// Which messages are stored sealed, by transaction id, in the order of their offsets in each partition. Panics if a
/// sealed one shows its payload, or a clear one does not.
async fn stored(broker: &Broker) -> Vec<(String, bool)> {
    let query = "select blob from queen.log_segments order by partition_id, base_offset";
    let mut found = Vec::new();
    for row in broker.rows(query, &[]).await {
        let segment = Segment::unpack(row.get(0)).expect("a segment");
        for frame in segment.frames() {
            let text = std::str::from_utf8(frame.payload).expect("text");
            assert_eq!(frame.is_encrypted, !text.contains("swordfish"), "{text}");
            found.push((frame.transaction_id.to_owned(), frame.is_encrypted));
        }
    }
    found
}

/// Asserts that the answer has the payload, byte for byte.
async fn read_whole(broker: &Broker, path: &str) {
    let (status, body) = broker.get_bytes(path).await;
    let text = String::from_utf8(body).expect("text");
    assert_eq!(status, 200, "{text}");
    assert!(text.contains(&format!(r#""data":{PAYLOAD}"#)), "{text}");
}

fn is_envelope(value: &Value) -> bool {
    value.as_object().is_some_and(|fields| fields.keys().eq(["authTag", "encrypted", "iv"]))
}

/// What a group that has just come would be given, in order.
async fn pop(broker: &Broker, query: &str) -> (u16, Value) {
    broker.get(&format!("/api/v1/pop/queue/q?consumerGroup=g&subscriptionMode=all&{query}")).await
}

#[tokio::test]
async fn what_a_queue_wants_sealed_is_sealed_and_comes_back_byte_for_byte() {
    let broker = Broker::with(with_key("7")).await;
    let answer = configure(&broker, "q", true).await;
    assert_eq!(answer["warnings"], json!([]));
    push(&broker, "q", "sealed").await;
    push(&broker, "clear", "clear").await;
    let mut found = stored(&broker).await;
    found.sort();
    assert_eq!(found, [("clear".to_owned(), false), ("sealed".to_owned(), true)]);
    read_whole(&broker, "/api/v1/messages?queue=q").await;
    read_whole(&broker, "/api/v1/pop/queue/q?consumerGroup=g&subscriptionMode=all").await;
    read_whole(&broker, "/api/v1/pop/queue/clear?consumerGroup=g&subscriptionMode=all").await;
    let (_, popped) = broker.get("/api/v1/pop/queue/q?consumerGroup=h&subscriptionMode=all").await;
    let message = &popped["messages"][0];
    assert_eq!(message["traceId"], json!(TRACE));
    let partition = message["partitionId"].as_str().expect("an id");
    read_whole(&broker, &format!("/api/v1/messages/{partition}/sealed")).await;
    let (_, read) = broker.get(&format!("/api/v1/messages/{partition}/sealed")).await;
    assert_eq!(read["isEncrypted"], json!(false), "it could be read");
}

#[tokio::test]
async fn many_messages_of_one_segment_are_each_sealed() {
    let broker = Broker::with(with_key("7")).await;
    configure(&broker, "q", true).await;
    let items: Vec<Value> = (0..300)
        .map(|n| json!({"queue": "q", "transactionId": format!("t{n}"), "payload": {"n": n, "s": "x".repeat(n)}}))
        .collect();
    let (status, answer) = broker.post("/api/v1/push", json!({"items": items})).await;
    assert_eq!(status, 201);
    let (_, popped) = pop(&broker, "batch=1000").await;
    let messages = popped["messages"].as_array().expect("messages");
    assert_eq!(messages.len(), 300);
    for (n, message) in messages.iter().enumerate() {
        assert_eq!(message["data"], json!({"n": n, "s": "x".repeat(n)}));
        assert_eq!(message["id"], answer[n]["message_id"]);
    }
    let items = json!({"items": [items[5], {"queue": "q", "transactionId": "new", "payload": 1}]});
    let (_, answer) = broker.post("/api/v1/push", items).await;
    assert_eq!((&answer[0]["status"], &answer[1]["status"]), (&json!("duplicate"), &json!("queued")));
    assert_eq!(answer[0]["message_id"], messages[5]["id"]);
    let blobs = broker.rows("select blob from queen.log_segments", &[]).await;
    assert!(blobs.iter().all(|row| Segment::unpack(row.get(0)).expect("one").frames().all(|frame| frame.is_encrypted)));
}

#[tokio::test]
async fn a_transaction_seals_what_it_pushes() {
    let broker = Broker::with(with_key("7")).await;
    configure(&broker, "q", true).await;
    let push = |queue: &str, id: &str| {
        format!(r#"{{"type":"push","queue":"{queue}","transactionId":"{id}","traceId":"{TRACE}","payload":{PAYLOAD}}}"#)
    };
    let body = format!(r#"{{"operations":[{},{}]}}"#, push("q", "sealed"), push("clear", "clear"));
    let (status, answer) = broker.post_raw("/api/v1/transaction", body).await;
    assert_eq!((status, &answer["success"]), (200, &json!(true)), "{answer}");
    let mut found = stored(&broker).await;
    found.sort();
    assert_eq!(found, [("clear".to_owned(), false), ("sealed".to_owned(), true)]);
    read_whole(&broker, "/api/v1/pop/queue/q?consumerGroup=g&subscriptionMode=all").await;
}

/// Pops what `g` is given and dead-letters it, by an acknowledgement or in a transaction.
async fn give_up(broker: &Broker, in_transaction: bool) {
    let (_, popped) = pop(broker, "batch=1").await;
    let message = &popped["messages"][0];
    let mut ack = json!({"type": "ack", "transactionId": message["transactionId"], "partitionId": message["partitionId"],
        "consumerGroup": "g", "leaseId": message["leaseId"], "status": "dlq", "error": "boom"});
    let (status, answer) = if in_transaction {
        broker.post("/api/v1/transaction", json!({"operations": [ack]})).await
    } else {
        ack.as_object_mut().expect("an object").remove("type");
        broker.post("/api/v1/ack", ack).await
    };
    let answer = if in_transaction { &answer["results"][0] } else { &answer[0] };
    assert_eq!((status, &answer["dlq"]), (200, &json!(true)), "{answer}");
}

#[tokio::test]
async fn dead_letters_are_stored_sealed_and_replayed_sealed_with_their_trace() {
    let broker = Broker::with(with_key("7")).await;
    configure(&broker, "q", true).await;
    for (id, in_transaction) in [("one", false), ("two", true)] {
        push(&broker, "q", id).await;
        give_up(&broker, in_transaction).await;
    }
    let letters = broker.rows("select payload, is_encrypted, trace_id from queen.log_dlq", &[]).await;
    assert_eq!(letters.len(), 2);
    for row in &letters {
        assert!(!row.get::<_, String>(0).contains("swordfish") && row.get::<_, bool>(1));
        assert_eq!(row.get::<_, Uuid>(2).to_string(), TRACE);
    }
    read_whole(&broker, "/api/v1/dlq?queue=q").await;
    let (_, listed) = broker.get("/api/v1/dlq?queue=q").await;
    assert_eq!(
        (&listed["messages"][0]["isEncrypted"], &listed["messages"][0]["traceId"]),
        (&Value::Null, &json!(TRACE))
    );
    let partition = listed["messages"][0]["partitionId"].as_str().expect("an id");
    broker.execute("delete from queen.log_segments", &[]).await;
    read_whole(&broker, &format!("/api/v1/messages/{partition}/one")).await;

    let (status, answer) = broker.post_raw(&format!("/api/v1/messages/{partition}/one/retry"), "").await;
    assert_eq!(status, 200, "{answer}");
    let (status, answer) = broker.post("/api/v1/dlq/replay", json!({"queue": "q"})).await;
    assert_eq!((status, &answer["replayed"]), (200, &json!(1)), "{answer}");
    assert!(stored(&broker).await.iter().map(|(_, is_sealed)| *is_sealed).eq([true, true]));
    read_whole(&broker, "/api/v1/pop/queue/q?consumerGroup=h&subscriptionMode=all").await;
    let (_, popped) = broker.get("/api/v1/pop/queue/q?consumerGroup=k&subscriptionMode=all").await;
    assert!(popped["messages"].as_array().expect("two").iter().all(|message| message["traceId"] == json!(TRACE)));
}

#[tokio::test]
async fn a_message_is_moved_to_the_dead_letters_as_it_is() {
    let broker = Broker::with(with_key("7")).await;
    configure(&broker, "q", true).await;
    push(&broker, "q", "moved").await;
    let row = broker.row("select id from queen.log_partitions", &[]).await;
    let partition: Uuid = row.get(0);
    // A server without the key can move it as well: it need not read it.
    let keyless = beside(&broker, Settings::default()).await;
    let (status, answer) = keyless.post_raw(&format!("/api/v1/messages/{partition}/moved/dlq"), "").await;
    assert_eq!(status, 200, "{answer}");
    read_whole(&broker, "/api/v1/dlq?queue=q").await;
    let (_, listed) = keyless.get("/api/v1/dlq?queue=q").await;
    let letter = &listed["messages"][0];
    assert!(is_envelope(&letter["data"]) && letter["isEncrypted"] == json!(true), "{letter}");
}

#[tokio::test]
async fn without_the_key_nothing_is_delivered_and_nothing_is_lost() {
    let broker = Broker::with(with_key("7")).await;
    configure(&broker, "q", true).await;
    push(&broker, "q", "one").await;
    let row = broker.row("select id from queen.log_partitions", &[]).await;
    let partition: Uuid = row.get(0);
    // Both live to the end: a server takes its database with it.
    let others = [
        (beside(&broker, Settings::default()).await, "not set"),
        (beside(&broker, with_key("8")).await, "another key"),
    ];
    for (other, why) in &others {
        let (status, answer) = pop(other, "wait=false").await;
        let text = answer["error"].as_str().expect("text");
        assert_eq!((status, &answer["messages"]), (500, &json!([])));
        assert!(text.contains("QUEEN_ENCRYPTION_KEY") && text.contains(why), "{text}");
        assert!(text.contains("offset 0") && text.contains(&partition.to_string()), "{text}");
        for path in ["/api/v1/messages?queue=q".to_owned(), format!("/api/v1/messages/{partition}/one")] {
            let (status, answer) = other.get(&path).await;
            let message = if answer["messages"].is_array() { &answer["messages"][0] } else { &answer };
            assert_eq!((status, &message["isEncrypted"]), (200, &json!(true)), "{answer}");
            assert!(is_envelope(&message["data"]), "{answer}");
        }
        let query = "select count(*) = 0 from queen.log_consumers where batch_end is not null";
        support::wait_until(&broker.sql, "the lease is given back", query, &[]).await;
    }
    read_whole(&broker, "/api/v1/pop/queue/q?consumerGroup=g&subscriptionMode=all").await;
}

#[tokio::test]
async fn what_is_committed_at_delivery_is_handed_out_sealed_rather_than_lost() {
    let broker = Broker::with(with_key("7")).await;
    configure(&broker, "q", true).await;
    push(&broker, "q", "one").await;
    let keyless = beside(&broker, Settings::default()).await;
    let (status, answer) = pop(&keyless, "autoAck=true").await;
    let message = &answer["messages"][0];
    assert_eq!((status, &message["isEncrypted"]), (200, &json!(true)));
    assert!(is_envelope(&message["data"]), "{message}");
}

#[tokio::test]
async fn a_payload_put_in_another_messages_place_is_not_delivered() {
    let broker = Broker::with(with_key("7")).await;
    configure(&broker, "q", true).await;
    push(&broker, "q", "one").await;
    push(&broker, "q", "two").await;
    give_up(&broker, false).await;
    give_up(&broker, false).await;
    broker.execute("update queen.log_dlq d set payload = o.payload from queen.log_dlq o where o.id <> d.id", &[]).await;
    let (_, listed) = broker.get("/api/v1/dlq?queue=q").await;
    for letter in listed["messages"].as_array().expect("two") {
        assert!(is_envelope(&letter["data"]) && letter["isEncrypted"] == json!(true), "{letter}");
    }
    let (status, answer) = broker.post("/api/v1/dlq/replay", json!({"queue": "q"})).await;
    assert_eq!(status, 500, "{answer}");
    assert_eq!(broker.rows("select 1 from queen.log_dlq", &[]).await.len(), 2, "kept");
}

#[tokio::test]
async fn a_server_without_the_key_stores_in_clear_and_says_so() {
    let broker = Broker::start().await;
    let answer = configure(&broker, "q", true).await;
    let warnings = answer["warnings"].as_array().expect("a list");
    assert!(warnings.iter().any(|text| text.as_str().expect("text").contains("QUEEN_ENCRYPTION_KEY")), "{answer}");
    push(&broker, "q", "clear").await;
    assert_eq!(stored(&broker).await, [("clear".to_owned(), false)]);
    read_whole(&broker, "/api/v1/pop/queue/q?consumerGroup=g&subscriptionMode=all").await;
}

#[tokio::test]
async fn a_switch_made_through_another_server_holds_for_the_next_push() {
    let first = Broker::with(with_key("7")).await;
    let second = beside(&first, with_key("7")).await;
    let transact = async |id: &str| {
        let body =
            format!(r#"{{"operations":[{{"type":"push","queue":"q","transactionId":"{id}","payload":{PAYLOAD}}}]}}"#);
        let (_, answer) = first.post_raw("/api/v1/transaction", body).await;
        assert_eq!(answer["success"], json!(true), "{answer}");
    };
    let mut expected = Vec::new();
    for (round, encrypted) in [false, true, false, true].into_iter().enumerate() {
        configure(&second, "q", encrypted).await;
        push(&first, "q", &format!("p{round}")).await;
        expected.push((format!("p{round}"), encrypted));
    }
    for (round, encrypted) in [false, true].into_iter().enumerate() {
        configure(&second, "q", encrypted).await;
        transact(&format!("t{round}")).await;
        expected.push((format!("t{round}"), encrypted));
    }
    assert_eq!(stored(&first).await, expected);
    let (_, popped) = pop(&second, "batch=100").await;
    assert_eq!(popped["messages"].as_array().expect("all").len(), expected.len());
}

#[tokio::test]
async fn what_was_filed_in_clear_is_replayed_as_the_queue_wants_it_by_then() {
    let broker = Broker::with(with_key("7")).await;
    for (before, after, id) in [(false, true, "one"), (true, false, "two")] {
        configure(&broker, "q", before).await;
        push(&broker, "q", id).await;
        give_up(&broker, false).await;
        configure(&broker, "q", after).await;
        broker.execute("delete from queen.log_segments", &[]).await;
        let (status, answer) = broker.post("/api/v1/dlq/replay", json!({"queue": "q"})).await;
        assert_eq!((status, &answer["replayed"]), (200, &json!(1)), "{answer}");
        assert!(stored(&broker).await[0].1, "sealed by the queue's wish, or because it was");
        let (_, popped) = pop(&broker, "autoAck=true").await;
        assert_eq!(popped["messages"][0]["data"]["secret"], json!("swordfish"));
    }
}
