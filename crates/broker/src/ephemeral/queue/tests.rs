//! A queue with a clock that the test moves.

use super::*;

const IDLE: Duration = Duration::from_secs(300);

fn rules() -> Rules {
    Rules {
        bytes_max: 1 << 20,
        length_max: 4,
        policy: Policy::Reject,
        ttl: None,
        lease: Duration::from_secs(30),
        retry_limit: 2,
        window: None,
    }
}

struct Bench {
    queue: Queue,
    now: Instant,
}

impl Bench {
    fn new(rules: Rules) -> Self {
        let now = Instant::now();
        Self { queue: Queue::new(rules, false, 0xA1, now), now }
    }

    fn push(&mut self, partition: &str, payloads: &[&str]) -> Result<isize, Refusal> {
        let payloads = payloads.iter().map(|text| raw(text)).collect();
        self.queue.push(partition, payloads, usize::MAX, self.now)
    }

    /// Payloads with their deliveries, after `partition:`.
    fn pop(&mut self, group: &str, batch: usize) -> (Vec<String>, Vec<String>) {
        let (taken, _) = self.queue.pop(group, None, batch, false, self.now).expect("room for a group");
        let shown = |one: &Delivered| format!("{}:{}#{}", one.partition, one.payload.get(), one.attempts);
        (taken.iter().map(shown).collect(), taken.iter().map(|one| one.id.clone()).collect())
    }

    fn ack(&mut self, group: &str, ids: &[String], is_done: bool) -> Vec<Outcome> {
        let acks: Vec<Ack> = ids.iter().map(|id| Ack { id: id.clone(), is_done }).collect();
        self.queue.ack(group, &acks, self.now).0
    }

    fn later(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
    }
}

fn raw(text: &str) -> Arc<RawValue> {
    Arc::from(RawValue::from_string(text.to_owned()).expect("JSON"))
}

#[test]
fn a_group_shares_messages_and_each_group_sees_all() {
    let mut t = Bench::new(rules());
    t.push("p", &["1", "2", "3"]).expect("room");
    assert_eq!(t.pop("g", 2).0, ["p:1#1", "p:2#1"]);
    assert_eq!(t.pop("g", 2).0, ["p:3#1"], "the rest");
    assert_eq!(t.pop("h", 9).0, ["p:1#1", "p:2#1", "p:3#1"]);
}

#[test]
fn what_every_group_is_done_with_is_freed() {
    let mut t = Bench::new(rules());
    t.push("p", &["1", "2", "3"]).expect("room");
    let (_, of_g) = t.pop("g", 9);
    let (_, of_h) = t.pop("h", 9);
    assert_eq!(t.ack("g", &of_g, true), [Outcome::Acked; 3]);
    assert_eq!(t.queue.len(), 3, "h is not done");
    assert_eq!(t.ack("h", &of_h[1..], true), [Outcome::Acked; 2]);
    assert_eq!(t.queue.len(), 3, "the first one is in front of them");
    t.ack("h", &of_h[..1], true);
    assert_eq!((t.queue.len(), t.queue.bytes()), (0, 0));
    assert_eq!(t.ack("h", &of_h[..1], true), [Outcome::Unknown], "done twice");
    assert_eq!(t.queue.drops, Drops::default());
}

#[test]
fn a_lease_ends_exactly_at_its_time_and_tries_are_counted() {
    let mut t = Bench::new(rules());
    t.push("p", &["1"]).expect("room");
    assert_eq!(t.pop("g", 1).0, ["p:1#1"]);
    t.now += Duration::from_secs(30) - Duration::from_micros(1);
    assert!(t.pop("g", 1).0.is_empty(), "1 µs before");
    t.now += Duration::from_micros(1);
    assert_eq!(t.pop("g", 1).0, ["p:1#2"], "at its time");
    t.later(31);
    let (shown, ids) = t.pop("g", 1);
    assert_eq!(shown, ["p:1#3"], "two retries");
    assert_eq!(t.ack("g", &ids, false), [Outcome::Acked], "no further try");
    assert!(t.pop("g", 1).0.is_empty());
    assert_eq!((t.queue.len(), t.queue.drops.retry), (0, 1));
}

#[test]
fn a_failed_message_comes_again_before_later_ones() {
    let mut t = Bench::new(rules());
    t.push("p", &["1", "2", "3"]).expect("room");
    let (_, ids) = t.pop("g", 2);
    assert_eq!(t.ack("g", &ids[..1], false), [Outcome::Redelivered]);
    assert_eq!(t.pop("g", 9).0, ["p:1#2", "p:3#1"]);
}

#[test]
fn a_slow_consumer_is_done_unless_another_has_the_message() {
    let mut t = Bench::new(rules());
    t.push("p", &["1"]).expect("room");
    let (_, ids) = t.pop("g", 1);
    t.later(31);
    assert_eq!(t.ack("g", &ids, true), [Outcome::Acked]);
    assert_eq!(t.queue.len(), 0);
}

