//! Queue administration: what configure stores and answers, and what a delete takes along.

mod support;

use ebbtide::http::Settings;
use serde_json::{Value, json};
use support::{Broker, wait_until};
use uuid::Uuid;

/// A queue with two partitions, and one row in every table that can hold something of it.
async fn full_queue(broker: &Broker, name: &str) -> Uuid {
    let query = "insert into queen.queues (name) values ($1) returning id";
    let id: Uuid = broker.row(query, &[&name]).await.get(0);
    for partition in ["a", "b"] {
        let query = "insert into queen.log_partitions (queue_id, name, last_offset) values ($1, $2, 0) returning id";
        let pid: Uuid = broker.row(query, &[&id, &partition]).await.get(0);
        for statement in [
            "insert into queen.log_segments values ($1, 0, 0, now(), 'x')",
            "insert into queen.log_txns values ($1, 0, 0, now(), decode(repeat('00', 16), 'hex'))",
            "insert into queen.log_consumers (partition_id, consumer_group) values ($1, 'g')",
            "insert into queen.log_dlq (partition_id, consumer_group, \"offset\") values ($1, 'g', 0)",
            "insert into queen.message_traces (partition_id, transaction_id, data) values ($1, 't', '{}')",
            "insert into queen.retention_history (partition_id) values ($1)",
        ] {
            broker.execute(statement, &[&pid]).await;
        }
    }
    for statement in [
        "insert into queen.consumer_groups_metadata (queue_id, consumer_group, subscription_mode, subscription_timestamp)
         values ($1, 'g', 'all', now())",
        "insert into queen.consumer_watermarks (queue_id, consumer_group) values ($1, 'g')",
        "insert into queen.queue_lag_metrics (bucket_time, queue_id) values (now(), $1)",
        "insert into queen.stats (stat_type, stat_key, queue_id) values ('queue', $1::uuid::text, $1)",
        "insert into queen.queue_parked_replica (bucket_time, queue_name, hostname, worker_id)
         select now(), name, 'h', 0 from queen.queues where id = $1",
    ] {
        broker.execute(statement, &[&id]).await;
    }
    id
}

/// Rows of every table, those of queues first.
async fn counts(broker: &Broker) -> Vec<(&'static str, i64)> {
    let mut counts = Vec::new();
    for (table, query) in [
        ("queues", "select count(*) from queen.queues"),
        ("log_partitions", "select count(*) from queen.log_partitions"),
        ("log_segments", "select count(*) from queen.log_segments"),
        ("log_txns", "select count(*) from queen.log_txns"),
        ("log_consumers", "select count(*) from queen.log_consumers"),
        ("log_dlq", "select count(*) from queen.log_dlq"),
        ("consumer_groups_metadata", "select count(*) from queen.consumer_groups_metadata"),
        ("consumer_watermarks", "select count(*) from queen.consumer_watermarks"),
        ("queue_lag_metrics", "select count(*) from queen.queue_lag_metrics"),
        ("stats", "select count(*) from queen.stats"),
        ("queue_parked_replica", "select count(*) from queen.queue_parked_replica"),
        ("partition_events", "select count(*) from queen.partition_events"),
        ("message_traces", "select count(*) from queen.message_traces"),
        ("retention_history", "select count(*) from queen.retention_history"),
    ] {
        counts.push((table, broker.row(query, &[]).await.get(0)));
    }
    counts
}

#[tokio::test]
async fn deleting_a_queue_takes_everything_but_traces_and_history() {
    let broker = Broker::start().await;
    full_queue(&broker, "other").await;
    let others = counts(&broker).await;
    full_queue(&broker, "doomed").await;
    let (status, body) = broker.delete("/api/v1/resources/queues/doomed").await;
    assert_eq!(status, 200);
    assert_eq!((&body["deleted"], &body["existed"], &body["queue"]), (&json!(true), &json!(true), &json!("doomed")));
    assert!(body["message"].is_string() && body.get("error").is_none(), "{body}");
    for ((table, after), (_, other)) in counts(&broker).await.into_iter().zip(others) {
        let stay = matches!(table, "message_traces" | "retention_history");
        assert_eq!(after, if stay { 2 * other } else { other }, "rows of {table}");
    }
}

