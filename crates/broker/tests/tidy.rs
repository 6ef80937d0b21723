//! The rules of the house that no compiler checks. Each failure says what to do about it.

use std::fs;
use std::path::{Path, PathBuf};

const LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;

/// Functions over the limit, as `file name`. Only ever remove a line here.
const LONG_FUNCTIONS: &[&str] = &[];

/// What each module of the broker may import. No line names one that may, directly or not, import what it stands for.
const ARROWS: &[(&str, &[&str])] = &[
    ("error", &[]),
    ("id", &["error"]),
    ("segment", &["error", "id"]),
    ("dedup", &["error", "id"]),
    ("db", &["error", "id"]),
    ("seal", &["db", "error"]),
    ("embedded", &[]),
    ("auth", &["error"]),
    ("quota", &["db", "error"]),
    ("config", &["auth", "db", "quota", "seal"]),
    ("logging", &["config"]),
    ("wake", &["db", "error", "id"]),
    ("telemetry", &["db", "error", "id"]),
    ("bundle", &["db", "dedup", "error", "id", "seal", "segment"]),
    ("ephemeral", &[]),
    ("switches", &["db", "error"]),
    ("spool", &["bundle", "db", "error", "id", "seal", "segment", "telemetry"]),
    ("timers", &["db", "error", "id", "seal", "segment", "telemetry", "wake"]),
    (
        "http",
        &[
            "auth",
            "bundle",
            "db",
            "dedup",
            "ephemeral",
            "error",
            "id",
            "quota",
            "seal",
            "segment",
            "spool",
            "switches",
            "telemetry",
            "timers",
            "wake",
        ],
    ),
    ("retention", &["config", "db", "error", "id"]),
    (
        "cli",
        &[
            "auth",
            "bundle",
            "config",
            "db",
            "dedup",
            "embedded",
            "ephemeral",
            "error",
            "http",
            "id",
            "logging",
            "retention",
            "seal",
            "segment",
            "spool",
            "telemetry",
            "timers",
            "wake",
        ],
    ),
    ("main", &["cli"]),
    ("lib", &[]),
];

/// Where SQL text may stand in Rust, besides `db/`: what it says there names no table.
const SQL_PLACES: &[&str] = &[
    "crates/broker/src/db",
    "crates/broker/src/embedded",
    "crates/broker/src/wake/peers.rs",
    "crates/jobs/src/storage/",
    "crates/sweep/src/gate/",
];

/// Names that say nothing about what a module holds.
const EMPTY_NAMES: &[&str] = &["utils", "util", "common", "helpers", "helper", "types", "misc"];

/// Functions of SQL that read the clock although they judge ages, and why that is right.
const CLOCK_READERS: &[(&str, &str)] = &[
    ("log_partition_dead_v1", "a live lease is live at this moment, whatever the cutoff"),
    ("cleanup_worker_metrics_v1", "its window, and no cutoff, is the argument"),
];

/// Files below the edge whose types are printed as they are. Only ever remove a line here.
const PRINTED_BELOW: &[&str] = &["crates/broker/src/db/retention.rs"];

struct Source {
    /// From the root of the repository.
    path: String,
    text: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The files under a folder of the repository, those of `extension`.
fn sources(folder: &str, extension: &str) -> Vec<Source> {
    let root = root();
    let mut folders = vec![root.join(folder)];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                let text = fs::read_to_string(&path).expect("UTF-8");
                let path = path.strip_prefix(&root).expect("under it").to_str().expect("UTF-8").to_owned();
                found.push(Source { path, text });
            }
        }
    }
    found.sort_by(|one, other| one.path.cmp(&other.path));
    assert!(!found.is_empty(), "no .{extension} file under {folder}");
    found
}

/// Rust files that are shipped.
fn shipped() -> Vec<Source> {
    let is_shipped = |source: &Source| source.path.contains("/src/") && !source.path.ends_with("/tests.rs");
    sources("crates", "rs").into_iter().filter(is_shipped).collect()
}

impl Source {
    /// The text before the unit tests.
    fn without_tests(&self) -> &str {
        self.text.split("#[cfg(test)]").next().expect("there is a first part")
    }

    /// The lines that are not comments, with their numbers.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        (1..).zip(self.without_tests().lines()).filter(|(_, line)| !line.trim_start().starts_with("//"))
    }

    /// The broker's module that the file belongs to.
    fn module(&self) -> Option<&str> {
        Some(self.path.strip_prefix("crates/broker/src/")?.split('/').next()?.trim_end_matches(".rs"))
    }
}

