//! Tokens as an issuer makes them, with keys that live as long as the test.

use std::io::Write;
use std::process::{Command, Stdio};

use ebbtide::auth::{Auth, Settings};
use ebbtide::config::{Config, RawAuth, RawConfig};
use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use serde_json::{Value, json};

pub const SECRET: &str = "a secret that is long enough for HS256, and longer";

/// A key pair. The private half never leaves the process.
pub struct Pair {
    pub public_pem: String,
    pub private_pem: String,
    pub key: EncodingKey,
}

impl Pair {
    pub fn rsa(bits: u32) -> Self {
        let private_pem =
            openssl(&["genpkey", "-algorithm", "RSA", "-pkeyopt", &format!("rsa_keygen_bits:{bits}")], "");
        let key = EncodingKey::from_rsa_pem(private_pem.as_bytes()).expect("an RSA key");
        Self::new(private_pem, key)
    }

    pub fn ed() -> Self {
        let private_pem = openssl(&["genpkey", "-algorithm", "ed25519"], "");
        let key = EncodingKey::from_ed_pem(private_pem.as_bytes()).expect("an Ed25519 key");
        Self::new(private_pem, key)
    }

    fn new(private_pem: String, key: EncodingKey) -> Self {
        Self { public_pem: openssl(&["pkey", "-pubout"], &private_pem), private_pem, key }
    }

    /// The public half as an issuer publishes it.
    pub fn jwk(&self, id: Option<&str>, algorithm: Algorithm) -> Value {
        let jwk = Jwk::from_encoding_key(&self.key, algorithm).expect("it has a public half");
        let mut value = serde_json::to_value(jwk).expect("JSON");
        value["use"] = json!("sig");
        if let Some(id) = id {
            value["kid"] = json!(id);
        }
        value
    }
}

/// Keys are made by the tool, since making an RSA key here takes minutes without optimisation.
fn openssl(arguments: &[&str], input: &str) -> String {
    let mut command = Command::new("openssl");
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().expect("openssl is installed");
    child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "openssl {arguments:?}");
    String::from_utf8(output.stdout).expect("PEM")
}

pub fn secret() -> EncodingKey {
    EncodingKey::from_secret(SECRET.as_bytes()).expect("not empty")
}

/// A token with `claims`, and with the id of its key if there is one.
pub fn signed(algorithm: Algorithm, key: &EncodingKey, id: Option<&str>, claims: &Value) -> String {
    let header = Header { kid: id.map(str::to_owned), ..Header::new(algorithm) };
    encode(&header, claims, key).expect("signs")
}

/// A token of [`SECRET`] for one role.
pub fn with_role(role: &str) -> String {
    signed(Algorithm::HS256, &secret(), None, &json!({"sub": format!("{role} tester"), "role": role}))
}

/// What the server makes of these settings.
pub fn settings(raw: RawAuth) -> Settings {
    let raw = RawAuth { jwt_enabled: Some("true".to_owned()), ..raw };
    let (config, warnings) =
        Config::check(RawConfig { auth: raw, ..RawConfig::default() }, []).expect("valid settings");
    assert_eq!(warnings, Vec::<String>::new());
    config.auth.expect("it is enabled")
}

pub fn auth(raw: RawAuth) -> Auth {
    Auth::new(settings(raw))
}

/// Settings with [`SECRET`].
pub fn with_secret() -> RawAuth {
    RawAuth { jwt_secret: Some(SECRET.to_owned()), ..RawAuth::default() }
}
