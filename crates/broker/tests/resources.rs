//! Queues, partitions, namespaces and tasks with their counts, and the clearing of a queue.

#[path = "resources/clear.rs"]
mod clear;
mod support;

use serde_json::{Value, json};
use support::Broker;
use support::lane::Lane;
use support::names::{encoded, hard_names};
use uuid::Uuid;

async fn read(b: &Broker, path: &str) -> Value {
    let (status, body) = b.get(&format!("/api/v1/resources/{path}")).await;
    assert_eq!(status, 200, "{path}: {body}");
    body
}

/// Sets a cursor, whatever stood there.
async fn set_cursor(b: &Broker, id: Uuid, group: &str, committed: i64) {
    b.execute(
        "insert into queen.log_consumers (partition_id, consumer_group, committed) values ($1, $2, $3)
         on conflict (partition_id, consumer_group) do update set committed = $3",
        &[&id, &group, &committed],
    )
    .await;
}

/// Total, pending, processing, completed, dead letters of the only partition.
async fn counts(b: &Broker) -> [i64; 5] {
    let body = read(b, "queues/q").await;
    let stats = &body["partitions"][0]["stats"];
    assert_eq!(stats, &body["totals"], "one partition");
    assert_eq!(stats["failed"], Value::Null);
    ["total", "pending", "processing", "completed", "deadLetter"].map(|key| stats[key].as_i64().expect("a count"))
}

#[tokio::test]
async fn pending_is_what_the_slowest_named_group_has_before_it() {
    let b = Broker::start().await;
    let lane = Lane::empty(&b, "p").await;
    assert_eq!(counts(&b).await, [0, 0, 0, 0, 0]);
    lane.append(10).await;
    assert_eq!(counts(&b).await, [10, 10, 0, 0, 0], "nobody has consumed");
    set_cursor(&b, lane.id, "__QUEUE_MODE__", 3).await;
    assert_eq!(counts(&b).await, [10, 6, 0, 4, 0], "queue mode counts while it is alone");
    set_cursor(&b, lane.id, "fast", 9).await;
    assert_eq!(counts(&b).await, [10, 0, 0, 10, 0], "and no more once there is a named group");
    set_cursor(&b, lane.id, "slow", 5).await;
    assert_eq!(counts(&b).await, [10, 4, 0, 6, 0], "the slowest of them");
}

#[tokio::test]
async fn processing_is_under_live_leases_and_never_more_than_pending() {
    let b = Broker::start().await;
    let lane = Lane::empty(&b, "p").await;
    lane.append(10).await;
    lane.lease_as("g", "w", 3, 60.0).await;
    assert_eq!(counts(&b).await, [10, 10, 4, 0, 0]);
    lane.lease_as("h", "w", 8, 60.0).await;
    assert_eq!(counts(&b).await, [10, 10, 10, 0, 0], "4 and 9, and there are 10");
    lane.lease_as("h", "w", 8, -1.0).await;
    assert_eq!(counts(&b).await, [10, 10, 4, 0, 0], "an expired lease holds nothing");
}

#[tokio::test]
async fn what_retention_deleted_counts_nowhere() {
    let b = Broker::start().await;
    let lane = Lane::empty(&b, "p").await;
    for _ in 0..5 {
        lane.append(2).await;
    }
    set_cursor(&b, lane.id, "g", 1).await;
    lane.lease_as("g", "w", 5, 60.0).await;
    b.delete_below(lane.id, 6).await;
    assert_eq!(counts(&b).await, [4, 4, 0, 0, 0], "the lease is on what is gone");
    b.delete_below(lane.id, 10).await;
    assert_eq!(counts(&b).await, [0, 0, 0, 0, 0]);
}

#[tokio::test]
async fn dead_letters_are_counted_apart() {
    let b = Broker::start().await;
    let lane = Lane::leased(&b, 3).await;
    lane.ack(&[("m0", "dlq"), ("m1", "completed")]).await;
    lane.lease(2).await;
    lane.ack(&[("m1", "completed"), ("m2", "completed")]).await;
    assert_eq!(counts(&b).await, [3, 0, 0, 2, 1]);
}

#[tokio::test]
async fn counts_read_no_segment() {
    let b = Broker::start().await;
    let lane = Lane::empty(&b, "p").await;
    b.execute("update queen.log_partitions set last_offset = 999999999999, log_start = 5", &[]).await;
    set_cursor(&b, lane.id, "g", 7).await;
    assert_eq!(counts(&b).await, [999_999_999_995, 999_999_999_992, 0, 3, 0], "counters alone say so");
}

