"""The client's single moves: retries, leases, transactions, duplicates, buffers, payloads, deletion."""

import asyncio

import httpx

from harness import check, same, text, until


async def pop(client, queue, partition="Default", group=None, batch=10, wait=False):
    builder = client.queue(queue).partition(partition).batch(batch).partitions(10).wait(wait).timeout_millis(1000)
    if group:
        builder = builder.group(group).subscription_mode("all")
    return await builder.pop()


@check
async def a_raising_handler_is_retried_then_dead_lettered(bench):
    queue = "interop-raising"
    await bench.client.queue(queue).config({"retry_limit": 2, "lease_time": 30}).create()
    await bench.client.queue(queue).push([{"transactionId": f"r{n}", "data": {"n": n}} for n in range(20)])
    deliveries, done, stop = [], [], asyncio.Event()

    async def handler(message):
        deliveries.append(message["data"]["n"])
        if message["data"]["n"] == 7:
            raise ValueError("seven will not do")
        done.append(message["data"]["n"])
        if len(done) == 19:
            stop.set()

    await (
        bench.client.queue(queue).group("g").subscription_mode("all").each().batch(20)
        .timeout_millis(500).consume(handler, signal=stop)
    )
    same(done, [n for n in range(20) if n != 7], "handled, in order")
    same(deliveries.count(7), 3, "deliveries of the failing message")
    dead = (await bench.client.queue(queue).dlq("g").get())["messages"]
    same([one["data"] for one in dead], [{"n": 7}], "dead letters")
    assert "seven will not do" in dead[0]["errorMessage"], dead[0]


@check
async def an_expired_lease_is_redelivered_and_a_renewed_one_is_not(bench):
    queue = "interop-leases"
    await bench.client.queue(queue).config({"lease_time": 2}).create()
    for lane in ("kept", "lost"):
        await bench.client.queue(queue).partition(lane).push({"transactionId": lane, "data": {"lane": lane}})
    [kept] = await pop(bench.client, queue, "kept")
    [lost] = await pop(bench.client, queue, "lost")
    same(await pop(bench.client, queue, "lost"), [], "pop of a leased partition")
    renewed = await bench.client.renew(kept)
    same(renewed["success"], True, "renewal")
    assert renewed["newExpiresAt"], renewed

    # The lease that was not renewed comes back; seeing that proves that the time has passed for both.
    [again] = await until("the lost lease is redelivered", lambda: pop(bench.client, queue, "lost"))
    same(again["id"], lost["id"], "message delivered again")
    assert again["leaseId"] != lost["leaseId"], "a redelivery is a new lease"
    same(await pop(bench.client, queue, "kept"), [], "pop of the renewed lease")

    late = await bench.client.ack(lost)
    same(late["success"], False, "ack under the expired lease")
    assert "invalid or expired lease" in late["error"].lower(), late
    same((await bench.client.ack(again))["success"], True, "ack under the new lease")
    same((await bench.client.ack(kept))["success"], True, "ack under the renewed lease")
    same(await pop(bench.client, queue), [], "nothing is left")


@check
async def a_consumer_renews_while_its_handler_works(bench):
    queue = "interop-renewing"
    await bench.client.queue(queue).config({"lease_time": 1}).create()
    await bench.client.queue(queue).partition("slow").push({"transactionId": "slow", "data": {"n": 1}})
    await bench.client.queue(queue).partition("clock").push({"transactionId": "clock", "data": {"n": 2}})
    [first] = await pop(bench.client, queue, "clock")
    handled = []

    async def handler(message):
        # The other partition's lease is as short and is not renewed; its return is the clock of this check.
        [again] = await until("the short lease is redelivered", lambda: pop(bench.client, queue, "clock"))
        same(again["id"], first["id"], "message of the clock")
        handled.append(message)

    await (
        bench.client.queue(queue).partition("slow").batch(1).renew_lease(True, 200).limit(1).consume(handler)
    )
    same(len(handled), 1, "deliveries to the slow handler")
    same(await pop(bench.client, queue, "slow"), [], "the slow message after its ack")