/// Fails with every complaint, if there is one.
fn complain(what_to_do: &str, complaints: Vec<String>) {
    assert!(complaints.is_empty(), "\n{}\n\n{what_to_do}\n", complaints.join("\n"));
}

/// The modules of the crate that a piece of code names: `crate::x`, `crate::{x, y::z}`, `ebbtide::x`.
fn crate_modules(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    for prefix in ["crate::", "ebbtide::"] {
        for (at, _) in code.match_indices(prefix) {
            let is_whole = !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$');
            let rest = &code[at + prefix.len()..];
            if is_whole {
                found.extend(first_segments(rest));
            }
        }
    }
    found
}

fn first_segments(rest: &str) -> Vec<String> {
    let word = |text: &str| text.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let Some(group) = rest.strip_prefix('{') else { return vec![word(rest)] };
    let (mut depth, mut parts, mut part) = (1, Vec::new(), String::new());
    for c in group.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 1 => parts.push(word(&std::mem::take(&mut part))),
            _ if depth == 1 => part.push(c),
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    parts.push(word(&part));
    parts.retain(|part| !part.is_empty());
    parts
}

#[test]
fn imports_point_one_way() {
    let mut complaints = Vec::new();
    for source in shipped() {
        let Some(module) = source.module() else { continue };
        let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == module) else {
            complaints.push(format!("{}: module {module} has no line in ARROWS", source.path));
            continue;
        };
        let code: String = source.code().flat_map(|(_, line)| [line, "\n"]).collect();
        for import in crate_modules(&code) {
            let is_module = ARROWS.iter().any(|(name, _)| *name == import);
            if is_module && import != module && !allowed.contains(&import.as_str()) {
                complaints.push(format!("{}: {module} imports {import}", source.path));
            }
        }
    }
    complain(
        "Move the code to the lower module, or pass the value down. A new arrow is a line in ARROWS, and needs a reason.",
        complaints,
    );
}

#[test]
fn no_arrows_form_a_circle() {
    // Each line may only name modules of lines above it, which is an order without circles.
    for (n, (module, allowed)) in ARROWS.iter().enumerate() {
        for import in *allowed {
            let is_above = ARROWS[..n].iter().any(|(name, _)| name == import);
            assert!(is_above, "ARROWS: {module} may import {import}, so the line of {import} must come first");
        }
    }
    let may = |module: &str, import: &str| ARROWS.iter().any(|(name, to)| *name == module && to.contains(&import));
    assert!(!may("http", "retention") && !may("retention", "http"), "requests and sweeps meet in the database only");
}

#[test]
fn sql_stands_where_it_belongs() {
    let openings = [
        "select ",
        "insert into ",
        "update queen",
        "delete from ",
        "create table",
        "create index",
        "alter table",
        "drop table",
        "listen ",
        "notify ",
        "truncate ",
    ];
    let mut complaints = Vec::new();
    for source in shipped() {
        if SQL_PLACES.iter().any(|place| source.path.starts_with(place)) {
            continue;
        }
        for (n, line) in source.code() {
            for literal in line.split('"').skip(1).step_by(2) {
                let names_schema = literal.contains("queen.") || literal.contains("queen_streams.");
                let is_statement = openings.iter().any(|opening| literal.starts_with(opening));
                if names_schema || is_statement {
                    complaints.push(format!("{}:{n}: {}", source.path, line.trim()));
                }
            }
        }
    }
    complain("Put the statement into a function under src/db/, or into a stored function under sql/.", complaints);
}

#[test]
fn the_sweep_engine_names_no_table() {
    let mut complaints = Vec::new();
    for source in shipped().iter().filter(|source| source.path.starts_with("crates/sweep/")) {
        for (n, line) in source.code() {
            if line.contains("queen") || line.contains("log_partitions") || line.contains("ebbtide::") {
                complaints.push(format!("{}:{n}: {}", source.path, line.trim()));
            }
        }
    }
    complain("The engine knows time and batches. Let the caller pass what knows the table.", complaints);
}

#[test]
fn files_are_short() {
    let mut complaints = Vec::new();
    for source in sources("crates", "rs").into_iter().chain(sources("crates", "sql")) {
        let lines = source.text.lines().count();
        if lines > LINES_MAX {
            complaints.push(format!("{}: {lines} lines, of at most {LINES_MAX}", source.path));
        }
    }
    complain("Split the file by subject: foo.rs and foo/part.rs.", complaints);
}

