"""What an operator sees and does through the client's admin methods."""

import uuid
from datetime import datetime, timedelta, timezone

import httpx

from harness import check, same, until


async def refused(call, status):
    try:
        answer = await call
    except httpx.HTTPStatusError as error:
        same(error.response.status_code, status, "status")
        return error
    raise AssertionError(f"expected {status}, got {answer}")


def by_name(listed, name, key="name"):
    found = [entry for entry in listed if entry[key] == name]
    same(len(found), 1, f"entries of {name}")
    return found[0]


async def lane(bench, name, count=6):
    """A queue of `count` messages m0, m1, ... in its partition p, of a namespace and a task of its own."""
    queue = bench.client.queue(name).namespace(f"{name}-ns").task(f"{name}-task")
    await queue.config({"retry_limit": 1}).create()
    items = [{"transactionId": f"m{n}", "data": {"n": n}} for n in range(count)]
    await bench.client.queue(name).partition("p").push(items)
    return str(bench.value(
        "select p.id from queen.log_partitions p join queen.queues q on q.id = p.queue_id where q.name = %s", name
    ))


async def leased(bench, name, count, group="g"):
    builder = bench.client.queue(name).partition("p").group(group).subscription_mode("all")
    return await builder.batch(count).wait(False).pop()


def committed(bench, name, group="g"):
    return bench.value(
        "select c.committed from queen.log_consumers c join queen.log_partitions p on p.id = c.partition_id"
        " join queen.queues q on q.id = p.queue_id where q.name = %s and c.consumer_group = %s", name, group
    )


@check
async def the_lists_say_what_is_there(bench):
    admin, name = bench.client.admin, "admin-lists"
    pid = await lane(bench, name)
    first, second = await leased(bench, name, 2)
    await bench.client.ack(first, True, {"group": "g"})
    counts = {"total": 6, "pending": 5}
    for listed, key in ((await admin.get_namespaces(), "namespace"), (await admin.get_tasks(), "task")):
        entry = by_name(listed[f"{key}s"], f"{name}-{'ns' if key == 'namespace' else 'task'}", key)
        same((entry["queues"], entry["partitions"], entry["messages"]), (1, 1, counts), key)
    overview = await admin.get_overview()
    same(overview["queues"], bench.value("select count(*) from queen.queues"), "queues of the overview")
    entry = by_name((await admin.list_queues(limit=10000))["queues"], name)
    same((entry["namespace"], entry["messages"]["total"]), (f"{name}-ns", 6), "the queue in the list")
    page = await admin.list_queues(limit=1, offset=overview["queues"])
    same((page["queues"], page["total"]), ([], overview["queues"]), "the page after the last one")
    queue = await admin.get_queue(name)
    same((queue["partitions"][0]["id"], queue["options"]["retryLimit"]), (pid, 1), "the queue")
    same((await admin.get_queue_depth(name, "g"))["pending"], 5, "what the group has left")
    same((await admin.get_queue_depth(name, "nobody"))["pending"], 6, "what a new group would have")
    listed = await admin.get_partitions(queue=name)
    same((listed["total"], listed["partitions"][0]["name"]), (1, "p"), "the partitions")
    await refused(admin.get_queue("admin-none"), 404)
    await bench.client.ack(second, True, {"group": "g"})


@check
async def messages_are_listed_read_moved_retried_and_deleted(bench):
    admin, name = bench.client.admin, "admin-messages"
    pid = await lane(bench, name)
    listed = await admin.list_messages(queue=name, limit=2)
    same([message["transactionId"] for message in listed["messages"]], ["m5", "m4"], "the newest two")
    same((await admin.get_message(pid, "m3"))["data"], {"n": 3}, "one message")
    await refused(admin.get_message(pid, "m9"), 404)
    # The call names no group, so it is the queue mode's message that moves.
    first = (await bench.client.queue(name).partition("p").batch(1).wait(False).pop())[0]
    same(first["transactionId"], "m0", "delivered")
    await bench.client.ack(first, True)
    await admin.move_message_to_dlq(pid, "m1")
    dead = await bench.client.queue(name).dlq().get()
    same([message["transactionId"] for message in dead["messages"]], ["m1"], "dead letters")
    await admin.retry_message(pid, "m1")
    same((await bench.client.queue(name).dlq().get())["total"], 0, "nothing is dead any more")
    again = await admin.list_messages(queue=name, limit=1)
    same((again["messages"][0]["data"]), {"n": 1}, "it is pushed again, at the end")
    await admin.move_message_to_dlq(pid, "m2")
    same((await admin.delete_message(pid, "m2"))["deleted"], 1, "deleted for good")
    await refused(admin.retry_message(pid, "m2"), 404)


