//! One ephemeral queue: a ring for each partition, and how far each group has come in them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::{Ack, Delivered, Outcome, Policy, Refusal, Rules};

/// What a message costs besides its payload.
pub(super) const MESSAGE_BYTES: usize = 128;
pub(super) const PARTITIONS_MAX: usize = 10_000;
pub(super) const GROUPS_MAX: usize = 1_000;

/// One message.
#[derive(Debug)]
struct Slot {
    /// Its place among all messages of the queue.
    order: u64,
    pushed_at: Instant,
    payload: Arc<RawValue>,
}

impl Slot {
    fn bytes(&self) -> usize {
        self.payload.get().len() + MESSAGE_BYTES
    }
}

/// The messages of a partition, oldest first; the first has the number `base`.
#[derive(Debug, Default)]
struct Ring {
    base: u64,
    slots: VecDeque<Slot>,
    bytes: usize,
}

impl Ring {
    fn end(&self) -> u64 {
        self.base + self.slots.len() as u64
    }

    fn get(&self, number: u64) -> Option<&Slot> {
        self.slots.get(usize::try_from(number.checked_sub(self.base)?).ok()?)
    }
}

#[derive(Debug)]
struct Lease {
    until: Instant,
    /// Deliveries so far.
    attempts: u32,
}

/// A group in a partition.
#[derive(Debug, Default)]
struct Cursor {
    /// The first message that was not delivered yet.
    next: u64,
    leased: BTreeMap<u64, Lease>,
    /// To be delivered again, with the deliveries so far.
    again: BTreeMap<u64, u32>,
    skipped: u64,
}

impl Cursor {
    /// Everything below is done with.
    fn floor(&self) -> u64 {
        let leased = self.leased.keys().next().copied().unwrap_or(self.next);
        let again = self.again.keys().next().copied().unwrap_or(self.next);
        leased.min(again).min(self.next)
    }

    fn pending(&self, ring: &Ring) -> usize {
        let unseen = ring.end().saturating_sub(self.next.max(ring.base));
        usize::try_from(unseen).unwrap_or(usize::MAX) + self.leased.len() + self.again.len()
    }

    /// The message was not dealt with in its lease: it comes again, or goes when it has had its tries. `true` if it went.
    fn give_back(&mut self, number: u64, attempts: u32, retry_limit: u32) -> bool {
        let is_over = retry_limit < attempts;
        if !is_over {
            self.again.insert(number, attempts);
        }
        is_over
    }
}

#[derive(Debug)]
struct Group {
    cursors: HashMap<Arc<str>, Cursor>,
    used_at: Instant,
}

/// Messages that went without having been done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drops {
    pub bounds: u64,
    pub ttl: u64,
    pub retry: u64,
}

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) rules: Rules,
    pub(super) is_declared: bool,
    epoch: u64,
    partitions: BTreeMap<Arc<str>, Ring>,
    groups: HashMap<String, Group>,
    /// Every message by its age.
    oldest: BTreeMap<u64, Arc<str>>,
    last_order: u64,
    bytes: usize,
    pub(super) drops: Drops,
    used_at: Instant,
    turn: usize,
    /// It was deleted while somebody held it.
    pub(super) is_gone: bool,
}

/// How a queue is, for one group.
#[derive(Debug, PartialEq, Eq)]
pub struct Depth {
    pub is_declared: bool,
    pub pending: usize,
    pub bytes: usize,
    /// Name, pending and bytes.
    pub partitions: Vec<(String, usize, usize)>,
    /// Name, pending and skipped.
    pub groups: Vec<(String, usize, u64)>,
}

