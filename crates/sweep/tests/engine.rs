//! Scripted steps, cycles and gates under a paused clock.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "support/fake_gate.rs"]
mod fake_gate;
#[path = "support/log.rs"]
mod log;

use std::cell::RefCell;
use std::future::{pending, ready};
use std::time::Duration;

use ebbtide_sweep::{
    Drained, End, Every, LeaderGate, Led, LineLimit, Pace, PhaseReport, Report, StepOutcome, drain, pause, run_every,
};
use fake_gate::{Fake, Unlock};
use tokio::time::{Instant, advance};
use tokio_util::sync::CancellationToken;

const SECOND: Duration = Duration::from_secs(1);

type Answer = Result<StepOutcome, &'static str>;

fn went(deleted: u64) -> Answer {
    Ok(StepOutcome { deleted, done: false })
}

fn last(deleted: u64) -> Answer {
    Ok(StepOutcome { deleted, done: true })
}

/// Drains a script and checks that exactly `unused` of its answers were left over.
async fn drain_script(script: &[Answer], unused: usize) -> Drained<&'static str> {
    let mut answers = script.iter();
    let drained =
        drain(&CancellationToken::new(), || ready(*answers.next().expect("the drain goes past its script"))).await;
    assert_eq!(answers.len(), unused, "answers left over");
    drained
}

#[tokio::test(start_paused = true)]
async fn drain_stops_at_done() {
    let drained = drain_script(&[went(10), went(10), last(3), went(10)], 1).await;
    let expected = Drained { deleted: 23, steps: 3, end: End::Done };
    assert_eq!(drained, expected);
    assert_eq!(drained.into_result(), Ok(23));
}

#[tokio::test(start_paused = true)]
async fn drain_stops_at_nothing_deleted_whatever_done_says() {
    let drained = drain_script(&[went(10), went(0), went(10)], 1).await;
    assert_eq!((drained.deleted, drained.steps), (10, 2));
    assert_eq!(drained.end, End::Done);

    let drained = drain_script(&[Ok(StepOutcome::NOTHING), went(10)], 1).await;
    assert_eq!((drained.deleted, drained.steps), (0, 1));
    assert_eq!(drained.end, End::Done);
}

#[tokio::test(start_paused = true)]
async fn drain_keeps_the_count_of_what_went_before_a_failure() {
    let drained = drain_script(&[went(10), went(7), Err("disk full"), went(10)], 1).await;
    assert_eq!((drained.deleted, drained.steps), (17, 2));
    assert_eq!(drained.end, End::Failed("disk full"));
    assert_eq!(drained.into_result(), Err("disk full"));
}

#[tokio::test(start_paused = true)]
async fn drain_saturates() {
    let drained = drain_script(&[went(u64::MAX), last(2)], 0).await;
    assert_eq!(drained.deleted, u64::MAX);
}

#[tokio::test(start_paused = true)]
async fn drain_is_cancelled_between_steps_only() {
    let cancel = CancellationToken::new();
    let finished = RefCell::new(0);
    let drained = drain(&cancel, || async {
        if *finished.borrow() == 1 {
            cancel.cancel();
        }
        // The step is cancelled in the middle, and gives up the thread there.
        pause(SECOND, &CancellationToken::new()).await;
        *finished.borrow_mut() += 1;
        went(10)
    })
    .await;
    assert_eq!(*finished.borrow(), 2, "the step in flight was not dropped");
    assert_eq!((drained.deleted, drained.steps), (20, 2));
    assert_eq!(drained.end, End::Cancelled);
    assert_eq!(drained.into_result(), Ok(20));
}

