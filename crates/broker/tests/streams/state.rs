//! State comes back as it was sent, and only what was asked for.

use serde_json::{Value, json};

use super::support::Broker;
use super::support::lane::Lane;
use super::{commit, delete, idle, query, register, state, upsert, with};

fn keys(rows: &[(String, Value)]) -> Vec<&str> {
    rows.iter().map(|(key, _)| key.as_str()).collect()
}

#[tokio::test]
async fn keys_and_values_survive_byte_for_byte() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let id = query(&broker, "s").await;
    let odd = r#"{ "b": 1.0, "a": "\u0000\ud800", "b": 123456789012345678901234567890, "windowEnd": 7 }"#;
    let longest = "k".repeat(2048);
    let body = format!(
        r#"{{"query_id": "{id}", "partition_id": "{}", "state_ops": [
            {{"type": "upsert", "key": "tumb:1\u001fw\u001fu", "value": {odd}}},
            {{"type": "upsert", "key": "nul\u0000l", "value": null}},
            {{"type": "upsert", "key": "", "value": [ 1,  2 ]}},
            {{"type": "upsert", "key": "🦀'\"\\%", "value": "\u001f"}},
            {{"type": "upsert", "key": "{longest}", "value": -0}}]}}"#,
        lane.id
    );
    let (status, answer) = broker.post_raw("/streams/v1/cycle", body).await;
    assert_eq!((status, &answer["state_ops_applied"]), (200, &json!(5)), "{answer}");
    let body = json!({"query_id": id, "partition_id": lane.id});
    let request = broker.request(reqwest::Method::POST, "/streams/v1/state/get").json(&body);
    let answer = request.send().await.expect("answers").text().await.expect("text");
    for value in [odd, r#""value":[ 1,  2 ]"#, r#""value":null"#, r#""value":"\u001f""#, r#""value":-0"#] {
        assert!(answer.contains(value), "{value} in {answer}");
    }
    // No parser of JSON text takes half of a surrogate pair.
    let parsed: Value = serde_json::from_str(&answer.replace("\\ud800", "")).expect("JSON");
    let stamp = parsed["rows"][0]["updated_at"].as_str().expect("a time");
    assert!(stamp.len() == 27 && stamp.ends_with('Z'), "microseconds, fixed width: {stamp}");
    let keys: Vec<&str> =
        parsed["rows"].as_array().expect("rows").iter().map(|row| row["key"].as_str().expect("a key")).collect();
    assert_eq!(keys, ["", longest.as_str(), "nul\0l", "tumb:1\u{1f}w\u{1f}u", "🦀'\"\\%"]);
    let one = state(&broker, id, &lane, json!({"keys": ["nul\0l", "not there"]})).await;
    assert_eq!(one, [("nul\0l".to_owned(), Value::Null)]);
}

#[tokio::test]
async fn filters_hold_together_and_prefixes_are_literal() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let id = query(&broker, "s").await;
    let window = |end: Value| json!({"acc": 1, "windowEnd": end});
    let ops = json!([
        upsert("a%b", &window(json!(10))),
        upsert("a%c", &window(json!(10.5))),
        upsert("a_b", &window(json!(5))),
        upsert("axb", &window(json!("5"))),
        upsert("b\u{10ffff}", &json!([{"windowEnd": 1}])),
        upsert("b\u{10ffff}\u{10ffff}", &window(json!(-1))),
    ]);
    commit(&broker, &with(&idle(id, &lane), json!({"state_ops": ops}))).await;
    for (which, expected) in [
        (json!({}), vec!["a%b", "a%c", "a_b", "axb", "b\u{10ffff}", "b\u{10ffff}\u{10ffff}"]),
        (json!({"key_prefix": ""}), vec!["a%b", "a%c", "a_b", "axb", "b\u{10ffff}", "b\u{10ffff}\u{10ffff}"]),
        (json!({"key_prefix": "a%"}), vec!["a%b", "a%c"]),
        (json!({"key_prefix": "a_"}), vec!["a_b"]),
        (json!({"key_prefix": "b\u{10ffff}"}), vec!["b\u{10ffff}", "b\u{10ffff}\u{10ffff}"]),
        (json!({"key_prefix": "c"}), vec![]),
        (json!({"ripe_at_or_before": 10}), vec!["a%b", "a_b", "b\u{10ffff}\u{10ffff}"]),
        (json!({"ripe_at_or_before": 10.5, "key_prefix": "a%"}), vec!["a%b", "a%c"]),
        (json!({"ripe_at_or_before": 9, "keys": ["a%b", "a_b"]}), vec!["a_b"]),
        (json!({"keys": ["axb", "axb"], "key_prefix": "a", "ripe_at_or_before": null}), vec!["axb"]),
    ] {
        let rows = state(&broker, id, &lane, which.clone()).await;
        assert_eq!(keys(&rows), expected, "{which}");
    }
    // A window that is written again has another end.
    commit(&broker, &with(&idle(id, &lane), json!({"state_ops": [upsert("a_b", &window(json!(50)))]}))).await;
    assert_eq!(keys(&state(&broker, id, &lane, json!({"ripe_at_or_before": 10, "key_prefix": "a"})).await), ["a%b"]);
}

