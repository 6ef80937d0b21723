//! What the retention benchmark builds, looks at and compares with. Its own functions stand in a schema that it drops.

use jiff::Timestamp;
use serde_json::Value;
use tokio_postgres::{Client, Error};
use uuid::Uuid;

use crate::db::retention::{Learnt, QUIET, WORK_LIST, quiet};

/// Rows of one partition's log that are built by one statement.
const BUILD_ROWS: i64 = 200_000;

/// Makes a queue without retention, with `partitions` partitions named as the load names them.
pub async fn make_queue(client: &Client, queue: &str, partitions: i64) -> Result<Uuid, Error> {
    // The window of rule 2 keeps the sidecar, while rules are off; a window for duplicates as long would have pushes look
    // through all of it.
    let insert = "insert into queen.queues (name, dedup_window_seconds, completed_retention_seconds)
        values ($1, 900, 86400) returning id";
    let id: Uuid = client.query_one(insert, &[&queue]).await?.get(0);
    let insert = "insert into queen.log_partitions (queue_id, name, oldest_live_at, oldest_txn_at)
        select $1, 'p' || lpad(n::text, 5, '0'), null, null from generate_series(0, $2::bigint - 1) n";
    client.execute(insert, &[&id, &partitions]).await?;
    Ok(id)
}

/// Appends `segments` segments to each partition of a queue, two hours old, in the order in which a steady load would
/// have written them. Each holds `messages` messages, and its blob is one of `blobs`.
pub async fn build_log(
    client: &Client, queue: Uuid, segments: i64, messages: i64, blobs: &[Vec<u8>],
) -> Result<(), Error> {
    let count = "select count(*) from queen.log_partitions where queue_id = $1";
    let partitions: i64 = client.query_one(count, &[&queue]).await?.get(0);
    let hashes: Vec<u8> = (0..16 * messages).map(|n| (n * 167 % 251).to_le_bytes()[0]).collect();
    let mut from = 0;
    while from < segments {
        let to = segments.min(from + (BUILD_ROWS / partitions.max(1)).max(1));
        for (columns, table, value) in [
            ("blob", "log_segments", "($5::bytea[])[1 + ((n * 31 + p.ord) % cardinality($5::bytea[]))::int]"),
            ("hashes", "log_txns", "($5::bytea[])[1]"),
        ] {
            let insert = format!(
                "insert into queen.{table} (partition_id, base_offset, end_offset, created_at, {columns})
                 select p.id, n * $4::bigint, n * $4::bigint + $4::bigint - 1, now() - interval '2 hours' + n * interval '1 millisecond', {value}
                   from (select id, row_number() over (order by id) as ord from queen.log_partitions
                          where queue_id = $1) p
                  cross join generate_series($2::bigint, $3::bigint - 1) n
                  order by n, p.id"
            );
            let values: Vec<&[u8]> =
                if table == "log_txns" { vec![&hashes] } else { blobs.iter().map(Vec::as_slice).collect() };
            client.execute(&insert, &[&queue, &from, &to, &messages, &values]).await?;
        }
        from = to;
    }
    let stamp = "update queen.log_partitions set last_offset = $2, last_write_at = now(),
        oldest_live_at = now() - interval '2 hours', oldest_txn_at = now() - interval '2 hours' where queue_id = $1";
    client.execute(stamp, &[&queue, &(segments * messages - 1)]).await?;
    client.batch_execute("analyze queen.log_partitions, queen.log_segments, queen.log_txns").await
}

/// Switches rule 1 on for what is older than an hour, and with it the purge of the sidecar.
pub async fn retain_an_hour(client: &Client, queue: Uuid) -> Result<(), Error> {
    retain(client, queue, 3600).await
}

/// Switches rule 1 on with this window.
pub async fn retain(client: &Client, queue: Uuid, seconds: i32) -> Result<(), Error> {
    let update =
        "update queen.queues set retention_enabled = true, retention_seconds = $2, completed_retention_seconds = 0
        where id = $1";
    client.execute(update, &[&queue, &seconds]).await.map(drop)
}