#[tokio::test(start_paused = true)]
async fn drain_starts_no_step_once_cancelled() {
    let cancel = CancellationToken::new();
    cancel.cancel();
    let mut steps = 0;
    let drained = drain(&cancel, || {
        steps += 1;
        ready(went(10))
    })
    .await;
    assert_eq!((steps, drained.steps), (0, 0));
    assert_eq!(drained.end, End::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn drain_and_gate_can_be_spawned() {
    let (mut gate, _) = Fake::gate();
    let cycle = async move {
        let cancel = CancellationToken::new();
        let mut cycles = 0;
        let led = gate.as_leader(|client| borrowing_cycle(client, &cancel, &mut cycles)).await;
        (led, cycles)
    };
    let (led, cycles) = tokio::spawn(cycle).await.unwrap();
    assert_eq!(led.unwrap(), Led::Ran(Ok(5)));
    assert_eq!(cycles, 1);
}

async fn borrowing_cycle(
    client: fake_gate::Client, cancel: &CancellationToken, cycles: &mut u32,
) -> Result<u64, &'static str> {
    *cycles += 1;
    drain(cancel, || client.step(last(5))).await.into_result()
}

/// Runs cycles of the given lengths, one interval of ten seconds apart, and returns their starts in seconds.
async fn starts(lengths: &[u64]) -> Vec<u64> {
    let (cancel, origin) = (CancellationToken::new(), Instant::now());
    let starts = RefCell::new(Vec::new());
    run_every(10 * SECOND, &cancel, |started| {
        let index = starts.borrow().len();
        starts.borrow_mut().push(started.duration_since(origin).as_secs());
        if index + 1 == lengths.len() {
            cancel.cancel();
        }
        advance(Duration::from_secs(lengths[index]))
    })
    .await;
    starts.into_inner()
}

#[tokio::test(start_paused = true)]
async fn cadence_counts_from_the_start_of_a_cycle() {
    assert_eq!(starts(&[0, 3, 9, 0]).await, [0, 10, 20, 30]);
}

#[tokio::test(start_paused = true)]
async fn an_overrun_is_neither_compounded_nor_caught_up() {
    // The second cycle misses two starts: the next one is at once, and the one after it a whole interval later.
    assert_eq!(starts(&[0, 35, 0, 0, 0]).await, [0, 10, 45, 55, 65]);
    assert_eq!(starts(&[10, 11, 0, 0]).await, [0, 10, 21, 31]);
}

#[tokio::test(start_paused = true)]
async fn a_pace_ends_at_once_when_cancelled_at_rest() {
    let (cancel, origin) = (CancellationToken::new(), Instant::now());
    let mut pace = Pace::new(3600 * SECOND);
    assert_eq!(pace.next(&cancel).await, Some(origin));
    let (next, ()) = tokio::join!(pace.next(&cancel), async {
        advance(SECOND).await;
        cancel.cancel();
    });
    assert_eq!(next, None);
    assert_eq!(origin.elapsed(), SECOND);
    assert_eq!(pace.next(&cancel).await, None);
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = "interval above zero")]
async fn a_pace_without_an_interval_is_refused() {
    Pace::new(Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_slow_clock_starts_expired_and_moves_only_when_the_phase_ran() {
    let mut every = Every::new(60 * SECOND);
    let first = Instant::now();
    assert!(every.is_due(first));
    assert!(every.is_due(first + SECOND), "asking does not consume it");

    // The phase may take long; what counts is the start of its cycle.
    advance(30 * SECOND).await;
    every.restart(first);
    assert!(!every.is_due(first));
    assert!(!every.is_due(first + Duration::from_millis(59_999)));
    assert!(every.is_due(first + 60 * SECOND));
    assert!(every.is_due(first + 600 * SECOND), "due until the phase ran");
}

#[tokio::test(start_paused = true)]
async fn a_line_limit_counts_what_it_holds_back() {
    let mut limit = LineLimit::new(30 * SECOND);
    assert_eq!(limit.admit(), Some(0));
    assert_eq!(limit.admit(), None);
    advance(Duration::from_millis(29_999)).await;
    assert_eq!(limit.admit(), None);
    advance(Duration::from_millis(1)).await;
    assert_eq!(limit.admit(), Some(2));
    assert_eq!(limit.admit(), None);
    advance(300 * SECOND).await;
    assert_eq!(limit.admit(), Some(1), "quiet time earns no second line");
    assert_eq!(limit.admit(), None);
}

#[tokio::test(start_paused = true)]
async fn a_report_adds_up_by_phase() {
    let mut report = Report::start();
    let mut segments = PhaseReport::start("segments");
    segments.record(drain_script(&[went(10), Err("first"), went(1)], 1).await);
    segments.record(drain_script(&[went(5), last(0)], 0).await);
    segments.record(drain_script(&[Err("second")], 0).await);
    segments.keep("unread", 3);
    segments.keep("leased", 1);
    segments.keep("unread", 4);
    advance(2 * SECOND).await;
    report.push(segments);
    let txns = PhaseReport::start("txns");
    advance(SECOND).await;
    report.push(txns);

    let segments = report.phase("segments").unwrap();
    assert_eq!((segments.deleted, segments.steps), (15, 3));
    assert_eq!((segments.failures, segments.first_error), (2, Some("first")));
    assert_eq!(segments.kept, [("unread", 7), ("leased", 1)]);
    assert_eq!(segments.elapsed, 2 * SECOND);
    assert!(!segments.is_cancelled);
    assert_eq!(report.phase("txns").unwrap().elapsed, SECOND);
    assert_eq!(report.elapsed(), 3 * SECOND);
    assert_eq!(report.deleted("segments"), 15);
    assert_eq!(report.deleted("cleanup"), 0, "a phase that did not run");
    let names: Vec<_> = report.phases().iter().map(|phase| phase.name).collect();
    assert_eq!(names, ["segments", "txns"]);
    assert_eq!(report.first_error(), Some(&"first"));
    assert!(report.anything_went());
}

#[tokio::test(start_paused = true)]
async fn a_minor_phase_neither_promotes_nor_fails_a_cycle() {
    let mut report = Report::start();
    let mut metrics = PhaseReport::start_minor("metrics");
    metrics.record(drain_script(&[went(10), Err("metrics")], 0).await);
    report.push(metrics);
    assert!(!report.anything_went());
    assert_eq!(report.first_error(), None);
    assert_eq!(report.phase("metrics").unwrap().first_error, Some("metrics"));

    let mut segments = PhaseReport::start("segments");
    segments.record(drain_script(&[last(1)], 0).await);
    segments.fail("plan");
    report.push(segments);
    assert!(report.anything_went());
    assert_eq!(report.first_error(), Some(&"plan"));
}

#[tokio::test(start_paused = true)]
async fn a_report_says_that_a_phase_was_cancelled() {
    let cancel = CancellationToken::new();
    cancel.cancel();
    let mut phase = PhaseReport::<&str>::start("segments");
    phase.record(drain(&cancel, || ready(went(1))).await);
    assert!(phase.is_cancelled);
    assert_eq!(phase.first_error, None);
}

#[tokio::test(start_paused = true)]
async fn a_leader_releases_and_keeps_its_session() {
    let (mut gate, state) = Fake::gate();
    let log = log::capture();
    for cycle in 1..=2 {
        let led = gate.as_leader(|client| async move { client.is_open() }).await;
        assert_eq!(led.unwrap(), Led::Ran(true));
        assert_eq!(state.unlocks(), cycle);
    }
    assert!(!state.is_locked());
    assert_eq!(state.opened(), 1, "the second cycle ran on the same session");
    assert_eq!(log.text(), "");
}

#[tokio::test(start_paused = true)]
async fn a_failed_cycle_is_released_and_handed_back() {
    let (mut gate, state) = Fake::gate();
    let log = log::capture();
    let led = gate.as_leader(|_| ready(Err::<(), _>("step failed"))).await;
    assert_eq!(led.unwrap(), Led::Ran(Err("step failed")));
    assert_eq!((state.is_locked(), state.unlocks()), (false, 1));
    assert_eq!(log.text(), "");
}

#[tokio::test(start_paused = true)]
async fn a_cycle_is_skipped_while_another_leads() {
    let (mut gate, state) = Fake::gate();
    let log = log::capture();
    state.lock_elsewhere();
    let led = gate.as_leader(|_| -> std::future::Ready<()> { panic!("led without the lock") }).await;
    assert_eq!(led.unwrap(), Led::Skipped);
    assert_eq!(state.unlocks(), 0);
    let text = log.text();
    assert!(text.starts_with("DEBUG"), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[tokio::test(start_paused = true)]
async fn an_election_that_fails_starts_no_cycle() {
    let (mut gate, state) = Fake::gate();
    state.refuse_connections();
    let led = gate.as_leader(|_| -> std::future::Ready<()> { panic!("led without the lock") }).await;
    assert_eq!(led.unwrap_err().to_string(), "connection refused");
}

#[tokio::test(start_paused = true)]
async fn a_failed_release_is_one_warning_and_closes_the_session() {
    for (unlock, words) in
        [(Unlock::NotHeld, "leader lock was not held at release"), (Unlock::Fails, "leader lock not released")]
    {
        let (mut gate, state) = Fake::gate();
        let log = log::capture();
        state.answer_unlock(unlock);
        let led = gate.as_leader(|_| ready(7)).await;
        assert_eq!(led.unwrap(), Led::Ran(7), "the cycle is a success");
        let text = log.text();
        assert!(text.starts_with("WARN") && text.contains(words), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert_eq!((state.open(), state.is_locked()), (0, false));

        state.answer_unlock(Unlock::Works);
        assert_eq!(gate.as_leader(|_| ready(8)).await.unwrap(), Led::Ran(8));
        assert_eq!(state.opened(), 2, "led again on a new session");
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_closes_the_session_and_frees_the_lock() {
    let (mut gate, state) = Fake::gate();
    let cycle = async move { gate.as_leader(|_| async { panic!("in a step") }).await };
    assert!(tokio::spawn(cycle).await.unwrap_err().is_panic());
    assert_eq!((state.opened(), state.open()), (1, 0));
    assert_eq!((state.is_locked(), state.unlocks()), (false, 0));
}

#[tokio::test(start_paused = true)]
async fn a_dropped_cycle_closes_the_session_and_frees_the_lock() {
    let (mut gate, state) = Fake::gate();
    let led = tokio::time::timeout(SECOND, gate.as_leader(|_| pending::<()>())).await;
    assert!(led.is_err(), "dropped in the middle");
    assert_eq!((state.opened(), state.open()), (1, 0));
    assert_eq!((state.is_locked(), state.unlocks()), (false, 0));

    assert_eq!(gate.as_leader(|_| ready(1)).await.unwrap(), Led::Ran(1));
    assert_eq!(state.opened(), 2, "led again on a new session");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_release_closes_the_session() {
    let (mut gate, state) = Fake::gate();
    state.answer_unlock(Unlock::Hangs);
    let led = tokio::time::timeout(SECOND, gate.as_leader(|_| ready(1))).await;
    assert!(led.is_err(), "dropped in the middle");
    assert_eq!((state.open(), state.is_locked()), (0, false));
}
