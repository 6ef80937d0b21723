//! Public keys: which are taken, from a PEM text or from a key set.

use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey, DecodingKeyKind};

/// An RSA modulus shorter than this, 2048 bits, is refused.
const RSA_BYTES_MIN: usize = 256;
/// A longer one, 8192 bits, costs more to use than any issuer asks for.
const RSA_BYTES_MAX: usize = 1024;
const ED25519_BYTES: usize = 32;

/// A key that verifies signatures and cannot make them.
#[derive(Clone)]
pub struct PublicKey(DecodingKey);

impl PublicKey {
    /// Of an RSA or Ed25519 key in PEM, for the signatures of `families`.
    ///
    /// # Errors
    /// What is wrong with it, in words that do not show it.
    pub fn from_pem(text: &str, families: &[AlgorithmFamily]) -> Result<Self, &'static str> {
        // A variable often holds the line ends as they are written in source code.
        let text = text.replace("\\n", "\n");
        if text.contains("PRIVATE KEY-----") {
            return Err("is a private key; only the public one belongs here");
        }
        let is_public = text.contains("-----BEGIN PUBLIC KEY-----") || text.contains("-----BEGIN RSA PUBLIC KEY-----");
        if !is_public {
            return Err("is not a public key in PEM");
        }
        let rsa = DecodingKey::from_rsa_pem(text.as_bytes());
        let ed = DecodingKey::from_ed_pem(text.as_bytes());
        let key = rsa.or(ed).map_err(|_| "is neither an RSA nor an Ed25519 public key")?;
        if !families.contains(&key.family()) {
            return Err("is not of the kind that JWT_ALGORITHM asks for");
        }
        is_accepted_public_key(&key)
            .then_some(Self(key))
            .ok_or("has a length that is not accepted: RSA needs 2048 bits")
    }

    pub fn family(&self) -> AlgorithmFamily {
        self.0.family()
    }

    pub(super) fn decoding_key(&self) -> &DecodingKey {
        &self.0
    }
}

/// Whether the key is of a length that is secure and can be used.
fn is_accepted_public_key(key: &DecodingKey) -> bool {
    match (key.family(), key.kind()) {
        (AlgorithmFamily::Rsa, DecodingKeyKind::RsaModulusExponent { n, e }) => {
            let modulus = n.iter().skip_while(|byte| **byte == 0).count();
            (RSA_BYTES_MIN..=RSA_BYTES_MAX).contains(&modulus) && (1..=8).contains(&e.len())
        }
        // DER: the modulus, the exponent and a few bytes around them.
        (AlgorithmFamily::Rsa, DecodingKeyKind::SecretOrDer(der)) => {
            (RSA_BYTES_MIN + 4..=RSA_BYTES_MAX + 32).contains(&der.len())
        }
        (AlgorithmFamily::Ed, DecodingKeyKind::SecretOrDer(bytes)) => bytes.len() == ED25519_BYTES,
        _ => false,
    }
}

/// A key of a key set.
pub(super) struct SetKey {
    pub(super) id: Option<String>,
    /// The one algorithm that it is for, if the set says so.
    algorithm: Option<Algorithm>,
    pub(super) key: DecodingKey,
}

impl SetKey {
    /// `None` for what verifies no signature here: encryption keys, other curves, shared secrets, keys too short.
    pub(super) fn new(jwk: &Jwk) -> Option<Self> {
        let common = &jwk.common;
        let verifies = common.public_key_use.as_ref().is_none_or(|purpose| *purpose == PublicKeyUse::Signature)
            && common.key_operations.as_ref().is_none_or(|operations| operations.contains(&KeyOperations::Verify));
        let is_kind = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => true,
            AlgorithmParameters::OctetKeyPair(pair) => pair.curve == EllipticCurve::Ed25519,
            _ => false,
        };
        if !verifies || !is_kind {
            return None;
        }
        let key = DecodingKey::from_jwk(jwk).ok().filter(is_accepted_public_key)?;
        let algorithm = match common.key_algorithm {
            None => None,
            Some(named) => Some(Algorithm::try_from(named).ok()?),
        };
        Some(Self { id: common.key_id.clone(), algorithm, key })
    }

    pub(super) fn serves(&self, algorithm: Algorithm) -> bool {
        self.key.family() == algorithm.family() && self.algorithm.is_none_or(|only| only == algorithm)
    }
}
