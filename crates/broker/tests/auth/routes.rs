//! What a server with tokens lets through.

use ebbtide::config::RawAuth;
use ebbtide::http::Settings;
use jsonwebtoken::Algorithm;
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::Broker;
use crate::support::token::{self, SECRET, signed, with_role, with_secret};

async fn start(raw: RawAuth) -> Broker {
    Broker::with(Settings { auth: Some(token::settings(raw)), ..Settings::default() }).await
}

async fn call(broker: &Broker, method: &Method, path: &str, token: &str, body: &Value) -> (u16, Value) {
    broker.send(broker.request(method.clone(), path).bearer_auth(token).json(body)).await
}

/// A request of each kind, in a form that is accepted or fails for another reason than its sender.
fn requests() -> Vec<(&'static str, Method, &'static str, Value)> {
    let id = "/api/v1/messages/00000000-0000-0000-0000-000000000007/t";
    let retry = "/api/v1/messages/00000000-0000-0000-0000-000000000007/t/retry";
    vec![
        ("push", Method::POST, "/api/v1/push", json!({"items": []})),
        ("write", Method::POST, "/api/v1/configure", json!({"queue": "q"})),
        ("write", Method::POST, "/api/v1/ack/batch", json!({"acknowledgments": []})),
        ("write", Method::POST, "/api/v1/transaction", json!({})),
        ("write", Method::POST, "/api/v1/lease/x/extend", json!({})),
        ("write", Method::GET, "/api/v1/pop/queue/q", Value::Null),
        ("write", Method::GET, "/api/v1/pop/queue/q/partition/p", Value::Null),
        ("write", Method::GET, "/api/v1/pop?namespace=n", Value::Null),
        ("write", Method::POST, "/api/v1/traces", json!({})),
        ("write", Method::POST, retry, json!({})),
        ("write", Method::DELETE, id, Value::Null),
        ("write", Method::POST, "/api/v1/dlq/replay", json!({"queue": "q"})),
        ("write", Method::POST, "/api/v1/consumer-groups/g/queues/q/seek", json!({"toEnd": true})),
        ("read", Method::GET, "/api/v1/messages", Value::Null),
        ("read", Method::GET, id, Value::Null),
        ("read", Method::GET, "/api/v1/dlq", Value::Null),
        ("read", Method::GET, "/api/v1/consumer-groups", Value::Null),
        ("read", Method::GET, "/api/v1/resources/queues", Value::Null),
        ("read", Method::GET, "/api/v1/traces/names", Value::Null),
        ("admin", Method::DELETE, "/api/v1/consumer-groups/g", Value::Null),
        ("admin", Method::DELETE, "/api/v1/resources/queues/nobodys", Value::Null),
        ("admin", Method::DELETE, "/api/v1/queues/nobodys/clear", Value::Null),
    ]
}

#[tokio::test]
async fn each_role_opens_its_routes_and_no_others() {
    let broker = start(with_secret()).await;
    for (role, opens) in [
        ("admin", &["push", "read", "write", "admin"][..]),
        ("read-write", &["push", "read", "write"]),
        ("read-only", &["read"]),
        ("write-only", &["push"]),
        ("nobody", &[]),
    ] {
        let token = with_role(role);
        for (kind, method, path, body) in requests() {
            let (status, answer) = call(&broker, &method, path, &token, &body).await;
            if opens.contains(&kind) {
                assert!(status != 401 && status != 403, "{role} {method} {path}: {status} {answer}");
            } else {
                assert_eq!(status, 403, "{role} {method} {path}");
                assert_eq!(answer, json!({"error": "Insufficient permissions"}));
            }
        }
    }
}

