//! The folder of the embedded cluster: which one, whose, and that one server holds it.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::unistd::{Uid, User, geteuid};
use tracing::info;
use xxhash_rust::xxh3::xxh3_64;

use super::EmbeddedError;

/// Where a cluster goes whose own folder its user cannot reach.
const FALLBACK_ROOT: &str = "/var/lib/ebbtide";
/// How long a cluster may take to stop that a killed server left behind.
const STOPPING_WAIT: Duration = Duration::from_secs(30);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// A Unix socket's path has 108 bytes, with the closing NUL.
const SOCKET_PATH_BYTES_MAX: usize = 107;
pub(super) const SOCKET_PORT: u16 = 5432;

/// A folder that this process alone holds, as long as the value lives.
pub(super) struct Folder {
    pub(super) path: PathBuf,
    /// `None` when this process is not root, and PostgreSQL runs as the same user.
    pub(super) user: Option<User>,
    _lock: File,
}

impl Folder {
    /// Chooses the folder for `wanted`, creates and locks it, and waits until no PostgreSQL is left in it.
    pub(super) fn claim(wanted: &Path) -> Result<Self, EmbeddedError> {
        let wanted = std::path::absolute(wanted).map_err(|error| EmbeddedError::io("resolve", wanted, error))?;
        let (path, user) = choose(&wanted)?;
        make_dirs(&path)?;
        let lock = lock(&path)?;
        let folder = Folder { path, user, _lock: lock };
        folder.check_owner()?;
        folder.wait_until_free()?;
        Ok(folder)
    }

    pub(super) fn cluster(&self) -> PathBuf {
        self.path.join("pgdata")
    }

    pub(super) fn log(&self) -> PathBuf {
        self.path.join("postgres.log")
    }

    /// The major version of the cluster, if there is one.
    pub(super) fn cluster_major(&self) -> Result<Option<u32>, EmbeddedError> {
        let path = self.cluster().join("PG_VERSION");
        match std::fs::read_to_string(&path) {
            Ok(text) => match text.trim().parse() {
                Ok(major) => Ok(Some(major)),
                Err(_) => Err(EmbeddedError::NotACluster(self.cluster())),
            },
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                if self.cluster().exists() {
                    Err(EmbeddedError::NotACluster(self.cluster()))
                } else {
                    Ok(None)
                }
            }
            Err(error) => Err(EmbeddedError::io("read", &path, error)),
        }
    }

    /// Makes a folder that only PostgreSQL's user may enter.
    pub(super) fn make_private(&self, path: &Path) -> Result<(), EmbeddedError> {
        let made = DirBuilder::new().mode(0o700).create(path);
        match made {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                let found = path.symlink_metadata().map_err(|error| EmbeddedError::io("look at", path, error))?;
                let ours = found.is_dir() && (found.uid() == self.uid() || found.uid() == geteuid().as_raw());
                if !ours {
                    return Err(EmbeddedError::Foreign(path.to_owned()));
                }
                let private = std::fs::Permissions::from_mode(0o700);
                std::fs::set_permissions(path, private).map_err(|error| EmbeddedError::io("protect", path, error))?;
            }
            Err(error) => return Err(EmbeddedError::io("create", path, error)),
        }
        if let Some(user) = &self.user {
            let owner = (Some(user.uid.as_raw()), Some(user.gid.as_raw()));
            chown(path, owner.0, owner.1).map_err(|error| EmbeddedError::io("give away", path, error))?;
        }
        Ok(())
    }

    /// The folder of the socket: inside this one, unless its name is too long for a socket.
    pub(super) fn socket_dir(&self) -> Result<PathBuf, EmbeddedError> {
        let inside = self.path.join("run");
        let longest = inside.as_os_str().len() + format!("/.s.PGSQL.{SOCKET_PORT}.lock").len();
        let path = if longest <= SOCKET_PATH_BYTES_MAX {
            inside
        } else {
            let hash = xxh3_64(self.path.as_os_str().as_encoded_bytes());
            std::env::temp_dir().join(format!("ebbtide-{}-{hash:016x}", geteuid()))
        };
        self.make_private(&path)?;
        Ok(path)
    }

    /// Waits until no process works in the cluster's folder, and clears the pid file of one that was killed.
    ///
    /// The pid in that file proves nothing: after a restart of the machine or of a container another process
    /// may have it, and PostgreSQL would refuse to start.
    pub(super) fn wait_until_free(&self) -> Result<(), EmbeddedError> {
        let Ok(cluster) = self.cluster().canonicalize() else { return Ok(()) };
        let started = Instant::now();
        let mut said = false;
        while let Some(pid) = process_in(&cluster) {
            if STOPPING_WAIT <= started.elapsed() {
                return Err(EmbeddedError::StillRunning { folder: self.path.clone(), pid });
            }
            if !said {
                info!(target: "embedded", pid, "waiting for a PostgreSQL that is still stopping");
                said = true;
            }
            std::thread::park_timeout(LOOK_INTERVAL);
        }
        let pid_file = cluster.join("postmaster.pid");
        match std::fs::remove_file(&pid_file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(EmbeddedError::io("remove", &pid_file, error))
            }
            _ => Ok(()),
        }
    }

    fn uid(&self) -> u32 {
        self.user.as_ref().map_or_else(|| geteuid().as_raw(), |user| user.uid.as_raw())
    }

    fn check_owner(&self) -> Result<(), EmbeddedError> {
        match self.cluster().metadata() {
            Ok(found) if found.uid() != self.uid() => Err(EmbeddedError::Foreign(self.cluster())),
            _ => Ok(()),
        }
    }
}