pub async fn delete_queue(client: &Client, queue: &str) -> Result<(), Error> {
    client.execute("select queen.delete_queue_v1($1)", &[&queue]).await?;
    client.execute("delete from queen.retention_history", &[]).await.map(drop)
}

/// What the audit says of a queue: messages deleted, and the seconds from the first step to the last.
pub async fn deleted(client: &Client, queue: Uuid) -> Result<(i64, f64), Error> {
    let query = "select coalesce(sum(messages_deleted), 0)::bigint,
        coalesce(extract(epoch from max(executed_at) - min(executed_at)), 0)::float8
        from queen.retention_history where queue_id = $1 and messages_deleted > 0";
    let row = client.query_one(query, &[&queue]).await?;
    Ok((row.get(0), row.get(1)))
}

/// Segments of a queue that are older than an hour.
pub async fn stale_segments(client: &Client, queue: Uuid) -> Result<i64, Error> {
    let query = "select count(*) from queen.log_partitions p join queen.log_segments s on s.partition_id = p.id
        where p.queue_id = $1 and s.created_at < now() - interval '1 hour'";
    Ok(client.query_one(query, &[&queue]).await?.get(0))
}

/// Whether a queue has segments older than an hour: a look at the first one of each partition.
pub async fn has_stale(client: &Client, queue: Uuid) -> Result<bool, Error> {
    let query = "select exists (
        select from queen.log_partitions p
         cross join lateral (select s.created_at from queen.log_segments s
                              where s.partition_id = p.id and s.base_offset >= p.log_start
                              order by s.base_offset limit 1) head
         where p.queue_id = $1 and head.created_at < now() - interval '1 hour')";
    Ok(client.query_one(query, &[&queue]).await?.get(0))
}

/// Everything stale of a queue in one transaction under the locks of its partitions: what steps are there to avoid.
pub async fn delete_at_once(client: &mut Client, queue: Uuid) -> Result<u64, Error> {
    let transaction = client.transaction().await?;
    transaction
        .execute("select from queen.log_partitions where queue_id = $1 order by id for update", &[&queue])
        .await?;
    let delete = "delete from queen.log_segments s using queen.log_partitions p
        where p.queue_id = $1 and s.partition_id = p.id and s.created_at < now() - interval '1 hour'";
    let deleted = transaction.execute(delete, &[&queue]).await?;
    transaction.commit().await?;
    Ok(deleted)
}

/// Bytes of log written by the whole server.
pub async fn log_bytes(client: &Client) -> Result<i64, Error> {
    Ok(client.query_one("select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint", &[]).await?.get(0))
}

pub async fn checkpoint(client: &Client) -> Result<(), Error> {
    client.batch_execute("checkpoint").await
}

/// Queues with young partitions whose stamps are known.
pub async fn make_young(client: &Client, queues: i64, partitions: i64) -> Result<(), Error> {
    let insert = "insert into queen.queues (name, retention_enabled, retention_seconds, completed_retention_seconds)
        select 'young-' || n, true, 86400, 7200 from generate_series(1, $1::bigint) n";
    client.execute(insert, &[&queues]).await?;
    let insert = "insert into queen.log_partitions (queue_id, name, last_offset, oldest_live_at, oldest_txn_at)
        select q.id, n::text, 0, now() - n % 600 * interval '1 second', now() - n % 600 * interval '1 second'
          from queen.queues q, generate_series(1, $1::bigint) n where q.name like 'young-%'";
    client.execute(insert, &[&partitions]).await?;
    client.batch_execute("vacuum analyze queen.log_partitions").await
}

pub async fn remove_young(client: &Client) -> Result<(), Error> {
    client.batch_execute("delete from queen.queues where name like 'young-%'").await?;
    client.batch_execute("vacuum queen.log_partitions").await
}

