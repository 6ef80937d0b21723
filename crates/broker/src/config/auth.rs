//! The settings of token authentication ─► the rules and keys that tokens are checked with.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use axum::http::Uri;
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey};

use super::raw::GivenAuth;
use super::setting::{Findings, Given, Secret, Text};
use crate::auth::{ClaimRules, JwksSettings, PublicKey, RoleNames, Settings};

const HMAC: [Algorithm; 3] = [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512];
const RSA: [Algorithm; 3] = [Algorithm::RS256, Algorithm::RS384, Algorithm::RS512];
/// RFC 7518 asks for a secret as long as the hash; a shorter one can be guessed from a token.
const SECRET_BYTES_MIN: usize = 32;
/// Between two fetches of the keys, so that tokens with invented key ids cannot flood their issuer.
const FETCH_PAUSE: Duration = Duration::from_secs(10);

/// `None` when requests need no token.
pub(super) fn check(given: GivenAuth, findings: &mut Findings) -> Option<Settings> {
    let unused = given.without_effect();
    let GivenAuth {
        jwt_enabled,
        jwt_algorithm,
        jwt_secret,
        jwt_public_key,
        jwt_jwks_url,
        jwt_jwks_refresh_interval,
        jwt_jwks_timeout_ms,
        jwt_clock_skew,
        jwt_issuer,
        jwt_audience,
        jwt_skip_paths,
        jwt_roles_claim,
        jwt_roles_array_claim,
        jwt_role_admin,
        jwt_role_read_write,
        jwt_role_read_only,
        jwt_role_write_only,
    } = given;
    let is_enabled = jwt_enabled.read(findings);
    if !is_enabled && !unused.is_empty() {
        let names = unused.join(", ");
        findings.warnings.push(format!("JWT_ENABLED is false, so these have no effect: {names}"));
    }
    let role_names = RoleNames {
        admin: jwt_role_admin.read(),
        read_write: jwt_role_read_write.read(),
        read_only: jwt_role_read_only.read(),
        write_only: jwt_role_write_only.read(),
    };
    check_role_names(&role_names, findings);
    let claims = ClaimRules {
        issuer: jwt_issuer.read_given(),
        audience: jwt_audience.read_given(),
        skew_seconds: jwt_clock_skew.read_u64(findings),
        role_claims: [jwt_roles_claim.read(), jwt_roles_array_claim.read()],
        role_names,
    };
    let refresh = Duration::from_secs(jwt_jwks_refresh_interval.read_u64(findings));
    let timeout = Duration::from_millis(jwt_jwks_timeout_ms.read_u64(findings));
    let skip_paths = check_skip_paths(&jwt_skip_paths.read(), findings);
    let algorithm = jwt_algorithm.read(findings);
    if !is_enabled {
        return None;
    }
    let families = families(algorithm);
    let secret = check_secret(&jwt_secret.read(), &families, algorithm, findings);
    let public_key = check_public_key(jwt_public_key, &families, algorithm, findings);
    let jwks = check_jwks_url(jwt_jwks_url, &families, algorithm, findings);
    let jwks = jwks.map(|address| JwksSettings { address, refresh, timeout, pause: FETCH_PAUSE });
    if public_key.is_some() && jwks.is_some() {
        findings
            .errors
            .push("JWT_PUBLIC_KEY and JWT_JWKS_URL are both set; only one can say which keys count".to_owned());
    }
    let mut algorithms = algorithms(algorithm);
    // With `auto`, those that there are keys for.
    algorithms.retain(|algorithm| match algorithm.family() {
        AlgorithmFamily::Hmac => secret.is_some(),
        family => jwks.is_some() || public_key.as_ref().is_some_and(|key| key.family() == family),
    });
    if algorithms.is_empty() && findings.errors.is_empty() {
        findings
            .errors
            .push(format!("JWT_ENABLED is true and JWT_ALGORITHM {algorithm}, which needs {}", needs(algorithm)));
    }
    Some(Settings { algorithms, secret, public_key, jwks, claims, skip_paths })
}

fn algorithms(name: &str) -> Vec<Algorithm> {
    match name {
        "HS256" => vec![Algorithm::HS256],
        "HS384" => vec![Algorithm::HS384],
        "HS512" => vec![Algorithm::HS512],
        "RS256" => vec![Algorithm::RS256],
        "RS384" => vec![Algorithm::RS384],
        "RS512" => vec![Algorithm::RS512],
        "EdDSA" => vec![Algorithm::EdDSA],
        _ => [HMAC.as_slice(), &RSA, &[Algorithm::EdDSA]].concat(),
    }
}

fn families(name: &str) -> Vec<AlgorithmFamily> {
    algorithms(name).into_iter().map(Algorithm::family).collect()
}

fn needs(algorithm: &str) -> &'static str {
    match algorithm {
        "auto" => "JWT_SECRET, JWT_PUBLIC_KEY or JWT_JWKS_URL",
        name if name.starts_with("HS") => "JWT_SECRET",
        _ => "JWT_PUBLIC_KEY or JWT_JWKS_URL",
    }
}

