//! Lists of statuses as SQL, and their agreement with the type.

/// The statuses of an unfinished job, for `in`. Partial indexes repeat this text.
macro_rules! live {
    () => {
        "('pending', 'running', 'waiting', 'paused', 'retrying')"
    };
}

pub(crate) use live;

#[cfg(test)]
mod tests {
    use crate::job::JobStatus;

    #[test]
    fn the_list_names_exactly_the_unfinished_statuses() {
        let names = JobStatus::ALL.into_iter().filter(|status| !status.is_terminal());
        let quoted: Vec<_> = names.map(|status| format!("'{status}'")).collect();
        assert_eq!(live!(), format!("({})", quoted.join(", ")));
    }
}
