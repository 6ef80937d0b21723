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

/// The indexes of `log_partitions`, and whether each is complete.
async fn indexes(client: &tokio_postgres::Client) -> Vec<(String, bool)> {
    let query = "select c.relname, i.indisvalid from pg_index i join pg_class c on c.oid = i.indexrelid
        where i.indrelid = 'queen.log_partitions'::regclass order by 1";
    client.query(query, &[]).await.expect("indexes").iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[tokio::test]
async fn a_database_without_stamps_is_upgraded_with_all_it_holds() {
    let database = Database::empty().await;
    migrate(&database.target).await.expect("installs");
    let client = database.client().await;
    let complete = indexes(&client).await;
    client
        .batch_execute(
            "delete from queen.installed_files where name = '0009_due.sql';
             drop table queen.due_events;
             drop trigger note_stamp_missing on queen.log_partitions;
             drop trigger note_stamps_unknown on queen.log_partitions;
             alter table queen.log_partitions drop column oldest_live_at, drop column oldest_txn_at,
                 drop column held_next, drop column held_since, drop column recheck_at;
             insert into queen.queues (name, retention_enabled, retention_seconds) values ('q', true, 100);
             insert into queen.log_partitions (queue_id, name, last_offset) select id, 'p', 0 from queen.queues;
             insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
             select id, 0, 0, now() - interval '1 day', 'x' from queen.log_partitions",
        )
        .await
        .expect("as an older release left it");
    assert!(indexes(&client).await.len() < complete.len());
    assert_eq!(migrate(&database.target).await.expect("upgrades").tables, 1);
    assert_eq!(indexes(&client).await, complete);
    let unknown =
        "select count(*) from queen.log_partitions where oldest_live_at = '-infinity' and oldest_txn_at = '-infinity'";
    assert_eq!(
        client.query_one(unknown, &[]).await.expect("count").get::<_, i64>(0),
        1,
        "due until somebody has looked"
    );
}

#[tokio::test]
async fn an_index_that_was_left_half_built_is_built_again() {
    let database = Database::empty().await;
    migrate(&database.target).await.expect("installs");
    let client = database.client().await;
    let complete = indexes(&client).await;
    assert!(complete.iter().all(|(_, is_valid)| *is_valid));
    client
        .batch_execute(
            "update pg_index set indisvalid = false where indexrelid = 'queen.log_partitions_live_idx'::regclass;
             drop index queen.log_partitions_txn_idx",
        )
        .await
        .expect("a superuser may");
    migrate(&database.target).await.expect("installs");
    assert_eq!(indexes(&client).await, complete);
}

#[tokio::test]
async fn a_server_that_starts_meanwhile_leaves_the_indexes_to_the_first() {
    let database = Database::empty().await;
    migrate(&database.target).await.expect("installs");
    let client = database.client().await;
    client.batch_execute("drop index queen.log_partitions_txn_idx").await.expect("dropped");
    client.batch_execute("select pg_advisory_lock(778120011)").await.expect("another server builds");
    migrate(&database.target).await.expect("does not wait");
    assert!(indexes(&client).await.iter().all(|(name, _)| name != "log_partitions_txn_idx"));
}
