//! Clearing a queue: what goes, what stays, and where cursors and leases are afterwards.

use serde_json::{Value, json};
use uuid::Uuid;

use super::set_cursor;
use super::support::lane::{LEASE, Lane};
use super::support::{Broker, wait_until};

const CLEAR: &str = "/api/v1/queues/q/clear";

async fn clear(b: &Broker, query: &str) -> Value {
    let (status, body) = b.delete(&format!("{CLEAR}{query}")).await;
    assert_eq!(status, 200, "{body}");
    body
}

async fn offsets(b: &Broker, id: Uuid) -> (i64, i64, i64) {
    let query = "select log_start, last_offset, (select count(*) from queen.log_segments where partition_id = p.id)
        from queen.log_partitions p where id = $1";
    let row = b.row(query, &[&id]).await;
    (row.get(0), row.get(1), row.get(2))
}

#[tokio::test]
async fn a_cleared_queue_has_no_messages_and_its_groups_have_read_them_all() {
    let b = Broker::start().await;
    let one = b.store("q", "a", 3).await;
    b.store("q", "a", 2).await;
    let two = b.store("q", "b", 4).await;
    let other = b.store("other", "a", 1).await;
    set_cursor(&b, one.partition_id, "g", 1).await;
    set_cursor(&b, one.partition_id, "done", 4).await;
    let body = clear(&b, "").await;
    let expected = json!({
        "success": true, "queue": "q", "partition": null, "partitionsCleared": 2, "messagesDeleted": 9,
        "segmentsDeleted": 3, "cursorsMoved": 1,
    });
    assert_eq!(body, expected);
    assert_eq!(offsets(&b, one.partition_id).await, (5, 4, 0));
    assert_eq!(offsets(&b, two.partition_id).await, (4, 3, 0));
    assert_eq!(offsets(&b, other.partition_id).await, (0, 0, 1), "another queue's");
    assert_eq!(b.cursor(one.partition_id, "g").await, Some((4, None, 0, false)));
    assert_eq!(b.cursor(one.partition_id, "done").await, Some((4, None, 0, false)));
    let query = "select retention_type, sum(messages_deleted), count(*) from queen.retention_history group by 1";
    let row = b.row(query, &[]).await;
    assert_eq!((row.get::<_, &str>(0), row.get::<_, i64>(1), row.get::<_, i64>(2)), ("clear", 9, 2));
    let again = clear(&b, "").await;
    assert_eq!((&again["messagesDeleted"], &again["partitionsCleared"]), (&json!(0), &json!(0)));

    b.store("q", "a", 1).await;
    assert_eq!(b.pop_ids("queue/q/partition/a?consumerGroup=g").await, ["a-5"], "and goes on");
}

#[tokio::test]
async fn dead_letters_and_transaction_ids_outlive_a_clearing() {
    let b = Broker::start().await;
    let push = json!({"items": [{"queue": "q", "partition": "p", "payload": 1, "transactionId": "m"}]});
    b.post("/api/v1/push", push.clone()).await;
    let (_, popped) = b.pop("queue/q/partition/p").await;
    let ack = json!({"transactionId": "m", "partitionId": popped["partitionId"], "leaseId": popped["leaseId"], "status": "dlq"});
    b.post("/api/v1/ack", ack).await;
    assert_eq!(clear(&b, "").await["messagesDeleted"], 1);
    let (_, letters) = b.get("/api/v1/dlq?queue=q").await;
    assert_eq!((&letters["total"], &letters["messages"][0]["data"]), (&json!(1), &json!(1)));
    let (_, again) = b.post("/api/v1/push", push).await;
    assert_eq!(again[0]["status"], "duplicate");
}

