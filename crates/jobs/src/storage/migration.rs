//! A numbered schema file, applied once and never edited.

use xxhash_rust::xxh3::xxh3_128;

use crate::error::Error;

pub(crate) struct Migration {
    pub(crate) version: i64,
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
}

/// Lists schema files of one dialect; their versions count from 1.
macro_rules! migrations {
    ($dialect:literal: $($version:literal $name:literal),* $(,)?) => {
        &[$(crate::storage::migration::Migration {
            version: $version,
            name: $name,
            text: include_str!(concat!("../../../sql/", $dialect, "/", $name)),
        }),*]
    };
}

pub(crate) use migrations;

impl Migration {
    pub(crate) fn checksum(&self) -> String {
        checksum(self.text)
    }
}

pub(crate) fn checksum(text: &str) -> String {
    format!("{:032x}", xxh3_128(text.as_bytes()))
}

/// The migrations that are still to be applied, given the versions and checksums that are there.
pub(crate) fn missing<'a>(all: &'a [Migration], installed: &[(i64, String)]) -> Result<Vec<&'a Migration>, Error> {
    let known = all.last().map_or(0, |migration| migration.version);
    if let Some(found) = installed.iter().map(|(version, _)| *version).max()
        && known < found
    {
        return Err(Error::SchemaTooNew { found, known });
    }
    let mut missing = Vec::new();
    for migration in all {
        match installed.iter().find(|(version, _)| *version == migration.version) {
            None => missing.push(migration),
            Some((_, checksum)) if *checksum == migration.checksum() => {}
            Some(_) => return Err(Error::SchemaEdited(migration.name.to_owned())),
        }
    }
    Ok(missing)
}
