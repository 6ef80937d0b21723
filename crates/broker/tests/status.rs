//! Status, analytics and the refresh of statistics, against rows with known times and counts.

mod support;

use ebbtide::telemetry::{Flusher, Identity, measured_all};
use serde_json::{Value, json};
use std::time::Duration;
use support::Broker;

/// Every route here, as a dashboard asks for it.
const ROUTES: [&str; 14] = [
    "/metrics",
    "/status",
    "/api/v1/status?queue=q",
    "/api/v1/status",
    "/api/v1/status/queues",
    "/api/v1/status/queues/q",
    "/api/v1/status/analytics",
    "/api/v1/analytics/system-metrics",
    "/api/v1/analytics/worker-metrics",
    "/api/v1/analytics/queue-ops",
    "/api/v1/analytics/queue-lag",
    "/api/v1/analytics/queue-parked-replicas",
    "/api/v1/analytics/retention",
    "/api/v1/analytics/postgres-stats",
];

/// Routes with a time range and a queue.
const FILTERED: [&str; 6] = [
    "/api/v1/status",
    "/api/v1/status/analytics",
    "/api/v1/analytics/worker-metrics",
    "/api/v1/analytics/queue-ops",
    "/api/v1/analytics/queue-lag",
    "/api/v1/analytics/retention",
];

async fn ok(broker: &Broker, path: &str) -> Value {
    let (status, body) = broker.get(path).await;
    assert_eq!(status, 200, "{path}: {body}");
    body
}

async fn flush(broker: &Broker) {
    let identity = Identity { hostname: "h".to_owned(), port: 7 };
    let wake = broker.app.wake.clone();
    let mut flusher = Flusher::new(broker.app.telemetry.clone(), broker.app.db.clone(), identity)
        .with_parked(move |most| wake.parked_by_queue(most));
    flusher.flush().await.expect("flushes");
}

/// Messages of a minute of a queue, `minutes` ago as the database counts.
async fn minute(broker: &Broker, queue: &str, minutes: i32, pushed: i64) {
    let insert = "insert into queen.queue_lag_metrics
            (bucket_time, queue_id, push_message_count, pop_count, lag_count, avg_lag_ms, max_lag_ms)
        select date_trunc('minute', now()) - make_interval(mins => $2), id, n, n, n, 10 * n, 20 * n
        from queen.queues cross join (select $3::bigint as n) n where name = $1";
    assert_eq!(broker.execute(insert, &[&queue, &minutes, &pushed]).await, 1);
}

/// A time as a query parameter takes it, from an SQL expression.
async fn time(broker: &Broker, expression: &str) -> String {
    let query = format!("select queen.iso_milliseconds({expression})");
    broker.row(&query, &[]).await.get(0)
}

async fn make_queue(broker: &Broker, queue: &str, namespace: &str, task: &str) {
    let body = json!({"queue": queue, "namespace": namespace, "task": task});
    let (status, body) = broker.post("/api/v1/configure", body).await;
    assert!(status < 300, "{body}");
}

#[tokio::test]
async fn no_route_reads_segments() {
    let broker = Broker::start().await;
    broker.store_aged("q", "p", 3, 20.0).await;
    broker.store_aged("q", "r", 3, 20.0).await;
    flush(&broker).await;
    for path in ROUTES {
        assert!(!reads_segments(&broker, path).await, "{path} reads segments");
    }
    assert!(reads_segments(&broker, "/api/v1/resources/queues/q").await, "a route that does is found out");
}

/// Whether a request for `path` fails once segments cannot be read.
async fn reads_segments(broker: &Broker, path: &str) -> bool {
    broker.sql.batch_execute("alter table queen.log_segments rename to hidden").await.expect("hidden");
    let (status, _) = broker.get(path).await;
    broker.sql.batch_execute("alter table queen.hidden rename to log_segments").await.expect("shown");
    status != 200
}

