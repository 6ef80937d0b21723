//! A storage with a database of its own, and raw SQL beside it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ebbtide_jobs::{
    Claim, ClaimRequest, EnqueueOptions, Job, JobId, NewJob, PostgresStorage, QueueName, QueueShare, SqliteStorage,
    Storage, WorkerId,
};
use tempfile::TempDir;
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};
use uuid::Uuid;

pub const SECOND: Duration = Duration::from_secs(1);
pub const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Past this, a test that waits for a fact gives up and says which.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Runs each case on PostgreSQL and on SQLite. There is no way to leave one out.
macro_rules! cases {
    ($($case:ident),* $(,)?) => {
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() { super::$case(crate::support::Store::postgres().await).await })*
        }
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() { super::$case(crate::support::Store::sqlite().await).await })*
        }
    };
}

/// A storage under test.
pub struct Store {
    pub storage: Arc<dyn Storage>,
    pub raw: Raw,
}

/// SQL past the storage, for fixtures and for looking at what is there.
pub enum Raw {
    Postgres { client: Client, url: String, _database: Database },
    Sqlite { db: Mutex<rusqlite::Connection>, path: std::path::PathBuf, _dir: TempDir },
}

impl Store {
    pub async fn postgres() -> Self {
        let database = Database::create().await;
        let url = database.url.clone();
        let client = connect(&url).await;
        let storage = PostgresStorage::connect(&url, 8).expect("the URL is one");
        Self { storage: Arc::new(storage), raw: Raw::Postgres { client, url, _database: database } }
    }

    pub async fn sqlite() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("jobs.db");
        let storage = SqliteStorage::open(&path).expect("the file opens");
        storage.migrate().await.expect("the schema installs");
        let db = rusqlite::Connection::open(&path).expect("the file opens");
        db.busy_timeout(PATIENCE).expect("set");
        Self { storage: Arc::new(storage), raw: Raw::Sqlite { db: Mutex::new(db), path, _dir: dir } }
    }

    /// Another storage on the same database, with connections of its own.
    pub fn another(&self) -> Arc<dyn Storage> {
        match &self.raw {
            Raw::Postgres { url, .. } => Arc::new(PostgresStorage::connect(url, 8).expect("the URL is one")),
            Raw::Sqlite { path, .. } => Arc::new(SqliteStorage::open(path).expect("the file opens")),
        }
    }

    /// Text of SQL in which `@jobs` names a table.
    fn dialect(&self, sql: &str) -> String {
        sql.replace('@', if matches!(self.raw, Raw::Postgres { .. }) { "ebbtide_jobs." } else { "" })
    }

    pub async fn try_exec(&self, sql: &str) -> Result<(), String> {
        let sql = self.dialect(sql);
        match &self.raw {
            Raw::Postgres { client, .. } => client.batch_execute(&sql).await.map_err(|error| format!("{error:?}")),
            Raw::Sqlite { db, .. } => {
                db.lock().expect("not poisoned").execute_batch(&sql).map_err(|error| error.to_string())
            }
        }
    }

    pub async fn exec(&self, sql: &str) {
        self.try_exec(sql).await.unwrap_or_else(|error| panic!("{error} in {sql}"));
    }

    /// The first column of each row as text.
    pub async fn texts(&self, sql: &str) -> Vec<Option<String>> {
        let sql = self.dialect(sql);
        match &self.raw {
            Raw::Postgres { client, .. } => {
                let messages = client.simple_query(&sql).await.unwrap_or_else(|error| panic!("{error:?} in {sql}"));
                let rows = messages.iter().filter_map(|message| match message {
                    SimpleQueryMessage::Row(row) => Some(row.get(0).map(str::to_owned)),
                    _ => None,
                });
                rows.collect()
            }
            Raw::Sqlite { db, .. } => {
                let db = db.lock().expect("not poisoned");
                let mut query = db.prepare(&sql).unwrap_or_else(|error| panic!("{error} in {sql}"));
                let rows = query.query_map([], |row| {
                    Ok(match row.get_ref(0)? {
                        rusqlite::types::ValueRef::Null => None,
                        rusqlite::types::ValueRef::Integer(number) => Some(number.to_string()),
                        rusqlite::types::ValueRef::Real(number) => Some(number.to_string()),
                        rusqlite::types::ValueRef::Text(text) => Some(String::from_utf8_lossy(text).into_owned()),
                        rusqlite::types::ValueRef::Blob(blob) => Some(
                            Uuid::from_slice(blob)
                                .map_or_else(|_| String::from_utf8_lossy(blob).into_owned(), |id| id.to_string()),
                        ),
                    })
                });
                rows.expect("query").map(|row| row.expect("row")).collect()
            }
        }
    }

    pub async fn text(&self, sql: &str) -> Option<String> {
        self.texts(sql).await.into_iter().next().flatten()
    }

    pub async fn number(&self, sql: &str) -> i64 {
        self.text(sql).await.expect("a number").parse().expect("a number")
    }

    /// The ids that `sql` selects.
    pub async fn ids(&self, sql: &str) -> BTreeSet<JobId> {
        self.texts(sql).await.into_iter().map(|id| id.expect("an id").parse().expect("an id")).collect()
    }

    pub async fn jobs(&self) -> BTreeSet<JobId> {
        self.ids("select id from @jobs").await
    }

    /// An id as a literal.
    pub fn id(&self, id: JobId) -> String {
        match self.raw {
            Raw::Postgres { .. } => format!("'{id}'"),
            Raw::Sqlite { .. } => format!("x'{}'", id.as_uuid().simple()),
        }
    }

    /// The time that lies this far back, as an expression.
    pub fn ago(&self, age: Duration) -> String {
        self.shifted('-', age)
    }

    /// The time that lies this far ahead, as an expression.
    pub fn ahead(&self, wait: Duration) -> String {
        self.shifted('+', wait)
    }

    fn shifted(&self, sign: char, by: Duration) -> String {
        let micros = by.as_micros();
        match self.raw {
            Raw::Postgres { .. } => format!("(clock_timestamp() {sign} interval '{micros} microseconds')"),
            Raw::Sqlite { .. } => {
                format!("(cast(round(unixepoch('subsec') * 1000) as integer) * 1000 {sign} {micros})")
            }
        }
    }

    /// Claims at most `limit` jobs of the default queue.
    pub async fn claim(&self, worker: &str, limit: u32) -> Vec<Job> {
        self.storage.claim(&request(worker, &[("default", limit)])).await.expect("claimed")
    }

    /// Enqueues one job and claims it.
    pub async fn running(&self, worker: &str) -> Claim {
        let id = self.enqueue("t", options()).await;
        let claimed = self.claim(worker, 1).await;
        assert_eq!(claimed.iter().map(|job| job.id).collect::<Vec<_>>(), [id], "nothing else is due");
        claimed[0].claim().expect("a claimed job has a claim")
    }

    /// The job, which is there.
    pub async fn job(&self, id: JobId) -> Job {
        self.storage.job(id).await.expect("asked").expect("the job is there")
    }

    /// Writes checkpoints of the job.
    pub async fn checkpoints(&self, id: JobId, count: usize) {
        for index in 0..count {
            let values = format!("values ({}, {index}, 'step')", self.id(id));
            self.exec(&format!("insert into @checkpoints (job_id, call_index, call_type) {values}")).await;
        }
    }

    pub async fn count_checkpoints(&self, id: JobId) -> i64 {
        self.number(&format!("select count(*) from @checkpoints where job_id = {}", self.id(id))).await
    }

    /// Enqueues a job whose arguments are its type.
    pub async fn enqueue(&self, job_type: &str, options: EnqueueOptions) -> JobId {
        self.storage.enqueue(&new_job(job_type, options)).await.expect("enqueued")
    }
}

