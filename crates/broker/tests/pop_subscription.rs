//! Where a consumer group starts, and what a look for work costs.

mod support;

use std::collections::BTreeSet;
use std::fmt::Write as _;

use ebbtide::http::Settings;
use support::Broker;

async fn count(b: &Broker, query: &str) -> i64 {
    b.row(query, &[]).await.get(0)
}

#[tokio::test]
async fn a_new_group_gets_what_comes_after_it_subscribed() {
    let b = Broker::start().await;
    b.store("q", "old", 3).await;
    assert!(b.pop_ids("queue/q?consumerGroup=g").await.is_empty(), "new is the default");
    b.store("q", "old", 1).await;
    b.store("q", "later", 2).await;
    let mut found = b.pop_ids("queue/q?consumerGroup=g&partitions=5&subscriptionMode=all").await;
    found.sort();
    assert_eq!(found, ["later-0", "later-1", "old-3"], "the record wins over what a later pop asks for");
}

#[tokio::test]
async fn the_servers_default_can_be_all() {
    let b = Broker::with(Settings { subscribe_to_new: false, ..Settings::default() }).await;
    b.store("q", "p", 2).await;
    assert_eq!(b.pop_ids("queue/q?consumerGroup=g").await, ["p-0", "p-1"]);
}

#[tokio::test]
async fn every_spelling_means_what_it_says() {
    let b = Broker::start().await;
    b.store_aged("q", "p", 1, 7200.0).await;
    b.store_aged("q", "p", 1, 3600.0).await;
    let query =
        "select to_char(created_at at time zone 'UTC' + make_interval(secs => $1), 'YYYY-MM-DD\"T\"HH24:MI:SS.US')
        from queen.log_segments where base_offset = 1";
    let exact: String = b.row(query, &[&0.0]).await.get(0);
    let after: String = b.row(query, &[&0.000_001]).await.get(0);
    let (all, second, none) = (vec!["p-0", "p-1"], vec!["p-1"], vec![]);
    let cases = [
        ("subscriptionMode=new".to_owned(), &none),
        ("subscriptionMode=new-only".to_owned(), &none),
        ("subscriptionMode=NEW_ONLY".to_owned(), &none),
        ("subscriptionMode=newOnly".to_owned(), &none),
        ("subscriptionMode=all".to_owned(), &all),
        ("subscriptionMode=from_beginning".to_owned(), &all),
        ("subscriptionFrom=now&subscriptionMode=all".to_owned(), &none),
        (format!("subscriptionFrom={exact}Z&subscriptionMode=new"), &second),
        (format!("subscriptionFrom={exact}%2B00:00"), &second),
        (format!("subscriptionFrom={exact}"), &second),
        (format!("subscriptionFrom={after}Z"), &none),
        ("subscriptionFrom=2000-01-01".to_owned(), &all),
        ("subscriptionFrom=9999-01-01T00:00:00Z".to_owned(), &none),
        ("subscriptionFrom=yesterday&subscriptionMode=all".to_owned(), &none),
        ("subscriptionFrom=-infinity&subscriptionMode=all".to_owned(), &none),
        ("subscriptionFrom=2026-13-45T00:00:00Z&subscriptionMode=all".to_owned(), &none),
        ("subscriptionFrom=2026-01-01%20Mars/Base&subscriptionMode=all".to_owned(), &none),
        ("subscriptionFrom=2026-01-01%20rubbish&subscriptionMode=all".to_owned(), &none),
    ];
    for route in ["queue/q", "queue/q/partition/p"] {
        for (n, (query, wanted)) in cases.iter().enumerate() {
            let group = format!("{}{n}", route.len());
            let found = b.pop_ids(&format!("{route}?consumerGroup={group}&{query}")).await;
            assert_eq!(found, **wanted, "{route} {query}");
        }
    }
}

