//! Ephemeral queues: messages in the memory of one server, bounded, gone with it.
//!
//! What an option says is kept in the database and known to every server; what is pushed is known to the one that it was
//! pushed to. Nothing here waits for the database.

mod queue;

use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hashbrown::HashMap;
use metrics::gauge;
use serde_json::value::RawValue;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use queue::Queue;
pub use queue::{Depth, Drops};

const QUEUES_MAX: usize = 10_000;
/// Pops that may wait at once.
const WAITING_MAX: usize = 20_000;
const TEND_INTERVAL: Duration = Duration::from_secs(1);

/// The bounds of a server, and what a queue has that says nothing.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Bytes in all queues together.
    pub bytes_max: usize,
    pub queue_bytes_max: usize,
    pub queue_length_max: usize,
    pub lease: Duration,
    pub retry_limit: u32,
    /// After so long without a push, pop or ack, a queue that nobody declared is forgotten, and a group.
    pub idle: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            bytes_max: 256 << 20,
            queue_bytes_max: 16 << 20,
            queue_length_max: 10_000,
            lease: Duration::from_secs(30),
            retry_limit: 5,
            idle: Duration::from_secs(300),
        }
    }
}

/// What happens to a push that does not fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// It is refused.
    #[default]
    Reject,
    /// The oldest messages go.
    DropOldest,
}

/// What was declared for a queue; `None` is the server's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    pub bytes_max: Option<i64>,
    pub length_max: Option<i64>,
    pub policy: Policy,
    pub ttl_seconds: Option<i64>,
    pub lease_seconds: Option<i64>,
    pub retry_limit: Option<i64>,
    /// A waiting pop that found less than `window_count` messages waits for more, this long.
    pub window_ms: Option<i64>,
    pub window_count: Option<i64>,
}

/// What holds for a queue.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub bytes_max: usize,
    pub length_max: usize,
    pub policy: Policy,
    pub ttl: Option<Duration>,
    pub lease: Duration,
    pub retry_limit: u32,
    pub window: Option<(Duration, usize)>,
}

impl Settings {
    /// Numbers of options were checked when they were given.
    fn rules(&self, options: &Options) -> Rules {
        let whole = |given: Option<i64>| given.and_then(|number| usize::try_from(number).ok());
        let seconds = |given: Option<i64>| given.map(|seconds| Duration::from_secs(seconds.unsigned_abs()));
        let window = options
            .window_ms
            .map(|ms| (Duration::from_millis(ms.unsigned_abs()), whole(options.window_count).unwrap_or(usize::MAX)));
        Rules {
            bytes_max: whole(options.bytes_max).unwrap_or(self.queue_bytes_max),
            length_max: whole(options.length_max).unwrap_or(self.queue_length_max),
            policy: options.policy,
            ttl: seconds(options.ttl_seconds),
            lease: seconds(options.lease_seconds).unwrap_or(self.lease),
            retry_limit: options.retry_limit.and_then(|limit| u32::try_from(limit).ok()).unwrap_or(self.retry_limit),
            window,
        }
    }
}

/// A message in the hands of a consumer.
#[derive(Clone, Debug)]
pub struct Delivered {
    pub id: String,
    pub partition: Arc<str>,
    /// Deliveries, this one included.
    pub attempts: u32,
    pub payload: Arc<RawValue>,
}

/// The word of a consumer.
#[derive(Clone, Debug)]
pub struct Ack {
    pub id: String,
    /// Else it is to come again.
    pub is_done: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Done with, also when it had its last try.
    Acked,
    Redelivered,
    /// Of an earlier incarnation of the queue.
    Stale,
    /// Not in the hands of this group.
    Unknown,
}

/// Why nothing was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The queue's own bound.
    QueueFull,
    /// The bound of all queues.
    ServerFull,
    /// A bound on how many there may be of these.
    TooMany(&'static str),
    /// Too many pops wait already.
    TooManyWaiting,
}

/// What a pop asks for.
#[derive(Clone, Debug)]
pub struct Pop {
    pub queue: String,
    pub partition: Option<String>,
    pub group: String,
    pub batch: usize,
    pub auto_ack: bool,
    /// How long it waits for a message.
    pub wait: Option<Duration>,
}

/// A queue as it is listed.
#[derive(Clone, Debug)]
pub struct Listed {
    pub name: String,
    pub is_declared: bool,
    pub length: usize,
    pub bytes: usize,
    pub partitions: usize,
    pub groups: usize,
    pub drops: Drops,
    pub rules: Rules,
}

