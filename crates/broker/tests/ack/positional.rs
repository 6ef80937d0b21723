//! Acknowledgement by offset, for callers that know offsets.

use serde_json::{Value, json};
use uuid::Uuid;

use super::support::Broker;
use super::support::lane::{GROUP, LEASE, Lane};

async fn at(lane: &Lane<'_>, worker: &str, offset: i64, success: bool) -> Value {
    let query = "select queen.log_ack_at_v1($1, $2, $3, $4, $5)";
    lane.broker.row(query, &[&lane.id, &GROUP, &worker, &offset, &success]).await.get(0)
}

#[tokio::test]
async fn a_positive_one_moves_the_cursor_and_ends_the_lease_at_the_end() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    assert_eq!(at(&lane, LEASE, 1, true).await["leaseReleased"], false);
    lane.leased_at(1, 2).await;
    assert_eq!(at(&lane, LEASE, 0, true).await["committed"], 1, "never back");
    assert_eq!(at(&lane, LEASE, 2, true).await["leaseReleased"], true);
    lane.free_at(2, 0).await;
}

#[tokio::test]
async fn a_negative_one_gives_the_batch_back_where_the_cursor_is() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    at(&lane, LEASE, 0, true).await;
    assert_eq!(at(&lane, LEASE, 2, false).await["success"], true);
    lane.free_at(0, 0).await;
}

#[tokio::test]
async fn what_cannot_be_acknowledged_is_refused() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    assert_eq!(at(&lane, "another", 0, true).await["error"], "invalid or expired lease");
    assert_eq!(at(&lane, "", 3, true).await["error"], "position beyond the leased batch");
    lane.leased_at(-1, 2).await;
    at(&lane, "", 2, true).await;
    assert_eq!(at(&lane, "", 2, true).await["error"], "no leased batch");
    assert_eq!(at(&lane, LEASE, 2, true).await["error"], "invalid or expired lease");
    let none = Lane { broker: &broker, id: Uuid::now_v7() };
    assert_eq!(at(&none, "", 0, true).await["error"], "consumer not found");
}

#[tokio::test]
async fn names_find_the_partition() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    let query = "select queen.log_ack_v1('q', $1, 'g', 'lease-1', 1)";
    let none: Value = broker.row(query, &[&"no such"]).await.get(0);
    assert_eq!(none["error"], "consumer not found");
    let acked: Value = broker.row(query, &[&"p"]).await.get(0);
    assert_eq!(acked["success"], true);
    lane.free_at(1, 0).await;
}

#[tokio::test]
async fn many_answer_in_the_order_in_which_they_were_given() {
    let broker = Broker::start().await;
    let mut pids = vec![Uuid::now_v7()];
    for name in ["a", "b", "c"] {
        let lane = Lane::empty(&broker, name).await;
        lane.append(2).await;
        lane.lease(1).await;
        pids.push(lane.id);
    }
    pids.sort_unstable_by(|a, b| b.cmp(a));
    let query = "select queen.log_ack_multi_v1($1, array['g', 'g', 'g', 'g'], array['', '', '', ''], $2, $3)";
    let answers: Value = broker.row(query, &[&pids, &[1_i64, 0, 1, 0].as_slice(), &[true; 4].as_slice()]).await.get(0);
    let committed: Vec<&Value> =
        answers.as_array().expect("an array").iter().map(|answer| &answer["committed"]).collect();
    let known: Vec<Value> =
        (0..4).map(|n| if answers[n]["error"].is_null() { json!((n + 1) % 2) } else { json!(null) }).collect();
    assert_eq!(committed, known.iter().collect::<Vec<_>>());
    assert_eq!(known.iter().filter(|value| value.is_null()).count(), 1, "the unknown partition");
}
