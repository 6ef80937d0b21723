//! Who waits for whom: each wait is seen in `pg_stat_activity` before it is let go, and nobody deadlocks.

mod support;

#[path = "lock_order/riders.rs"]
mod riders;
#[path = "lock_order/writers.rs"]
mod writers;

use serde_json::{Value, json};
use support::partition::Log;
use support::random::Random;
use support::{Broker, wait_until};
use tokio::task::JoinHandle;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;
use uuid::Uuid;
use writers::{QUERY, cycle, push, transact};

type Outcome = Result<Value, tokio_postgres::Error>;

fn names(range: std::ops::Range<usize>) -> Vec<String> {
    range.map(|number| number.to_string()).collect()
}

/// What a session does to queue `q` and its partitions `0`, `1` and `2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Push,
    Transact,
    Cycle,
    ResetQuery,
    Retain,
    Purge,
    Evict,
    Cleanup,
    DeleteQueue,
}

impl Act {
    async fn run(self, client: &Client) -> Outcome {
        let of_1 = "from queen.log_partitions where name = '1'";
        let query = match self {
            Self::Push => return push(client, "q", &["2".into(), "0".into(), "1".into()]).await,
            Self::Transact => return transact(client, "q", &["2".into(), "1".into(), "0".into()]).await,
            Self::Cycle => return cycle(client, "q", &["1".into(), "2".into(), "0".into()]).await,
            Self::ResetQuery => "select queen.log_streams_register_v1('s', 'q', null, 'other', true)".to_owned(),
            Self::Retain => format!("select queen.log_retention_step_v1(id, now(), now(), 1) {of_1}"),
            Self::Purge => format!("select queen.log_txns_purge_step_v1(id, now(), 1) {of_1}"),
            Self::Evict => format!("select queen.log_evict_max_wait_step_v1(id, now(), 1) {of_1}"),
            Self::Cleanup => "select queen.log_partition_cleanup_step_v1('infinity', 10)".to_owned(),
            Self::DeleteQueue => "select queen.delete_queue_v1('q')".to_owned(),
        };
        // The partition's id is read with the statement's snapshot; a queue that is gone leaves no row.
        Ok(client.query_opt(&query, &[]).await?.map_or(Value::Null, |row| row.get(0)))
    }
}

/// Three partitions with two old messages each; empty ones if only those are of interest.
async fn lanes(log: &Log, empty: bool) {
    log.execute(
        "insert into queen.queues (name) values ('q');
         insert into queen.log_partitions (queue_id, name, created_at, last_write_at)
         select id, n::text, '2020-01-01', '2020-01-02' from queen.queues, generate_series(0, 2) n;
         insert into queen.log_consumers (partition_id, consumer_group, created_at)
         select id, 'g', '2020-01-01' from queen.log_partitions",
    )
    .await;
    stream(log).await;
    if !empty {
        log.execute(
            "insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
             select id, n, n, '2020-01-01', 'x' from queen.log_partitions, generate_series(0, 1) n;
             insert into queen.log_txns (partition_id, base_offset, end_offset, created_at, hashes)
             select id, n, n, '2020-01-01', 'x' from queen.log_partitions, generate_series(0, 1) n;
             update queen.log_partitions set last_offset = 1;
             update queen.log_consumers set batch_end = 1, worker_id = 'w', lease_expires_at = now() + interval '1 hour'
             from queen.log_partitions p where p.id = partition_id and p.name = '1'",
        )
        .await;
    }
}

async fn stream(log: &Log) {
    let insert = "insert into queen_streams.queries (id, name, config_hash) values ($1, 's', 'hash')";
    log.sql.execute(insert, &[&QUERY]).await.expect("query");
}

/// Starts `act` in a session named `b`, and returns once it waits for a lock.
async fn blocked(log: &Log, act: Act) -> JoinHandle<Outcome> {
    let client = log.database.target.connect("b").await.expect("connects");
    let task = tokio::spawn(async move { act.run(&client).await });
    is_blocked(log, "b").await;
    task
}

async fn is_blocked(log: &Log, name: &str) {
    let query = "select exists (select from pg_stat_activity
        where datname = current_database() and application_name = $1 and wait_event_type = 'Lock')";
    wait_until(&log.sql, &format!("{name} waits for a lock"), query, &[&name]).await;
}