@check
async def a_transaction_acks_and_pushes_together_or_not_at_all(bench):
    source, sink = "interop-stage-one", "interop-stage-two"
    await bench.client.queue(source).config({"lease_time": 60}).create()
    await bench.client.queue(sink).create()
    await bench.client.queue(source).push([{"transactionId": "in-1", "data": 1}, {"transactionId": "in-2", "data": 2}])
    first, second = await pop(bench.client, source)

    forged = {**first, "leaseId": "00000000-0000-7000-8000-000000000000"}
    failure = None
    try:
        await bench.client.transaction().ack(forged).queue(sink).push({"data": "lost"}).commit()
    except Exception as error:
        failure = str(error)
    assert failure and "lease" in failure.lower(), failure
    same(await pop(bench.client, sink), [], "what the refused transaction pushed")

    done = await (
        bench.client.transaction().ack([first, second]).queue(sink).partition("p")
        .push([{"transactionId": "out-1", "data": {"sum": 3}}, {"transactionId": "out-2", "data": None}]).commit()
    )
    same(done["success"], True, "transaction")
    same([one["type"] for one in done["results"]], ["ack", "ack", "push", "push"], "its results")
    same(await pop(bench.client, source), [], "the source afterwards")
    out = await pop(bench.client, sink, "p")
    same([one["transactionId"] for one in out], ["out-1", "out-2"], "what it pushed")
    same([one["data"] for one in out], [{"sum": 3}, None], "payloads it pushed")


@check
async def a_repeated_transaction_id_is_stored_once_a_partition(bench):
    queue = "interop-duplicates"
    lane, other = bench.client.queue(queue).partition("a"), bench.client.queue(queue).partition("b")
    [first] = await lane.push({"transactionId": "same", "data": {"try": 1}})
    [second] = await lane.push({"transactionId": "same", "data": {"try": 2}})
    [apart] = await other.push({"transactionId": "same", "data": {"try": 3}})
    mixed = await lane.push([{"transactionId": name, "data": {"try": 4}} for name in ("same", "new", "new")])
    same([first["status"], second["status"], apart["status"]], ["queued", "duplicate", "queued"], "statuses")
    same(second["message_id"], first["message_id"], "a duplicate answers with the first message's id")
    same([one["status"] for one in mixed], ["duplicate", "queued", "duplicate"], "statuses inside one request")
    same(mixed[2]["message_id"], mixed[1]["message_id"], "id of a duplicate inside one request")
    got = await pop(bench.client, queue, "a")
    same([(one["transactionId"], one["data"]["try"]) for one in got], [("same", 1), ("new", 4)], "stored in a")
    same([one["id"] for one in got], [first["message_id"], mixed[1]["message_id"]], "ids")


@check
async def a_buffered_push_arrives_whole_and_in_order(bench):
    queue = "interop-buffered"
    lane = bench.client.queue(queue).partition("b").buffer({"message_count": 50, "time_millis": 200})
    for n in range(230):
        answer = await lane.push({"transactionId": f"b{n}", "data": {"n": n}})
        same(answer["buffered"], True, "taken by the buffer")
    await lane.flush_buffer()
    got = await pop(bench.client, queue, "b", batch=500)
    same([one["data"]["n"] for one in got], list(range(230)), "buffered messages")


@check
async def a_waiting_pop_is_woken_by_a_push(bench):
    queue = "interop-waiting"
    await bench.client.queue(queue).create()
    waiting = asyncio.create_task(
        bench.client.queue(queue).partition("w").wait(True).timeout_millis(20_000).batch(1).pop()
    )
    # The task must have sent its request; on one connection pool, a later answer proves that the server is up to it.
    await until("the pop waits", lambda: parked(bench))
    await bench.client.queue(queue).partition("w").push({"transactionId": "w", "data": "hello"})
    [message] = await asyncio.wait_for(waiting, 5)
    same(message["data"], "hello", "what the waiting pop got")


async def parked(bench):
    """Two more answers on other connections, by which time the waiting request is in."""
    async with httpx.AsyncClient(base_url=bench.server_url) as raw:
        return all([(await raw.get("/health")).status_code == 200 for _ in range(2)])


ODD_PAYLOADS = [
    b"null", b"0", b"-0", b"1.00", b"1e2", b"1E400", b'""', b"[]", b"{}", b"12345678901234567890123456789",
    b'{"b":1,"a":2,"b":3}', b'"\\u0000"', b'"\\/ \\u00e9 \xc3\xa9"', b'{ "spaced" : [ 1 , 2 ] }',
    b"[" * 60 + b"]" * 60, b'"' + b"x" * 1_000_000 + b'"',
]


