"""What the fuzz finds on the server, so that its cases meet something: queues, messages, leases, dead letters, traces."""

import atexit
import json
import os
import urllib.error
import urllib.request
import zlib

import schemathesis

URL = os.environ["FUZZ_SERVER_URL"]
# Cases delete what they meet, so it is made again after so many.
CASES_MAX = 25
# No case waits for longer for a message.
WAIT_MS_MAX = 50
# Levels of a request in which names may stand: operations[0].items[0].queue.
DEPTH_MAX = 6
WAITS = ("timeout", "waitMs", "timeoutMs")


def call(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data=data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            content = answer.read()
            return json.loads(content) if content else None
    except urllib.error.HTTPError as error:
        # A case may have taken what this call was to find; the next world will have it.
        error.close()
        return None


class World:
    """Names that mean something to the server at the moment."""

    def __init__(self):
        self.cases = 0
        self.generation = 0
        self.names = {}
        self.statuses = {}

    def step(self):
        if self.cases % CASES_MAX == 0:
            self.make()
        self.cases += 1

    def make(self, leases=None):
        self.generation += 1
        dead, live = f"dead-{self.generation}", f"live-{self.generation}"
        self.names = {"queue": "fuzz", "partition": "Default", "group": "readers", "name": "fuzzed"}
        self.names |= {"ns": "fuzz", "key": "fuzzed", "timerKey": "fuzzed"}
        call("DELETE", "/api/v1/resources/queues/fuzz")
        call("POST", "/api/v1/kv", [{"op": "put", "ns": "fuzz", "key": "fuzzed", "value": 1, "forever": True}])
        timer = {"op": "schedule", "queue": "fuzz", "timerKey": "fuzzed", "payload": "MQ==", "delayMs": 3600000, "txn": "t"}
        call("POST", "/api/v1/timers", {"operations": [timer]})
        call("POST", "/api/v1/configure", {"queue": "fuzz", "namespace": "n", "task": "t", "options": {"retryLimit": 0}})
        items = [{"queue": "fuzz", "payload": {"n": 1.50}, "transactionId": id} for id in (dead, live, f"{live}/2")]
        call("POST", "/api/v1/push", {"items": items})
        call("POST", "/api/v1/ephemeral/push", {"queue": "fuzz", "messages": [{"payload": {"n": 1.50}}]})
        pop = "/api/v1/pop/queue/fuzz?consumerGroup=readers&subscriptionMode=all&batch=1"
        popped = call("GET", pop)
        if popped is None:
            return
        message = popped["messages"][0]
        ids = {key: message[key] for key in ("transactionId", "partitionId")}
        fence = {key: message[key] for key in ("leaseId", "consumerGroup")}
        call("POST", "/api/v1/ack", ids | fence | {"status": "dlq", "error": "fuzz"})
        call("POST", "/api/v1/traces", ids | {"data": 1, "traceNames": ["fuzzed"]})
        self.names |= ids | {"live": live, "dead": message["transactionId"], "consumerGroup": "readers"}
        stream = {"name": "fuzzed", "source_queue": "fuzz", "config_hash": "fuzz"}
        query = call("POST", "/streams/v1/queries", stream | {"reset": True})
        self.names |= stream | {"query_id": query["query_id"], "partition_id": message["partitionId"]}
        leased = call("GET", f"{pop}&leaseSeconds=600") if (self.generation % 2 if leases is None else leases) else None
        if leased:
            self.names["leaseId"] = leased["leaseId"]


WORLD = World()

# What an operator's switches are when everything is served. Paused, routes answer 503, as they should.
SERVED = {
    "/api/v1/system/kv-timers": {"kv": True, "timersSchedule": True, "timersFire": True},
    "/api/v1/system/ephemeral": {"enabled": True},
    "/api/v1/system/maintenance": {"enabled": False},
    "/api/v1/system/maintenance/pop": {"enabled": False},
}

# What succeeds only if several things come together: the message that the path names, and the body. Every third
# case is one of these.
OF_MESSAGE = "/api/v1/messages/{partitionId}/{transactionId}"
SEEK = "/api/v1/consumer-groups/{group}/queues/{queue}"
RECIPES = {
    f"DELETE {OF_MESSAGE}": ("dead", None),
    f"POST {OF_MESSAGE}/retry": ("dead", None),
    f"POST {OF_MESSAGE}/dlq": ("live", {"consumerGroup": "readers"}),
    f"POST {SEEK}/seek": (None, {"toEnd": True}),
    f"POST {SEEK}/partitions/{{partition}}/seek": (None, {"timestamp": "2026-01-01T00:00:00Z"}),
    "POST /api/v1/kv": (None, {"operations": [{"op": "get", "ns": "fuzz", "key": "fuzzed"}]}),
    "PUT /api/v1/kv/{ns}/{key}": (None, {"value": 1.50, "forever": True}),
    "POST /api/v1/timers": (None, {"operations": [{"op": "cancel", "queue": "fuzz", "timerKey": "fuzzed"}]}),
    "POST /api/v1/system/kv-timers": (None, {"kv": True}),
    "DELETE /api/v1/dlq": (None, {"queue": "fuzz"}),
    "POST /api/v1/dlq/replay": (None, {"queue": "fuzz"}),
}


def follow(case, recipe):
    transaction, body = recipe
    if transaction:
        WORLD.make(leases=False)  # each message succeeds once
    path = case.path_parameters or {}
    for name in path:
        path[name] = WORLD.names.get(transaction if name == "transactionId" else name, path[name])
    if body is not None:
        case.body, case.media_type, case.query = dict(body), "application/json", {}


def make_known(case, given, depth=0):
    """Lets names in what is sent mean something, as deep as requests have names."""
    if isinstance(given, list) and depth < DEPTH_MAX:
        for element in given:
            make_known(case, element, depth + 1)
    elif isinstance(given, dict) and depth < DEPTH_MAX:
        for name, value in given.items():
            given[name] = choose(case, name, [*known(name) * 3, value])
            make_known(case, value, depth + 1)


def known(name):
    """What the parameter or field may be called to name something that is there; of four cases one keeps its own."""
    names = ("transactionId", "live") if name == "transactionId" else (name,)
    return [WORLD.names[name] for name in names if name in WORLD.names]


def choose(case, what, choices):
    """One of `choices`; the same for the same case."""
    seed = f"{case.operation.label} {what} {WORLD.cases}".encode()
    return choices[zlib.crc32(seed) % len(choices)]


@schemathesis.hook
def before_call(context, case, kwargs):
    WORLD.step()
    recipe = RECIPES.get(case.operation.label)
    if recipe and WORLD.cases % 3 == 0:
        follow(case, recipe)
        return
    for given in (case.path_parameters, case.query, case.body):
        make_known(case, given)
    query = case.query or {}
    for name in WAITS:
        if name in query or name == "timeout" and "wait" in query:
            query[name] = bounded(query.get(name))


def bounded(value):
    """Only what would be waited for is changed; what is no number stays as wrong as it is."""
    try:
        return value if value is not None and int(value) <= WAIT_MS_MAX else WAIT_MS_MAX
    except (TypeError, ValueError):
        return value


@schemathesis.hook
def after_call(context, case, response):
    seen = WORLD.statuses.setdefault(case.operation.label, {})
    status = str(response.status_code)
    seen[status] = seen.get(status, 0) + 1
    if case.operation.label.removeprefix("POST ") in SERVED:
        for path, served in SERVED.items():
            call("POST", path, served)


@atexit.register
def tell():
    with open(os.environ["FUZZ_REACHED"], "w") as file:
        json.dump(WORLD.statuses, file)
