//! The backend of a cycle is ended at every table that it writes: nothing of it happened, and it can be sent again.

use serde_json::json;

use super::support::lane::Lane;
use super::support::{Broker, wait_until};
use super::{commit, delete, done, everything, idle, query, result, results, state, upsert, with};

/// The advisory lock that a parked statement waits for.
const PARK: i64 = 4_243;

#[tokio::test]
async fn a_cycle_that_is_cut_off_never_happened() {
    for (event, table) in [
        ("insert", "queen.queues"),
        ("insert", "queen.log_partitions"),
        ("delete", "queen_streams.state"),
        ("insert", "queen_streams.state"),
        ("update", "queen_streams.state"),
        ("insert", "queen.log_segments"),
        ("insert", "queen.log_txns"),
        ("update", "queen.log_partitions"),
        ("update", "queen.log_consumers"),
    ] {
        let broker = Broker::start().await;
        let lane = Lane::leased(&broker, 2).await;
        let id = query(&broker, "s").await;
        let base = idle(id, &lane);
        let before = json!({"state_ops": [upsert("gone", &json!(1)), upsert("kept", &json!(1))]});
        commit(&broker, &with(&base, before)).await;
        let ops = json!([delete("gone"), upsert("kept", &json!(2)), upsert("new", &json!(3))]);
        let body = with(&base, json!({"state_ops": ops, "push_items": [result("x", &json!(1))], "ack": done(2)}));
        let untouched = everything(&broker).await;

        let park = format!(
            "select pg_advisory_lock({PARK});
             create function park() returns trigger language plpgsql as $$ begin
                 perform pg_advisory_xact_lock({PARK});
                 return case tg_op when 'DELETE' then old else new end;
             end $$;
             create trigger park before {event} on {table} for each row execute function park()"
        );
        broker.sql.batch_execute(&park).await.expect("parked");
        let parked = "from pg_stat_activity where datname = current_database() and application_name = 'ebbtide'
            and wait_event_type = 'Lock' and wait_event = 'advisory'";
        let ((status, answer), ()) = tokio::join!(broker.post("/streams/v1/cycle", body.clone()), async {
            let query = format!("select exists (select {parked})");
            wait_until(&broker.sql, &format!("{event} on {table} waits"), &query, &[]).await;
            broker.sql.batch_execute(&format!("select pg_terminate_backend(pid) {parked}")).await.expect("ended");
        });
        assert_eq!((status, &answer["success"]), (500, &json!(false)), "{event} on {table}: {answer}");
        let gone = format!("select not exists (select {parked})");
        wait_until(&broker.sql, "the backend is gone", &gone, &[]).await;
        let release = format!("drop trigger park on {table}; select pg_advisory_unlock({PARK})");
        broker.sql.batch_execute(&release).await.expect("released");
        assert_eq!(everything(&broker).await, untouched, "{event} on {table}");

        commit(&broker, &body).await;
        let rows = state(&broker, id, &lane, json!({})).await;
        assert_eq!(rows, [("kept".to_owned(), json!(2)), ("new".to_owned(), json!(3))], "{event} on {table}");
        assert_eq!(results(&broker).await, [("x".to_owned(), "1".to_owned())]);
        lane.free_at(1, 0).await;
    }
}
