//! What deletion does to the database around it, and the space that it leaves: samples, and vacuum.

use std::time::Duration;

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row};

use super::Sql;
use crate::error::Error;

/// The tables that deletion leaves dead rows in.
pub const TABLES: &[&str] =
    &["log_segments", "log_txns", "log_partitions", "log_consumers", "retention_history", "due_events"];

/// What one look at the database saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Bytes of write-ahead log since the cluster was made.
    pub wal_bytes: u64,
    /// Whether a session of somebody else was at work within the last second.
    pub is_shared: bool,
    /// Bytes of log that the slowest standby has not replayed; 0 without standbys.
    pub replication_lag_bytes: u64,
    /// Dead rows in the tables above, toast included, and live ones.
    pub dead_rows: u64,
    pub live_rows: u64,
}

/// One look. `own` are the sessions that do not count as somebody else.
///
/// # Errors
/// Whatever the database answered.
pub async fn sample(db: &(impl Sql + Sync), own: &[i32]) -> Result<Sample, Error> {
    let query = "select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint,
               exists (select from pg_stat_activity a
                        where a.datname = current_database() and a.backend_type = 'client backend'
                          and a.pid <> all($1) and a.pid <> pg_backend_pid()
                          and (a.state = 'active' or a.state_change > clock_timestamp() - interval '1 second')),
               coalesce((select max(pg_current_wal_lsn() - r.replay_lsn) from pg_stat_replication r), 0)::bigint,
               coalesce(sum(pg_stat_get_dead_tuples(c.oid) + coalesce(pg_stat_get_dead_tuples(nullif(c.reltoastrelid, 0)), 0)), 0)::bigint,
               coalesce(sum(pg_stat_get_live_tuples(c.oid)), 0)::bigint
          from unnest($2::text[]) t
          join pg_class c on c.oid = to_regclass('queen.' || t)";
    let row = db.row(query, &[(&own as _, Type::INT4_ARRAY), (&TABLES as _, Type::TEXT_ARRAY)]).await?;
    let count = |column: usize| u64::try_from(row.get::<_, i64>(column)).unwrap_or(0);
    Ok(Sample {
        wal_bytes: count(0),
        is_shared: row.get(1),
        replication_lag_bytes: count(2),
        dead_rows: count(3),
        live_rows: count(4),
    })
}

/// What the stores beside the queues hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub kv_rows: u64,
    pub kv_bytes: u64,
    pub timer_rows: u64,
    pub timer_bytes: u64,
}

/// Rows by the database's statistics, which are some seconds late; bytes with indexes and dead rows. Nothing is counted.
///
/// # Errors
/// Whatever the database answered.
pub async fn usage(db: &(impl Sql + Sync)) -> Result<Usage, Error> {
    // After a crash the statistics are gone, and what the last vacuum or analyze saw is left.
    let query = "select greatest(coalesce(nullif(pg_stat_get_live_tuples(c.oid), 0), c.reltuples::bigint), 0),
               pg_total_relation_size(c.oid)
          from unnest(array['queen.kv', 'queen.log_timers']) with ordinality as t (name, at)
          join pg_class c on c.oid = t.name::regclass
         order by t.at";
    let rows = db.rows(query, &[]).await?;
    let [kv, timers] = rows.as_slice() else { return Err(Error::Corrupt("a store has no table".to_owned())) };
    let count = |row: &Row, column: usize| u64::try_from(row.get::<_, i64>(column)).unwrap_or(0);
    Ok(Usage {
        kv_rows: count(kv, 0),
        kv_bytes: count(kv, 1),
        timer_rows: count(timers, 0),
        timer_bytes: count(timers, 1),
    })
}

/// Who keeps dead rows from being removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// `session`, `prepared transaction`, `replication slot` or `standby`.
    pub kind: String,
    /// Its pid and application, its name, or where it is.
    pub who: String,
    /// Since when, where that is known.
    pub held: Option<Duration>,
    /// Transactions since.
    pub transactions: u64,
}

