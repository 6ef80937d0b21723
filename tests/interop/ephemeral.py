"""Queues in memory, as the client calls them."""

import asyncio

from queen import Queen
from queen.errors import EphemeralError, EphemeralQueueNotFoundError

from harness import check, same, until


def payloads(popped):
    return [message["payload"] for message in popped["messages"]]


@check
async def ephemeral_messages_are_pushed_popped_and_acked(bench):
    ram, name = bench.client.ephemeral, "ram"
    same(await ram.push(name, [{"n": n} for n in range(3)], partition="a"), {"pushed": 3}, "pushed")
    popped = await ram.pop(name, batch=2, group="g")
    same(payloads(popped), [{"n": 0}, {"n": 1}], "in order")
    first, second = popped["messages"]
    answer = await ram.ack(name, [first, {"id": second["id"], "status": "retry"}], group="g")
    same([result["outcome"] for result in answer["results"]], ["acked", "redelivered"], "outcomes")
    again = await ram.pop(name, batch=10, group="g", auto_ack=True)
    tries = {message["payload"]["n"]: message["attempts"] for message in again["messages"]}
    same(set(tries), {1, 2}, "one of them again")
    same(tries[1] - tries[2], 1, "tries more")
    same((await ram.pop(name, group="g"))["messages"], [], "nothing left")
    depth = await ram.depth(name)
    same(depth["queue"], name, "depth")
    entry = [queue for queue in (await ram.queues())["queues"] if queue["queue"] == name]
    same((len(entry), entry[0]["partitions"]), (1, 1), "listed")


@check
async def an_ephemeral_queue_is_bounded_reset_and_deleted(bench):
    ram, name = bench.client.ephemeral, "ram-bounded"
    made = await ram.configure(name, max_length=2, policy="dropOldest", retry_limit=1)
    same((made["declared"], made["options"]["maxLength"]), (True, 2), "declared")
    same(bench.value("select count(*) from queen.ephemeral_queues where name = %s", name), 1, "its options are stored")
    for n in range(3):
        await ram.push(name, [n], partition="a")
    same(payloads(await ram.pop(name, batch=10, auto_ack=True)), [1, 2], "the oldest went")
    await ram.push(name, [3], partition="a")
    same((await ram.reset(name))["dropped"], 1, "reset")
    await ram.configure(name, max_length=1, policy="reject")
    await ram.push(name, [4], partition="a")
    # The client tries again for seconds, unless it is told not to.
    async with Queen(bench.server_url, retry_429={"max_attempts": 1}) as hasty:
        try:
            await hasty.ephemeral.push(name, [5], partition="a")
        except EphemeralError as error:
            same(error.code, "queue_full", "no room")
        else:
            raise AssertionError("more than the bound was taken")
    gone = await ram.delete(name)
    same((gone["deleted"], gone["declared"]), (True, True), "deleted")
    try:
        await ram.depth(name)
    except EphemeralQueueNotFoundError as error:
        same(error.queue, name, "which one")
    else:
        raise AssertionError("a deleted queue is still there")


@check
async def an_ephemeral_pop_waits_for_a_push(bench):
    ram, name = bench.client.ephemeral, "ram-waits"
    await ram.push(name, ["before"], partition="a")
    await ram.pop(name, auto_ack=True)
    waiting = asyncio.create_task(ram.pop(name, wait=True, timeout_millis=10_000))
    await asyncio.sleep(0.1)
    await ram.push(name, ["now"], partition="a")
    same(payloads(await waiting), ["now"], "woken")


@check
async def buffered_ephemeral_pushes_arrive_in_order(bench):
    ram, name = bench.client.ephemeral, "ram-buffered"
    for n in range(5):
        taken = await ram.push(name, [n], partition="a", buffered={"message_count": 100, "interval_millis": 60_000})
        same(taken, {"buffered": True, "count": 1}, "taken")
    await ram.flush(name, partition="a")

    async def depth():
        return (await ram.depth(name))["pending"] == 5

    await until("all five are there", depth)
    same(payloads(await ram.pop(name, batch=10, auto_ack=True)), list(range(5)), "in order")