#[tokio::test]
async fn deleting_a_queue_that_is_not_there_is_no_error() {
    let broker = Broker::start().await;
    let (status, body) = broker.delete("/api/v1/resources/queues/nothing").await;
    assert_eq!(status, 200);
    assert_eq!((&body["deleted"], &body["existed"]), (&json!(false), &json!(false)));
}

#[tokio::test]
async fn a_queue_is_deleted_by_its_decoded_name() {
    let broker = Broker::start().await;
    let longest = "q".repeat(255);
    for (path, name) in [
        ("a%2Fb", "a/b"),
        ("50%25", "50%"),
        ("it's%20%22so%22", "it's \"so\""),
        ("what%3F%23", "what?#"),
        ("%F0%9F%90%98", "🐘"),
        (longest.as_str(), longest.as_str()),
    ] {
        full_queue(&broker, name).await;
        let (status, body) = broker.delete(&format!("/api/v1/resources/queues/{path}")).await;
        assert_eq!((status, &body["deleted"], &body["queue"]), (200, &json!(true), &json!(name)), "{body}");
    }
    for path in ["q".repeat(256), "a%00b".to_owned(), "%FF".to_owned()] {
        let (status, body) = broker.delete(&format!("/api/v1/resources/queues/{path}")).await;
        assert_eq!(status, 400, "{body}");
        assert!(body["error"].is_string(), "{body}");
    }
}

#[tokio::test]
async fn a_delete_waits_for_a_push_and_takes_its_rows_too() {
    let broker = Broker::start().await;
    let id = full_queue(&broker, "busy").await;
    let mut pusher = broker.database.client().await;
    let push = pusher.transaction().await.expect("a transaction");
    let query = "insert into queen.log_partitions (queue_id, name) values ($1, 'new') returning id";
    let pid: Uuid = push.query_one(query, &[&id]).await.expect("makes a partition").get(0);
    let query = "insert into queen.log_txns values ($1, 0, 0, now(), decode(repeat('00', 16), 'hex'))";
    push.execute(query, &[&pid]).await.expect("writes its hashes");

    let delete = async { broker.delete("/api/v1/resources/queues/busy").await };
    let commit = async {
        let query = "select count(*) = 1 from pg_stat_activity
                     where datname = current_database() and application_name = 'ebbtide' and wait_event_type = 'Lock' and query like '%delete_queue_v1%'";
        wait_until(&broker.sql, "the delete waits for the push", query, &[]).await;
        push.commit().await.expect("the push ends first");
    };
    let ((status, body), ()) = tokio::join!(delete, commit);
    assert_eq!((status, &body["deleted"]), (200, &json!(true)));
    for (table, rows) in counts(&broker).await {
        let stay = if matches!(table, "message_traces" | "retention_history") { 2 } else { 0 };
        assert_eq!(rows, stay, "rows of {table}");
    }
}

/// What every option is when nobody says.
fn defaults() -> Value {
    json!({
        "leaseTime": 300, "retryLimit": 3, "retryDelay": 1000, "maxSize": 0, "ttl": 3600, "priority": 0,
        "deadLetterQueue": true, "dlqAfterMaxRetries": true, "delayedProcessing": 0, "windowBuffer": 0,
        "minPopWaitTime": 0, "retentionEnabled": false, "retentionSeconds": 0,
        "completedRetentionSeconds": 0, "maxWaitTimeSeconds": 0, "encryptionEnabled": false,
        "dedupWindowSeconds": 3600,
    })
}

/// Every option with a value that is not its default.
fn unusual() -> Value {
    json!({
        "leaseTime": 1, "retryLimit": 2, "retryDelay": 3, "maxSize": 4, "ttl": 5, "priority": 6,
        "deadLetterQueue": false, "dlqAfterMaxRetries": false, "delayedProcessing": 7, "windowBuffer": 8,
        "minPopWaitTime": 9, "retentionEnabled": true, "retentionSeconds": 10,
        "completedRetentionSeconds": 11, "maxWaitTimeSeconds": 12, "encryptionEnabled": false,
        "dedupWindowSeconds": 13,
    })
}

async fn configure(broker: &Broker, body: Value) -> Value {
    let (status, answer) = broker.post("/api/v1/configure", body.clone()).await;
    assert_eq!(status, 200, "{body}: {answer}");
    assert!(answer.get("error").is_none(), "{answer}");
    answer
}

