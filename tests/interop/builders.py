"""The rest of what the client's builders can be told: callbacks, buffers, what a pop was sized by, what it conflates."""

import uuid
from datetime import datetime, timedelta, timezone

from harness import check, same, until


async def push(bench, queue, ids, partition="p"):
    items = [{"transactionId": id, "data": {"id": id}} for id in ids]
    return await bench.client.queue(queue).partition(partition).push(items)


def ids(messages):
    return [message["transactionId"] for message in messages]


@check
async def callbacks_are_told_what_happened(bench):
    name, told = "builders-callbacks", []

    def note(what):
        async def called(*arguments):
            told.append((what, arguments))

        return called

    await bench.client.queue(name).create().on_success(note("created")).on_error(note("not created"))
    bad = bench.client.queue(name).config({"lease_time": "soon"}).create()
    await bad.on_success(note("created")).on_error(note("not created"))
    assert "leaseTime" in str(told[1][1][0]), told[1]

    async def pushed(items, partition="p"):
        builder = bench.client.queue(name).partition(partition).push(items).on_success(note("pushed"))
        await builder.on_duplicate(note("duplicate")).on_error(note("not pushed"))

    await pushed([{"transactionId": "a", "data": 1}])
    await pushed([{"transactionId": "a", "data": 1}, {"transactionId": "b", "data": 2}])
    await pushed([{"transactionId": "c", "data": 3}], "p" * 300)
    same([what for what, _ in told], ["created", "not created", "pushed", "duplicate", "pushed", "not pushed"], "told")
    same([item["transactionId"] for item in told[3][1][0]], ["a"], "the duplicate")

    seen = []

    async def handler(message):
        seen.append(message["transactionId"])
        if message["transactionId"] == "b":
            raise ValueError("no b")
        return "done"

    async def succeeded(message, result):
        seen.append(result)
        await bench.client.ack(message, True, {"group": "g"})

    async def failed(message, error):
        seen.append(str(error))
        await bench.client.ack(message, "dlq", {"group": "g", "error": str(error)})

    consumer = bench.client.queue(name).partition("p").group("g").subscription_mode("all").batch(1).each().limit(2)
    await consumer.idle_millis(5000).consume(handler).on_success(succeeded).on_error(failed)
    same(seen, ["a", "done", "b", "no b"], "handled")
    same((await bench.client.queue(name).dlq("g").get())["messages"][0]["errorMessage"], "no b", "the dead letter")


@check
async def buffers_are_counted_and_flushed_together(bench):
    before = bench.client.get_buffer_stats()["totalBufferedMessages"]
    for n in range(3):
        for queue in ("builders-buffer-a", "builders-buffer-b"):
            buffered = bench.client.queue(queue).partition("p").buffer({"message_count": 100, "time_millis": 60_000})
            await buffered.push({"transactionId": f"m{n}", "data": n})
    same(bench.client.get_buffer_stats()["totalBufferedMessages"], before + 6, "kept by the client")
    await bench.client.flush_all_buffers()
    for queue in ("builders-buffer-a", "builders-buffer-b"):
        builder = bench.client.queue(queue).partition("p").group("g").subscription_mode("all").batch(10)
        same(ids(await builder.wait(False).pop()), ["m0", "m1", "m2"], queue)


@check
async def a_pop_is_sized_by_the_server_unless_it_says(bench):
    name = "builders-autopilot"
    await push(bench, name, ["a", "b"])
    builder = bench.client.queue(name).group("g").subscription_mode("all").wait(False)
    sized = await builder.autopilot().pop_result()
    same(sorted(ids(sized.messages)), ["a", "b"], "found")
    assert 1 <= sized.autopilot.partitions and 1 <= sized.autopilot.batch, sized.autopilot
    told = bench.client.queue(name).group("told").subscription_mode("all").wait(False)
    told = await told.autopilot().batch(1).pop_result()
    same((told.autopilot.batch, len(told.messages)), (1, 1), "as it was told")
    off = bench.client.queue(name).group("off").subscription_mode("all").wait(False).autopilot(False).batch(10)
    off = await off.pop_result()
    same((off.autopilot, len(off.messages)), (None, 2), "switched off")


@check
async def a_conflating_group_gets_the_newest(bench):
    name = "builders-conflation"
    await push(bench, name, ["a", "b", "c"])
    builder = bench.client.queue(name).partition("p").group("g").subscription_mode("all").conflation().batch(10)
    newest = await builder.wait(False).pop()
    same(ids(newest), ["c"], "the newest alone")
    await bench.client.ack(newest[0], True, {"group": "g"})
    depth = await bench.client.admin.get_queue_depth(name, "g")
    same((depth["conflation"], depth["pending"]), (True, 0), "what is behind it is retired")


@check
async def a_namespace_and_a_task_find_their_queues(bench):
    mark = uuid.uuid4().hex[:8]
    for name, task in (("one", "mail"), ("two", "mail"), ("three", "print")):
        queue = bench.client.queue(f"builders-{name}-{mark}").namespace(f"shop-{mark}").task(f"{task}-{mark}")
        await queue.create()
        await push(bench, f"builders-{name}-{mark}", [name])

    async def found(builder):
        sized = builder.group("g").subscription_mode("all").batch(10).partitions(10).wait(False)
        return sorted(ids(await sized.pop()))

    same(await found(bench.client.queue().task(f"print-{mark}")), ["three"], "by the task")
    same(await found(bench.client.queue().namespace(f"shop-{mark}")), ["one", "two"], "the others by the namespace")
    both = bench.client.queue().namespace(f"shop-{mark}").task(f"mail-{mark}")
    same(await found(both), [], "and all are taken")


@check
async def a_group_may_start_at_a_time(bench):
    name = "builders-from"
    await push(bench, name, ["old"])
    bench.rows(
        "update queen.log_segments set created_at = created_at - interval '1 hour' where partition_id ="
        " (select p.id from queen.log_partitions p join queen.queues q on q.id = p.queue_id where q.name = %s)"
        " returning 1", name
    )
    await push(bench, name, ["young"])
    since = (datetime.now(timezone.utc) - timedelta(minutes=30)).isoformat()
    builder = bench.client.queue(name).partition("p").group("g").subscription_from(since).batch(10).wait(False)
    same(ids(await builder.pop()), ["young"], "from that time on")


@check
async def messages_wait_for_their_delay_and_for_their_window(bench):
    async def seen(name, options, ids_pushed):
        await bench.client.queue(name).config(options).create()
        await push(bench, name, ids_pushed)
        builder = bench.client.queue(name).partition("p").group("g").subscription_mode("all").batch(10).wait(False)
        same(ids(await builder.pop()), [], f"{name}: not yet")
        bench.rows(
            "update queen.log_segments set created_at = created_at - interval '1 hour' where partition_id ="
            " (select p.id from queen.log_partitions p join queen.queues q on q.id = p.queue_id where q.name = %s)"
            " returning 1", name
        )

        async def come():
            return ids(await builder.pop()) == ids_pushed

        await until(f"{name}: an hour later they are delivered", come)

    await seen("builders-delayed", {"delayed_processing": 600}, ["a", "b"])
    await seen("builders-window", {"window_buffer": 600}, ["a", "b"])