#[tokio::test]
async fn without_a_token_nothing_is_open_but_what_is_skipped() {
    let broker = start(with_secret()).await;
    for (_, method, path, body) in requests() {
        let request = broker.request(method.clone(), path).json(&body);
        let response = request.send().await.expect("the server answers");
        assert_eq!(response.status().as_u16(), 401, "{method} {path}");
        assert_eq!(response.headers()["www-authenticate"], "Bearer");
        let answer: Value = response.json().await.expect("JSON");
        assert_eq!(answer, json!({"error": "Authentication required"}));
    }
    for path in ["/health", "/metrics/prometheus"] {
        assert_eq!(broker.get(path).await.0, 200, "{path}");
    }
    assert_eq!(broker.get("/api/v1/nothing").await.0, 404, "that there is no such route is no secret");
}

#[tokio::test]
async fn skipped_paths_are_those_of_the_settings() {
    let raw = RawAuth { jwt_skip_paths: Some("/api/v1/resources/, /api/v1/dlq".to_owned()), ..with_secret() };
    let broker = start(raw).await;
    for (path, status) in [
        ("/api/v1/dlq", 200),
        ("//api/v1/dlq?limit=1", 200),
        ("/api/v1/resources/queues", 200),
        ("/api/v1/dlq/", 404),
        ("/api/v1/messages", 401),
        ("/health", 401),
        ("/metrics/prometheus", 401),
    ] {
        assert_eq!(broker.get(path).await.0, status, "{path}");
    }
    assert_eq!(call(&broker, &Method::GET, "/health", &with_role("read-only"), &Value::Null).await.0, 200);
    assert_eq!(call(&broker, &Method::GET, "/health", &with_role("write-only"), &Value::Null).await.0, 403);
}

#[tokio::test]
async fn a_token_may_come_bare_and_must_come_once() {
    let broker = start(with_secret()).await;
    let get = || broker.request(Method::GET, "/api/v1/dlq");
    let token = with_role("read-only");
    for value in [token.clone(), format!("Bearer {token}"), format!("bearer {token}")] {
        assert_eq!(broker.send(get().header("authorization", value)).await.0, 200);
    }
    for request in [
        get().header("authorization", format!("Basic {token}")),
        get().header("authorization", &token).header("authorization", &token),
        broker.request(Method::GET, &format!("/api/v1/dlq?token={token}")),
        get().header("authorization", format!("Bearer {}", token.trim_end_matches(|c| c != '.'))),
    ] {
        assert_eq!(broker.send(request).await.0, 401);
    }
}

/// Who is said to have pushed each message of queue `q`, by its transaction id.
async fn producers(broker: &Broker, token: &str, group: &str) -> Vec<(String, Value)> {
    let path = format!("/api/v1/pop/queue/q?consumerGroup={group}&subscriptionMode=all&batch=100");
    let (status, answer) = call(broker, &Method::GET, &path, token, &Value::Null).await;
    assert_eq!(status, 200, "{answer}");
    let messages = answer["messages"].as_array().expect("messages");
    let mut found: Vec<_> = messages
        .iter()
        .map(|message| (message["transactionId"].as_str().expect("an id").to_owned(), message["producerSub"].clone()))
        .collect();
    found.sort_by(|one, other| one.0.cmp(&other.0));
    found
}

fn item(id: &str) -> Value {
    json!({"queue": "q", "payload": {"producerSub": "inside"}, "transactionId": id, "producerSub": "forged", "sub": "forged"})
}

