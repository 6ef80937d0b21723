//! Inserts of jobs: one by one, through the stored function where a key is to be looked at, or a batch in one statement.

use jiff::Timestamp;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::row;
use super::session::{Param, Sql};
use crate::enqueue::{Enqueued, NewJob, TxEnqueuer};
use crate::error::Error;
use crate::job::JobId;
use crate::storage::fragment::live;

/// How often a batch looks again for the holder of a key that keeps changing hands.
const BATCH_ROUNDS_MAX: usize = 16;

/// Enqueues in the caller's own transaction: the job is there once that commits, and never if it does not. Every
/// rule of deduplication applies inside it, and a duplicate does not end the transaction.
///
/// # Errors
/// [`Error::DuplicateJob`] if an unfinished job has the same unique key; the transaction can go on.
pub async fn enqueue_in(transaction: &tokio_postgres::Transaction<'_>, job: &NewJob) -> Result<Enqueued, Error> {
    enqueue(transaction, job).await
}

impl TxEnqueuer for tokio_postgres::Transaction<'_> {
    async fn enqueue_job(&self, job: &NewJob) -> Result<Enqueued, Error> {
        enqueue(self, job).await
    }

    async fn enqueue_jobs(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, Error> {
        enqueue_batch(self, jobs).await
    }
}

const ENQUEUE: &str = "select outcome, job_id from ebbtide_jobs.enqueue_v1(
    $1, $2, $3, $4, $5, $6::text::jsonb, $7, $8, $9, $10, $11, $12, $13, null, null, $14, $15, $16, $17)";

async fn enqueue_keyless(sql: &impl Sql, job: &NewJob) -> Result<Enqueued, Error> {
    let params = [
        (&job.id.as_uuid() as _, Type::UUID),
        (&job.job_type.as_str() as _, Type::TEXT),
        (&job.args as _, Type::BYTEA),
        (&job.queue.as_str() as _, Type::TEXT),
        (&job.tenant as _, Type::TEXT),
        (&job.metadata_json() as _, Type::TEXT),
        (&job.priority as _, Type::INT4),
        (&job.max_retries_i32() as _, Type::INT4),
        (&job.timeout_nanos() as _, Type::INT8),
        (&job.determinism.as_i32() as _, Type::INT4),
        (&job.run_at() as _, Type::TIMESTAMPTZ),
        (&job.delay_us() as _, Type::INT8),
        (&job.trace_context as _, Type::BYTEA),
    ];
    sql.rows(ENQUEUE_KEYLESS, &params).await?;
    Ok(Enqueued::New(job.id))
}

pub(super) async fn enqueue(sql: &impl Sql, job: &NewJob) -> Result<Enqueued, Error> {
    if job.scope.is_none() && job.unique_key.is_empty() {
        return enqueue_keyless(sql, job).await;
    }
    let (scope_hash, window_us) =
        job.scope.as_ref().map_or((None, None), |scope| (Some(&scope.hash), Some(scope.window_us)));
    let rows = sql
        .rows(
            ENQUEUE,
            &[
                (&job.id.as_uuid(), Type::UUID),
                (&job.job_type.as_str(), Type::TEXT),
                (&job.args, Type::BYTEA),
                (&job.queue.as_str(), Type::TEXT),
                (&job.tenant, Type::TEXT),
                (&job.metadata_json(), Type::TEXT),
                (&job.priority, Type::INT4),
                (&job.max_retries_i32(), Type::INT4),
                (&job.timeout_nanos(), Type::INT8),
                (&job.determinism.as_i32(), Type::INT4),
                (&job.run_at(), Type::TIMESTAMPTZ),
                (&job.delay_us(), Type::INT8),
                (&job.unique_key, Type::TEXT),
                (&job.trace_context, Type::BYTEA),
                (&scope_hash, Type::TEXT),
                (&window_us, Type::INT8),
                (&job.takes_over, Type::BOOL),
            ],
        )
        .await?;
    let answer = row::only(&rows)?;
    match row::get(answer, "outcome")? {
        "new" => Ok(Enqueued::New(job.id)),
        "duplicate" => Ok(Enqueued::Duplicate(row::id(answer, "job_id")?)),
        _ => match row::get::<Option<Uuid>>(answer, "job_id")?.and_then(JobId::from_uuid) {
            Some(holder) => Err(Error::DuplicateJob { holder }),
            None => Err(Error::Busy("the unique key changes hands too fast".into())),
        },
    }
}

