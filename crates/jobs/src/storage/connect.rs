//! A storage by its address.

use std::sync::Arc;

use crate::error::Error;
use crate::storage::Storage;

/// Connections of a PostgreSQL storage that is opened by its address.
#[cfg(feature = "postgres")]
const CONNECTIONS: usize = 16;

/// The storage at `address`: `postgres://…` with at most 16 connections and no TLS, or `sqlite://` and the path of a
/// file, which is made if it is not there. Nothing is installed; [`Storage::migrate`] does that.
///
/// # Errors
/// [`Error::Invalid`] for any other address, or one whose storage is not compiled in; [`Error::Storage`] if it cannot
/// be opened.
pub fn connect(address: &str) -> Result<Arc<dyn Storage>, Error> {
    #[cfg(feature = "postgres")]
    if address.starts_with("postgres://") || address.starts_with("postgresql://") {
        return Ok(Arc::new(super::postgres::PostgresStorage::connect(address, CONNECTIONS)?));
    }
    #[cfg(feature = "sqlite")]
    if let Some(path) = address.strip_prefix("sqlite://") {
        return Ok(Arc::new(super::sqlite::SqliteStorage::open(path)?));
    }
    Err(Error::invalid("storage address", "starts with postgres:// or sqlite://, and its feature is compiled in"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_addresses_are_refused() {
        for address in ["", "mysql://x", "jobs.db"] {
            assert!(
                matches!(connect(address).err(), Some(Error::Invalid { field: "storage address", .. })),
                "{address}"
            );
        }
    }
}