#[tokio::test]
async fn queue_mode_is_always_from_the_oldest() {
    let b = Broker::start().await;
    b.store("q", "p", 1).await;
    assert_eq!(b.pop_ids("queue/q?subscriptionMode=new&subscriptionFrom=now").await, ["p-0"]);
    assert_eq!(count(&b, "select count(*) from queen.consumer_groups_metadata").await, 0);
}

#[tokio::test]
async fn first_contact_places_a_cursor_in_every_partition_and_one_record() {
    let b = Broker::start().await;
    for n in 0..40 {
        b.store("q", &format!("p{n}"), 1).await;
    }
    let pops = (0..8).map(|n| {
        let route = if n % 2 == 0 { "queue/q" } else { "queue/q/partition/p7" };
        let path = format!("{route}?consumerGroup=g&subscriptionMode=new");
        let b = &b;
        async move { b.pop_ids(&path).await }
    });
    for found in futures_util::future::join_all(pops).await {
        assert!(found.is_empty(), "all at the tail, whoever came first");
    }
    assert_eq!(count(&b, "select count(*) from queen.consumer_groups_metadata").await, 1);
    assert_eq!(count(&b, "select count(*) from queen.log_consumers where committed = 0").await, 40);
}

#[tokio::test]
async fn a_group_may_subscribe_before_the_queue_exists() {
    let b = Broker::start().await;
    assert!(b.pop_ids("queue/shop.bills.x?consumerGroup=g").await.is_empty());
    let row = b.row("select namespace, task, lease_time from queen.queues", &[]).await;
    assert_eq!((row.get::<_, &str>(0), row.get::<_, &str>(1), row.get::<_, i32>(2)), ("shop", "bills", 60));
    b.store("shop.bills.x", "p", 1).await;
    assert_eq!(b.pop_ids("queue/shop.bills.x?consumerGroup=g").await, ["p-0"]);
    assert!(b.pop_ids("queue/other/partition/p?consumerGroup=g").await.is_empty());
    assert_eq!(count(&b, "select count(*) from queen.queues").await, 1, "the partition form makes nothing");
}

#[tokio::test]
async fn discovery_subscribes_to_each_queue_it_matches() {
    let b = Broker::start().await;
    b.store("n.a", "a", 1).await;
    b.execute("update queen.queues set namespace = 'n'", &[]).await;
    assert_eq!(b.get("/api/v1/pop?namespace=n&consumerGroup=g").await.0, 204);
    b.store("n.a", "a", 1).await;
    assert_eq!(b.pop_ids("queue/n.a?consumerGroup=g&subscriptionMode=all").await, ["a-1"]);
    b.store("n.b", "b", 1).await;
    b.execute("update queen.queues set namespace = 'n'", &[]).await;
    assert_eq!(b.get("/api/v1/pop?namespace=n&consumerGroup=g").await.0, 204, "new to this queue");
}

#[tokio::test]
async fn a_partition_made_again_starts_by_the_record() {
    let b = Broker::start().await;
    b.store("q", "p", 3).await;
    assert!(b.pop_ids("queue/q?consumerGroup=g").await.is_empty());
    b.execute("delete from queen.log_partitions", &[]).await;
    b.store("q", "p", 2).await;
    assert_eq!(b.pop_ids("queue/q?consumerGroup=g").await, ["p-0", "p-1"]);
}

#[tokio::test]
async fn a_partition_that_goes_during_first_contact_is_empty_and_no_error() {
    let mut b = Broker::start().await;
    let stored = b.store("q", "p", 1).await;
    let name = b.database.target.config.get_dbname().expect("named").to_owned();
    let tx = b.sql.transaction().await.expect("begins");
    tx.execute("delete from queen.log_partitions where id = $1", &[&stored.partition_id]).await.expect("deletes");
    let url = format!("{}/api/v1/pop/queue/q/partition/p", b.url);
    let pop = tokio::spawn(async move { reqwest::get(url).await.expect("answers").status().as_u16() });
    let watcher = b.database.client().await;
    let blocked = "select count(*) = 1 from pg_stat_activity
        where datname = $1 and application_name = 'ebbtide' and wait_event_type = 'Lock'";
    support::wait_until(&watcher, "the pop waits for the deletion", blocked, &[&name]).await;
    tx.commit().await.expect("commits");
    assert_eq!(pop.await.expect("ends"), 204);
}

