//! Payloads at rest that only a server with the key can read: AES-256-GCM, each sealed for one message.
//!
//! A sealed payload is JSON itself, so it goes wherever a payload goes:
//!
//! ```text
//! {"encrypted": base64 of the ciphertext, "iv": base64 of the nonce, "authTag": base64 of the tag}
//! ```
//!
//! The message id is authenticated with it. A payload that somebody moved to another message does not open; one that
//! moves with its message, into a segment or a dead letter, does.

mod queues;

use std::fmt;
use std::sync::Arc;

use aes_gcm::aead::{AeadInOut, Generate, Nonce, Tag};
use aes_gcm::{Aes256Gcm, KeyInit};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use uuid::Uuid;
use zeroize::Zeroizing;

use crate::error::Error;
pub use queues::Sealing;

/// Length of a key in bytes; it is written as twice as many hexadecimal digits.
const KEY_BYTES: usize = 32;

/// A key as it was configured. It shows itself to nobody and is wiped when it goes.
#[derive(Clone)]
pub struct Key(Zeroizing<[u8; KEY_BYTES]>);

impl Key {
    /// `None` unless `text` is 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digits = text.as_bytes();
        if digits.len() != 2 * KEY_BYTES {
            return None;
        }
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        for (byte, pair) in key.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |digit: u8| char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok());
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Some(Self(key))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

/// What seals and opens payloads; without a key it does neither. Cheap to clone.
#[derive(Clone, Default)]
pub struct Sealer(Option<Arc<Aes256Gcm>>);

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.has_key() { "Sealer(with a key)" } else { "Sealer(without a key)" })
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Envelope<'a> {
    encrypted: &'a str,
    iv: &'a str,
    auth_tag: &'a str,
}

impl Sealer {
    pub fn new(key: Option<&Key>) -> Self {
        Self(key.map(|key| Arc::new(Aes256Gcm::new((&*key.0).into()))))
    }

    pub fn has_key(&self) -> bool {
        self.0.is_some()
    }

    /// The sealed form of `payload`; `None` without a key. Each call draws a nonce of its own.
    pub fn seal(&self, message_id: Uuid, payload: &[u8]) -> Option<Vec<u8>> {
        let cipher = self.0.as_ref()?;
        let nonce = Nonce::<Aes256Gcm>::generate();
        let mut bytes = payload.to_vec();
        let tag = cipher
            .encrypt_inout_detached(&nonce, message_id.as_bytes(), bytes.as_mut_slice().into())
            .expect("a payload is far shorter than the cipher's 64 GiB");
        let mut envelope = String::with_capacity(bytes.len() / 3 * 4 + 96);
        envelope.push_str(r#"{"encrypted":""#);
        BASE64_STANDARD.encode_string(&bytes, &mut envelope);
        envelope.push_str(r#"","iv":""#);
        BASE64_STANDARD.encode_string(nonce, &mut envelope);
        envelope.push_str(r#"","authTag":""#);
        BASE64_STANDARD.encode_string(tag, &mut envelope);
        envelope.push_str(r#""}"#);
        Some(envelope.into_bytes())
    }

    /// The payload that was sealed for `message_id`, byte for byte.
    ///
    /// # Errors
    /// [`Error::Sealed`] without a key, with another one than it was sealed with, for another message, or if a bit of
    /// it was changed.
    pub fn open(&self, message_id: Uuid, envelope: &[u8]) -> Result<Vec<u8>, Error> {
        let sealed = |why: &str| Error::Sealed(why.to_owned());
        let cipher = self.0.as_ref().ok_or_else(|| sealed("it is encrypted, and QUEEN_ENCRYPTION_KEY is not set"))?;
        opened(cipher, message_id, envelope).ok_or_else(|| {
            sealed("QUEEN_ENCRYPTION_KEY does not open it: it was encrypted with another key, or altered since")
        })
    }
}

fn opened(cipher: &Aes256Gcm, message_id: Uuid, envelope: &[u8]) -> Option<Vec<u8>> {
    let Envelope { encrypted, iv, auth_tag } = serde_json::from_slice(envelope).ok()?;
    let decoded = |text: &str| BASE64_STANDARD.decode(text).ok();
    let nonce = Nonce::<Aes256Gcm>::try_from(decoded(iv)?.as_slice()).ok()?;
    let tag = Tag::<Aes256Gcm>::try_from(decoded(auth_tag)?.as_slice()).ok()?;
    let mut bytes = decoded(encrypted)?;
    cipher.decrypt_inout_detached(&nonce, message_id.as_bytes(), bytes.as_mut_slice().into(), &tag).ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn sealer(digit: &str) -> Sealer {
        Sealer::new(Some(&Key::from_hex(&digit.repeat(64)).expect("a key")))
    }

    #[test]
    fn a_key_is_64_hexadecimal_digits() {
        assert!(Key::from_hex(&"0123456789abcdefABCDEF0123456789".repeat(2)).is_some());
        let (short, long, other) = ("0".repeat(63), "0".repeat(65), "g".repeat(64));
        for text in ["", &short, &long, &other, &"é".repeat(32), &format!("+{short}")] {
            assert!(Key::from_hex(text).is_none(), "{text}");
        }
        assert!(!format!("{:?}", Key::from_hex(&"a1".repeat(32))).contains("a1"));
    }

    #[test]
    fn what_was_sealed_opens_byte_for_byte_for_its_message_only() {
        let (sealer, id) = (sealer("7"), Uuid::now_v7());
        for payload in ["", "null", "{\"b\": 1.0, \"a\": \"\\u0000\\ud800\"}", &"x".repeat(100_000)] {
            let sealed = sealer.seal(id, payload.as_bytes()).expect("there is a key");
            serde_json::from_slice::<serde_json::Value>(&sealed).expect("JSON");
            assert_eq!(sealer.open(id, &sealed).expect("opens"), payload.as_bytes());
            assert!(matches!(sealer.open(Uuid::now_v7(), &sealed), Err(Error::Sealed(_))), "another message");
        }
    }

    #[test]
    fn another_key_or_none_opens_nothing() {
        let id = Uuid::now_v7();
        let sealed = sealer("7").seal(id, b"1").expect("there is a key");
        let error = |sealer: &Sealer| sealer.open(id, &sealed).expect_err("does not open").to_string();
        assert!(error(&sealer("8")).contains("another key"));
        assert!(error(&Sealer::default()).contains("not set"));
        assert!(Sealer::default().seal(id, b"1").is_none());
    }

    #[test]
    fn every_changed_byte_is_noticed() {
        let (sealer, id) = (sealer("7"), Uuid::now_v7());
        let sealed = sealer.seal(id, b"{\"total\": 12.50}").expect("there is a key");
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            assert!(sealer.open(id, &changed).is_err(), "byte {at}");
        }
        for other in [&b"{}"[..], b"null", b"", b"{\"encrypted\":\"\",\"iv\":\"\",\"authTag\":\"\"}"] {
            assert!(sealer.open(id, other).is_err());
        }
    }

    #[test]
    fn no_nonce_is_drawn_twice() {
        let (sealer, id) = (sealer("7"), Uuid::now_v7());
        let sealed: HashSet<Vec<u8>> = (0..1000).map(|_| sealer.seal(id, b"1").expect("there is a key")).collect();
        assert_eq!(sealed.len(), 1000);
    }
}