/// `first` holds its locks while `second` starts, waits, and goes on when `first` commits.
async fn waits(first: Act, second: Act, empty: bool) -> Outcome {
    let log = Log::start().await;
    lanes(&log, empty).await;
    let a = log.database.client().await;
    a.batch_execute("begin").await.expect("begins");
    first.run(&a).await.unwrap_or_else(|error| panic!("{first:?}: {error:?}"));
    let second = blocked(&log, second).await;
    a.batch_execute("commit").await.expect("commits");
    second.await.expect("no panic")
}

#[tokio::test]
async fn pushes_and_steps_wait_for_each_other_and_both_end() {
    for writer in [Act::Push, Act::Transact, Act::Cycle] {
        for step in [Act::Retain, Act::Purge, Act::Evict] {
            for (first, second) in [(writer, step), (step, writer)] {
                let outcome = waits(first, second, false).await;
                assert!(outcome.is_ok(), "{second:?} behind {first:?}: {outcome:?}");
            }
        }
    }
}

#[tokio::test]
async fn a_queue_delete_waits_for_a_step_and_takes_what_is_left() {
    for step in [Act::Retain, Act::Purge, Act::Evict] {
        let deleted = waits(step, Act::DeleteQueue, false).await.expect("deletes");
        assert_eq!(deleted["deleted"], true, "behind {step:?}");
    }
    assert_eq!(waits(Act::Cleanup, Act::DeleteQueue, true).await.expect("deletes")["deleted"], true);
}

#[tokio::test]
async fn a_step_behind_a_queue_delete_finds_nothing_and_is_done() {
    for step in [Act::Retain, Act::Purge, Act::Evict] {
        let answer = waits(Act::DeleteQueue, step, false).await.expect("steps");
        assert_eq!((&answer["deleted"], &answer["done"]), (&json!(0), &json!(true)), "{step:?}: {answer}");
    }
}

#[tokio::test]
async fn a_cycle_and_other_writers_wait_for_each_other_and_both_end() {
    for other in [Act::Push, Act::Transact, Act::ResetQuery, Act::Cycle] {
        for (first, second) in [(Act::Cycle, other), (other, Act::Cycle)] {
            let outcome = waits(first, second, false).await;
            assert!(outcome.is_ok(), "{second:?} behind {first:?}: {outcome:?}");
        }
    }
}

#[tokio::test]
async fn a_queue_delete_behind_a_cycle_takes_its_state_and_one_before_it_ends_it() {
    assert_eq!(waits(Act::Cycle, Act::DeleteQueue, false).await.expect("deletes")["deleted"], true);
    let error = waits(Act::DeleteQueue, Act::Cycle, false).await.expect_err("the source is gone");
    assert_eq!(error.code().expect("an answer of the database").code(), "QN001");
    let log = Log::start().await;
    lanes(&log, false).await;
    Act::Cycle.run(&log.sql).await.expect("a cycle");
    assert_eq!(log.count("select count(*) from queen_streams.state").await, 2);
    Act::DeleteQueue.run(&log.sql).await.expect("deletes");
    assert_eq!(log.count("select count(*) from queen_streams.state").await, 0);
    assert_eq!(log.count("select count(*) from queen_streams.queries").await, 1);
}

#[tokio::test]
async fn cleanup_waits_for_nobody() {
    for other in [Act::Push, Act::Transact, Act::Cycle, Act::Retain, Act::Purge, Act::DeleteQueue] {
        let log = Log::start().await;
        lanes(&log, true).await;
        let a = log.database.client().await;
        a.batch_execute("begin").await.expect("begins");
        other.run(&a).await.unwrap_or_else(|error| panic!("{other:?}: {error:?}"));
        let answer = Act::Cleanup.run(&log.sql).await.expect("cleans up");
        let held = if matches!(other, Act::Retain | Act::Purge) { 1 } else { 3 };
        assert_eq!(answer, json!({"deleted": 3 - held, "done": true}), "beside {other:?}");
        a.batch_execute("commit").await.expect("commits");
    }
}

