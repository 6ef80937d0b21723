//! The times of a schedule, in a time zone.

use std::fmt;
use std::time::Duration;

use croner::Cron;
use croner::parser::{CronParser, Seconds, Year};
use jiff::civil::Weekday;
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};

use crate::error::Error;

/// When a scheduled job is due.
///
/// Times are those of UTC, or of the zone of [`Schedule::in_zone`]. Where clocks change:
///
/// * **Clocks go forward.** A time of day that is left out, 02:30 say, is fired at the first instant after the gap, once,
///   on that day. Of a schedule with a wildcard or a step among its minutes or hours, the times in the gap are left out.
/// * **Clocks go back.** A time of day that comes twice is fired the first time alone. A schedule with a wildcard or a
///   step among its minutes or hours is fired in both passes: every ten minutes is every ten minutes.
///
/// [`Schedule::every`] counts real time and knows no zone. After a downtime, one time is made up for, the latest, and no
/// more.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    rule: Rule,
    zone: TimeZone,
}

#[derive(Clone, Debug, PartialEq)]
enum Rule {
    /// At the multiples of so many microseconds since 1970.
    Every(i64),
    Cron(Box<Cron>, String),
}

impl Schedule {
    /// At each multiple of this duration since 1970: on every worker at the same instants.
    ///
    /// # Errors
    /// [`Error::Invalid`] for less than a millisecond or more than a year.
    pub fn every(period: Duration) -> Result<Self, Error> {
        const YEAR: Duration = Duration::from_secs(366 * 24 * 60 * 60);
        if !(Duration::from_millis(1)..=YEAR).contains(&period) {
            return Err(Error::invalid("period", "is between a millisecond and 366 days"));
        }
        let micros = i64::try_from(period.as_micros()).expect("a year of microseconds");
        Ok(Self { rule: Rule::Every(micros), zone: TimeZone::UTC })
    }

    /// Once a day.
    ///
    /// # Errors
    /// [`Error::Invalid`] if that is no time of day.
    pub fn daily(hour: u8, minute: u8) -> Result<Self, Error> {
        at(hour, minute)?;
        Self::cron(&format!("{minute} {hour} * * *"))
    }

    /// Once a week.
    ///
    /// # Errors
    /// [`Error::Invalid`] if that is no time of day.
    pub fn weekly(day: Weekday, hour: u8, minute: u8) -> Result<Self, Error> {
        at(hour, minute)?;
        Self::cron(&format!("{minute} {hour} * * {}", day.to_sunday_zero_offset()))
    }

    /// By five fields: minute, hour, day of month, month, day of week. `CRON_TZ=Europe/Berlin` in front names a zone.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they cannot be read, never come, or name no zone.
    pub fn cron(expression: &str) -> Result<Self, Error> {
        let expression = expression.trim();
        if let Some(rest) = expression.strip_prefix("CRON_TZ=") {
            let (zone, rest) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
            return Self::cron(rest)?.in_zone(zone);
        }
        let parser = CronParser::builder().seconds(Seconds::Disallowed).year(Year::Disallowed).build();
        let unreadable = |_| Error::invalid("cron", "has five fields: minute, hour, day of month, month, day of week");
        let cron = parser.parse(expression).map_err(unreadable)?;
        let fields = expression.split_whitespace().collect::<Vec<_>>().join(" ");
        let schedule = Self { rule: Rule::Cron(Box::new(cron), fields), zone: TimeZone::UTC };
        if schedule.next_after(Timestamp::UNIX_EPOCH).is_none() {
            return Err(Error::invalid("cron", "names a time that comes"));
        }
        Ok(schedule)
    }

    /// In this time zone, `Europe/Berlin` say. Default: UTC. Zones come from the system's database of them.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such zone.
    pub fn in_zone(mut self, name: &str) -> Result<Self, Error> {
        self.zone = TimeZone::get(name)
            .map_err(|_| Error::invalid("zone", "is a name from the time zone database, such as Europe/Berlin"))?;
        Ok(self)
    }

