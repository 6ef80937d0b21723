//! How payloads look in the database: as they are, or encrypted.

use std::fmt;

use aes_gcm::aead::{Aead, KeyInit, Payload};
use aes_gcm::{Aes256Gcm, Nonce};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use uuid::Uuid;

use crate::error::Error;

/// Transforms arguments, results, records of steps, signals and error texts on their way into the database and out of
/// it. Names, queues, keys, tenants and labels are never transformed, and deduplication looks at the plain arguments.
///
/// An empty value is never given to a codec: it stays empty.
pub trait PayloadCodec: Send + Sync + 'static {
    /// The stored form.
    ///
    /// # Errors
    /// A text without any of the payload.
    fn encode(&self, plain: &[u8]) -> Result<Vec<u8>, String>;

    /// What was stored.
    ///
    /// # Errors
    /// A text without any of the payload: the key is missing, or the bytes were changed.
    fn decode(&self, stored: &[u8]) -> Result<Vec<u8>, String>;

    /// Whether stored values are the plain ones. Then error texts are stored as text.
    fn is_identity(&self) -> bool {
        false
    }
}

/// Stores payloads as they are. The default.
#[derive(Clone, Copy, Debug)]
pub struct IdentityCodec;

impl PayloadCodec for IdentityCodec {
    fn encode(&self, plain: &[u8]) -> Result<Vec<u8>, String> {
        Ok(plain.to_vec())
    }

    fn decode(&self, stored: &[u8]) -> Result<Vec<u8>, String> {
        Ok(stored.to_vec())
    }

    fn is_identity(&self) -> bool {
        true
    }
}

/// Before every value that a [`SecretBox`] wrote. No JSON begins like this.
const MAGIC: &[u8; 4] = b"\x00EJ1";
const NONCE_BYTES: usize = 12;
/// Before an error text that a codec transformed.
const TEXT_MARK: &str = "encoded:";

/// Encrypts payloads with AES-256-GCM, each with a random nonce. Values are written with the primary key and read with
/// any of the keys, so that keys can be changed: first every program learns the new key as a fallback, then it becomes
/// the primary one, and the old one stays a fallback as long as rows of it are kept.
///
/// Values that are not marked as encrypted are read as they are, so that encryption can be turned on for jobs that are
/// there already; [`SecretBox::strict`] refuses them. One key should write at most 2³² values.
pub struct SecretBox {
    keys: Vec<Aes256Gcm>,
    is_strict: bool,
}

impl fmt::Debug for SecretBox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SecretBox").field("keys", &self.keys.len()).field("is_strict", &self.is_strict).finish()
    }
}

impl SecretBox {
    /// A codec that writes with `primary` and reads with it and the fallbacks.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a key is all zeros.
    pub fn new(primary: [u8; 32], fallbacks: &[[u8; 32]]) -> Result<Self, Error> {
        let mut keys = Vec::with_capacity(fallbacks.len() + 1);
        for key in std::iter::once(&primary).chain(fallbacks) {
            if key.iter().all(|byte| *byte == 0) {
                return Err(Error::invalid("key", "is not all zeros"));
            }
            keys.push(Aes256Gcm::new(key.into()));
        }
        Ok(Self { keys, is_strict: false })
    }

    /// Refuses to read values that are not encrypted. Default: they are read as they are.
    #[must_use]
    pub fn strict(mut self) -> Self {
        self.is_strict = true;
        self
    }
}

/// Twelve random bytes of two random UUIDs, whose version and variant bits are left out.
fn nonce() -> [u8; NONCE_BYTES] {
    let (one, two) = (Uuid::new_v4().into_bytes(), Uuid::new_v4().into_bytes());
    let mut nonce = [0; NONCE_BYTES];
    nonce[..6].copy_from_slice(&one[..6]);
    nonce[6..].copy_from_slice(&two[..6]);
    nonce
}

impl PayloadCodec for SecretBox {
    fn encode(&self, plain: &[u8]) -> Result<Vec<u8>, String> {
        let nonce = nonce();
        let payload = Payload { msg: plain, aad: MAGIC };
        let sealed = self.keys[0].encrypt(&Nonce::from(nonce), payload).map_err(|_| "cannot be encrypted")?;
        Ok([&MAGIC[..], &nonce, &sealed].concat())
    }