#[tokio::test]
async fn who_pushed_is_what_the_token_says_and_nothing_else() {
    let broker = start(with_secret()).await;
    let of = |sub: Value| signed(Algorithm::HS256, &token::secret(), None, &json!({"sub": sub, "role": "read-write"}));
    let (svc, nameless) = (of(json!("svc é\"")), of(Value::Null));
    for (id, token) in [("a", &svc), ("b", &nameless)] {
        let (status, _) = call(&broker, &Method::POST, "/api/v1/push", token, &json!({"items": [item(id)]})).await;
        assert_eq!(status, 201);
    }
    let mut operation = item("c");
    operation["type"] = json!("push");
    let body = json!({"operations": [operation], "producerSub": "forged"});
    let (_, answer) = call(&broker, &Method::POST, "/api/v1/transaction", &svc, &body).await;
    assert_eq!(answer["success"], json!(true), "{answer}");
    let expected = [("a", json!("svc é\"")), ("b", Value::Null), ("c", json!("svc é\""))]
        .map(|(id, producer)| (id.to_owned(), producer));
    assert_eq!(producers(&broker, &svc, "g").await, expected);
    let (_, listed) = call(&broker, &Method::GET, "/api/v1/messages?queue=q", &svc, &Value::Null).await;
    let by = |id: &str| {
        let messages = listed["messages"].as_array().expect("messages");
        messages.iter().find(|message| message["transactionId"] == id).expect("listed")["producerSub"].clone()
    };
    assert_eq!((by("a"), by("b")), (json!("svc é\""), Value::Null));
}

#[tokio::test]
async fn a_dead_letter_remembers_who_pushed_it_and_so_does_its_replay() {
    let broker = start(with_secret()).await;
    let (svc, admin) = (
        signed(Algorithm::HS256, &token::secret(), None, &json!({"sub": "svc", "role": "read-write"})),
        signed(Algorithm::HS256, &token::secret(), None, &json!({"sub": "operator", "role": "admin"})),
    );
    call(&broker, &Method::POST, "/api/v1/push", &svc, &json!({"items": [item("a")]})).await;
    let pid: uuid::Uuid = broker.row("select id from queen.log_partitions", &[]).await.get(0);
    let (status, answer) =
        call(&broker, &Method::POST, &format!("/api/v1/messages/{pid}/a/dlq"), &admin, &json!({})).await;
    assert_eq!(status, 200, "{answer}");
    let (_, listed) = call(&broker, &Method::GET, "/api/v1/dlq?queue=q", &admin, &Value::Null).await;
    assert_eq!(listed["messages"][0]["producerSub"], json!("svc"));
    broker.execute("delete from queen.log_segments", &[]).await;
    let (_, read) = call(&broker, &Method::GET, &format!("/api/v1/messages/{pid}/a"), &admin, &Value::Null).await;
    assert_eq!(read["producerSub"], json!("svc"), "{read}");
    let (status, answer) = call(&broker, &Method::POST, "/api/v1/dlq/replay", &admin, &json!({"queue": "q"})).await;
    assert_eq!((status, &answer["replayed"]), (200, &json!(1)));
    let found = producers(&broker, &svc, "later").await;
    assert_eq!(found.iter().map(|(_, producer)| producer).collect::<Vec<_>>(), [&json!("svc")]);
}

#[tokio::test]
async fn without_authentication_nobody_is_named() {
    let broker = Broker::start().await;
    let token = signed(Algorithm::HS256, &token::secret(), None, &json!({"sub": "svc"}));
    let (status, _) = call(&broker, &Method::POST, "/api/v1/push", &token, &json!({"items": [item("a")]})).await;
    assert_eq!(status, 201);
    assert_eq!(producers(&broker, &token, "g").await, [("a".to_owned(), Value::Null)]);
}

#[tokio::test]
async fn a_refusal_never_shows_the_token_or_the_secret() {
    let broker = start(with_secret()).await;
    let forged = signed(
        Algorithm::HS256,
        &jsonwebtoken::EncodingKey::from_secret(b"another").expect("bytes"),
        None,
        &json!({"sub": "svc", "role": "admin"}),
    );
    let (status, answer) = call(&broker, &Method::GET, "/api/v1/dlq", &forged, &Value::Null).await;
    assert_eq!((status, &answer), (401, &json!({"error": "the token's signature is not valid"})));
    assert!(!answer.to_string().contains(&forged) && !answer.to_string().contains(SECRET));
    assert!(!format!("{:?}", broker.app.settings).contains(SECRET));
}