#[tokio::test]
async fn one_partition_is_cleared_alone() {
    let b = Broker::start().await;
    let one = b.store("q", "a", 3).await;
    let two = b.store("q", "b", 3).await;
    let body = clear(&b, "?partition=b").await;
    assert_eq!((&body["partition"], &body["messagesDeleted"]), (&json!("b"), &json!(3)));
    assert_eq!(offsets(&b, one.partition_id).await.2, 1);
    assert_eq!(offsets(&b, two.partition_id).await.2, 0);
    assert_eq!(clear(&b, "?partition=nowhere").await["partitionsCleared"], 0);
    assert_eq!(b.delete("/api/v1/queues/nowhere/clear").await, (404, json!({"error": "Queue not found"})));
    let long = "x".repeat(256);
    for path in [format!("/api/v1/queues/{long}/clear"), format!("{CLEAR}?partition={long}")] {
        assert_eq!(b.delete(&path).await.0, 400);
    }
}

#[tokio::test]
async fn leases_on_what_was_cleared_end_and_others_stay() {
    let b = Broker::start().await;
    let lane = Lane::leased(&b, 4).await;
    clear(&b, "").await;
    lane.free_at(3, 0).await;
    let replies = lane.ack(&[("m3", "failed")]).await;
    assert_eq!(replies[0]["success"], false, "{replies:?}");

    lane.append(2).await;
    lane.lease(5).await;
    let step = "select queen.log_clear_step_v1($1, 4, 1)";
    lane.append(2).await;
    let segment: Value = b.row(step, &[&lane.id]).await.get(0);
    assert_eq!((&segment["done"], &segment["messages"]), (&json!(true), &json!(2)), "nothing up to offset 4 is left");
    lane.free_at(5, 0).await;
    assert_eq!(offsets(&b, lane.id).await, (6, 7, 1), "what was pushed later stays");
}

#[tokio::test]
async fn a_lease_that_reaches_beyond_a_clearing_keeps_the_rest() {
    let b = Broker::start().await;
    let lane = Lane::empty(&b, "p").await;
    lane.append(2).await;
    lane.append(2).await;
    lane.lease(3).await;
    b.row("select queen.log_clear_step_v1($1, 1, 1)", &[&lane.id]).await;
    lane.leased_at(1, 3).await;
    let replies = lane.ack(&[("m2", "completed"), ("m3", "completed")]).await;
    assert!(replies.iter().all(|reply| reply["success"] == true), "under {LEASE}: {replies:?}");
    lane.free_at(3, 0).await;
}

#[tokio::test]
async fn a_partition_of_more_segments_than_a_step_takes_is_cleared_in_steps() {
    let b = Broker::start().await;
    let lane = Lane::empty(&b, "p").await;
    let segments = "insert into queen.log_segments
        select $1, n, n, clock_timestamp(), '' from generate_series(0, 2000) n";
    b.execute(segments, &[&lane.id]).await;
    b.execute("update queen.log_partitions set last_offset = 2000", &[]).await;
    set_cursor(&b, lane.id, "g", 7).await;
    let body = clear(&b, "").await;
    assert_eq!((&body["segmentsDeleted"], &body["cursorsMoved"]), (&json!(2001), &json!(1)));
    let query = "select count(*), max(messages_deleted) from queen.retention_history";
    let row = b.row(query, &[]).await;
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i32>(1)), (3, 1000), "no step exceeds its bound");
    assert_eq!(offsets(&b, lane.id).await, (2001, 2000, 0));
}

#[tokio::test]
async fn a_clearing_holds_one_partition_at_a_time() {
    let b = Broker::start().await;
    let free = b.store("q", "a", 1).await;
    let held = b.store("q", "b", 1).await;
    let push = b.database.client().await;
    let hold = format!("begin; select from queen.log_partitions where id = '{}' for update", held.partition_id);
    push.batch_execute(&hold).await.expect("held");
    let rest = async {
        let blocked = "select count(*) = 1 from pg_stat_activity where datname = current_database()
            and application_name = 'ebbtide' and wait_event_type = 'Lock' and query like '%log_clear_step_v1%'";
        wait_until(&b.sql, "the clearing waits for the second partition", blocked, &[]).await;
        assert_eq!(offsets(&b, free.partition_id).await.2, 0, "the first is done and committed");
        let query =
            format!("select from queen.log_partitions where id = '{}' for update nowait; commit", free.partition_id);
        push.batch_execute(&query).await.expect("and free");
    };
    let (body, ()) = tokio::join!(clear(&b, ""), rest);
    assert_eq!(body["messagesDeleted"], 2);
}
