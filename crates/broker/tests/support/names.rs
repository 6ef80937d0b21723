//! Names that are hard on paths, patterns and quotes.

use std::fmt::Write as _;

/// Each is a queue's, partition's or group's name like any other.
pub fn hard_names() -> Vec<String> {
    let mut names: Vec<String> =
        ["a/b", "50%", "%2F", "it's", "\"quoted\"", "what?", "#tag", "a b+c&d=e", "back\\slash", "🦀", "a.b.c"]
            .map(str::to_owned)
            .into();
    names.push("é".repeat(255));
    names
}

/// A name as a path segment or a query value.
pub fn encoded(name: &str) -> String {
    name.bytes().fold(String::new(), |mut text, byte| {
        write!(text, "%{byte:02X}").expect("a string takes everything");
        text
    })
}
