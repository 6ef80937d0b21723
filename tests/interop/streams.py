"""The client's own streams runtime: windows and gates, to the exact result, also after a runner was killed."""

import asyncio
import uuid

from harness import check, same, until
from queen.streams import Stream, sliding_window_gate, token_bucket_gate

# Event times of the checks, in milliseconds: far from any real clock, and on the boundary of a minute.
EPOCH = 1_700_000_040_000
SECOND = 1000


async def fresh(bench, name):
    """A source and a sink that nobody has used, and the name of a query over them."""
    name = f"interop-stream-{name}-{uuid.uuid4().hex[:8]}"
    await bench.client.queue(name).config({"lease_time": 60}).create()
    return name, f"{name}-out"


async def push(bench, queue, events, partition="p"):
    await bench.client.queue(queue).partition(partition).push([{"data": event} for event in events])


def event(second, **fields):
    return {"at": EPOCH + int(second * SECOND), **fields}


def timed(message):
    """The time of an event, whether the operator hands over the message or what it carries."""
    return (message.get("data") or message)["at"]


def number(message):
    return (message.get("data") or message)["n"]


def stored(bench, queue):
    """How many messages a queue has ever been given."""
    return bench.value(
        "select coalesce(sum(p.last_offset + 1), 0)::int from queen.log_partitions p"
        " join queen.queues q on q.id = p.queue_id where q.name = %s",
        queue,
    )


def unread(bench, queue, query):
    """How many messages of the source the query has not committed."""
    return bench.value(
        "select coalesce(sum(p.last_offset - greatest(coalesce(c.committed, -1), p.log_start - 1)), 0)::int"
        " from queen.log_partitions p join queen.queues q on q.id = p.queue_id"
        " left join queen.log_consumers c on c.partition_id = p.id and c.consumer_group = %s"
        " where q.name = %s",
        f"streams.{query}", queue,
    )


def state_rows(bench, query):
    return bench.value(
        "select count(*)::int from queen_streams.state s join queen_streams.queries q on q.id = s.query_id"
        " where q.name = %s",
        query,
    )


async def read(bench, queue):
    """All payloads of a queue, read by a group of its own."""
    messages = await (
        bench.client.queue(queue).group(f"reader-{uuid.uuid4().hex}").subscription_mode("all")
        .batch(1000).partitions(20).wait(False).pop()
    )
    return [message["data"] for message in messages]


async def run(bench, stream, query, **options):
    """A runner that reads its source from the oldest message, said or by default; its errors are collected on it."""
    errors = []
    mode = None if bench.subscribe_to_all else "all"
    options = {"subscription_mode": mode, "max_wait_millis": 200} | options
    runner = await stream.run(
        query_id=query, url=bench.server_url, on_error=lambda error, context: errors.append((context, error)), **options
    )
    runner.errors = errors
    return runner


def committed(bench, query):
    return bench.value("select max(committed)::int from queen.log_consumers where consumer_group = %s", f"streams.{query}")


def end_lease(bench, query):
    """What would otherwise take as long as the lease."""
    bench.db.execute(
        "update queen.log_consumers set lease_expires_at = now() - interval '1 second' where consumer_group = %s",
        (f"streams.{query}",),
    )


async def kill(runner):
    """Ends a runner as a crash does: nothing is finished, nothing is given back."""
    for task in (runner._loop_task, runner._flush_task):
        if task:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    await runner.http.close()


async def drained(bench, runner, source, results):
    """Waits until the source is read and the sink has its results, then stops the runner; it must not have failed."""
    sink = f"{source}-out"
    await until("the source is read", lambda: unread(bench, source, runner.query_id) == 0)
    await until(f"{results} results", lambda: stored(bench, sink) >= results)
    await runner.stop()
    same(runner.errors, [], "errors of the runner")
    same(stored(bench, sink), results, "results, none doubled")
    return await read(bench, sink)


