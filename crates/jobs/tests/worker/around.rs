//! Hooks, layers, events and the codec.

use std::collections::HashMap;

use ebbtide_jobs::{Ctx, Draft, Error, Event, JobError, JobStatus, Next, Queue, SecretBox};

use crate::rig::{Effects, run, send, until};
use crate::support::Store;

async fn hooks_follow_what_was_written(t: Store) {
    let (queue, effects) = (t.queue(), Effects::default());
    queue
        .register("mixed", |_, how: String| async move {
            match how.as_str() {
                "good" => Ok(()),
                "bad" => Err(JobError::no_retry("bad")),
                _ => Err(JobError::new("again")),
            }
        })
        .unwrap();
    let seen = |name: &'static str| {
        let effects = effects.clone();
        move || effects.add(name)
    };
    let (start, complete, fail, retry) = (seen("start"), seen("complete"), seen("fail"), seen("retry"));
    queue
        .hooks()
        .on_start(move |_| start())
        .on_start(|_| panic!("a hook that panics changes nothing"))
        .on_complete(move |_| complete())
        .on_fail(move |_, error| {
            assert_eq!(error.to_string(), "bad");
            fail();
        })
        .on_retry(move |_, _, _| retry());
    let _running = run(&queue);
    let good = send(&queue, "mixed", &"good").await;
    t.becomes(good, JobStatus::Completed).await;
    until("told", || async { effects.count("complete") == 1 }).await;
    let bad = send(&queue, "mixed", &"bad").await;
    t.becomes(bad, JobStatus::Failed).await;
    until("told", || async { effects.count("fail") == 1 }).await;
    let again = queue.enqueue("mixed", &"again").retries(1).send().await.unwrap().id();
    t.becomes(again, JobStatus::Failed).await;
    until("told", || async { effects.count("retry") == 1 }).await;
    assert_eq!(effects.count("start"), 4);
    assert_eq!(effects.count("complete"), 1);
}

async fn layers_surround_the_handler_the_first_outermost(t: Store) {
    let (queue, effects) = (t.queue(), Effects::default());
    let seen = effects.clone();
    queue
        .register("t", move |_, n: u64| {
            seen.add("handler");
            async move { Ok(n) }
        })
        .unwrap();
    for name in ["outer", "inner"] {
        let effects = effects.clone();
        queue.layer_execution(move |ctx: Ctx, next: Next| {
            let effects = effects.clone();
            async move {
                effects.add(name);
                let answer = next.run(ctx).await?;
                effects.add(format!("{name} end"));
                Ok(answer)
            }
        });
    }
    queue.layer_enqueue(|draft: Draft| {
        if draft.args == b"13" {
            return Err(Error::DuplicateJob { holder: ebbtide_jobs::JobId::new() });
        }
        Ok(Draft { options: draft.options.meta("by", "layer"), ..draft })
    });
    queue.layer_enqueue(|draft: Draft| {
        assert_ne!(draft.args, b"99", "contained");
        Ok(draft)
    });
    let _running = run(&queue);
    let id = send(&queue, "t", &5).await;
    let job = t.becomes(id, JobStatus::Completed).await;
    assert_eq!(effects.all(), ["outer", "inner", "handler", "inner end", "outer end"]);
    assert_eq!(job.metadata["by"], "layer");
    assert!(matches!(queue.enqueue("t", &13).send().await, Err(Error::DuplicateJob { .. })));
    assert!(matches!(queue.enqueue("t", &99).send().await, Err(Error::Invalid { field: "job", .. })));
}

async fn errors_are_classified_and_shown(t: Store) {
    let effects = Effects::default();
    let seen = effects.clone();
    let queue = Queue::builder(t.storage.clone())
        .is_failure(|error: &JobError| error.to_string() != "fine")
        .error_handler(move |_, error| seen.add(error.to_string()))
        .build();
    queue.register("t", |_, text: String| async move { Err::<(), _>(JobError::new(text)) }).unwrap();
    let _running = run(&queue);
    let fine = send(&queue, "t", &"fine").await;
    let job = t.becomes(fine, JobStatus::Completed).await;
    assert_eq!(job.result, None);
    assert!(matches!(queue.result::<()>(fine).await, Err(Error::NoResult(_))));
    let bad = queue.enqueue("t", &"bad").retries(0).send().await.unwrap().id();
    t.becomes(bad, JobStatus::Failed).await;
    assert_eq!(effects.all(), ["bad"]);
}