/// The functions of a formatted Rust file, with their lengths in lines.
fn rust_functions(text: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (n, line) in lines.iter().enumerate() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let Some(at) = words.iter().position(|word| *word == "fn") else { continue };
        let is_head = |word: &&str| {
            matches!(*word, "pub" | "async" | "const" | "unsafe" | "extern" | "default") || word.starts_with("pub(")
        };
        if !words[..at].iter().all(is_head) || words.len() == at + 1 {
            continue;
        }
        let name = words[at + 1].split(['(', '<']).next().unwrap_or_default().to_owned();
        let indent = &line[..line.len() - line.trim_start().len()];
        let closing = format!("{indent}}}");
        if line.trim_end().ends_with('}') {
            continue;
        }
        // A signature may take several lines, and a method of a trait may end with it.
        let opens =
            lines[n..].iter().map(|text| text.trim_end()).find(|text| text.ends_with('{') || text.ends_with(';'));
        if opens.is_none_or(|text| text.ends_with(';')) {
            continue;
        }
        if let Some(length) = lines[n..].iter().position(|text| **text == closing) {
            found.push((name, length + 1));
        }
    }
    found
}

/// The functions of an SQL file, with the lengths of what stands between `begin` and `end`.
fn sql_functions(text: &str) -> Vec<(String, &str)> {
    let mut found = Vec::new();
    for part in text.split("create or replace function ").skip(1) {
        let name = part.split('(').next().unwrap_or_default().trim().trim_start_matches("queen.").to_owned();
        let body = part.split("$$").nth(1).unwrap_or_default();
        let body = body.split_once("\nbegin").map_or(body, |(_, statements)| statements);
        found.push((name, body));
    }
    found
}

#[test]
fn functions_are_short() {
    let mut complaints = Vec::new();
    let mut seen = Vec::new();
    let rust = sources("crates", "rs").into_iter().map(|source| (rust_functions(&source.text), source.path));
    let sql = sources("crates", "sql").into_iter().map(|source| {
        let functions = sql_functions(&source.text).into_iter().map(|(name, body)| (name, body.trim().lines().count()));
        (functions.collect(), source.path)
    });
    for (functions, path) in rust.chain(sql) {
        for (name, lines) in functions {
            let listed = format!("{path} {name}");
            if lines <= FUNCTION_LINES_MAX {
                continue;
            }
            if LONG_FUNCTIONS.contains(&listed.as_str()) {
                seen.push(listed);
            } else {
                complaints.push(format!("{path}: {name} has {lines} lines, of at most {FUNCTION_LINES_MAX}"));
            }
        }
    }
    complain("Give the parts of the function names, and call them.", complaints);
    let stale = LONG_FUNCTIONS.iter().filter(|listed| !seen.iter().any(|seen| seen == *listed));
    complain("These are short: take them off LONG_FUNCTIONS.", stale.map(|listed| (*listed).to_owned()).collect());
}

#[test]
fn each_rust_file_says_what_it_is() {
    let silent = sources("crates", "rs").into_iter().filter(|source| !source.text.starts_with("//! "));
    complain("Open the file with a `//!` sentence.", silent.map(|source| source.path).collect());
}

#[test]
fn modules_have_names_that_mean_something() {
    let mut complaints = Vec::new();
    for source in shipped() {
        let name = source.path.rsplit('/').next().expect("a name").trim_end_matches(".rs");
        if name == "mod" {
            complaints.push(format!("{}: write x.rs beside x/ instead of x/mod.rs", source.path));
        } else if source.path.split('/').any(|part| EMPTY_NAMES.contains(&part.trim_end_matches(".rs"))) {
            complaints.push(format!("{}: name the module after its subject", source.path));
        }
    }
    complain("A name says what is inside.", complaints);
}

#[test]
fn nothing_unfinished_or_unexplained_is_shipped() {
    let mut complaints = Vec::new();
    for source in shipped() {
        for (n, line) in source.code() {
            // Taken apart, so that this file does not find itself.
            for word in
                [concat!(".unwr", "ap()"), concat!("to", "do!("), concat!("unimple", "mented!("), concat!("db", "g!(")]
            {
                if line.contains(word) {
                    complaints.push(format!("{}:{n}: {word}", source.path));
                }
            }
        }
    }
    for source in sources("crates", "rs") {
        if source.text.contains(concat!("#[ign", "ore")) {
            complaints.push(format!("{}: an ignored test", source.path));
        }
    }
    complain("Use expect(\"why it cannot fail\") or return the error; finish what is unfinished.", complaints);
}

