//! How many files the process may have open, and so how many connections.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tracing::{debug, info};

/// For the log, the listener, the leader's session, notices and whatever a library opens.
const OTHER_FILES: usize = 64;

/// As many connections as `wanted`, or as there is room for beside `pool` connections to the database. Takes all files
/// that the process may take without asking an administrator.
pub(super) fn room_for(wanted: usize, pool: usize) -> usize {
    let (soft, hard) = match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok(limits) => limits,
        Err(error) => {
            debug!(target: "serve", %error, "the limit of open files cannot be read");
            return wanted;
        }
    };
    let files = if soft < hard && setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() { hard } else { soft };
    let room = connections(usize::try_from(files).unwrap_or(usize::MAX), pool);
    if room < wanted {
        info!(target: "serve", wanted, connections = room, files, "connections capped by the files that may be open");
    }
    wanted.min(room)
}

fn connections(files: usize, pool: usize) -> usize {
    files.saturating_sub(pool + OTHER_FILES).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_room_for_the_database() {
        assert_eq!(connections(1024, 160), 800);
        assert_eq!(connections(100, 160), 1, "a server with no connection would be none");
    }

    #[test]
    fn there_is_room_for_a_few() {
        assert_eq!(room_for(1, 4), 1);
    }
}
