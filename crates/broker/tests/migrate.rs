//! Installing the schema: once, twice, together, and under a newer one.

mod support;

use ebbtide::db::migrate::migrate;
use support::Database;

#[tokio::test]
async fn installing_twice_changes_nothing() {
    let database = Database::empty().await;
    let first = migrate(&database.target).await.expect("installs");
    assert!(first.tables > 0);
    let second = migrate(&database.target).await.expect("installs again");
    assert_eq!((second.tables, second.procedures), (0, 0));
}

#[tokio::test]
async fn servers_that_start_together_take_turns() {
    let database = Database::empty().await;
    let installs = (0..4).map(|_| {
        let target = database.target.clone();
        tokio::spawn(async move { migrate(&target).await })
    });
    let mut applied = 0;
    for install in installs.collect::<Vec<_>>() {
        applied += usize::from(install.await.expect("no panic").expect("installs").tables > 0);
    }
    assert_eq!(applied, 1);
}

#[tokio::test]
async fn an_older_binary_leaves_a_newer_install_alone() {
    let database = Database::empty().await;
    migrate(&database.target).await.expect("installs");
    let client = database.client().await;
    client
        .batch_execute(
            "update queen.installed_files set version = '{999,0,0}', checksum = 'newer' where name not like '0%'",
        )
        .await
        .expect("a newer release was here");
    client
        .batch_execute(
            "insert into queen.installed_files (name, checksum, version) values ('9999_newer.sql', 'x', '{999,0,0}')",
        )
        .await
        .expect("a newer release was here");
    let installed = migrate(&database.target).await.expect("finds it");
    assert!(installed.newer_present);
    assert_eq!((installed.tables, installed.procedures), (0, 0));
}

#[tokio::test]
async fn an_edited_table_file_is_refused() {
    let database = Database::empty().await;
    migrate(&database.target).await.expect("installs");
    let client = database.client().await;
    client
        .batch_execute("update queen.installed_files set checksum = 'other' where name = '0001_queues.sql'")
        .await
        .expect("updated");
    let error = migrate(&database.target).await.expect_err("refuses");
    assert!(error.to_string().contains("0001_queues.sql"), "{error}");
}
