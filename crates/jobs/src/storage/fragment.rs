//! Pieces of SQL that both dialects share: lists of statuses, and what protects a finished job from retention.

/// The statuses from which a job goes nowhere by itself, for `in`.
macro_rules! terminal {
    () => {
        "('completed', 'failed', 'cancelled')"
    };
}

/// The statuses of an unfinished job, for `in`. Partial indexes repeat this text.
macro_rules! live {
    () => {
        "('pending', 'running', 'waiting', 'paused', 'retrying')"
    };
}

// Each protection is a probe with a limit of one row on an indexed column: neither planner turns it into a join that
// reads all live jobs. `$schema` stands before a table's name;
// `$jobs`, `$children` and `$descendants` are the jobs table as `c`, with the index to use where a dialect needs to be
// told.

/// An unfinished job has it as its parent.
macro_rules! live_child {
    ($jobs:literal) => {
        concat!(
            "(select 1 from ",
            $jobs,
            " where c.parent_job_id = j.id and c.status in ",
            $crate::storage::fragment::live!(),
            " limit 1) is not null"
        )
    };
}

/// An unfinished job further down has it as the root of its workflow.
macro_rules! live_descendant {
    ($jobs:literal) => {
        concat!(
            "(select 1 from ",
            $jobs,
            " where c.root_job_id = j.id and c.status in ",
            $crate::storage::fragment::live!(),
            " limit 1) is not null"
        )
    };
}

/// A fan-out of its own is not decided.
macro_rules! pending_fan_out {
    ($schema:literal) => {
        concat!(
            "(select 1 from ",
            $schema,
            "fan_outs f where f.parent_job_id = j.id and f.status = 'pending' limit 1) is not null"
        )
    };
}

/// It is a child whose result an unfinished parent has yet to collect. The fan-out says nothing of that: it is
/// decided with its last child, and the parent may wake days later.
macro_rules! uncollected {
    ($schema:literal) => {
        concat!(
            "(j.fan_out_id is not null and (select 1 from ",
            $schema,
            "jobs p where p.id = j.parent_job_id and p.status in ",
            $crate::storage::fragment::live!(),
            " limit 1) is not null)"
        )
    };
}

/// A deduplication window that has not passed names it. Asked by job, latest first: were the time a condition, a planner
/// that believes all windows to have passed would look for the job among those that have not.
macro_rules! live_window {
    ($schema:literal, $now:literal) => {
        concat!(
            "coalesce((select l.expires_at from ",
            $schema,
            "unique_locks l where l.job_id = j.id order by l.expires_at desc limit 1) > ",
            $now,
            ", false)"
        )
    };
}

/// Whether a finished job `j` must stay.
macro_rules! protected {
    ($schema:literal, $now:literal, $children:literal, $descendants:literal) => {
        concat!(
            "(",
            $crate::storage::fragment::uncollected!($schema),
            " or ",
            $crate::storage::fragment::live_window!($schema, $now),
            " or ",
            $crate::storage::fragment::live_child!($children),
            " or ",
            $crate::storage::fragment::live_descendant!($descendants),
            " or ",
            $crate::storage::fragment::pending_fan_out!($schema),
            ")"
        )
    };
}

/// Whether a job `j` is finished in one way and for long enough. The first two conditions are those of the index,
/// word for word: without them SQLite could not use it.
macro_rules! old_enough {
    ($status:literal, $cutoff:literal) => {
        concat!(
            "j.status in ",
            $crate::storage::fragment::terminal!(),
            " and j.completed_at is not null and j.status = ",
            $status,
            " and j.completed_at < ",
            $cutoff
        )
    };
}

/// Whether a job `j` can be deleted by itself: it has no children, waits for none, and no parent waits for it.
macro_rules! deletable {
    ($schema:literal) => {
        concat!(
            "(select 1 from ",
            $schema,
            "jobs c where c.parent_job_id = j.id limit 1) is null and (j.parent_job_id is null or (select 1 from ",
            $schema,
            "jobs p where p.id = j.parent_job_id and p.status in ",
            $crate::storage::fragment::live!(),
            " limit 1) is null) and not (",
            $crate::storage::fragment::pending_fan_out!($schema),
            ")"
        )
    };
}

/// The status of a pending fan-out `f` that has these counts. A share of the children is compared with a little slack,
/// so that 0.07 of 100 children are 7 of them.
macro_rules! decided {
    ($completed:literal, $lost:literal) => {
        concat!(
            "case when f.strategy = 'fail_fast' and 0 < ",
            $lost,
            " then 'failed' when f.strategy = 'threshold' and f.total_count - (",
            $lost,
            ") < f.total_count * f.threshold - 1e-6 then 'failed' when f.total_count <= ",
            $completed,
            " + ",
            $lost,
            " then 'completed' else 'pending' end"
        )
    };
}

/// What wakes a waiting job `p`. It is not a new attempt.
macro_rules! woken {
    ($now:literal, $attempt:literal) => {
        concat!(
            "status = 'pending', attempt = ",
            $attempt,
            ", run_at = null, waiting_signal_name = '', updated_at = ",
            $now
        )
    };
}

pub(crate) use {
    decided, deletable, live, live_child, live_descendant, live_window, old_enough, pending_fan_out, protected,
    terminal, uncollected, woken,
};

#[cfg(test)]
mod tests {
    use crate::job::JobStatus;

    #[test]
    fn lists_name_exactly_the_terminal_and_the_other_statuses() {
        let list = |is_terminal| {
            let names: Vec<_> = JobStatus::ALL
                .into_iter()
                .filter(|status| status.is_terminal() == is_terminal)
                .map(|status| format!("'{status}'"))
                .collect();
            format!("({})", names.join(", "))
        };
        assert_eq!(terminal!(), list(true));
        assert_eq!(live!(), list(false));
    }
}
