//! Values by key: what each operation answers, what a batch is, and what nobody sees.

#[path = "../support/mod.rs"]
mod support;

mod batch;
mod cost;
mod model;
mod single;

use serde_json::{Value, json};
use support::Broker;

/// Carries out `operations` and returns their results.
async fn run(broker: &Broker, operations: Value) -> Vec<Value> {
    let (status, body) = broker.post("/api/v1/kv", json!({"operations": operations})).await;
    assert_eq!(status, 200, "{body}");
    let results = body["results"].as_array().expect("results").clone();
    assert_eq!(results.len(), operations.as_array().expect("a list").len());
    results
}

/// Carries out one operation.
async fn one(broker: &Broker, operation: Value) -> Value {
    run(broker, json!([operation])).await.remove(0)
}

fn put(key: &str, value: Value) -> Value {
    json!({"op": "put", "ns": "n", "key": key, "value": value, "forever": true})
}

fn get(key: &str) -> Value {
    json!({"op": "get", "ns": "n", "key": key})
}

fn incr(key: &str, delta: Value) -> Value {
    json!({"op": "incr", "ns": "n", "key": key, "delta": delta, "ttlSeconds": 100})
}

/// `operation` with more fields.
fn with(mut operation: Value, more: Value) -> Value {
    operation.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    operation
}

/// Lets a key expire, as its time to live would.
async fn expire(broker: &Broker, key: &str) {
    let query = "update queen.kv set expires_at = now() - interval '1 second' where key = $1";
    assert_eq!(broker.execute(query, &[&key]).await, 1);
}

#[tokio::test]
async fn a_value_comes_back_with_its_version_and_times() {
    let broker = Broker::start().await;
    let written = one(&broker, put("k", json!({"a": 1}))).await;
    assert_eq!((&written["applied"], &written["key"], &written["op"]), (&json!(true), &json!("k"), &json!("put")));
    assert_eq!((&written["value"], written.get("reason")), (&json!({"a": 1}), None));
    let version = written["version"].as_i64().expect("a version");
    assert!(0 < version);
    let read = one(&broker, get("k")).await;
    assert_eq!((&read["found"], &read["value"], &read["version"]), (&json!(true), &json!({"a": 1}), &json!(version)));
    assert_eq!((&read["index"], &read["expiresAt"]), (&json!(0), &Value::Null));
    assert_eq!(read["updatedAt"].as_str().expect("a time").len(), "2026-01-01T00:00:00.000000Z".len());

    let again = one(&broker, with(put("k", Value::Null), json!({"ttlSeconds": 60, "forever": null}))).await;
    assert!(version < again["version"].as_i64().expect("a version"), "each write has a version of its own");
    let read = one(&broker, get("k")).await;
    assert_eq!((&read["found"], &read["value"]), (&json!(true), &Value::Null), "null is a value");
    assert!(read["expiresAt"].is_string(), "{read}");

    let missing = one(&broker, get("other")).await;
    assert_eq!((&missing["found"], &missing["value"]), (&json!(false), &Value::Null));
    let other = json!({"op": "get", "ns": "m", "key": "k"});
    assert_eq!(one(&broker, other).await["found"], false, "in another namespace");
}

