//! Cycles among others: who waits, who is woken, what is counted, what is sealed.

use ebbtide::http::Settings;
use ebbtide::seal::{Key, Sealer};
use ebbtide::segment::Segment;
use ebbtide::telemetry::{Flusher, Identity};
use serde_json::json;

use super::support::lane::{GROUP, Lane};
use super::support::{Broker, until, wait_until};
use super::{commit, delete, done, idle, query, register, result, results, state, upsert, with};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_that_hold_one_lease_one_commits() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    let id = query(&broker, "s").await;
    let body = with(&idle(id, &lane), json!({"push_items": [result("p", &json!(1))], "ack": done(3)}));
    let answers = futures_util::future::join_all((0..16).map(|_| broker.post("/streams/v1/cycle", body.clone()))).await;
    assert!(answers.iter().all(|(status, _)| *status == 200), "{answers:?}");
    assert_eq!(answers.iter().filter(|(_, answer)| answer["success"] == true).count(), 1);
    assert_eq!(results(&broker).await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_that_flush_one_window_one_commits() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let id = query(&broker, "s").await;
    commit(&broker, &with(&idle(id, &lane), json!({"state_ops": [upsert("w", &json!(1))]}))).await;
    let body = with(&idle(id, &lane), json!({"state_ops": [delete("w")], "push_items": [result("p", &json!(1))]}));
    let answers = futures_util::future::join_all((0..16).map(|_| broker.post("/streams/v1/cycle", body.clone()))).await;
    assert_eq!(answers.iter().filter(|(_, answer)| answer["success"] == true).count(), 1);
    assert_eq!(results(&broker).await.len(), 1);
}

/// Waits until `count` of the server's sessions wait for a lock.
async fn waiting(broker: &Broker, count: i64) {
    let query = "select count(*) = $1 from pg_stat_activity where datname = current_database()
        and application_name = 'ebbtide' and wait_event_type = 'Lock'";
    wait_until(&broker.sql, "the server waits", query, &[&count]).await;
}

#[tokio::test]
async fn a_cycle_and_a_reset_take_turns() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let id = query(&broker, "s").await;
    let blocker = broker.database.client().await;
    blocker.batch_execute("begin; select from queen.log_partitions for update").await.expect("locked");
    let cycle = with(&idle(id, &lane), json!({"state_ops": [upsert("old", &json!(1))]}));
    let (_, reset, ()) = tokio::join!(
        commit(&broker, &cycle),
        async {
            waiting(&broker, 1).await; // the cycle, which shares the query
            register(&broker, "s", "other", true).await
        },
        async {
            waiting(&broker, 2).await;
            blocker.batch_execute("commit").await.expect("let go");
        }
    );
    assert_eq!(reset.0, 200, "{}", reset.1);
    assert_eq!(state(&broker, id, &lane, json!({})).await, [], "the reset came after, and took it");
}

#[tokio::test]
async fn a_partition_that_vanishes_under_a_cycle_is_not_found() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let id = query(&broker, "s").await;
    let blocker = broker.database.client().await;
    blocker.batch_execute("begin; select queen.delete_queue_v1('q')").await.expect("deleted");
    let body =
        with(&idle(id, &lane), json!({"state_ops": [upsert("k", &json!(1))], "push_items": [result("p", &json!(1))]}));
    let ((status, answer), ()) = tokio::join!(broker.post("/streams/v1/cycle", body), async {
        waiting(&broker, 1).await;
        blocker.batch_execute("commit").await.expect("gone");
    });
    assert_eq!((status, &answer["error"]), (200, &json!("partition not found")));
    let left: i64 = broker.row("select count(*) from queen_streams.state", &[]).await.get(0);
    assert_eq!(left, 0, "no orphan");
    assert_eq!(results(&broker).await, []);
}