#[test]
fn answers_are_shaped_at_the_edge() {
    let mut complaints = Vec::new();
    for source in shipped() {
        let at_edge = ["http", "cli"].iter().any(|edge| source.module() == Some(edge))
            || PRINTED_BELOW.contains(&source.path.as_str());
        let shapes = source.code().find(|(_, line)| line.contains("derive(") && line.contains("Serialize"));
        if let Some((n, line)) = shapes.filter(|_| !at_edge) {
            complaints.push(format!("{}:{n}: {}", source.path, line.trim()));
        }
    }
    complain("Serialize in http/ or cli/, from the domain type.", complaints);
}

#[test]
fn each_table_is_explained() {
    let mut complaints = Vec::new();
    for source in sources("crates/broker/sql/schema", "sql") {
        let lines: Vec<&str> = source.text.lines().collect();
        for (n, line) in lines.iter().enumerate() {
            if line.starts_with("create table ") && (n == 0 || !lines[n - 1].starts_with("--")) {
                complaints.push(format!("{}:{}: {line}", source.path, n + 1));
            }
        }
    }
    complain(
        "Write a comment on the lines above the table: what a row is, and what is deliberately absent.",
        complaints,
    );
}

#[test]
fn steps_judge_ages_by_their_cutoffs() {
    let clocks = ["now()", "clock_timestamp()", "statement_timestamp()", "current_timestamp", "localtimestamp"];
    let mut complaints = Vec::new();
    for source in sources("crates/broker/sql/procedures", "sql") {
        for (name, body) in sql_functions(&source.text) {
            let judges = name.contains("_step_") || name.contains("_boundary_") || name.contains("_dead_");
            let may_read = CLOCK_READERS.iter().any(|(reader, _)| *reader == name);
            let code = body.lines().filter(|line| !line.trim_start().starts_with("--"));
            for line in code.filter(|_| judges && !may_read) {
                if clocks.iter().any(|clock| line.to_ascii_lowercase().contains(clock)) {
                    complaints.push(format!("{}: {name}: {}", source.path, line.trim()));
                }
            }
        }
    }
    complain("Take the cutoff as an argument, so that a cycle has one clock and a test can set it.", complaints);
}

#[test]
fn stored_functions_say_what_they_lock_and_answer() {
    let mut complaints = Vec::new();
    for source in sources("crates/broker/sql/procedures", "sql") {
        let parts: Vec<&str> = source.text.split("create or replace function ").collect();
        for pair in parts.windows(2) {
            let name = pair[1].split('(').next().unwrap_or_default().to_owned();
            let header: Vec<&str> = pair[0].lines().rev().take_while(|line| line.starts_with("--")).collect();
            if header.is_empty() {
                complaints.push(format!("{}: {name} has no header", source.path));
            } else if name.contains("_step_") && !header.iter().any(|line| line.starts_with("-- Lock:")) {
                complaints.push(format!("{}: {name} does not say what it locks", source.path));
            }
        }
    }
    complain("Write the header: what it does, then Lock, Cutoff, Result and Why.", complaints);
}

#[test]
fn each_subject_has_both_its_halves() {
    // The pool's own parts have no stored functions.
    let alone = ["migrate", "tls", "bench", "space"];
    let procedures = sources("crates/broker/sql/procedures", "sql");
    let mut complaints = Vec::new();
    for source in sources("crates/broker/src/db", "rs") {
        let stem = source.path.rsplit('/').next().expect("a name").trim_end_matches(".rs");
        let has_twin = procedures.iter().any(|file| file.path.ends_with(&format!("/{stem}.sql")));
        if source.path.matches('/').count() == 4 && !has_twin && !alone.contains(&stem) {
            complaints.push(format!("{}: no sql/procedures/{stem}.sql", source.path));
        }
    }
    complain("Name the two files of a subject alike.", complaints);
}

#[test]
fn the_rules_find_what_they_look_for() {
    let modules = |code: &str| crate_modules(code).join(" ");
    assert_eq!(modules("use crate::db::Db;\nlet x = crate::http::serve;"), "db http");
    assert_eq!(modules("use crate::{db::{self, Sql}, error::Error};"), "db error");
    assert_eq!(modules("use mycrate::db; use ebbtide::cli;"), "cli");
    let text = "fn a() {\n    1;\n}\nimpl X {\n    fn d(\n        x: T,\n    ) -> u8;\n    pub(super) async fn b<T>(\n        x: T,\n    ) {\n    }\n}\nfn c() {}\n";
    assert_eq!(rust_functions(text), [("a".to_owned(), 3), ("b".to_owned(), 4)]);
    let sql = "create or replace function queen.f(p int) returns int as $$\ndeclare\n    v int;\nbegin\n    return 1;\nend $$;\n";
    assert_eq!(sql_functions(sql)[0].0, "f");
    assert_eq!(sql_functions(sql)[0].1.trim().lines().count(), 2);
}
