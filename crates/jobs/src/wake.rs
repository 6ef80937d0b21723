//! Who waits for work of which queue, in this process.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::Notify;

use crate::limits::QueueName;

struct Waiting {
    queues: Vec<QueueName>,
    told: Notify,
}

/// A wait for work of some queues. What is announced while nobody waits is told to the next wait.
pub struct Subscription(Arc<Waiting>);

impl Subscription {
    /// Waits until something was announced since the last wait.
    pub async fn told(&self) {
        self.0.told.notified().await;
    }
}

/// The subscriptions of one process on one storage.
#[derive(Clone, Default)]
pub struct WakeHub(Arc<Mutex<Vec<Weak<Waiting>>>>);

impl WakeHub {
    /// A hub without subscriptions.
    pub fn new() -> Self {
        Self::default()
    }

    /// A subscription, which ends when it is dropped.
    pub fn subscribe(&self, queues: &[QueueName]) -> Subscription {
        let waiting = Arc::new(Waiting { queues: queues.to_vec(), told: Notify::new() });
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|waiting| 0 < waiting.strong_count());
        all.push(Arc::downgrade(&waiting));
        Subscription(waiting)
    }

    /// Tells whoever waits for work of this queue.
    pub fn tell(&self, queue: &str) {
        self.tell_where(|waiting| waiting.queues.iter().any(|known| known.as_str() == queue));
    }

    /// Tells everybody: something may have been missed.
    pub fn tell_all(&self) {
        self.tell_where(|_| true);
    }

    fn tell_where(&self, is_meant: impl Fn(&Waiting) -> bool) {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for waiting in all.iter().filter_map(Weak::upgrade).filter(|waiting| is_meant(waiting)) {
            waiting.told.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::timeout;

    #[tokio::test(start_paused = true)]
    async fn a_subscription_hears_of_its_queues_alone() {
        let hub = WakeHub::new();
        let (a, b) = (QueueName::new("a").unwrap(), QueueName::new("b").unwrap());
        let (of_a, of_b) = (hub.subscribe(std::slice::from_ref(&a)), hub.subscribe(std::slice::from_ref(&b)));
        hub.tell("a");
        hub.tell("a");
        of_a.told().await;
        assert!(timeout(Duration::from_secs(1), of_a.told()).await.is_err(), "told twice of what came together");
        assert!(timeout(Duration::from_secs(1), of_b.told()).await.is_err(), "told of another queue");
        hub.tell_all();
        of_b.told().await;
        drop(of_a);
        hub.tell("a");
        let _new = hub.subscribe(&[a, b]);
        assert_eq!(hub.0.lock().unwrap().len(), 2, "one that was dropped stays in the list");
    }
}
