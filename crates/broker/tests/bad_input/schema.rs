//! The server's own document as a source of wrong requests: each operation with what it takes.

use reqwest::Method;
use serde_json::{Map, Value, json};

use crate::support::Broker;

/// Of a partition, message or lease that does not exist.
pub(crate) const NIL: &str = "00000000-0000-7000-8000-000000000001";

/// Optional fields of which a request needs one or another.
const CHOSEN: &[&str] = &["toEnd", "forever", "queue", "operations", "timersFire"];
/// JSON as base64, for a payload that is text.
const ENCODED_PAYLOAD: &str = "MQ==";

pub(crate) struct Document(pub(crate) Value);

pub(crate) struct Operation<'a> {
    pub(crate) method: Method,
    pub(crate) path: &'a str,
    document: &'a Document,
    described: &'a Value,
}

impl Document {
    pub(crate) async fn of(broker: &Broker) -> Self {
        let (status, document) = broker.get("/openapi.json").await;
        assert_eq!(status, 200);
        Self(document)
    }

    pub(crate) fn operations(&self) -> Vec<Operation<'_>> {
        let mut operations = Vec::new();
        for (path, item) in self.0["paths"].as_object().expect("paths") {
            for (method, described) in item.as_object().expect("methods") {
                let method = method.to_uppercase().parse().expect("a method");
                operations.push(Operation { method, path, document: self, described });
            }
        }
        assert!(30 < operations.len(), "the document lists the routes");
        operations
    }

    /// The schema behind references, and the first choice where there are several.
    pub(crate) fn resolved<'a>(&'a self, schema: &'a Value) -> &'a Value {
        if let Some(reference) = schema["$ref"].as_str() {
            let pointer = reference.strip_prefix('#').expect("within the document");
            return self.resolved(self.0.pointer(pointer).expect("leads somewhere"));
        }
        match schema["oneOf"].as_array() {
            Some(choices) => self.resolved(&choices[0]),
            None => schema,
        }
    }

    /// What the schema may be, one of them or several; null is not told apart.
    pub(crate) fn choices<'a>(&'a self, schema: &'a Value) -> Vec<&'a Value> {
        let schema = match schema["$ref"].as_str() {
            Some(reference) => self.0.pointer(reference.trim_start_matches('#')).expect("leads somewhere"),
            None => schema,
        };
        match schema["oneOf"].as_array() {
            Some(choices) => choices.iter().filter(|choice| choice["type"] != "null").collect(),
            None => vec![schema],
        }
    }

    /// A value that the schema allows: of an object what is required, of a list one element.
    pub(crate) fn sample(&self, schema: &Value) -> Value {
        let schema = self.resolved(schema);
        if let Some(parts) = schema["allOf"].as_array() {
            let fields = parts.iter().flat_map(|part| match self.sample(part) {
                Value::Object(fields) => fields,
                other => panic!("{other} is no object"),
            });
            return Value::Object(fields.collect());
        }
        if let Some(words) = schema["enum"].as_array() {
            return words[0].clone();
        }
        match kind(schema) {
            "string" if schema["format"] == "uuid" => json!(NIL),
            "string" if schema["format"] == "date-time" => json!("2026-01-01T00:00:00Z"),
            "string" => json!("x"),
            "integer" | "number" => schema.get("minimum").cloned().unwrap_or(json!(1)),
            "boolean" => json!(true),
            "array" => json!([self.sample(&schema["items"])]),
            "object" => {
                let required = schema["required"].as_array().into_iter().flatten();
                let names: Vec<&str> = required.map(|name| name.as_str().expect("a name")).collect();
                let mut sample: Map<String, Value> =
                    names.iter().map(|name| ((*name).to_owned(), self.sample(&schema["properties"][name]))).collect();
                for name in CHOSEN.iter().filter(|name| schema["properties"][**name].is_object()) {
                    sample.entry(*name).or_insert_with(|| self.sample(&schema["properties"][*name]));
                }
                if sample.get("payload").is_some_and(Value::is_string) {
                    sample.insert("payload".to_owned(), json!(ENCODED_PAYLOAD));
                }
                Value::Object(sample)
            }
            _ => json!(1),
        }
    }
}

/// The type of a schema, but for null; none if everything is allowed.
pub(crate) fn kind(schema: &Value) -> &str {
    match &schema["type"] {
        Value::String(kind) => kind,
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).find(|kind| *kind != "null").unwrap_or(""),
        _ => "",
    }
}

impl Operation<'_> {
    /// For messages of failed tests.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.method, self.path)
    }

    pub(crate) fn parameters(&self, place: &str) -> Vec<(&str, &Value)> {
        let all = self.described["parameters"].as_array().into_iter().flatten();
        let here = all.filter(|parameter| parameter["in"] == place);
        here.map(|parameter| (parameter["name"].as_str().expect("a name"), &parameter["schema"])).collect()
    }

    /// The schema of the body, if it takes one.
    pub(crate) fn body(&self) -> Option<&Value> {
        let schema = self.described["requestBody"]["content"]["application/json"].get("schema")?;
        Some(self.document.resolved(schema))
    }

    /// The path with something in each place, and `with` in the place of that name.
    pub(crate) fn path_with(&self, with: Option<(&str, &str)>) -> String {
        let mut path = self.path.to_owned();
        for (name, schema) in self.parameters("path") {
            let segment = match with {
                Some((other, segment)) if other == name => segment.to_owned(),
                _ => self.document.sample(schema).as_str().expect("segments are text").to_owned(),
            };
            path = path.replace(&format!("{{{name}}}"), &segment);
        }
        path
    }

    pub(crate) async fn send(&self, broker: &Broker, path_and_query: &str, body: Option<String>) -> (u16, Value) {
        let request = broker.request(self.method.clone(), path_and_query);
        broker.send(body.into_iter().fold(request, |request, body| request.body(body))).await
    }
}

/// The fields of an object schema.
pub(crate) fn fields(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    schema["properties"].as_object().into_iter().flat_map(Map::iter)
}
