//! Tells workers of other processes that there is work, over one connection that does nothing else.
//!
//! NOTIFY takes a lock that orders commits in the whole database, so it never runs in a transaction that enqueues:
//! what was touched is collected, and sent together once it has been committed.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ebbtide_sweep::{LineLimit, pause};
use tokio::sync::Notify;
use tokio_postgres::types::Type;
use tokio_postgres::{AsyncMessage, Client, Config, NoTls};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::warn;
use uuid::Uuid;

use crate::limits::QueueName;
use crate::wake::{Subscription, WakeHub};

const CHANNEL: &str = "ebbtide_jobs";
/// PostgreSQL refuses a payload of 8,000 bytes or more.
const PAYLOAD_BYTES_MAX: usize = 7_900;
/// Pause between two notices; what is touched meanwhile shares the next one.
const GAP: Duration = Duration::from_millis(5);
/// Queues that wait to be announced. Beyond it the hint is dropped, and their workers find the jobs by polling.
const QUEUES_MAX: usize = 10_000;
const RECONNECT_FIRST: Duration = Duration::from_millis(100);
const RECONNECT_LONGEST: Duration = Duration::from_secs(10);
const LINE_GAP: Duration = Duration::from_secs(60);

/// What one process hears and says. The connection is opened when it is first needed, and closed with the last
/// handle of the storage.
pub(super) struct Wake {
    link: Arc<Link>,
    config: Option<Config>,
    is_started: AtomicBool,
    end: CancellationToken,
    _ends_with_us: DropGuard,
}

struct Link {
    hub: WakeHub,
    /// By it a process knows its own notices.
    origin: String,
    outbox: Mutex<BTreeSet<String>>,
    /// There is something to send, or to listen for.
    changed: Notify,
    is_wanted: AtomicBool,
    is_listening: AtomicBool,
}

impl Wake {
    /// Without `config` only this process is told.
    pub(super) fn new(config: Option<Config>) -> Self {
        let end = CancellationToken::new();
        let link = Link {
            hub: WakeHub::new(),
            origin: Uuid::new_v4().simple().to_string(),
            outbox: Mutex::default(),
            changed: Notify::new(),
            is_wanted: AtomicBool::new(false),
            is_listening: AtomicBool::new(false),
        };
        let _ends_with_us = end.clone().drop_guard();
        Self { link: Arc::new(link), config, is_started: AtomicBool::new(false), end, _ends_with_us }
    }

    pub(super) fn announce(&self, queue: &QueueName) {
        self.link.hub.tell(queue.as_str());
        let Some(config) = &self.config else { return };
        {
            let mut outbox = self.link.outbox.lock().unwrap_or_else(PoisonError::into_inner);
            if outbox.contains(queue.as_str()) || QUEUES_MAX <= outbox.len() {
                return;
            }
            outbox.insert(queue.as_str().to_owned());
        }
        self.start(config);
        self.link.changed.notify_one();
    }

    pub(super) fn subscribe(&self, queues: &[QueueName]) -> Subscription {
        let subscription = self.link.hub.subscribe(queues);
        if let Some(config) = &self.config {
            self.link.is_wanted.store(true, Ordering::Relaxed);
            self.start(config);
            self.link.changed.notify_one();
        }
        subscription
    }

    pub(super) fn is_listening(&self) -> bool {
        self.link.is_listening.load(Ordering::Relaxed)
    }

    fn start(&self, config: &Config) {
        if !self.is_started.swap(true, Ordering::AcqRel) {
            tokio::spawn(keep_linked(self.link.clone(), config.clone(), self.end.clone()));
        }
    }
}

async fn keep_linked(link: Arc<Link>, config: Config, end: CancellationToken) {
    let mut wait = RECONNECT_FIRST;
    let mut lines = LineLimit::new(LINE_GAP);
    loop {
        let linked = tokio::select! {
            () = end.cancelled() => return,
            linked = serve(&link, &config, &mut wait) => linked,
        };
        link.is_listening.store(false, Ordering::Relaxed);
        if let Err(error) = linked
            && let Some(suppressed) = lines.admit()
        {
            warn!(target: "jobs", %error, suppressed, "no link to other workers; jobs are found by polling");
        }
        if !pause(wait, &end).await {
            return;
        }
        wait = (wait * 2).min(RECONNECT_LONGEST);
    }
}

/// Sends and listens until the connection breaks.
async fn serve(link: &Arc<Link>, config: &Config, wait: &mut Duration) -> Result<(), tokio_postgres::Error> {
    let (client, mut connection) = config.connect(NoTls).await?;
    let closed = CancellationToken::new();
    let (hears, says_closed) = (link.clone(), closed.clone().drop_guard());
    // It ends with the connection, which ends when the client is dropped.
    tokio::spawn(async move {
        let _says_closed = says_closed;
        while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
            if let AsyncMessage::Notification(notice) = message {
                hears.received(notice.payload());
            }
        }
    });
    // A lost hint costs a poll's wait; it is worth no flush.
    client.batch_execute("set synchronous_commit = off").await?;
    *wait = RECONNECT_FIRST;
    let mut is_listening = false;
    loop {
        if !is_listening && link.is_wanted.load(Ordering::Relaxed) {
            client.batch_execute("listen ebbtide_jobs").await?;
            is_listening = true;
            link.is_listening.store(true, Ordering::Relaxed);
            // What was announced before is not heard any more.
            link.hub.tell_all();
        }
        tokio::select! {
            () = closed.cancelled() => return Ok(()),
            () = link.changed.notified() => {}
        }
        if link.send(&client).await? {
            pause(GAP, &closed).await;
        }
    }
}

impl Link {
    /// Sends what waits, in as few notices as hold it. False if nothing did.
    async fn send(&self, client: &Client) -> Result<bool, tokio_postgres::Error> {
        let queues = std::mem::take(&mut *self.outbox.lock().unwrap_or_else(PoisonError::into_inner));
        let has_any = !queues.is_empty();
        let mut payload = self.origin.clone();
        for queue in queues {
            if PAYLOAD_BYTES_MAX < payload.len() + queue.len() + 1 {
                notify(client, &payload).await?;
                payload.truncate(self.origin.len());
            }
            payload.push('\n');
            payload.push_str(&queue);
        }
        if has_any {
            notify(client, &payload).await?;
        }
        Ok(has_any)
    }

    fn received(&self, payload: &str) {
        let mut lines = payload.split('\n');
        if lines.next() != Some(&self.origin) {
            lines.for_each(|queue| self.hub.tell(queue));
        }
    }
}

async fn notify(client: &Client, payload: &str) -> Result<(), tokio_postgres::Error> {
    client.query_typed("select pg_notify($1, $2)", &[(&CHANNEL, Type::TEXT), (&payload, Type::TEXT)]).await?;
    Ok(())
}
