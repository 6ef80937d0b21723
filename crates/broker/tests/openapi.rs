//! The OpenAPI document against the router that it describes.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use support::Broker;

const METHODS: [&str; 8] = ["get", "post", "put", "delete", "patch", "options", "trace", "connect"];

/// Routes that serve what the document lists under other paths, and those paths.
const SERVED_AS: [(&str, &[&str]); 2] = [
    // A group may be called as a list is.
    ("delete /api/v1/consumer-groups/lagging", &["delete /api/v1/consumer-groups/{group}"]),
    // A transaction id may have slashes in it, so the last segment is told apart by the handler.
    (
        "post /api/v1/messages/{partitionId}/{transactionId}",
        &[
            "post /api/v1/messages/{partitionId}/{transactionId}/retry",
            "post /api/v1/messages/{partitionId}/{transactionId}/dlq",
        ],
    ),
];

/// What the router answers, as `method path`. It has no other list of its routes than the one for debugging.
fn served(broker: &Broker) -> BTreeSet<String> {
    let shown = format!("{:?}", ebbtide::http::router(broker.app.clone()));
    let own = shown.split("fallback_router:").next().expect("a first part");
    let mut routes: BTreeMap<u32, (Option<String>, Vec<&str>)> = BTreeMap::new();
    for part in own.split("RouteId(").skip(1) {
        let (id, rest) = part.split_once("): ").expect("an id and what it is of");
        let route = routes.entry(id.parse().expect("a number")).or_default();
        match rest.strip_prefix('"') {
            Some(path) => route.0 = path.split('"').next().map(|path| path.replace("{*", "{")),
            None => route.1.extend(METHODS.iter().filter(|method| rest.contains(&format!(" {method}: Route,")))),
        }
    }
    let routes = routes.into_values().flat_map(|(path, methods)| {
        let path = path.expect("each route has a path");
        assert!(!methods.is_empty(), "{path} has a method");
        methods.into_iter().map(move |method| format!("{method} {path}"))
    });
    let mut served = BTreeSet::new();
    for route in routes {
        match SERVED_AS.iter().find(|(alias, _)| *alias == route) {
            Some((_, listed)) => served.extend(listed.iter().map(|route| (*route).to_owned())),
            None => drop(served.insert(route)),
        }
    }
    served
}

async fn document(broker: &Broker) -> Value {
    let (status, document) = broker.get("/openapi.json").await;
    assert_eq!(status, 200);
    document
}

/// Each operation of the document, by `method path`.
fn operations(document: &Value) -> BTreeMap<String, &Value> {
    let paths = document["paths"].as_object().expect("paths");
    let each = paths.iter().flat_map(|(path, item)| item.as_object().expect("methods").iter().map(move |m| (path, m)));
    each.map(|(path, (method, operation))| (format!("{method} {path}"), operation)).collect()
}

#[tokio::test]
async fn the_document_lists_what_the_router_serves_and_nothing_else() {
    let broker = Broker::start().await;
    let served = served(&broker);
    let document = document(&broker).await;
    let listed: BTreeSet<String> = operations(&document).into_keys().collect();
    assert!(served.contains("post /api/v1/push") && 30 < served.len(), "the router shows its routes: {served:?}");
    let missing: Vec<_> = served.difference(&listed).collect();
    let extra: Vec<_> = listed.difference(&served).collect();
    assert!(missing.is_empty() && extra.is_empty(), "not in the document: {missing:?}; in it only: {extra:?}");
}

