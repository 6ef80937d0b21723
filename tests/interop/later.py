"""Key/value and timers as the client calls them, alone and in transactions."""

import asyncio
from datetime import datetime, timedelta, timezone

from queen.errors import KvError, TimerError

from harness import check, same, until

NS = "interop"


async def popped(client, queue, partition="Default"):
    builder = client.queue(queue).partition(partition).batch(100).wait(False).group("g").subscription_mode("all")
    return await builder.pop()


@check
async def a_key_is_put_read_and_deleted(bench):
    kv = bench.client.kv
    assert not await kv.get(NS, "single"), "nothing there"
    value = {"b": [1, None, "é"], "a": 1.5}
    first = await kv.put(NS, "single", value, ttl_seconds=60)
    assert first, first
    read = await kv.get(NS, "single")
    same((read["found"], read["value"], read["version"]), (True, value, first["version"]), "read")
    assert read["expiresAt"] and read["updatedAt"], read
    refused = await kv.put(NS, "single", 2, forever=True, expect=first["version"] + 1)
    same((refused["applied"], refused["reason"], refused["value"]), (False, "version", value), "wrong version")
    second = await kv.put(NS, "single", None, ttl=timedelta(minutes=1), expect=first["version"])
    assert second and second["version"] > first["version"], second
    read = await kv.get(NS, "single")
    same((read["found"], read["value"]), (True, None), "a stored null")
    until_time = datetime.now(timezone.utc) + timedelta(hours=1)
    assert await kv.put(NS, "single", 1, until=until_time)
    same((await kv.put(NS, "created", 1, forever=True, expect=7))["reason"], "absent", "a pure update")
    assert not await kv.get(NS, "created"), "which creates nothing"
    assert await kv.put(NS, "created", 1, forever=True, expect=0)
    assert not await kv.delete(NS, "single", expect=1)
    assert await kv.delete(NS, "single")
    same((await kv.delete(NS, "single"))["reason"], "absent", "deleted twice")


@check
async def lists_and_pages_of_keys(bench):
    kv = bench.client.kv
    for n in range(25):
        await kv.put(NS, f"list:{n:02}", n, forever=True)
    many = await kv.get_many(NS, ["list:03", "list:none", "list:01"])
    same([row["key"] for row in many["rows"]], ["list:03", "list:01"], "rows, as asked for")
    same((many["missing"], many["truncated"]), (["list:none"], False), "what is missing")
    page = await kv.get_prefix(NS, "list:", limit=10)
    same((len(page["rows"]), page["truncated"], page["nextAfter"]), (10, True, "list:09"), "a page")
    page = await kv.get_prefix(NS, "list:", after="list:19", keys_only=True)
    same(([row["key"] for row in page["rows"]], page["truncated"]), ([f"list:{n}" for n in range(20, 25)], False), "the rest")
    assert "value" not in page["rows"][0], page["rows"][0]
    rows = await kv.list_all(NS, "list:", limit=7)
    same([row["value"] for row in rows], list(range(25)), "all pages")
    same(len(await kv.list_all(NS, "list:", limit=7, max_rows=9)), 9, "as many as asked for")


@check
async def of_many_callers_one_wins_and_sums_are_exact(bench):
    kv = bench.client.kv
    won = await asyncio.gather(*(kv.once(NS, "gate", ttl_seconds=60, value=n) for n in range(20)))
    same(won.count(True), 1, "winners")
    loser = await kv.put_if_absent(NS, "gate", "late", forever=True)
    same((loser["applied"], loser["reason"], loser["value"]), (False, "exists", won.index(True)), "the loser learns the winner")
    await asyncio.gather(*(kv.incr(NS, "sum", ttl_seconds=60) for _ in range(20)))
    same((await kv.get(NS, "sum"))["value"], 20, "sum")
    full = await kv.incr(NS, "sum", delta=1, max=20, ttl_seconds=60)
    same((full["applied"], full["reason"], full["value"]), (False, "limit", 20), "at the limit")
    same((await kv.incr(NS, "sum", delta=-5, min=0, forever=True))["value"], 15, "downwards")
    same((await kv.incr(NS, "list:00", delta=0.5, forever=True))["value"], 0.5, "fractions")


@check
async def an_expired_key_is_gone(bench):
    kv = bench.client.kv
    await kv.put(NS, "short", 1, ttl_seconds=1)
    await until("the key has expired", lambda: absent(kv, "short"))
    assert await kv.put_if_absent(NS, "short", 2, ttl_seconds=60), "it can be claimed again"