/// R18: one step, and not the whole backlog behind it.
#[tokio::test]
async fn a_push_waits_for_one_batch_only() {
    let log = Log::start().await;
    let segments: Vec<_> = (0..50).map(|n| (n, n, n)).collect();
    let queue = log.queue("q").await;
    let p = log.partition_of(queue, "0").await.segments(&segments).await;
    let sweeper = log.database.client().await;
    sweeper.batch_execute("begin").await.expect("begins");
    let step = "select queen.log_retention_step_v1(id, now(), null, 10) from queen.log_partitions";
    sweeper.query_one(step, &[]).await.expect("steps");
    let pusher = log.database.target.connect("pusher").await.expect("connects");
    let push = tokio::spawn(async move { push(&pusher, "q", &names(0..1)).await });
    is_blocked(&log, "pusher").await;
    sweeper.batch_execute("commit").await.expect("commits");
    // The next step has not begun, and the push comes to its end.
    push.await.expect("no panic").expect("pushes");
    assert_eq!(p.live().await, (10..=50).collect::<Vec<_>>());
    assert_eq!(p.number("log_start").await, 10);
}

/// C3: a push that resolved the partition just before it was deleted.
#[tokio::test]
async fn a_push_behind_cleanup_is_told_to_try_again_and_makes_a_new_partition() {
    for (act, codes) in
        [(Act::Push, ["QN001", "23503"]), (Act::Transact, ["QN001", "23503"]), (Act::Cycle, ["QN001", "23503"])]
    {
        let error = waits(Act::Cleanup, act, true).await.expect_err("the partition is gone");
        let code = error.code().expect("an answer of the database").code().to_owned();
        assert!(codes.contains(&code.as_str()), "{act:?}: {error:?}");
    }
    let log = Log::start().await;
    lanes(&log, true).await;
    let ids = "select array_agg(id order by id) from queen.log_partitions";
    let before: Vec<Uuid> = log.sql.query_one(ids, &[]).await.expect("ids").get(0);
    Act::Cleanup.run(&log.sql).await.expect("cleans up");
    Act::Push.run(&log.sql).await.expect("the second try");
    let after: Vec<Uuid> = log.sql.query_one(ids, &[]).await.expect("ids").get(0);
    assert_eq!(after.len(), 3);
    assert!(after.iter().all(|id| !before.contains(id)), "new ids");
    assert_eq!(log.count("select count(*) from queen.log_segments where base_offset = 0").await, 3);
}

/// C3 as a client of the server sees it: it does not.
#[tokio::test]
async fn a_pushing_client_sees_nothing_of_a_cleanup() {
    let broker = Broker::start().await;
    broker.execute("insert into queen.queues (name) values ('q')", &[]).await;
    let insert = "insert into queen.log_partitions (queue_id, name, created_at, last_write_at)
        select id, 'p', '2020-01-01', '2020-01-02' from queen.queues returning id";
    let old: Uuid = broker.row(insert, &[]).await.get(0);
    let sweeper = broker.database.client().await;
    sweeper.batch_execute("begin").await.expect("begins");
    Act::Cleanup.run(&sweeper).await.expect("cleans up");
    let body = json!({"items": [{"queue": "q", "partition": "p", "transactionId": "t", "payload": 1}]});
    let answered = broker.post("/api/v1/push", body);
    let commit = async {
        let query = "select exists (select from pg_stat_activity
            where datname = current_database() and application_name = 'ebbtide' and wait_event_type = 'Lock')";
        wait_until(&broker.sql, "the push waits", query, &[]).await;
        sweeper.batch_execute("commit").await.expect("commits");
    };
    let ((status, answer), ()) = tokio::join!(answered, commit);
    assert_eq!((status, &answer[0]["status"]), (201, &json!("queued")), "{answer}");
    let new: Uuid = broker.row("select id from queen.log_partitions", &[]).await.get(0);
    assert_ne!(old, new);
    assert_eq!(broker.pop_ids("queue/q/partition/p?subscriptionMode=all").await, ["t"]);
}

/// C4: the first cursor of a group needs the partition's row.
#[tokio::test]
async fn a_first_pop_behind_cleanup_comes_back_empty() {
    let broker = Broker::start().await;
    broker.execute("insert into queen.queues (name) values ('q')", &[]).await;
    let insert = "insert into queen.log_partitions (queue_id, name, last_offset, log_start, created_at, last_write_at)
        select id, 'p', 4, 5, '2020-01-01', '2020-01-02' from queen.queues";
    broker.execute(insert, &[]).await;
    let sweeper = broker.database.client().await;
    sweeper.batch_execute("begin").await.expect("begins");
    Act::Cleanup.run(&sweeper).await.expect("cleans up");
    let popped = broker.pop("queue/q/partition/p?consumerGroup=g&subscriptionMode=all");
    let commit = async {
        let query = "select exists (select from pg_stat_activity
            where datname = current_database() and application_name = 'ebbtide' and wait_event_type = 'Lock')";
        wait_until(&broker.sql, "the pop waits", query, &[]).await;
        sweeper.batch_execute("commit").await.expect("commits");
    };
    let ((status, body), ()) = tokio::join!(popped, commit);
    assert!(status == 204 || status == 200 && support::log::ids(&body).is_empty(), "{status} {body}");
}

