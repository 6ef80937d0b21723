//! Acknowledgement rule by rule, each with the answer that is right.

mod support;

#[path = "ack/dead_letters.rs"]
mod dead_letters;
#[path = "ack/locks.rs"]
mod locks;
#[path = "ack/positional.rs"]
mod positional;

use serde_json::{Value, json};
use support::lane::{GROUP, LEASE, Lane, errors, send};
use support::{Broker, wait_until};
use uuid::Uuid;

const NO_CONSUMER: Option<&str> = Some("consumer not found");
const NO_LEASE: Option<&str> = Some("invalid or expired lease");

#[tokio::test]
async fn completing_the_whole_batch_ends_the_lease_and_forgets_failures() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    broker
        .execute("update queen.log_consumers set batch_retry_count = 2, attempt_offset = 0, attempt_count = 3", &[])
        .await;
    let replies = lane.ack(&[("m0", "completed"), ("m1", "ok"), ("m2", "acked")]).await;
    for (reply, id) in replies.iter().zip(["m0", "m1", "m2"]) {
        let index = reply["index"].clone();
        let expected = json!({"index": index, "transactionId": id, "success": true, "error": null,
            "leaseReleased": true, "dlq": false, "noop": false});
        assert_eq!(*reply, expected);
    }
    lane.free_at(2, 0).await;
    let row = broker
        .row("select attempt_offset, attempt_count, total_consumed, lease_expires_at from queen.log_consumers", &[])
        .await;
    assert_eq!((row.get(0), row.get(1), row.get(2)), (None::<i64>, 0, 3_i64));
    assert!(row.get::<_, Option<jiff::Timestamp>>(3).is_some(), "an ended lease keeps its stamp");
}

#[tokio::test]
async fn one_acknowledgement_answers_an_array_of_one() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    let (status, body) = broker.post("/api/v1/ack", lane.element("m0", "completed")).await;
    assert_eq!(status, 200);
    assert_eq!(body.as_array().map(Vec::len), Some(1));
    assert_eq!(body[0]["success"], true);
    lane.free_at(0, 0).await;
}

#[tokio::test]
async fn a_partial_acknowledgement_keeps_the_lease() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 5).await;
    let replies = lane.ack(&[("m0", "completed"), ("m1", "completed")]).await;
    assert_eq!(replies[1]["leaseReleased"], false);
    lane.leased_at(1, 4).await;
    let replies = lane.ack(&[("m4", "completed")]).await;
    assert_eq!(replies[0]["leaseReleased"], true);
    lane.free_at(4, 0).await;
}

#[tokio::test]
async fn acknowledging_a_later_message_completes_those_before_it() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 5).await;
    lane.ack(&[("m3", "completed")]).await;
    lane.leased_at(3, 4).await;
    let replies = lane.ack(&[("m1", "completed")]).await;
    assert_eq!((&replies[0]["success"], &replies[0]["noop"]), (&json!(true), &json!(true)));
    lane.leased_at(3, 4).await;
}

#[tokio::test]
async fn acknowledging_twice_is_a_noop_that_changes_nothing() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    lane.ack(&[("m0", "completed")]).await;
    for _ in 0..2 {
        let replies = lane.ack(&[("m0", "completed")]).await;
        assert_eq!((&replies[0]["success"], &replies[0]["noop"]), (&json!(true), &json!(true)));
        assert_eq!(errors(&replies), [None]);
        lane.leased_at(0, 1).await;
    }
}

#[tokio::test]
async fn a_repeat_after_the_lease_ended_is_refused_for_the_lease() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    lane.ack(&[("m0", "completed")]).await;
    assert_eq!(errors(&lane.ack(&[("m0", "completed")]).await), [NO_LEASE]);
    lane.free_at(0, 0).await;
}

#[tokio::test]
async fn a_signal_for_what_is_behind_the_cursor_is_an_error() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    lane.ack(&[("m1", "completed")]).await;
    for signal in ["failed", "retry", "dlq"] {
        let replies = lane.ack(&[("m0", signal)]).await;
        let error = replies[0]["error"].as_str().expect("an error");
        assert!(error.starts_with("already committed: "), "{error}");
        assert_eq!((&replies[0]["success"], &replies[0]["noop"]), (&json!(false), &json!(false)));
    }
    lane.leased_at(1, 2).await;
    assert_eq!(lane.filed().await, []);
}

#[tokio::test]
async fn what_is_behind_the_cursor_is_found_however_far_back() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    for _ in 0..250 {
        lane.append(1).await;
    }
    lane.lease(249).await;
    lane.ack(&[("m248", "completed")]).await;
    let replies = lane.ack(&[("m0", "completed"), ("m247", "completed"), ("nowhere", "completed")]).await;
    assert_eq!([&replies[0]["noop"], &replies[1]["noop"]], [true, true]);
    assert_eq!(replies[2]["success"], false);
}