/// `setpriv` gives the child its user, and has the kernel signal it when this process dies, however it dies.
/// The kernel watches the thread that spawned the child, so that thread has to live as long.
pub(super) fn command(user: Option<&User>, program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.env_clear().env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").env("LC_ALL", "C").current_dir("/");
    command.arg("--pdeathsig=INT");
    if let Some(user) = user {
        command.arg(format!("--reuid={}", user.uid)).arg(format!("--regid={}", user.gid)).arg("--init-groups");
    }
    command.arg("--").arg(program).stdin(Stdio::null());
    command
}

fn choose(wanted: &Path) -> Result<(PathBuf, Option<User>), EmbeddedError> {
    if !geteuid().is_root() {
        return Ok((wanted.to_owned(), None));
    }
    let fallback = Path::new(FALLBACK_ROOT).join(fallback_name(wanted));
    let user = user_of(wanted)?;
    let reachable = can_enter(&user, wanted)?;
    if has_cluster(wanted) {
        // An empty database somewhere else would look like lost data.
        return if reachable { Ok((wanted.to_owned(), Some(user))) } else { Err(unreachable(wanted, &user)) };
    }
    if reachable && !has_cluster(&fallback) {
        return Ok((wanted.to_owned(), Some(user)));
    }
    let user = user_of(&fallback)?;
    if !can_enter(&user, &fallback)? {
        return Err(unreachable(&fallback, &user));
    }
    let (wanted, folder) = (wanted.display(), fallback.display());
    if reachable {
        info!(target: "embedded", %wanted, %folder, "using the folder that holds this path's database");
    } else {
        info!(target: "embedded", %wanted, %folder, user = user.name, "the database's user cannot reach the data folder; using another");
    }
    Ok((fallback, Some(user)))
}

fn unreachable(folder: &Path, user: &User) -> EmbeddedError {
    EmbeddedError::Unreachable { folder: folder.to_owned(), user: user.name.clone() }
}

fn has_cluster(folder: &Path) -> bool {
    folder.join("pgdata/PG_VERSION").exists()
}

