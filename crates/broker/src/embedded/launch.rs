//! How the embedded PostgreSQL is started.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;

use super::EmbeddedError;
use super::folder::{self, Folder, SOCKET_PORT};
use super::log::RotatingLog;
use super::programs::Programs;

pub(super) struct Launch {
    pub(super) folder: Arc<Folder>,
    pub(super) socket_dir: PathBuf,
    pub(super) log: RotatingLog,
    programs: Programs,
    max_connections: usize,
    wal_compression: &'static str,
}

impl Launch {
    pub(super) fn new(folder: Folder, programs: Programs, max_connections: usize) -> Result<Self, EmbeddedError> {
        let socket_dir = folder.socket_dir()?;
        let log = RotatingLog::open(&folder.log()).map_err(|error| EmbeddedError::io("open", &folder.log(), error))?;
        let mut launch =
            Self { folder: Arc::new(folder), socket_dir, log, programs, max_connections, wal_compression: "lz4" };
        if !launch.is_understood() {
            // pglz, which every PostgreSQL has, takes three quarters of a deletion's processor time and saves nothing
            // on pages of segments, which are compressed already.
            launch.wal_compression = "off";
        }
        Ok(launch)
    }

    pub(super) fn command(&self) -> Command {
        use std::os::unix::process::CommandExt;
        let mut command = self.postgres();
        // A group of its own: a Ctrl-C in the terminal is for the server, which finishes its requests first.
        command.process_group(0).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    /// Whether these programs know every value of the options. A compression method is known if it was built in.
    fn is_understood(&self) -> bool {
        let mut command = self.postgres();
        command.args(["-C", "wal_compression"]).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }

    fn postgres(&self) -> Command {
        let mut command = folder::command(self.folder.user.as_ref(), &self.programs.path("postgres"));
        command.arg("-D").arg(self.folder.cluster());
        for (name, value) in self.options() {
            command.arg("-c").arg(format!("{name}={value}"));
        }
        command
    }

    /// Reached only through the private socket, durable, and modest on a machine that it shares.
    fn options(&self) -> Vec<(&'static str, String)> {
        let fixed = [
            ("listen_addresses", ""),
            ("unix_socket_permissions", "0700"),
            ("fsync", "on"),
            ("full_page_writes", "on"),
            ("synchronous_commit", "on"),
            ("shared_buffers", "256MB"),
            ("max_wal_size", "2GB"),
            ("wal_compression", self.wal_compression),
            ("autovacuum", "on"),
            ("jit", "off"),
            ("timezone", "UTC"),
            ("log_timezone", "UTC"),
            ("log_destination", "stderr"),
            ("logging_collector", "off"),
            ("cluster_name", "ebbtide"),
        ];
        let mut options: Vec<_> = fixed.map(|(name, value)| (name, value.to_owned())).into();
        // A list setting: quoted, or a comma in the path would split it.
        let socket_dir = self.socket_dir.display().to_string().replace('"', "\"\"");
        options.push(("unix_socket_directories", format!("\"{socket_dir}\"")));
        options.push(("port", SOCKET_PORT.to_string()));
        options.push(("max_connections", self.max_connections.to_string()));
        options
    }
}