#[tokio::test]
async fn an_expired_lease_acknowledges_nothing() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    lane.lease_as(GROUP, LEASE, 1, 0.0).await;
    assert_eq!(errors(&lane.ack(&[("m0", "completed"), ("m1", "failed")]).await), [NO_LEASE, NO_LEASE]);
    lane.leased_at(-1, 1).await;
}

#[tokio::test]
async fn another_workers_lease_acknowledges_nothing() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    let mut element = lane.element("m0", "completed");
    for lease in ["another", "\0"] {
        element["leaseId"] = json!(lease);
        assert_eq!(errors(&send(&broker, vec![element.clone()]).await), [NO_LEASE]);
    }
    lane.leased_at(-1, 1).await;
}

#[tokio::test]
async fn without_a_lease_id_the_lease_is_not_checked() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    for lease in [json!(null), json!("")] {
        let id = if lease.is_null() { "m0" } else { "m1" };
        let mut element = lane.element(id, "completed");
        element["leaseId"] = lease;
        assert_eq!(errors(&send(&broker, vec![element]).await), [None]);
    }
    lane.free_at(1, 0).await;

    lane.append(2).await;
    let mut element = lane.element("m2", "completed");
    element["leaseId"] = json!(null);
    let replies = send(&broker, vec![element]).await;
    assert_eq!(replies[0]["success"], true, "without any lease the cursor moves all the same");
    lane.free_at(2, 0).await;
}

#[tokio::test]
async fn an_unknown_partition_or_group_has_no_consumer() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    let mut partition = lane.element("m0", "completed");
    partition["partitionId"] = json!(Uuid::now_v7());
    let mut group = lane.element("m0", "completed");
    group["consumerGroup"] = json!("another");
    let mut queue_mode = lane.element("m0", "completed");
    queue_mode["consumerGroup"] = json!(null);
    assert_eq!(errors(&send(&broker, vec![partition, group, queue_mode]).await), [NO_CONSUMER; 3]);
    lane.leased_at(-1, 0).await;
}

#[tokio::test]
async fn a_message_of_another_partition_is_unresolvable() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    let other = Lane::empty(&broker, "other").await;
    other.write(&[("elsewhere", "1")]).await;
    let replies = lane.ack(&[("elsewhere", "completed")]).await;
    assert!(replies[0]["error"].as_str().expect("an error").starts_with("unresolvable: "));
    lane.leased_at(-1, 0).await;
}

#[tokio::test]
async fn an_unknown_transaction_id_leaves_its_neighbours_alone() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    let replies = lane.ack(&[("m0", "completed"), ("never pushed", "failed"), ("m1", "completed")]).await;
    assert_eq!([&replies[0]["success"], &replies[1]["success"], &replies[2]["success"]], [true, false, true]);
    lane.leased_at(1, 2).await;
}

#[tokio::test]
async fn messages_beyond_the_batch_are_unresolvable() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 5).await;
    lane.lease(2).await;
    let replies = lane.ack(&[("m3", "completed")]).await;
    assert!(replies[0]["error"].as_str().expect("an error").starts_with("unresolvable: "));
    lane.leased_at(-1, 2).await;
}

#[tokio::test]
async fn a_purged_sidecar_row_is_unresolvable_and_the_rest_can_be_acknowledged() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    lane.append(2).await;
    lane.append(2).await;
    lane.lease(3).await;
    broker.execute("delete from queen.log_txns where base_offset = 0", &[]).await;
    broker.execute("update queen.log_partitions set txns_start = 2", &[]).await;
    let replies = lane.ack(&[("m0", "completed"), ("m1", "failed"), ("m2", "completed")]).await;
    assert!(errors(&replies)[0].expect("an error").starts_with("unresolvable: "));
    assert!(errors(&replies)[1].expect("an error").starts_with("unresolvable: "));
    assert_eq!(errors(&replies)[2], None);
    lane.leased_at(2, 3).await;
}

#[tokio::test]
async fn what_retention_deleted_under_a_lease_is_said_to_be_gone() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    lane.append(2).await;
    lane.append(2).await;
    lane.lease(3).await;
    broker.delete_below(lane.id, 2).await;
    let replies = lane.ack(&[("m0", "completed")]).await;
    assert_eq!(errors(&replies), [None], "what was done is done");
    let replies = lane.ack(&[("m1", "failed")]).await;
    let error = errors(&replies)[0].expect("an error").to_owned();
    assert!(error.starts_with("gone: "), "{error}");
    assert_eq!((&replies[0]["success"], &replies[0]["dlq"]), (&false.into(), &false.into()));
    lane.lease(3).await;
    broker.execute("delete from queen.log_txns where base_offset = 0", &[]).await;
    broker.execute("update queen.log_partitions set txns_start = 2", &[]).await;
    let replies = lane.ack(&[("m1", "retry"), ("m2", "completed")]).await;
    let error = errors(&replies)[0].expect("an error").to_owned();
    assert!(error.starts_with("unresolvable: the message is gone") && error.contains("offset 2"), "{error}");
    lane.leased_at(2, 3).await;
}

