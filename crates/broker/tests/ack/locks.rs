//! Acknowledgements that meet, and who is told when one gives something back.

use serde_json::json;

use super::support::lane::{GROUP, Lane, errors, send};
use super::support::{Broker, PATIENCE, wait_until};

#[tokio::test]
async fn two_requests_in_opposite_order_take_turns() {
    let broker = Broker::start().await;
    let mut lanes = vec![Lane::empty(&broker, "a").await, Lane::empty(&broker, "b").await];
    lanes.sort_by_key(|lane| lane.id);
    for lane in &lanes {
        lane.append(2).await;
        lane.lease(1).await;
    }
    let (low, high) = (&lanes[0], &lanes[1]);
    let blocker = broker.database.client().await;
    blocker.batch_execute("begin").await.expect("begins");
    let lock = "select from queen.log_consumers where partition_id = $1 for update";
    blocker.execute(lock, &[&low.id]).await.expect("locked");
    let up = vec![low.element("m0", "completed"), high.element("m0", "completed")];
    let down = vec![high.element("m1", "completed"), low.element("m0", "completed")];
    let (up, down, ()) = tokio::join!(send(&broker, up), send(&broker, down), async {
        let query = "select count(*) = 2 from pg_stat_activity where datname = current_database()
            and application_name = 'ebbtide' and wait_event_type = 'Lock'";
        wait_until(&broker.sql, "both wait", query, &[]).await;
        let probe = format!("{lock} nowait");
        broker.sql.execute(&probe, &[&high.id]).await.expect("nobody holds the higher cursor");
        blocker.batch_execute("commit").await.expect("let go");
    });
    // The turn decides which of the two finds its lease on the higher partition still there.
    assert_eq!((errors(&up)[0], errors(&down)[1]), (None, None));
    low.leased_at(0, 1).await;
    high.free_at(1, 0).await;
}

#[tokio::test]
async fn a_message_that_is_given_back_wakes_a_waiting_pop() {
    let mut settings = ebbtide::http::Settings::default();
    settings.pop_wait.initial = PATIENCE;
    settings.pop_wait.longest = PATIENCE;
    let broker = Broker::with(settings).await;
    let lane = Lane::leased(&broker, 3).await;
    // Given back, dead-lettered with a message left, and done with messages left.
    for (id, status, left) in [("m0", "failed", "m0"), ("m0", "dlq", "m1"), ("m1", "completed", "m2")] {
        lane.lease(if status == "completed" { 1 } else { 2 }).await;
        let path = format!("/api/v1/pop/queue/q?wait=true&timeout=50000&consumerGroup={GROUP}&subscriptionMode=all");
        let (popped, replies) = tokio::join!(broker.get(&path), async {
            while broker.app.wake.parked() == 0 {
                tokio::task::yield_now().await;
            }
            lane.ack(&[(id, status)]).await
        });
        assert_eq!(errors(&replies), [None]);
        assert_eq!((popped.0, &popped.1["messages"][0]["transactionId"]), (200, &json!(left)), "{status}");
    }
}
