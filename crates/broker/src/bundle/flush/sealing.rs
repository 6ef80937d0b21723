//! Which partitions of a bundle are sealed, and what happens when that changed under it.

use std::collections::BTreeSet;

use super::{Element, Flight, segment};
use crate::bundle::Shared;
use crate::db::Conn;
use crate::error::Error;
use crate::segment::Packer;

/// Says of each flight whether its messages are to be sealed. Asks the database for the queues that are new here.
pub(super) async fn settle(shared: &Shared, flights: &mut [Flight]) -> Result<(), Error> {
    let sealing = &shared.sealing;
    let unknown: BTreeSet<&str> =
        flights.iter().map(|flight| flight.name.queue()).filter(|queue| sealing.wanted(queue).is_none()).collect();
    if !unknown.is_empty() {
        let unknown: Vec<&str> = unknown.into_iter().collect();
        sealing.ask(&shared.db.conn().await?, &unknown).await?;
    }
    for flight in flights {
        flight.is_sealed = sealing.wanted(flight.name.queue()).unwrap_or(false);
    }
    Ok(())
}

/// Learns again what the queues want, and packs anew what is not so. Message ids stay.
pub(super) async fn pack_anew(
    shared: &Shared, conn: &Conn, elements: &mut [Element], packer: &mut Packer,
) -> Result<(), Error> {
    let queues: BTreeSet<&str> = elements.iter().map(|element| element.flight.name.queue()).collect();
    let queues: Vec<&str> = queues.into_iter().collect();
    shared.sealing.ask(conn, &queues).await?;
    for element in elements {
        let wanted = shared.sealing.wanted(element.flight.name.queue()).unwrap_or(false);
        if wanted != element.flight.is_sealed {
            element.flight.is_sealed = wanted;
            element.packed = segment(&element.flight, &element.frames, packer)?;
        }
    }
    Ok(())
}
