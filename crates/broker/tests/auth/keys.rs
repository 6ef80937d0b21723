//! Keys that an issuer publishes, over a real socket.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Redirect};
use axum::routing::get;
use ebbtide::auth::Auth;
use ebbtide::config::RawAuth;
use ebbtide::error::Error;
use jsonwebtoken::{Algorithm, EncodingKey};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::support::token::{self, Pair, signed};
use crate::support::until;

/// An issuer of keys on a loopback port.
struct Issuer {
    url: String,
    answer: Arc<Mutex<(StatusCode, String)>>,
    fetches: Arc<AtomicUsize>,
}

impl Issuer {
    async fn start(keys: Value) -> Self {
        let answer = Arc::new(Mutex::new((StatusCode::OK, json!({"keys": keys}).to_string())));
        let fetches = Arc::new(AtomicUsize::new(0));
        let (shown, counted) = (answer.clone(), fetches.clone());
        let serve = move || {
            counted.fetch_add(1, Ordering::SeqCst);
            let (status, body) = shown.lock().expect("no panic").clone();
            async move { (status, body).into_response() }
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let to_keys = || async { Redirect::temporary("/keys") };
        let routes = Router::new().route("/keys", get(serve)).route("/elsewhere", get(to_keys));
        tokio::spawn(async move { axum::serve(listener, routes).await.expect("it serves") });
        Self { url, answer, fetches }
    }

    fn publish(&self, keys: Value) {
        *self.answer.lock().expect("no panic") = (StatusCode::OK, json!({"keys": keys}).to_string());
    }

    fn break_with(&self, status: StatusCode, body: &str) {
        *self.answer.lock().expect("no panic") = (status, body.to_owned());
    }

    fn fetches(&self) -> usize {
        self.fetches.load(Ordering::SeqCst)
    }

    /// Tokens by its keys, which are asked for again as soon as one is unknown.
    fn auth(&self, algorithm: &str) -> Auth {
        self.auth_with(algorithm, Duration::ZERO, Duration::from_secs(3600))
    }

    fn auth_with(&self, algorithm: &str, pause: Duration, refresh: Duration) -> Auth {
        auth_at(&format!("{}/keys", self.url), algorithm, pause, refresh)
    }
}

fn auth_at(url: &str, algorithm: &str, pause: Duration, refresh: Duration) -> Auth {
    let raw =
        RawAuth { jwt_algorithm: Some(algorithm.to_owned()), jwt_jwks_url: Some(url.to_owned()), ..RawAuth::default() };
    let mut settings = token::settings(raw);
    let jwks = settings.jwks.as_mut().expect("given");
    (jwks.pause, jwks.refresh) = (pause, refresh);
    Auth::new(settings)
}

fn token(algorithm: Algorithm, key: &EncodingKey, id: Option<&str>) -> String {
    signed(algorithm, key, id, &json!({"sub": "svc", "role": "admin"}))
}

async fn refusal(auth: &Auth, token: &str) -> String {
    auth.identify(token).await.expect_err("refused").to_string()
}

#[tokio::test]
async fn a_token_is_checked_with_the_key_that_it_names() {
    let (one, two, ed) = (Pair::rsa(2048), Pair::rsa(2048), Pair::ed());
    let keys = json!([
        one.jwk(Some("one"), Algorithm::RS256),
        two.jwk(Some("two"), Algorithm::RS256),
        ed.jwk(Some("ed"), Algorithm::EdDSA),
    ]);
    let issuer = Issuer::start(keys).await;
    let auth = issuer.auth("auto");
    for (algorithm, pair, id) in
        [(Algorithm::RS256, &one, "one"), (Algorithm::RS256, &two, "two"), (Algorithm::EdDSA, &ed, "ed")]
    {
        assert!(auth.identify(&token(algorithm, &pair.key, Some(id))).await.expect("counts").roles.admin, "{id}");
    }
    assert_eq!(issuer.fetches(), 1);
    let other = token(Algorithm::RS256, &two.key, Some("one"));
    assert_eq!(refusal(&auth, &other).await, "the token's signature is not valid");
    // The set says that the key is for RS256 alone.
    let stretched = token(Algorithm::RS512, &one.key, Some("one"));
    assert_eq!(refusal(&auth, &stretched).await, "the token's key is not known");
    let crossed = token(Algorithm::RS256, &one.key, Some("ed"));
    assert_eq!(refusal(&auth, &crossed).await, "the token's key is not known");
    let shared = token(Algorithm::HS256, &token::secret(), Some("one"));
    assert_eq!(refusal(&auth, &shared).await, "the token's algorithm is not accepted");
}

#[tokio::test]
async fn a_token_that_names_no_key_is_taken_if_there_is_one_choice() {
    let (rsa, other, ed) = (Pair::rsa(2048), Pair::rsa(2048), Pair::ed());
    let one_of_a_kind = json!([rsa.jwk(None, Algorithm::RS256), ed.jwk(Some("ed"), Algorithm::EdDSA)]);
    let issuer = Issuer::start(one_of_a_kind).await;
    let auth = issuer.auth("auto");
    for (algorithm, pair) in [(Algorithm::RS256, &rsa), (Algorithm::EdDSA, &ed)] {
        assert!(auth.identify(&token(algorithm, &pair.key, None)).await.is_ok());
    }
    issuer.publish(json!([rsa.jwk(Some("a"), Algorithm::RS256), other.jwk(Some("b"), Algorithm::RS256)]));
    let auth = issuer.auth("auto");
    let nameless = token(Algorithm::RS256, &rsa.key, None);
    assert_eq!(refusal(&auth, &nameless).await, "the token does not say which key it is signed with");
}

#[tokio::test]
async fn new_keys_are_found_when_a_token_names_one() {
    let (old, new) = (Pair::ed(), Pair::ed());
    let issuer = Issuer::start(json!([old.jwk(Some("old"), Algorithm::EdDSA)])).await;
    let auth = issuer.auth("EdDSA");
    let (by_old, by_new) =
        (token(Algorithm::EdDSA, &old.key, Some("old")), token(Algorithm::EdDSA, &new.key, Some("new")));
    assert!(auth.identify(&by_old).await.is_ok());
    assert_eq!(refusal(&auth, &by_new).await, "the token's key is not known");
    issuer.publish(json!([new.jwk(Some("new"), Algorithm::EdDSA)]));
    assert!(auth.identify(&by_new).await.is_ok());
    assert_eq!(refusal(&auth, &by_old).await, "the token's key is not known", "also a token that was checked before");
}

#[tokio::test]
async fn many_tokens_with_unknown_keys_cause_one_fetch() {
    let pair = Pair::ed();
    let issuer = Issuer::start(json!([pair.jwk(Some("one"), Algorithm::EdDSA)])).await;
    let auth = Arc::new(issuer.auth_with("EdDSA", Duration::from_secs(3600), Duration::from_secs(3600)));
    let ask = |id: String| {
        let (auth, token) = (auth.clone(), token(Algorithm::EdDSA, &pair.key, Some(&id)));
        tokio::spawn(async move { auth.identify(&token).await.is_ok() })
    };
    let asked: Vec<_> = (0..20).map(|n| ask(if n % 2 == 0 { "one".to_owned() } else { format!("x{n}") })).collect();
    for (n, asked) in asked.into_iter().enumerate() {
        assert_eq!(asked.await.expect("no panic"), n % 2 == 0);
    }
    assert_eq!(issuer.fetches(), 1);
    for n in 0..20 {
        assert!(!ask(format!("y{n}")).await.expect("no panic"));
    }
    assert_eq!(issuer.fetches(), 1, "not again before the pause is over");
}

#[tokio::test]
async fn old_keys_are_fetched_again_beside_the_requests() {
    let (old, new) = (Pair::ed(), Pair::ed());
    let issuer = Issuer::start(json!([old.jwk(Some("old"), Algorithm::EdDSA)])).await;
    let auth = Arc::new(issuer.auth_with("EdDSA", Duration::ZERO, Duration::ZERO));
    let by_old = token(Algorithm::EdDSA, &old.key, Some("old"));
    assert!(auth.identify(&by_old).await.is_ok());
    issuer.publish(json!([new.jwk(Some("new"), Algorithm::EdDSA)]));
    // No token names the new key; the age of the old ones is enough.
    let seen = issuer.fetches();
    let mut asked = 0;
    while auth.identify(&by_old).await.is_ok() {
        asked += 1;
        assert!(asked < 100_000, "gave up waiting until the withdrawn key is refused");
        tokio::task::yield_now().await;
    }
    assert!(seen < issuer.fetches());
}

#[tokio::test]
async fn an_issuer_that_is_away_is_no_reason_to_say_that_a_token_is_wrong() {
    let pair = Pair::ed();
    let issuer = Issuer::start(json!([pair.jwk(Some("one"), Algorithm::EdDSA)])).await;
    let good = issuer.answer.lock().expect("no panic").clone();
    let auth = issuer.auth("EdDSA");
    let token = token(Algorithm::EdDSA, &pair.key, Some("one"));
    let large = format!("{{\"keys\": [], \"x\": \"{}\"}}", "x".repeat(2 << 20));
    let short = Pair::rsa(1024).jwk(Some("one"), Algorithm::RS256);
    let shared = json!({"kty": "oct", "k": "c2VjcmV0", "kid": "one"});
    let for_encryption = {
        let mut jwk = pair.jwk(Some("one"), Algorithm::EdDSA);
        jwk["use"] = json!("enc");
        jwk
    };
    let stump = json!({"kty": "OKP", "crv": "Ed25519", "x": "AAAA", "kid": "one"});
    for (status, body) in [
        (StatusCode::INTERNAL_SERVER_ERROR, good.1.clone()),
        (StatusCode::OK, "no JSON".to_owned()),
        (StatusCode::OK, "{}".to_owned()),
        (StatusCode::OK, large),
        (StatusCode::OK, json!({"keys": [short, shared, for_encryption, stump, 7, {}]}).to_string()),
    ] {
        issuer.break_with(status, &body);
        let error = auth.identify(&token).await.expect_err("no keys");
        assert!(matches!(error, Error::KeysUnavailable), "{error}");
    }
    issuer.break_with(good.0, &good.1);
    assert!(auth.identify(&token).await.is_ok());
    issuer.break_with(StatusCode::INTERNAL_SERVER_ERROR, "");
    let unknown = signed(Algorithm::EdDSA, &pair.key, Some("two"), &json!({}));
    assert_eq!(refusal(&auth, &unknown).await, "the token's key is not known");
    assert!(auth.identify(&token).await.is_ok(), "the keys that are known stay");
    let redirected = auth_at(&format!("{}/elsewhere", issuer.url), "EdDSA", Duration::ZERO, Duration::ZERO);
    assert!(matches!(redirected.identify(&token).await, Err(Error::KeysUnavailable)));
}

#[tokio::test]
async fn an_issuer_that_never_answers_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}/keys", listener.local_addr().expect("bound"));
    let raw = RawAuth {
        jwt_algorithm: Some("EdDSA".to_owned()),
        jwt_jwks_url: Some(url),
        jwt_jwks_timeout_ms: Some("100".to_owned()),
        ..RawAuth::default()
    };
    let auth = token::auth(raw);
    let token = token(Algorithm::EdDSA, &Pair::ed().key, Some("one"));
    assert!(matches!(auth.identify(&token).await, Err(Error::KeysUnavailable)));
}

#[tokio::test]
async fn keys_are_there_before_the_first_request() {
    let pair = Pair::ed();
    let issuer = Issuer::start(json!([pair.jwk(Some("one"), Algorithm::EdDSA)])).await;
    let auth = issuer.auth("EdDSA");
    auth.warm_up().await;
    until("the keys are fetched", || issuer.fetches() == 1).await;
    assert!(auth.identify(&token(Algorithm::EdDSA, &pair.key, Some("one"))).await.is_ok());
    assert_eq!(issuer.fetches(), 1);
}