#[tokio::test]
async fn who_waits_for_results_or_for_the_rest_is_woken() {
    // Nobody looks again by itself.
    let never = std::time::Duration::from_secs(3600);
    let pop_wait = ebbtide::http::PopWait { initial: never, threshold: 1, multiplier: 1.0, longest: never };
    let broker = Broker::with(Settings { pop_wait, ..Settings::default() }).await;
    let lane = Lane::empty(&broker, "p").await;
    lane.append(1).await;
    lane.append(1).await;
    lane.lease(0).await;
    let id = query(&broker, "s").await;
    broker.execute("insert into queen.queues (name) values ('out')", &[]).await;
    let parked = |app: &ebbtide::http::App| app.wake.parked();
    let source = format!("queue/q/partition/p?consumerGroup={GROUP}&wait=true&timeout=60000");
    let body = with(&idle(id, &lane), json!({"push_items": [result("x", &json!(1))], "ack": done(1)}));
    let (sunk, rest, _) =
        tokio::join!(broker.pop_ids("queue/out?wait=true&timeout=60000"), broker.pop_ids(&source), async {
            until("both pops wait", || parked(&broker.app) == 2).await;
            commit(&broker, &body).await
        });
    assert_eq!(sunk.len(), 1);
    assert_eq!(rest, ["m1"]);
}

#[tokio::test]
async fn pushes_and_acknowledgements_of_cycles_are_counted() {
    let broker = Broker::start().await;
    let identity = Identity { hostname: "h".to_owned(), port: 1 };
    let mut flusher = Flusher::new(broker.app.telemetry.clone(), broker.app.db.clone(), identity);
    let lane = Lane::leased(&broker, 3).await;
    let id = query(&broker, "s").await;
    let items = json!([result("x", &json!(1)), result("y", &json!(2))]);
    let body = with(&idle(id, &lane), json!({"push_items": items, "ack": done(3)}));
    commit(&broker, &body).await;
    super::refused(&broker, &body).await;
    flusher.flush().await.expect("flushes");
    let query = "select concat_ws(' ', sum(push_request_count), sum(push_message_count), sum(ack_request_count),
            sum(ack_success_count), sum(ack_failed_count))
        from queen.queue_lag_metrics m join queen.queues q on q.id = m.queue_id where q.name = $1";
    assert_eq!(broker.row(query, &[&"out"]).await.get::<_, String>(0), "1 2 0 0 0");
    assert_eq!(broker.row(query, &[&"q"]).await.get::<_, String>(0), "0 0 2 3 3", "what was refused has failed");
}

#[tokio::test]
async fn results_are_sealed_as_their_queue_wants_it() {
    let key = Key::from_hex(&"a".repeat(64)).expect("64 digits");
    let broker = Broker::with(Settings { sealer: Sealer::new(Some(&key)), ..Settings::default() }).await;
    let lane = Lane::empty(&broker, "p").await;
    let id = query(&broker, "s").await;
    let encrypt = |on: bool| json!({"queue": "out", "options": {"encryptionEnabled": on}});
    let secret = |partition: &str| json!({"push_items": [result(partition, &json!({"secret": "swordfish"}))]});
    broker.post("/api/v1/configure", encrypt(true)).await;
    commit(&broker, &with(&idle(id, &lane), secret("sealed"))).await;
    // Switched behind the server's back: what it remembers is wrong, and the push says so.
    broker.execute("update queen.queues set encryption_enabled = false", &[]).await;
    commit(&broker, &with(&idle(id, &lane), secret("clear"))).await;
    broker.execute("update queen.queues set encryption_enabled = true where name = 'out'", &[]).await;
    commit(&broker, &with(&idle(id, &lane), secret("sealed"))).await;
    let query = "select p.name, s.blob from queen.log_segments s join queen.log_partitions p on p.id = s.partition_id";
    for row in broker.rows(query, &[]).await {
        let (partition, blob): (&str, &[u8]) = (row.get(0), row.get(1));
        for frame in Segment::unpack(blob).expect("a segment").frames() {
            let shows = String::from_utf8_lossy(frame.payload).contains("swordfish");
            assert_eq!((frame.is_encrypted, shows), (partition == "sealed", partition == "clear"), "{partition}");
        }
    }
    let (_, body) = broker.pop("queue/out/partition/sealed?batch=10").await;
    let messages = body["messages"].as_array().expect("messages");
    assert_eq!(messages.len(), 2);
    assert!(messages.iter().all(|message| message["data"] == json!({"secret": "swordfish"})), "{body}");
}
