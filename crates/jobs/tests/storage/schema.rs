//! Installing the schema, and its agreement with the types.

use ebbtide_jobs::{Error, JobStatus};

use crate::support::{Raw, Store};

async fn migrating_twice_changes_nothing(t: Store) {
    let again = t.storage.migrate().await.unwrap();
    assert_eq!((again.applied, again.version), (0, 5));
    assert_eq!(t.number("select count(*) from @schema_migrations").await, 5);
}

async fn a_newer_schema_is_refused(t: Store) {
    t.exec("insert into @schema_migrations (version, name, checksum) values (99, 'later', 'x')").await;
    let refused = t.storage.migrate().await;
    assert!(matches!(refused, Err(Error::SchemaTooNew { found: 99, known: 5 })), "{refused:?}");
}

async fn an_edited_migration_is_refused(t: Store) {
    t.exec("update @schema_migrations set checksum = 'x' where version = 1").await;
    let refused = t.storage.migrate().await;
    assert!(matches!(&refused, Err(Error::SchemaEdited(name)) if name == "0001_jobs.sql"), "{refused:?}");
}

async fn the_status_check_names_exactly_the_statuses_of_the_type(t: Store) {
    for status in JobStatus::ALL {
        t.exec(&format!("insert into @jobs (type, status) values ('t', '{status}')")).await;
    }
    for status in ["", "Pending", "done", "queued"] {
        let refused = t.try_exec(&format!("insert into @jobs (type, status) values ('t', '{status}')")).await;
        assert!(refused.is_err(), "{status:?} was accepted");
    }
    let definition = match t.raw {
        Raw::Postgres { .. } => "select pg_get_constraintdef(oid) from pg_constraint where conname = 'jobs_status'",
        Raw::Sqlite { .. } => {
            "select substr(sql, instr(sql, 'jobs_status'), instr(sql, 'previous_status ') - instr(sql, 'jobs_status'))
               from sqlite_master where name = 'jobs'"
        }
    };
    let definition = t.text(definition).await.unwrap();
    let quoted: Vec<&str> = definition.split('\'').skip(1).step_by(2).collect();
    assert_eq!(quoted, JobStatus::ALL.map(JobStatus::as_str));
}

async fn a_row_of_plain_sql_is_a_job(t: Store) {
    let args = if matches!(t.raw, Raw::Postgres { .. }) { r#"'{"a": 1}'"# } else { r#"cast('{"a": 1}' as blob)"# };
    t.exec(&format!("insert into @jobs (type, args, queue) values ('mail', {args}, 'slow')")).await;
    let id = *t.jobs().await.first().unwrap();
    let job = t.storage.job(id).await.unwrap().unwrap();
    assert_eq!((job.job_type.as_str(), job.queue.as_str(), job.args.as_slice()), ("mail", "slow", &br#"{"a": 1}"#[..]));
    assert_eq!((job.status, job.max_retries, job.attempt), (JobStatus::Pending, 3, 0));
}

async fn a_job_that_another_program_wrote_oddly_holds_up_nobody(t: Store) {
    t.exec(r#"insert into @jobs (type, metadata, max_retries, timeout) values ('odd', '{"a": 1, "b": "x"}', -1, -5)"#)
        .await;
    t.exec("insert into @jobs (type, metadata, queue) values ('1 odd name', '[]', 'default')").await;
    let claimed = t.claim("w", 10).await;
    assert_eq!(claimed.len(), 2);
    let odd = claimed.iter().find(|job| job.job_type.as_str() == "odd").unwrap();
    assert_eq!((odd.metadata["a"].as_str(), odd.metadata["b"].as_str()), ("1", "x"));
    assert_eq!((odd.max_retries, odd.timeout), (0, None));
}

cases!(
    migrating_twice_changes_nothing,
    a_newer_schema_is_refused,
    an_edited_migration_is_refused,
    the_status_check_names_exactly_the_statuses_of_the_type,
    a_row_of_plain_sql_is_a_job,
    a_job_that_another_program_wrote_oddly_holds_up_nobody,
);
