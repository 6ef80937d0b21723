"""Aged rows go, fresh and unread ones stay, and the history says exactly what went."""

import asyncio
import json
import os

from behaviour import pop
from harness import check, same, until
from volume import QUEUE as ORDERS

# Partitions of the big queue whose rows are aged.
AGED_LANES = 120
HOUR = 3600

FRAMES = """
    select q.name,
           coalesce(sum(s.end_offset - s.base_offset + 1) filter (where s.created_at < now() - interval '1 hour'), 0)::int,
           coalesce(sum(s.end_offset - s.base_offset + 1) filter (where s.created_at >= now() - interval '1 hour'), 0)::int
      from queen.queues q
      join queen.log_partitions p on p.queue_id = q.id
      left join queen.log_segments s on s.partition_id = p.id
     where q.name = any(%s) group by q.name"""

HISTORY = """
    select q.name, h.retention_type, sum(h.messages_deleted)::int
      from queen.retention_history h
      join queen.log_partitions p on p.id = h.partition_id
      join queen.queues q on q.id = p.queue_id
     where q.name = any(%s) group by q.name, h.retention_type"""


def age(bench, queue, lanes):
    """Makes rows of these partitions two hours older: what was stored, and the ids kept beside it."""
    with bench.db.transaction():
        for table in ("log_segments", "log_txns"):
            bench.db.execute(
                f"update queen.{table} t set created_at = t.created_at - interval '2 hours'"
                " from queen.log_partitions p join queen.queues q on q.id = p.queue_id"
                " where p.id = t.partition_id and q.name = %s and p.name = any(%s)",
                (queue, lanes),
            )


async def make(bench, queue, options):
    """A queue with ten messages in each of two partitions, one request a message."""
    await bench.client.queue(queue).config(options).create()
    for lane in ("aged", "fresh"):
        for n in range(10):
            await bench.client.queue(queue).partition(lane).push({"transactionId": f"{lane}-{n}", "data": n})


async def read(bench, queue, group, count):
    """Consumes the first messages of the aged partition."""
    messages = await pop(bench.client, queue, "aged", group=group, batch=count)
    same(len(messages), count, f"messages for {group}")
    answer = await bench.client.ack(messages, True, {"group": group})
    same([one["success"] for one in answer["results"]], [True] * count, f"acks of {group}")


@check
async def a_cycle_deletes_what_history_says(bench):
    by_age = {"retention_enabled": True, "retention_seconds": HOUR}
    when_read = {"retention_enabled": True, "completed_retention_seconds": HOUR}
    await make(bench, "interop-by-age", by_age)
    await make(bench, "interop-when-read", when_read)
    await make(bench, "interop-unread", when_read)
    await make(bench, "interop-evicted", {"max_wait_time_seconds": HOUR})
    await make(bench, "interop-not-enabled", {"retention_seconds": HOUR})
    await read(bench, "interop-when-read", "quick", 10)
    await read(bench, "interop-when-read", "slow", 4)
    await bench.client.queue(ORDERS).config({"lease_time": 60, "retry_limit": 2, **when_read}).create()

    small = ["interop-by-age", "interop-when-read", "interop-unread", "interop-evicted", "interop-not-enabled"]
    queues = [*small, ORDERS]
    for queue in small:
        age(bench, queue, ["aged"])
    age(bench, ORDERS, [f"lane-{n:03d}" for n in range(AGED_LANES)])

    expected = {
        ("interop-by-age", "retention", 10),
        ("interop-when-read", "completed_retention", 4),
        ("interop-evicted", "max_wait_time_eviction", 10),
        (ORDERS, "completed_retention", AGED_LANES * 50),
    }
    await until("the history tells of what is due", lambda: set(bench.rows(HISTORY, queues)) >= expected, 60)
    # A cycle that starts afterwards has nothing more to do.
    deleted = await whole_cycle(bench)
    same(set(deleted.values()), {0}, f"deleted by a cycle with nothing to do: {deleted}")
    same(set(bench.rows(HISTORY, queues)), expected, "history")
    same(
        set(bench.rows(FRAMES, queues)),
        {
            ("interop-by-age", 0, 10),
            ("interop-when-read", 6, 10),
            ("interop-unread", 10, 10),
            ("interop-evicted", 0, 10),
            ("interop-not-enabled", 10, 10),
            (ORDERS, 0, 10_000 - AGED_LANES * 50),
        },
        "aged and fresh messages that are left",
    )
    aged_ids = bench.value(
        "select count(*) from queen.log_txns t join queen.log_partitions p on p.id = t.partition_id"
        " join queen.queues q on q.id = p.queue_id"
        " where q.name = any(%s) and t.created_at < now() - interval '1 hour'",
        queues,
    )
    same(aged_ids, 0, "ids kept longer than their window")


@check
async def what_is_left_is_still_delivered(bench):
    got = await pop(bench.client, "interop-when-read", "aged", group="slow", batch=20)
    same([one["data"] for one in got], [4, 5, 6, 7, 8, 9], "unread by the slow group")
    got = await pop(bench.client, "interop-by-age", "fresh", group="any", batch=20)
    same([one["data"] for one in got], list(range(10)), "the fresh partition")
    same(await pop(bench.client, "interop-by-age", "aged", group="any"), [], "the partition that was emptied")
    [again] = await bench.client.queue("interop-by-age").partition("aged").push({"transactionId": "aged-3", "data": "new"})
    same(again["status"], "queued", "an id whose window has passed")
    got = await pop(bench.client, "interop-by-age", "aged", group="any")
    same([one["data"] for one in got], ["new"], "the emptied partition goes on")


# The exit code of a sweep by hand while the server sweeps.
ANOTHER_LEADS = 3


async def whole_cycle(bench):
    """Runs one cycle by hand, once the server's own lets it, and returns what each phase deleted."""

    async def sweep():
        command = [os.environ["INTEROP_EBBTIDE"], "sweep", "--once", "--json", "--database-url", bench.database_url]
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await child.communicate()
        assert child.returncode in (0, ANOTHER_LEADS), f"exit code {child.returncode} of the sweep that said {said}"
        return json.loads(said) if child.returncode == 0 else None

    report = await until("a cycle run by hand", sweep)
    same(report["outcome"], "swept", "outcome of the cycle")
    return {phase["name"]: phase["deleted"] for phase in report["phases"]}
