//! How many rows a step may take: fewer after a time-out or a long lock, more again after successes.

use std::time::Duration;

/// Of a step with fewer rows only the fixed part may have been slow, which a smaller batch does not mend.
const ROWS_THAT_COUNT: i32 = 50;

/// The batch of one kind of step.
///
/// It halves when a step ran into a time-out, is cut when a step held its lock for too long, and grows by
/// a quarter after every step that did neither, up to what was configured.
#[derive(Debug, Clone)]
pub struct Batch {
    rows: i32,
    rows_max: i32,
    hold_max: Duration,
}

impl Batch {
    /// A batch of `rows_max` rows, whose steps should hold a lock for `hold_max` at most.
    ///
    /// # Panics
    /// If `rows_max` is below 1, or `hold_max` is zero.
    pub fn new(rows_max: i32, hold_max: Duration) -> Self {
        assert!(1 <= rows_max, "a step takes one row at least");
        assert!(!hold_max.is_zero(), "no step ends in no time");
        Self { rows: rows_max, rows_max, hold_max }
    }

    /// Rows that the next step may take.
    pub fn rows(&self) -> i32 {
        self.rows
    }

    /// Takes in a step that answered: what it deleted, and how long it held its lock.
    ///
    /// A step that ended for want of rows says nothing of larger ones. It cuts the batch, too, if it was too long
    /// and had so many rows that these took the time.
    pub fn took(&mut self, deleted: u64, took: Duration) {
        let deleted = i32::try_from(deleted).unwrap_or(i32::MAX);
        let is_full = self.rows <= deleted;
        if self.hold_max < took {
            if is_full || ROWS_THAT_COUNT <= deleted {
                let share = self.hold_max.as_secs_f64() / took.as_secs_f64();
                #[allow(clippy::cast_possible_truncation, reason = "a share of a number that fits")]
                let rows = (f64::from(deleted) * share) as i32;
                self.rows = rows.clamp(1, self.rows);
            }
        } else if is_full {
            self.rows = self.rows.saturating_add(self.rows / 4 + 1).min(self.rows_max);
        }
    }

    /// Takes in a step that ended in a lock or statement time-out.
    pub fn timed_out(&mut self) {
        self.rows = (self.rows / 2).max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLD: Duration = Duration::from_millis(50);
    const FAST: Duration = Duration::from_millis(1);

    #[test]
    fn it_halves_after_a_time_out_and_grows_back() {
        let mut batch = Batch::new(1000, HOLD);
        for expected in [500, 250, 125, 62, 31, 15, 7, 3, 1, 1] {
            batch.timed_out();
            assert_eq!(batch.rows(), expected);
        }
        let mut grown = Vec::new();
        while batch.rows() < 1000 {
            batch.took(u64::try_from(batch.rows()).expect("positive"), FAST);
            grown.push(batch.rows());
        }
        assert_eq!(grown[..6], [2, 3, 4, 6, 8, 11]);
        assert_eq!(grown.last(), Some(&1000), "and no further");
    }

    #[test]
    fn it_is_cut_to_what_fits_into_the_hold() {
        let mut batch = Batch::new(1000, HOLD);
        batch.took(1000, 4 * HOLD);
        assert_eq!(batch.rows(), 250);
        batch.took(250, HOLD);
        assert_eq!(batch.rows(), 313, "at the limit is not over it");
        batch.took(313, 1000 * HOLD);
        assert_eq!(batch.rows(), 1);
    }

    #[test]
    fn a_step_that_had_little_to_do_changes_nothing() {
        let mut batch = Batch::new(1000, HOLD);
        batch.timed_out();
        batch.took(3, FAST);
        batch.took(3, 10 * HOLD);
        batch.took(49, 10 * HOLD);
        assert_eq!(batch.rows(), 500);
    }

    #[test]
    fn a_long_step_of_many_rows_counts_though_it_was_not_full() {
        let mut batch = Batch::new(1000, HOLD);
        batch.took(400, HOLD);
        assert_eq!(batch.rows(), 1000, "no longer than allowed");
        batch.took(400, 2 * HOLD);
        assert_eq!(batch.rows(), 200);
        batch.took(150, 10 * HOLD);
        assert_eq!(batch.rows(), 15);
    }

    #[test]
    fn the_largest_batch_does_not_overflow() {
        let mut batch = Batch::new(i32::MAX, HOLD);
        batch.took(i32::MAX as u64, FAST);
        assert_eq!(batch.rows(), i32::MAX);
    }
}