#[test]
fn a_full_queue_refuses_all_of_a_push_or_drops_the_oldest() {
    let mut t = Bench::new(rules());
    t.push("p", &["1", "2", "3"]).expect("room");
    assert_eq!(t.push("p", &["4", "5"]), Err(Refusal::QueueFull));
    assert_eq!(t.queue.len(), 3);
    t.push("q", &["4"]).expect("the last place");
    assert_eq!(t.push("q", &["5"]), Err(Refusal::QueueFull));

    let mut t = Bench::new(Rules { policy: Policy::DropOldest, ..rules() });
    t.push("p", &["1", "2"]).expect("room");
    let (_, ids) = t.pop("g", 1);
    t.push("q", &["3", "4", "5"]).expect("the oldest goes, over partitions");
    assert_eq!(t.queue.drops.bounds, 1);
    assert_eq!(t.ack("g", &ids, true), [Outcome::Unknown], "it was dropped under its consumer");
    let depth = t.queue.depth("g", t.now);
    assert_eq!((depth.pending, depth.groups), (4, vec![("g".to_owned(), 4, 1)]));
    assert_eq!(t.push("q", &["1", "2", "3", "4", "5"]), Err(Refusal::QueueFull), "more than fits at all");
}

#[test]
fn bytes_are_bounded_too() {
    let mut t = Bench::new(Rules { bytes_max: 2 * MESSAGE_BYTES + 2, ..rules() });
    t.push("p", &["1", "2"]).expect("exactly");
    assert_eq!(t.push("p", &["3"]), Err(Refusal::QueueFull));
    assert_eq!(t.queue.push("p", vec![raw("3")], 0, t.now), Err(Refusal::QueueFull));
    let mut t = Bench::new(rules());
    assert_eq!(t.queue.push("p", vec![raw("3")], MESSAGE_BYTES, t.now), Err(Refusal::ServerFull));
    assert_eq!(t.queue.push("p", vec![raw("3")], MESSAGE_BYTES + 1, t.now), Ok(signed(MESSAGE_BYTES + 1)));
}

#[test]
fn a_message_goes_exactly_at_its_age() {
    let mut t = Bench::new(Rules { ttl: Some(Duration::from_secs(10)), ..rules() });
    t.push("p", &["1"]).expect("room");
    t.now += Duration::from_micros(1);
    t.push("q", &["2"]).expect("room");
    t.now += Duration::from_secs(10) - Duration::from_micros(2);
    assert_eq!(t.queue.depth("g", t.now).pending, 2, "1 µs before");
    t.now += Duration::from_micros(1);
    assert_eq!(t.pop("g", 9).0, ["q:2#1"], "at its age");
    assert_eq!(t.queue.drops.ttl, 1);
}

#[test]
fn a_reset_makes_earlier_ids_stale() {
    let mut t = Bench::new(rules());
    t.push("p:with:colons", &["1", "2"]).expect("room");
    let (_, ids) = t.pop("g", 1);
    assert_eq!(t.queue.reset(0xA2, t.now), 2);
    t.push("p:with:colons", &["3"]).expect("room");
    t.pop("g", 1);
    assert_eq!(t.ack("g", &ids, true), [Outcome::Stale]);
    for id in ["", "x", "e:a2:p", "e:zz:p:1", "e:a2:p:-1", "e:a2:other:0"] {
        assert_eq!(t.ack("g", &[id.to_owned()], true), [Outcome::Unknown], "{id}");
    }
}

#[test]
fn a_group_that_left_holds_nothing_up() {
    let mut t = Bench::new(rules());
    t.push("p", &["1"]).expect("room");
    t.pop("gone", 1);
    let (_, ids) = t.pop("g", 1);
    t.ack("g", &ids, true);
    t.later(31);
    t.queue.tend(t.now, IDLE);
    assert_eq!((t.queue.groups(), t.queue.len()), (2, 1), "its lease is over, and it may come back");
    t.later(300);
    t.queue.pop("g", None, 1, false, t.now).expect("g is used");
    t.queue.tend(t.now, IDLE);
    assert_eq!((t.queue.groups(), t.queue.len(), t.queue.partitions()), (1, 0, 0));
    // A partition that was empty and comes back gives out no number again.
    t.push("p", &["2"]).expect("room");
    assert_eq!(t.ack("g", &ids, true), [Outcome::Unknown]);
    assert_eq!(t.pop("g", 1).0, ["p:2#1"]);
}

#[test]
fn at_delivery_done_is_done() {
    let mut t = Bench::new(rules());
    t.push("p", &["1", "2"]).expect("room");
    let (taken, change) = t.queue.pop("g", Some("p"), 1, true, t.now).expect("room");
    assert_eq!((taken.len(), t.queue.len()), (1, 1));
    assert_eq!(change, -signed(MESSAGE_BYTES + 1));
    assert!(t.queue.pop("g", Some("other"), 1, true, t.now).expect("room").0.is_empty());
}

#[test]
fn partitions_take_turns() {
    let mut t = Bench::new(Rules { length_max: 100, ..rules() });
    for partition in ["a", "b", "c"] {
        t.push(partition, &["1", "2", "3"]).expect("room");
    }
    let first: std::collections::HashSet<String> = (0..3).map(|_| t.pop("g", 1).0[0].clone()).collect();
    assert_eq!(first.len(), 3, "{first:?}");
}

#[test]
fn a_queue_that_nobody_declared_is_idle_at_its_time() {
    let t = Bench::new(rules());
    assert!(!t.queue.is_idle(t.now + IDLE - Duration::from_micros(1), IDLE));
    assert!(t.queue.is_idle(t.now + IDLE, IDLE));
    let declared = Queue { is_declared: true, ..t.queue };
    assert!(!declared.is_idle(t.now + IDLE * 2, IDLE));
}
