//! Segments of the path and query parameters that are not what the document says: 400, by name.

use serde_json::Value;

use crate::schema::{Document, Operation, kind};
use crate::support::Broker;

/// What a query has to say anyway, so that nothing but the wrong parameter is wrong.
const NEEDED: &[(&str, &str)] = &[
    ("GET /api/v1/pop", "task=t"),
    ("DELETE /api/v1/dlq", "queue=q"),
    ("POST /api/v1/dlq/replay", "queue=q"),
    ("GET /api/v1/ephemeral/pop", "queue=q"),
];

/// Segments that any text may fill: what was given out in another form is simply not there.
const ANY_TEXT: &[&str] = &["leaseId"];

/// Values, escaped, that a parameter of this schema cannot have.
fn wrong(schema: &Value) -> Vec<String> {
    let text = |values: &[&str]| values.iter().map(|value| (*value).to_owned()).collect::<Vec<_>>();
    if schema["enum"].is_array() {
        return text(&["other", "%F0%9F%A6%80"]);
    }
    match kind(schema) {
        "integer" => {
            let (low, high) = (&schema["minimum"], &schema["maximum"]);
            let mut values = text(&["abc", "1.5", "1e3", "0x10", "-", "%EF%BC%91", "9223372036854775808"]);
            values.push("-9223372036854775809".to_owned());
            values.extend(low.as_i64().map(|low| (low - 1).to_string()));
            values.extend(high.as_i64().map(|high| (high + 1).to_string()));
            values
        }
        "boolean" => text(&["maybe", "2", "yes"]),
        "string" if schema["format"] == "date-time" => text(&["yesterday", "2026-13-01T00:00:00Z", "%00"]),
        "string" if schema["format"] == "uuid" => text(&["x", "%00", "%F0%9F%A6%80"]),
        "string" if schema["maxLength"] == 255 => {
            vec!["a".repeat(256), "%C3%A9".repeat(256), "%00".to_owned(), "a%1F".to_owned()]
        }
        "string" if schema["maxLength"].is_number() => text(&["%00", "a%1F"]),
        _ => Vec::new(),
    }
}

/// Fails unless the answer is a 400 that names the parameter.
fn refused(operation: &Operation<'_>, path: &str, name: &str, (status, answer): (u16, Value)) {
    let shown = &path[..path.len().min(200)];
    assert_eq!(status, 400, "{} {shown}: {answer}", operation.method);
    // Where `error` is a code, the words are beside it.
    let error = answer["detail"].as_str().or(answer["error"].as_str()).unwrap_or_default();
    assert!(error.contains(name), "{} {shown}: names {name}: {answer}", operation.method);
}

#[tokio::test]
async fn a_wrong_query_parameter_is_named_on_every_route() {
    let broker = Broker::start().await;
    let document = Document::of(&broker).await;
    let mut tried = 0;
    for operation in document.operations() {
        let needed = NEEDED.iter().find(|(route, _)| *route == operation.name()).map_or("", |(_, query)| query);
        for (name, schema) in operation.parameters("query") {
            for value in wrong(schema) {
                let path = format!("{}?{needed}&{name}={value}", operation.path_with(None));
                refused(&operation, &path, name, operation.send(&broker, &path, None).await);
                tried += 1;
            }
            // Two names must not become one by replacing what is no text in them.
            let path = format!("{}?{needed}&{name}=%FF", operation.path_with(None));
            refused(&operation, &path, "query", operation.send(&broker, &path, None).await);
        }
    }
    assert!(300 < tried, "{tried} requests");
}

#[tokio::test]
async fn a_wrong_segment_of_the_path_is_refused_on_every_route() {
    let broker = Broker::start().await;
    let document = Document::of(&broker).await;
    let mut tried = 0;
    for operation in document.operations() {
        let body = operation.body().map(|schema| document.sample(schema).to_string());
        for (name, schema) in operation.parameters("path").into_iter().filter(|(name, _)| !ANY_TEXT.contains(name)) {
            for value in wrong(schema).into_iter().chain(["%FF".to_owned()]) {
                let path = operation.path_with(Some((name, &value)));
                let (status, answer) = operation.send(&broker, &path, body.clone()).await;
                let shown = &path[..path.len().min(200)];
                assert_eq!(status, 400, "{} {shown}: {answer}", operation.method);
                assert!(answer["error"].as_str().is_some_and(|error| !error.is_empty()), "{shown}: {answer}");
                tried += 1;
            }
        }
    }
    assert!(50 < tried, "{tried} requests");
}

#[tokio::test]
async fn the_ends_of_a_range_are_within_it() {
    let broker = Broker::start().await;
    let document = Document::of(&broker).await;
    for operation in document.operations().into_iter().filter(|operation| operation.method == "GET") {
        let needed = NEEDED.iter().find(|(route, _)| *route == operation.name()).map_or("", |(_, query)| query);
        for (name, schema) in operation.parameters("query").into_iter().filter(|(_, schema)| kind(schema) == "integer")
        {
            for end in [&schema["minimum"], &schema["maximum"]].into_iter().filter(|end| end.is_number()) {
                let path = format!("{}?{needed}&{name}={end}", operation.path_with(None));
                let (status, answer) = operation.send(&broker, &path, None).await;
                assert!(status < 300 || status == 404, "{path}: {status} {answer}");
            }
        }
    }
}

/// Without this, a route that refuses everything would pass the other tests.
#[tokio::test]
async fn a_request_with_nothing_wrong_is_not_called_wrong() {
    let broker = Broker::start().await;
    let document = Document::of(&broker).await;
    for operation in document.operations() {
        let body = operation.body().map(|schema| document.sample(schema).to_string());
        let needed = NEEDED.iter().find(|(route, _)| *route == operation.name() && body.is_none());
        let path = format!("{}?{}", operation.path_with(None), needed.map_or("", |(_, query)| query));
        let (status, answer) = operation.send(&broker, &path, body).await;
        assert!(status != 400 && status < 500, "{}: {status} {answer}", operation.name());
    }
}