async def absent(kv, key):
    return not (await kv.get(NS, key))["found"]


@check
async def a_batch_is_one_transaction(bench):
    kv = bench.client.kv
    results = await kv.batch([kv.op.put(NS, "b1", 1, forever=True), kv.op.get(NS, "b1"), kv.op.incr(NS, "b2", forever=True)])
    same([result.get("value") for result in results], [1, 1, 1], "values in order")
    undone = await kv.batch([kv.op.put(NS, "b3", 1, forever=True), kv.op.put_if_absent(NS, "b1", 2, forever=True, required=True)])
    same(undone, [], "a required operation that did not apply")
    assert not await kv.get(NS, "b3"), "undid the batch"


@check
async def wrong_keys_are_refused_by_code(bench):
    kv = bench.client.kv
    for call, code, status in [
        (kv.get("Bad Namespace", "k"), "kv_bad_request", 400),
        (kv.get(NS, "k" * 513), "kv_bad_request", 400),
        (kv.put(NS, "k", "x" * 70_000, forever=True), "payload_too_large", 413),
        (kv.batch([kv.op.delete(NS, "k"), kv.op.delete(NS, "k")]), "kv_bad_request", 400),
    ]:
        try:
            await call
        except KvError as error:
            same((error.code, error.status), (code, status), "refusal")
        else:
            raise AssertionError(f"no {code}")


@check
async def a_timer_fires_with_the_promised_id(bench):
    timers, queue = bench.client.timers, "interop-timers"
    scheduled = await timers.schedule(queue, "soon/1", {"n": 1.5}, delay_ms=300, partition="p", txn="timer-1")
    same((scheduled["status"], scheduled["txn"]), ("scheduled", "timer-1"), "scheduled")
    built = await bench.client.timer(queue).key("built").payload([1]).after(timedelta(milliseconds=1)).txn("timer-2").schedule()
    assert built, built
    [message] = await until("the timer fires", lambda: popped(bench.client, queue, "p"))
    same((message["id"], message["transactionId"]), (scheduled["messageId"], "timer-1"), "the promise")
    same(message["data"], {"n": 1.5}, "data")
    [message] = await until("the other one fires", lambda: popped(bench.client, queue, "Default"))
    same((message["transactionId"], message["data"]), ("timer-2", [1]), "the built one")
    assert not await timers.peek(queue, "soon/1"), "no row is left"
    gone = await timers.cancel(queue, "soon/1", txn="timer-1")
    same((gone["ok"], gone["status"], gone["txn"]), (False, "absent", "timer-1"), "cancelled too late")


@check
async def timers_are_moved_listed_and_cancelled(bench):
    timers, queue = bench.client.timers, "interop/later"
    batch = [timers.op.schedule(queue, f"k/{n}", n, delay_ms=3_600_000) for n in range(12)]
    same({result["status"] for result in await timers.batch(batch)}, {"scheduled"}, "a batch")
    moved = await timers.reschedule(queue, "k/0", {"moved": True}, delay=timedelta(hours=2))
    same(moved["status"], "rescheduled", "moved")
    seen = await timers.peek(queue, "k/0")
    same((seen["found"], seen["deliverAt"], seen["messageId"]), (True, moved["deliverAt"], moved["messageId"]), "seen")
    same((seen["encrypted"], seen["attempts"], seen["claimed"]), (False, 0, False), "state")
    page = await timers.list(queue, limit=5)
    same((len(page["rows"]), page["truncated"]), (5, True), "a page")
    rows = await timers.list_all(queue, limit=5)
    same([row["timerKey"] for row in rows], sorted(f"k/{n}" for n in range(12)), "all")
    same(len(await timers.list_all(queue, limit=5, max_rows=7)), 7, "as many as asked for")
    cancelled = await timers.cancel(queue, "k/0")
    same((cancelled["ok"], cancelled["status"]), (True, "cancelled"), "cancelled")
    same((await bench.client.timer(queue).key("k/1").cancel())["status"], "cancelled", "by the builder")
    rebuilt = await bench.client.timer(queue).key("k/2").payload(0).after_ms(3_600_000).reschedule()
    same(rebuilt["status"], "rescheduled", "by the builder")
    for row in await timers.list_all(queue):
        await timers.cancel(queue, row["timerKey"])
    same(await timers.list_all(queue), [], "nothing is left")


