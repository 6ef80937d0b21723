"""Ten thousand messages, two consumer groups, a handler that fails: every message accounted for."""

import asyncio
from collections import Counter, defaultdict

from harness import check, gathered, same, text

QUEUE = "interop-orders"
PARTITIONS = 200
PER_PARTITION = 50
# Partitions from here on are filled with one request a message.
FIRST_SINGLE = 180
BATCH = 25
RETRY_LIMIT = 2
REASON = "handler refused the order"


def order(partition, place):
    number = partition * PER_PARTITION + place
    return {
        "transactionId": f"order-{number:05d}",
        "data": {
            "number": number,
            "lane": f"lane-{partition:03d}",
            "amount": number / 8,
            "exact": 12345678901234567890123 + number,
            "who": "Žofie – 馬 🐎",
            "nested": {"z": [1, None, True, {"a": ""}], "a": "\u0000 and \\u0000"},
        },
    }


def is_poison(message):
    return message["data"]["number"] % 500 == 207


def check_queued(answers):
    for answer in answers:
        for item in answer:
            same(item["status"], "queued", f"status of {item['transaction_id']}")


async def fill(client, partition, orders):
    lane = client.queue(QUEUE).partition(f"lane-{partition:03d}")
    if partition < FIRST_SINGLE:
        answers = [await lane.push(orders[at : at + BATCH]) for at in range(0, PER_PARTITION, BATCH)]
    else:
        answers = [await lane.push(one) for one in orders]
    check_queued(answers)


@check
async def ten_thousand_messages_are_pushed(bench):
    config = {"lease_time": 60, "retry_limit": RETRY_LIMIT}
    created = await bench.client.queue(QUEUE).config(config).create()
    same(created["configured"], True, "configured")
    same(created["options"]["leaseTime"], 60, "leaseTime in the answer")
    same(created["options"]["retryLimit"], RETRY_LIMIT, "retryLimit in the answer")
    orders = {partition: [order(partition, place) for place in range(PER_PARTITION)] for partition in range(PARTITIONS)}
    await gathered(fill(bench.client, partition, lane) for partition, lane in orders.items())
    pushed = {one["transactionId"]: one["data"] for lane in orders.values() for one in lane}
    same(len(pushed), 10_000, "messages pushed")
    stored = bench.value(
        "select sum(end_offset - base_offset + 1) from queen.log_segments s"
        " join queen.log_partitions p on p.id = s.partition_id"
        " join queen.queues q on q.id = p.queue_id where q.name = %s",
        QUEUE,
    )
    same(stored, 10_000, "messages stored")
    bench.left["pushed"] = pushed


class Seen:
    """What a group was given, and what became of it."""

    def __init__(self, pushed):
        self.pushed = pushed
        self.delivered = Counter()
        self.done = []
        self.dead = []
        self.by_lane = defaultdict(list)
        self.all_seen = asyncio.Event()

    def take(self, message):
        expected = self.pushed[message["transactionId"]]
        same(text(message["data"]), text(expected), f"payload of {message['transactionId']}")
        same(message["partition"], expected["lane"], f"partition of {message['transactionId']}")
        self.delivered[message["transactionId"]] += 1

    def finish(self, message):
        self.done.append(message["transactionId"])
        self.by_lane[message["partition"]].append(message["data"]["number"])
        self.look()

    def bury(self, message):
        self.dead.append(message["transactionId"])
        self.look()

    def look(self):
        if len(self.done) + len(self.dead) >= len(self.pushed):
            self.all_seen.set()


def lanes(messages):
    """Messages by partition, in the order of delivery."""
    found = defaultdict(list)
    for message in messages:
        found[message["partitionId"]].append(message)
    return found.values()


def consume(client, group, handler, stop):
    return (
        client.queue(QUEUE)
        .group(group)
        .subscription_mode("all")
        .batch(400)
        .partitions(20)
        .concurrency(4)
        .auto_ack(False)
        .timeout_millis(500)
        .consume(handler, signal=stop)
    )


def check_order_and_cursors(bench, group, seen):
    for lane, numbers in seen.by_lane.items():
        same(numbers, sorted(numbers), f"order in {lane} for {group}")
    lagging = bench.value(
        "select count(*) from queen.log_partitions p join queen.queues q on q.id = p.queue_id"
        " left join queen.log_consumers c on c.partition_id = p.id and c.consumer_group = %s"
        " where q.name = %s and (c.committed is distinct from p.last_offset or c.batch_end is not null)",
        group,
        QUEUE,
    )
    same(lagging, 0, f"partitions where {group} lags or holds a lease")


@check
async def one_group_consumes_all_with_explicit_acks(bench):
    seen = Seen(bench.left["pushed"])

    async def handler(messages):
        for message in messages:
            seen.take(message)
        answer = await bench.client.ack(messages, True, {"group": "billing"})
        same(answer["success"], True, "ack accepted")
        for message, result in zip(messages, answer["results"], strict=True):
            same(result["success"], True, f"ack of {message['transactionId']}: {result}")
            seen.finish(message)

    await consume(bench.client, "billing", handler, seen.all_seen)
    same(Counter(seen.done), Counter(seen.pushed.keys()), "consumed by billing, each once")
    same(set(seen.delivered.values()), {1}, "deliveries of each message")
    check_order_and_cursors(bench, "billing", seen)


@check
async def the_other_group_fails_on_some_and_they_end_as_dead_letters(bench):
    seen = Seen(bench.left["pushed"])
    poison = {one for one, data in seen.pushed.items() if is_poison({"data": data})}
    same(len(poison), 20, "messages chosen to fail")

    async def handler(messages):
        judged = []
        for lane in lanes(messages):
            for message in lane:
                seen.take(message)
                if is_poison(message):
                    judged.append({**message, "_status": "failed", "_error": REASON})
                    # The nack gives the rest of this lane back.
                    break
                judged.append({**message, "_status": "completed"})
        answer = await bench.client.ack(judged, True, {"group": "audit"})
        for message, result in zip(judged, answer["results"], strict=True):
            same(result["success"], True, f"ack of {message['transactionId']}: {result}")
            if message["_status"] == "completed":
                seen.finish(message)
            elif result["dlq"]:
                seen.bury(message)

    await consume(bench.client, "audit", handler, seen.all_seen)
    same(set(seen.dead), poison, "dead-lettered")
    same(Counter(seen.done + seen.dead), Counter(seen.pushed.keys()), "consumed or dead-lettered by audit, each once")
    for one in poison:
        same(seen.delivered[one], RETRY_LIMIT + 1, f"deliveries of {one} before it was given up")
    check_order_and_cursors(bench, "audit", seen)
    await check_dead_letters(bench, seen, poison)


async def check_dead_letters(bench, seen, poison):
    found = await bench.client.queue(QUEUE).dlq("audit").limit(100).get()
    same({one["transactionId"] for one in found["messages"]}, poison, "dead letters listed")
    same(found["total"], len(poison), "total of the listing")
    for one in found["messages"]:
        same(text(one["data"]), text(seen.pushed[one["transactionId"]]), "payload of a dead letter")
        same(one["consumerGroup"], "audit", "group of a dead letter")
        assert REASON in one["errorMessage"], one["errorMessage"]
    page = await bench.client.queue(QUEUE).dlq("audit").limit(5).offset(18).get()
    same(len(page["messages"]), 2, "last page of the dead letters")
    other = await bench.client.queue(QUEUE).dlq("billing").get()
    same(other["messages"], [], "dead letters of the group that did not fail")
