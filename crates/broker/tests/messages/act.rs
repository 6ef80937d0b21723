//! What an operator does to one message.

use serde_json::{Value, json};

use super::support::Broker;
use super::support::lane::{Filed, GROUP, LEASE, Lane};
use super::{commit, file};

async fn log_length(lane: &Lane<'_>) -> i64 {
    lane.broker.row("select last_offset + 1 from queen.log_partitions where id = $1", &[&lane.id]).await.get(0)
}

#[tokio::test]
async fn delete_takes_the_dead_letters_of_all_groups_and_no_live_message() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 2).await;
    for group in ["g", "h"] {
        file(&lane, group, 0, "m0", Some("1")).await;
    }
    file(&lane, "g", 1, "m1", Some("1")).await;
    let (status, body) = broker.delete(&format!("/api/v1/messages/{}/m0", lane.id)).await;
    assert_eq!(
        (status, &body["success"], &body["deleted"], &body["transactionId"]),
        (200, &json!(true), &json!(2), &json!("m0"))
    );
    assert!(body["error"].is_null() && body["message"].is_string());
    assert_eq!(lane.filed().await.len(), 1);
    let (status, body) = broker.delete(&format!("/api/v1/messages/{}/m0", lane.id)).await;
    assert_eq!((status, &body["success"]), (404, &json!(false)));
    assert_eq!(log_length(&lane).await, 2);
    assert_eq!(broker.get(&format!("/api/v1/messages/{}/m0", lane.id)).await.0, 200, "the message lives");
}

#[tokio::test]
async fn retry_pushes_the_payload_again_and_removes_the_dead_letters() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let sent = r#"{ "b": 1.0, "a": "\u0000" }"#;
    lane.write(&[("a/b", sent), ("m1", "1")]).await;
    for group in ["g", "h"] {
        file(&lane, group, 0, "a/b", Some(sent)).await;
    }
    file(&lane, "g", 1, "m1", None).await;
    let (status, body) = broker.post_raw(&format!("/api/v1/messages/{}/a%2Fb/retry", lane.id), "").await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(
        (&body["queue"], &body["partition"], &body["dlqRowRemoved"], &body["dlqRowsRemoved"]),
        (&json!("q"), &json!("p"), &json!(true), &json!(2))
    );
    let element = &body["replayedAs"];
    assert_eq!(
        (&element["status"], &element["queueName"], &element["index"]),
        (&json!("queued"), &json!("q"), &json!(0))
    );
    assert_eq!(log_length(&lane).await, 3, "one message for both groups");
    let path = format!("/api/v1/messages/{}/{}", lane.id, element["transaction_id"].as_str().expect("a text"));
    let (_, bytes) = broker.get_bytes(&path).await;
    assert!(String::from_utf8(bytes).expect("UTF-8").contains(&format!(r#""data":{sent},"#)));
    assert_eq!(broker.get(&path).await.1["id"], element["message_id"]);

    let retry = async |id: &str| broker.post_raw(&format!("/api/v1/messages/{}/{id}/retry", lane.id), "").await;
    assert_eq!(retry("a%2Fb").await, (404, json!({"error": "Dead letter not found"})));
    let (status, body) = retry("m1").await;
    assert_eq!(status, 409, "{body}");
    assert_eq!((log_length(&lane).await, lane.filed().await.len()), (3, 1), "nothing was pushed, nothing was removed");
    let (status, _) = broker.post(&format!("/api/v1/messages/{}/m1/retry", lane.id), json!({"group": "g"})).await;
    assert_eq!(status, 400, "an option that does not exist");
    let (status, _) = broker.post(&format!("/api/v1/messages/{}/m1/retry", lane.id), json!([])).await;
    assert_eq!(status, 400, "no object");
}

#[tokio::test]
async fn a_dead_letter_that_is_retried_by_many_at_once_is_pushed_once() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    file(&lane, "g", 0, "m0", Some("1")).await;
    let path = format!("/api/v1/messages/{}/m0/retry", lane.id);
    let answers = futures_util::future::join_all((0..8).map(|_| broker.post_raw(&path, ""))).await;
    let mut statuses: Vec<u16> = answers.into_iter().map(|(status, _)| status).collect();
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 404, 404, 404, 404, 404, 404, 404]);
    assert_eq!((log_length(&lane).await, lane.filed().await), (2, vec![]));
}

#[tokio::test]
async fn a_replay_that_fails_leaves_both_the_log_and_the_dead_letter() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 1).await;
    let id = file(&lane, "g", 0, "m0", Some("1")).await;
    broker
        .sql
        .batch_execute(
            "create function queen.refuse() returns trigger language plpgsql as
                $$ begin raise exception 'refused' using errcode = 'P0001'; end $$;
            create trigger refuse before delete on queen.log_dlq for each row execute function queen.refuse()",
        )
        .await
        .expect("a trigger");
    let (status, _) = broker.post_raw(&format!("/api/v1/messages/{}/m0/retry", lane.id), "").await;
    assert_eq!(status, 500);
    assert_eq!((log_length(&lane).await, lane.filed().await.len()), (1, 1));
    broker.execute("drop trigger refuse on queen.log_dlq", &[]).await;
    // The same step with a dead letter that is gone pushes nothing either.
    let query = "select queen.log_dlq_replay_v1(array[$1::uuid, gen_random_uuid()], array[$2::uuid], array[1], array[$3::bytea], array[$3::bytea])";
    let error = broker.sql.execute(query, &[&id, &lane.id, &vec![0_u8; 16]]).await.expect_err("one is missing");
    assert_eq!(error.code().map(tokio_postgres::error::SqlState::code), Some("QN001"));
    assert_eq!((log_length(&lane).await, lane.filed().await.len()), (1, 1));
}