    /// The first time after this one; `None` if there is none in the next thousands of years.
    pub fn next_after(&self, time: Timestamp) -> Option<Timestamp> {
        match &self.rule {
            Rule::Every(micros) => {
                let passed = time.as_microsecond().div_euclid(*micros);
                Timestamp::from_microsecond((passed + 1).checked_mul(*micros)?).ok()
            }
            Rule::Cron(cron, _) => cron.find_next_occurrence(&self.local(time), false).ok().map(|at| at.timestamp()),
        }
    }

    /// The latest time that is after `cursor` and not after `now`: the one to fire, however many went by.
    pub(crate) fn due(&self, cursor: Timestamp, now: Timestamp) -> Option<Timestamp> {
        let first = self.next_after(cursor).filter(|first| *first <= now)?;
        let latest = match &self.rule {
            Rule::Every(micros) => Timestamp::from_microsecond(now.as_microsecond().div_euclid(*micros) * micros).ok(),
            Rule::Cron(cron, _) => cron.find_previous_occurrence(&self.local(now), true).ok().map(|at| at.timestamp()),
        };
        Some(latest.filter(|latest| first <= *latest && *latest <= now).unwrap_or(first))
    }

    fn local(&self, time: Timestamp) -> Zoned {
        time.to_zoned(self.zone.clone())
    }
}