#[tokio::test]
async fn queues_are_listed_newest_first_and_filtered() {
    let b = Broker::start().await;
    assert_eq!(read(&b, "queues").await["queues"], json!([]));
    for (name, namespace, age) in [("orders.eu.new", "orders", 3), ("orders.us", "orders", 2), ("Mail", "post", 1)] {
        let queue = "insert into queen.queues (name, namespace, task, created_at)
            values ($1::text, $2, nullif(split_part($1::text, '.', 2), ''), now() - make_interval(hours => $3))";
        b.execute(queue, &[&name, &namespace, &age]).await;
    }
    b.store("orders.us", "a", 3).await;
    b.store("orders.us", "b", 4).await;
    b.pop_ids("queue/orders.us/partition/a?consumerGroup=g&subscriptionMode=all").await;
    let names = async |query: &str| {
        let body = read(&b, &format!("queues{query}")).await;
        let names: Vec<String> = body["queues"]
            .as_array()
            .expect("rows")
            .iter()
            .map(|q| q["name"].as_str().expect("a name").into())
            .collect();
        (names.join(" "), body["total"].as_i64().expect("a count"))
    };
    assert_eq!(names("").await, ("Mail orders.us orders.eu.new".to_owned(), 3));
    assert_eq!(names("?limit=1&offset=1").await, ("orders.us".to_owned(), 3));
    assert_eq!(names("?offset=9").await, (String::new(), 3), "a page beyond the end");
    assert_eq!(names("?search=ORDERS").await, ("orders.us orders.eu.new".to_owned(), 2));
    assert_eq!(names("?search=%25").await, (String::new(), 0), "no pattern");
    assert_eq!(names("?namespace=orders&task=eu").await, ("orders.eu.new".to_owned(), 1));
    assert_eq!(names("?namespace=nothing").await, (String::new(), 0));

    let body = read(&b, "queues?search=us").await;
    let mut row = body["queues"][0].as_object().expect("a row").clone();
    assert!(Uuid::parse_str(row.remove("id").expect("an id").as_str().expect("text")).is_ok());
    assert!(row.remove("createdAt").expect("a time").as_str().expect("text").ends_with('Z'));
    let expected = json!({
        "name": "orders.us", "namespace": "orders", "task": "us", "partitions": 2, "retainedBytes": null,
        "messages": {"total": 7, "pending": 7, "processing": 3}, "segments": {"segments": null, "messages": 7},
    });
    assert_eq!(Value::Object(row), expected);
}

#[tokio::test]
async fn one_queue_is_shown_with_its_partitions_and_options() {
    let b = Broker::start().await;
    b.post("/api/v1/configure", json!({"queue": "q", "namespace": "n", "options": {"leaseTime": 7}})).await;
    b.store_aged("q", "b", 2, 100.0).await;
    b.store_aged("q", "b", 2, 50.0).await;
    b.store("q", "a", 1).await;
    let body = read(&b, "queues/q").await;
    assert_eq!((&body["name"], &body["namespace"], &body["partitionCount"]), (&json!("q"), &json!("n"), &json!(2)));
    assert_eq!(body["options"]["leaseTime"], 7);
    assert_eq!(
        body["totals"],
        json!({"total": 5, "pending": 5, "processing": 0, "completed": 0, "failed": null, "deadLetter": 0})
    );
    let [a, other] = &body["partitions"].as_array().expect("rows")[..] else { panic!("two partitions") };
    assert_eq!((&a["name"], &other["name"]), (&json!("a"), &json!("b")));
    assert_eq!((&other["logStart"], &other["lastOffset"], &other["queue"]), (&json!(0), &json!(3), &json!("q")));
    let query = "select queen.iso_milliseconds(min(s.created_at)), queen.iso_milliseconds(max(s.created_at))
        from queen.log_segments s join queen.log_partitions p on p.id = s.partition_id where p.name = 'b'";
    let row = b.row(query, &[]).await;
    assert_eq!(
        (&other["oldestMessage"], &other["newestMessage"]),
        (&json!(row.get::<_, &str>(0)), &json!(row.get::<_, &str>(1)))
    );
    let one = read(&b, "queues/q?limit=1&offset=1").await;
    assert_eq!(one["partitions"][0]["name"], "b");
    assert_eq!(one["totals"], body["totals"], "over all partitions");
    let missing = json!({"error": "Queue not found"});
    for path in ["queues/nowhere", "queues/nowhere/depth", "queues/nowhere/depth?group=g"] {
        assert_eq!(b.get(&format!("/api/v1/resources/{path}")).await, (404, missing.clone()), "{path}");
    }
}