#[tokio::test]
async fn values_survive_byte_for_byte() {
    let broker = Broker::start().await;
    let value = r#"{"b": 1.0,  "a":"\u0000é\ud800", "a": 12345678901234567890.10e-3}"#;
    let body = format!(r#"[{{"op":"put","ns":"n","key":"k","value":{value},"forever":true}}]"#);
    let request = broker.request(reqwest::Method::POST, "/api/v1/kv").body(body);
    assert!(request.send().await.expect("answers").text().await.expect("a body").contains(value), "a bare list");
    let stored: String = broker.row("select value from queen.kv", &[]).await.get(0);
    assert_eq!(stored, value);
    let (_, bytes) = broker.get_bytes("/api/v1/kv/n/k").await;
    assert!(String::from_utf8(bytes).expect("text").contains(value));
}

#[tokio::test]
async fn a_condition_on_the_version_holds_or_nothing_happens() {
    let broker = Broker::start().await;
    let version = one(&broker, put("k", json!(1))).await["version"].clone();
    let expecting = |version: &Value| with(put("k", json!(2)), json!({"expect": version}));
    let wrong = one(&broker, expecting(&json!(version.as_i64().expect("a number") + 1000))).await;
    assert_eq!((&wrong["applied"], &wrong["reason"]), (&json!(false), &json!("version")));
    assert_eq!((&wrong["value"], &wrong["version"]), (&json!(1), &version), "what is there instead");
    assert_eq!(one(&broker, expecting(&version)).await["applied"], true);
    assert_eq!(one(&broker, expecting(&version)).await["reason"], "version", "an old version");
    assert_eq!(one(&broker, expecting(&json!(0))).await["reason"], "exists");

    let absent = one(&broker, with(put("new", json!(2)), json!({"expect": 7}))).await;
    assert_eq!(
        (&absent["applied"], &absent["reason"], &absent["version"]),
        (&json!(false), &json!("absent"), &json!(0))
    );
    assert_eq!(one(&broker, get("new")).await["found"], false, "it creates nothing");
    assert_eq!(broker.row("select count(*) from queen.kv", &[]).await.get::<_, i64>(0), 1);
    assert_eq!(one(&broker, with(put("new", json!(2)), json!({"expect": 0}))).await["applied"], true);
}

#[tokio::test]
async fn deleting_says_whether_there_was_something() {
    let broker = Broker::start().await;
    let delete = json!({"op": "delete", "ns": "n", "key": "k"});
    let version = one(&broker, put("k", json!(1))).await["version"].clone();
    let wrong = one(&broker, with(delete.clone(), json!({"expect": version.as_i64().expect("a number") + 1}))).await;
    assert_eq!((&wrong["applied"], &wrong["reason"]), (&json!(false), &json!("version")));
    assert_eq!(one(&broker, with(delete.clone(), json!({"expect": version}))).await["applied"], true);
    let again = one(&broker, delete).await;
    assert_eq!((&again["applied"], &again["reason"]), (&json!(false), &json!("absent")));
    assert_eq!(broker.row("select count(*) from queen.kv", &[]).await.get::<_, i64>(0), 0);
}

#[tokio::test]
async fn numbers_are_added_exactly_and_within_their_bounds() {
    let broker = Broker::start().await;
    for expected in ["0.1", "0.2", "0.3"] {
        let sum = one(&broker, incr("f", json!(0.1))).await;
        assert_eq!(sum["value"].to_string(), expected);
    }
    assert_eq!(one(&broker, incr("i", json!(5))).await["value"], 5);
    let bounded = |delta: i64| with(incr("i", json!(delta)), json!({"min": 0, "max": 6}));
    assert_eq!(one(&broker, bounded(1)).await["value"], 6, "the bound itself is allowed");
    let over = one(&broker, bounded(1)).await;
    assert_eq!((&over["applied"], &over["reason"], &over["value"]), (&json!(false), &json!("limit"), &json!(6)));
    assert_eq!(one(&broker, bounded(-7)).await["reason"], "limit");
    assert_eq!(one(&broker, get("i")).await["value"], 6, "nothing was spent");

    let first = one(&broker, with(incr("new", json!(11)), json!({"max": 10}))).await;
    assert_eq!((&first["applied"], &first["reason"]), (&json!(false), &json!("limit")));
    assert_eq!(one(&broker, get("new")).await["found"], false, "a refused first one creates nothing");

    one(&broker, put("text", json!("5"))).await;
    let typed = one(&broker, incr("text", json!(1))).await;
    assert_eq!((&typed["applied"], &typed["reason"], &typed["value"]), (&json!(false), &json!("type"), &json!("5")));
    let huge = r#"[{"op": "put", "ns": "n", "key": "huge", "value": 1e9999, "forever": true}]"#;
    assert_eq!(broker.post_raw("/api/v1/kv", huge).await.0, 200);
    let (_, body) = broker.post("/api/v1/kv", json!([incr("huge", json!(1))])).await;
    // No number that the test's own parser takes, so that the answer stays a text here.
    assert!(body.as_str().expect("a text").contains(r#""reason":"type""#), "{body}");
}

#[tokio::test]
async fn the_time_to_live_of_a_number_counts_from_its_creation() {
    let broker = Broker::start().await;
    one(&broker, incr("k", json!(1))).await;
    let first = one(&broker, get("k")).await["expiresAt"].clone();
    one(&broker, with(incr("k", json!(1)), json!({"ttlSeconds": 5000}))).await;
    assert_eq!(one(&broker, get("k")).await["expiresAt"], first);
    expire(&broker, "k").await;
    let fresh = one(&broker, incr("k", json!(1))).await;
    assert_eq!((&fresh["value"], &fresh["applied"]), (&json!(1), &json!(true)), "from zero again");
    assert_ne!(one(&broker, get("k")).await["expiresAt"], first);
    one(&broker, put("k", json!("text"))).await;
    expire(&broker, "k").await;
    assert_eq!(one(&broker, incr("k", json!(2))).await["value"], 2, "what has expired has no type");
}

#[tokio::test]
async fn what_has_expired_does_not_exist() {
    let broker = Broker::start().await;
    for key in ["a", "b", "c", "d", "e"] {
        one(&broker, put(key, json!(1))).await;
        expire(&broker, key).await;
    }
    one(&broker, put("live", json!(1))).await;
    assert_eq!(one(&broker, get("a")).await["found"], false);
    let many = one(&broker, json!({"op": "getMany", "ns": "n", "keys": ["a", "live"]})).await;
    assert_eq!((many["rows"].as_array().map(Vec::len), &many["missing"]), (Some(1), &json!(["a"])));
    let page = one(&broker, json!({"op": "getPrefix", "ns": "n", "prefix": "a"})).await;
    assert_eq!(page["rows"], json!([]));
    assert_eq!(one(&broker, json!({"op": "delete", "ns": "n", "key": "a"})).await["reason"], "absent");
    assert_eq!(one(&broker, with(put("b", json!(2)), json!({"expect": 9}))).await["reason"], "absent");
    assert_eq!(one(&broker, with(put("b", json!(2)), json!({"expect": 0}))).await["applied"], true);
    let absent = json!({"op": "putIfAbsent", "ns": "n", "key": "c", "value": 3, "ttlSeconds": 9});
    assert_eq!(one(&broker, absent.clone()).await["applied"], true);
    let second = one(&broker, with(absent, json!({"value": 4}))).await;
    assert_eq!((&second["applied"], &second["reason"], &second["value"]), (&json!(false), &json!("exists"), &json!(3)));
}

#[tokio::test]
async fn the_expiry_is_reached_at_its_microsecond() {
    let broker = Broker::start().await;
    broker
        .execute(
            "insert into queen.kv (namespace, key, value, version, expires_at, updated_at)
             select 'n', 'k' || d, '1', nextval('queen.kv_version_seq'), '2030-01-01'::timestamptz + d * interval '1 microsecond',
                 now()
             from generate_series(-1, 1) d",
            &[],
        )
        .await;
    let query = "select key from queen.kv k where (queen.kv_write_v1(
            jsonb_build_object('op', 'put', 'ns', 'n', 'key', k.key, 'value', '2', 'expect', 0, 'required', false),
            0, k.tenant_id, '2030-01-01') ->> 'applied')::boolean order by key";
    let absent: Vec<String> = broker.rows(query, &[]).await.iter().map(|row| row.get(0)).collect();
    assert_eq!(absent, ["k-1", "k0"], "expired before the time and at it");
}

#[tokio::test]
async fn keys_are_read_in_the_order_asked_for_and_pages_in_byte_order() {
    let broker = Broker::start().await;
    for key in ["p:b", "p:B", "p:a", "p:é", "p:%", "p:_", "p", "q:a", "P:a"] {
        one(&broker, put(key, json!(key))).await;
    }
    let many = one(&broker, json!({"op": "getMany", "ns": "n", "keys": ["q:a", "none", "p:a"]})).await;
    let keys = |result: &Value| -> Vec<String> {
        let rows = result["rows"].as_array().expect("rows").iter();
        rows.map(|row| row["key"].as_str().expect("a key").to_owned()).collect()
    };
    assert_eq!(keys(&many), ["q:a", "p:a"]);
    assert_eq!((&many["missing"], &many["truncated"]), (&json!(["none"]), &json!(false)));

    let page = |more: Value| with(json!({"op": "getPrefix", "ns": "n", "prefix": "p:"}), more);
    let all = one(&broker, page(json!({}))).await;
    assert_eq!(keys(&all), ["p:%", "p:B", "p:_", "p:a", "p:b", "p:é"]);
    assert_eq!((&all["truncated"], &all["nextAfter"]), (&json!(false), &Value::Null));
    let first = one(&broker, page(json!({"limit": 2, "keysOnly": true}))).await;
    assert_eq!(
        (keys(&first), &first["truncated"], &first["nextAfter"]),
        (vec!["p:%".into(), "p:B".into()], &json!(true), &json!("p:B"))
    );
    assert!(first["rows"][0].get("value").is_none(), "only keys");
    let next = one(&broker, page(json!({"after": "p:B", "limit": 4}))).await;
    assert_eq!((keys(&next).len(), &next["truncated"]), (4, &json!(false)), "exactly as many as there are");
    for limit in [0, -5, 1] {
        assert_eq!(keys(&one(&broker, page(json!({"limit": limit}))).await).len(), 1, "{limit}");
    }
    assert_eq!(keys(&one(&broker, page(json!({"limit": 1_000_000_000_000_i64}))).await).len(), 6);
    assert_eq!(keys(&one(&broker, json!({"op": "getPrefix", "ns": "n", "prefix": "%"})).await).len(), 0, "no wildcard");
}

#[tokio::test]
async fn pages_are_bounded_in_bytes_and_say_so() {
    let broker = Broker::start().await;
    broker
        .execute(
            "insert into queen.kv (namespace, key, value, version, updated_at)
             select 'n', 'k' || to_char(g, 'FM000'), '\"' || repeat('x', 60000) || '\"', nextval('queen.kv_version_seq'), now()
             from generate_series(0, 199) g",
            &[],
        )
        .await;
    let mut after = Value::Null;
    let (mut seen, mut pages) = (0, 0);
    loop {
        let page =
            one(&broker, json!({"op": "getPrefix", "ns": "n", "prefix": "k", "limit": 1000, "after": after})).await;
        let rows = page["rows"].as_array().expect("rows").len();
        assert!(0 < rows && rows <= 69, "{rows} rows of 60 kB within 4 MiB");
        (seen, pages) = (seen + rows, pages + 1);
        if page["truncated"] == false {
            break;
        }
        after = page["nextAfter"].clone();
    }
    assert_eq!((seen, pages), (200, 3));
    let keys: Vec<String> = (0..200).map(|n| format!("k{n:03}")).collect();
    let many = one(&broker, json!({"op": "getMany", "ns": "n", "keys": keys})).await;
    assert_eq!((&many["truncated"], &many["missing"]), (&json!(true), &json!([])), "what was left out is not missing");
    // All lists of a call share the bytes, and each has a row.
    let page = json!({"op": "getPrefix", "ns": "n", "prefix": "k", "limit": 1000});
    let pages = run(&broker, json!([page, page, page])).await;
    let rows: Vec<usize> = pages.iter().map(|page| page["rows"].as_array().expect("rows").len()).collect();
    assert_eq!(rows[1..], [1, 1], "{rows:?}");
}

#[tokio::test]
async fn bad_requests_are_refused_by_code_and_name() {
    let broker = Broker::start().await;
    let big = "x".repeat(65_536);
    for (operations, status, code, words) in [
        (json!([{"op": "get", "ns": "Bad Space", "key": "k"}]), 400, "kv_bad_request", "ns"),
        (json!([{"op": "get", "ns": "n", "key": ""}]), 400, "kv_bad_request", "key"),
        (json!([{"op": "get", "ns": "n", "key": "é".repeat(257)}]), 400, "kv_bad_request", "512"),
        (json!([]), 400, "kv_bad_request", "operations"),
        (json!({"a": 1}), 400, "kv_bad_request", "operations"),
        (json!([put("k", json!(big))]), 413, "payload_too_large", "65536"),
        (json!([put("k", json!(1)), incr("k", json!(1))]), 400, "kv_bad_request", "already"),
    ] {
        let (found, body) = broker.post("/api/v1/kv", json!({"operations": operations})).await;
        assert_eq!((found, &body["error"]), (status, &json!(code)), "{body}");
        assert!(body["detail"].as_str().expect("words").contains(words), "{body}");
    }
    let (_, body) = broker.post("/api/v1/kv", json!([{"op": "put", "ns": "n", "key": "k", "value": 1}])).await;
    assert_eq!((&body["error"], &body["reason"]), (&json!("kv_bad_request"), &json!("kv_expiry_not_specified")));
    let (_, body) = broker.post("/api/v1/kv", json!([put("k", json!(1)), put("k", json!(1))])).await;
    assert_eq!(body["reason"], "kv_duplicate_key_in_call");
    for raw in ["", "{", "7", "{\"operations\": 7}", "{\"operations\": [], \"more\": 1}"] {
        let (status, body) = broker.post_raw("/api/v1/kv", raw).await;
        assert_eq!((status, &body["error"]), (400, &json!("kv_bad_request")), "{raw}: {body}");
    }
    let edge = one(&broker, put(&"k".repeat(512), json!("x".repeat(65_534)))).await;
    assert_eq!(edge["applied"], true, "the limits themselves are allowed");
}

#[tokio::test]
async fn paused_by_an_operator_nothing_is_read_or_written() {
    let broker = Broker::start().await;
    let (status, body) = broker.post("/api/v1/system/kv-timers", json!({"kv": false})).await;
    assert_eq!((status, &body["kvEnabled"], &body["timersFireEnabled"]), (200, &json!(false), &json!(true)));
    let (status, body) = broker.post("/api/v1/kv", json!([get("k")])).await;
    assert_eq!((status, &body["error"]), (503, &json!("kv_disabled")));
    let (status, body) =
        broker.post("/api/v1/transaction", json!({"operations": [], "kv": [put("k", json!(1))]})).await;
    assert_eq!((status, &body["code"], &body["reason"]), (403, &json!("kv_disabled"), &json!("kv_disabled")), "{body}");
    assert_eq!(broker.get("/api/v1/system/kv-timers").await.1["kvEnabled"], false);
    for wrong in [json!({}), json!({"kv": 1}), json!({"other": true})] {
        assert_eq!(broker.post("/api/v1/system/kv-timers", wrong.clone()).await.0, 400, "{wrong}");
    }
    broker.post("/api/v1/system/kv-timers", json!({"kv": true})).await;
    assert_eq!(one(&broker, put("k", json!(1))).await["applied"], true);
}
