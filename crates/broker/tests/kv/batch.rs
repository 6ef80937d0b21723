//! Batches: in order, all or none, and in one order of locks.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::support::random::Random;
use super::support::{Broker, wait_until};
use super::{expire, get, incr, one, put, run, with};

#[tokio::test]
async fn a_batch_sees_its_own_writes_in_order() {
    let broker = Broker::start().await;
    let operations = json!([
        get("k"), put("k", json!(1)), get("k"), {"op": "getMany", "ns": "n", "keys": ["k", "l"]}, incr("l", json!(2)),
        {"op": "getPrefix", "ns": "n", "prefix": "l"},
    ]);
    let results = run(&broker, operations).await;
    assert_eq!((&results[0]["found"], &results[2]["value"]), (&json!(false), &json!(1)));
    assert_eq!((&results[3]["missing"], &results[5]["rows"][0]["value"]), (&json!(["l"]), &json!(2)));
    for (index, result) in results.iter().enumerate() {
        assert_eq!(result["index"], index);
    }
}

#[tokio::test]
async fn a_required_operation_that_does_not_apply_undoes_all() {
    let broker = Broker::start().await;
    let version = one(&broker, put("taken", json!({"by": 1.50}))).await["version"].clone();
    let required =
        json!({"op": "putIfAbsent", "ns": "n", "key": "taken", "value": 2, "forever": true, "required": true});
    let (status, body) =
        broker.post("/api/v1/kv", json!({"operations": [put("a", json!(1)), get("a"), required]})).await;
    assert_eq!(status, 200);
    assert_eq!(
        body,
        json!({"results": [], "ok": false, "reason": "kv_precondition", "failedIndex": 2, "kvReason": "exists",
            "version": version, "value": {"by": 1.50}})
    );
    assert_eq!(one(&broker, get("a")).await["found"], false);
    let absent = with(put("none", json!(1)), json!({"expect": 4, "required": true}));
    let (_, body) = broker.post("/api/v1/kv", json!([absent])).await;
    assert_eq!((&body["kvReason"], &body["value"], &body["version"]), (&json!("absent"), &Value::Null, &json!(0)));
    let count: i64 = broker.row("select count(*) from queen.kv", &[]).await.get(0);
    assert_eq!(count, 1, "nothing is left of it");
}

#[tokio::test]
async fn of_many_that_claim_a_key_one_wins() {
    let broker = Broker::start().await;
    for round in 0..10 {
        let key = format!("k{round}");
        one(&broker, put(&key, json!("old"))).await;
        expire(&broker, &key).await;
        let claim = |n: usize| {
            let operation = json!({"op": "putIfAbsent", "ns": "n", "key": key, "value": n, "ttlSeconds": 60});
            let broker = &broker;
            async move { one(broker, operation).await }
        };
        let results = futures_util::future::join_all((0..16).map(claim)).await;
        let winners: Vec<&Value> = results.iter().filter(|result| result["applied"] == true).collect();
        assert_eq!(winners.len(), 1);
        for result in &results {
            assert_eq!((&result["value"], &result["version"]), (&winners[0]["value"], &winners[0]["version"]));
        }
    }
}

#[tokio::test]
async fn concurrent_sums_lose_nothing_and_keep_their_bound() {
    let broker = Broker::start().await;
    let add = |_: usize| one(&broker, with(incr("k", json!(1)), json!({"max": 30})));
    let results = futures_util::future::join_all((0..40).map(add)).await;
    let sums: HashSet<i64> = results
        .iter()
        .filter(|result| result["applied"] == true)
        .map(|result| result["value"].as_i64().expect("a number"))
        .collect();
    assert_eq!(sums, (1..=30).collect());
    assert_eq!(one(&broker, get("k")).await["value"], 30);
}

/// Two batches name the same keys in opposite order, some there and some not. The lowest is held: both wait for it,
/// and neither holds another one meanwhile.
#[tokio::test]
async fn batches_lock_their_keys_in_byte_order() {
    let broker = Broker::start().await;
    one(&broker, put("a", json!(0))).await;
    one(&broker, put("c", json!(0))).await;
    let blocker = broker.database.client().await;
    blocker.batch_execute("begin; select from queen.kv where key = 'a' for update").await.expect("locked");
    let keys = ["a", "b", "c", "d"];
    let operations = |keys: Vec<&str>| json!(keys.into_iter().map(|key| incr(key, json!(1))).collect::<Vec<_>>());
    let (_, _, ()) = tokio::join!(
        run(&broker, operations(keys.to_vec())),
        run(&broker, operations(keys.into_iter().rev().collect())),
        async {
            let query = "select count(*) = 2 from pg_stat_activity where datname = current_database()
                and application_name = 'ebbtide' and wait_event_type = 'Lock'";
            wait_until(&broker.sql, "both wait", query, &[]).await;
            let probe = "select from queen.kv where key = 'c' for update nowait";
            broker.sql.execute(probe, &[]).await.expect("nobody holds a higher key");
            let probe =
                "insert into queen.kv (namespace, key, value, version, updated_at) values ('n', 'b', '0', 1, now())";
            broker.sql.batch_execute("set lock_timeout = '1s'").await.expect("set");
            broker.sql.execute(probe, &[]).await.expect("nobody makes a higher key");
            broker.sql.execute("delete from queen.kv where key = 'b'", &[]).await.expect("gone again");
            blocker.batch_execute("commit").await.expect("let go");
        }
    );
    for (key, expected) in [("a", 2), ("b", 2), ("c", 2), ("d", 2)] {
        assert_eq!(one(&broker, get(key)).await["value"], expected, "{key}");
    }
}

#[tokio::test]
async fn batches_in_any_order_never_deadlock() {
    let broker = Broker::start().await;
    broker.execute(&format!("alter database {} set deadlock_timeout = '50ms'", broker.database.name), &[]).await;
    let batches = (0..8_u64).map(|worker| {
        let broker = &broker;
        async move {
            let mut random = Random::from_seed(worker);
            for _ in 0..20 {
                let mut keys: Vec<u64> = (0..6).collect();
                random.shuffle(&mut keys);
                let operations: Vec<Value> = keys
                    .into_iter()
                    .map(|key| match random.below(3) {
                        0 => json!({"op": "delete", "ns": "n", "key": key.to_string()}),
                        1 => incr(&key.to_string(), json!(1)),
                        _ => put(&key.to_string(), json!(worker)),
                    })
                    .collect();
                run(broker, json!(operations)).await;
            }
        }
    });
    futures_util::future::join_all(batches).await;
    broker.execute("select pg_stat_force_next_flush()", &[]).await;
    let query = "select deadlocks from pg_stat_database where datname = current_database()";
    assert_eq!(broker.row(query, &[]).await.get::<_, i64>(0), 0);
    let left: i64 = broker.row("select count(*) from queen.kv where version = 0", &[]).await.get(0);
    assert_eq!(left, 0, "no place holder is left");
}