/// Lets the next look decide about the watermark.
async fn let_it_rise(b: &Broker) {
    b.execute("update queen.consumer_watermarks set updated_at = updated_at - interval '31 seconds'", &[]).await;
}

/// Whether some partition was written so long before the watermark that a look passes it by.
async fn is_raised(b: &Broker) -> bool {
    let query = "select exists (
        select from queen.consumer_watermarks w join queen.log_partitions p on p.queue_id = w.queue_id
        where p.last_write_at < w.last_empty_scan_at - interval '2 minutes')";
    b.row(query, &[]).await.get(0)
}

#[tokio::test]
async fn the_watermark_rises_only_over_nothing() {
    let b = Broker::start().await;
    b.store_aged("q", "p", 1, 3600.0).await;
    b.pop("queue/q").await;
    b.pop("queue/q").await;
    b.pop("queue/q").await;
    assert!(!is_raised(&b).await, "the message is leased and may come back");
    let_it_rise(&b).await;
    b.complete_leases().await;
    b.execute("update queen.queues set delayed_processing = 3600", &[]).await;
    b.store_aged("q", "p", 1, 1800.0).await;
    b.pop("queue/q").await;
    assert!(!is_raised(&b).await, "a message rests");
    let_it_rise(&b).await;
    b.execute("update queen.log_consumers set committed = 1", &[]).await;
    b.pop("queue/q").await;
    assert!(is_raised(&b).await, "all is consumed");
    b.execute("update queen.consumer_watermarks set last_empty_scan_at = 'epoch'", &[]).await;
    b.pop("queue/q").await;
    assert!(!is_raised(&b).await, "at most every 30 seconds");
}

#[tokio::test]
async fn the_watermark_rises_up_to_what_is_unread() {
    let b = Broker::start().await;
    b.store_aged("q", "read", 1, 3600.0).await;
    b.pop("queue/q?autoAck=true").await;
    b.store_aged("q", "held", 1, 1800.0).await;
    assert_eq!(b.pop_ids("queue/q").await, ["held-0"]);
    assert!(is_raised(&b).await, "a queue with something to read has a watermark too");
    b.expire_leases().await;
    assert_eq!(b.pop_ids("queue/q").await, ["held-0"], "what was leased is in sight");
    b.execute("update queen.consumer_watermarks set last_empty_scan_at = now() + interval '1 day'", &[]).await;
    b.expire_leases().await;
    assert_eq!(b.pop_ids("queue/q").await, ["held-0"], "a watermark from a clock that ran ahead hides nothing");
}

#[tokio::test]
async fn the_watermark_has_two_minutes_of_slack() {
    let b = Broker::start().await;
    b.store_aged("q", "before", 1, 125.0).await;
    b.store_aged("q", "within", 1, 115.0).await;
    b.execute(
        "insert into queen.consumer_watermarks (queue_id, consumer_group, last_empty_scan_at)
         select id, '__QUEUE_MODE__', now() from queen.queues",
        &[],
    )
    .await;
    assert_eq!(b.pop_ids("queue/q?partitions=5").await, ["within-0"]);
    assert_eq!(b.pop_ids("queue/q/partition/before").await, ["before-0"], "one partition needs no watermark");
}