#[tokio::test]
async fn each_operation_says_what_it_does_takes_and_answers() {
    let broker = Broker::start().await;
    let document = document(&broker).await;
    let mut ids = BTreeSet::new();
    for (route, operation) in operations(&document) {
        let id = operation["operationId"].as_str().unwrap_or_default();
        assert!(!id.is_empty() && ids.insert(id.to_owned()), "{route}: the operation id {id:?} is its own");
        let summary = operation["summary"].as_str().unwrap_or_default();
        assert!(!summary.is_empty(), "{route}: write a sentence above the handler");
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            let has_words = parameter["in"] == "path" || parameter["description"].as_str().is_some();
            assert!(has_words && parameter["schema"].is_object(), "{route}: {parameter}");
        }
        let responses = operation["responses"].as_object().expect("responses");
        let successes = responses.keys().filter(|status| status.starts_with('2')).count();
        assert!(0 < successes, "{route} can succeed");
        for (status, response) in responses {
            let has_content = response["content"].as_object().is_some_and(|content| !content.is_empty());
            let is_bare = ["204", "304", "414", "431"].contains(&status.as_str());
            assert_eq!(has_content, !is_bare, "{route}: the body of {status}");
            assert!(response["description"].as_str().is_some_and(|words| !words.is_empty()), "{route}: {status}");
        }
    }
}

#[tokio::test]
async fn each_reference_of_the_document_leads_somewhere() {
    let broker = Broker::start().await;
    let document = document(&broker).await;
    let (mut found, mut left) = (0, vec![&document]);
    while let Some(value) = left.pop() {
        if let Some(reference) = value.get("$ref").and_then(Value::as_str) {
            let pointer = reference.strip_prefix('#').expect("within the document");
            assert!(document.pointer(pointer).is_some(), "{reference} leads nowhere");
            found += 1;
        }
        left.extend(value.as_object().into_iter().flat_map(serde_json::Map::values));
        left.extend(value.as_array().into_iter().flatten());
    }
    assert!(0 < found, "there are references");
}

#[tokio::test]
async fn each_route_says_which_token_it_needs() {
    let broker = Broker::start().await;
    let document = document(&broker).await;
    let scheme = &document["components"]["securitySchemes"]["token"];
    assert_eq!((&scheme["type"], &scheme["scheme"]), (&"http".into(), &"bearer".into()));
    for (route, operation) in operations(&document) {
        assert_eq!(operation["security"], serde_json::json!([{"token": []}, {}]), "{route}");
        assert!(operation["description"].as_str().is_some_and(|words| words.contains("admin")), "{route}");
        for status in ["401", "403"] {
            assert!(operation["responses"][status].is_object(), "{route}: {status}");
        }
    }
    let roles = |route: &str| operations(&document)[route]["description"].as_str().expect("words").to_owned();
    assert!(roles("post /api/v1/push").ends_with("admin, read-write, write-only."));
    assert!(roles("get /api/v1/dlq").ends_with("admin, read-write, read-only."));
    assert!(roles("delete /api/v1/resources/queues/{queue}").ends_with("needed: admin."));
}

/// The sections of the page about the wire: heading, and what stands under it.
fn sections(page: &str) -> Vec<(&str, &str)> {
    page.split("\n## ").map(|section| section.split_once('\n').unwrap_or((section, ""))).collect()
}

/// The routes that a text names, as `method path`: a method in capitals and a path after it.
fn named_routes(text: &str) -> BTreeSet<String> {
    let words: Vec<&str> = text.split(|c: char| c.is_whitespace() || c == '`').filter(|w| !w.is_empty()).collect();
    let named = words.windows(2).filter_map(|pair| {
        let method = METHODS.iter().find(|method| method.to_uppercase() == pair[0])?;
        let path = pair[1].split(['?', ',', ';', ')']).next()?.trim_end_matches(['.', ':']);
        path.starts_with('/').then(|| format!("{method} {path}"))
    });
    named.collect()
}

/// The names of the query parameters, and of the fields of the body.
fn inputs<'a>(document: &'a Value, operation: &'a Value) -> Vec<&'a str> {
    let parameters = operation["parameters"].as_array().into_iter().flatten();
    let mut names: Vec<&str> =
        parameters.filter(|p| p["in"] == "query").map(|p| p["name"].as_str().expect("a name")).collect();
    let body = &operation["requestBody"]["content"]["application/json"]["schema"];
    // An optional body is one of its type and null.
    let body = if body["oneOf"].is_array() { &body["oneOf"][0] } else { body };
    let reference = body["$ref"].as_str().and_then(|reference| document.pointer(reference.strip_prefix('#')?));
    let fields = reference.unwrap_or(body)["properties"].as_object();
    names.extend(fields.into_iter().flat_map(|fields| fields.keys().map(String::as_str)));
    names
}