@check
async def tumbling_windows_sum_exactly(bench):
    source, sink = await fresh(bench, "tumbling")
    await push(bench, source, [event(n / 4, user=f"u{n % 3}", cost=n) for n in range(80)])
    await push(bench, source, [event(100, user=f"u{n}", cost=0) for n in range(3)])
    stream = (
        Stream.from_(bench.client.queue(source))
        .key_by(lambda message: (message.get("data") or message)["user"])
        .window_tumbling(seconds=5, event_time=timed, idle_flush_ms=200)
        .aggregate({"count": lambda _: 1, "sum": lambda m: m["cost"], "min": lambda m: m["cost"], "max": lambda m: m["cost"]})
        .to(bench.client.queue(sink))
    )
    # Small batches: the windows have to survive between cycles.
    runner = await run(bench, stream, source, batch_size=7)
    expected = []
    for window in range(4):
        for user in range(3):
            costs = [n for n in range(80) if n // 20 == window and n % 3 == user]
            expected.append((len(costs), sum(costs), min(costs), max(costs)))
    results = await drained(bench, runner, source, 12)
    same(sorted((r["count"], r["sum"], r["min"], r["max"]) for r in results), sorted(expected), "aggregates")
    same(state_rows(bench, source), 4, "state: three open windows and the watermark")


@check
async def sliding_windows_count_an_event_in_each_that_covers_it(bench):
    source, sink = await fresh(bench, "sliding")
    await push(bench, source, [event(n, n=n) for n in range(12)] + [event(100, n=-1)])
    stream = (
        Stream.from_(bench.client.queue(source))
        .window_sliding(size=4, slide=2, event_time=timed, idle_flush_ms=200)
        .reduce(lambda seen, message: seen + [message["n"]], [])
        .map(lambda value, context: {"from": (context["windowStart"] - EPOCH) // SECOND, "seen": value})
        .to(bench.client.queue(sink))
    )
    runner = await run(bench, stream, source, batch_size=5)
    results = await drained(bench, runner, source, 7)
    expected = {start: [n for n in range(12) if start <= n < start + 4] for start in range(-2, 12, 2)}
    same({result["from"]: result["seen"] for result in results}, expected, "windows")


@check
async def sessions_end_after_their_gap(bench):
    source, sink = await fresh(bench, "session")
    seconds = [0, 1, 2, 10, 11, 30, 31, 33]
    await push(bench, source, [event(second, n=1) for second in seconds] + [event(200, n=0)])
    stream = (
        Stream.from_(bench.client.queue(source))
        .window_session(gap=5, event_time=timed, idle_flush_ms=200)
        .reduce(lambda total, message: total + message["n"], 0)
        .map(lambda value, context: {"from": (context["windowStart"] - EPOCH) // SECOND,
                                     "to": (context["windowEnd"] - EPOCH) // SECOND, "n": value})
        .to(bench.client.queue(sink))
    )
    runner = await run(bench, stream, source, batch_size=2)
    results = await drained(bench, runner, source, 3)
    same(
        sorted((result["from"], result["to"], result["n"]) for result in results),
        [(0, 7, 3), (10, 16, 2), (30, 38, 3)],
        "sessions",
    )


@check
async def cron_windows_end_with_the_minute(bench):
    source, sink = await fresh(bench, "cron")
    await push(bench, source, [event(n * 10, n=n) for n in range(18)] + [event(1000, n=0)])
    stream = (
        Stream.from_(bench.client.queue(source))
        .window_cron(every="minute", event_time=timed, idle_flush_ms=200)
        .aggregate({"sum": lambda message: message["n"], "avg": lambda message: message["n"]})
        .to(bench.client.queue(sink), partition="totals")
    )
    runner = await run(bench, stream, source, batch_size=4)
    results = await drained(bench, runner, source, 3)
    same([(r["sum"], r["avg"]) for r in results], [(15, 2.5), (51, 8.5), (87, 14.5)], "minutes, in order")


@check
async def idle_windows_are_flushed_by_the_clock(bench):
    source, sink = await fresh(bench, "flush")
    await push(bench, source, [{"n": n} for n in range(10)])
    stream = (
        Stream.from_(bench.client.queue(source))
        .window_tumbling(seconds=1, idle_flush_ms=100)
        .reduce(lambda total, message: total + message["n"], 0)
        .to(bench.client.queue(sink))
    )
    runner = await run(bench, stream, source)
    await until("the source is read", lambda: unread(bench, source, source) == 0)
    await until("the window is flushed", lambda: stored(bench, sink) == 1 and state_rows(bench, source) == 0)
    await runner.stop()
    same(runner.errors, [], "errors of the runner")
    same(await read(bench, sink), [{"value": 45}], "sum")


@check
async def a_gate_lets_a_part_through_and_the_rest_comes_again(bench):
    source, sink = await fresh(bench, "gate")
    await push(bench, source, [{"n": n} for n in range(10)])
    seen, held_back = [], set()

    def gate(message, context):
        n = message["n"]
        seen.append(n)
        if n in (3, 6, 9) and n not in held_back:
            held_back.add(n)
            return False
        context.state["allowed"] = context.state.get("allowed", 0) + 1
        return True

    runner = await run(bench, Stream.from_(bench.client.queue(source)).gate(gate).to(bench.client.queue(sink)), source)
    for stop in (3, 6, 9):
        await until(f"{stop} let through", lambda stop=stop: committed(bench, source) == stop - 1)
        same(stored(bench, sink), stop, "results so far")
        end_lease(bench, source)
    results = await drained(bench, runner, source, 10)
    same([result["n"] for result in results], list(range(10)), "let through, once and in order")
    same([n for n in range(10) if seen.count(n) == 2], [3, 6, 9], "held back, and delivered again")
    same(runner.metrics()["gateAllowsTotal"], 10, "let through")
    value = "select s.value::json->>'allowed' from queen_streams.state s join queen_streams.queries q on q.id = s.query_id"
    same(bench.value(f"{value} where q.name = %s", source), "10", "what the gate remembers")


@check
async def messages_are_filtered_split_and_handed_over(bench):
    source, sink = await fresh(bench, "split")
    await push(bench, source, [{"n": n} for n in range(6)])
    stream = Stream.from_queue(bench.client.queue(source)).filter(lambda m: number(m) % 2 == 0)
    stream = stream.flat_map(lambda m: [{"half": number(m) / 2}, {"twice": number(m) * 2}])
    runner = await run(bench, stream.to(bench.client.queue(sink)), source)
    results = await drained(bench, runner, source, 6)
    same(results, [{"half": 0}, {"twice": 0}, {"half": 1}, {"twice": 4}, {"half": 2}, {"twice": 8}], "results")

    handed, query = [], f"{source}-each"
    stream = Stream.from_(bench.client.queue(source)).map(number).foreach(lambda n, *context: handed.append(n))
    runner = await run(bench, stream, query)
    await until("all are handed over", lambda: unread(bench, source, query) == 0)
    await runner.stop()
    same((runner.errors, handed), ([], list(range(6))), "in order, once")


@check
async def a_token_bucket_holds(bench):
    await rate_limited(bench, "bucket", token_bucket_gate(capacity=5, refill_per_sec=0.001))


@check
async def a_limit_in_a_sliding_window_holds(bench):
    await rate_limited(bench, "window", sliding_window_gate(limit=5, window_sec=3600))


async def rate_limited(bench, name, gate):
    """Eight messages through a gate that lets five through."""
    source, sink = await fresh(bench, name)
    await push(bench, source, [{"n": n} for n in range(8)])
    runner = await run(bench, Stream.from_(bench.client.queue(source)).gate(gate).to(bench.client.queue(sink)), source)
    await until("five are through", lambda: committed(bench, source) == 4)
    end_lease(bench, source)
    await until("the rest is delivered again", lambda: runner.metrics().get("gateDenialsTotal", 0) >= 6)
    await runner.stop()
    same([result["n"] for result in await read(bench, sink)], list(range(5)), "let through")
    same(unread(bench, source, source), 3, "held back")


@check
async def a_killed_runner_is_taken_over_and_nothing_doubles(bench):
    source, sink = await fresh(bench, "killed")
    await push(bench, source, [event(n / 10, cost=n) for n in range(300)] + [event(1000, cost=0)])
    reached, never = asyncio.Event(), asyncio.Event()

    def build(stop_at):
        async def costs(message):
            # The runner is killed in the middle of a batch: before its cycle, with the lease held.
            if message["data"]["cost"] == stop_at:
                reached.set()
                await never.wait()
            return message["data"]

        return (
            Stream.from_(bench.client.queue(source))
            .map(costs)
            .window_tumbling(seconds=10, event_time=timed, idle_flush_ms=200)
            .aggregate({"count": lambda _: 1, "sum": lambda message: message["cost"]})
            .to(bench.client.queue(sink))
        )

    first = await run(bench, build(stop_at=157), source, batch_size=20)
    await asyncio.wait_for(reached.wait(), 20)
    await kill(first)
    same(unread(bench, source, source), 301 - 140, "seven batches were committed")
    end_lease(bench, source)
    second = await run(bench, build(stop_at=None), source, batch_size=20)
    results = await drained(bench, second, source, 3)
    same([(r["count"], r["sum"]) for r in results], [(100, 4950), (100, 14950), (100, 24950)], "windows")


@check
async def a_cycle_whose_lease_ran_out_is_refused_whole(bench):
    source, sink = await fresh(bench, "late")
    await push(bench, source, [{"n": n} for n in range(5)])
    deliveries = []

    async def slowly(message):
        deliveries.append(message["data"]["n"])
        if len(deliveries) == 1:
            end_lease(bench, source)
        return message["data"]

    stream = Stream.from_(bench.client.queue(source)).map(slowly).to(bench.client.queue(sink))
    runner = await run(bench, stream, source)
    await until("the source is read", lambda: unread(bench, source, source) == 0)
    await runner.stop()
    same([str(error) for _, error in runner.errors], ["invalid or expired lease"], "errors")
    same([result["n"] for result in await read(bench, sink)], list(range(5)), "results")
    same(deliveries, [0, 1, 2, 3, 4] * 2, "delivered twice, counted once")


@check
async def another_chain_under_the_same_name_needs_a_reset(bench):
    source, sink = await fresh(bench, "reset")
    await push(bench, source, [event(n, n=n) for n in range(4)])

    def build(seconds):
        return (
            Stream.from_(bench.client.queue(source))
            .window_tumbling(seconds=seconds, event_time=timed, idle_flush_ms=200)
            .reduce(lambda total, message: total + message["n"], 0)
            .to(bench.client.queue(sink))
        )

    runner = await run(bench, build(10), source)
    await until("the source is read", lambda: unread(bench, source, source) == 0)
    await runner.stop()
    same(state_rows(bench, source), 2, "an open window and the watermark")
    try:
        await run(bench, build(20), source)
        raise AssertionError("the other chain was taken")
    except Exception as error:
        same(type(error).__name__, "StreamsConfigHashMismatch", f"error {error}")
    same(state_rows(bench, source), 2, "state after the refusal")
    runner = await run(bench, build(20), source, reset=True)
    same(state_rows(bench, source), 0, "state after the reset")
    await runner.stop()


@check
async def a_stream_that_names_no_mode_starts_as_the_server_is_set(bench):
    source, sink = await fresh(bench, "mode")
    await push(bench, source, [{"n": "before"}])
    stream = Stream.from_(bench.client.queue(source)).to(bench.client.queue(sink))
    runner = await run(bench, stream, source, subscription_mode=None)
    group = "select count(*) = 1 from queen.consumer_groups_metadata where consumer_group = %s"
    await until("the group is there", lambda: bench.value(group, f"streams.{source}"))
    await push(bench, source, [{"n": "after"}], partition="another")
    expected = ["before", "after"] if bench.subscribe_to_all else ["after"]
    await until("the source is read", lambda: unread(bench, source, source) == 0)
    await runner.stop()
    same(runner.errors, [], "errors of the runner")
    same(sorted(result["n"] for result in await read(bench, sink)), sorted(expected), "results")