#[tokio::test]
async fn a_raise_from_before_a_seek_is_void() {
    let b = Broker::start().await;
    b.store("q", "p", 1).await;
    b.pop("queue/q?autoAck=true").await;
    b.pop("queue/q").await;
    let raise =
        "select queen.log_watermark_raise_v1(queue_id, consumer_group, $1, clock_timestamp() + interval '1 hour')
        from (select id as queue_id, '__QUEUE_MODE__' as consumer_group from queen.queues) q";
    let seen = b.row("select updated_at from queen.consumer_watermarks", &[]).await.get::<_, jiff::Timestamp>(0);
    b.execute("delete from queen.consumer_watermarks", &[]).await;
    b.execute(raise, &[&seen]).await;
    assert!(!is_raised(&b).await, "a seek deleted the row");
    b.pop("queue/q").await;
    b.execute(raise, &[&seen]).await;
    assert!(!is_raised(&b).await, "and another look made it again");
    let seen = b.row("select updated_at from queen.consumer_watermarks", &[]).await.get::<_, jiff::Timestamp>(0);
    b.execute(raise, &[&seen]).await;
    assert!(is_raised(&b).await);
}

/// Rows that one statement read, by table. In a session of its own: one that has done other work counts that too.
async fn cost(b: &Broker, statement: &str) -> (i64, String) {
    let mut client = b.database.client().await;
    let tx = client.transaction().await.expect("begins");
    let found: i64 = tx.query_one(statement, &[]).await.expect("runs").get(0);
    let query = "select relname::text, seq_tup_read, coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables
        where schemaname = 'queen' and 0 < seq_scan + coalesce(idx_scan, 0) order by 1";
    let mut reads = String::new();
    for row in tx.query(query, &[]).await.expect("counts") {
        let (name, rows): (String, i64) = (row.get(0), row.get::<_, i64>(1) + row.get::<_, i64>(2));
        write!(reads, "{name}={rows} ").expect("a string");
        let most = match name.as_str() {
            "log_segments" => 10,
            "log_partitions" | "log_consumers" => 60,
            _ => 10,
        };
        assert!(rows <= most, "{name}: {rows} rows read, at most {most} expected");
    }
    tx.rollback().await.expect("rolls back");
    (found, reads)
}

#[tokio::test]
async fn a_look_for_three_of_ten_thousand_reads_little() {
    let b = Broker::start().await;
    b.store_aged("q", "seed", 1, 3600.0).await;
    b.execute(
        "insert into queen.log_partitions (queue_id, name, last_offset, last_write_at)
         select q.id, 'p' || n, 9, now() - interval '1 hour' from queen.queues q, generate_series(1, 10000) n",
        &[],
    )
    .await;
    b.execute(
        "insert into queen.log_segments select p.id, 0, 9, now(), s.blob from queen.log_partitions p, queen.log_segments s
         where p.name <> 'seed'",
        &[],
    )
    .await;
    b.execute(
        "insert into queen.log_consumers (partition_id, consumer_group, committed)
         select id, g, last_offset from queen.log_partitions, unnest(array['__QUEUE_MODE__', 'other']) g",
        &[],
    )
    .await;
    b.execute(
        "insert into queen.consumer_watermarks (queue_id, consumer_group, last_empty_scan_at)
         select id, '__QUEUE_MODE__', now() from queen.queues",
        &[],
    )
    .await;
    for n in [10, 500, 9000] {
        b.store("q", &format!("p{n}"), 1).await;
    }
    b.sql
        .batch_execute("analyze queen.log_partitions, queen.log_consumers, queen.log_segments")
        .await
        .expect("analyzes");
    let pop = "select count(distinct r_pid) from queen.log_pop_queue_v1('q', '__QUEUE_MODE__', 10, 100, 60, 'w')";
    let (found, reads) = cost(&b, pop).await;
    assert_eq!(found, 3, "{reads}");
    b.execute("update queen.consumer_watermarks set last_empty_scan_at = 'epoch'", &[]).await;
    b.execute(
        "update queen.log_consumers set committed = committed - 1 where partition_id in (
        select id from queen.log_partitions where name <> 'seed')",
        &[],
    )
    .await;
    let names: BTreeSet<String> = b
        .rows("select distinct r_partition from queen.log_pop_queue_v1('q', '__QUEUE_MODE__', 512, 5000, 60, 'w')", &[])
        .await
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(names.len(), 512, "a busy queue gives what one call may look at");
}