@check
async def wrong_timers_are_refused_by_code(bench):
    timers = bench.client.timers
    twice = [timers.op.schedule("q", "k", 1, delay_ms=1), timers.op.schedule("q", "k", 2, delay_ms=1)]
    for call, code, status in [
        (timers.batch(twice), "timers_bad_request", 400),
        (timers.schedule("q", "k", b"no json", delay_ms=1), "timers_bad_request", 400),
        (timers.schedule("q", "k", 1, delay=timedelta(days=91)), "timer_horizon_exceeded", 403),
        (timers.schedule("q", "k", "x" * (1 << 20), delay_ms=1), "payload_too_large", 413),
    ]:
        try:
            await call
        except TimerError as error:
            same((error.code, error.status), (code, status), "refusal")
        else:
            raise AssertionError(f"no {code}")


@check
async def riders_commit_with_their_transaction_or_not_at_all(bench):
    client, queue = bench.client, "interop-riders"

    def bundle(n):
        tx = client.transaction().once(NS, "rider-gate", ttl_seconds=60)
        tx.queue(queue).push([{"transactionId": f"rider-{n}", "data": {"n": n}}])
        tx.kv.incr(NS, "rider-sum", forever=True)
        tx.kv.put(NS, "rider-put", n, until=datetime.now(timezone.utc) + timedelta(hours=1))
        tx.kv.get(NS, "rider-put")
        tx.kv.get_many(NS, ["rider-put", "rider-none"])
        tx.kv.delete(NS, "rider-none")
        tx.timer(queue).key(f"rider-{n}").payload({"late": n}).after_ms(1).txn(f"rider-late-{n}").schedule()
        tx.timer(queue).key("rider-none").cancel()
        return tx

    done = await bundle(1).commit()
    same((done["success"], len(done["results"])), (True, 9), "the first bundle")
    refused = await bundle(2).commit()
    same((refused["success"], refused["reason"], refused["failedIndex"]), (False, "kv_precondition", 1), "the second")
    same((await client.kv.get(NS, "rider-sum"))["value"], 1, "counted once")
    seen = []

    async def both():
        messages = await popped(client, queue)
        seen.extend(message["transactionId"] for message in messages)
        # The timer's message may come later, and no pop sees it while these are leased.
        if messages:
            await client.ack(messages, True, {"group": "g"})
        return len(seen) >= 2

    await until("the push and the timer arrive", both)
    same(sorted(seen), ["rider-1", "rider-late-1"], "messages")
    bogus = client.transaction().ack({"transactionId": "none", "partitionId": "00000000-0000-0000-0000-000000000009"})
    bogus.kv.put(NS, "rider-bogus", 1, forever=True)
    try:
        await bogus.commit()
    except Exception as error:
        assert "consumer not found" in str(error), error
    else:
        raise AssertionError("an unknown acknowledgement was accepted")
    assert not await client.kv.get(NS, "rider-bogus"), "nothing of it happened"


@check
async def timers_keep_their_partition_and_move(bench):
    client, queue = bench.client, "interop-timer-lanes"
    hour = timedelta(hours=1)
    alone = client.timer(queue).key("alone").payload({"n": 1}).partition("east").txn("alone-1")
    same((await alone.after(hour).schedule())["status"], "scheduled", "alone")
    tx = client.transaction()
    tx.kv.put_if_absent(NS, "timer-mark", 1, forever=True)
    tx.timer(queue).key("rider").payload({"n": 2}).partition("west").txn("rider-1").after(hour).schedule()
    tx.timer(queue).key("alone").payload({"n": 3}).partition("east").txn("alone-2").after_ms(1).reschedule()
    try:
        tx.kv.get_prefix(NS, "timer-")
    except ValueError as error:
        assert "not allowed inside a transaction" in str(error), error
    else:
        raise AssertionError("the client lets a read without a bound into a transaction")
    assert (await tx.commit())["success"]
    same((await client.kv.get(NS, "timer-mark"))["value"], 1, "put")
    same((await client.timers.peek(queue, "rider"))["partition"], "west", "where the rider will go")

    async def fired():
        return await popped(client, queue, "east")

    messages = await until("the timer that was moved fires", fired)
    same([(message["transactionId"], message["data"]) for message in messages], [("alone-2", {"n": 3})], "as moved")
    await client.timers.cancel(queue, "rider")
