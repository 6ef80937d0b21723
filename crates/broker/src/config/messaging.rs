//! Settings of pushing and popping, checked.

use super::raw::GivenMessaging;
use super::{Ephemeral, Findings, Messaging, PopWait, SubscriptionMode};
use crate::quota::Limits;

pub(super) fn check(given: GivenMessaging, findings: &mut Findings) -> Messaging {
    let GivenMessaging {
        zstd_level,
        push_lanes,
        dedup_cache,
        dedup_cache_mb,
        sweeper,
        default_timeout,
        pop_default_timeout_ms,
        default_subscription_mode,
        pop_wait_initial_interval_ms,
        pop_wait_backoff_threshold,
        pop_wait_backoff_multiplier,
        pop_wait_max_interval_ms,
        kv_max_rows,
        timers_max_rows,
        kv_read_rate,
        kv_write_rate,
        timers_rate,
        ephemeral_rate,
        ephemeral_max_bytes,
        ephemeral_queue_max_bytes,
        ephemeral_queue_max_length,
        ephemeral_lease_s,
        ephemeral_retry_limit,
        ephemeral_implicit_idle_s,
    } = given;
    let cache_bytes = dedup_cache_mb.read_usize(findings) << 20;
    let fallback_ms = pop_default_timeout_ms.read_u64(findings);
    let first_ms = default_timeout.read_u64(findings);
    Messaging {
        zstd_level: zstd_level.read_i32(findings),
        push_lanes: push_lanes.read_usize(findings),
        dedup_cache_bytes: dedup_cache.read(findings).then_some(cache_bytes),
        fires_timers: sweeper.read(findings),
        pop_timeout_ms: if default_timeout.is_set() { first_ms } else { fallback_ms },
        subscription_mode: read_mode(&default_subscription_mode.read(), findings),
        pop_wait: PopWait {
            initial_interval_ms: pop_wait_initial_interval_ms.read_u64(findings),
            backoff_threshold: pop_wait_backoff_threshold.read_u64(findings),
            backoff_multiplier: pop_wait_backoff_multiplier.read(findings),
            max_interval_ms: pop_wait_max_interval_ms.read_u64(findings),
        },
        quotas: Limits {
            kv_rows: kv_max_rows.read_u64(findings),
            timer_rows: timers_max_rows.read_u64(findings),
            kv_reads: kv_read_rate.read_u64(findings),
            kv_writes: kv_write_rate.read_u64(findings),
            timer_writes: timers_rate.read_u64(findings),
            ephemeral_messages: ephemeral_rate.read_u64(findings),
        },
        ephemeral: Ephemeral {
            bytes_max: ephemeral_max_bytes.read_usize(findings),
            queue_bytes_max: ephemeral_queue_max_bytes.read_usize(findings),
            queue_length_max: ephemeral_queue_max_length.read_usize(findings),
            lease_seconds: ephemeral_lease_s.read_u64(findings),
            retry_limit: u32::try_from(ephemeral_retry_limit.read_u64(findings)).expect("its range is smaller"),
            idle_seconds: ephemeral_implicit_idle_s.read_u64(findings),
        },
    }
}

fn read_mode(text: &str, findings: &mut Findings) -> SubscriptionMode {
    match text.to_ascii_lowercase().as_str() {
        "new" | "new-only" | "new_only" | "newonly" => SubscriptionMode::New,
        "all" => SubscriptionMode::All,
        _ => {
            findings.warnings.push(format!("DEFAULT_SUBSCRIPTION_MODE={text:?} is read as all"));
            SubscriptionMode::All
        }
    }
}