@check
async def dead_letters_are_filtered_by_time_and_page(bench):
    name = "admin-dead"
    await lane(bench, name, 3)
    for _ in range(3):
        message = (await leased(bench, name, 1))[0]
        await bench.client.ack(message, "dlq", {"group": "g", "error": "no good"})
    dead = bench.client.queue(name)
    now = datetime.now(timezone.utc)
    before, after = (now - timedelta(minutes=5)).isoformat(), (now + timedelta(minutes=5)).isoformat()
    same((await dead.dlq("g").from_(before).to(after).get())["total"], 3, "between")
    same((await dead.dlq("g").to(before).get())["total"], 0, "before")
    same((await dead.dlq("g").from_(after).get())["total"], 0, "after")
    page = await dead.dlq("g").limit(2).offset(2).get()
    same((len(page["messages"]), page["total"]), (1, 3), "the second page")


@check
async def groups_are_seen_sought_and_deleted(bench):
    admin, name, group = bench.client.admin, "admin-groups", "admin-group"
    await lane(bench, name)
    message = (await leased(bench, name, 1, group))[0]
    await bench.client.ack(message, True, {"group": group})
    entry = by_name(await admin.list_consumer_groups(), group)
    same((entry["topics"], entry["totalLag"], entry["subscriptionMode"]), ([name], 5, "all"), "the group in the list")
    detail = await admin.get_consumer_group(group)
    same(detail[name]["partitions"][0]["offsetLag"], 5, "the group")
    bench.rows(
        "update queen.log_segments set created_at = now() - interval '1 hour' where partition_id ="
        " (select p.id from queen.log_partitions p join queen.queues q on q.id = p.queue_id where q.name = %s)"
        " returning 1", name
    )
    lagging = by_name(await admin.get_lagging_consumers(60), group, "consumer_group")
    same((lagging["queue_name"], lagging["offset_lag"]), (name, 5), "behind by more than a minute")
    assert not [row for row in await admin.get_lagging_consumers(7200) if row["consumer_group"] == group]

    end = await admin.seek_consumer_group(group, name, {"toEnd": True})
    same((end["partitionsUpdated"], end["clamped"], committed(bench, name, group)), (1, False, 5), "to the end")
    start = await admin.seek_consumer_group(group, name, {"timestamp": "2020-01-01T00:00:00Z"})
    same((start["clamped"], committed(bench, name, group)), (True, -1), "to before the start")
    same(len(await leased(bench, name, 10, group)), 6, "all of it again")

    moved = await bench.client.update_consumer_group_timestamp(group, "2026-01-01T00:00:00Z")
    same(moved["rowsUpdated"], 1, "its subscription")
    gone = await admin.delete_consumer_group_for_queue(group, name)
    same((gone["deletedPartitions"], gone["metadataDeleted"]), (1, True), "deleted for the queue")
    await leased(bench, name, 1, group)
    gone = await bench.client.delete_consumer_group(group)
    same((gone["deletedPartitions"], gone["metadataDeleted"]), (1, True), "deleted everywhere")
    assert group not in [entry["name"] for entry in await admin.list_consumer_groups()]


@check
async def a_deleted_group_starts_as_the_server_is_set(bench):
    name = "admin-anew"
    await lane(bench, name, 2)
    first = await leased(bench, name, 2, "anew")
    same(len(first), 2, "from the oldest")
    await bench.client.delete_consumer_group("anew")
    builder = bench.client.queue(name).partition("p").group("anew").batch(10).wait(False)
    same(len(await builder.pop()), 2 if bench.subscribe_to_all else 0, "as the server is set")