#[tokio::test]
async fn of_several_messages_with_one_id_the_lowest_in_the_batch_counts() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    lane.write(&[("same", "0"), ("a", "1"), ("same", "2"), ("b", "3"), ("same", "4")]).await;
    lane.lease(4).await;
    lane.ack(&[("a", "completed")]).await;
    lane.leased_at(1, 4).await;
    let replies = lane.ack(&[("same", "completed")]).await;
    assert_eq!(replies[0]["noop"], false, "offset 2, not the one behind the cursor");
    lane.leased_at(2, 4).await;
    lane.ack(&[("same", "completed")]).await;
    lane.free_at(4, 0).await;
}

#[tokio::test]
async fn a_failure_with_tries_left_gives_the_rest_back_and_charges_one() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 5).await;
    let replies = lane
        .ack(&[("m0", "completed"), ("m1", "completed"), ("m2", "failed"), ("m3", "failed"), ("m4", "completed")])
        .await;
    assert_eq!(errors(&replies), [None; 5], "an accepted signal is a success");
    assert!(replies.iter().all(|reply| reply["leaseReleased"] == true && reply["dlq"] == false));
    lane.free_at(1, 1).await;
}

#[tokio::test]
async fn failures_stay_with_the_message_they_were_charged_to() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    lane.ack(&[("m0", "failed")]).await;
    lane.lease(2).await;
    lane.ack(&[("m0", "failed")]).await;
    lane.free_at(-1, 2).await;
    lane.lease(2).await;
    let replies = lane.ack(&[("m0", "completed"), ("m1", "failed")]).await;
    assert_eq!(replies[1]["dlq"], false, "its first failure");
    lane.free_at(0, 1).await;
    lane.lease(2).await;
    lane.ack(&[("m1", "completed")]).await;
    lane.leased_at(1, 2).await;
}

#[tokio::test]
async fn an_unknown_status_is_a_failure() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    lane.ack(&[("m0", "no such status")]).await;
    lane.free_at(-1, 1).await;
}

#[tokio::test]
async fn retry_gives_back_and_charges_nothing() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    broker.execute("update queen.log_consumers set batch_retry_count = 2", &[]).await;
    lane.ack(&[("m0", "retry")]).await;
    lane.free_at(-1, 2).await;
    lane.lease(2).await;
    lane.ack(&[("m0", "completed"), ("m1", "retry")]).await;
    lane.free_at(0, 0).await;
}

#[tokio::test]
async fn the_lowest_signal_decides_and_at_one_message_the_strongest() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 3).await;
    lane.ack(&[("m2", "dlq"), ("m1", "retry")]).await;
    lane.free_at(-1, 0).await;
    assert_eq!(lane.filed().await, []);

    lane.lease(2).await;
    lane.ack(&[("m0", "retry"), ("m0", "failed")]).await;
    lane.free_at(-1, 1).await;

    lane.lease(2).await;
    let replies = lane.ack(&[("m0", "failed"), ("m0", "dlq"), ("m0", "retry")]).await;
    assert!(replies.iter().all(|reply| reply["dlq"] == true));
    lane.free_at(0, 0).await;
    assert_eq!(lane.filed().await.len(), 1);
}

#[tokio::test]
async fn a_completed_message_that_also_failed_has_failed() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    lane.ack(&[("m0", "completed"), ("m0", "failed"), ("m1", "completed")]).await;
    lane.free_at(-1, 1).await;
}

#[tokio::test]
async fn bundles_of_one_request_do_not_affect_each_other() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    lane.lease_as("h", "lease-h", 1, 60.0).await;
    let with = |id: &str, group: &str, lease: &str| json!({"transactionId": id, "partitionId": lane.id, "consumerGroup": group, "leaseId": lease});
    let elements = vec![
        with("m0", "g", "wrong"),
        with("m1", "h", "lease-h"),
        with("m0", "g", LEASE),
        json!({"transactionId": "m0", "partitionId": "no uuid"}),
        json!({"partitionId": lane.id}),
    ];
    let replies = send(&broker, elements).await;
    assert_eq!(errors(&replies)[..3], [NO_LEASE, None, None]);
    assert!(errors(&replies)[3].expect("an error").starts_with("partitionId: "));
    assert!(errors(&replies)[4].expect("an error").starts_with("transactionId is required"));
    lane.leased_at(0, 1).await;
    let committed: i64 =
        broker.row("select committed from queen.log_consumers where consumer_group = 'h'", &[]).await.get(0);
    assert_eq!(committed, 1);
}

