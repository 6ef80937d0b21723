//! Acknowledgements ─► batches of one cursor each ─► few calls ─► an answer to every one.

use std::collections::HashMap;
use std::ops::Range;

use super::Reply;
use super::element::{Element, default_reason, storable};
use crate::db::Conn;
use crate::db::ack::{Acked, Batch, Status, Target, log_ack_by_hash_multi_v1};
use crate::db::dead_letters::{Letter, log_dlq_head_multi_v1};
use crate::error::Error;
use crate::http::dead_letters::snapshot::{self, Condemned};
use crate::http::retry::retried;
use crate::http::{App, metrics};

/// Acknowledgements in one call, unless a single batch has more: it is never split.
const ELEMENTS_MAX: usize = 20_000;
/// Dead letters in one call.
const LETTERS_MAX: usize = 64;
const NOT_WRITTEN: &str = "ack flush failed; lease will expire and redeliver";

/// The elements of one partition, group and lease.
struct Bundle<'a> {
    target: &'a Target,
    batch: Batch,
    members: Vec<&'a (usize, Element)>,
}

/// Carries out `elements`, each with the position of its reply.
///
/// # Errors
/// [`Error::Pool`] if the database was not reached, so that nothing happened. Whatever fails later is
/// the answer of the elements that it struck.
pub(super) async fn carry_out(app: &App, elements: &[(usize, Element)], replies: &mut [Reply]) -> Result<(), Error> {
    if elements.is_empty() {
        return Ok(());
    }
    let bundles = bundled(elements);
    let conn = app.db.conn().await?;
    let mut done = 0;
    while done < bundles.len() {
        let part = &bundles[next_part(&bundles, done)];
        done += part.len();
        if let Err(error) = flush(app, &conn, part, replies).await {
            metrics::failed(&error);
            // The connection may be in the middle of something: leave what is left to the leases.
            bundles[done..].iter().for_each(|bundle| bundle.fail(replies));
            break;
        }
    }
    bundles.iter().for_each(|bundle| bundle.count(app, replies));
    Ok(())
}

/// In the order in which each bundle's first element was sent.
fn bundled(elements: &[(usize, Element)]) -> Vec<Bundle<'_>> {
    let mut bundles: Vec<Bundle<'_>> = Vec::new();
    let mut by_target: HashMap<&Target, usize> = HashMap::new();
    for member in elements {
        let (_, element) = member;
        let at = *by_target.entry(&element.target).or_insert_with(|| {
            bundles.push(Bundle { target: &element.target, batch: Batch::default(), members: Vec::new() });
            bundles.len() - 1
        });
        bundles[at].batch.add(element.hash, element.status);
        bundles[at].members.push(member);
    }
    bundles
}

