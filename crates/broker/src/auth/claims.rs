//! What a verified token says: when it counts, who it is for, and whom it is about.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::{Identity, RoleNames, Roles};
use crate::error::Error;

/// Longest `sub`, in bytes.
const SUBJECT_BYTES_MAX: usize = 1024;

/// What the claims must be, and where the roles stand in them.
#[derive(Clone, Debug)]
pub struct ClaimRules {
    pub issuer: Option<String>,
    pub audience: Option<String>,
    /// By how many seconds the clocks of issuer and server may differ.
    pub skew_seconds: u64,
    /// The claims that name roles, each as a string or as a list of them.
    pub role_claims: [String; 2],
    pub role_names: RoleNames,
}

/// When a token counts, in seconds since 1970. A token may leave either end open.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Window {
    from: Option<f64>,
    until: Option<f64>,
}

/// The process's clock, in seconds since 1970.
#[allow(
    clippy::disallowed_methods,
    reason = "a token's times are its issuer's, and the skew allows for this clock; the database's would cost each request a round trip"
)]
pub(super) fn now() -> f64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

impl Window {
    /// # Errors
    /// [`Error::Unauthenticated`] if `now` is outside, by more than `skew_seconds`.
    pub(super) fn judge(&self, now: f64, skew_seconds: u64) -> Result<(), Error> {
        #[expect(clippy::cast_precision_loss, reason = "a skew is at most an hour")]
        let skew = skew_seconds as f64;
        if self.until.is_some_and(|until| until + skew <= now) {
            return Err(Error::Unauthenticated("the token has expired"));
        }
        if self.from.is_some_and(|from| now + skew < from) {
            return Err(Error::Unauthenticated("the token is not valid yet"));
        }
        Ok(())
    }
}

impl ClaimRules {
    /// # Errors
    /// [`Error::Unauthenticated`] if the token is somebody else's, or a claim is not of its type.
    pub(super) fn read(&self, claims: &Map<String, Value>) -> Result<(Identity, Window), Error> {
        if let Some(issuer) = &self.issuer
            && claims.get("iss").and_then(Value::as_str) != Some(issuer)
        {
            return Err(Error::Unauthenticated("the token's issuer is not the right one"));
        }
        if let Some(audience) = &self.audience
            && !texts(claims.get("aud")).any(|text| text == audience)
        {
            return Err(Error::Unauthenticated("the token is not for this audience"));
        }
        let window = Window { from: time(claims, "nbf")?, until: time(claims, "exp")? };
        let mut identity = Identity { subject: subject(claims)?, roles: Roles::default() };
        for name in self.role_claims.iter().flat_map(|claim| texts(claims.get(claim))) {
            let RoleNames { admin, read_write, read_only, write_only } = &self.role_names;
            identity.roles.admin |= name == admin;
            identity.roles.read_write |= name == read_write;
            identity.roles.read_only |= name == read_only;
            identity.roles.write_only |= name == write_only;
        }
        Ok((identity, window))
    }
}

/// A string, or the strings of a list.
fn texts(value: Option<&Value>) -> impl Iterator<Item = &str> {
    let (one, many) = match value {
        Some(Value::Array(list)) => (None, list.as_slice()),
        other => (other, [].as_slice()),
    };
    one.into_iter().chain(many).filter_map(Value::as_str)
}

/// RFC 7519 lets a date have a fraction.
fn time(claims: &Map<String, Value>, name: &str) -> Result<Option<f64>, Error> {
    match claims.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Number(number)) => Ok(number.as_f64()),
        Some(_) => Err(Error::Unauthenticated("a date of the token is not a number")),
    }
}