#[tokio::test]
async fn the_requests_group_counts_where_an_element_names_none() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    let element = |id: &str| json!({"transactionId": id, "partitionId": lane.id, "leaseId": LEASE});
    let mut other = element("m1");
    other["consumerGroup"] = json!("another");
    let body = json!({"acknowledgments": [element("m0"), other], "consumerGroup": GROUP});
    let (_, replies) = broker.post("/api/v1/ack/batch", body).await;
    assert_eq!(errors(replies.as_array().expect("an array")), [None, NO_CONSUMER]);
    lane.leased_at(0, 1).await;
}

#[tokio::test]
async fn bodies_that_are_no_acknowledgements_are_refused() {
    let broker = Broker::start().await;
    for body in
        ["", "{", "{}", r#"{"acknowledgments": null}"#, r#"{"acknowledgments": 7}"#, r#"{"acknowledgments": [7]}"#]
    {
        let (status, reply) = broker.post_raw("/api/v1/ack/batch", body).await;
        assert_eq!(status, 400, "{body}");
        assert!(reply["error"].as_str().expect("a text").starts_with("bad body: "), "{reply}");
    }
    assert_eq!(broker.post_raw("/api/v1/ack", "[").await.0, 400);
    let (status, reply) = broker.post("/api/v1/ack/batch", json!({"acknowledgments": [], "consumerGroup": 7})).await;
    assert_eq!(status, 400);
    assert!(reply["error"].as_str().expect("a text").starts_with("consumerGroup: "), "{reply}");
    assert_eq!(broker.post("/api/v1/ack/batch", json!({"acknowledgments": []})).await, (200, json!([])));
}

#[tokio::test]
async fn a_lost_database_is_said_for_each_element_or_for_all() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    broker.execute("alter function queen.log_ack_by_hash_multi_v1 rename to hidden", &[]).await;
    let replies = lane.ack(&[("m0", "completed")]).await;
    assert_eq!(errors(&replies), [Some("ack flush failed; lease will expire and redeliver")]);
    lane.leased_at(-1, 0).await;
}

#[tokio::test]
async fn an_acknowledgement_waits_for_the_cursor_and_judges_the_lease_afterwards() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    let blocker = broker.database.client().await;
    blocker.batch_execute("begin; update queen.log_consumers set lease_expires_at = now()").await.expect("locked");
    let (replies, ()) = tokio::join!(lane.ack(&[("m0", "completed")]), async {
        let query = "select exists (select from pg_stat_activity where datname = current_database()
            and application_name = 'ebbtide' and wait_event_type = 'Lock')";
        wait_until(&broker.sql, "the acknowledgement waits", query, &[]).await;
        blocker.batch_execute("commit").await.expect("unlocked");
    });
    assert_eq!(errors(&replies), [NO_LEASE]);
}

#[tokio::test]
async fn ten_thousand_in_a_thousand_partitions_are_one_commit() {
    let broker = Broker::start().await;
    let mut lanes = Vec::new();
    for n in 0..1000 {
        let lane = Lane::empty(&broker, &n.to_string()).await;
        lane.append(10).await;
        lane.lease(9).await;
        lanes.push(lane);
    }
    let elements: Vec<Value> =
        (0..10).flat_map(|n| lanes.iter().map(move |lane| lane.element(&format!("m{n}"), "completed"))).collect();
    let replies = send(&broker, elements).await;
    assert!(replies.iter().all(|reply| reply["success"] == true && reply["leaseReleased"] == true));
    let query =
        "select count(distinct xmin::text), count(*), min(committed) from queen.log_consumers where batch_end is null";
    let row = broker.row(query, &[]).await;
    assert_eq!((row.get(0), row.get(1), row.get(2)), (1_i64, 1000_i64, 9_i64));
}

#[tokio::test]
async fn ten_thousand_in_one_partition_are_acknowledged_at_once() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 10_000).await;
    let elements: Vec<Value> = (0..10_000).map(|n| lane.element(&format!("m{n}"), "completed")).collect();
    assert!(send(&broker, elements.clone()).await.iter().all(|reply| reply["success"] == true));
    lane.free_at(9_999, 0).await;
    lane.append(1).await;
    lane.lease(10_000).await;
    assert!(send(&broker, elements).await.iter().all(|reply| reply["noop"] == true));
}