struct Shared {
    queue: Mutex<Queue>,
    /// There may be something for a pop.
    filled: Notify,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All ephemeral queues of a server.
pub struct Ephemeral {
    settings: Settings,
    queues: Mutex<HashMap<String, Arc<Shared>>>,
    bytes: AtomicIsize,
    waiting: AtomicUsize,
    epoch: AtomicU64,
    is_closed: AtomicBool,
}

impl Ephemeral {
    pub fn new(settings: Settings) -> Self {
        // No epoch of an earlier process comes again.
        let (first, _) = Uuid::now_v7().as_u64_pair();
        Self {
            settings,
            queues: Mutex::default(),
            bytes: AtomicIsize::new(0),
            waiting: AtomicUsize::new(0),
            epoch: AtomicU64::new(first),
            is_closed: AtomicBool::new(false),
        }
    }

    pub fn bytes(&self) -> usize {
        usize::try_from(self.bytes.load(Ordering::Relaxed)).unwrap_or(0)
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    fn queues(&self) -> MutexGuard<'_, HashMap<String, Arc<Shared>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, name: &str) -> Option<Arc<Shared>> {
        self.queues().get(name).cloned()
    }

    fn next_epoch(&self) -> u64 {
        self.epoch.fetch_add(1, Ordering::Relaxed)
    }

    fn account(&self, change: isize) {
        self.bytes.fetch_add(change, Ordering::Relaxed);
        gauge!("ebbtide_ephemeral_bytes").increment(change as f64);
    }

    fn find_or_make(&self, name: &str) -> Result<Arc<Shared>, Refusal> {
        let mut queues = self.queues();
        if let Some(found) = queues.get(name) {
            return Ok(found.clone());
        }
        if QUEUES_MAX <= queues.len() {
            return Err(Refusal::TooMany("ephemeral queues on this server"));
        }
        let rules = self.settings.rules(&Options::default());
        let made = self.make(rules, false);
        queues.insert(name.to_owned(), made.clone());
        Ok(made)
    }

    fn make(&self, rules: Rules, is_declared: bool) -> Arc<Shared> {
        let queue = Queue::new(rules, is_declared, self.next_epoch(), Instant::now());
        Arc::new(Shared { queue: Mutex::new(queue), filled: Notify::new() })
    }

    /// A queue is as `options` say from now on; what is in it stays.
    pub fn declare(&self, name: &str, options: &Options) -> Rules {
        let rules = self.settings.rules(options);
        let mut queues = self.queues();
        let known = queues.entry_ref(name).or_insert_with(|| self.make(rules, true)).clone();
        drop(queues);
        let mut queue = known.lock();
        queue.rules = rules;
        queue.is_declared = true;
        rules
    }

    /// Queues are declared as `all` says; one that is not in it is not any more, and is forgotten when it is idle.
    pub fn declare_all(&self, all: &[(String, Options)]) {
        for (name, options) in all {
            self.declare(name, options);
        }
        let names: std::collections::HashSet<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        let plain = self.settings.rules(&Options::default());
        for (name, shared) in self.queues().iter().filter(|(name, _)| !names.contains(name.as_str())) {
            let mut queue = shared.lock();
            if queue.is_declared {
                tracing::info!(target: "ephemeral", queue = name, "declared no more");
                (queue.is_declared, queue.rules) = (false, plain);
            }
        }
    }

    /// # Errors
    /// [`Refusal`] if they do not all fit; none is pushed then.
    pub fn push(&self, name: &str, partition: &str, payloads: Vec<Arc<RawValue>>) -> Result<(), Refusal> {
        loop {
            let shared = self.find_or_make(name)?;
            let room = self.settings.bytes_max.saturating_sub(self.bytes());
            let mut queue = shared.lock();
            if queue.is_gone {
                continue; // it is in the map no more, so another is made
            }
            self.account(queue.push(partition, payloads, room, Instant::now())?);
            drop(queue);
            shared.filled.notify_waiters();
            return Ok(());
        }
    }

    /// Takes messages, and waits for the first if it may. A client that hangs up drops it, and nothing is taken.
    ///
    /// # Errors
    /// [`Refusal`] if there is no room for the queue, the group or the wait.
    pub async fn pop(&self, pop: &Pop) -> Result<Vec<Delivered>, Refusal> {
        let deadline = pop.wait.map(|wait| Instant::now() + wait);
        let _waiting = deadline.map(|_| Waiting::begin(&self.waiting)).transpose()?;
        loop {
            let shared = self.find_or_make(&pop.queue)?;
            let mut filled = std::pin::pin!(shared.filled.notified());
            // From here on no push is missed.
            filled.as_mut().enable();
            if let Some(deadline) = deadline {
                self.fatten(&shared, pop, deadline).await;
            }
            let Some(taken) = self.take(&shared, pop)? else { continue };
            let Some(deadline) = deadline else { return Ok(taken) };
            if !taken.is_empty() || deadline <= Instant::now() || self.is_closed.load(Ordering::Acquire) {
                return Ok(taken);
            }
            let lease_end = shared.lock().next_lease_end(&pop.group);
            let _ = timeout_at(lease_end.map_or(deadline, |end| end.min(deadline)), filled).await;
        }
    }

