//! Bearer tokens: who sent a request, and which roles the issuer gave them.
//!
//! ```text
//! token ─► header ─► algorithm that the settings allow ─► key ─► signature ─► claims ─► identity
//! ```
//!
//! What a token says about its own verification is never believed: the algorithms are those of the settings, a key
//! serves the family that it was made for, and embedded keys and addresses of keys are ignored.

mod cache;
mod claims;
mod jwks;
mod key;

use std::fmt;
use std::sync::Arc;

use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey, Validation, decode, decode_header};
use serde_json::{Map, Value};

use crate::error::Error;
use cache::Cache;
pub use claims::ClaimRules;
use claims::Window;
use jwks::Jwks;
pub use jwks::JwksSettings;
pub use key::PublicKey;

/// Longest token that is looked at.
const TOKEN_BYTES_MAX: usize = 16 << 10;

/// What a role allows is decided where the routes are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Roles {
    pub admin: bool,
    pub read_write: bool,
    pub read_only: bool,
    pub write_only: bool,
}

/// Who sent a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// The token's `sub`.
    pub subject: Option<Arc<str>>,
    pub roles: Roles,
}

/// The names of the four roles in tokens.
#[derive(Clone, Debug)]
pub struct RoleNames {
    pub admin: String,
    pub read_write: String,
    pub read_only: String,
    pub write_only: String,
}

/// How tokens are checked. Its keys show themselves to nobody.
#[derive(Clone)]
pub struct Settings {
    /// Tokens of other algorithms are refused, whatever key they name.
    pub algorithms: Vec<Algorithm>,
    /// For HS256, HS384 and HS512.
    pub secret: Option<DecodingKey>,
    /// For the others, unless they come from [`Settings::jwks`].
    pub public_key: Option<PublicKey>,
    pub jwks: Option<JwksSettings>,
    pub claims: ClaimRules,
    /// Paths that need no token. One that is longer than a character and ends in a slash stands for all that begin with it.
    pub skip_paths: Vec<String>,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { algorithms, secret, public_key, jwks, claims, skip_paths } = self;
        f.debug_struct("Settings")
            .field("algorithms", algorithms)
            .field("secret", &secret.is_some())
            .field("public_key", &public_key.is_some())
            .field("jwks", jwks)
            .field("claims", claims)
            .field("skip_paths", skip_paths)
            .finish()
    }
}

/// Checks tokens for one server.
pub struct Auth {
    settings: Settings,
    jwks: Option<Arc<Jwks>>,
    cache: Cache,
}

/// A token that was checked, but for the time.
#[derive(Default)]
struct Verified {
    identity: Identity,
    window: Window,
}

impl Auth {
    /// Fetches nothing yet.
    pub fn new(settings: Settings) -> Self {
        let jwks = settings.jwks.clone().map(|jwks| Arc::new(Jwks::new(jwks)));
        Self { settings, jwks, cache: Cache::default() }
    }

    /// Fetches the keys, if they are fetched from somewhere, so that the first request need not wait and a mistake shows.
    pub async fn warm_up(&self) {
        if let Some(jwks) = &self.jwks {
            jwks.warm_up().await;
        }
    }

    /// Whether `path` needs no token.
    pub fn skips(&self, path: &str) -> bool {
        self.settings.skip_paths.iter().any(|skipped| {
            let is_prefix = 1 < skipped.len() && skipped.ends_with('/');
            path == skipped || is_prefix && path.starts_with(skipped)
        })
    }

    /// Who the bearer of `token` is.
    ///
    /// # Errors
    /// [`Error::Unauthenticated`] with the reason, or [`Error::KeysUnavailable`].
    pub async fn identify(&self, token: &str) -> Result<Identity, Error> {
        let generation = self.jwks.as_ref().map_or(0, |jwks| jwks.generation());
        let verified = match self.cache.get(token, generation) {
            Some(verified) => verified,
            None => self.verify(token).await?,
        };
        verified.window.judge(claims::now(), self.settings.claims.skew_seconds)?;
        Ok(verified.identity.clone())
    }

