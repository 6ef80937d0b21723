//! A query has one id for its name, whoever registers it and however often.

use serde_json::json;

use super::support::Broker;
use super::support::lane::Lane;
use super::{commit, idle, query, register, state, upsert, with};

#[tokio::test]
async fn a_name_is_made_once_and_found_again() {
    let broker = Broker::start().await;
    let (status, made) = register(&broker, "daily", "hash", false).await;
    let id = &made["query_id"];
    let expected = |fresh: bool| json!({"success": true, "query_id": id, "name": "daily", "config_hash": "hash", "fresh": fresh, "reset": false});
    assert_eq!((status, &made), (200, &expected(true)));
    assert_eq!(register(&broker, "daily", "hash", false).await, (200, expected(false)));
    let (_, other) = register(&broker, "weekly", "hash", false).await;
    assert_ne!(&other["query_id"], id);
    let stored = "select name || ' ' || source_queue || ' ' || sink_queue || ' ' || config_hash
        from queen_streams.queries order by name limit 1";
    assert_eq!(broker.row(stored, &[]).await.get::<_, String>(0), "daily q out hash");
}

#[tokio::test]
async fn another_configuration_is_refused_until_a_reset_deletes_the_state() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let (reset, kept) = (query(&broker, "reset").await, query(&broker, "kept").await);
    for id in [reset, kept] {
        commit(&broker, &with(&idle(id, &lane), json!({"state_ops": [upsert("k", &json!(1))]}))).await;
    }
    let (status, refused) = register(&broker, "reset", "other", false).await;
    assert_eq!((status, &refused["success"]), (409, &json!(false)), "{refused}");
    assert!(refused["error"].as_str().expect("a text").contains("config_hash"), "{refused}");
    assert_eq!(state(&broker, reset, &lane, json!({})).await.len(), 1, "nothing went");

    let (status, done) = register(&broker, "reset", "other", true).await;
    let expected = json!({"success": true, "query_id": reset, "name": "reset", "config_hash": "other", "fresh": false, "reset": true});
    assert_eq!((status, done), (200, expected));
    assert_eq!(state(&broker, reset, &lane, json!({})).await, []);
    assert_eq!(state(&broker, kept, &lane, json!({})).await.len(), 1, "another query's");
    assert_eq!(register(&broker, "reset", "hash", false).await.0, 409, "the new hash is the one that counts");
}

#[tokio::test]
async fn a_reset_deletes_the_state_also_of_the_same_configuration() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let id = query(&broker, "s").await;
    commit(&broker, &with(&idle(id, &lane), json!({"state_ops": [upsert("k", &json!(1))]}))).await;
    let (_, body) = register(&broker, "s", "hash", true).await;
    assert_eq!((&body["fresh"], &body["reset"]), (&json!(false), &json!(true)));
    assert_eq!(state(&broker, id, &lane, json!({})).await, []);
    let (_, body) = register(&broker, "new", "hash", true).await;
    assert_eq!((&body["fresh"], &body["reset"]), (&json!(true), &json!(false)), "nothing to reset");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_that_register_at_once_get_one_query() {
    let broker = Broker::start().await;
    let all = futures_util::future::join_all((0..50).map(|_| register(&broker, "s", "hash", false))).await;
    let fresh = all.iter().filter(|(_, body)| body["fresh"] == true).count();
    assert_eq!(fresh, 1);
    let ids: std::collections::BTreeSet<_> = all.iter().map(|(_, body)| body["query_id"].to_string()).collect();
    assert_eq!(ids.len(), 1, "{ids:?}");
}

#[tokio::test]
async fn what_is_wrong_is_named() {
    let broker = Broker::start().await;
    let valid = json!({"name": "s", "source_queue": "q", "config_hash": "h"});
    let long = "x".repeat(256);
    for (field, value) in [
        ("name", json!(null)),
        ("name", json!("")),
        ("name", json!(7)),
        ("name", json!(long)),
        ("name", json!("a\u{1f}b")),
        ("source_queue", json!("")),
        ("source_queue", json!(long)),
        ("config_hash", json!(null)),
        ("config_hash", json!(long)),
        ("sink_queue", json!(["x"])),
        ("sink_queue", json!(long)),
        ("reset", json!("yes")),
    ] {
        let (status, body) = broker.post("/streams/v1/queries", with(&valid, json!({ field: value }))).await;
        assert_eq!((status, &body["success"]), (400, &json!(false)), "{field}: {body}");
        assert!(body["error"].as_str().expect("a text").starts_with(field), "{field}: {body}");
    }
    for body in ["", "[]", "{", "7"] {
        let (status, body) = broker.post_raw("/streams/v1/queries", body).await;
        assert_eq!((status, &body["success"]), (400, &json!(false)), "{body}");
    }
    let stored: i64 = broker.row("select count(*) from queen_streams.queries", &[]).await.get(0);
    assert_eq!(stored, 0);
}
