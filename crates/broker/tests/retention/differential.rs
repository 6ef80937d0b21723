//! The steps against a slow reference that looks at single messages, on random logs.

use crate::support::partition::{Log, SECOND, US, at};
use crate::support::random::Random;

#[derive(Clone, Copy, Debug)]
struct Segment {
    base: i64,
    end: i64,
    created: i64,
}

#[derive(Debug)]
struct Case {
    segments: Vec<Segment>,
    cursors: Vec<i64>,
    all: Option<i64>,
    completed: Option<i64>,
    rows_max: i32,
}

impl Case {
    fn random(random: &mut Random) -> Self {
        let mut segments = Vec::new();
        let (mut base, mut created) = (0, -40 * SECOND);
        for _ in 0..random.below(12) {
            let end = base + random.below(5);
            segments.push(Segment { base, end, created });
            base = end + 1;
            // Pushes in one microsecond share a stamp.
            created += random.below(4) * 3 * SECOND + random.below(2) * US;
        }
        let cursors = (0..random.below(4)).map(|_| random.below(base + 3) - 2).collect();
        let stamps: Vec<i64> = segments.iter().map(|segment| segment.created).collect();
        let mut cutoff = || match random.below(4) {
            0 => None,
            1 if !stamps.is_empty() => {
                let at = random.below(i64::try_from(stamps.len()).expect("few"));
                Some(stamps[usize::try_from(at).expect("an index")] + random.below(3) - 1)
            }
            _ => Some(-random.below(50) * SECOND),
        };
        let (all, completed) = (cutoff(), cutoff());
        Self { segments, cursors, all, completed, rows_max: i32::try_from(1 + random.below(6)).expect("small") }
    }

    /// Message by message: rule 1 gives up what is older than its cutoff; rule 2 what is older than its
    /// own and lies at or below every cursor. A segment goes when all of its messages and all before it go.
    fn survivors(&self) -> Vec<i64> {
        let slowest = self.cursors.iter().min();
        let given_up = |offset: i64, created: i64| {
            let by_age = self.all.is_some_and(|cutoff| created < cutoff);
            let by_reading = self.completed.is_some_and(|cutoff| created < cutoff)
                && slowest.is_some_and(|committed| offset <= *committed);
            by_age || by_reading
        };
        let goes = |segment: &&Segment| (segment.base..=segment.end).all(|offset| given_up(offset, segment.created));
        let gone = self.segments.iter().take_while(goes).count();
        self.segments[gone..].iter().map(|segment| segment.base).collect()
    }
}

#[tokio::test]
async fn the_steps_agree_with_a_reference_that_looks_at_messages() {
    let mut random = Random::seeded();
    let log = Log::start().await;
    for round in 0..300 {
        let case = Case::random(&mut random);
        let rows: Vec<_> = case.segments.iter().map(|s| (s.base, s.end, s.created)).collect();
        let p = log.partition().await.segments(&rows).await;
        for (number, committed) in case.cursors.iter().enumerate() {
            p.cursor(&number.to_string(), *committed).await;
        }
        let last_offset = p.number("last_offset").await;
        let (all, completed) = (case.all.map(at), case.completed.map(at));
        let mut gone = 0;
        loop {
            let before = p.live().await;
            let (deleted, log_start, done) = p.step(all, completed, case.rows_max).await;
            let live = p.live().await;
            assert!(deleted <= i64::from(case.rows_max), "a step exceeds its bound: {case:?}");
            assert_eq!(i64::try_from(before.len() - live.len()).expect("few"), deleted, "{case:?}");
            // The watermark is the first live base, or one past the last message.
            let first = live.first().copied().unwrap_or(last_offset + 1);
            assert_eq!(log_start, Some(first), "{case:?}");
            assert_eq!(p.number("log_start").await, first, "{case:?}");
            gone += deleted;
            if done {
                break;
            }
            assert!(deleted > 0, "neither done nor progress: {case:?}");
        }
        assert_eq!(p.live().await, case.survivors(), "round {round}: {case:?}");
        assert_eq!(p.number("last_offset").await, last_offset);
        let frames: i64 = case
            .segments
            .iter()
            .take(usize::try_from(gone).expect("few"))
            .map(|segment| segment.end - segment.base + 1)
            .sum();
        let told: i64 = p.history().await.iter().map(|(frames, _)| i64::from(*frames)).sum();
        assert_eq!(told, frames, "history adds up to what went: {case:?}");
    }
}
