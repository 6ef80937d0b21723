//! Limits that the workers of a fleet share.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ebbtide_jobs::{Cap, Error, JobError, JobStatus, Queue, RateLimit, Rated};

use crate::rig::{Effects, MS, Running, quick, send, until};
use crate::support::{DAY, SECOND, Store};

/// Jobs that count how many of them run at once.
fn counted(t: &Store) -> (Queue, Arc<Mutex<(u32, u32)>>) {
    let (queue, gauge) = (t.queue(), Arc::new(Mutex::new((0, 0))));
    let seen = gauge.clone();
    queue
        .register("busy", move |_, (): ()| {
            let gauge = seen.clone();
            async move {
                {
                    let mut gauge = gauge.lock().unwrap();
                    gauge.0 += 1;
                    gauge.1 = gauge.1.max(gauge.0);
                }
                ebbtide_sweep::pause(5 * MS, &tokio_util::sync::CancellationToken::new()).await;
                gauge.lock().unwrap().0 -= 1;
                Ok(())
            }
        })
        .unwrap();
    (queue, gauge)
}

async fn a_cap_holds_for_all_workers_together(t: Store) {
    let (queue, gauge) = counted(&t);
    for _ in 0..20 {
        send(&queue, "busy", &()).await;
    }
    let worker = || Running::start(quick(&queue).concurrency_cap(Cap::new("two", 2)).build().unwrap());
    let two = (worker(), worker());
    until("all complete", || async {
        t.number("select count(*) from @jobs where status = 'completed' and attempt = 1").await == 20
    })
    .await;
    assert!(gauge.lock().unwrap().1 <= 2, "{} at once", gauge.lock().unwrap().1);
    two.0.stop().await;
    two.1.stop().await;
    assert_eq!(t.number("select count(*) from @concurrency_slots where worker_id <> ''").await, 0, "all are free");
}

async fn a_key_counts_by_itself_and_none_is_not_limited(t: Store) {
    let queue = t.queue();
    queue.register("hangs", |_, (): ()| std::future::pending::<Result<(), JobError>>()).unwrap();
    let cap = Cap::new("tenant", 1).key(|job| (!job.tenant.is_empty()).then(|| job.tenant.clone()));
    let running = Running::start(quick(&queue).concurrency_cap(cap).drain_timeout(Duration::ZERO).build().unwrap());
    let long = "x".repeat(255);
    for tenant in ["a", "a", "a", "b", &long, &long, "", ""] {
        queue.enqueue("hangs", &()).tenant(tenant).send().await.unwrap();
    }
    let by_tenant = "select count(*) from @jobs where status = 'running' and tenant ";
    until("each has its share", || async {
        t.number(&format!("{by_tenant} = ''")).await == 2
            && t.number(&format!("{by_tenant} = 'a'")).await == 1
            && t.number(&format!("{by_tenant} = 'b'")).await == 1
            && t.number(&format!("{by_tenant} = '{long}'")).await == 1
    })
    .await;
    assert_eq!(t.number("select count(*) from @jobs where attempt > 1").await, 0, "a refusal burns no attempt");
    running.stop().await;
}

async fn slots_end_by_themselves_and_belong_to_a_claim(t: Store) {
    let store = t.storage.gates().unwrap();
    let (one, other) = (t.running("w").await, t.running("w").await);
    assert!(store.take_slot("s", 1, &one, DAY).await.unwrap());
    assert!(store.take_slot("s", 1, &one, DAY).await.unwrap(), "its own slot is no obstacle");
    assert!(!store.take_slot("s", 1, &other, DAY).await.unwrap());
    let end = |t: &Store| format!("update @concurrency_slots set expires_at = {} where worker_id <> ''", t.ago(SECOND));
    t.exec(&end(&t)).await;
    assert!(store.take_slot("s", 1, &other, DAY).await.unwrap());
    assert!(!store.take_slot("s", 1, &one, DAY).await.unwrap(), "an old slot of its own lets no job pass");
    t.exec(&end(&t)).await;
    store.renew_slots(&other, DAY).await.unwrap();
    assert_eq!(store.sweep_slots(10).await.unwrap(), 1, "only what is past its time goes");
    assert!(!store.take_slot("s", 1, &one, DAY).await.unwrap());
    store.free_slots(&one).await.unwrap();
    assert!(!store.take_slot("s", 1, &one, DAY).await.unwrap(), "a slot is freed by its own claim");
    store.free_slots(&other).await.unwrap();
    assert!(store.take_slot("s", 1, &one, DAY).await.unwrap());
}

