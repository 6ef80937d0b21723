//! The private PostgreSQL of `ebbtide serve`, seen from outside: a real server process and what it leaves behind.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::fs::Permissions;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Output;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, User, geteuid};
use support::server::{Server, ebbtide, open_folder};
use tokio_postgres::Client;

fn refused(data_dir: &Path) -> String {
    let Output { status, stdout, stderr } = ebbtide(data_dir, "serve").output().unwrap();
    assert_eq!(status.code(), Some(1));
    assert_eq!(String::from_utf8(stdout).unwrap(), "", "no ready line");
    String::from_utf8(stderr).unwrap()
}

async fn count(client: &Client) -> i64 {
    client.query_one("select count(*) from kept", &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn a_restart_keeps_the_data_and_a_second_server_is_refused() {
    let folder = open_folder();
    let data_dir = folder.path().join("deep/er/data");
    let first = Server::start(&data_dir);
    assert!(first.ready.contains("ready: http://127.0.0.1:"), "{}", first.ready);
    let sql = first.sql().await;
    sql.batch_execute("create table kept as select 1").await.unwrap();
    for (setting, expected) in [("fsync", "on"), ("listen_addresses", ""), ("data_checksums", "on")] {
        let value: String = sql.query_one("select current_setting($1)", &[&setting]).await.unwrap().get(0);
        assert_eq!(value, expected, "{setting}");
    }

    let refusal = refused(&data_dir);
    let holder = format!("in use by another server (process {})", first.child.id());
    assert!(refusal.contains(&holder), "{refusal}");
    assert_eq!(count(&sql).await, 1, "the first server is unharmed");

    let postgres = first.postgres_pid();
    let log = first.stop();
    assert!(!log.contains("ERROR") && !log.contains("WARN"), "{log}");
    assert!(!Path::new(&format!("/proc/{postgres}/cwd")).exists(), "PostgreSQL ended before the server");
    let second = Server::start(&data_dir);
    assert_eq!(count(&second.sql().await).await, 1);
    second.stop();
}

#[tokio::test]
async fn a_killed_server_leaves_no_postgres_and_loses_nothing() {
    let folder = open_folder();
    let server = Server::start(folder.path());
    server.sql().await.batch_execute("create table kept as select 1").await.unwrap();
    server.kill();
    // The next one starts at once, while the old PostgreSQL may still be stopping.
    let server = Server::start(folder.path());
    let sql = server.sql().await;
    assert_eq!(count(&sql).await, 1);
    server.stop();
    let log = std::fs::read_to_string(folder.path().join("postgres.log")).unwrap();
    assert!(!log.contains("not properly shut down"), "the first PostgreSQL had stopped cleanly: {log}");
}

#[tokio::test]
async fn a_postgres_that_dies_is_started_again_then_given_up() {
    let folder = open_folder();
    let mut server = Server::start(folder.path());
    server.sql().await.batch_execute("create table kept as select 1").await.unwrap();
    let mut log = BufReader::new(server.child.stderr.take().unwrap()).lines();
    let mut wait_for = |text: &str| {
        let found = log.by_ref().map_while(Result::ok).find(|line| line.contains(text));
        assert!(found.is_some(), "the log ended without {text:?}");
    };
    let first = server.postgres_pid();
    kill(Pid::from_raw(first), Signal::SIGKILL).unwrap();
    wait_for("starting it again");
    wait_for("PostgreSQL is ready");
    assert_ne!(server.postgres_pid(), first);
    assert_eq!(count(&server.sql().await).await, 1);
    for _ in 0..2 {
        kill(Pid::from_raw(server.postgres_pid()), Signal::SIGKILL).unwrap();
        wait_for("starting it again");
        wait_for("PostgreSQL is ready");
    }
    kill(Pid::from_raw(server.postgres_pid()), Signal::SIGKILL).unwrap();
    wait_for("the embedded database failed");
    assert_eq!(server.child.wait().unwrap().code(), Some(1));
}

#[test]
fn a_folder_of_another_version_is_refused() {
    let folder = open_folder();
    Server::start(folder.path()).stop();
    let version = folder.path().join("pgdata/PG_VERSION");
    std::fs::write(&version, "9\n").unwrap();
    let refusal = refused(folder.path());
    assert!(refusal.contains("PostgreSQL 9") && refusal.contains("postgresql-9"), "{refusal}");
    std::fs::remove_file(&version).unwrap();
    let refusal = refused(folder.path());
    assert!(refusal.contains("holds no PostgreSQL cluster"), "{refusal}");
}

#[test]
fn missing_programs_are_named() {
    let folder = open_folder();
    let output = ebbtide(folder.path(), "serve").arg("--postgres-bin-dir=/nowhere").output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && log.contains("apt-get install postgresql"), "{log}");
}

#[tokio::test]
async fn the_log_is_compressed_fast_or_not_at_all() {
    let compression = async |server: &Server| -> String {
        server.sql().await.query_one("show wal_compression", &[]).await.unwrap().get(0)
    };
    let folder = open_folder();
    let data_dir = folder.path().join("data");
    let server = Server::start(&data_dir);
    let postgres = std::fs::read_link(format!("/proc/{}/exe", server.postgres_pid())).unwrap();
    let first = compression(&server).await;
    assert!(["lz4", "off"].contains(&first.as_str()), "{first}");
    server.stop();

    // A PostgreSQL that was built without lz4.
    let programs = folder.path().join("bin");
    std::fs::create_dir(&programs).unwrap();
    std::os::unix::fs::symlink(postgres.with_file_name("initdb"), programs.join("initdb")).unwrap();
    let wrapper = programs.join("postgres");
    let refusing = format!(
        "#!/bin/sh\ncase \"$*\" in *wal_compression=lz4*) exit 1 ;; esac\nexec {} \"$@\"\n",
        postgres.display()
    );
    std::fs::write(&wrapper, refusing).unwrap();
    std::fs::set_permissions(&wrapper, Permissions::from_mode(0o755)).unwrap();
    let server = Server::with(&data_dir, &[("EBBTIDE_POSTGRES_BIN_DIR", programs.to_str().unwrap())]);
    assert_eq!(compression(&server).await, "off");
    server.stop();
}

#[tokio::test]
async fn a_long_path_keeps_its_socket_elsewhere() {
    let folder = open_folder();
    let data_dir = folder.path().join("x".repeat(120));
    let server = Server::start(&data_dir);
    assert!(!data_dir.join("run").exists() && server.postgres_pid() != 0);
    server.stop();
}

#[test]
fn migrate_installs_once() {
    let folder = open_folder();
    for expected in ["files applied", "already up to date"] {
        let output = ebbtide(folder.path(), "migrate").output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && said.contains(expected), "{said}");
    }
}