/// It is stored with every message, so it has a limit, and no U+0000, which the database cannot hold.
fn subject(claims: &Map<String, Value>) -> Result<Option<Arc<str>>, Error> {
    match claims.get("sub") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text.len() <= SUBJECT_BYTES_MAX && !text.contains('\0') => {
            Ok(Some(text.as_str().into()))
        }
        Some(_) => Err(Error::Unauthenticated("the token's subject is not usable text")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rules() -> ClaimRules {
        ClaimRules {
            issuer: None,
            audience: None,
            skew_seconds: 30,
            role_claims: ["role".to_owned(), "roles".to_owned()],
            role_names: RoleNames {
                admin: "admin".to_owned(),
                read_write: "read-write".to_owned(),
                read_only: "read-only".to_owned(),
                write_only: "write-only".to_owned(),
            },
        }
    }

    fn read(rules: &ClaimRules, claims: Value) -> Result<(Identity, Window), Error> {
        rules.read(claims.as_object().expect("an object"))
    }

    #[test]
    fn a_token_counts_from_nbf_until_exp_give_or_take_the_skew() {
        let (_, window) = read(&rules(), json!({"nbf": 1000, "exp": 2000.5})).expect("valid");
        for (now, counts) in [(969.9, false), (970.0, true), (1500.0, true), (2030.4, true), (2030.5, false)] {
            assert_eq!(window.judge(now, 30).is_ok(), counts, "{now}");
        }
        let (_, open) = read(&rules(), json!({"exp": null})).expect("valid");
        for now in [0.0, 1e18] {
            assert!(open.judge(now, 0).is_ok(), "without exp a token counts for ever");
        }
        let (_, huge) = read(&rules(), json!({"exp": 1e300, "nbf": -5})).expect("valid");
        assert!(huge.judge(now(), 0).is_ok());
        for wrong in [json!({"exp": "2000"}), json!({"nbf": true}), json!({"exp": [1]})] {
            assert!(read(&rules(), wrong).is_err(), "an end that cannot be read is not no end");
        }
    }

    #[test]
    fn issuer_and_audience_are_checked_where_they_are_set() {
        let any = read(&rules(), json!({"iss": "x", "aud": 7}));
        assert!(any.is_ok(), "neither is set");
        let rules = ClaimRules { issuer: Some("me".to_owned()), audience: Some("us".to_owned()), ..rules() };
        for claims in [json!({"iss": "me", "aud": "us"}), json!({"iss": "me", "aud": ["them", "us"]})] {
            assert!(read(&rules, claims).is_ok());
        }
        for claims in [
            json!({"aud": "us"}),
            json!({"iss": "me"}),
            json!({"iss": "you", "aud": "us"}),
            json!({"iss": ["me"], "aud": "us"}),
            json!({"iss": "me", "aud": ["them"]}),
            json!({"iss": "me", "aud": "US"}),
            json!({"iss": "me", "aud": {"us": "us"}}),
        ] {
            assert!(read(&rules, claims.clone()).is_err(), "{claims}");
        }
    }

    #[test]
    fn roles_are_a_string_or_a_list_in_either_claim() {
        let of = |claims: Value| read(&rules(), claims).expect("valid").0.roles;
        let read_only = Roles { read_only: true, ..Roles::default() };
        for claims in [
            json!({"role": "read-only"}),
            json!({"roles": ["read-only"]}),
            json!({"role": ["other", "read-only"]}),
            json!({"roles": "read-only"}),
        ] {
            assert_eq!(of(claims), read_only);
        }
        let both = of(json!({"role": "write-only", "roles": ["read-only", 7, null]}));
        assert_eq!(both, Roles { write_only: true, ..read_only });
        for none in
            [json!({}), json!({"role": "Admin"}), json!({"role": {"admin": true}}), json!({"roles": "admin,read-only"})]
        {
            assert_eq!(of(none), Roles::default());
        }
    }

    #[test]
    fn a_subject_is_text_that_can_be_stored() {
        let of = |sub: Value| read(&rules(), json!({"sub": sub})).map(|(identity, _)| identity.subject);
        assert_eq!(of(json!("svc")).expect("valid").as_deref(), Some("svc"));
        assert_eq!(of(Value::Null).expect("valid"), None);
        assert!(of(json!("x".repeat(SUBJECT_BYTES_MAX))).is_ok());
        for wrong in [json!("a\0b"), json!(7), json!(["svc"]), json!("x".repeat(SUBJECT_BYTES_MAX + 1))] {
            assert!(of(wrong).is_err());
        }
    }
}