    async fn verify(&self, token: &str) -> Result<Arc<Verified>, Error> {
        if TOKEN_BYTES_MAX < token.len() {
            return Err(Error::Unauthenticated("the token is too long"));
        }
        let header = decode_header(token).map_err(|_| Error::Unauthenticated("the token is not a JWT"))?;
        if !self.settings.algorithms.contains(&header.alg) {
            return Err(Error::Unauthenticated("the token's algorithm is not accepted"));
        }
        let (key, generation) = self.key(header.alg, header.kid.as_deref()).await?;
        let claims = checked(token, header.alg, &key)?;
        let (identity, window) = self.settings.claims.read(&claims)?;
        let verified = Arc::new(Verified { identity, window });
        // A keyed hash costs no more than to look it up.
        if header.alg.family() != AlgorithmFamily::Hmac {
            self.cache.put(token, generation, verified.clone());
        }
        Ok(verified)
    }

    /// The key to check with, and the generation of keys that it is of.
    async fn key(&self, algorithm: Algorithm, id: Option<&str>) -> Result<(DecodingKey, u64), Error> {
        let family = algorithm.family();
        let fixed = match &self.settings.public_key {
            _ if family == AlgorithmFamily::Hmac => self.settings.secret.as_ref(),
            public_key => public_key.as_ref().map(PublicKey::decoding_key).filter(|key| key.family() == family),
        };
        match (fixed, &self.jwks) {
            (Some(key), _) => Ok((key.clone(), 0)),
            (None, Some(jwks)) if family != AlgorithmFamily::Hmac => jwks.key(algorithm, id).await,
            _ => Err(Error::Unauthenticated("the token's algorithm is not accepted")),
        }
    }
}

/// The claims of a token whose signature is right. What they say is read elsewhere, by one clock.
fn checked(token: &str, algorithm: Algorithm, key: &DecodingKey) -> Result<Map<String, Value>, Error> {
    let mut rules = Validation::new(algorithm);
    rules.required_spec_claims.clear();
    rules.validate_exp = false;
    rules.validate_aud = false;
    let decoded = decode(token, key, &rules);
    decoded.map(|token| token.claims).map_err(|_| Error::Unauthenticated("the token's signature is not valid"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auth() -> Auth {
        let names = ["admin", "read-write", "read-only", "write-only"].map(str::to_owned);
        let [admin, read_write, read_only, write_only] = names;
        Auth::new(Settings {
            algorithms: vec![Algorithm::HS256],
            secret: None,
            public_key: None,
            jwks: None,
            claims: ClaimRules {
                issuer: None,
                audience: None,
                skew_seconds: 30,
                role_claims: ["role".to_owned(), "roles".to_owned()],
                role_names: RoleNames { admin, read_write, read_only, write_only },
            },
            skip_paths: vec!["/".to_owned(), "/health".to_owned(), "/open/".to_owned()],
        })
    }

    #[tokio::test]
    async fn a_token_that_is_remembered_expires_all_the_same() {
        let auth = auth();
        let ended = serde_json::json!({"exp": 1});
        let (identity, window) = auth.settings.claims.read(ended.as_object().expect("an object")).expect("readable");
        auth.cache.put("token", 0, Arc::new(Verified { identity, window }));
        let error = auth.identify("token").await.expect_err("it has expired");
        assert_eq!(error.to_string(), "the token has expired");
    }

    #[test]
    fn a_skipped_path_is_exact_unless_it_ends_in_a_slash() {
        let auth = auth();
        for (path, skipped) in [
            ("/", true),
            ("/health", true),
            ("/health/", false),
            ("/healthy", false),
            ("/open/", true),
            ("/open/a/b", true),
            ("/open", false),
            ("/api/v1/push", false),
        ] {
            assert_eq!(auth.skips(path), skipped, "{path}");
        }
    }
}