/// C5: a dead letter filed while its partition is being deleted.
#[tokio::test]
async fn a_dead_letter_behind_cleanup_is_refused_and_leaves_no_orphan() {
    let log = Log::start().await;
    lanes(&log, true).await;
    log.execute("update queen.log_consumers set batch_end = 3, worker_id = 'w', lease_expires_at = '2020-01-02'").await;
    let sweeper = log.database.client().await;
    sweeper.batch_execute("begin").await.expect("begins");
    assert_eq!(Act::Cleanup.run(&sweeper).await.expect("cleans up")["deleted"], 3);
    let worker = log.database.target.connect("worker").await.expect("connects");
    let filing = tokio::spawn(async move {
        let query = "select queen.log_dlq_head_v1(id, 'g', 'w', 2, null, 't', '{}', 'poison')
            from queen.log_partitions where name = '1'";
        worker.query_one(query, &[]).await.map(|row| row.get::<_, Value>(0))
    });
    is_blocked(&log, "worker").await;
    sweeper.batch_execute("commit").await.expect("commits");
    assert_eq!(filing.await.expect("no panic").expect("an answer")["success"], false);
    assert_eq!(log.count("select count(*) from queen.log_dlq").await, 0);
}

/// R19: a cursor that is made while a step deletes what it points at.
#[tokio::test]
async fn a_first_pop_behind_a_step_skips_what_went() {
    let broker = Broker::start().await;
    for age in [300.0, 200.0, 50.0] {
        broker.store_aged("q", "p", 2, age).await;
    }
    let sweeper = broker.database.client().await;
    sweeper.batch_execute("begin").await.expect("begins");
    let step = "select queen.log_retention_step_v1(id, now() - interval '100 seconds', null, 10)
        from queen.log_partitions";
    let answer: Value = sweeper.query_one(step, &[]).await.expect("steps").get(0);
    assert_eq!(answer["deleted"], 2);
    let popped = broker.pop_ids("queue/q/partition/p?consumerGroup=g&subscriptionMode=all");
    let commit = async {
        let query = "select exists (select from pg_stat_activity
            where datname = current_database() and application_name = 'ebbtide' and wait_event_type = 'Lock')";
        wait_until(&broker.sql, "the pop waits", query, &[]).await;
        sweeper.batch_execute("commit").await.expect("commits");
    };
    let (ids, ()) = tokio::join!(popped, commit);
    assert_eq!(ids, ["p-4", "p-5"]);
}

/// R13: what was deleted under a lease can still be acknowledged.
#[tokio::test]
async fn an_acknowledgement_of_deleted_messages_moves_the_cursor() {
    let broker = Broker::start().await;
    let stored = broker.store_aged("q", "p", 2, 300.0).await;
    let (_, body) = broker.pop("queue/q/partition/p?consumerGroup=g&subscriptionMode=all").await;
    let lease = body["messages"][0]["leaseId"].clone();
    let step = "select queen.log_retention_step_v1(id, now(), null, 10)->>'deleted' from queen.log_partitions";
    assert_eq!(broker.row(step, &[]).await.get::<_, String>(0), "1");
    for id in support::log::ids(&body) {
        let ack = json!({"transactionId": id, "partitionId": stored.partition_id, "leaseId": lease,
            "consumerGroup": "g", "status": "completed"});
        let (status, answer) = broker.post("/api/v1/ack", ack).await;
        assert_eq!(status, 200, "{answer}");
    }
    let (committed, ..) = broker.cursor(stored.partition_id, "g").await.expect("a cursor");
    assert_eq!(committed, 1);
}

/// What the writers of the random load did.
#[derive(Default)]
struct Load {
    /// Messages that were pushed to the queue that is not deleted.
    pushed: i64,
    /// Calls that were told to try again, and did.
    retried: u64,
}

const LANES: usize = 64;
const ROUNDS: usize = 25;

