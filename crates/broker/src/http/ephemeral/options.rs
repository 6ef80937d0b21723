//! Options of an ephemeral queue: JSON ⇄ what the database keeps ⇄ what holds.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::failure::Failure;
use crate::db::system::Declared;
use crate::ephemeral::{Options, Policy, Rules};

const BYTES_MAX: i64 = 1 << 40;
const LENGTH_MAX: i64 = 10_000_000;
const TTL_MAX: i64 = 365 * 24 * 3600;
const LEASE_MAX: i64 = 86_400;
const RETRY_MAX: i64 = 1000;
const WINDOW_MS_MAX: i64 = 60_000;
const WINDOW_COUNT_MAX: i64 = 10_000;

/// What is given replaces everything; what is not takes the server's default.
#[derive(Deserialize, ToSchema, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(as = EphemeralOptions)]
pub(super) struct Wire {
    #[schema(minimum = 1, maximum = 1_099_511_627_776_i64)]
    max_bytes: Option<i64>,
    #[schema(minimum = 1, maximum = 10_000_000)]
    max_length: Option<i64>,
    policy: Option<PolicyWire>,
    #[schema(minimum = 0, maximum = 31_536_000)]
    ttl_seconds: Option<i64>,
    #[schema(minimum = 1, maximum = 86_400)]
    lease_seconds: Option<i64>,
    #[schema(minimum = 0, maximum = 1000)]
    retry_limit: Option<i64>,
    window_buffer: Option<WindowWire>,
}

#[derive(Clone, Copy, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = EphemeralPolicy)]
enum PolicyWire {
    Reject,
    DropOldest,
}

/// A waiting pop that found less than `count` messages waits `ms` for more.
#[derive(Clone, Copy, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(as = EphemeralWindow)]
struct WindowWire {
    #[schema(minimum = 0, maximum = 60_000)]
    ms: i64,
    #[schema(minimum = 1, maximum = 10_000)]
    count: Option<i64>,
}

/// The options in force.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = EphemeralOptionsInForce)]
pub(super) struct InForce {
    max_bytes: usize,
    max_length: usize,
    policy: PolicyWire,
    /// Null: messages have no time of their own.
    ttl_seconds: Option<u64>,
    lease_seconds: u64,
    retry_limit: u32,
    window_buffer: Option<WindowWire>,
}

impl InForce {
    pub(super) fn of(rules: &Rules) -> Self {
        let whole = |number: usize| i64::try_from(number).ok();
        Self {
            max_bytes: rules.bytes_max,
            max_length: rules.length_max,
            policy: match rules.policy {
                Policy::Reject => PolicyWire::Reject,
                Policy::DropOldest => PolicyWire::DropOldest,
            },
            ttl_seconds: rules.ttl.map(|ttl| ttl.as_secs()),
            lease_seconds: rules.lease.as_secs(),
            retry_limit: rules.retry_limit,
            window_buffer: rules.window.map(|(window, count)| WindowWire {
                ms: i64::try_from(window.as_millis()).unwrap_or(i64::MAX),
                count: whole(count),
            }),
        }
    }
}

impl Wire {
    /// What the database keeps.
    pub(super) fn checked(self, name: &str) -> Result<Declared, Failure> {
        let Self { max_bytes, max_length, policy, ttl_seconds, lease_seconds, retry_limit, window_buffer } = self;
        let window_ms =
            within("options.windowBuffer.ms", window_buffer.as_ref().map(|window| window.ms), 0, WINDOW_MS_MAX)?;
        let window_count = window_buffer.and_then(|window| window.count);
        let window_count = within("options.windowBuffer.count", window_count, 1, WINDOW_COUNT_MAX)?;
        // No time to wait is no window, whatever it would have waited for.
        let window_ms = window_ms.filter(|ms| *ms != 0);
        Ok(Declared {
            name: name.to_owned(),
            max_bytes: within("options.maxBytes", max_bytes, 1, BYTES_MAX)?,
            max_length: within("options.maxLength", max_length, 1, LENGTH_MAX)?,
            drops_oldest: matches!(policy, Some(PolicyWire::DropOldest)),
            ttl_seconds: within("options.ttlSeconds", ttl_seconds, 0, TTL_MAX)?.filter(|seconds| *seconds != 0),
            lease_seconds: within("options.leaseSeconds", lease_seconds, 1, LEASE_MAX)?,
            retry_limit: within("options.retryLimit", retry_limit, 0, RETRY_MAX)?,
            window_ms,
            window_count: window_ms.and(window_count),
        })
    }
}

fn within(field: &str, value: Option<i64>, low: i64, high: i64) -> Result<Option<i64>, Failure> {
    match value {
        Some(value) if !(low..=high).contains(&value) => {
            Err(Failure::bad(format!("{field}: must be a whole number from {low} to {high}")))
        }
        value => Ok(value),
    }
}

/// What the database keeps, as the queue needs it.
pub(in crate::http) fn of(declared: &Declared) -> Options {
    Options {
        bytes_max: declared.max_bytes,
        length_max: declared.max_length,
        policy: if declared.drops_oldest { Policy::DropOldest } else { Policy::Reject },
        ttl_seconds: declared.ttl_seconds,
        lease_seconds: declared.lease_seconds,
        retry_limit: declared.retry_limit,
        window_ms: declared.window_ms,
        window_count: declared.window_count,
    }
}
