//! The answer of a pop: JSON written by hand around payloads that are copied as they were sent.

use std::collections::HashSet;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Response as HttpResponse};
use axum::response::Response;
use bytes::Bytes;
use http_body::{Frame as BodyFrame, SizeHint};
use jiff::Timestamp;
use metrics::counter;
use tracing::error;

use super::command::{Pop, Source};
use super::leased::{Conflation, Leased};
use crate::db::pop::{Claim, Delivery};
use crate::error::Error;
use crate::seal::Sealer;
use crate::segment::{Frame, Segment};

/// From here on unpacking is long enough to keep other requests of the thread waiting.
const LONG_BYTES: usize = 128 << 10;
/// How much of an answer the connection takes at a time; it asks for more as the client reads.
const CHUNK_BYTES: usize = 64 << 10;

/// The 200 answer. The lease is released if the connection does not take all of it, or if a message cannot be read.
pub(super) async fn found(sealer: &Sealer, pop: &Pop, mut leased: Leased) -> Result<Response, Error> {
    let deliveries = std::mem::take(&mut leased.deliveries);
    let messages: usize = deliveries.iter().map(|delivery| delivery.take).sum();
    let head = Head::new(sealer.clone(), pop, &deliveries, leased.conflation);
    let blob_bytes: usize = deliveries.iter().map(|delivery| delivery.blob.len()).sum();
    let text = if blob_bytes < LONG_BYTES {
        head.render(&deliveries)?
    } else {
        let rendering = tokio::task::spawn_blocking(move || head.render(&deliveries));
        rendering.await.expect("rendering returns its failures")?
    };
    counter!("ebbtide_pop_messages_total").increment(messages as u64);
    let body = Answer { rest: Bytes::from(text), leased };
    let mut response = HttpResponse::new(Body::new(body));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

/// The part of an answer without messages that says why there are none: nobody was asked.
pub(super) const PAUSED: &str = r#","conflation":true,"paused":true"#;

/// The 200 answer without messages, where `said` has to be said: how the group is given messages.
pub(super) fn nothing(pop: &Pop, said: &str) -> Response {
    let mut out = Vec::new();
    out.extend_from_slice(br#"{"success":true,"queue":"#);
    put_text(
        &mut out,
        if let Source::Queue(queue) | Source::Partition { queue, .. } = &pop.source { queue } else { "" },
    );
    put(&mut out, r#","partition":null,"partitionId":null,"leaseId":"","consumerGroup":"#);
    put_text(&mut out, &pop.claim.group);
    put(&mut out, r#","partitionsClaimed":0,"messages":[]"#);
    put(&mut out, &autopilot(pop).unwrap_or_default());
    put(&mut out, said);
    out.push(b'}');
    let mut response = HttpResponse::new(Body::from(out));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// What the server chose, behind another part of the answer.
fn autopilot(pop: &Pop) -> Option<String> {
    let Claim { partitions, budget, .. } = &pop.claim;
    let text = |ms| format!(r#","autopilot":{{"partitions":{partitions},"batch":{budget},"waitMs":{ms}}}"#);
    pop.autopilot_wait_ms.map(text)
}

/// What the answer says once, and each message again.
struct Head {
    queue: String,
    lease_id: String,
    group: String,
    autopilot: Option<String>,
    conflation: &'static str,
    sealer: Sealer,
    /// Nobody can be given these messages again.
    is_committed: bool,
}

impl Head {
    fn new(sealer: Sealer, pop: &Pop, deliveries: &[Delivery], conflation: Conflation) -> Self {
        let claim = &pop.claim;
        let queue = match &pop.source {
            Source::Matching { .. } => String::new(),
            Source::Queue(_) | Source::Partition { .. } => deliveries[0].queue.clone(),
        };
        let (autopilot, conflation) = (autopilot(pop), conflation.text());
        let lease_id = if claim.auto_ack { String::new() } else { claim.worker.clone() };
        Self {
            queue,
            lease_id,
            group: claim.group.clone(),
            autopilot,
            conflation,
            sealer,
            is_committed: claim.auto_ack,
        }
    }

    fn render(&self, deliveries: &[Delivery]) -> Result<Vec<u8>, Error> {
        let first = &deliveries[0];
        let partitions: HashSet<_> = deliveries.iter().map(|delivery| delivery.partition_id).collect();
        let mut out = Vec::with_capacity(1024);
        out.extend_from_slice(br#"{"success":true,"queue":"#);
        put_text(&mut out, &self.queue);
        put(&mut out, r#","partition":"#);
        put_text(&mut out, &first.partition);
        put(
            &mut out,
            &format!(r#","partitionId":"{}","leaseId":"{}","consumerGroup":"#, first.partition_id, self.lease_id),
        );
        put_text(&mut out, &self.group);
        put(&mut out, &format!(r#","partitionsClaimed":{},"messages":["#, partitions.len()));
        for delivery in deliveries {
            self.put_messages(&mut out, delivery)?;
        }
        // Every message ends in a comma, so that none needs to know whether it is the first.
        out.pop();
        out.push(b']');
        put(&mut out, self.autopilot.as_deref().unwrap_or_default());
        put(&mut out, self.conflation);
        out.push(b'}');
        Ok(out)
    }

    fn put_messages(&self, out: &mut Vec<u8>, delivery: &Delivery) -> Result<(), Error> {
        let segment = Segment::unpack(&delivery.blob)?;
        if segment.len() != delivery.msg_count {
            return Err(Error::Corrupt(format!(
                "the segment at {} of partition {} holds {} messages instead of {}",
                delivery.base_offset,
                delivery.partition_id,
                segment.len(),
                delivery.msg_count
            )));
        }
        let mut tail = Vec::new();
        put(&mut tail, &format!(r#","createdAt":"{}","queue":"#, utc_text(delivery.created_at)));
        put_text(&mut tail, &delivery.queue);
        put(&mut tail, &format!(r#","partitionId":"{}","partition":"#, delivery.partition_id));
        put_text(&mut tail, &delivery.partition);
        put(&mut tail, &format!(r#","leaseId":"{}","consumerGroup":"#, self.lease_id));
        put_text(&mut tail, &self.group);
        put(&mut tail, "},");
        for (index, frame) in segment.frames().enumerate().skip(delivery.start_idx).take(delivery.take) {
            put(out, &format!(r#"{{"id":"{}","transactionId":"#, frame.message_id));
            put_text(out, frame.transaction_id);
            match frame.trace_id {
                Some(id) => put(out, &format!(r#","traceId":"{id}","data":"#)),
                None => put(out, r#","traceId":null,"data":"#),
            }
            if frame.is_encrypted {
                self.put_opened(out, delivery, index, &frame)?;
            } else {
                out.extend_from_slice(frame.payload);
            }
            put(out, r#","producerSub":"#);
            match frame.producer {
                Some(producer) => put_text(out, producer),
                None => put(out, "null"),
            }
            out.extend_from_slice(&tail);
        }
        Ok(())
    }
}

impl Head {
    /// A payload that does not open is refused as long as it can be delivered again. Otherwise the consumer gets it as
    /// it is stored and is told so: it is lost to nobody who finds the key.
    fn put_opened(&self, out: &mut Vec<u8>, delivery: &Delivery, index: usize, frame: &Frame<'_>) -> Result<(), Error> {
        match self.sealer.open(frame.message_id, frame.payload) {
            Ok(payload) => out.extend_from_slice(&payload),
            Err(Error::Sealed(why)) => {
                counter!("ebbtide_sealed_unreadable_total").increment(1);
                let offset = delivery.base_offset + i64::try_from(index).expect("fewer frames than bytes");
                let place = format!("the message at offset {offset} of partition {}", delivery.partition_id);
                if !self.is_committed {
                    return Err(Error::Sealed(format!("{place}: {why}")));
                }
                error!(target: "http", place, why, "a message was delivered encrypted");
                out.extend_from_slice(frame.payload);
                put(out, r#","isEncrypted":true"#);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

fn put(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(text.as_bytes());
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(out, text).expect("memory takes everything");
}

/// UTC with exactly six digits: clients parse a fixed width.
pub(crate) fn utc_text(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string()
}

/// A body that knows whether it was taken.
struct Answer {
    rest: Bytes,
    leased: Leased,
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>, _: &mut Context<'_>,
    ) -> Poll<Option<Result<BodyFrame<Bytes>, Self::Error>>> {
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        let len = self.rest.len().min(CHUNK_BYTES);
        let chunk = self.rest.split_to(len);
        if self.rest.is_empty() {
            self.leased.delivered();
        }
        Poll::Ready(Some(Ok(BodyFrame::data(chunk))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_six_digits_and_a_z() {
        let whole: Timestamp = "2026-08-28T10:11:12Z".parse().expect("a time");
        assert_eq!(utc_text(whole), "2026-08-28T10:11:12.000000Z");
        let micros: Timestamp = "2026-08-28T10:11:12.12345Z".parse().expect("a time");
        assert_eq!(utc_text(micros), "2026-08-28T10:11:12.123450Z");
    }
}
