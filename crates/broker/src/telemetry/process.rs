//! What the process uses: processor time, memory, connections, and how late its timers are.

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};

/// Microseconds of one tick in `/proc/self/stat`: the kernel's interface fixes 100 ticks a second.
const TICK_US: u64 = 10_000;

/// The smallest, largest, last and mean of a number of samples.
#[derive(Clone, Copy, Default)]
pub(super) struct Gauge {
    count: u64,
    sum: u64,
    pub(super) min: u64,
    pub(super) max: u64,
    last: u64,
}

impl Gauge {
    pub(super) fn add(&mut self, sample: u64) {
        self.min = if self.count == 0 { sample } else { self.min.min(sample) };
        self.max = self.max.max(sample);
        self.last = sample;
        self.sum = self.sum.saturating_add(sample);
        self.count += 1;
    }

    pub(super) fn avg(&self) -> u64 {
        self.sum.checked_div(self.count).unwrap_or(0)
    }

    /// `null` when nothing was measured.
    fn json(&self) -> Value {
        if self.count == 0 {
            return Value::Null;
        }
        json!({"avg": self.avg(), "min": self.min, "max": self.max, "last": self.last})
    }
}

/// What the process has used so far, and holds; `None` where the system does not say.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub user_us: Option<u64>,
    pub system_us: Option<u64>,
    pub rss_bytes: Option<u64>,
    pub virtual_bytes: Option<u64>,
}

impl Usage {
    pub fn now() -> Self {
        let (user_us, system_us) = fs::read_to_string("/proc/self/stat").ok().as_deref().and_then(cpu_us).unzip();
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        Self {
            user_us,
            system_us,
            rss_bytes: kib_field(&status, "VmRSS:"),
            virtual_bytes: kib_field(&status, "VmSize:"),
        }
    }
}

/// The samples since the last flush.
#[derive(Default)]
pub(super) struct Samples {
    pub(super) count: u64,
    user_us: Gauge,
    system_us: Gauge,
    rss_bytes: Gauge,
    virtual_bytes: Gauge,
    pub(super) pool_size: Gauge,
    pub(super) pool_idle: Gauge,
    pool_active: Gauge,
    pub(super) pool_waiting: Gauge,
    pub(super) timer_lag_ms: Gauge,
}

impl Samples {
    pub(super) fn take(&mut self, pool: &deadpool_postgres::Status, timer_lag: Duration) {
        self.count += 1;
        self.timer_lag_ms.add(u64::try_from(timer_lag.as_millis()).unwrap_or(u64::MAX));
        let (size, idle, waiting) = (pool.size as u64, pool.available as u64, pool.waiting as u64);
        self.pool_size.add(size);
        self.pool_idle.add(idle);
        self.pool_active.add(size.saturating_sub(idle));
        self.pool_waiting.add(waiting);
        let usage = Usage::now();
        for (gauge, sample) in [
            (&mut self.user_us, usage.user_us),
            (&mut self.system_us, usage.system_us),
            (&mut self.rss_bytes, usage.rss_bytes),
            (&mut self.virtual_bytes, usage.virtual_bytes),
        ] {
            if let Some(sample) = sample {
                gauge.add(sample);
            }
        }
    }

    /// Processor time counts from the start of the process; the difference of two samples is a use.
    pub(super) fn json(&self) -> Value {
        json!({
            "cpu": {"user_us": self.user_us.json(), "system_us": self.system_us.json()},
            "memory": {"rss_bytes": self.rss_bytes.json(), "virtual_bytes": self.virtual_bytes.json()},
            "database": {
                "pool_size": self.pool_size.json(),
                "pool_idle": self.pool_idle.json(),
                "pool_active": self.pool_active.json(),
                "pool_waiting": self.pool_waiting.json(),
            },
            "timers": {"lag_ms": self.timer_lag_ms.json()},
        })
    }
}

/// User and system time out of `/proc/self/stat`, whose second field may itself hold spaces and brackets.
fn cpu_us(stat: &str) -> Option<(u64, u64)> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some((ticks()?.saturating_mul(TICK_US), ticks()?.saturating_mul(TICK_US)))
}

fn kib_field(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_found_behind_an_odd_program_name() {
        let stat = "7 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 250 30 0 0 20";
        assert_eq!(cpu_us(stat), Some((2_500_000, 300_000)));
        assert_eq!(cpu_us("7 (a) S 1 2"), None);
    }

    #[test]
    fn memory_is_counted_in_bytes() {
        let status = "Name:\tx\nVmSize:\t    2048 kB\nVmRSS:\t     512 kB\n";
        assert_eq!(kib_field(status, "VmRSS:"), Some(524_288));
        assert_eq!(kib_field(status, "VmSwap:"), None);
    }

    #[test]
    fn a_gauge_keeps_its_extremes() {
        let mut gauge = Gauge::default();
        assert_eq!(gauge.json(), Value::Null);
        for sample in [5, 2, 8] {
            gauge.add(sample);
        }
        assert_eq!(gauge.json(), json!({"avg": 5, "min": 2, "max": 8, "last": 8}));
    }
}