@check
async def payload_bytes_come_back_as_sent(bench):
    queue = "interop-bytes"
    async with httpx.AsyncClient(base_url=bench.server_url, timeout=30) as raw:
        for at, payload in enumerate(ODD_PAYLOADS):
            item = b'{"queue":"%s","partition":"p%d","payload":%s}' % (queue.encode(), at, payload)
            pushed = await raw.post("/api/v1/push", content=b'{"items":[' + item + b"]}")
            same(pushed.status_code, 201, f"push of {payload[:40]}: {pushed.text[:200]}")
            popped = await raw.get(f"/api/v1/pop/queue/{queue}/partition/p{at}")
            same(popped.status_code, 200, f"pop of {payload[:40]}")
            assert b'"data":' + payload in popped.content, f"{payload[:60]} came back as {popped.content[:300]}"
            # A dead letter is a copy of its own; it must not lose anything either.
            [message] = popped.json()["messages"]
            buried = await raw.post("/api/v1/ack", json={
                "transactionId": message["transactionId"], "partitionId": message["partitionId"],
                "leaseId": message["leaseId"], "status": "dlq", "error": "on purpose",
            })
            same(buried.json()[0]["dlq"], True, f"dead letter of {payload[:40]}: {buried.text[:200]}")
        listed = await raw.get(f"/api/v1/dlq?queue={queue}&limit=100")
        same(listed.json()["total"], len(ODD_PAYLOADS), "dead letters")
        for payload in ODD_PAYLOADS:
            assert b'"data":' + payload in listed.content, f"{payload[:60]} was changed by its dead letter"


@check
async def a_trace_is_recorded_and_found(bench):
    queue = "interop-traced"
    await bench.client.queue(queue).push({"transactionId": "traced", "data": {}})
    answers = []

    async def handler(message):
        answers.append(await message["trace"]({"traceName": "steps", "data": {"step": 1, "text": "\u0000"}}))
        answers.append(message)

    await bench.client.queue(queue).group("g").subscription_mode("all").batch(1).limit(1).consume(handler)
    recorded, message = answers
    same(recorded["success"], True, f"trace: {recorded}")
    found = await bench.client.admin.get_traces_for_message(message["partitionId"], message["transactionId"])
    [trace] = found["traces"]
    same(trace["data"], {"step": 1, "text": "\u0000"}, "data of the trace")
    same(trace["trace_names"], ["steps"], "names of the trace")


@check
async def a_new_group_starts_as_the_server_is_set(bench):
    queue, history = "interop-subscriptions", ["old"] if bench.subscribe_to_all else []
    await bench.client.queue(queue).push({"transactionId": "old", "data": "old"})
    builder = bench.client.queue(queue).group("late").batch(10).wait(False)
    first = await builder.pop()
    same([one["data"] for one in first], history, "history given to a new group")
    if first:
        await bench.client.ack(first, True, {"group": "late"})
    await bench.client.queue(queue).push({"transactionId": "fresh", "data": "fresh"})
    await bench.client.queue(queue).partition("born-later").push({"transactionId": "fresh", "data": "fresh too"})
    got = []

    async def look():
        got.extend(one["data"] for one in await builder.pop())
        return len(got) >= 2

    await until("both new messages", look)
    same(sorted(got), ["fresh", "fresh too"], "what a new group gets")


@check
async def a_deleted_queue_is_gone_and_forgets_its_ids(bench):
    queue = "interop-deleted"
    [first] = await bench.client.queue(queue).push({"transactionId": "again", "data": 1})
    same(first["status"], "queued", "first push")
    [message] = await pop(bench.client, queue)
    await bench.client.ack(message, "dlq", {"error": "to see it go"})
    same((await bench.client.queue(queue).delete())["deleted"], True, "deletion")
    same((await bench.client.queue(queue).delete())["deleted"], False, "second deletion")
    same((await bench.client.queue(queue).dlq().get())["messages"], [], "dead letters of a deleted queue")
    left = bench.value(
        "select count(*) from queen.log_txns t where not exists"
        " (select 1 from queen.log_partitions p where p.id = t.partition_id)"
    )
    same(left, 0, "sidecar rows without a partition")
    [second] = await bench.client.queue(queue).push({"transactionId": "again", "data": 2})
    same(second["status"], "queued", "the same id in a queue made anew")
    same([one["data"] for one in await pop(bench.client, queue)], [2], "its messages")


@check
async def bad_input_is_refused_by_name(bench):
    async with httpx.AsyncClient(base_url=bench.server_url) as raw:
        for body, field in [
            (b'{"items":[{"payload":1}]}', "queue"),
            (b'{"items":[{"queue":"q"}]}', "payload"),
            (b'{"items":[{"queue":"q\\u0001","payload":1}]}', "queue"),
            (b'{"items":[{"queue":"q","payload":', "bad body"),
            (b'{"items":[{"queue":"q","payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}", ""),
        ]:
            answer = await raw.post("/api/v1/push", content=body)
            same(answer.status_code, 400, f"status for {body[:50]}")
            assert field in answer.json()["error"], answer.text
        missing = await raw.get("/api/v1/nowhere")
        same((missing.status_code, missing.json()["code"]), (404, "no_such_route"), "an unknown route")
    same(text(await bench.client.queue("interop-nowhere").partition("p").wait(False).pop()), "[]", "pop of what does not exist")