fn no_effect(variable: &str, algorithm: &str, findings: &mut Findings) {
    findings.warnings.push(format!("{variable} has no effect with JWT_ALGORITHM={algorithm}"));
}

fn check_secret(
    secret: &Secret, families: &[AlgorithmFamily], algorithm: &str, findings: &mut Findings,
) -> Option<DecodingKey> {
    let text = secret.reveal()?;
    if !families.contains(&AlgorithmFamily::Hmac) {
        no_effect("JWT_SECRET", algorithm, findings);
        return None;
    }
    if text.len() < SECRET_BYTES_MIN {
        findings.warnings.push(format!(
            "JWT_SECRET is {secret:?}; with fewer than {SECRET_BYTES_MIN} it can be guessed by whoever sees a token"
        ));
    }
    Some(DecodingKey::from_secret(text.as_bytes()).expect("it is not empty"))
}

fn check_public_key(
    given: Given<Text>, families: &[AlgorithmFamily], algorithm: &str, findings: &mut Findings,
) -> Option<PublicKey> {
    let text = given.read_given()?;
    if families.iter().all(|family| *family == AlgorithmFamily::Hmac) {
        no_effect("JWT_PUBLIC_KEY", algorithm, findings);
        return None;
    }
    let key = PublicKey::from_pem(&text, families);
    key.map_err(|why| findings.errors.push(format!("JWT_PUBLIC_KEY {why}"))).ok()
}

fn check_jwks_url(
    given: Given<Text>, families: &[AlgorithmFamily], algorithm: &str, findings: &mut Findings,
) -> Option<Uri> {
    let text = given.read_given()?;
    if families.iter().all(|family| *family == AlgorithmFamily::Hmac) {
        no_effect("JWT_JWKS_URL", algorithm, findings);
        return None;
    }
    let address = text.parse::<Uri>().ok().filter(|address| {
        let has_login = address.authority().is_some_and(|authority| authority.as_str().contains('@'));
        matches!(address.scheme_str(), Some("http" | "https")) && address.host().is_some() && !has_login
    });
    let Some(address) = address else {
        findings.errors.push("JWT_JWKS_URL is not http(s)://host/path, without a login in it".to_owned());
        return None;
    };
    if address.scheme_str() == Some("http") && !is_loopback(address.host().unwrap_or_default()) {
        findings.warnings.push(
            "JWT_JWKS_URL is not https: whoever is on the way to it can hand out keys, and with them every role"
                .to_owned(),
        );
    }
    Some(address)
}

fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn check_role_names(names: &RoleNames, findings: &mut Findings) {
    let RoleNames { admin, read_write, read_only, write_only } = names;
    let distinct: BTreeSet<&str> = [admin, read_write, read_only, write_only].map(String::as_str).into();
    if distinct.len() < 4 {
        findings.errors.push("two of the JWT_ROLE_ settings have the same name".to_owned());
    }
}

fn check_skip_paths(text: &str, findings: &mut Findings) -> Vec<String> {
    let paths: Vec<String> =
        text.split(',').map(|path| path.trim().to_owned()).filter(|path| !path.is_empty()).collect();
    if let Some(path) = paths.iter().find(|path| !path.starts_with('/')) {
        findings.errors.push(format!("JWT_SKIP_PATHS names {path:?}, which does not begin with a slash"));
    }
    paths
}

impl GivenAuth {
    /// What is set besides the switch.
    fn without_effect(&self) -> Vec<&'static str> {
        let Self {
            jwt_enabled: _,
            jwt_algorithm,
            jwt_secret,
            jwt_public_key,
            jwt_jwks_url,
            jwt_jwks_refresh_interval,
            jwt_jwks_timeout_ms,
            jwt_clock_skew,
            jwt_issuer,
            jwt_audience,
            jwt_skip_paths,
            jwt_roles_claim,
            jwt_roles_array_claim,
            jwt_role_admin,
            jwt_role_read_write,
            jwt_role_read_only,
            jwt_role_write_only,
        } = self;
        let numbers = [jwt_jwks_refresh_interval, jwt_jwks_timeout_ms, jwt_clock_skew];
        let texts = [
            jwt_public_key,
            jwt_jwks_url,
            jwt_issuer,
            jwt_audience,
            jwt_skip_paths,
            jwt_roles_claim,
            jwt_roles_array_claim,
            jwt_role_admin,
            jwt_role_read_write,
            jwt_role_read_only,
            jwt_role_write_only,
        ];
        let mut set = Vec::new();
        set.extend(jwt_algorithm.is_set().then(|| jwt_algorithm.variable()));
        set.extend(jwt_secret.is_set().then(|| jwt_secret.variable()));
        set.extend(numbers.iter().filter(|number| number.is_set()).map(|number| number.variable()));
        set.extend(texts.iter().filter(|text| text.is_set()).map(|text| text.variable()));
        set
    }
}
