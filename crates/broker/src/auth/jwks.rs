//! Keys that are fetched from their issuer: one fetch at a time, not more often than is decent, and the keys that are
//! known serve until there are newer ones.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use axum::http::uri::Scheme;
use axum::http::{Request, StatusCode, Uri};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{Algorithm, DecodingKey};
use rustls::{ClientConfig, RootCertStore};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use super::key::SetKey;
use crate::error::Error;

/// Largest key set that is read.
const SET_BYTES_MAX: usize = 1 << 20;
/// Keys of a set that are looked at.
const SET_KEYS_MAX: usize = 100;

/// Where keys are fetched, and how often.
#[derive(Clone, Debug)]
pub struct JwksSettings {
    /// `http` or `https`, with a host.
    pub address: Uri,
    /// Keys older than this are fetched again, beside the requests.
    pub refresh: Duration,
    /// For one fetch, from the look-up of the host to the last byte.
    pub timeout: Duration,
    /// Between two fetches, whatever asks for them.
    pub pause: Duration,
}

#[derive(Default)]
struct Keys {
    keys: Vec<SetKey>,
    fetched_at: Option<Instant>,
    /// How many sets there were, this one included.
    generation: u64,
}

pub(super) struct Jwks {
    settings: JwksSettings,
    client: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
    keys: RwLock<Arc<Keys>>,
    /// Held while a fetch is under way; when the last one ended.
    fetching: Arc<Mutex<Option<Instant>>>,
}

#[derive(Deserialize)]
struct KeySet<'a> {
    #[serde(borrow)]
    keys: Vec<&'a RawValue>,
}

impl Jwks {
    pub(super) fn new(settings: JwksSettings) -> Self {
        let mut roots = RootCertStore::empty();
        if settings.address.scheme() == Some(&Scheme::HTTPS) {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
        let tls = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("ring supports the default versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().build();
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector);
        Self { settings, client, keys: RwLock::default(), fetching: Arc::default() }
    }

    pub(super) async fn warm_up(&self) {
        self.fetch(&mut *self.fetching.lock().await).await;
    }

    /// Which set is in force. Asked for with every request, so it sees to it that the set does not grow old.
    pub(super) fn generation(self: &Arc<Self>) -> u64 {
        let keys = self.current();
        if keys.fetched_at.is_some_and(|at| self.settings.refresh <= at.elapsed()) {
            self.refresh();
        }
        keys.generation
    }

    /// The key `id`, or the only one for `algorithm` if the token names none; and the generation of its set.
    ///
    /// # Errors
    /// [`Error::Unauthenticated`] if there is no such key, or [`Error::KeysUnavailable`] if none was ever fetched.
    pub(super) async fn key(&self, algorithm: Algorithm, id: Option<&str>) -> Result<(DecodingKey, u64), Error> {
        if let Some(found) = self.current().find(algorithm, id) {
            return Ok(found);
        }
        // The issuer may have new keys. All that wait here are served by one fetch.
        let asked_at = Instant::now();
        let mut last = self.fetching.lock().await;
        if last.is_none_or(|ended_at| ended_at < asked_at && self.settings.pause <= ended_at.elapsed()) {
            self.fetch(&mut last).await;
        }
        drop(last);
        let keys = self.current();
        match keys.find(algorithm, id) {
            Some(found) => Ok(found),
            None if keys.fetched_at.is_none() => Err(Error::KeysUnavailable),
            None if id.is_some() => Err(Error::Unauthenticated("the token's key is not known")),
            None => Err(Error::Unauthenticated("the token does not say which key it is signed with")),
        }
    }

    fn current(&self) -> Arc<Keys> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn refresh(self: &Arc<Self>) {
        let Ok(mut last) = self.fetching.clone().try_lock_owned() else { return };
        if last.is_none_or(|ended_at| self.settings.pause <= ended_at.elapsed()) {
            let jwks = self.clone();
            tokio::spawn(async move { jwks.fetch(&mut last).await });
        }
    }

    /// What fails is said, and the keys that are there stay.
    async fn fetch(&self, last: &mut Option<Instant>) {
        let fetched = timeout(self.settings.timeout, self.fetch_set()).await;
        *last = Some(Instant::now());
        let host = self.settings.address.host().unwrap_or_default();
        match fetched.unwrap_or_else(|_| Err("it did not answer in time".to_owned())) {
            Ok(keys) => {
                info!(target: "http", host, keys = keys.len(), "token keys fetched");
                let generation = self.current().generation + 1;
                let keys = Arc::new(Keys { keys, fetched_at: *last, generation });
                *self.keys.write().unwrap_or_else(PoisonError::into_inner) = keys;
            }
            Err(why) => warn!(target: "http", host, why, "token keys could not be fetched from JWT_JWKS_URL"),
        }
    }

    async fn fetch_set(&self) -> Result<Vec<SetKey>, String> {
        let request = Request::get(&self.settings.address).header("accept", "application/json");
        let request = request.body(Empty::new()).map_err(|error| error.to_string())?;
        let answer = self.client.request(request).await.map_err(|error| with_cause(&error))?;
        // A redirect is not followed: it would decide whose keys are believed.
        if answer.status() != StatusCode::OK {
            return Err(format!("it answered {}", answer.status()));
        }
        let body = Limited::new(answer.into_body(), SET_BYTES_MAX).collect().await;
        let body = body.map_err(|error| format!("its answer could not be read: {error}"))?.to_bytes();
        let set: KeySet<'_> = serde_json::from_slice(&body).map_err(|error| format!("it is no key set: {error}"))?;
        let read = |raw: &&RawValue| serde_json::from_str::<Jwk>(raw.get()).ok().as_ref().and_then(SetKey::new);
        let keys: Vec<SetKey> = set.keys.iter().take(SET_KEYS_MAX).filter_map(read).collect();
        if keys.is_empty() {
            return Err(format!("of its {} keys none can be used: RSA of 2048 bits or Ed25519", set.keys.len()));
        }
        Ok(keys)
    }
}

fn with_cause(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", with_cause(cause)),
        None => error.to_string(),
    }
}

impl Keys {
    fn find(&self, algorithm: Algorithm, id: Option<&str>) -> Option<(DecodingKey, u64)> {
        let mut fitting = self.keys.iter().filter(|key| key.serves(algorithm));
        let found = match id {
            Some(id) => fitting.find(|key| key.id.as_deref() == Some(id)),
            // Among several, guessing would let a token choose the weakest.
            None => fitting.next().filter(|_| fitting.next().is_none()),
        };
        found.map(|key| (key.key.clone(), self.generation))
    }
}