/// Pushes to all partitions in another order each time, until it has done so often enough.
async fn write_load(client: Client, mut random: Random, act: Act) -> Load {
    let mut load = Load::default();
    let mut partitions = names(0..LANES);
    for round in 0..ROUNDS {
        // Now and then to the queue that somebody else deletes.
        let queue = if round % 5 == 4 { "doomed" } else { "q" };
        random.shuffle(&mut partitions);
        loop {
            let outcome = match act {
                Act::Transact => transact(&client, queue, &partitions).await,
                Act::Cycle => cycle(&client, queue, &partitions).await,
                _ => push(&client, queue, &partitions).await,
            };
            match outcome {
                Ok(_) => break,
                Err(error) => {
                    let code = error.code().unwrap_or_else(|| panic!("{error:?}"));
                    assert!(["QN001", "23503"].contains(&code.code()), "{error:?}");
                    load.retried += 1;
                }
            }
        }
        if queue == "q" {
            load.pushed += i64::try_from(LANES).expect("few");
        }
    }
    load
}

/// Repeats one statement until it is told to stop, and panics at whatever goes wrong.
async fn sweep_load(client: Client, query: &'static str, stop: tokio_util::sync::CancellationToken) -> u64 {
    let mut times = 0;
    while !stop.is_cancelled() {
        client.query(query, &[]).await.unwrap_or_else(|error| {
            assert_ne!(error.code(), Some(&SqlState::T_R_DEADLOCK_DETECTED), "{query}");
            panic!("{query}: {error:?}")
        });
        times += 1;
    }
    times
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_load_never_deadlocks_and_loses_nothing() {
    const SWEEPS: [&str; 6] = [
        // One partition in each call, as the cycle does it; which one is left to chance.
        "select queen.log_retention_step_v1(
            (select id from queen.log_partitions order by random() limit 1), clock_timestamp(), null, 3)",
        "select queen.log_retention_step_v1(
            (select id from queen.log_partitions order by random() limit 1), null, clock_timestamp(), 3)",
        "select queen.log_txns_purge_step_v1(
            (select id from queen.log_partitions order by random() limit 1), clock_timestamp(), 3)",
        "select queen.log_partition_cleanup_step_v1(now() + interval '1 hour', 10)",
        "select queen.delete_queue_v1('doomed')",
        "select queen.log_streams_register_v1('s', 'q', null, 'hash', true)",
    ];
    let mut random = Random::seeded();
    let log = Log::start().await;
    stream(&log).await;
    let stop = tokio_util::sync::CancellationToken::new();
    let mut sweepers = Vec::new();
    for query in SWEEPS {
        let client = log.database.client().await;
        sweepers.push(tokio::spawn(sweep_load(client, query, stop.clone())));
    }
    let mut writers = Vec::new();
    for act in [Act::Push, Act::Push, Act::Transact, Act::Cycle] {
        let client = log.database.client().await;
        writers.push(tokio::spawn(write_load(client, Random::from_seed(random.next()), act)));
    }
    let mut total = Load::default();
    for writer in writers {
        let load = writer.await.expect("no deadlock");
        total.pushed += load.pushed;
        total.retried += load.retried;
    }
    stop.cancel();
    for sweeper in sweepers {
        assert!(sweeper.await.expect("no deadlock") > 0, "every sweeper had its turn");
    }
    let left = log
        .count(
            "select coalesce(sum(s.end_offset - s.base_offset + 1), 0)::bigint from queen.log_segments s
             join queen.log_partitions p on p.id = s.partition_id join queen.queues q on q.id = p.queue_id
             where q.name = 'q'",
        )
        .await;
    let gone = log
        .count(
            "select coalesce(sum(h.messages_deleted), 0)::bigint from queen.retention_history h
             join queen.queues q on q.id = h.queue_id where q.name = 'q'",
        )
        .await;
    assert_eq!(left + gone, total.pushed, "{} retried, {gone} deleted, {left} left", total.retried);
    assert!(gone > 0, "something was deleted meanwhile");
    println!("{} pushed, {gone} deleted by steps, {} calls tried again", total.pushed, total.retried);
    let broken = "select count(*) from queen.log_partitions p
        where p.log_start is distinct from coalesce(
            (select min(s.base_offset) from queen.log_segments s where s.partition_id = p.id), p.last_offset + 1)";
    assert_eq!(log.count(broken).await, 0, "each watermark is the first live base");
    let orphans = "select count(*) from queen.log_txns t
        where not exists (select from queen.log_partitions p where p.id = t.partition_id)";
    assert_eq!(log.count(orphans).await, 0);
}
