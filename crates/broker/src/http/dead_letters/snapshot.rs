//! What a message was, taken from its segment, for the dead letter that outlives it.

use tracing::warn;
use uuid::Uuid;

use crate::db::Sql;
use crate::db::dead_letters::{Covering, Letter, log_dlq_segments_v1};
use crate::error::Error;
use crate::id::{Offset, PartitionId};
use crate::segment::Segment;

/// Segments in memory at once.
const SEGMENTS_MAX: usize = 8;

/// A message that is about to be dead-lettered.
pub(in crate::http) struct Condemned {
    pub(in crate::http) partition_id: PartitionId,
    pub(in crate::http) offset: Offset,
    pub(in crate::http) transaction_id: String,
    pub(in crate::http) reason: String,
}

/// The letters of the given messages, in order. A message whose segment is gone or damaged still
/// gets one, which says so: without it the message would be delivered for ever.
///
/// # Errors
/// If the database does not answer.
pub(in crate::http) async fn letters(db: &impl Sql, condemned: &[Condemned]) -> Result<Vec<Letter>, Error> {
    let mut letters = Vec::with_capacity(condemned.len());
    for part in condemned.chunks(SEGMENTS_MAX) {
        let wanted: Vec<_> = part.iter().map(|message| (message.partition_id, message.offset)).collect();
        let segments = log_dlq_segments_v1(db, &wanted).await?;
        let offsets: Vec<Offset> = wanted.iter().map(|(_, offset)| *offset).collect();
        // Unpacking a large segment takes long enough to hold up the requests of other clients.
        let messages = tokio::task::spawn_blocking(move || open_all(&segments, &offsets))
            .await
            .expect("unpacking does not panic and is not aborted");
        letters.extend(part.iter().zip(messages).map(|(condemned, message)| letter(condemned, message)));
    }
    Ok(letters)
}

struct Message {
    id: Uuid,
    payload: String,
    trace_id: Option<Uuid>,
    producer: Option<String>,
    is_encrypted: bool,
}

/// Each message, or why it cannot be had.
fn open_all(segments: &[Option<Covering>], offsets: &[Offset]) -> Vec<Result<Message, String>> {
    let open = |(covering, offset): (&Option<Covering>, &Offset)| {
        let covering = covering.as_ref().ok_or("its segment was already deleted")?;
        let segment = Segment::unpack(&covering.blob).map_err(|error| error.to_string())?;
        let index = usize::try_from(offset - covering.base_offset).expect("the segment covers it");
        let frame = segment.frame(index).ok_or("its segment has too few frames")?;
        let payload = std::str::from_utf8(frame.payload).map_err(|error| error.to_string())?;
        Ok(Message {
            id: frame.message_id,
            payload: payload.to_owned(),
            trace_id: frame.trace_id,
            producer: frame.producer.map(str::to_owned),
            is_encrypted: frame.is_encrypted,
        })
    };
    segments.iter().zip(offsets).map(open).collect()
}

fn letter(condemned: &Condemned, message: Result<Message, String>) -> Letter {
    let Condemned { partition_id, offset, transaction_id, reason } = condemned;
    let mut letter = Letter {
        offset: *offset,
        message_id: None,
        transaction_id: transaction_id.clone(),
        payload: None,
        error: reason.clone(),
        trace_id: None,
        producer: None,
        is_encrypted: false,
    };
    match message {
        Ok(Message { id, payload, trace_id, producer, is_encrypted }) => {
            let message_id = Some(id);
            letter = Letter { message_id, payload: Some(payload), trace_id, producer, is_encrypted, ..letter };
        }
        Err(why) => {
            warn!(target: "http", partition = %partition_id, offset, why, "dead letter without its payload");
            letter.error = format!("{reason} (the payload is lost: {why})");
        }
    }
    letter
}