async fn a_span_takes_its_number_and_no_more(t: Store) {
    let store = t.storage.gates().unwrap();
    let hour = 3600;
    let mut spans = Vec::new();
    for _ in 0..3 {
        match store.take_rate("r", 3, hour).await.unwrap() {
            Rated::Granted { span } => spans.push(span),
            Rated::Full { .. } => panic!("there is room"),
        }
    }
    spans.dedup();
    // The hour may turn in the middle of the test, once.
    if let [span] = spans[..] {
        let full = store.take_rate("r", 3, hour).await.unwrap();
        assert!(matches!(full, Rated::Full { wait } if wait <= SECOND * 3600), "{full:?}");
        assert!(matches!(store.take_rate("other", 3, hour).await.unwrap(), Rated::Granted { .. }));
        store.refund_rate("r", span).await.unwrap();
        assert!(matches!(store.take_rate("r", 3, hour).await.unwrap(), Rated::Granted { .. }));
    }
    t.exec(&format!("update @rate_limit_windows set window_start = {} where limit_name = 'r'", t.ago(DAY))).await;
    assert!(matches!(store.take_rate("r", 3, hour).await.unwrap(), Rated::Granted { .. }));
    assert_eq!(t.number("select count(*) from @rate_limit_windows where limit_name = 'r'").await, 1, "old ones go");
}

async fn a_rate_of_the_fleet_spreads_jobs_over_spans(t: Store) {
    let (queue, effects) = (t.queue(), Effects::default());
    let seen = effects.clone();
    queue
        .register("t", move |ctx: ebbtide_jobs::Ctx, (): ()| {
            seen.add(ctx.job().started_at.unwrap().as_second().to_string());
            async { Ok(()) }
        })
        .unwrap();
    for _ in 0..9 {
        send(&queue, "t", &()).await;
    }
    let worker = || Running::start(quick(&queue).rate_limit(RateLimit::new("three", 3.0)).build().unwrap());
    let _two = (worker(), worker());
    until("all complete", || async {
        t.number("select count(*) from @jobs where status = 'completed' and attempt = 1").await == 9
    })
    .await;
    // A job may be claimed at the end of one second and counted in the next: three spans show as two seconds at least.
    let mut seconds = effects.all();
    seconds.sort();
    seconds.dedup();
    assert!(2 <= seconds.len(), "nine jobs in {} seconds", seconds.len());
}

async fn a_worker_has_a_rate_of_its_own(t: Store) {
    let (queue, effects) = (t.queue(), Effects::default());
    let seen = effects.clone();
    queue
        .register("t", move |_, (): ()| {
            seen.add("run");
            async { Ok(()) }
        })
        .unwrap();
    for _ in 0..5 {
        send(&queue, "t", &()).await;
    }
    // Two at once, and the next one in eleven days.
    let builder = quick(&queue).queue_rate_limit("default", 1e-6, 2);
    let running = Running::start(builder.build().unwrap());
    until("the others wait", || async {
        t.number("select count(*) from @jobs where status = 'pending' and attempt = 0 and run_at is not null").await
            == 3
    })
    .await;
    assert_eq!(effects.all().len(), 2);
    running.stop().await;
}

async fn limits_are_checked(t: Store) {
    let queue = t.queue();
    for builder in [
        quick(&queue).concurrency_cap(Cap::new("", 1)),
        quick(&queue).rate_limit(RateLimit::new("r", 0.0)),
        quick(&queue).queue_rate_limit("no name", 1.0, 1),
        quick(&queue).queue_rate_limit("q", f64::NAN, 1),
    ] {
        assert!(matches!(builder.build().err(), Some(Error::Invalid { .. })));
    }
    t.enqueue("t", crate::support::options()).await;
    let claim = t.claim("w", 1).await[0].claim().unwrap();
    let store = t.storage.gates().unwrap();
    store.put_back(&claim, DAY).await.unwrap();
    let job = t.job(claim.job_id).await;
    assert_eq!((job.status, job.attempt, job.started_at), (JobStatus::Pending, 0, None));
    assert!(matches!(store.put_back(&claim, DAY).await, Err(Error::JobNotOwned(_))));
}

cases!(
    a_cap_holds_for_all_workers_together,
    a_key_counts_by_itself_and_none_is_not_limited,
    slots_end_by_themselves_and_belong_to_a_claim,
    a_span_takes_its_number_and_no_more,
    a_rate_of_the_fleet_spreads_jobs_over_spans,
    a_worker_has_a_rate_of_its_own,
    limits_are_checked,
);