async fn move_away(lane: &Lane<'_>, id: &str, body: &str) -> (u16, Value) {
    lane.broker.post_raw(&format!("/api/v1/messages/{}/{id}/dlq", lane.id), body.to_owned()).await
}

#[tokio::test]
async fn the_message_that_a_group_wants_next_moves_and_its_cursor_passes() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    lane.append(3).await;
    commit(&lane, GROUP, 0).await;
    broker.execute("update queen.log_consumers set batch_retry_count = 2", &[]).await;
    let (status, body) = move_away(&lane, "m1", r#"{"consumerGroup": "g", "error": "poison\u0000"}"#).await;
    assert_eq!(
        (status, &body["success"], &body["offset"], &body["consumerGroup"]),
        (200, &json!(true), &json!(1), &json!("g")),
        "{body}"
    );
    lane.free_at(1, 0).await;
    let filed = Filed {
        offset: 1,
        transaction_id: "m1".to_owned(),
        payload: Some("{\"n\": 1}".to_owned()),
        error: "poison\\u0000".to_owned(),
        retries: 2,
    };
    assert_eq!(lane.filed().await, [filed]);
    assert_eq!(move_away(&lane, "m1", r#"{"consumerGroup": "g"}"#).await.0, 409, "once");
    let (status, popped) = broker.get("/api/v1/pop/queue/q?consumerGroup=g").await;
    assert_eq!((status, &popped["messages"][0]["transactionId"]), (200, &json!("m2")));
}

#[tokio::test]
async fn what_stands_in_the_way_of_a_move_is_said_and_nothing_changes() {
    let broker = Broker::start().await;
    let lane = Lane::leased(&broker, 4).await;
    let refused = async |id: &str, body: &str, why: &str| {
        let before = lane.cursor().await;
        let (status, answer) = move_away(&lane, id, body).await;
        assert_eq!(status, 409, "{answer}");
        assert!(answer["error"].as_str().expect("a text").contains(why), "{answer}");
        assert_eq!((lane.cursor().await, lane.filed().await), (before, vec![]));
    };
    let g = r#"{"consumerGroup": "g"}"#;
    refused("m0", g, "leased").await;
    refused("m0", "", "__QUEUE_MODE__ has no cursor in this partition; those that have: g").await;
    refused("m0", r#"{"consumerGroup": "x"}"#, "x has no cursor").await;
    lane.lease_as(GROUP, LEASE, 2, -1.0).await;
    refused("m1", g, "messages before this one").await;
    commit(&lane, GROUP, 1).await;
    refused("m1", g, "past this message").await;
    let (status, _) = move_away(&lane, "m2", g).await;
    assert_eq!(status, 200, "an expired lease is none");
    lane.free_at(2, 0).await;

    for (body, field) in [
        (r#"{"consumerGroup": ""}"#, "consumerGroup"),
        (r#"{"consumerGroup": 7}"#, "consumerGroup"),
        (r#"{"error": []}"#, "error"),
        (r#"{"group": "g"}"#, "bad body: unknown field `group`"),
        (r#"["g"]"#, "bad body: must be an object"),
        ("nonsense", "bad body"),
    ] {
        let (status, answer) = move_away(&lane, "m3", body).await;
        assert_eq!(status, 400, "{body}");
        assert!(answer["error"].as_str().expect("a text").starts_with(field), "{answer}");
    }
}

#[tokio::test]
async fn a_move_without_a_group_takes_the_head_of_a_partition_that_nobody_consumes() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    lane.append(2).await;
    lane.append(2).await;
    let (status, answer) = move_away(&lane, "m1", "").await;
    assert_eq!(status, 409, "{answer}");
    let cursors = async || broker.row("select count(*) from queen.log_consumers", &[]).await.get::<_, i64>(0);
    assert_eq!(cursors().await, 0, "a refusal leaves no cursor behind");
    assert_eq!(move_away(&lane, "m0", "").await.0, 200);
    let (_, popped) = broker.get("/api/v1/pop/queue/q?batch=1").await;
    assert_eq!(popped["messages"][0]["transactionId"], "m1");

    // What retention took away before the cursor came there does not stand before the head.
    broker.execute("delete from queen.log_consumers", &[]).await;
    broker.execute("delete from queen.log_segments where base_offset = 0", &[]).await;
    broker.execute("update queen.log_partitions set log_start = 2", &[]).await;
    assert_eq!(move_away(&lane, "m1", "").await.0, 404, "its segment is gone");
    assert_eq!(move_away(&lane, "m2", "").await.0, 200);
    let (status, answer) = move_away(&lane, "m0", "").await;
    assert_eq!(status, 409, "{answer}: it is a dead letter already");
}
