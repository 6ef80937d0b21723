//! A queue delete among other writers: whom it waits for, and what it does when it loses.

mod support;

use serde_json::json;
use support::{Broker, wait_until};
use tokio_postgres::Client;
use uuid::Uuid;

const BLOCKED_DELETE: &str = "select count(*) = 1 from pg_stat_activity
    where datname = current_database() and application_name = 'ebbtide' and wait_event_type = 'Lock' and query like '%delete_queue_v1%'";

/// Two partitions of the queue `q` with one cursor each, lower id first.
async fn two_partitions(broker: &Broker) -> [Uuid; 2] {
    broker.execute("insert into queen.queues (name) values ('q')", &[]).await;
    let query = "insert into queen.log_partitions (queue_id, name) select id, n::text from queen.queues, generate_series(1, 2) n
                 returning id";
    let mut ids = [Uuid::nil(); 2];
    for (id, row) in ids.iter_mut().zip(broker.rows(query, &[]).await) {
        *id = row.get(0);
    }
    ids.sort();
    let query =
        "insert into queen.log_consumers (partition_id, consumer_group) select id, 'g' from queen.log_partitions";
    broker.execute(query, &[]).await;
    ids
}

async fn run(client: &Client, query: &str) {
    client.batch_execute(query).await.unwrap_or_else(|error| panic!("{query}: {error:?}"));
}

async fn hold(client: &Client, table: &str, condition: &str) {
    run(client, &format!("begin; select from queen.{table} where {condition} for update")).await;
}

#[tokio::test]
async fn a_delete_that_loses_a_deadlock_tries_again() {
    let broker = Broker::start().await;
    let [low, high] = two_partitions(&broker).await;
    let (first, second) = (broker.database.client().await, broker.database.client().await);
    hold(&first, "log_partitions", &format!("id = '{low}'")).await;
    // Whoever looks for a deadlock while there is one loses it: this session never looks.
    run(&second, "set deadlock_timeout = '1h'").await;
    hold(&second, "log_partitions", &format!("id = '{high}'")).await;

    let delete = broker.delete("/api/v1/resources/queues/q");
    let others = async {
        wait_until(&broker.sql, "the delete holds the queue and waits for a partition", BLOCKED_DELETE, &[]).await;
        let pid: i32 = second.query_one("select pg_backend_pid()", &[]).await.expect("a pid").get(0);
        let turn = async {
            // Granted only when the delete gave up.
            run(&second, "select from queen.queues where name = 'q' for update; rollback").await;
        };
        let let_go = async {
            let waits = "select cardinality(pg_blocking_pids($1)) > 0";
            wait_until(&broker.sql, "the other waits for the delete", waits, &[&pid]).await;
            run(&first, "rollback").await;
        };
        tokio::join!(turn, let_go);
    };
    let ((status, body), ()) = tokio::join!(delete, others);
    assert_eq!((status, &body["deleted"]), (200, &json!(true)), "{body}");
    let left: i64 = broker.row("select count(*) from queen.log_partitions", &[]).await.get(0);
    assert_eq!(left, 0);
}

#[tokio::test]
async fn a_delete_takes_cursors_in_the_order_of_acknowledgements() {
    let broker = Broker::start().await;
    let [low, high] = two_partitions(&broker).await;
    let ack = broker.database.client().await;
    // An acknowledgement of two partitions, half way: it holds the first cursor and wants the second.
    hold(&ack, "log_consumers", &format!("partition_id = '{low}'")).await;
    let delete = broker.delete("/api/v1/resources/queues/q");
    let rest = async {
        wait_until(&broker.sql, "the delete waits for the first cursor", BLOCKED_DELETE, &[]).await;
        let query = format!("select from queen.log_consumers where partition_id = '{high}' for update nowait; commit");
        run(&ack, &query).await;
    };
    let ((status, body), ()) = tokio::join!(delete, rest);
    assert_eq!((status, &body["deleted"]), (200, &json!(true)), "{body}");
}

#[tokio::test]
async fn a_delete_takes_partitions_by_ascending_id() {
    let broker = Broker::start().await;
    let [low, high] = two_partitions(&broker).await;
    let push = broker.database.client().await;
    hold(&push, "log_partitions", &format!("id = '{low}'")).await;
    let delete = broker.delete("/api/v1/resources/queues/q");
    let rest = async {
        wait_until(&broker.sql, "the delete waits for the lower partition", BLOCKED_DELETE, &[]).await;
        let query = format!("select from queen.log_partitions where id = '{high}' for update nowait; commit");
        run(&push, &query).await;
    };
    let ((status, body), ()) = tokio::join!(delete, rest);
    assert_eq!((status, &body["deleted"]), (200, &json!(true)), "{body}");
}

#[tokio::test]
async fn of_two_deletes_of_a_queue_one_finds_it() {
    let broker = Broker::start().await;
    two_partitions(&broker).await;
    let deletes = (0..8).map(|_| broker.delete("/api/v1/resources/queues/q"));
    let answers = futures_util::future::join_all(deletes).await;
    let found = answers.iter().filter(|(status, body)| *status == 200 && body["deleted"] == json!(true)).count();
    assert_eq!(found, 1);
    assert!(answers.iter().all(|(status, _)| *status == 200));
}