#[tokio::test]
async fn status_counts_what_is_there_and_what_was_done() {
    let broker = Broker::start().await;
    broker.store_aged("q", "p", 4, 20.0).await;
    broker.store_aged("other", "p", 2, 20.0).await;
    flush(&broker).await;
    assert_eq!(broker.pop_ids("queue/q?consumerGroup=g&subscriptionMode=all&batch=3").await.len(), 3);
    flush(&broker).await;

    let all = ok(&broker, "/api/v1/status").await;
    let counts = json!([all["messages"]["total"], all["messages"]["pending"], all["messages"]["processing"]]);
    assert_eq!(counts, json!([6, 6, 3]), "{all}");
    assert_eq!(all["leases"], json!({"active": 1, "partitionsWithLeases": 1, "totalBatchSize": 3, "totalAcked": 0}));
    assert_eq!(all["bucketMinutes"], 1);
    let popped: i64 = points(&all, "throughput", "popMessages").iter().sum();
    assert_eq!(popped, 3);
    assert!(all["throughput"][0]["queenRssMb"].as_f64().is_some_and(|mib| 1.0 < mib), "{all}");
    assert_eq!((&all["workers"][0]["hostname"], &all["statsAge"]), (&json!("h"), &json!(0)));

    let one = ok(&broker, "/api/v1/status?queue=other").await;
    assert_eq!((&one["messages"]["total"], &one["leases"]["active"]), (&json!(2), &json!(0)));
    assert_eq!(one["queues"].as_array().map(Vec::len), Some(1));
    assert_eq!(points(&one, "throughput", "popMessages").iter().sum::<i64>(), 0);

    let detail = ok(&broker, "/api/v1/status/queues/q").await;
    assert_eq!(detail["partitions"][0]["messages"]["processing"], 3);
    assert_eq!(
        (&detail["totals"]["messages"]["total"], &detail["queue"]["config"]["retryLimit"]),
        (&json!(4), &json!(3))
    );
    assert_eq!(broker.get("/api/v1/status/queues/none").await.0, 404);
    let list = ok(&broker, "/api/v1/status/queues?limit=1&offset=1").await;
    assert_eq!((&list["total"], list["queues"].as_array().map(Vec::len)), (&json!(2), Some(1)));
}

fn points(body: &Value, series: &str, key: &str) -> Vec<i64> {
    let points = body[series].as_array().unwrap_or_else(|| panic!("{series} of {body}"));
    points.iter().map(|point| point[key].as_i64().unwrap_or_else(|| panic!("{key} of {point}"))).collect()
}

#[tokio::test]
async fn time_lines_have_wider_buckets_for_longer_ranges() {
    let broker = Broker::start().await;
    for (ago, minutes) in [("60 min", 1), ("61 min", 5), ("6 h", 5), ("24 h", 15), ("7 days", 60), ("8 days", 360)] {
        let to = time(&broker, "now()").await;
        let from = time(&broker, &format!("'{to}'::timestamptz - '{ago}'::interval")).await;
        for path in ["/api/v1/analytics/queue-ops", "/api/v1/analytics/worker-metrics", "/api/v1/status"] {
            let body = ok(&broker, &format!("{path}?from={from}&to={to}")).await;
            assert_eq!(body["bucketMinutes"], minutes, "{path} over {ago}");
        }
    }
}

#[tokio::test]
async fn six_hours_of_minutes_fall_into_whole_buckets() {
    let broker = Broker::start().await;
    make_queue(&broker, "q", "n", "t").await;
    let insert = "insert into queen.queue_lag_metrics (bucket_time, queue_id, push_message_count)
        select timestamptz '2026-01-08 00:00Z' + make_interval(mins => m), id, 1
        from queen.queues cross join generate_series(0, 8 * 1440 - 1, 30) m where name = 'q'";
    assert_eq!(broker.execute(insert, &[]).await, 384);
    let body = ok(&broker, "/api/v1/analytics/queue-ops?from=2026-01-08T00:00:00Z&to=2026-01-15T23:59:00Z").await;
    assert_eq!(body["bucketMinutes"], 360);
    assert_eq!(points(&body, "series", "pushMessages"), [12; 32]);
    assert_eq!(body["series"][1]["bucket"], "2026-01-08T06:00:00.000Z");
}

#[tokio::test]
async fn filters_filter() {
    let broker = Broker::start().await;
    make_queue(&broker, "a", "n", "t").await;
    make_queue(&broker, "b", "n", "u").await;
    make_queue(&broker, "c", "m", "u").await;
    for (queue, minutes, pushed) in [("a", 5, 1), ("b", 5, 10), ("c", 5, 100), ("a", 90, 1000)] {
        minute(&broker, queue, minutes, pushed).await;
    }
    for (filter, expected) in [
        ("", 111),
        ("queue=a", 1),
        ("namespace=n", 11),
        ("task=u", 110),
        ("namespace=n&task=u", 10),
        ("queue=a&task=u", 0),
        ("limit=1", 100),
        ("limit=1&offset=1", 10),
    ] {
        let body = ok(&broker, &format!("/api/v1/analytics/queue-ops?{filter}")).await;
        assert_eq!(points(&body, "series", "pushMessages").iter().sum::<i64>(), expected, "{filter}");
    }
    let from = time(&broker, "now() - interval '2 hours'").await;
    let to = time(&broker, "now() - interval '1 hour'").await;
    let earlier = ok(&broker, &format!("/api/v1/analytics/queue-ops?from={from}&to={to}")).await;
    assert_eq!(points(&earlier, "series", "pushMessages"), [1000]);
    let lag = ok(&broker, "/api/v1/analytics/queue-lag?task=u").await;
    assert_eq!(lag.as_array().map(Vec::len), Some(2));
    assert_eq!(
        (&lag[0]["queueName"], &lag[0]["avgLagMs"], &lag[0]["maxLagMs"]),
        (&json!("b"), &json!(100), &json!(200))
    );
    let pushed = ok(&broker, "/api/v1/status/analytics?interval=day&queue=a").await;
    assert_eq!(points(&pushed, "dataPoints", "messages").iter().sum::<i64>(), 1001);
    let one = ok(&broker, "/api/v1/status/analytics?interval=minute&limit=1").await;
    assert_eq!(points(&one, "dataPoints", "messages"), [111], "the newest point");
    let status = ok(&broker, "/api/v1/status?namespace=n").await;
    assert_eq!(points(&status, "throughput", "ingested"), [11]);
}

