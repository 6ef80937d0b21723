//! Finds PostgreSQL's server programs.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::EmbeddedError;

/// The oldest major version that the schema runs on.
pub(super) const MAJOR_MIN: u32 = 15;

/// A folder with `initdb` and `postgres`, and their major version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Programs {
    pub(super) bin_dir: PathBuf,
    pub(super) major: u32,
}

impl Programs {
    /// The newest programs there are; for a cluster that exists, those of its major version.
    pub(super) fn find(setting: Option<&Path>, cluster_major: Option<u32>) -> Result<Self, EmbeddedError> {
        let folders = setting.map_or_else(candidates, |folder| vec![folder.to_owned()]);
        let found: Vec<Self> = folders.iter().filter_map(|folder| Self::at(folder)).collect();
        choose(found, cluster_major, &folders)
    }

    pub(super) fn path(&self, program: &str) -> PathBuf {
        self.bin_dir.join(program)
    }

    fn at(folder: &Path) -> Option<Self> {
        if !folder.join("initdb").is_file() {
            return None;
        }
        let output = Command::new(folder.join("postgres")).arg("--version").output().ok()?;
        let major = parse_major(&String::from_utf8_lossy(&output.stdout))?;
        Some(Self { bin_dir: folder.to_owned(), major })
    }
}

fn choose(found: Vec<Programs>, cluster_major: Option<u32>, looked: &[PathBuf]) -> Result<Programs, EmbeddedError> {
    let usable = |programs: &Programs| match cluster_major {
        Some(major) => programs.major == major,
        None => MAJOR_MIN <= programs.major,
    };
    let majors: Vec<u32> = found.iter().map(|programs| programs.major).collect();
    // Of equals the first one found wins: the search goes from the particular to the general.
    let best = found.into_iter().filter(usable).rev().max_by_key(|programs| programs.major);
    best.ok_or_else(|| match cluster_major {
        Some(cluster) if !majors.is_empty() => EmbeddedError::Version { cluster, majors },
        _ => EmbeddedError::NoPrograms { looked: looked.to_vec(), majors },
    })
}

/// `postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)`
fn parse_major(text: &str) -> Option<u32> {
    let version = text.split_whitespace().find(|word| word.starts_with(|first: char| first.is_ascii_digit()))?;
    let digits: String = version.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

fn candidates() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    if let Ok(versions) = std::fs::read_dir("/usr/lib/postgresql") {
        folders.extend(versions.flatten().map(|version| version.path().join("bin")));
    }
    if let Ok(output) = Command::new("pg_config").arg("--bindir").output() {
        folders.push(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()));
    }
    if let Some(path) = std::env::var_os("PATH") {
        folders.extend(std::env::split_paths(&path));
    }
    if let Some(beside) = std::env::current_exe().ok().as_deref().and_then(Path::parent) {
        folders.push(beside.join("postgres/bin"));
        folders.push(beside.join("postgres"));
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    fn programs(majors: &[u32]) -> Vec<Programs> {
        majors.iter().map(|&major| Programs { bin_dir: PathBuf::from(format!("/{major}")), major }).collect()
    }

    #[test]
    fn the_version_line_is_read() {
        assert_eq!(parse_major("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n"), Some(15));
        assert_eq!(parse_major("postgres (PostgreSQL) 19beta1\n"), Some(19));
        assert_eq!(parse_major("no version"), None);
    }

    #[test]
    fn a_new_cluster_gets_the_newest_and_an_old_one_its_own() {
        assert_eq!(choose(programs(&[15, 17, 16]), None, &[]).unwrap().major, 17);
        assert_eq!(choose(programs(&[15, 17, 16]), Some(15), &[]).unwrap().major, 15);
    }

    #[test]
    fn what_cannot_run_is_said() {
        let error = choose(programs(&[14]), None, &[]).unwrap_err().to_string();
        assert!(error.contains("apt-get install postgresql") && error.contains("14"), "{error}");
        let error = choose(programs(&[17]), Some(15), &[]).unwrap_err().to_string();
        assert!(error.contains("15") && error.contains("17"), "{error}");
    }
}