pub fn request(worker: &str, shares: &[(&str, u32)]) -> ClaimRequest {
    let share = |(queue, limit): &(&str, u32)| QueueShare { queue: QueueName::new(*queue).unwrap(), limit: *limit };
    let worker = WorkerId::new(worker).expect("a worker's name");
    ClaimRequest { worker, shares: shares.iter().map(share).collect(), lease: SECOND * 60 }
}

pub fn new_job(job_type: &str, options: EnqueueOptions) -> NewJob {
    NewJob::new(job_type, &job_type, options).expect("the options are good")
}

pub fn options() -> EnqueueOptions {
    EnqueueOptions::new()
}

pub async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("the cluster answers");
    tokio::spawn(connection);
    client
}

/// A database that exists for one test, copied from a template that the first test makes.
pub struct Database {
    name: String,
    pub url: String,
}

impl Database {
    async fn create() -> Self {
        let admin = connect(&cluster()).await;
        admin.batch_execute("select pg_advisory_lock(737002)").await.expect("lock");
        let template = template(&admin).await;
        admin.batch_execute("select pg_advisory_unlock(737002)").await.expect("unlock");
        let name = format!("j_{}", Uuid::now_v7().simple());
        admin.batch_execute(&format!("create database {name} template {template}")).await.expect("created");
        let url = at(&name);
        Self { name, url }
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let name = self.name.clone();
        let dropped = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
            runtime.block_on(async {
                let admin = connect(&cluster()).await;
                // Best effort: the whole cluster goes when the run ends.
                let _ = admin.batch_execute(&format!("drop database if exists {name} with (force)")).await;
            });
        });
        let _ = dropped.join();
    }
}

fn cluster() -> String {
    std::env::var("TEST_DATABASE_URL").expect("TEST_DATABASE_URL names a scratch PostgreSQL")
}

fn at(database: &str) -> String {
    let cluster = cluster();
    let (base, _) = cluster.rsplit_once('/').expect("TEST_DATABASE_URL ends in a database");
    format!("{base}/{database}")
}

async fn template(admin: &Client) -> String {
    let files = [
        include_str!("../../sql/postgres/0001_jobs.sql"),
        include_str!("../../sql/postgres/0002_fleet.sql"),
        include_str!("../../sql/postgres/0003_waits.sql"),
        include_str!("../../sql/postgres/0004_fan_out.sql"),
        include_str!("../../sql/postgres/0005_schedules.sql"),
        include_str!("../../sql/postgres/enqueue.sql"),
    ];
    let hash = files.concat().bytes().fold(0u64, |hash, byte| hash.wrapping_mul(1_099_511_628_211) ^ u64::from(byte));
    let name = format!("jobs_template_{hash:016x}");
    let exists = format!("select from pg_database where datname = '{name}'");
    if admin.query(&exists, &[]).await.expect("query").is_empty() {
        let making = format!("making_{}", Uuid::now_v7().simple());
        admin.batch_execute(&format!("create database {making} template template0")).await.expect("created");
        let storage = PostgresStorage::connect(&at(&making), 1).expect("the URL is one");
        storage.migrate().await.expect("the schema installs");
        drop(storage);
        let busy = format!("select from pg_stat_activity where datname = '{making}'");
        while !admin.query(&busy, &[]).await.expect("query").is_empty() {
            tokio::task::yield_now().await;
        }
        admin.batch_execute(&format!("alter database {making} rename to {name}")).await.expect("renamed");
    }
    name
}