/// The holders of the oldest snapshots in this database, oldest first, at most `rows_max`. `own` sessions are
/// left out, and those that vacuum, which hold nobody back.
///
/// # Errors
/// Whatever the database answered.
pub async fn holders(db: &(impl Sql + Sync), own: &[i32], rows_max: i64) -> Result<Vec<Holder>, Error> {
    let query = "select h.kind, h.who, h.held_seconds, h.transactions
          from (
            select case when a.backend_type = 'walsender' then 'standby' else 'session' end as kind,
                   format('pid %s, application %s, user %s, %s', a.pid, coalesce(nullif(a.application_name, ''), '-'),
                          coalesce(a.usename, '-'), coalesce(a.state, a.backend_type)) as who,
                   extract(epoch from clock_timestamp() - a.xact_start)::float8 as held_seconds,
                   age(a.backend_xmin)::bigint as transactions
              from pg_stat_activity a
             where a.backend_xmin is not null and a.pid <> all($1) and a.pid <> pg_backend_pid()
               and (a.datname = current_database() or a.datname is null)
               and not exists (select from pg_stat_progress_vacuum v where v.pid = a.pid)
            union all
            select 'prepared transaction', format('gid %s, owner %s', x.gid, x.owner),
                   extract(epoch from clock_timestamp() - x.prepared)::float8, age(x.transaction)::bigint
              from pg_prepared_xacts x where x.database = current_database()
            union all
            select 'replication slot', format('%s, %s', s.slot_name, case when s.active then 'active' else 'not active' end),
                   null, greatest(age(s.xmin), age(s.catalog_xmin))::bigint
              from pg_replication_slots s
             where (s.xmin is not null or s.catalog_xmin is not null)
               and (s.database = current_database() or s.database is null)
          ) h
         order by h.transactions desc, h.who
         limit $2";
    let rows = db.rows(query, &[(&own as _, Type::INT4_ARRAY), (&rows_max as _, Type::INT8)]).await?;
    let holders = rows.iter().map(|row| Holder {
        kind: row.get(0),
        who: row.get(1),
        held: row.get::<_, Option<f64>>(2).map(|seconds| Duration::from_secs_f64(seconds.max(0.0))),
        transactions: u64::try_from(row.get::<_, i64>(3)).unwrap_or(0),
    });
    Ok(holders.collect())
}

/// Commits a transaction that does nothing but to wait for its flush, as a push does.
///
/// # Errors
/// Whatever the database answered.
pub async fn commit(db: &(impl Sql + Sync)) -> Result<(), Error> {
    db.row("select pg_current_xact_id()::text", &[]).await.map(drop)
}

/// Whether this session has the disk write what it wrote as it goes. It is slower for that; but what piles up in the
/// system's memory is written at once some time, and then every commit waits.
///
/// # Errors
/// Whatever the database answered.
pub async fn write_as_it_goes(db: &(impl Sql + Sync), is_on: bool) -> Result<(), Error> {
    let after = if is_on { "1MB" } else { "0" };
    db.row("select set_config('backend_flush_after', $1, false)", &[(&after as _, Type::TEXT)]).await.map(drop)
}

/// Makes the counts of this session's work visible to others with its next statement, and not some seconds later.
///
/// # Errors
/// Whatever the database answered.
pub async fn flush_statistics(db: &(impl Sql + Sync)) -> Result<(), Error> {
    db.rows("select pg_stat_force_next_flush()", &[]).await.map(drop)
}

/// One table, its toast included. Sizes are exact, rows are the statistics' estimates, and the bytes of live and
/// dead rows follow from both.
#[derive(Clone, Debug, PartialEq)]
pub struct TableSpace {
    pub table: String,
    /// Heap and toast on disk.
    pub bytes: u64,
    pub index_bytes: u64,
    pub live_rows: u64,
    pub dead_rows: u64,
    pub live_bytes: u64,
    pub dead_bytes: u64,
    /// What new rows can use without the table growing.
    pub free_bytes: u64,
    /// Seconds since the last vacuum of any kind; `None` if there was none since the statistics began.
    pub vacuumed_seconds_ago: Option<f64>,
}