#[tokio::test]
async fn any_name_is_a_queue() {
    let b = Broker::start().await;
    for name in hard_names() {
        b.store(&name, &name, 2).await;
        let quoted = encoded(&name);
        let body = read(&b, &format!("queues/{quoted}")).await;
        assert_eq!((&body["name"], &body["partitions"][0]["name"]), (&json!(name), &json!(name)));
        let body = read(&b, &format!("queues/{quoted}/depth?group={quoted}")).await;
        assert_eq!((&body["queue"], &body["group"], &body["pending"]), (&json!(name), &json!(name), &json!(2)));
        assert_eq!(read(&b, &format!("partitions?queue={quoted}")).await["total"], 1, "{name}");
        let (status, body) = b.delete(&format!("/api/v1/queues/{quoted}/clear?partition={quoted}")).await;
        assert_eq!((status, &body["messagesDeleted"]), (200, &json!(2)), "{name}: {body}");
    }
    let (status, body) = b.get("/api/v1/resources/queues/a/b").await;
    assert_eq!((status, &body["code"]), (404, &json!("no_such_route")), "a slash in a name is written %2F");
    let long = "x".repeat(256);
    for path in [format!("queues/{long}"), format!("queues/{long}/depth"), format!("partitions?queue={long}")] {
        let (status, body) = b.get(&format!("/api/v1/resources/{path}")).await;
        assert_eq!((status, &body["error"]), (400, &json!("queue: must have 1 to 255 characters, has 256")));
    }
    let (status, body) = b.get("/api/v1/resources/queues/q%00q").await;
    assert_eq!(status, 400);
    assert!(body["error"].as_str().expect("text").starts_with("queue: must not contain control"), "{body}");
    assert_eq!(b.get("/api/v1/resources/queues/%FF").await.0, 400, "not UTF-8");
}

#[tokio::test]
async fn depth_is_a_groups_or_the_slowest_ones() {
    let b = Broker::start().await;
    let one = b.store("q", "a", 10).await;
    let two = b.store("q", "b", 4).await;
    set_cursor(&b, one.partition_id, "g", 8).await;
    set_cursor(&b, two.partition_id, "g", 3).await;
    set_cursor(&b, one.partition_id, "slow", 2).await;
    set_cursor(&b, one.partition_id, "__QUEUE_MODE__", -1).await;
    let expected = json!({
        "queue": "q", "group": "g", "pending": 1, "partitionsPending": 1, "conflation": false, "effectivePending": 1,
        "partitions": [{"partition": "a", "pending": 1}, {"partition": "b", "pending": 0}],
    });
    assert_eq!(read(&b, "queues/q/depth?group=g").await, expected);
    let depth = async |query: &str| {
        let body = read(&b, &format!("queues/q/depth{query}")).await;
        (body["pending"].as_i64().expect("a count"), body["partitionsPending"].as_i64().expect("a count"))
    };
    assert_eq!(depth("").await, (7, 1), "slow in a, g in b");
    assert_eq!(depth("?group=slow").await, (11, 2), "everything where it has no cursor");
    assert_eq!(depth("?group=nobody").await, (14, 2));
    b.delete_below(one.partition_id, 10).await;
    assert_eq!(depth("?group=nobody").await, (4, 1), "what is deleted is not pending");
    let page = read(&b, "queues/q/depth?group=nobody&limit=1&offset=1").await;
    assert_eq!(page["partitions"], json!([{"partition": "a", "pending": 0}]), "the deepest first");
    assert_eq!(page["pending"], 4, "of all pages");
    let beyond = read(&b, "queues/q/depth?group=nobody&offset=5").await;
    assert_eq!((&beyond["partitions"], &beyond["partitionsPending"]), (&json!([]), &json!(1)));
    b.execute("insert into queen.queues (name) values ('bare')", &[]).await;
    assert_eq!(read(&b, "queues/bare/depth").await["pending"], 0);
}

#[tokio::test]
async fn partitions_are_listed_by_queue_and_name() {
    let b = Broker::start().await;
    b.store("r", "a", 1).await;
    b.store("q", "b", 2).await;
    b.store("q", "a", 3).await;
    let names = async |query: &str| {
        let body = read(&b, &format!("partitions{query}")).await;
        let rows = body["partitions"].as_array().expect("rows").clone();
        let text =
            |row: &Value| format!("{}/{}", row["queue"].as_str().expect("text"), row["name"].as_str().expect("text"));
        (rows.iter().map(text).collect::<Vec<_>>().join(" "), body["total"].as_i64().expect("a count"))
    };
    assert_eq!(names("").await, ("q/a q/b r/a".to_owned(), 3));
    assert_eq!(names("?queue=q").await, ("q/a q/b".to_owned(), 2));
    assert_eq!(names("?queue=q&limit=1&offset=1").await, ("q/b".to_owned(), 2));
    assert_eq!(names("?limit=0").await, (String::new(), 3));
    assert_eq!(names("?queue=nowhere").await, (String::new(), 0));
    let body = read(&b, "partitions?queue=q&limit=1").await;
    assert_eq!(body["pagination"], json!({"limit": 1, "offset": 0}));
    assert_eq!(body["partitions"][0]["stats"]["pending"], 3);
}

