//! One token at a time, without a server.

use ebbtide::auth::Auth;
use ebbtide::config::RawAuth;
use jsonwebtoken::{Algorithm, EncodingKey};
use serde_json::{Value, json};

use crate::support::token::{self, Pair, SECRET, signed, with_secret};

fn text(value: &str) -> Option<String> {
    Some(value.to_owned())
}

fn claims() -> Value {
    json!({"sub": "svc", "role": "read-write", "exp": 4_102_444_800_u64})
}

async fn refusal(auth: &Auth, token: &str) -> String {
    auth.identify(token).await.expect_err("refused").to_string()
}

async fn subject(auth: &Auth, token: &str) -> String {
    let identity = auth.identify(token).await.expect("counts");
    assert!(identity.roles.read_write && !identity.roles.admin);
    identity.subject.expect("has one").to_string()
}

/// A token that says how it is signed and is not.
fn unsigned(algorithm: &str) -> String {
    use base64::Engine;
    let encode = |value: Value| base64::prelude::BASE64_URL_SAFE_NO_PAD.encode(value.to_string());
    format!("{}.{}.", encode(json!({"alg": algorithm, "typ": "JWT"})), encode(claims()))
}

#[tokio::test]
async fn each_algorithm_counts_where_it_is_asked_for_and_nowhere_else() {
    use Algorithm::{EdDSA, HS256, HS384, HS512, RS256, RS384, RS512};
    let (rsa, ed, secret) = (Pair::rsa(2048), Pair::ed(), token::secret());
    let key = |algorithm| match algorithm {
        HS256 | HS384 | HS512 => &secret,
        EdDSA => &ed.key,
        _ => &rsa.key,
    };
    let all = [HS256, HS384, HS512, RS256, RS384, RS512, EdDSA];
    let tokens = all.map(|algorithm| (algorithm, signed(algorithm, key(algorithm), None, &claims())));
    for asked in all {
        let pem = if asked == EdDSA { &ed.public_pem } else { &rsa.public_pem };
        let keys = match asked {
            HS256 | HS384 | HS512 => with_secret(),
            _ => RawAuth { jwt_public_key: text(pem), ..RawAuth::default() },
        };
        let auth = token::auth(RawAuth { jwt_algorithm: Some(format!("{asked:?}")), ..keys });
        for (algorithm, token) in &tokens {
            if *algorithm == asked {
                assert_eq!(subject(&auth, token).await, "svc", "{asked:?}");
                assert_eq!(subject(&auth, token).await, "svc", "{asked:?}, once it is known");
            } else {
                assert_eq!(refusal(&auth, token).await, "the token's algorithm is not accepted", "{algorithm:?}");
            }
        }
    }
}

#[tokio::test]
async fn a_public_key_is_no_secret_and_no_signature_is_none() {
    let rsa = Pair::rsa(2048);
    let forged: Vec<String> = [rsa.public_pem.as_str(), rsa.public_pem.trim()]
        .iter()
        .map(|pem| signed(Algorithm::HS256, &EncodingKey::from_secret(pem.as_bytes()).expect("bytes"), None, &claims()))
        .collect();
    let with_key = RawAuth { jwt_public_key: text(&rsa.public_pem), ..RawAuth::default() };
    for raw in [
        RawAuth { jwt_algorithm: text("RS256"), ..with_key.clone() },
        RawAuth { jwt_algorithm: text("auto"), ..with_key.clone() },
        RawAuth { jwt_algorithm: text("auto"), jwt_secret: text(SECRET), ..with_key },
        with_secret(),
    ] {
        let auth = token::auth(raw);
        for token in &forged {
            assert!(auth.identify(token).await.is_err());
        }
        for algorithm in ["none", "None", "NONE", "", "HS256", "RS256", "ES256"] {
            assert!(auth.identify(&unsigned(algorithm)).await.is_err(), "{algorithm}");
        }
    }
}

#[tokio::test]
async fn auto_takes_what_there_are_keys_for() {
    let (rsa, ed) = (Pair::rsa(2048), Pair::ed());
    let both = RawAuth { jwt_algorithm: text("auto"), jwt_public_key: text(&rsa.public_pem), ..with_secret() };
    let auth = token::auth(both);
    for algorithm in [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512] {
        assert_eq!(subject(&auth, &signed(algorithm, &token::secret(), None, &claims())).await, "svc");
    }
    for algorithm in [Algorithm::RS256, Algorithm::RS384, Algorithm::RS512] {
        assert_eq!(subject(&auth, &signed(algorithm, &rsa.key, None, &claims())).await, "svc");
    }
    let other = signed(Algorithm::EdDSA, &ed.key, None, &claims());
    assert_eq!(refusal(&auth, &other).await, "the token's algorithm is not accepted");
}