@check
async def a_cleared_queue_is_empty_and_goes_on(bench):
    name = "admin-clear"
    await lane(bench, name)
    same((await bench.client.admin.clear_queue(name, "p"))["messagesDeleted"], 6, "one partition")
    await bench.client.queue(name).partition("p").push([{"transactionId": "later", "data": 1}])
    same((await bench.client.admin.clear_queue(name))["messagesDeleted"], 1, "all of it")
    await bench.client.queue(name).partition("p").push([{"transactionId": "last", "data": 1}])
    same([message["transactionId"] for message in await leased(bench, name, 10)], ["last"], "what came after")


@check
async def traces_are_found_by_name_and_message(bench):
    admin, name, mark = bench.client.admin, "admin-traces", f"mark-{uuid.uuid4()}"
    pid = await lane(bench, name, 1)

    async def handler(message):
        await message["trace"]({"traceName": mark, "data": {"step": 1}})

    consumer = bench.client.queue(name).partition("p").group("g").subscription_mode("all").batch(1).limit(1)
    await consumer.idle_millis(5000).each().consume(handler)
    found = await admin.get_traces_by_name(mark)
    same((found["total"], found["traces"][0]["transaction_id"]), (1, "m0"), "by its name")
    assert mark in [entry["trace_name"] for entry in (await admin.get_trace_names(limit=1000))["trace_names"]]
    same(len((await admin.get_traces_for_message(pid, "m0"))["traces"]), 1, "by its message")


@check
async def the_numbers_of_the_dashboard(bench):
    admin, name = bench.client.admin, "admin-numbers"
    await lane(bench, name)
    await leased(bench, name, 2)
    refreshed = await admin.refresh_consumer_stats()
    same((refreshed["complete"], refreshed["queuesUpdated"]), (True, bench.value("select count(*) from queen.queues")), "")
    status = await admin.get_status(queue=name)
    same((status["messages"]["total"], status["messages"]["processing"]), (6, 2), "the status")
    entry = by_name((await admin.get_queue_stats(limit=10000))["queues"], name)
    same((entry["messages"]["total"], entry["messages"]["processing"]), (6, 2), "the queue among all")
    detail = await admin.get_queue_detail(name)
    same((detail["queue"]["name"], detail["partitions"][0]["messages"]["total"]), (name, 6), "the queue in detail")
    assert isinstance((await admin.get_analytics(interval="hour"))["dataPoints"], list)
    same((await admin.health())["status"], "healthy", "health")
    assert 0 < (await admin.metrics())["messages"]["total"]
    assert (await admin.get_system_metrics())["replicas"], "a server"
    assert (await admin.get_worker_metrics())["workers"], "a worker"
    tables = {table["name"] for table in (await admin.get_postgres_stats())["tables"]}
    assert {"log_partitions", "log_segments"} <= tables, tables


@check
async def maintenance_spools_pushes_and_hides_messages(bench):
    admin, name = bench.client.admin, "admin-maintenance"
    await lane(bench, name, 1)
    same((await admin.get_maintenance_mode())["maintenanceMode"], False, "at first")
    try:
        same((await admin.set_maintenance_mode(True))["maintenanceMode"], True, "switched on")
        pushed = await bench.client.queue(name).partition("p").push([{"transactionId": "spooled", "data": 2}])
        same(pushed[0]["status"], "buffered", "pushed meanwhile")
        same((await admin.set_pop_maintenance_mode(True))["popMaintenanceMode"], True, "pops, too")
        same((await admin.get_pop_maintenance_mode())["popMaintenanceMode"], True, "as it says")
        same(await leased(bench, name, 10), [], "nothing is found")
        conflating = bench.client.queue(name).partition("p").group("newest").conflation().wait(False)
        same(await conflating.pop(), [], "and conflation is not taken for unknown")
    finally:
        await admin.set_maintenance_mode(False)
        await admin.set_pop_maintenance_mode(False)

    def stored():
        return bench.value(
            "select p.last_offset from queen.log_partitions p join queen.queues q on q.id = p.queue_id"
            " where q.name = %s", name
        )

    await until("what was spooled is stored", lambda: stored() == 1)
    same([message["transactionId"] for message in await leased(bench, name, 10)], ["m0", "spooled"], "in order")
