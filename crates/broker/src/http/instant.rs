//! Points in time as requests write them and listings print them.

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

use crate::error::Error;

/// Before this no message was sent, and soon before it PostgreSQL's timestamps end.
const EARLIEST: Timestamp = Timestamp::constant(-62_135_596_800, 0); // the year 1

/// An ISO 8601 time; without a zone it is UTC.
///
/// # Errors
/// [`Error::Invalid`] naming `field`.
pub(super) fn instant(field: &'static str, text: &str) -> Result<Timestamp, Error> {
    // In a query string an unescaped plus sign arrives as a space.
    let zoned = || text.parse().or_else(|_| text.replace(' ', "+").parse());
    let utc = || text.parse::<DateTime>().and_then(|time| time.to_zoned(TimeZone::UTC)).map(|time| time.timestamp());
    match zoned().or_else(|_| utc()) {
        Ok(time) if EARLIEST <= time => Ok(time),
        Ok(_) => Err(Error::invalid(field, "must not lie before the year 1")),
        Err(_) => Err(Error::invalid(field, "must be an ISO 8601 time")),
    }
}

/// As listings print times: UTC, milliseconds.
pub(super) fn milliseconds(time: Timestamp) -> String {
    format!("{time:.3}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_with_and_without_a_zone() {
        let noon: Timestamp = "2026-08-28T12:00:00Z".parse().expect("a time");
        for text in ["2026-08-28T12:00:00Z", "2026-08-28T12:00:00.000000Z", "2026-08-28T14:00:00+02:00"] {
            assert_eq!(instant("at", text).expect("a time"), noon, "{text}");
        }
        for text in ["2026-08-28T12:00:00", "2026-08-28 12:00:00", "2026-08-28T14:00:00 02:00"] {
            assert_eq!(instant("at", text).expect("a time"), noon, "{text}");
        }
        assert_eq!(milliseconds(noon), "2026-08-28T12:00:00.000Z");
    }

    #[test]
    fn what_is_no_time_is_refused_by_name() {
        let texts = ["", "now", "yesterday", "1788000000", "2026-13-01T00:00:00Z", "2026-08-28T25:00:00Z"];
        for text in texts.into_iter().chain(["-005000-01-01T00:00:00Z", "12026-01-01T00:00:00Z", "infinity"]) {
            let error = instant("timestamp", text).expect_err(text);
            assert!(error.to_string().starts_with("timestamp: must"), "{text}: {error}");
        }
    }
}