/// Makes `count` young partitions old.
pub async fn age_some(client: &Client, count: i64) -> Result<(), Error> {
    let update = "update queen.log_partitions set oldest_live_at = now() - interval '2 days'
        where id in (select p.id from queen.log_partitions p join queen.queues q on q.id = p.queue_id
                      where q.name like 'young-%' order by md5(p.id::text) limit $1)";
    client.execute(update, &[&count]).await?;
    client.batch_execute("vacuum queen.log_partitions").await
}

/// What one look cost the database: milliseconds, pages, rows.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    pub milliseconds: f64,
    pub pages: f64,
    pub rows: f64,
}

/// What it costs to learn what is due: that of queues of which nothing is known, or of which all is known.
pub async fn quiet_cost(client: &Client, all_are_known: bool) -> Result<Cost, crate::error::Error> {
    let known = if all_are_known { quiet(client, None, [].into_iter()).await? } else { Vec::new() };
    let ids: Vec<Uuid> = known.iter().map(|queue| queue.queue_id.0).collect();
    let versions: Vec<i64> = known.iter().map(|queue| queue.quiet.version).collect();
    let untils: Vec<Timestamp> = known.iter().map(|queue| queue.quiet.until).collect();
    let as_of: Option<Timestamp> = None;
    Ok(explain(client, QUIET, &[&as_of, &ids, &versions, &untils]).await?)
}

/// What the work list costs, of the queues in which something is due.
pub async fn list_cost(client: &Client) -> Result<Cost, crate::error::Error> {
    let learnt = quiet(client, None, [].into_iter()).await?;
    let due = |is_due: fn(&Learnt) -> bool| -> Vec<Uuid> {
        learnt.iter().filter(|queue| is_due(queue)).map(|queue| queue.queue_id.0).collect()
    };
    let (live, held, txns) = (due(|q| q.live_due), due(|q| q.held_due), due(|q| q.txns_due));
    let (as_of, none): (Option<Timestamp>, Vec<Uuid>) = (None, Vec::new());
    Ok(explain(client, WORK_LIST, &[&as_of, &Uuid::nil(), &none, &5000_i64, &live, &held, &txns]).await?)
}

/// Plans as the leader's session does.
pub async fn plan_as_the_leader(client: &Client) -> Result<(), Error> {
    client.batch_execute("set enable_seqscan = off; set enable_bitmapscan = off; set jit = off").await
}

async fn explain(
    client: &Client, query: &str, params: &[&(dyn tokio_postgres::types::ToSql + Sync)],
) -> Result<Cost, Error> {
    let explained = format!("explain (analyze, buffers, timing off, format json) {query}");
    let value: Value = client.query_one(&explained, params).await?.get(0);
    let plan = &value[0]["Plan"];
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    Ok(Cost {
        milliseconds: number(&value[0]["Execution Time"]),
        pages: number(&plan["Shared Hit Blocks"]) + number(&plan["Shared Read Blocks"]),
        rows: number(&plan["Actual Rows"]),
    })
}

