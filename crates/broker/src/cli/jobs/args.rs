//! Arguments as they are typed: labels, ages, ids, and the filters that two commands share.

use std::time::Duration;

use clap::Args;
use ebbtide_jobs::{JobType, QueueName};

/// Which jobs.
#[derive(Args)]
pub(super) struct Filter {
    /// Only of this queue.
    #[arg(long, value_parser = queue)]
    pub(super) queue: Option<QueueName>,
    /// Only of this type.
    #[arg(long = "type", value_name = "TYPE", value_parser = job_type)]
    pub(super) job_type: Option<JobType>,
    /// Only of this tenant.
    #[arg(long)]
    pub(super) tenant: Option<String>,
    /// Only with this label; may be given several times.
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    pub(super) metadata: Vec<(String, String)>,
    /// Only where the type, queue or last error holds this text.
    #[arg(long, value_name = "TEXT")]
    pub(super) search: Option<String>,
}

impl Filter {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_none()
            && self.job_type.is_none()
            && self.tenant.is_none()
            && self.metadata.is_empty()
            && self.search.is_none()
    }
}

/// A queue's name, those included that another program wrote and this one would refuse.
pub(super) fn queue(text: &str) -> Result<QueueName, ebbtide_jobs::Error> {
    QueueName::existing(text)
}

fn job_type(text: &str) -> Result<JobType, ebbtide_jobs::Error> {
    JobType::existing(text)
}

fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("a label is KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// An age such as 30d, 12h, 90m, 45s, 500ms or 1d12h; 0 means that the rule is off.
pub(super) fn age(text: &str) -> Result<Duration, String> {
    const UNITS: [(&str, u64); 5] = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];
    let refused = || format!("{text:?} is no age: write 30d, 12h, 90m, 45s or 500ms, or 0 for off");
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let mut millis = 0_u64;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).filter(|digits| *digits != 0).ok_or_else(refused)?;
        let number: u64 = rest[..digits].parse().map_err(|_| refused())?;
        let unit = rest[digits..].find(|c: char| c.is_ascii_digit()).map_or(rest.len(), |end| digits + end);
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == &rest[digits..unit]).ok_or_else(refused)?;
        millis = number.checked_mul(*factor).and_then(|more| millis.checked_add(more)).ok_or_else(refused)?;
        rest = &rest[unit..];
    }
    if text.is_empty() { Err(refused()) } else { Ok(Duration::from_millis(millis)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_numbers_with_units() {
        let seconds = |text| age(text).map(|age| age.as_secs());
        assert_eq!(seconds("30d"), Ok(2_592_000));
        assert_eq!(seconds("1d12h"), Ok(129_600));
        assert_eq!(seconds("90m"), Ok(5400));
        assert_eq!(age("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(age("0"), Ok(Duration::ZERO));
        for bad in ["", "30", "d", "30 d", "-1d", "1w", "1.5h", "99999999999999999999d", "é1d", "1é"] {
            assert!(age(bad).is_err(), "{bad}");
        }
    }
}
