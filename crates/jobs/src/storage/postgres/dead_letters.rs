//! The listing of jobs that failed for good.

use async_trait::async_trait;
use tokio_postgres::types::{ToSql, Type};

use super::session::Sql as _;
use super::{PostgresStorage, row};
use crate::control::DeadLetterFilter;
use crate::error::Error;
use crate::job::Job;
use crate::storage::DeadLetterStore;

macro_rules! matching {
    () => {
        " from ebbtide_jobs.jobs j
          where j.dead_lettered_at is not null and j.status = 'failed'
            and ($1::text is null or j.queue = $1) and ($2::text is null or j.type = $2)
            and ($3::text is null or j.tenant = $3) and ($4::text is null or j.metadata @> $4::text::jsonb)
            and ($5::text is null or strpos(j.type, $5) > 0 or strpos(j.queue, $5) > 0
                 or strpos(coalesce(j.last_error, ''), $5) > 0)"
    };
}

const LIST: &str =
    concat!("select ", row::columns!(), matching!(), " order by j.dead_lettered_at desc, j.id desc limit $6 offset $7");
const COUNT: &str = concat!("select count(*) as count", matching!());

/// The filter in the form in which SQL takes it.
struct Params<'a> {
    queue: Option<&'a str>,
    job_type: Option<&'a str>,
    metadata: Option<String>,
    filter: &'a DeadLetterFilter,
}

impl<'a> Params<'a> {
    fn of(filter: &'a DeadLetterFilter) -> Self {
        let json = || serde_json::to_string(&filter.metadata).expect("a map of strings is JSON");
        Self {
            queue: filter.queue.as_ref().map(|queue| queue.as_str()),
            job_type: filter.job_type.as_ref().map(|job_type| job_type.as_str()),
            metadata: (!filter.metadata.is_empty()).then(json),
            filter,
        }
    }

    fn list(&self) -> Vec<(&(dyn ToSql + Sync), Type)> {
        vec![
            (&self.queue, Type::TEXT),
            (&self.job_type, Type::TEXT),
            (&self.filter.tenant, Type::TEXT),
            (&self.metadata, Type::TEXT),
            (&self.filter.search, Type::TEXT),
        ]
    }
}

#[async_trait]
impl DeadLetterStore for PostgresStorage {
    async fn list(&self, filter: &DeadLetterFilter) -> Result<Vec<Job>, Error> {
        let given = Params::of(filter);
        let (limit, offset) = (i64::from(filter.limit), i64::try_from(filter.offset).unwrap_or(i64::MAX));
        let mut params = given.list();
        params.extend([(&limit as _, Type::INT8), (&offset as _, Type::INT8)]);
        let rows = self.session().await?.rows(LIST, &params).await?;
        rows.iter().map(row::job).collect()
    }

    async fn count(&self, filter: &DeadLetterFilter) -> Result<u64, Error> {
        let rows = self.session().await?.rows(COUNT, &Params::of(filter).list()).await?;
        let count: i64 = row::get(row::only(&rows)?, "count")?;
        Ok(u64::try_from(count).expect("a count is not negative"))
    }
}