/// The row of the queue `q`, as options.
async fn stored(broker: &Broker) -> Value {
    let query = "select json_build_object(
        'leaseTime', lease_time, 'retryLimit', retry_limit, 'retryDelay', retry_delay,
        'maxSize', max_queue_size, 'ttl', ttl, 'priority', priority, 'deadLetterQueue', dead_letter_queue,
        'dlqAfterMaxRetries', dlq_after_max_retries, 'delayedProcessing', delayed_processing,
        'windowBuffer', window_buffer, 'minPopWaitTime', min_pop_wait_time,
        'retentionEnabled', retention_enabled, 'retentionSeconds', retention_seconds,
        'completedRetentionSeconds', completed_retention_seconds,
        'maxWaitTimeSeconds', max_wait_time_seconds, 'encryptionEnabled', encryption_enabled,
        'dedupWindowSeconds', dedup_window_seconds)
        from queen.queues where name = 'q'";
    broker.row(query, &[]).await.get(0)
}

#[tokio::test]
async fn configure_makes_a_queue_with_defaults() {
    let broker = Broker::start().await;
    let answer = configure(&broker, json!({"queue": "q"})).await;
    let id: Uuid = broker.row("select id from queen.queues where name = 'q'", &[]).await.get(0);
    assert_eq!(
        answer,
        json!({
            "configured": true, "queueId": id, "partitionId": null, "queue": "q", "namespace": "", "task": "",
            "storage": "segments", "options": defaults(),
            "retention": {
                "retentionSeconds": null, "completedRetentionSeconds": null, "maxWaitTimeSeconds": null,
                "sidecarSeconds": 3600,
            },
            "warnings": [],
        })
    );
    assert_eq!(stored(&broker).await, defaults());
    let partitions: i64 = broker.row("select count(*) from queen.log_partitions", &[]).await.get(0);
    assert_eq!(partitions, 0, "configuring makes no partition");
}

#[tokio::test]
async fn configure_replaces_and_merge_keeps() {
    let broker = Broker::start().await;
    let mut body = json!({"queue": "q", "namespace": "n", "task": "t", "options": unusual()});
    let first = configure(&broker, body.clone()).await;
    assert_eq!((&first["options"], &first["namespace"], &first["task"]), (&unusual(), &json!("n"), &json!("t")));
    assert_eq!(stored(&broker).await, unusual(), "each option is in its own column");

    body = json!({"queue": "q", "mode": "merge", "options": {"leaseTime": 60, "retryLimit": null}});
    let merged = configure(&broker, body).await;
    let mut expected = unusual();
    expected["leaseTime"] = json!(60);
    expected["retryLimit"] = json!(3);
    assert_eq!((&merged["options"], &merged["namespace"]), (&expected, &json!("n")), "null is the default");

    let replaced = configure(&broker, json!({"queue": "q", "ttl": 5, "namespace": "", "task": null})).await;
    let mut expected = defaults();
    expected["ttl"] = json!(5);
    assert_eq!((&replaced["options"], &replaced["namespace"]), (&expected, &json!("")));
    assert_eq!(replaced["queueId"], first["queueId"]);
}

#[tokio::test]
async fn merging_into_a_queue_that_a_push_made_keeps_its_lease() {
    let broker = Broker::start().await;
    broker.execute("insert into queen.queues (name, namespace) values ('q', 'shop')", &[]).await;
    let answer = configure(&broker, json!({"queue": "q", "mode": "merge", "options": {"priority": 1}})).await;
    assert_eq!((&answer["options"]["leaseTime"], &answer["namespace"]), (&json!(60), &json!("shop")));
    let made = configure(&broker, json!({"queue": "new", "mode": "merge"})).await;
    assert_eq!(made["options"], defaults());
}

#[tokio::test]
async fn options_are_taken_from_either_place_and_unknown_ones_ignored() {
    let broker = Broker::start().await;
    let body = json!({"queue": "q", "retryLimit": 7, "options": {"leaseTime": 9, "retryLimit": 7, "shoeSize": 44}});
    let answer = configure(&broker, body).await;
    assert_eq!((&answer["options"]["leaseTime"], &answer["options"]["retryLimit"]), (&json!(9), &json!(7)));
    assert!(answer["options"].get("shoeSize").is_none());
    let body = json!({"queue": "q", "retryLimit": 7, "options": {"retryLimit": 8}});
    let (status, answer) = broker.post("/api/v1/configure", body).await;
    assert_eq!((status, &answer["error"]), (400, &json!("retryLimit: is given twice, with two values")));
}