async fn events_tell_a_jobs_life(t: Store) {
    let queue = t.queue();
    queue.register("t", |ctx: Ctx, (): ()| async move { ctx.step("one", || async { Ok(1) }).await }).unwrap();
    let mut events = queue.events();
    let _running = run(&queue);
    let id = send(&queue, "t", &()).await;
    t.becomes(id, JobStatus::Completed).await;
    queue.emit_custom("mine", serde_json::json!({"a": 1}));
    let mut names = HashMap::new();
    loop {
        let event = events.next().await.unwrap();
        let name = match event {
            Event::JobStarted(job) if job.id == id => "started",
            Event::CheckpointSaved { id: of, name } if of == id && name == "one" => "saved",
            Event::JobCompleted(job) if job.id == id => "completed",
            Event::Custom { .. } => "custom",
            other => panic!("{other:?}"),
        };
        names.insert(name, names.len());
        if names.len() == 4 {
            break;
        }
    }
    assert!(names["started"] < names["saved"] && names["saved"] < names["completed"]);
}

async fn what_is_stored_is_encrypted_and_what_is_read_is_plain(t: Store) {
    let codec = || SecretBox::new([7; 32], &[]).unwrap();
    let queue = Queue::builder(t.storage.clone()).codec(codec()).build();
    queue
        .register("t", |ctx: Ctx, secret: String| async move {
            let step: String = ctx.step("one", || async { Ok("step-secret".to_owned()) }).await?;
            let signal: String = ctx.wait_signal("go").await?;
            if signal == "signal-fails" {
                return Err(JobError::no_retry("error-secret"));
            }
            Ok(format!("{secret} {step} {signal}"))
        })
        .unwrap();
    let running = run(&queue);
    let id = send(&queue, "t", &"arg-secret").await;
    t.becomes(id, JobStatus::Waiting).await;
    queue.signal(id, "go", &"signal-secret").await.unwrap();
    t.becomes(id, JobStatus::Completed).await;
    assert_eq!(queue.result::<String>(id).await.unwrap(), "arg-secret step-secret signal-secret");
    let failed = send(&queue, "t", &"arg-secret").await;
    queue.signal(failed, "go", &"signal-fails").await.unwrap();
    t.becomes(failed, JobStatus::Failed).await;
    assert_eq!(queue.find(failed).await.unwrap().last_error.as_deref(), Some("error-secret"));
    assert_eq!(queue.dead_letters().list().await.unwrap()[0].args, br#""arg-secret""#);
    for id in [id, failed] {
        let job = t.job(id).await;
        let columns = [Some(job.args), job.result, job.last_error.map(String::into_bytes)];
        for stored in columns.into_iter().flatten() {
            assert!(!String::from_utf8_lossy(&stored).contains("secret"), "stored in clear");
        }
    }
    for table in ["checkpoints where result is not null", "signals"] {
        let column = if table == "signals" { "payload" } else { "result" };
        for stored in t.texts(&format!("select {column} from @{table}")).await {
            let stored = stored.unwrap();
            // PostgreSQL shows bytes as hexadecimal digits.
            let digits: String = b"secret".iter().map(|byte| format!("{byte:02x}")).collect();
            assert!(!stored.contains("secret") && !stored.contains(&digits), "stored in clear: {stored}");
        }
    }
    running.stop().await;

    // Without the key nothing is lost: the job is dead-lettered and can be requeued where the key is.
    let other = Queue::builder(t.storage.clone()).codec(SecretBox::new([8; 32], &[]).unwrap()).build();
    other.register("t", |_, _: String| async { Ok(()) }).unwrap();
    let sealed = queue.enqueue("t", &"x").send().await.unwrap().id();
    let _running = run(&other);
    let job = t.becomes(sealed, JobStatus::Failed).await;
    assert_eq!(job.dead_letter_reason.as_deref(), Some("not_retryable"));
}

cases!(
    hooks_follow_what_was_written,
    layers_surround_the_handler_the_first_outermost,
    errors_are_classified_and_shown,
    events_tell_a_jobs_life,
    what_is_stored_is_encrypted_and_what_is_read_is_plain,
);