#[tokio::test]
async fn state_is_of_one_query_and_one_partition() {
    let broker = Broker::start().await;
    let (one, other) = (Lane::empty(&broker, "one").await, Lane::empty(&broker, "other").await);
    let (first, second) = (query(&broker, "first").await, query(&broker, "second").await);
    for (n, (id, lane)) in [(first, &one), (first, &other), (second, &one)].into_iter().enumerate() {
        commit(&broker, &with(&idle(id, lane), json!({"state_ops": [upsert("k", &json!(n))]}))).await;
    }
    assert_eq!(state(&broker, first, &one, json!({})).await, [("k".to_owned(), json!(0))]);
    assert_eq!(state(&broker, first, &other, json!({})).await, [("k".to_owned(), json!(1))]);
    assert_eq!(state(&broker, second, &one, json!({})).await, [("k".to_owned(), json!(2))]);
    assert_eq!(state(&broker, second, &other, json!({})).await, []);
    commit(&broker, &with(&idle(first, &one), json!({"state_ops": [delete("k")]}))).await;
    assert_eq!(state(&broker, first, &one, json!({})).await, []);
    assert_eq!(state(&broker, second, &one, json!({})).await.len(), 1);
}

#[tokio::test]
async fn more_than_an_answer_holds_is_refused_and_not_cut_off() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let id = query(&broker, "s").await;
    let insert = "insert into queen_streams.state (query_id, partition_id, key, value)
        select $1, $2, convert_to('k' || lpad(n::text, 6, '0'), 'UTF8'), '1' from generate_series(1, 100001) n";
    broker.execute(insert, &[&id, &lane.id]).await;
    let whole = json!({"query_id": id, "partition_id": lane.id});
    let (status, body) = broker.post("/streams/v1/state/get", whole.clone()).await;
    assert_eq!((status, &body["success"]), (413, &json!(false)));
    assert!(body["error"].as_str().expect("a text").contains("100000 rows"), "{body}");
    assert_eq!(state(&broker, id, &lane, json!({"key_prefix": "k00001"})).await.len(), 10, "a part is answered");
    broker.execute("delete from queen_streams.state where key = 'k100001'", &[]).await;
    assert_eq!(state(&broker, id, &lane, json!({})).await.len(), 100_000, "as many as there may be");

    broker.execute("delete from queen_streams.state", &[]).await;
    let insert = "insert into queen_streams.state (query_id, partition_id, key, value)
        select $1, $2, convert_to(n::text, 'UTF8'), '\"' || repeat('x', 1048574) || '\"' from generate_series(1, 65) n";
    broker.execute(insert, &[&id, &lane.id]).await;
    let (status, body) = broker.post("/streams/v1/state/get", whole).await;
    assert_eq!(status, 413);
    assert!(body["error"].as_str().expect("a text").contains("67108864 bytes"), "{body}");
}

#[tokio::test]
async fn bad_questions_are_named() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let id = query(&broker, "s").await;
    let valid = json!({"query_id": id, "partition_id": lane.id, "keys": []});
    for (field, value) in [
        ("query_id", json!(null)),
        ("query_id", json!("s")),
        ("partition_id", json!(null)),
        ("partition_id", json!("unknown")),
        ("keys", json!("k")),
        ("keys", json!([1])),
        ("keys", json!(vec!["k"; 10_001])),
        ("key_prefix", json!(7)),
        ("ripe_at_or_before", json!("now")),
    ] {
        let (status, body) = broker.post("/streams/v1/state/get", with(&valid, json!({ field: value }))).await;
        assert_eq!((status, &body["success"]), (400, &json!(false)), "{field}: {body}");
        assert!(body["error"].as_str().expect("a text").starts_with(field), "{field}: {body}");
    }
    let huge = format!(r#"{{"query_id": "{id}", "partition_id": "{}", "ripe_at_or_before": 1e999}}"#, lane.id);
    assert_eq!(broker.post_raw("/streams/v1/state/get", huge).await.0, 400);
}

#[tokio::test]
async fn state_goes_with_its_queue_and_keeps_its_partition_from_cleanup() {
    let broker = Broker::start().await;
    let lane = Lane::empty(&broker, "p").await;
    let id = query(&broker, "s").await;
    broker.execute("insert into queen.queues (name) values ('other')", &[]).await;
    let insert = "insert into queen.log_partitions (queue_id, name) select id, 'p' from queen.queues
        where name = 'other' returning id";
    let other = Lane { broker: &broker, id: broker.row(insert, &[]).await.get(0) };
    for lane in [&lane, &other] {
        commit(&broker, &with(&idle(id, lane), json!({"state_ops": [upsert("k", &json!(1)), upsert("l", &json!(2))]})))
            .await;
    }
    broker
        .execute("update queen.log_partitions set created_at = '2020-01-01', last_write_at = '2020-01-01'", &[])
        .await;
    let cleanup = "select (queen.log_partition_cleanup_step_v1(now() - interval '1 day', 10)->>'deleted')::bigint";
    assert_eq!(broker.row(cleanup, &[]).await.get::<_, i64>(0), 0, "state is a veto");

    assert_eq!(broker.delete("/api/v1/resources/queues/q").await.0, 200);
    let left = "select array_agg(distinct partition_id) from queen_streams.state";
    assert_eq!(broker.row(left, &[]).await.get::<_, Vec<uuid::Uuid>>(0), [other.id], "the other queue's is left");
    let (_, body) = register(&broker, "s", "hash", false).await;
    assert_eq!(body["query_id"], json!(id), "the query outlives its source");

    commit(&broker, &with(&idle(id, &other), json!({"state_ops": [delete("k"), delete("l")]}))).await;
    assert_eq!(broker.row(cleanup, &[]).await.get::<_, i64>(0), 1, "and nothing but state was");
}
