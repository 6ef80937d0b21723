//! What was measured: figures by case, one value a run, with their medians.

use std::fmt::Write;

use serde_json::{Value, json};

/// One measured quantity, a value for each run.
struct Figure {
    name: String,
    unit: &'static str,
    runs: Vec<f64>,
}

/// Whether a figure reached what was hoped for. A statement, not a test.
struct Reach {
    text: String,
    met: bool,
}

#[derive(Default)]
pub(super) struct Case {
    name: &'static str,
    figures: Vec<Figure>,
    reaches: Vec<Reach>,
}

#[derive(Default)]
pub(super) struct Report {
    settings: Vec<(&'static str, Value)>,
    cases: Vec<Case>,
    notes: Vec<String>,
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

impl Case {
    pub(super) fn new(name: &'static str) -> Self {
        Self { name, ..Self::default() }
    }

    pub(super) fn record(&mut self, name: &str, unit: &'static str, value: f64) {
        match self.figures.iter_mut().find(|figure| figure.name == name) {
            Some(figure) => figure.runs.push(value),
            None => self.figures.push(Figure { name: name.to_owned(), unit, runs: vec![value] }),
        }
    }

    /// The median of a figure; not a number if it was never recorded.
    pub(super) fn median(&self, name: &str) -> f64 {
        self.figures.iter().find(|figure| figure.name == name).map_or(f64::NAN, |figure| median(&figure.runs))
    }

    pub(super) fn reach(&mut self, text: String, met: bool) {
        self.reaches.push(Reach { text, met });
    }
}

impl Report {
    pub(super) fn setting(&mut self, name: &'static str, value: impl Into<Value>) {
        self.settings.push((name, value.into()));
    }

    /// What is measured and where: this program, its database, the machine.
    pub(super) fn program(&mut self, database_version: String) {
        self.setting("version", env!("CARGO_PKG_VERSION"));
        self.setting("build", if cfg!(debug_assertions) { "debug" } else { "release" });
        self.setting("PostgreSQL", database_version);
        self.setting("cores", std::thread::available_parallelism().map_or(0, std::num::NonZero::get));
    }

    pub(super) fn note(&mut self, text: String) {
        self.notes.push(text);
    }

    pub(super) fn add(&mut self, case: Case) {
        self.cases.push(case);
    }

    pub(super) fn json(&self) -> Value {
        let cases = self.cases.iter().map(|case| {
            let figures = case.figures.iter().map(|figure| {
                let Figure { name, unit, runs } = figure;
                (name.clone(), json!({"unit": unit, "median": median(runs), "runs": runs}))
            });
            let reaches = case.reaches.iter().map(|reach| json!({"reach": reach.text, "met": reach.met}));
            let (figures, reaches) = (figures.collect::<serde_json::Map<_, _>>(), reaches.collect::<Vec<_>>());
            json!({"case": case.name, "figures": figures, "reaches": reaches})
        });
        let settings: serde_json::Map<_, _> =
            self.settings.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        json!({"settings": settings, "cases": cases.collect::<Vec<_>>(), "notes": self.notes})
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        let settings: Vec<_> = self.settings.iter().map(|(name, value)| format!("{name} {}", shown(value))).collect();
        writeln!(text, "{}", settings.join(", ")).expect("a String takes all");
        for case in &self.cases {
            writeln!(text, "\n{}", case.name).expect("a String takes all");
            for Figure { name, unit, runs } in &case.figures {
                let each: Vec<_> = runs.iter().map(|value| number(*value)).collect();
                let line = format!("  {name:<44} {:>12} {unit:<7} [{}]", number(median(runs)), each.join(" "));
                writeln!(text, "{line}").expect("a String takes all");
            }
            for Reach { text: reach, met } in &case.reaches {
                let verdict = if *met { "reached" } else { "NOT reached" };
                writeln!(text, "  {verdict}: {reach}").expect("a String takes all");
            }
        }
        for note in &self.notes {
            writeln!(text, "\nnote: {note}").expect("a String takes all");
        }
        text
    }
}

fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned)
}

fn number(value: f64) -> String {
    if value.abs() < 100.0 { format!("{value:.2}") } else { format!("{value:.0}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_shows_its_median_and_every_run() {
        let mut case = Case::new("c");
        for value in [3000.0, 1.5, 2000.0] {
            case.record("rate", "msg/s", value);
        }
        assert_eq!(case.median("rate"), 2000.0);
        case.record("pair", "", 1.0);
        case.record("pair", "", 2.0);
        assert_eq!(case.median("pair"), 1.5);
        assert!(case.median("never").is_nan());
        let mut report = Report::default();
        report.add(case);
        let text = report.text();
        assert!(text.contains("2000 msg/s") && text.contains("[3000 1.50 2000]"), "{text}");
        assert_eq!(report.json()["cases"][0]["figures"]["rate"]["median"], 2000.0);
    }
}