/// Inserts the jobs of a list `b` with the columns of [`Columns`].
macro_rules! insert {
    ($list:literal) => {
        concat!(
            "insert into ebbtide_jobs.jobs (
                id, type, args, queue, tenant, metadata, priority, max_retries, timeout, determinism, run_at,
                unique_key, trace_context, created_at, updated_at)
            select b.id, b.type, b.args, b.queue, b.tenant, b.metadata::jsonb, b.priority, b.max_retries, b.timeout,
                   b.determinism,
                   case when b.delay_us > 0 then c.now + b.delay_us * interval '1 microsecond'
                        when b.run_at > c.now then b.run_at end,
                   b.unique_key, b.trace_context, c.now, c.now
              from ",
            $list,
            ", (select clock_timestamp() as now offset 0) c"
        )
    };
}

// A job without a key of any kind needs no look at others, and so no procedure.
const ENQUEUE_KEYLESS: &str = concat!(
    insert!(
        "(select $1::uuid as id, $2::text as type, $3::bytea as args, $4::text as queue, $5::text as tenant,
                 $6::text as metadata, $7::int as priority, $8::int as max_retries, $9::bigint as timeout,
                 $10::int as determinism, $11::timestamptz as run_at, $12::bigint as delay_us, ''::text as unique_key,
                 $13::bytea as trace_context) b"
    ),
    " returning id"
);

const ENQUEUE_BATCH: &str = concat!(
    insert!(
        "unnest($1::uuid[], $2::text[], $3::bytea[], $4::text[], $5::text[], $6::text[], $7::int[], $8::int[],
                $9::bigint[], $10::int[], $11::timestamptz[], $12::bigint[], $13::text[], $14::bytea[])
         with ordinality as b (id, type, args, queue, tenant, metadata, priority, max_retries, timeout,
                               determinism, run_at, delay_us, unique_key, trace_context, place)"
    ),
    " order by b.place
    on conflict (unique_key) where unique_key <> '' and status in ",
    live!(),
    " do nothing returning id"
);

const HOLDERS: &str = concat!(
    "select j.unique_key, j.id from ebbtide_jobs.jobs j
      where j.unique_key = any($1) and j.unique_key <> '' and j.status in ",
    live!()
);

/// Inserts all of them; those whose key is taken are answered with the holder, which is looked up afterwards so that
/// no id is answered that was never written.
pub(super) async fn enqueue_batch(sql: &impl Sql, jobs: &[NewJob]) -> Result<Vec<Enqueued>, Error> {
    crate::enqueue::check_batch(jobs)?;
    let mut outcomes: Vec<Option<Enqueued>> = vec![None; jobs.len()];
    for _ in 0..BATCH_ROUNDS_MAX {
        let open: Vec<usize> = (0..jobs.len()).filter(|index| outcomes[*index].is_none()).collect();
        if open.is_empty() {
            break;
        }
        let chosen: Vec<&NewJob> = open.iter().map(|index| &jobs[*index]).collect();
        let written = insert(sql, &chosen).await?;
        let keys: Vec<&str> = chosen.iter().map(|job| job.unique_key.as_str()).collect();
        let holders = if written.len() < open.len() { holders(sql, &keys).await? } else { Vec::new() };
        for index in open {
            let job = &jobs[index];
            outcomes[index] = if written.contains(&job.id) {
                Some(Enqueued::New(job.id))
            } else {
                holders.iter().find(|(key, _)| *key == job.unique_key).map(|(_, id)| Enqueued::Duplicate(*id))
            };
        }
    }
    let outcomes: Option<Vec<_>> = outcomes.into_iter().collect();
    outcomes.ok_or_else(|| Error::Busy("a unique key changes hands too fast".into()))
}

