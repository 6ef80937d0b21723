//! One setting: where it comes from, what it may be, and how its text becomes a value.

use std::fmt;

/// What was wrong or surprising in the settings. All of it is collected, so that one start shows every mistake.
#[derive(Debug, Default)]
pub struct Findings {
    /// Each stops the start.
    pub errors: Vec<String>,
    /// Each is logged once at start.
    pub warnings: Vec<String>,
}

/// A line of the table in `docs/config.md`.
#[derive(Debug, Clone)]
pub struct Row {
    pub variable: &'static str,
    pub flag: String,
    pub default: String,
    pub accepts: String,
    pub help: String,
}

/// The text given for one setting, with the rule that reads it.
pub struct Given<K> {
    variable: &'static str,
    kind: K,
    text: Option<String>,
}

impl<K> Given<K> {
    pub(super) fn new(variable: &'static str, kind: K, text: Option<String>) -> Self {
        // A variable that is set but empty means the default: compose files and unit
        // files write `NAME=` for a setting that they leave alone.
        let text = text.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
        Given { variable, kind, text }
    }

    pub fn is_set(&self) -> bool {
        self.text.is_some()
    }

    pub fn variable(&self) -> &'static str {
        self.variable
    }
}

/// What a kind of setting accepts; implemented by each kind below.
pub trait Kind {
    const VALUE_NAME: &'static str;
    fn default_text(&self) -> String;
    fn accepts(&self) -> String;
}

/// A whole number. Outside the range it is clamped, with a warning.
pub struct Int {
    pub default: i64,
    pub min: i64,
    pub max: i64,
    pub unit: &'static str,
}

/// A TCP port. There is no nearest port, so outside the range is an error.
pub struct Port {
    pub default: u16,
    pub min: u16,
}

/// A decimal number. Outside the range it is clamped, with a warning.
pub struct Real {
    pub default: f64,
    pub min: f64,
    pub max: f64,
}

/// On or off.
pub struct Flag {
    pub default: bool,
}

/// One word out of a list, in any case.
pub struct Choice {
    pub default: &'static str,
    pub words: &'static [&'static str],
}

/// Free text.
pub struct Text {
    pub default: &'static str,
    pub accepts: &'static str,
}

/// Text that appears in no log line, no error and no debug output.
pub struct Hidden {
    pub accepts: &'static str,
}

/// A setting whose feature this version does not have.
pub struct Inert {
    pub why: &'static str,
}

impl Kind for Int {
    const VALUE_NAME: &'static str = "NUMBER";
    fn default_text(&self) -> String {
        with_unit(self.default, self.unit)
    }
    fn accepts(&self) -> String {
        format!("{} to {}", self.min, with_unit(self.max, self.unit))
    }
}

impl Kind for Port {
    const VALUE_NAME: &'static str = "PORT";
    fn default_text(&self) -> String {
        self.default.to_string()
    }
    fn accepts(&self) -> String {
        format!("{} to 65535", self.min)
    }
}

impl Kind for Real {
    const VALUE_NAME: &'static str = "NUMBER";
    fn default_text(&self) -> String {
        format!("{:?}", self.default)
    }
    fn accepts(&self) -> String {
        format!("{:?} to {:?}", self.min, self.max)
    }
}

impl Kind for Flag {
    const VALUE_NAME: &'static str = "BOOL";
    fn default_text(&self) -> String {
        self.default.to_string()
    }
    fn accepts(&self) -> String {
        "true/false, 1/0, yes/no, on/off".to_owned()
    }
}

impl Kind for Choice {
    const VALUE_NAME: &'static str = "WORD";
    fn default_text(&self) -> String {
        self.default.to_owned()
    }
    fn accepts(&self) -> String {
        self.words.join(", ")
    }
}

impl Kind for Text {
    const VALUE_NAME: &'static str = "TEXT";
    fn default_text(&self) -> String {
        self.default.to_owned()
    }
    fn accepts(&self) -> String {
        self.accepts.to_owned()
    }
}

impl Kind for Hidden {
    const VALUE_NAME: &'static str = "SECRET";
    fn default_text(&self) -> String {
        String::new()
    }
    fn accepts(&self) -> String {
        self.accepts.to_owned()
    }
}

impl Kind for Inert {
    const VALUE_NAME: &'static str = "TEXT";
    fn default_text(&self) -> String {
        String::new()
    }
    fn accepts(&self) -> String {
        format!("no effect: {}", self.why)
    }
}

fn with_unit(value: i64, unit: &str) -> String {
    if unit.is_empty() { value.to_string() } else { format!("{value} {unit}") }
}