#[tokio::test]
async fn wrong_filters_are_refused_by_name() {
    let broker = Broker::start().await;
    for path in FILTERED {
        for (query, field) in [
            ("from=yesterday", "from"),
            ("to=", ""),
            ("to=2026-13-01T00:00:00Z", "to"),
            ("from=2026-02-01T00:00:00Z&to=2026-01-01T00:00:00Z", "from"),
            ("queue=a%00b", "queue"),
        ] {
            let (status, body) = broker.get(&format!("{path}?{query}")).await;
            if field.is_empty() {
                assert_eq!(status, 200, "{path}: an empty parameter counts as not given");
            } else {
                assert_eq!(status, 400, "{path}?{query}: {body}");
                assert!(body["error"].as_str().is_some_and(|text| text.starts_with(&format!("{field}:"))), "{body}");
            }
        }
    }
    for query in
        ["status/analytics?interval=week", "analytics/system-metrics?workerId=-1", "analytics/queue-ops?limit=-1"]
    {
        assert_eq!(broker.get(&format!("/api/v1/{query}")).await.0, 400, "{query}");
    }
}

#[tokio::test]
async fn what_servers_flushed_comes_back_by_server() {
    let broker = Broker::start().await;
    flush(&broker).await;
    let insert = "insert into queen.system_metrics (\"timestamp\", hostname, port, worker_id, sample_count, metrics)
        select timestamptz '2026-01-01 12:00:10Z' + make_interval(secs => s), 'x', 9, '0', 60,
               jsonb_build_object('cpu', jsonb_build_object('user_us',
                   jsonb_build_object('avg', 10 * s, 'min', s, 'max', 20 * s, 'last', 15 * s)))
        from generate_series(10, 30, 10) s";
    assert_eq!(broker.execute(insert, &[]).await, 3);
    let range = "from=2026-01-01T12:00:00Z&to=2026-01-01T12:59:00Z";
    let body = ok(&broker, &format!("/api/v1/analytics/system-metrics?{range}")).await;
    assert_eq!((&body["replicaCount"], &body["pointCount"]), (&json!(1), &json!(1)), "{body}");
    let point = &body["replicas"][0]["timeSeries"][0];
    assert_eq!(point["sampleCount"], 180);
    assert_eq!(point["metrics"]["cpu"]["user_us"], json!({"avg": 200.0, "min": 10.0, "max": 600.0, "last": 450.0}));
    assert_eq!(point["metrics"]["memory"]["rss_bytes"], Value::Null);
    let other = ok(&broker, &format!("/api/v1/analytics/system-metrics?hostname=h&{range}")).await;
    assert_eq!(other["replicaCount"], 0);
    let live = ok(&broker, "/api/v1/analytics/system-metrics?hostname=h&workerId=0").await;
    assert!(
        live["replicas"][0]["timeSeries"][0]["metrics"]["memory"]["rss_bytes"]["last"].as_f64() > Some(1e6),
        "{live}"
    );
    let workers = ok(&broker, "/api/v1/analytics/worker-metrics?hostname=h").await;
    assert_eq!((&workers["pointCount"], &workers["workers"][0]["hostname"]), (&json!(1), &json!("h")));
}

#[tokio::test]
async fn parked_pops_are_noted_and_purged() {
    let broker = Broker::start().await;
    make_queue(&broker, "q", "", "").await;
    let waiting = broker.request(reqwest::Method::GET, "/api/v1/pop/queue/q?wait=true&timeout=60000").send();
    let waiting = tokio::spawn(waiting);
    support::until("the pop is parked", || broker.app.wake.parked() == 1).await;
    flush(&broker).await;
    waiting.abort();
    let body = ok(&broker, "/api/v1/analytics/queue-parked-replicas?queue=q").await;
    let point = &body["series"][0];
    let seen = json!([point["queueName"], point["hostname"], point["workerId"], point["parkedCount"]]);
    assert_eq!(seen, json!(["q", "h", 7, 1]), "{body}");
    let ops = ok(&broker, "/api/v1/analytics/queue-ops?queue=q").await;
    assert_eq!(points(&ops, "series", "parkedCount").iter().sum::<i64>(), 1, "{ops}");
    broker.execute("update queen.queue_parked_replica set bucket_time = now() - interval '8 days'", &[]).await;
    let purged: Value = broker.row("select queen.cleanup_worker_metrics_v1(7, 10)", &[]).await.get(0);
    assert_eq!(purged["deletedParkedReplica"], 1);
}