    /// `None` if the queue was deleted meanwhile.
    fn take(&self, shared: &Shared, pop: &Pop) -> Result<Option<Vec<Delivered>>, Refusal> {
        let mut queue = shared.lock();
        if queue.is_gone {
            return Ok(None);
        }
        let partition = pop.partition.as_deref();
        let (taken, change) = queue.pop(&pop.group, partition, pop.batch, pop.auto_ack, Instant::now())?;
        self.account(change);
        Ok(Some(taken))
    }

    /// With a window, a pop that would find something waits until that is enough.
    async fn fatten(&self, shared: &Shared, pop: &Pop, deadline: Instant) {
        let Some((window, count)) = shared.lock().rules.window else { return };
        let until = (Instant::now() + window).min(deadline);
        let enough = count.min(pop.batch);
        loop {
            let mut filled = std::pin::pin!(shared.filled.notified());
            filled.as_mut().enable();
            let ready = shared.lock().ready(&pop.group, pop.partition.as_deref(), Instant::now());
            let is_over = ready == 0 || enough <= ready || self.is_closed.load(Ordering::Acquire);
            if is_over || timeout_at(until, filled).await.is_err() {
                return;
            }
        }
    }

    /// What became of each message, in order.
    pub fn ack(&self, name: &str, group: &str, acks: &[Ack]) -> Vec<Outcome> {
        let Some(shared) = self.find(name) else {
            // Whatever held these messages is gone.
            return acks.iter().map(|_| Outcome::Stale).collect();
        };
        let mut queue = shared.lock();
        let (outcomes, change, is_again) = queue.ack(group, acks, Instant::now());
        if !queue.is_gone {
            self.account(change);
        }
        drop(queue);
        if is_again {
            shared.filled.notify_waiters();
        }
        outcomes
    }

    /// How many messages went.
    pub fn reset(&self, name: &str) -> usize {
        let Some(shared) = self.find(name) else { return 0 };
        let mut queue = shared.lock();
        let bytes = queue.bytes();
        let dropped = queue.reset(self.next_epoch(), Instant::now());
        self.account(-isize::try_from(bytes).expect("memory is smaller"));
        dropped
    }

    /// Whether there was such a queue, and whether it was declared.
    pub fn delete(&self, name: &str) -> Option<bool> {
        let shared = self.queues().remove(name)?;
        Some(self.forget(&shared))
    }

    fn forget(&self, shared: &Shared) -> bool {
        let mut queue = shared.lock();
        queue.is_gone = true;
        self.account(-isize::try_from(queue.bytes()).expect("memory is smaller"));
        shared.filled.notify_waiters();
        queue.is_declared
    }

    pub fn depth(&self, name: &str, group: &str) -> Option<Depth> {
        Some(self.find(name)?.lock().depth(group, Instant::now()))
    }

    /// By name.
    pub fn list(&self) -> Vec<Listed> {
        let queues: Vec<(String, Arc<Shared>)> =
            self.queues().iter().map(|(name, shared)| (name.clone(), shared.clone())).collect();
        let listed = |(name, shared): (String, Arc<Shared>)| {
            let queue = shared.lock();
            Listed {
                name,
                is_declared: queue.is_declared,
                length: queue.len(),
                bytes: queue.bytes(),
                partitions: queue.partitions(),
                groups: queue.groups(),
                drops: queue.drops,
                rules: queue.rules,
            }
        };
        let mut all: Vec<Listed> = queues.into_iter().map(listed).collect();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    }

    /// Lets go of what is over, once a second, until `stop`; then every waiting pop ends.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        ebbtide_sweep::run_every(TEND_INTERVAL, &stop, async |_| self.tend(Instant::now())).await;
        self.is_closed.store(true, Ordering::Release);
        self.queues().values().for_each(|shared| shared.filled.notify_waiters());
    }

    fn tend(&self, now: Instant) {
        let idle = self.settings.idle;
        let mut queues = self.queues();
        queues.retain(|_, shared| {
            let is_idle = shared.lock().is_idle(now, idle);
            if is_idle {
                self.forget(shared);
            }
            !is_idle
        });
        let kept: Vec<Arc<Shared>> = queues.values().cloned().collect();
        drop(queues);
        for shared in kept {
            let mut queue = shared.lock();
            if !queue.is_gone {
                self.account(queue.tend(now, idle));
            }
        }
    }
}

struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn begin(count: &'a AtomicUsize) -> Result<Self, Refusal> {
        let admitted = count.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < WAITING_MAX).then_some(n + 1));
        admitted.map(|_| Self(count)).map_err(|_| Refusal::TooManyWaiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