#[tokio::test]
async fn a_bad_option_is_refused_by_name_and_stores_nothing() {
    let broker = Broker::start().await;
    for (name, bad) in [
        ("leaseTime", json!(0)),
        ("leaseTime", json!(31_536_001)),
        ("retryLimit", json!(-1)),
        ("retryDelay", json!(-1)),
        ("maxSize", json!(2_147_483_648_i64)),
        ("ttl", json!("3600")),
        ("priority", json!(1.5)),
        ("deadLetterQueue", json!(1)),
        ("dlqAfterMaxRetries", json!("true")),
        ("delayedProcessing", json!(-1)),
        ("windowBuffer", json!([])),
        ("minPopWaitTime", json!("1")),
        ("retentionEnabled", json!(0)),
        ("retentionSeconds", json!(-1)),
        ("retentionSeconds", json!(1e30)),
        ("completedRetentionSeconds", json!(u64::MAX)),
        ("maxWaitTimeSeconds", json!(2_147_483_648_i64)),
        ("encryptionEnabled", json!(1)),
        ("encryptionEnabled", json!("no")),
        ("dedupWindowSeconds", json!(-1)),
    ] {
        for body in [json!({"queue": "q", "options": {name: bad}}), json!({"queue": "q", name: bad})] {
            let (status, answer) = broker.post("/api/v1/configure", body).await;
            assert_eq!(status, 400, "{name} {bad}: {answer}");
            assert!(answer["error"].as_str().is_some_and(|e| e.starts_with(&format!("{name}: "))), "{answer}");
        }
    }
    let queues: i64 = broker.row("select count(*) from queen.queues", &[]).await.get(0);
    assert_eq!(queues, 0);
}

#[tokio::test]
async fn the_edges_of_the_ranges_are_taken() {
    let broker = Broker::start().await;
    for options in [
        json!({"leaseTime": 1, "retryLimit": 0, "retentionSeconds": 0, "dedupWindowSeconds": 0, "encryptionEnabled": true}),
        json!({"leaseTime": 31_536_000, "retryLimit": i32::MAX, "retentionSeconds": i32::MAX, "maxWaitTimeSeconds": i32::MAX}),
    ] {
        let answer = configure(&broker, json!({"queue": "q", "options": options})).await;
        for (name, value) in options.as_object().expect("an object") {
            assert_eq!(&answer["options"][name], value, "{name}");
        }
    }
    for (given, held) in
        [(json!(-5), 0), (json!(0), 0), (json!(60_000), 60_000), (json!(60_001), 60_000), (json!(u64::MAX), 60_000)]
    {
        let answer = configure(&broker, json!({"queue": "q", "minPopWaitTime": given})).await;
        assert_eq!(answer["options"]["minPopWaitTime"], json!(held), "{given}");
    }
}