fn next_part(bundles: &[Bundle<'_>], start: usize) -> Range<usize> {
    let mut elements = bundles[start].members.len();
    let mut end = start + 1;
    while end < bundles.len() && elements + bundles[end].members.len() <= ELEMENTS_MAX {
        elements += bundles[end].members.len();
        end += 1;
    }
    start..end
}

/// Every element of `part` has its answer afterwards, also after a failure.
async fn flush(app: &App, conn: &Conn, part: &[Bundle<'_>], replies: &mut [Reply]) -> Result<(), Error> {
    let batches: Vec<(&Target, &Batch)> = part.iter().map(|bundle| (bundle.target, &bundle.batch)).collect();
    let acked = match retried(|| log_ack_by_hash_multi_v1(conn, &batches)).await {
        Ok(acked) => acked,
        Err(error) => {
            part.iter().for_each(|bundle| bundle.fail(replies));
            return Err(error);
        }
    };
    let mut condemned = Vec::new();
    for (bundle, acked) in part.iter().zip(&acked) {
        bundle.answer(acked, replies);
        wake(app, bundle.target, acked);
        if acked.success && acked.dlq {
            condemned.push((bundle, acked));
        }
    }
    for at in (0..condemned.len()).step_by(LETTERS_MAX) {
        let unfiled = &condemned[at..];
        if let Err(error) = file(app, conn, &unfiled[..unfiled.len().min(LETTERS_MAX)], replies).await {
            unfiled.iter().for_each(|(bundle, _)| bundle.fail_signals(NOT_WRITTEN, replies));
            return Err(error);
        }
    }
    Ok(())
}

/// Files the message at which each bundle stopped. A crash before this leaves the lease to expire.
async fn file(app: &App, conn: &Conn, part: &[(&Bundle<'_>, &Acked)], replies: &mut [Reply]) -> Result<(), Error> {
    let condemned: Vec<Condemned> = part.iter().map(|(bundle, acked)| bundle.condemned(acked)).collect();
    let letters = snapshot::letters(conn, &condemned).await?;
    let filing: Vec<(&Target, &Letter)> = part.iter().map(|(bundle, _)| bundle.target).zip(&letters).collect();
    let filed = retried(|| log_dlq_head_multi_v1(conn, &filing)).await?;
    for ((bundle, acked), filed) in part.iter().zip(&filed) {
        if filed.success {
            bundle.answer(&Acked { lease_released: true, ..(*acked).clone() }, replies);
            wake(app, bundle.target, filed);
        } else {
            bundle.fail_signals(filed.error.as_deref().unwrap_or(NOT_WRITTEN), replies);
        }
    }
    Ok(())
}

fn wake(app: &App, target: &Target, acked: &Acked) {
    if let Some(lane) = &acked.wake {
        app.wake.released(&lane.queue, &lane.partition, &target.group);
    }
}

impl Bundle<'_> {
    fn answer(&self, acked: &Acked, replies: &mut [Reply]) {
        for (index, element) in &self.members {
            let completed = element.status == Status::Completed;
            let is_letter = acked.dlq && !completed && acked.hash == Some(element.hash);
            let reply = &mut replies[*index];
            reply.error = if !acked.success {
                acked.error.clone()
            } else if acked.unresolved_hashes.contains(&element.hash) {
                Some(match acked.log_start {
                    Some(start) => format!(
                        "unresolvable: the message is gone, or never was here: retention has deleted what is below offset {start}"
                    ),
                    None => "unresolvable: the transaction id is not known in this partition".to_owned(),
                })
            } else if !completed && !is_letter && acked.gone_hashes.contains(&element.hash) {
                Some("gone: retention has deleted the message, so it will not be delivered again".to_owned())
            } else if !completed && acked.stale_hashes.contains(&element.hash) {
                Some("already committed: the message is behind the cursor".to_owned())
            } else {
                None
            };
            reply.success = reply.error.is_none();
            reply.noop = reply.success && completed && acked.noop_hashes.contains(&element.hash);
            reply.dlq = is_letter;
            reply.lease_released = acked.lease_released;
        }
    }

    fn fail(&self, replies: &mut [Reply]) {
        for (index, _) in &self.members {
            replies[*index].error = Some(NOT_WRITTEN.to_owned());
        }
    }

    fn count(&self, app: &App, replies: &[Reply]) {
        let is_done =
            |(index, element): &&(usize, Element)| replies[*index].success && element.status == Status::Completed;
        let done = self.members.iter().copied().filter(|member| is_done(member)).count() as u64;
        app.telemetry.acked(self.target.partition_id, done, self.members.len() as u64 - done);
        if self.members.iter().any(|(index, _)| replies[*index].dlq) {
            app.telemetry.dead_lettered(1);
        }
    }

    /// What was completed stays so; the rest was not carried out.
    fn fail_signals(&self, error: &str, replies: &mut [Reply]) {
        for (index, element) in &self.members {
            if element.status != Status::Completed {
                let reply = &mut replies[*index];
                reply.error = Some(error.to_owned());
                reply.success = false;
                reply.dlq = false;
            }
        }
    }

    /// The message at which the bundle stopped: the first element that condemned it gives the reason.
    fn condemned(&self, acked: &Acked) -> Condemned {
        let (_, element) = self
            .members
            .iter()
            .find(|(_, element)| acked.hash == Some(element.hash) && element.status != Status::Completed)
            .expect("the function stopped at an element of this bundle");
        let reason = element.reason.clone().unwrap_or_else(|| default_reason(element.status).to_owned());
        Condemned {
            partition_id: self.target.partition_id,
            offset: acked.offset.expect("given with dlq"),
            transaction_id: storable(element.transaction_id.clone()),
            reason,
        }
    }
}
