//! Reads a partition's sidecar into the index of recent hashes, in the background.

use std::sync::Arc;

use tracing::debug;

use super::Shared;
use crate::db::push::{StoredHashes, log_txns_read_v1, log_txns_window_v1};
use crate::dedup::{Load, SidecarRow};
use crate::error::Error;
use crate::id::Offset;

/// A window of more messages than this is not worth reading: the database probes it instead.
const WINDOW_MESSAGES_MAX: Offset = 1_000_000;
/// Messages read at a time, 16 bytes each.
const READ_MESSAGES_MAX: i64 = 65_536;

pub(super) async fn load(shared: Arc<Shared>, load: Load) {
    let _turn = shared.loads.acquire().await.expect("never closed");
    match read(&shared, load).await {
        Ok(is_too_large) => shared.index.loaded(load, is_too_large),
        Err(error) => {
            debug!(target: "http", %error, partition = %load.partition_id, "could not load the duplicate index");
            shared.index.loaded(load, false);
        }
    }
}

async fn read(shared: &Shared, load: Load) -> Result<bool, Error> {
    let conn = shared.db.conn().await?;
    let window = log_txns_window_v1(&conn, load.partition_id, load.window_seconds).await?;
    let Some((start, end)) = window else {
        return Ok(false);
    };
    let mut from = load.from.unwrap_or(start).max(start);
    if end - from > WINDOW_MESSAGES_MAX {
        return Ok(true);
    }
    // More may be pushed meanwhile; the bound is on what there was.
    while from <= end {
        let rows = log_txns_read_v1(&conn, load.partition_id, from, READ_MESSAGES_MAX).await?;
        let rows: Vec<SidecarRow> = rows.into_iter().map(sidecar_row).collect();
        let Some(last) = rows.last() else { break };
        from = last.base_offset + 1;
        if !shared.index.fill(load, &rows) {
            break;
        }
    }
    Ok(false)
}

fn sidecar_row(StoredHashes { base_offset, created_at, hashes }: StoredHashes) -> SidecarRow {
    SidecarRow { base_offset, created_at, hashes }
}
