//! The listing of jobs that failed for good.

use async_trait::async_trait;
use rusqlite::{Connection, ToSql, named_params};

use super::threads::error;
use super::{SqliteStorage, row};
use crate::control::DeadLetterFilter;
use crate::error::Error;
use crate::job::Job;
use crate::storage::DeadLetterStore;

macro_rules! matching {
    () => {
        " from jobs j
          where j.dead_lettered_at is not null and j.status = 'failed'
            and (:queue is null or j.queue = :queue) and (:type is null or j.type = :type)
            and (:tenant is null or j.tenant = :tenant)
            and not exists (
                select 1 from json_each(coalesce(:metadata, '{}')) wanted
                 where not exists (select 1 from json_each(coalesce(j.metadata, '{}')) label
                                    where label.key = wanted.key and label.value = wanted.value))
            and (:search is null or instr(j.type, :search) > 0 or instr(j.queue, :search) > 0
                 or instr(coalesce(j.last_error, ''), :search) > 0)"
    };
}

const LIST: &str = concat!(
    "select ",
    row::columns!(),
    matching!(),
    " order by j.dead_lettered_at desc, j.id desc limit :limit offset :offset"
);
const COUNT: &str = concat!("select count(*)", matching!());

/// Calls `ask` with the filter in the form in which SQL takes it.
fn with_params<T>(filter: &DeadLetterFilter, ask: impl FnOnce(&[(&str, &dyn ToSql)]) -> T) -> T {
    let json = || serde_json::to_string(&filter.metadata).expect("a map of strings is JSON");
    ask(named_params! {
        ":queue": filter.queue.as_ref().map(|queue| queue.as_str()),
        ":type": filter.job_type.as_ref().map(|job_type| job_type.as_str()),
        ":tenant": filter.tenant,
        ":metadata": (!filter.metadata.is_empty()).then(json),
        ":search": filter.search,
    })
}

fn list(db: &Connection, filter: &DeadLetterFilter) -> Result<Vec<Job>, Error> {
    let mut query = db.prepare_cached(LIST).map_err(error)?;
    let offset = i64::try_from(filter.offset).unwrap_or(i64::MAX);
    with_params(filter, |params| {
        let mut params = params.to_vec();
        params.extend_from_slice(&[(":limit", &filter.limit), (":offset", &offset)]);
        let rows = query.query_map(params.as_slice(), |row| Ok(row::job(row))).map_err(error)?;
        rows.map(|row| row.map_err(error)?).collect()
    })
}

fn count(db: &Connection, filter: &DeadLetterFilter) -> Result<u64, Error> {
    let mut query = db.prepare_cached(COUNT).map_err(error)?;
    let count: i64 = with_params(filter, |params| query.query_row(params, |row| row.get(0))).map_err(error)?;
    Ok(u64::try_from(count).expect("a count is not negative"))
}

#[async_trait]
impl DeadLetterStore for SqliteStorage {
    async fn list(&self, filter: &DeadLetterFilter) -> Result<Vec<Job>, Error> {
        let filter = filter.clone();
        self.readers.run(move |db| list(db, &filter)).await
    }

    async fn count(&self, filter: &DeadLetterFilter) -> Result<u64, Error> {
        let filter = filter.clone();
        self.readers.run(move |db| count(db, &filter)).await
    }
}