#[tokio::test]
async fn a_changed_token_or_another_key_is_refused() {
    let auth = token::auth(with_secret());
    let token = signed(Algorithm::HS256, &token::secret(), None, &claims());
    let other = EncodingKey::from_secret(b"another secret that is long enough too").expect("bytes");
    assert_eq!(
        refusal(&auth, &signed(Algorithm::HS256, &other, None, &claims())).await,
        "the token's signature is not valid"
    );
    let [header, payload, signature] = token.split('.').collect::<Vec<_>>()[..] else { panic!("three parts") };
    let admin = signed(Algorithm::HS256, &other, None, &json!({"role": "admin"}));
    let claims_of_admin = admin.split('.').nth(1).expect("claims");
    for changed in [
        format!("{header}.{claims_of_admin}.{signature}"),
        format!("{header}.{payload}."),
        format!("{header}.{payload}.{}", signature.chars().rev().collect::<String>()),
    ] {
        assert_eq!(refusal(&auth, &changed).await, "the token's signature is not valid", "{changed}");
    }
    for shapeless in ["", "a", "a.b", "a.b.c", "....", &format!("{token}.x"), &format!("{header}.{payload}")] {
        assert_eq!(refusal(&auth, shapeless).await, "the token is not a JWT", "{shapeless}");
    }
    assert_eq!(refusal(&auth, &"x".repeat(17 << 10)).await, "the token is too long");
}

#[tokio::test]
async fn a_header_cannot_ask_for_more_than_is_understood() {
    let auth = token::auth(with_secret());
    let mut header = jsonwebtoken::Header::new(Algorithm::HS256);
    header.crit = Some(vec!["exp".to_owned()]);
    let token = jsonwebtoken::encode(&header, &claims(), &token::secret()).expect("signs");
    assert!(auth.identify(&token).await.is_err());
}

#[tokio::test]
async fn claims_say_when_by_whom_and_for_whom() {
    let rules = RawAuth { jwt_issuer: text("https://issuer.example"), jwt_audience: text("ebbtide"), ..with_secret() };
    let auth = token::auth(rules);
    let token = |claims: &Value| signed(Algorithm::HS256, &token::secret(), None, claims);
    let good = json!({"sub": "svc", "role": "read-write", "iss": "https://issuer.example", "aud": ["x", "ebbtide"],
        "exp": 4_102_444_800_u64, "nbf": 0});
    assert_eq!(subject(&auth, &token(&good)).await, "svc");
    for (claim, value, why) in [
        ("exp", json!(1_000_000_000), "the token has expired"),
        ("nbf", json!(4_102_444_700_u64), "the token is not valid yet"),
        ("exp", json!("never"), "a date of the token is not a number"),
        ("iss", json!("https://issuer.example/"), "the token's issuer is not the right one"),
        ("iss", Value::Null, "the token's issuer is not the right one"),
        ("aud", json!("other"), "the token is not for this audience"),
        ("aud", Value::Null, "the token is not for this audience"),
        ("sub", json!(7), "the token's subject is not usable text"),
    ] {
        let mut claims = good.clone();
        claims[claim] = value;
        assert_eq!(refusal(&auth, &token(&claims)).await, why, "{claims}");
    }
}

#[tokio::test]
async fn roles_go_by_the_names_that_are_configured() {
    let raw = RawAuth {
        jwt_roles_claim: text("https://example.com/role"),
        jwt_roles_array_claim: text("groups"),
        jwt_role_admin: text("ops"),
        ..with_secret()
    };
    let auth = token::auth(raw);
    let of = async |claims: Value| {
        let token = signed(Algorithm::HS256, &token::secret(), None, &claims);
        auth.identify(&token).await.expect("counts").roles
    };
    assert!(of(json!({"https://example.com/role": "ops"})).await.admin);
    assert!(of(json!({"groups": ["staff", "read-only"]})).await.read_only);
    let none = of(json!({"role": "ops", "roles": ["ops"], "groups": ["admin"]})).await;
    assert!(!none.admin && !none.read_write && !none.read_only && !none.write_only);
}

#[test]
fn only_a_public_key_that_is_long_enough_is_taken() {
    use ebbtide::config::{Config, RawConfig};
    let check = |algorithm: &str, pem: &str| {
        let auth = RawAuth {
            jwt_enabled: text("true"),
            jwt_algorithm: text(algorithm),
            jwt_public_key: text(pem),
            ..RawAuth::default()
        };
        Config::check(RawConfig { auth, ..RawConfig::default() }, []).map(|_| ()).map_err(|error| error.0.join("; "))
    };
    let (rsa, short, ed) = (Pair::rsa(2048), Pair::rsa(1024), Pair::ed());
    for (algorithm, pem) in [
        ("RS256", rsa.public_pem.clone()),
        ("RS512", rsa.public_pem.replace('\n', "\\n")),
        ("EdDSA", ed.public_pem.clone()),
        ("auto", ed.public_pem.clone()),
    ] {
        assert_eq!(check(algorithm, &pem), Ok(()), "{algorithm}");
    }
    for (algorithm, pem, why) in [
        ("RS256", &rsa.private_pem, "private key"),
        ("EdDSA", &ed.private_pem, "private key"),
        ("RS256", &short.public_pem, "2048 bits"),
        ("RS256", &ed.public_pem, "JWT_ALGORITHM"),
        ("EdDSA", &rsa.public_pem, "JWT_ALGORITHM"),
        ("RS256", &"hunter2".to_owned(), "PEM"),
        ("RS256", &"-----BEGIN PUBLIC KEY-----\nhunter2\n-----END PUBLIC KEY-----".to_owned(), "neither"),
    ] {
        let error = check(algorithm, pem).expect_err(why);
        assert!(error.starts_with("JWT_PUBLIC_KEY ") && error.contains(why), "{error}");
        assert!(!pem.lines().any(|line| line.len() > 20 && error.contains(line)), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
}