    fn decode(&self, stored: &[u8]) -> Result<Vec<u8>, String> {
        let Some(rest) = stored.strip_prefix(MAGIC) else {
            return if self.is_strict { Err("it is not encrypted".to_owned()) } else { Ok(stored.to_vec()) };
        };
        let (nonce, sealed) = rest.split_first_chunk::<NONCE_BYTES>().ok_or("it is torn")?;
        let open = |key: &Aes256Gcm| key.decrypt(&Nonce::from(*nonce), Payload { msg: sealed, aad: MAGIC }).ok();
        self.keys.iter().find_map(open).ok_or_else(|| "no key opens it".to_owned())
    }
}

/// A codec as the library uses it.
pub(crate) fn encode(codec: &dyn PayloadCodec, plain: Vec<u8>) -> Result<Vec<u8>, Error> {
    if plain.is_empty() || codec.is_identity() {
        return Ok(plain);
    }
    codec.encode(&plain).map_err(Error::storage)
}

pub(crate) fn decode(codec: &dyn PayloadCodec, stored: &[u8]) -> Result<Vec<u8>, Error> {
    if stored.is_empty() || codec.is_identity() {
        return Ok(stored.to_vec());
    }
    codec.decode(stored).map_err(Error::PayloadDecode)
}

/// An error text in its stored form: as it is, or encoded and marked.
pub(crate) fn encode_text(codec: &dyn PayloadCodec, text: &str) -> String {
    if text.is_empty() || codec.is_identity() {
        return text.to_owned();
    }
    match codec.encode(text.as_bytes()) {
        Ok(stored) => format!("{TEXT_MARK}{}", STANDARD.encode(stored)),
        // The text may hold what the codec is there to hide.
        Err(_) => "an error that could not be encoded".to_owned(),
    }
}

/// An error text as it was given. One that is not marked, or that cannot be read, is answered as it is stored.
pub(crate) fn decode_text(codec: &dyn PayloadCodec, stored: &str) -> String {
    let plain = stored
        .strip_prefix(TEXT_MARK)
        .and_then(|coded| STANDARD.decode(coded).ok())
        .and_then(|bytes| codec.decode(&bytes).ok())
        .and_then(|bytes| String::from_utf8(bytes).ok());
    plain.unwrap_or_else(|| stored.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_can_be_changed() {
        let (old, new) = ([1; 32], [2; 32]);
        let by_old = SecretBox::new(old, &[]).unwrap();
        let both = SecretBox::new(new, &[old]).unwrap();
        let stored = by_old.encode(b"{}").unwrap();
        assert_ne!(stored, by_old.encode(b"{}").unwrap(), "the nonce does not change");
        assert_eq!(both.decode(&stored).unwrap(), b"{}");
        assert!(by_old.decode(&both.encode(b"{}").unwrap()).is_err());
    }

    #[test]
    fn what_is_not_encrypted_is_read_unless_strict() {
        let keys = SecretBox::new([1; 32], &[]).unwrap();
        assert_eq!(keys.decode(b"{\"a\":1}").unwrap(), b"{\"a\":1}");
        assert!(keys.strict().decode(b"{\"a\":1}").is_err());
    }

    #[test]
    fn changed_bytes_and_zero_keys_are_refused() {
        let keys = SecretBox::new([1; 32], &[]).unwrap();
        let mut stored = keys.encode(b"{}").unwrap();
        *stored.last_mut().unwrap() ^= 1;
        assert!(keys.decode(&stored).is_err());
        assert!(keys.decode(MAGIC).is_err());
        assert!(matches!(SecretBox::new([1; 32], &[[0; 32]]), Err(Error::Invalid { field: "key", .. })));
    }

    #[test]
    fn empty_values_stay_empty_and_texts_are_marked() {
        let keys = SecretBox::new([1; 32], &[]).unwrap();
        assert_eq!(encode(&keys, Vec::new()).unwrap(), b"");
        assert_eq!(decode(&keys, b"").unwrap(), b"");
        let stored = encode_text(&keys, "no funds");
        assert!(stored.starts_with(TEXT_MARK) && !stored.contains("funds"));
        assert_eq!(decode_text(&keys, &stored), "no funds");
        assert_eq!(decode_text(&keys, "plain"), "plain");
        assert_eq!(encode_text(&IdentityCodec, "plain"), "plain");
    }
}