#[test]
fn postgres_runs_unprivileged_even_for_root() {
    let folder = open_folder();
    let server = Server::start(folder.path());
    let process = std::fs::metadata(format!("/proc/{}", server.postgres_pid())).unwrap();
    assert_ne!(process.uid(), 0);
    let private = std::fs::metadata(folder.path().join("run")).unwrap();
    assert_eq!((private.uid(), private.mode() & 0o777), (process.uid(), 0o700));
    server.stop();
}

/// Root's server in a folder that PostgreSQL's user cannot reach. Without root there is no other user, and the
/// same folder just works.
#[test]
fn an_unreachable_parent_moves_the_database() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o700)).unwrap();
    let data_dir = folder.path().join("data");
    let server = Server::start(&data_dir);
    let used = server.folder.clone();
    if !geteuid().is_root() {
        assert_eq!(used, data_dir);
        server.stop();
        return;
    }
    assert!(used.starts_with("/var/lib/ebbtide") && !data_dir.exists(), "{}", used.display());
    assert_ne!(used.join("pgdata").metadata().unwrap().uid(), 0);
    let log = server.stop();
    assert!(log.contains("cannot reach the data folder"), "{log}");

    // Reachable or not: the database that the path has is the one it keeps.
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    let server = Server::start(&data_dir);
    assert_eq!(server.folder, used);
    server.stop();
    std::fs::remove_dir_all(&used).unwrap();

    // A database that is there and cannot be reached is an error, not an empty database elsewhere.
    Server::start(&data_dir).stop();
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o700)).unwrap();
    let owner = User::from_uid(data_dir.join("pgdata").metadata().unwrap().uid().into()).unwrap().unwrap();
    let refusal = refused(&data_dir);
    assert!(refusal.contains(&format!("user {} cannot reach", owner.name)), "{refusal}");
}