/// The owner of the cluster if there is one, else the first unprivileged user that exists.
fn user_of(folder: &Path) -> Result<User, EmbeddedError> {
    let lookup = |error: nix::errno::Errno| EmbeddedError::io("look up the users of", folder, error.into());
    if let Ok(found) = folder.join("pgdata").metadata() {
        let uid = Uid::from_raw(found.uid());
        let owner = User::from_uid(uid).map_err(lookup)?.filter(|_| !uid.is_root());
        return owner.ok_or_else(|| EmbeddedError::Foreign(folder.join("pgdata")));
    }
    for name in ["postgres", "nobody"] {
        if let Some(user) = User::from_name(name).map_err(lookup)? {
            return Ok(user);
        }
    }
    Err(EmbeddedError::NoUser)
}

/// Asked of the system itself, which knows access lists and mounts too. What does not exist yet will be created
/// with a mode that lets everybody through.
fn can_enter(user: &User, folder: &Path) -> Result<bool, EmbeddedError> {
    let existing = folder.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let mut command = command(Some(user), Path::new("/bin/sh"));
    command.args(["-c", "cd \"$1\"", "sh"]).arg(existing).stdout(Stdio::null()).stderr(Stdio::null());
    let status = command.status().map_err(|error| EmbeddedError::io("run setpriv for", folder, error))?;
    Ok(status.success())
}

/// Readable for a person, and with the hash different for every path.
fn fallback_name(path: &Path) -> String {
    let text = path.to_string_lossy();
    let words: Vec<&str> = text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect();
    let readable: String = words.join("-").chars().take(48).collect();
    format!("{readable}-{:08x}", xxh3_64(path.as_os_str().as_encoded_bytes()) as u32)
}

fn make_dirs(path: &Path) -> Result<(), EmbeddedError> {
    let missing: Vec<&Path> = path.ancestors().take_while(|path| !path.exists()).collect();
    for folder in missing.into_iter().rev() {
        std::fs::create_dir(folder).map_err(|error| EmbeddedError::io("create", folder, error))?;
        let open = std::fs::Permissions::from_mode(0o755); // whatever the umask says
        std::fs::set_permissions(folder, open).map_err(|error| EmbeddedError::io("open", folder, error))?;
    }
    Ok(())
}

fn lock(folder: &Path) -> Result<File, EmbeddedError> {
    let path = folder.join("ebbtide.lock");
    let io = |error| EmbeddedError::io("lock", &path, error);
    let mut file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path).map_err(io)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            let _ = file.take(32).read_to_string(&mut holder); // only for the message
            return Err(EmbeddedError::InUse { folder: folder.to_owned(), holder: holder.trim().to_owned() });
        }
        Err(TryLockError::Error(error)) => return Err(io(error)),
    }
    file.set_len(0).and_then(|()| file.rewind()).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(io)?;
    Ok(file)
}

/// A process whose working folder is `cluster`, as it is for every PostgreSQL process of that cluster.
fn process_in(cluster: &Path) -> Option<u32> {
    let processes = std::fs::read_dir("/proc").ok()?;
    processes.flatten().find_map(|process| {
        let pid: u32 = process.file_name().to_str()?.parse().ok()?;
        let cwd = std::fs::read_link(process.path().join("cwd")).ok()?;
        (cwd == cluster).then_some(pid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_has_a_fallback_of_its_own() {
        let a = fallback_name(Path::new("/root/a b/ebbtide-data"));
        let b = fallback_name(Path::new("/root/a-b/ebbtide-data"));
        assert!(a.starts_with("root-a-b-ebbtide-data-") && b.starts_with("root-a-b-ebbtide-data-"));
        assert_ne!(a, b);
    }

    #[test]
    fn a_second_lock_names_the_holder() {
        let folder = tempfile::tempdir().unwrap();
        let _held = lock(folder.path()).unwrap();
        let error = lock(folder.path()).unwrap_err().to_string();
        assert!(error.contains(&std::process::id().to_string()), "{error}");
    }

    #[test]
    fn the_process_that_works_in_a_folder_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().canonicalize().unwrap();
        assert_eq!(process_in(&path), None);
        let mut child = Command::new("cat").stdin(Stdio::piped()).current_dir(&path).spawn().unwrap();
        assert_eq!(process_in(&path), Some(child.id()));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(process_in(&path), None);
    }
}