#[tokio::test]
async fn a_refresh_measures_what_each_queue_retains() {
    let broker = Broker::start().await;
    broker.store_aged("q", "p", 3, 20.0).await;
    broker.store_aged("q", "r", 2, 20.0).await;
    make_queue(&broker, "empty", "", "").await;
    let before = ok(&broker, "/api/v1/resources/queues/q").await;
    assert_eq!(before["retainedBytes"], Value::Null, "nobody has measured it");
    let (status, refreshed) = broker.post("/api/v1/stats/refresh", Value::Null).await;
    assert_eq!(status, 200, "{refreshed}");
    let stored: i64 = broker.row("select sum(octet_length(blob))::bigint from queen.log_segments", &[]).await.get(0);
    let seen = json!([
        refreshed["complete"],
        refreshed["queuesUpdated"],
        refreshed["segPartitions"],
        refreshed["messages"],
        refreshed["retainedBytes"]
    ]);
    assert_eq!(seen, json!([true, 2, 2, 5, stored]));
    assert_eq!(ok(&broker, "/api/v1/resources/queues/q").await["retainedBytes"], stored);

    let (cleared, _) = broker.delete("/api/v1/queues/q/clear").await;
    assert_eq!(cleared, 200);
    assert_eq!(measured_all(&broker.app.db, Duration::from_secs(60)).await.expect("measures"), (true, 2));
    assert_eq!(ok(&broker, "/api/v1/resources/queues/q").await["retainedBytes"], 0, "a drained queue retains nothing");
}

#[tokio::test]
async fn a_queue_is_measured_in_bounded_steps() {
    let broker = Broker::start().await;
    let partitions = "with q as (insert into queen.queues (name) values ('q') returning id)
        insert into queen.log_partitions (queue_id, name, log_start, last_offset)
        select id, 'p' || n, 0, 1 from q cross join generate_series(1, 5) n";
    broker.execute(partitions, &[]).await;
    let step = "select queen.stats_count_v1(now(), 0, 2, true)";
    let mut seen = Vec::new();
    for _ in 0..3 {
        let report: Value = broker.row(step, &[]).await.get(0);
        seen.push((report["partitions"].clone(), report["queues"].clone(), report["done"].clone()));
    }
    let expected = [(2, 0), (2, 0), (1, 1)].map(|(rows, queues)| (json!(rows), json!(queues), json!(false)));
    assert_eq!(seen, expected);
    let row = broker.row("select partition_count, total_messages, progress is null from queen.stats", &[]).await;
    assert_eq!((row.get(0), row.get(1), row.get(2)), (5_i64, 10_i64, true));
}

#[tokio::test]
async fn only_one_server_measures_at_a_time() {
    let broker = Broker::start().await;
    make_queue(&broker, "q", "", "").await;
    let other = broker.database.client().await;
    other.batch_execute("begin; select pg_advisory_xact_lock(737003)").await.expect("locked");
    let report: Value = broker.row("select queen.stats_count_v1(null, 0, 10, false)", &[]).await.get(0);
    assert_eq!((&report["queues"], &report["done"]), (&json!(0), &json!(true)));
    other.batch_execute("rollback").await.expect("let go");
    let report: Value = broker.row("select queen.stats_count_v1(null, 0, 10, false)", &[]).await.get(0);
    assert_eq!(report["queues"], 1);
}

#[tokio::test]
async fn the_process_and_postgres_describe_themselves() {
    let broker = Broker::start().await;
    assert_eq!(ok(&broker, "/status").await["status"], "ok");
    broker.post("/api/v1/push", json!({"items": [{"queue": "q", "payload": 1}, {"queue": "q", "payload": 2}]})).await;
    let process = ok(&broker, "/metrics").await;
    assert_eq!(process["messages"]["total"], 2);
    assert!(Some(3) <= process["requests"]["total"].as_u64(), "{process}");
    assert!(process["memory"]["rss"].as_u64() > Some(1 << 20) && process["cpu"]["user"].is_u64(), "{process}");
    assert!(process["database"]["poolSize"].as_u64() >= Some(1), "{process}");
    let postgres = ok(&broker, "/api/v1/analytics/postgres-stats").await;
    assert_eq!(postgres["database"]["name"], json!(broker.database.name));
    let tables = postgres["tables"].as_array().expect("tables");
    assert!(tables.iter().any(|table| table["name"] == "log_segments"), "{postgres}");
}