#[tokio::test]
async fn what_is_not_a_request_is_refused() {
    let broker = Broker::start().await;
    for body in ["{}", r#"{"queue":null}"#] {
        let (status, answer) = broker.post_raw("/api/v1/configure", body).await;
        assert_eq!((status, answer), (400, json!({"error": "queue is required"})));
    }
    let deep = format!(r#"{{"queue":"q","options":{}{}}}"#, "[".repeat(1000), "]".repeat(1000));
    for (body, named) in [
        ("", "bad body"),
        ("{", "bad body"),
        ("[]", "bad body"),
        (deep.as_str(), "bad body"),
        (r#"{"queue":7}"#, "queue"),
        (r#"{"queue":""}"#, "queue"),
        (r#"{"queue":"a\u0000"}"#, "queue"),
        (r#"{"queue":"q","options":[]}"#, "options"),
        (r#"{"queue":"q","namespace":7}"#, "namespace"),
        (r#"{"queue":"q","task":"\n"}"#, "task"),
        (r#"{"queue":"q","mode":"add"}"#, "mode"),
        (r#"{"queue":"q","mode":true}"#, "mode"),
    ] {
        let (status, answer) = broker.post_raw("/api/v1/configure", body.to_owned()).await;
        assert_eq!(status, 400, "{body}: {answer}");
        assert!(answer["error"].as_str().is_some_and(|e| e.starts_with(named)), "{body}: {answer}");
    }
}

#[tokio::test]
async fn queues_have_names_of_1_to_255_characters() {
    let broker = Broker::start().await;
    for name in ["a/b", "50%", "it's \"so\"", "what?#", "🐘", &"🐘".repeat(255)] {
        assert_eq!(configure(&broker, json!({"queue": name})).await["queue"], json!(name));
    }
    let (status, answer) = broker.post("/api/v1/configure", json!({"queue": "q".repeat(256)})).await;
    assert_eq!(status, 400);
    assert_eq!(answer["error"], "queue: must have 1 to 255 characters, has 256");
}

#[tokio::test]
async fn the_answer_says_what_is_in_force_and_what_looks_wrong() {
    let broker = Broker::start().await;
    for (options, in_force, warned) in [
        // Windows without the switch delete nothing.
        (
            json!({"retentionSeconds": 500, "completedRetentionSeconds": 400}),
            [None, None, None, Some(3600)],
            vec!["retentionEnabled"],
        ),
        (
            json!({"retentionEnabled": true, "retentionSeconds": 500, "completedRetentionSeconds": 7200}),
            [Some(500), Some(7200), None, Some(7200)],
            vec![],
        ),
        // Eviction needs no switch, and takes leased messages.
        (json!({"maxWaitTimeSeconds": 299}), [None, None, Some(299), Some(3600)], vec!["maxWaitTimeSeconds"]),
        (json!({"maxWaitTimeSeconds": 300}), [None, None, Some(300), Some(3600)], vec![]),
        (
            json!({"retentionEnabled": true, "retentionSeconds": 299}),
            [Some(299), None, None, Some(3600)],
            vec!["retentionSeconds"],
        ),
        (json!({"leaseTime": 901, "dedupWindowSeconds": 0}), [None, None, None, Some(900)], vec!["leaseTime"]),
        (json!({"leaseTime": 900, "dedupWindowSeconds": 0}), [None, None, None, Some(900)], vec![]),
    ] {
        let answer = configure(&broker, json!({"queue": "q", "options": options})).await;
        let [retention, completed, max_wait, sidecar] = in_force;
        assert_eq!(
            answer["retention"],
            json!({
                "retentionSeconds": retention, "completedRetentionSeconds": completed,
                "maxWaitTimeSeconds": max_wait, "sidecarSeconds": sidecar,
            }),
            "{options}"
        );
        let warnings: Vec<&str> =
            answer["warnings"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
        assert_eq!(warnings.len(), warned.len(), "{options}: {warnings:?}");
        assert!(warnings.iter().zip(&warned).all(|(line, name)| line.starts_with(name)), "{options}: {warnings:?}");
    }
}

#[tokio::test]
async fn no_deduplication_window_outlasts_its_partition() {
    let with_days = |days| Settings { partition_cleanup_days: days, ..Settings::default() };
    let broker = Broker::with(with_days(Some(1))).await;
    configure(&broker, json!({"queue": "q", "dedupWindowSeconds": 86_400})).await;
    let (status, answer) = broker.post("/api/v1/configure", json!({"queue": "q", "dedupWindowSeconds": 86_401})).await;
    assert_eq!(status, 400);
    assert!(
        answer["error"].as_str().is_some_and(|e| e.starts_with("dedupWindowSeconds: must be at most 86400")),
        "{answer}"
    );

    let never = Broker::with(with_days(None)).await;
    let answer = configure(&never, json!({"queue": "q", "dedupWindowSeconds": i32::MAX})).await;
    assert_eq!(answer["warnings"], json!([]), "without cleanup no partition forgets");
}

#[tokio::test]
async fn many_may_make_the_same_queue_at_once() {
    let broker = Broker::start().await;
    let all = (0..50)
        .map(|n| configure(&broker, json!({"queue": "q", "priority": n, "mode": (n % 2 == 0).then_some("merge")})));
    let answers = futures_util::future::join_all(all).await;
    assert!(answers.iter().all(|answer| answer["queueId"] == answers[0]["queueId"]));
}

#[tokio::test]
async fn configuring_does_not_wait_for_a_push_that_makes_a_partition() {
    let broker = Broker::start().await;
    configure(&broker, json!({"queue": "q"})).await;
    let mut pusher = broker.database.client().await;
    let push = pusher.transaction().await.expect("a transaction");
    let query = "insert into queen.log_partitions (queue_id, name) select id, 'p' from queen.queues";
    push.execute(query, &[]).await.expect("holds a share of the queue");
    configure(&broker, json!({"queue": "q", "leaseTime": 5})).await;
    push.commit().await.expect("neither waited");
}