fn at(hour: u8, minute: u8) -> Result<(), Error> {
    if 23 < hour || 59 < minute {
        return Err(Error::invalid("time", "has an hour up to 23 and a minute up to 59"));
    }
    Ok(())
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.rule {
            Rule::Every(micros) => {
                write!(f, "every {:?}", Duration::from_micros(u64::try_from(*micros).expect("it is positive")))
            }
            Rule::Cron(_, fields) => match self.zone.iana_name().filter(|name| *name != "UTC") {
                Some(zone) => write!(f, "CRON_TZ={zone} {fields}"),
                None => f.write_str(fields),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(schedule: &Schedule, from: &str, count: usize) -> Vec<String> {
        let mut at: Timestamp = from.parse().unwrap();
        (0..count)
            .map(|_| {
                at = schedule.next_after(at).unwrap();
                at.to_string()
            })
            .collect()
    }

    fn berlin(cron: &str) -> Schedule {
        Schedule::cron(cron).unwrap().in_zone("Europe/Berlin").unwrap()
    }

    #[test]
    fn periods_are_multiples_since_1970() {
        let every = Schedule::every(Duration::from_secs(90)).unwrap();
        assert_eq!(times(&every, "1970-01-01T00:00:00Z", 2), ["1970-01-01T00:01:30Z", "1970-01-01T00:03:00Z"]);
        assert_eq!(times(&every, "1969-12-31T23:59:59Z", 1), ["1970-01-01T00:00:00Z"]);
        assert!(Schedule::every(Duration::ZERO).is_err() && Schedule::every(Duration::MAX).is_err());
    }

    #[test]
    fn days_weeks_and_fields() {
        let daily = Schedule::daily(6, 30).unwrap();
        assert_eq!(times(&daily, "2026-01-31T06:30:00Z", 1), ["2026-02-01T06:30:00Z"]);
        let weekly = Schedule::weekly(Weekday::Sunday, 0, 5).unwrap();
        assert_eq!(times(&weekly, "2026-12-01T00:00:00Z", 2), ["2026-12-06T00:05:00Z", "2026-12-13T00:05:00Z"]);
        let quarter = Schedule::cron("*/15 9-10 * * 1-5").unwrap();
        assert_eq!(times(&quarter, "2026-12-04T10:45:00Z", 1), ["2026-12-07T09:00:00Z"]);
        for bad in
            ["", "* * * *", "* * * * * *", "61 * * * *", "0 0 31 2 *", "CRON_TZ=Nowhere/At 0 0 * * *", "CRON_TZ=UTC"]
        {
            assert!(Schedule::cron(bad).is_err(), "{bad}");
        }
        assert!(Schedule::daily(24, 0).is_err() && Schedule::weekly(Weekday::Monday, 0, 60).is_err());
        assert!(Schedule::daily(1, 0).unwrap().in_zone("Nowhere/At").is_err());
    }

    #[test]
    fn a_zone_stands_in_front_and_is_printed_back() {
        let zoned = Schedule::cron("CRON_TZ=Asia/Kolkata 30  5 * * *").unwrap();
        assert_eq!(times(&zoned, "2026-01-01T00:00:00Z", 2), ["2026-01-02T00:00:00Z", "2026-01-03T00:00:00Z"]);
        assert_eq!(zoned.to_string(), "CRON_TZ=Asia/Kolkata 30 5 * * *");
        assert_eq!(Schedule::cron(&zoned.to_string()).unwrap(), zoned);
        assert_eq!(Schedule::daily(1, 2).unwrap().to_string(), "2 1 * * *");
        assert_eq!(Schedule::every(Duration::from_secs(60)).unwrap().to_string(), "every 60s");
    }

    /// In Berlin on 29 March 2026, 02:00 is 03:00, which is 01:00 UTC.
    #[test]
    fn when_clocks_go_forward_a_time_in_the_gap_is_fired_right_after_it() {
        let fixed = berlin("30 2 * * *");
        let expected = ["2026-03-28T01:30:00Z", "2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"];
        assert_eq!(times(&fixed, "2026-03-27T12:00:00Z", 3), expected);
        let steps = berlin("*/30 * * * *");
        let expected = ["2026-03-29T00:30:00Z", "2026-03-29T01:00:00Z", "2026-03-29T01:30:00Z"];
        assert_eq!(times(&steps, "2026-03-29T00:00:00Z", 3), expected);
    }

    /// In Berlin on 25 October 2026, 03:00 is 02:00 again, which is 01:00 UTC.
    #[test]
    fn when_clocks_go_back_a_time_that_comes_twice_is_fired_once() {
        let fixed = berlin("30 2 * * *");
        let expected = ["2026-10-24T00:30:00Z", "2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"];
        assert_eq!(times(&fixed, "2026-10-23T12:00:00Z", 3), expected);
        let steps = berlin("*/30 * * * *");
        let expected = ["2026-10-25T00:00:00Z", "2026-10-25T00:30:00Z", "2026-10-25T01:00:00Z", "2026-10-25T01:30:00Z"];
        assert_eq!(times(&steps, "2026-10-24T23:30:00Z", 4), expected);
    }

    #[test]
    fn after_a_downtime_the_latest_time_is_due_and_no_other() {
        let time = |text: &str| text.parse::<Timestamp>().unwrap();
        for (schedule, expected) in [
            (Schedule::every(Duration::from_secs(60)).unwrap(), "2026-12-01T12:00:00Z"),
            (Schedule::cron("*/5 * * * *").unwrap(), "2026-12-01T12:00:00Z"),
            (berlin("0 3 * * *"), "2026-12-01T02:00:00Z"),
        ] {
            let now = time("2026-12-01T12:00:30Z");
            let due = schedule.due(time("2026-11-01T00:00:00Z"), now).unwrap();
            assert_eq!(due.to_string(), expected);
            assert_eq!(schedule.due(due, now), None, "{schedule}");
            assert!(now < schedule.next_after(due).unwrap());
            assert_eq!(schedule.due(now, time("2026-11-30T00:00:00Z")), None, "a clock that goes back fires nothing");
        }
    }

    #[test]
    fn every_time_of_a_year_is_due_when_it_comes() {
        for schedule in [berlin("30 2 * * *"), berlin("15 */6 * * *"), berlin("0 0 1 * *")] {
            let mut cursor: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
            for _ in 0..400 {
                let next = schedule.next_after(cursor).unwrap();
                assert!(cursor < next);
                assert_eq!(schedule.due(cursor, next), Some(next), "{schedule} at {next}");
                cursor = next;
            }
        }
    }
}