/// How much space each table takes, the largest first.
///
/// # Errors
/// Whatever the database answered.
pub async fn tables(db: &(impl Sql + Sync)) -> Result<Vec<TableSpace>, Error> {
    // A heap row's width is known from the statistics of its columns; an out-of-line value counts where it lies,
    // as the rows of the toast table, which are of nearly one size.
    let query = "with t as (
            select c.oid, c.relname, nullif(c.reltoastrelid, 0) as toast,
                   pg_relation_size(c.oid) as heap, coalesce(pg_relation_size(nullif(c.reltoastrelid, 0)), 0) as toast_heap,
                   pg_indexes_size(c.oid) + coalesce(pg_indexes_size(nullif(c.reltoastrelid, 0)), 0) as indexes,
                   pg_stat_get_live_tuples(c.oid) as live, pg_stat_get_dead_tuples(c.oid) as dead,
                   coalesce(pg_stat_get_live_tuples(nullif(c.reltoastrelid, 0)), 0) as toast_live,
                   coalesce(pg_stat_get_dead_tuples(nullif(c.reltoastrelid, 0)), 0) as toast_dead,
                   28 + coalesce((select sum(least(s.avg_width, 2000)) from pg_stats s
                                   where s.schemaname = 'queen' and s.tablename = c.relname), 100) as width,
                   greatest(pg_stat_get_last_vacuum_time(c.oid), pg_stat_get_last_autovacuum_time(c.oid)) as vacuumed
              from pg_class c
             where c.relnamespace in ('queen'::regnamespace, 'queen_streams'::regnamespace) and c.relkind = 'r')
        select relname::text, (heap + toast_heap)::bigint, indexes::bigint, live::bigint, dead::bigint,
               least(live * width, heap)::bigint + least(toast_live * 2060, toast_heap)::bigint,
               least(dead * width, greatest(heap - live * width, 0))::bigint
                   + least(toast_dead * 2060, greatest(toast_heap - toast_live * 2060, 0))::bigint,
               extract(epoch from clock_timestamp() - vacuumed)::float8
          from t order by heap + toast_heap + indexes desc, relname";
    let rows = db.rows(query, &[]).await?;
    let spaces = rows.iter().map(|row| {
        let count = |column: usize| u64::try_from(row.get::<_, i64>(column)).unwrap_or(0);
        let (bytes, live_bytes, dead_bytes) = (count(1), count(5), count(6));
        TableSpace {
            table: row.get(0),
            bytes,
            index_bytes: count(2),
            live_rows: count(3),
            dead_rows: count(4),
            live_bytes,
            dead_bytes,
            free_bytes: bytes.saturating_sub(live_bytes + dead_bytes),
            vacuumed_seconds_ago: row.get(7),
        }
    });
    Ok(spaces.collect())
}

/// The tables above with more than `dead_min` dead rows, and more than the share `dead_share` of their live ones.
///
/// # Errors
/// Whatever the database answered.
pub async fn to_vacuum(db: &(impl Sql + Sync), dead_min: i64, dead_share: f64) -> Result<Vec<&'static str>, Error> {
    let query = "select t
          from unnest($1::text[]) t
          join pg_class c on c.oid = to_regclass('queen.' || t)
         cross join lateral (values (c.oid), (nullif(c.reltoastrelid, 0))) r (oid)
         where pg_stat_get_dead_tuples(r.oid) > greatest($2, $3 * pg_stat_get_live_tuples(r.oid))
         group by t order by t";
    let params = [(&TABLES as _, Type::TEXT_ARRAY), (&dead_min as _, Type::INT8), (&dead_share as _, Type::FLOAT8)];
    let rows = db.rows(query, &params).await?;
    Ok(TABLES.iter().copied().filter(|table| rows.iter().any(|row| row.get::<_, &str>(0) == *table)).collect())
}

/// Makes the space of dead rows in `table`, one of the tables above, free for new ones. The file is not cut short:
/// that would take a lock that every push waits for.
///
/// # Errors
/// Whatever the database answered.
pub async fn vacuum(client: &Client, table: &'static str) -> Result<(), Error> {
    assert!(TABLES.contains(&table), "a table of the engine");
    // No vacuum of somebody else is waited for: it does the same work.
    client.batch_execute(&format!("vacuum (truncate false, skip_locked) queen.{table}")).await?;
    Ok(())
}