/// Makes a push function that keeps no stamps out of the one that does, and a loop that calls either.
pub async fn make_push_without_stamps(client: &Client) -> Result<(), Error> {
    client
        .batch_execute(
            r"drop schema if exists ebbtide_bench cascade;
            create schema ebbtide_bench;
            do $do$
            declare
                v_text text := pg_get_functiondef('queen.log_push_batch_v1'::regproc);
            begin
                v_text := replace(v_text, 'queen.log_push_batch_v1', 'ebbtide_bench.push_without_stamps');
                v_text := regexp_replace(v_text, 'oldest_(live|txn)_at = coalesce\([^\n]*\n', '', 'g');
                if v_text like '%oldest_%' then
                    raise exception 'the control still keeps stamps';
                end if;
                execute v_text;
            end $do$;
            create procedure ebbtide_bench.push(p_with_stamps boolean, p_commits int, p_segments int) language plpgsql as $$
            declare
                v_pids uuid[];
            begin
                for v_commit in 1 .. p_commits loop
                    select array_agg(p.id) into v_pids from (
                        select l.id from queen.log_partitions l offset (v_commit * 7) % 150 limit p_segments) p;
                    if p_with_stamps then
                        perform queen.log_push_batch_v1(v_pids, array_fill(1, array[p_segments]),
                            array_fill('\x00112233445566778899aabbccddeeff'::bytea, array[p_segments]),
                            array_fill(decode(repeat('ab', 330), 'hex'), array[p_segments]),
                            array_fill(9000000000000000000, array[p_segments]), array_fill(2147483647, array[p_segments]), null);
                    else
                        perform ebbtide_bench.push_without_stamps(v_pids, array_fill(1, array[p_segments]),
                            array_fill('\x00112233445566778899aabbccddeeff'::bytea, array[p_segments]),
                            array_fill(decode(repeat('ab', 330), 'hex'), array[p_segments]),
                            array_fill(9000000000000000000, array[p_segments]), array_fill(2147483647, array[p_segments]), null);
                    end if;
                    commit;
                end loop;
            end $$",
        )
        .await
}

/// Pushes `commits` times `segments` segments, and returns how many updates of partitions there were and how many of
/// them left the HOT path.
pub async fn push_in_sql(client: &Client, with_stamps: bool, commits: i32, segments: i32) -> Result<(i64, i64), Error> {
    let trigger = if with_stamps { "enable" } else { "disable" };
    client.batch_execute(&format!("alter table queen.log_partitions {trigger} trigger note_stamp_missing")).await?;
    let counts = "select pg_stat_get_tuples_updated('queen.log_partitions'::regclass),
        pg_stat_get_tuples_hot_updated('queen.log_partitions'::regclass)";
    let flush = "select pg_stat_force_next_flush()";
    client.batch_execute(flush).await?;
    let before = client.query_one(counts, &[]).await?;
    client.batch_execute(&format!("call ebbtide_bench.push({with_stamps}, {commits}, {segments})")).await?;
    client.batch_execute(flush).await?;
    let after = client.query_one(counts, &[]).await?;
    client.batch_execute("alter table queen.log_partitions enable trigger note_stamp_missing").await?;
    let grown = |column: usize| after.get::<_, i64>(column) - before.get::<_, i64>(column);
    Ok((grown(0), grown(0) - grown(1)))
}

pub async fn remove(client: &Client) -> Result<(), Error> {
    client.batch_execute("drop schema if exists ebbtide_bench cascade").await
}

/// Milliseconds that one step of the only partition of a queue takes in the database, and what it deleted.
pub async fn step_cost(client: &Client, queue: Uuid, rows_max: i32) -> Result<(f64, i64), Error> {
    let query = "explain (analyze, timing off, format json)
        select queen.log_retention_step_v1(p.id, now() - interval '1 hour', null, $2)
          from queen.log_partitions p where p.queue_id = $1";
    let value: Value = client.query_one(query, &[&queue, &rows_max]).await?.get(0);
    let count = "select messages_deleted::bigint from queen.retention_history where queue_id = $1
        order by executed_at desc limit 1";
    let deleted: i64 = client.query_one(count, &[&queue]).await?.get(0);
    Ok((value[0]["Execution Time"].as_f64().unwrap_or(f64::NAN), deleted))
}

/// Bytes of the segments' table with its toast, and of the live blobs in it.
pub async fn table_and_live_bytes(client: &Client) -> Result<(f64, f64), Error> {
    let query = "select pg_table_size('queen.log_segments')::float8,
        (select coalesce(sum(octet_length(blob) + 80), 0) from queen.log_segments)::float8";
    let row = client.query_one(query, &[]).await?;
    Ok((row.get(0), row.get(1)))
}

/// Opens a snapshot that stays as it is until the session ends.
pub async fn hold_snapshot(client: &Client) -> Result<(), Error> {
    client.batch_execute("begin isolation level repeatable read; select 1 from queen.queues limit 1").await
}