async fn holders(sql: &impl Sql, keys: &[&str]) -> Result<Vec<(String, JobId)>, Error> {
    let rows = sql.rows(HOLDERS, &[(&keys, Type::TEXT_ARRAY)]).await?;
    rows.iter().map(|found| Ok((row::get(found, "unique_key")?, row::id(found, "id")?))).collect()
}

/// Jobs as arrays, a column each, in the order of the first fourteen parameters of an inserting statement.
pub(super) struct Columns<'a> {
    ids: Vec<Uuid>,
    types: Vec<&'a str>,
    args: Vec<&'a [u8]>,
    queues: Vec<&'a str>,
    tenants: Vec<&'a str>,
    metadata: Vec<Option<String>>,
    priorities: Vec<i32>,
    max_retries: Vec<i32>,
    timeouts: Vec<i64>,
    determinism: Vec<i32>,
    run_at: Vec<Option<Timestamp>>,
    delays: Vec<Option<i64>>,
    unique_keys: Vec<&'a str>,
    trace_contexts: Vec<Option<&'a [u8]>>,
}

impl<'a> Columns<'a> {
    pub(super) fn of(jobs: &[&'a NewJob]) -> Self {
        fn each<'a, T>(jobs: &[&'a NewJob], f: impl Fn(&'a NewJob) -> T) -> Vec<T> {
            jobs.iter().map(|job| f(job)).collect()
        }
        Self {
            ids: each(jobs, |job| job.id.as_uuid()),
            types: each(jobs, |job| job.job_type.as_str()),
            args: each(jobs, |job| job.args.as_slice()),
            queues: each(jobs, |job| job.queue.as_str()),
            tenants: each(jobs, |job| job.tenant.as_str()),
            metadata: each(jobs, NewJob::metadata_json),
            priorities: each(jobs, |job| job.priority),
            max_retries: each(jobs, NewJob::max_retries_i32),
            timeouts: each(jobs, NewJob::timeout_nanos),
            determinism: each(jobs, |job| job.determinism.as_i32()),
            run_at: each(jobs, NewJob::run_at),
            delays: each(jobs, NewJob::delay_us),
            unique_keys: each(jobs, |job| job.unique_key.as_str()),
            trace_contexts: each(jobs, |job| job.trace_context.as_deref()),
        }
    }

    pub(super) fn params(&self) -> Vec<Param<'_>> {
        vec![
            (&self.ids, Type::UUID_ARRAY),
            (&self.types, Type::TEXT_ARRAY),
            (&self.args, Type::BYTEA_ARRAY),
            (&self.queues, Type::TEXT_ARRAY),
            (&self.tenants, Type::TEXT_ARRAY),
            (&self.metadata, Type::TEXT_ARRAY),
            (&self.priorities, Type::INT4_ARRAY),
            (&self.max_retries, Type::INT4_ARRAY),
            (&self.timeouts, Type::INT8_ARRAY),
            (&self.determinism, Type::INT4_ARRAY),
            (&self.run_at, Type::TIMESTAMPTZ_ARRAY),
            (&self.delays, Type::INT8_ARRAY),
            (&self.unique_keys, Type::TEXT_ARRAY),
            (&self.trace_contexts, Type::BYTEA_ARRAY),
        ]
    }
}

async fn insert(sql: &impl Sql, jobs: &[&NewJob]) -> Result<std::collections::HashSet<JobId>, Error> {
    let columns = Columns::of(jobs);
    let rows = sql.rows(ENQUEUE_BATCH, &columns.params()).await?;
    rows.iter().map(|written| row::id(written, "id")).collect()
}