#[tokio::test]
async fn namespaces_and_tasks_sum_their_queues() {
    let b = Broker::start().await;
    b.store("shop.pay", "a", 1).await;
    for (name, namespace, task) in
        [("one", Some("n"), Some("t")), ("two", Some("n"), None), ("three", Some(""), Some("t"))]
    {
        let queue = "insert into queen.queues (name, namespace, task) values ($1, $2, $3)";
        b.execute(queue, &[&name, &namespace, &task]).await;
    }
    b.store("one", "a", 2).await;
    let p = b.store("two", "a", 3).await;
    b.store("two", "b", 4).await;
    set_cursor(&b, p.partition_id, "g", 1).await;
    let body = read(&b, "namespaces").await;
    let expected = json!([
        {"namespace": "n", "queues": 2, "partitions": 3, "messages": {"total": 9, "pending": 7}},
    ]);
    assert_eq!((&body["namespaces"], &body["total"]), (&expected, &json!(1)), "an empty one is none");
    let body = read(&b, "tasks").await;
    let expected = json!([{"task": "t", "queues": 2, "partitions": 1, "messages": {"total": 2, "pending": 2}}]);
    assert_eq!(body["tasks"], expected);
    assert_eq!(read(&b, "tasks?offset=1").await["tasks"], json!([]));
}

#[tokio::test]
async fn the_overview_counts_everything() {
    let b = Broker::start().await;
    let zeros = json!({"avg": 0, "median": 0, "min": 0, "max": 0});
    let body = read(&b, "overview").await;
    assert_eq!((&body["queues"], &body["partitions"], &body["messages"]["total"]), (&json!(0), &json!(0), &json!(0)));
    assert_eq!(body["lag"], json!({"time": zeros, "offset": zeros}));
    assert_eq!(body["throughput"], json!({"ingestedPerSecond": 0.0, "processedPerSecond": 0.0}));

    b.store_aged("q", "old", 10, 1000.0).await;
    b.store_aged("q", "young", 2, 10.0).await;
    let done = b.store("q", "done", 5).await;
    set_cursor(&b, done.partition_id, "g", 4).await;
    b.execute("update queen.queues set namespace = 'n'", &[]).await;
    let rates = "insert into queen.queue_lag_metrics (bucket_time, queue_id, push_message_count, ack_success_count)
        select now() - make_interval(mins => m), id, 600, 300 from queen.queues, unnest('{1,2,10}'::int[]) m";
    b.execute(rates, &[]).await;
    let body = read(&b, "overview").await;
    let messages =
        json!({"total": 17, "pending": 12, "processing": 0, "completed": 5, "failed": null, "deadLetter": 0});
    assert_eq!(body["messages"], messages);
    assert_eq!(
        [&body["queues"], &body["partitions"], &body["namespaces"], &body["tasks"], &body["statsAge"]],
        [&json!(1), &json!(3), &json!(1), &json!(0), &json!(0)]
    );
    assert_eq!(
        body["lag"]["offset"],
        json!({"avg": 6, "median": 6, "min": 2, "max": 10}),
        "where something is pending"
    );
    let time = |key: &str| body["lag"]["time"][key].as_i64().expect("whole seconds");
    assert!((10..60).contains(&time("min")) && (1000..1060).contains(&time("max")), "{}", body["lag"]);
    assert!((505..560).contains(&time("avg")) && (505..560).contains(&time("median")), "{}", body["lag"]);
    assert_eq!(
        body["throughput"],
        json!({"ingestedPerSecond": 4.0, "processedPerSecond": 2.0}),
        "the last five minutes"
    );
}

#[tokio::test]
async fn limits_are_whole_numbers_in_their_range() {
    let b = Broker::start().await;
    b.store("q", "a", 1).await;
    for path in ["queues", "queues/q", "queues/q/depth", "partitions", "namespaces", "tasks"] {
        for (query, field) in [
            ("limit=-1", "limit: must be a whole number from 0 to 10000"),
            ("limit=10001", "limit: must be a whole number from 0 to 10000"),
            ("limit=many", "limit: must be a whole number from 0 to 10000"),
            ("limit=1.5", "limit: must be a whole number from 0 to 10000"),
            ("offset=-1", "offset: must be a whole number from 0 to 2147483647"),
            ("offset=99999999999999999999", "offset: must be a whole number from 0 to 2147483647"),
        ] {
            let answer = b.get(&format!("/api/v1/resources/{path}?{query}")).await;
            assert_eq!(answer, (400, json!({"error": field})), "{path} {query}");
        }
        let (status, _) = b.get(&format!("/api/v1/resources/{path}?limit=10000&offset=2147483647")).await;
        assert_eq!(status, 200, "{path}");
    }
}
