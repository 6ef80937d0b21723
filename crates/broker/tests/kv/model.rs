//! Random batches against an in-memory twin.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::run;
use super::support::Broker;
use super::support::random::Random;

const BATCHES: usize = 150;
const KEYS: i64 = 6;

#[derive(Default)]
struct Twin {
    values: BTreeMap<String, (Value, i64)>,
    newest: i64,
}

impl Twin {
    /// What the operation has to answer; the version of a write that applies is taken from `found`.
    fn check(&mut self, operation: &Value, found: &Value) {
        let key = operation["key"].as_str().unwrap_or_default().to_owned();
        let stored = self.values.get(&key).cloned();
        match operation["op"].as_str().expect("an operation") {
            "get" => {
                assert_eq!(found["found"], stored.is_some(), "{operation} {found}");
                assert_eq!(found["value"], stored.map_or(Value::Null, |(value, _)| value), "{operation}");
            }
            "getPrefix" => {
                let rows = found["rows"].as_array().expect("rows").iter();
                let rows: Vec<(String, Value)> =
                    rows.map(|row| (row["key"].as_str().expect("a key").to_owned(), row["value"].clone())).collect();
                let expected: Vec<(String, Value)> =
                    self.values.iter().map(|(key, (value, _))| (key.clone(), value.clone())).collect();
                assert_eq!(rows, expected, "{operation}");
            }
            kind => {
                let refusal = refusal(kind, operation, stored.as_ref());
                assert_eq!(found.get("reason").and_then(Value::as_str), refusal, "{operation} {found} {stored:?}");
                assert_eq!(found["applied"], refusal.is_none());
                if refusal.is_none() {
                    self.apply(kind, key, operation, found, stored.as_ref());
                } else {
                    let version = stored.as_ref().map_or(0, |(_, version)| *version);
                    assert_eq!(found["version"], version, "{operation}");
                }
            }
        }
    }

    fn apply(&mut self, kind: &str, key: String, operation: &Value, found: &Value, stored: Option<&(Value, i64)>) {
        if kind == "delete" {
            self.values.remove(&key);
            return;
        }
        let value = match kind {
            "incr" => {
                let old = stored.map_or(0, |(value, _)| value.as_i64().expect("checked"));
                json!(old + operation["delta"].as_i64().expect("a number"))
            }
            _ => operation["value"].clone(),
        };
        assert_eq!(found["value"], value, "{operation}");
        let version = found["version"].as_i64().expect("a version");
        assert!(self.newest < version, "versions grow: {found}");
        self.newest = version;
        self.values.insert(key, (value, version));
    }
}

fn refusal(kind: &str, operation: &Value, stored: Option<&(Value, i64)>) -> Option<&'static str> {
    let expect = if kind == "putIfAbsent" { Some(0) } else { operation["expect"].as_i64() };
    match (kind, stored, expect) {
        ("incr", Some((value, _)), _) if !value.is_i64() => Some("type"),
        ("incr", _, _) => {
            let sum = stored.map_or(0, |(value, _)| value.as_i64().expect("a number"))
                + operation["delta"].as_i64().expect("a number");
            (operation["max"].as_i64().expect("a number") < sum).then_some("limit")
        }
        ("delete", None, _) => Some("absent"),
        (_, Some(_), Some(0)) => Some("exists"),
        (_, None, Some(0)) | (_, _, None) => None,
        (_, None, Some(_)) => Some("absent"),
        (_, Some((_, version)), Some(expect)) => (*version != expect).then_some("version"),
    }
}

fn operation(random: &mut Random, key: &str, twin: &Twin) -> Value {
    let expiry = || if is_even(key) { json!({"ttlSeconds": 1000}) } else { json!({"forever": true}) };
    let mut operation = match random.below(7) {
        0 => json!({"op": "get"}),
        1 => json!({"op": "putIfAbsent", "value": random.below(100)}),
        2 | 3 => {
            json!({"op": "put", "value": if random.below(3) == 0 { json!("text") } else { json!(random.below(100)) }})
        }
        4 => json!({"op": "delete"}),
        _ => json!({"op": "incr", "delta": random.below(20) - 8, "max": 60}),
    };
    let kind = operation["op"].as_str().expect("a text").to_owned();
    if matches!(kind.as_str(), "put" | "delete") && random.below(2) == 0 {
        let current = twin.values.get(key).map_or(0, |(_, version)| *version);
        operation["expect"] = json!(if random.below(2) == 0 { current } else { random.below(twin.newest + 2) });
    }
    if matches!(kind.as_str(), "put" | "putIfAbsent" | "incr") {
        operation.as_object_mut().expect("an object").extend(expiry().as_object().expect("an object").clone());
    }
    operation["ns"] = json!("n");
    operation["key"] = json!(key);
    operation
}

fn is_even(key: &str) -> bool {
    key.len().is_multiple_of(2)
}

#[tokio::test]
async fn random_batches_answer_as_the_twin_says() {
    let broker = Broker::start().await;
    let mut random = Random::seeded();
    let mut twin = Twin::default();
    for _ in 0..BATCHES {
        let mut keys: Vec<String> = (0..KEYS).map(|n| "k".repeat(usize::try_from(n + 1).expect("small"))).collect();
        random.shuffle(&mut keys);
        keys.truncate(usize::try_from(1 + random.below(KEYS)).expect("small"));
        let mut operations: Vec<Value> = keys.iter().map(|key| operation(&mut random, key, &twin)).collect();
        operations.push(json!({"op": "getPrefix", "ns": "n", "prefix": "k"}));
        let results = run(&broker, json!(operations)).await;
        for (operation, found) in operations.iter().zip(&results) {
            twin.check(operation, found);
        }
    }
}