/// Whether a text names a parameter: by itself in code, or in a query string.
fn names_parameter(text: &str, name: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(name).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + name.len()..]);
        let is_whole = !before.ends_with(is_part) && !after.starts_with(is_part);
        is_whole && (before.ends_with(['`', '?', '&', '"']) || after.starts_with('='))
    })
}

#[tokio::test]
async fn the_page_about_the_wire_names_each_route_and_parameter() {
    let broker = Broker::start().await;
    let document = document(&broker).await;
    let page = include_str!("../../../docs/http.md");
    let mut wrong = Vec::new();
    let mut known = BTreeSet::new();
    for (route, operation) in operations(&document) {
        let told: Vec<&str> = sections(page)
            .into_iter()
            .filter(|(heading, text)| named_routes(heading).contains(&route) || named_routes(text).contains(&route))
            .map(|(_, text)| text)
            .collect();
        if told.is_empty() {
            wrong.push(format!("{route} is not on the page"));
        }
        for name in inputs(&document, operation) {
            if !told.is_empty() && !told.iter().any(|text| names_parameter(text, name)) {
                wrong.push(format!("{route}: its section does not say what `{name}` is"));
            }
        }
        known.insert(route);
    }
    wrong.extend(named_routes(page).difference(&known).map(|route| format!("{route} is on the page only")));
    assert!(wrong.is_empty(), "docs/http.md and the document differ:\n{}", wrong.join("\n"));
}

#[test]
fn routes_and_parameters_are_found_in_a_text() {
    let text = "`GET /a/{b}?c=1`, or\n```text\nPOST   /d/e.\n```\ntakes `limit`, `unlimited`; the word offset. DELETE (not /x)";
    let routes = ["get /a/{b}", "post /d/e"].map(str::to_owned);
    assert_eq!(named_routes(text), BTreeSet::from(routes));
    assert!(names_parameter(text, "c") && names_parameter(text, "limit"));
    assert!(!names_parameter(text, "offset") && !names_parameter("`unlimited`", "limit"));
}

/// The names of query parameters that a source file reads: `params.flag("wait")`, `positive(params, "batch", …)`.
fn parameters_read(source: &str) -> BTreeSet<&str> {
    let source = source.split("#[cfg(test)]").next().expect("a first part");
    let mut names = BTreeSet::new();
    for (at, _) in source.match_indices("params") {
        let rest = &source[at + "params".len()..];
        let method = ["text", "flag", "integer", "name"]
            .iter()
            .find_map(|method| rest.trim_start().strip_prefix('.')?.strip_prefix(method)?.strip_prefix('('));
        let argument = method.or_else(|| rest.strip_prefix(','));
        let literal = argument.and_then(|argument| argument.trim_start().strip_prefix('"'));
        names.extend(literal.and_then(|literal| literal.split('"').next()));
    }
    names
}

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[tokio::test]
async fn each_query_parameter_that_is_read_is_in_the_document() {
    let broker = Broker::start().await;
    let document = document(&broker).await;
    let mut listed = BTreeSet::new();
    for (_, operation) in operations(&document) {
        let parameters = operation["parameters"].as_array().into_iter().flatten();
        listed.extend(parameters.filter_map(|parameter| parameter["name"].as_str()));
    }
    let mut files = Vec::new();
    rust_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/http"), &mut files);
    let mut read = 0;
    for file in files {
        let source = fs::read_to_string(&file).expect("UTF-8");
        let names = parameters_read(&source);
        let unlisted: Vec<_> = names.difference(&listed).collect();
        assert!(unlisted.is_empty(), "{}: not in a `query!`: {unlisted:?}", file.display());
        read += names.len();
    }
    assert!(20 < read, "{read} are read");
}

#[test]
fn parameters_that_are_read_are_found() {
    let source = r#"params.flag("a")?; params
        .integer("b", 0..=1); positive(params, "c", 7); checked(&params, "d"); other.text("e"); params.slice("f")"#;
    assert_eq!(parameters_read(source), BTreeSet::from(["a", "b", "c", "d"]));
}
