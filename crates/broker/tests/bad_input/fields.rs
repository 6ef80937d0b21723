//! Fields of bodies that are not what the document says: 400, by name.

use serde_json::{Map, Value, json};

use crate::schema::{Document, Operation, fields, kind};
use crate::support::Broker;

/// Stands in a body where raw JSON goes that no value of the test's own language can be.
const RAW: &str = "raw JSON";
/// Levels of a body in which fields are looked for.
const DEPTH_MAX: usize = 8;

/// Numbers that may be given as text, since a query can give them too.
const TEXT_COUNTS: &[&str] = &["limit"];

/// Operations that one route knows and another refuses by their kind.
const ELSEWHERE: &[(&str, &str)] = &[("POST /api/v1/transaction", "getPrefix")];

/// JSON that a field of this schema cannot be.
fn wrong(schema: &Value) -> Vec<String> {
    if schema["enum"].is_array() {
        return ["\"other\"", "7", "[]"].map(str::to_owned).into();
    }
    let values: &[&str] = match kind(schema) {
        "string" => &["7", "true", "[]", "{}"],
        "integer" => &["\"7\"", "1.5", "true", "[]", "{}", "1e400", "1e3"],
        "boolean" => &["\"true\"", "1", "[]", "{}"],
        "array" => &["7", "{}", "true"],
        "object" => &["7", "[]", "\"x\""],
        _ => &[], // anything goes
    };
    let mut values: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
    match kind(schema) {
        "string" if schema["format"] == "date-time" => values.extend(["\"yesterday\"".to_owned(), "\"\"".to_owned()]),
        "string" if schema["format"] == "uuid" => values.push("\"x\"".to_owned()),
        "string" if schema["maxLength"] == 255 => {
            values.extend([json!("a".repeat(256)), json!("a\u{1}")].map(|value| value.to_string()));
        }
        "integer" => {
            values.extend(schema["minimum"].as_i64().map(|low| (low - 1).to_string()));
            let above =
                schema["maximum"].as_i64().map(|high| [(high + 1).to_string(), "9223372036854775808".to_owned()]);
            values.extend(above.into_iter().flatten());
        }
        _ => {}
    }
    if schema["minLength"] == 1 {
        values.push("\"\"".to_owned());
    }
    values
}

/// Each field of a body with each wrong value in it, the rest being right: the field's name, and the body.
fn wrong_bodies(document: &Document, schema: &Value, depth: usize) -> Vec<(String, Value, String)> {
    if depth == DEPTH_MAX {
        return Vec::new();
    }
    let choices = document.choices(schema);
    if 1 < choices.len() {
        return choices.into_iter().flat_map(|choice| wrong_bodies(document, choice, depth + 1)).collect();
    }
    let schema = document.resolved(schema);
    if kind(schema) == "array" {
        let inner = wrong_bodies(document, &schema["items"], depth + 1);
        return inner.into_iter().map(|(name, element, raw)| (name, json!([element]), raw)).collect();
    }
    // What all parts of a composition ask for holds for each of their fields.
    let parts: Vec<&Value> = match schema["allOf"].as_array() {
        Some(parts) => parts.iter().map(|part| document.resolved(part)).collect(),
        None => vec![schema],
    };
    let Value::Object(right) = document.sample(schema) else { return Vec::new() };
    let with = |name: &str, value: Value| {
        let mut fields: Map<String, Value> = right.clone();
        fields.insert(name.to_owned(), value);
        Value::Object(fields)
    };
    let mut bodies = Vec::new();
    for (name, field) in parts.into_iter().flat_map(fields) {
        let field = document.resolved(field);
        bodies.extend(wrong(field).into_iter().map(|raw| (name.clone(), with(name, json!(RAW)), raw)));
        let inner = wrong_bodies(document, field, depth + 1);
        bodies.extend(inner.into_iter().map(|(deep, value, raw)| (deep, with(name, value), raw)));
    }
    bodies
}

/// What is said about the request, or about the one element that it has. Where `error` is a code, the words are beside it.
fn complaint(status: u16, answer: &Value) -> Option<&str> {
    match status {
        400 => answer["detail"].as_str().or(answer["error"].as_str()),
        // Acknowledgements are answered one by one.
        200 => answer.get(0).filter(|element| element["success"] == false).and_then(|first| first["error"].as_str()),
        _ => None,
    }
}

/// How many wrong bodies there are, and those that were not refused by name.
async fn try_all(broker: &Broker, document: &Document, operation: &Operation<'_>) -> (usize, Vec<String>) {
    let Some(schema) = operation.body() else { return (0, Vec::new()) };
    let bodies = wrong_bodies(document, schema, 0);
    let (mut tried, mut passed) = (0, Vec::new());
    for (name, body, raw) in bodies {
        if TEXT_COUNTS.contains(&name.as_str()) && raw == "\"7\"" {
            continue;
        }
        if ELSEWHERE.contains(&(operation.name().as_str(), body["kv"][0]["op"].as_str().unwrap_or_default())) {
            continue;
        }
        tried += 1;
        let body = body.to_string().replace(&json!(RAW).to_string(), &raw);
        let (status, answer) = operation.send(broker, &operation.path_with(None), Some(body.clone())).await;
        let named = complaint(status, &answer).is_some_and(|error| error.contains(name.as_str()));
        if !named {
            passed.push(format!("{}: {name} as {raw}: {status} {answer}\n{body}", operation.name()));
        }
    }
    (tried, passed)
}

#[tokio::test]
async fn a_wrong_field_of_a_body_is_named_on_every_route() {
    let broker = Broker::start().await;
    let document = Document::of(&broker).await;
    let (mut tried, mut passed) = (0, Vec::new());
    for operation in document.operations() {
        let (more, through) = try_all(&broker, &document, &operation).await;
        tried += more;
        passed.extend(through);
    }
    assert!(passed.is_empty(), "{}", passed.join("\n"));
    assert!(300 < tried, "{tried} requests");
}

#[tokio::test]
async fn a_body_that_is_no_object_is_refused_on_every_route() {
    let broker = Broker::start().await;
    let document = Document::of(&broker).await;
    for operation in document.operations().iter().filter(|operation| operation.body().is_some()) {
        for body in ["[]", "7", "\"x\"", "{", "{}}", "{\"a\": }", "\u{feff}{}", "nul", "{\"a\": \"\\ud800\"} x"] {
            let (status, answer) = operation.send(&broker, &operation.path_with(None), Some(body.to_owned())).await;
            assert_eq!(status, 400, "{}: {body}: {answer}", operation.name());
            assert!(answer["error"].as_str().is_some_and(|error| !error.is_empty()), "{}: {answer}", operation.name());
        }
    }
}

#[tokio::test]
async fn a_required_field_that_is_missing_is_named_on_every_route() {
    let broker = Broker::start().await;
    let document = Document::of(&broker).await;
    for operation in document.operations() {
        let Some(schema) = operation.body() else { continue };
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            let mut body = document.sample(schema);
            body.as_object_mut().expect("an object").remove(name);
            let path = operation.path_with(None);
            let (status, answer) = operation.send(&broker, &path, Some(body.to_string())).await;
            let named = complaint(status, &answer).is_some_and(|error| error.contains(name));
            assert!(named, "{} without {name}: {status} {answer}", operation.name());
        }
    }
}