impl Queue {
    pub(super) fn new(rules: Rules, is_declared: bool, epoch: u64, now: Instant) -> Self {
        Self {
            rules,
            is_declared,
            epoch,
            partitions: BTreeMap::new(),
            groups: HashMap::new(),
            oldest: BTreeMap::new(),
            last_order: 0,
            bytes: 0,
            drops: Drops::default(),
            used_at: now,
            turn: 0,
            is_gone: false,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn len(&self) -> usize {
        self.oldest.len()
    }

    pub(super) fn partitions(&self) -> usize {
        self.partitions.len()
    }

    pub(super) fn groups(&self) -> usize {
        self.groups.len()
    }

    pub(super) fn is_idle(&self, now: Instant, idle: Duration) -> bool {
        !self.is_declared && self.used_at + idle <= now
    }

    /// Appends all of `payloads` or none. Returns by how many bytes the queue is larger, or smaller, than before.
    pub(super) fn push(
        &mut self, partition: &str, payloads: Vec<Arc<RawValue>>, room: usize, now: Instant,
    ) -> Result<isize, Refusal> {
        self.used_at = now;
        let before = self.bytes;
        self.expire(now);
        let added: usize = payloads.iter().map(|payload| payload.get().len() + MESSAGE_BYTES).sum();
        let Rules { bytes_max, length_max, policy, .. } = self.rules;
        let is_too_much = |bytes: usize, length: usize| bytes_max < bytes || length_max < length;
        if is_too_much(added, payloads.len()) {
            return Err(Refusal::QueueFull);
        }
        if !self.partitions.contains_key(partition) && PARTITIONS_MAX <= self.partitions.len() {
            return Err(Refusal::TooMany("partitions in the queue"));
        }
        if policy == Policy::Reject && is_too_much(self.bytes + added, self.len() + payloads.len()) {
            return Err(Refusal::QueueFull);
        }
        if room < added.saturating_sub(before - self.bytes) {
            return Err(Refusal::ServerFull);
        }
        while is_too_much(self.bytes + added, self.len() + payloads.len()) {
            self.drop_oldest();
            self.drops.bounds += 1;
        }
        let name: Arc<str> =
            self.partitions.get_key_value(partition).map_or_else(|| partition.into(), |(name, _)| name.clone());
        // Past every number that an earlier ring of this name gave out.
        let base = self.last_order;
        let ring = self.partitions.entry(name.clone()).or_insert_with(|| Ring { base, ..Ring::default() });
        for payload in payloads {
            self.last_order += 1;
            let slot = Slot { order: self.last_order, pushed_at: now, payload };
            ring.bytes += slot.bytes();
            ring.slots.push_back(slot);
            self.oldest.insert(self.last_order, name.clone());
        }
        self.bytes += added;
        Ok(signed(self.bytes) - signed(before))
    }

    fn drop_oldest(&mut self) {
        let Some((_, partition)) = self.oldest.first_key_value() else { return };
        let partition = partition.clone();
        self.drop_front(&partition);
    }

    /// The first message of a partition goes. Groups that were not done with it have skipped it.
    fn drop_front(&mut self, partition: &Arc<str>) {
        let ring = self.partitions.get_mut(partition).expect("the oldest message is in a ring");
        let slot = ring.slots.pop_front().expect("the oldest message is in it");
        let number = ring.base;
        ring.base += 1;
        ring.bytes -= slot.bytes();
        self.bytes -= slot.bytes();
        self.oldest.remove(&slot.order);
        for cursor in self.groups.values_mut().filter_map(|group| group.cursors.get_mut(partition)) {
            let was_open = cursor.leased.remove(&number).is_some() | cursor.again.remove(&number).is_some();
            cursor.skipped += u64::from(was_open || cursor.next <= number);
            cursor.next = cursor.next.max(number + 1);
        }
    }

    /// What is older than its time goes; what was leased for longer than its lease comes again.
    fn expire(&mut self, now: Instant) {
        if let Some(ttl) = self.rules.ttl {
            while let Some((order, partition)) = self.oldest.first_key_value() {
                let ring = &self.partitions[partition];
                let is_old = ring.slots.front().is_some_and(|slot| slot.order == *order && slot.pushed_at + ttl <= now);
                if !is_old {
                    break;
                }
                self.drop_oldest();
                self.drops.ttl += 1;
            }
        }
        let retry_limit = self.rules.retry_limit;
        for cursor in self.groups.values_mut().flat_map(|group| group.cursors.values_mut()) {
            let over: Vec<u64> =
                cursor.leased.iter().filter(|(_, lease)| lease.until <= now).map(|(number, _)| *number).collect();
            for number in over {
                let lease = cursor.leased.remove(&number).expect("just seen");
                self.drops.retry += u64::from(cursor.give_back(number, lease.attempts, retry_limit));
            }
        }
    }

    /// Forgets groups that nobody has used for `idle`, and what everybody is done with. Returns the change in bytes.
    pub(super) fn tend(&mut self, now: Instant, idle: Duration) -> isize {
        let before = self.bytes;
        self.expire(now);
        self.groups.retain(|_, group| {
            now < group.used_at + idle || group.cursors.values().any(|cursor| !cursor.leased.is_empty())
        });
        let names: Vec<Arc<str>> = self.partitions.keys().cloned().collect();
        for name in &names {
            self.free(name);
            if self.partitions[name].slots.is_empty() {
                self.partitions.remove(name);
                self.groups.values_mut().for_each(|group| drop(group.cursors.remove(name)));
            }
        }
        signed(self.bytes) - signed(before)
    }

    /// Frees what every group is done with.
    fn free(&mut self, partition: &Arc<str>) {
        let floors = self.groups.values().map(|group| group.cursors.get(partition).map_or(0, Cursor::floor));
        let Some(floor) = floors.min() else { return };
        while self.partitions.get(partition).is_some_and(|ring| ring.base < floor && !ring.slots.is_empty()) {
            self.drop_front(partition);
        }
    }

    /// Messages that a pop would find now.
    pub(super) fn ready(&mut self, group: &str, partition: Option<&str>, now: Instant) -> usize {
        self.expire(now);
        let group = self.groups.get(group);
        let of = |(name, ring): (&Arc<str>, &Ring)| match group.and_then(|group| group.cursors.get(name)) {
            Some(cursor) => cursor.pending(ring) - cursor.leased.len(),
            None => ring.slots.len(),
        };
        self.partitions.iter().filter(|(name, _)| partition.is_none_or(|only| only == name.as_ref())).map(of).sum()
    }

    /// When the next lease of `group` ends.
    pub(super) fn next_lease_end(&self, group: &str) -> Option<Instant> {
        let cursors = self.groups.get(group)?.cursors.values();
        cursors.flat_map(|cursor| cursor.leased.values()).map(|lease| lease.until).min()
    }

    /// Takes up to `batch` messages, partition by partition, each in order. Returns the change in bytes as well.
    pub(super) fn pop(
        &mut self, group: &str, partition: Option<&str>, batch: usize, auto_ack: bool, now: Instant,
    ) -> Result<(Vec<Delivered>, isize), Refusal> {
        self.used_at = now;
        let before = self.bytes;
        self.expire(now);
        if !self.groups.contains_key(group) {
            if GROUPS_MAX <= self.groups.len() {
                return Err(Refusal::TooMany("groups of the queue"));
            }
            self.groups.insert(group.to_owned(), Group { cursors: HashMap::new(), used_at: now });
        }
        let mut names: Vec<Arc<str>> =
            self.partitions.keys().filter(|name| partition.is_none_or(|only| only == name.as_ref())).cloned().collect();
        // Another partition comes first each time, so that none starves.
        self.turn = self.turn.wrapping_add(1);
        let first = self.turn % names.len().max(1);
        names.rotate_left(first);
        let mut taken = Vec::new();
        for name in names {
            if batch <= taken.len() {
                break;
            }
            self.take(group, &name, batch, auto_ack, now, &mut taken);
            if auto_ack {
                self.free(&name);
            }
        }
        Ok((taken, signed(self.bytes) - signed(before)))
    }

    fn take(
        &mut self, group: &str, name: &Arc<str>, batch: usize, auto_ack: bool, now: Instant, taken: &mut Vec<Delivered>,
    ) {
        let group = self.groups.get_mut(group).expect("made before");
        group.used_at = now;
        let ring = &self.partitions[name];
        let cursor =
            group.cursors.entry(name.clone()).or_insert_with(|| Cursor { next: ring.base, ..Cursor::default() });
        while taken.len() < batch {
            let (number, attempts) = match cursor.again.pop_first() {
                Some((number, attempts)) => (number, attempts + 1),
                None if cursor.next < ring.end() => {
                    cursor.next += 1;
                    (cursor.next - 1, 1)
                }
                None => break,
            };
            let slot = ring.get(number).expect("what a group has not done is in the ring");
            taken.push(Delivered {
                id: format!("e:{:x}:{name}:{number}", self.epoch),
                partition: name.clone(),
                attempts,
                payload: slot.payload.clone(),
            });
            if !auto_ack {
                cursor.leased.insert(number, Lease { until: now + self.rules.lease, attempts });
            }
        }
    }

    /// What becomes of each message, in order. Returns the change in bytes, and whether something is to come again.
    pub(super) fn ack(&mut self, group: &str, acks: &[Ack], now: Instant) -> (Vec<Outcome>, isize, bool) {
        self.used_at = now;
        let before = self.bytes;
        self.expire(now);
        let outcomes: Vec<Outcome> = acks.iter().map(|ack| self.ack_one(group, ack, now)).collect();
        let names: Vec<Arc<str>> = self.partitions.keys().cloned().collect();
        names.iter().for_each(|name| self.free(name));
        let is_again = outcomes.contains(&Outcome::Redelivered);
        (outcomes, signed(self.bytes) - signed(before), is_again)
    }

    fn ack_one(&mut self, group: &str, ack: &Ack, now: Instant) -> Outcome {
        let Some((epoch, partition, number)) = parts(&ack.id) else { return Outcome::Unknown };
        if epoch != self.epoch {
            return Outcome::Stale;
        }
        let Some(group) = self.groups.get_mut(group) else { return Outcome::Unknown };
        group.used_at = now;
        let Some(cursor) = group.cursors.get_mut(partition) else { return Outcome::Unknown };
        // A lease may be over and the message not taken again yet: its consumer was slow, and is done all the same.
        let leased = cursor.leased.remove(&number).map(|lease| lease.attempts);
        let Some(attempts) = leased.or_else(|| cursor.again.remove(&number)) else { return Outcome::Unknown };
        if ack.is_done {
            return Outcome::Acked;
        }
        if cursor.give_back(number, attempts, self.rules.retry_limit) {
            self.drops.retry += 1;
            return Outcome::Acked;
        }
        Outcome::Redelivered
    }

    /// Everything goes, and what was delivered is of an earlier incarnation. Returns how many messages there were.
    pub(super) fn reset(&mut self, epoch: u64, now: Instant) -> usize {
        let dropped = self.len();
        *self = Self { drops: self.drops, ..Self::new(self.rules, self.is_declared, epoch, now) };
        dropped
    }

    pub(super) fn depth(&mut self, group: &str, now: Instant) -> Depth {
        self.expire(now);
        let pending = |of: Option<&Group>, name: &Arc<str>, ring: &Ring| {
            of.and_then(|group| group.cursors.get(name)).map_or(ring.slots.len(), |cursor| cursor.pending(ring))
        };
        let group = self.groups.get(group);
        let partitions: Vec<(String, usize, usize)> = self
            .partitions
            .iter()
            .map(|(name, ring)| (name.to_string(), pending(group, name, ring), ring.bytes))
            .collect();
        let of_group = |(name, group): (&String, &Group)| {
            let all = self.partitions.iter().map(|(partition, ring)| pending(Some(group), partition, ring)).sum();
            (name.clone(), all, group.cursors.values().map(|cursor| cursor.skipped).sum())
        };
        let mut groups: Vec<(String, usize, u64)> = self.groups.iter().map(of_group).collect();
        groups.sort();
        let pending = partitions.iter().map(|(_, pending, _)| pending).sum();
        Depth { is_declared: self.is_declared, pending, bytes: self.bytes, partitions, groups }
    }
}

/// `e:<epoch>:<partition>:<number>`; a partition's name may have colons.
fn parts(id: &str) -> Option<(u64, &str, u64)> {
    let (epoch, rest) = id.strip_prefix("e:")?.split_once(':')?;
    let (partition, number) = rest.rsplit_once(':')?;
    Some((u64::from_str_radix(epoch, 16).ok()?, partition, number.parse().ok()?))
}

fn signed(bytes: usize) -> isize {
    isize::try_from(bytes).expect("memory is smaller")
}

#[cfg(test)]
mod tests;