impl<K: Kind> Given<K> {
    fn refuse(&self, findings: &mut Findings) {
        let text = self.text.as_deref().unwrap_or_default();
        let line = format!("{}={text:?} is not valid: {}", self.variable, self.kind.accepts());
        findings.errors.push(line);
    }

    fn clamped(&self, to: impl fmt::Display, findings: &mut Findings) {
        let text = self.text.as_deref().unwrap_or_default();
        let line = format!("{}={text} is outside its range ({}); using {to}", self.variable, self.kind.accepts());
        findings.warnings.push(line);
    }
}

impl Given<Int> {
    pub fn read(&self, findings: &mut Findings) -> i64 {
        let Some(text) = &self.text else { return self.kind.default };
        let Some(value) = saturating_int(text) else {
            self.refuse(findings);
            return self.kind.default;
        };
        let inside = value.clamp(self.kind.min, self.kind.max);
        if inside != value {
            self.clamped(inside, findings);
        }
        inside
    }

    /// For a range whose upper end fits.
    pub fn read_i32(&self, findings: &mut Findings) -> i32 {
        i32::try_from(self.read(findings)).unwrap_or(i32::MAX)
    }

    /// For a range that starts at zero or above.
    pub fn read_u64(&self, findings: &mut Findings) -> u64 {
        u64::try_from(self.read(findings)).unwrap_or(0)
    }

    /// For a range that starts at zero or above.
    pub fn read_usize(&self, findings: &mut Findings) -> usize {
        usize::try_from(self.read_u64(findings)).unwrap_or(usize::MAX)
    }

    /// As bytes; `None` for zero, which switches its limit off.
    pub fn read_mebibytes(&self, findings: &mut Findings) -> Option<u64> {
        let count = self.read_u64(findings);
        (0 < count).then_some(count << 20)
    }
}

/// Digits too many for 64 bits are still a number, only one far outside every range.
fn saturating_int(text: &str) -> Option<i64> {
    if let Ok(value) = text.parse::<i64>() {
        return Some(value);
    }
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let all_digits = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    all_digits.then_some(if negative { i64::MIN } else { i64::MAX })
}

impl Given<Port> {
    pub fn read(&self, findings: &mut Findings) -> u16 {
        let Some(text) = &self.text else { return self.kind.default };
        match text.parse::<u16>() {
            Ok(port) if self.kind.min <= port => port,
            _ => {
                self.refuse(findings);
                self.kind.default
            }
        }
    }
}

impl Given<Real> {
    pub fn read(&self, findings: &mut Findings) -> f64 {
        let Some(text) = &self.text else { return self.kind.default };
        match text.parse::<f64>() {
            Ok(value) if !value.is_nan() => {
                let inside = value.clamp(self.kind.min, self.kind.max);
                if inside != value {
                    self.clamped(inside, findings);
                }
                inside
            }
            _ => {
                self.refuse(findings);
                self.kind.default
            }
        }
    }
}

impl Given<Flag> {
    pub fn read(&self, findings: &mut Findings) -> bool {
        let Some(text) = &self.text else { return self.kind.default };
        match text.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => true,
            "false" | "0" | "no" | "off" => false,
            _ => {
                self.refuse(findings);
                self.kind.default
            }
        }
    }
}

impl Given<Choice> {
    pub fn read(&self, findings: &mut Findings) -> &'static str {
        let Some(text) = &self.text else { return self.kind.default };
        let found = self.kind.words.iter().find(|word| word.eq_ignore_ascii_case(text));
        match found {
            Some(word) => word,
            None => {
                self.refuse(findings);
                self.kind.default
            }
        }
    }
}

impl Given<Text> {
    pub fn read(self) -> String {
        self.text.unwrap_or_else(|| self.kind.default.to_owned())
    }

    pub fn read_given(self) -> Option<String> {
        self.text
    }
}

impl Given<Hidden> {
    pub fn read(self) -> Secret {
        Secret(self.text)
    }
}

impl Given<Inert> {
    pub fn read(&self, findings: &mut Findings) {
        if self.text.is_some() {
            let line = format!("{} has no effect in this version: {}", self.variable, self.kind.why);
            findings.warnings.push(line);
        }
    }
}

/// A value that is shown only as set or unset, with its length.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(Option<String>);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Secret(Some(text.into()))
    }

    pub fn reveal(&self) -> Option<&str> {
        self.0.as_deref()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(text) => write!(f, "set ({} bytes)", text.len()),
            None => f.write_str("unset"),
        }
    }
}
