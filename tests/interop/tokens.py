"""The client with a token, on a server that asks for one and has a key for payloads."""

import asyncio
import base64
import hashlib
import hmac
import json
import os
import time

import httpx
from queen import Queen

from harness import check, same


def made(role, **claims):
    """A token for one role, as an issuer that shares the server's secret makes it."""
    encode = lambda part: base64.urlsafe_b64encode(part).rstrip(b"=").decode()
    said = {"sub": f"the {role} client", "role": role, "exp": int(time.time()) + 600, **claims}
    text = ".".join(encode(json.dumps(part).encode()) for part in ({"alg": "HS256", "typ": "JWT"}, said))
    return f"{text}.{encode(hmac.digest(os.environ['INTEROP_SECRET'].encode(), text.encode(), hashlib.sha256))}"


def client(bench, token):
    return Queen(bench.server_url, bearer_token=token)


async def refused(call, status):
    """Awaits the call, which the server must refuse with this status."""
    try:
        await call
    except Exception as error:
        code = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
        assert code == status or str(status) in f"{error!r} {error}", f"{error!r}"
        return
    raise AssertionError(f"not refused with {status}")


@check
async def a_token_opens_push_pop_and_ack_and_names_who_pushed(bench):
    queue = bench.client.queue("interop-token")
    await queue.create()
    await bench.client.queue("interop-token").push([{"transactionId": "t", "data": {"n": 1}, "producerSub": "forged"}])
    [message] = await bench.client.queue("interop-token").group("g").subscription_mode("all").wait(False).pop()
    same(message["producerSub"], "the read-write client", "producer")
    same((await bench.client.ack(message, True, {"group": "g"}))["success"], True, "acknowledgement")


@check
async def without_a_token_or_with_one_that_is_over_nothing_is_taken(bench):
    over, forged = made("admin", exp=int(time.time()) - 3600), made("admin")[:-4] + "AAAA"
    for token, status in ((None, 401), (over, 401), (forged, 401), (made("nobody"), 403)):
        async with client(bench, token) as other:
            await refused(other.queue("interop-token").push([{"data": 1}]), status)
    same(httpx.get(f"{bench.server_url}/health").status_code, 200, "health without a token")


@check
async def a_write_only_client_pushes_and_its_consumer_ends(bench):
    async with client(bench, made("write-only")) as writer:
        await writer.queue("interop-token").partition("written").push([{"transactionId": "w", "data": 1}])
        same(await writer.queue("interop-token").group("g").wait(False).pop(), [], "pop")
        handled = []
        consuming = writer.queue("interop-token").group("g").timeout_millis(500).consume(handled.append)
        try:
            await asyncio.wait_for(consuming, 30)
        except asyncio.TimeoutError:
            raise AssertionError("a consumer that may not pop goes on for ever")
        except Exception as error:
            assert "403" in f"{error!r} {error}" or "ermission" in f"{error}", f"{error!r}"
        same(handled, [], "handled")


@check
async def only_an_admin_deletes_a_queue(bench):
    await refused(bench.client.queue("interop-token").delete(), 403)
    async with client(bench, made("read-only")) as reader:
        await refused(reader.queue("interop-token").push([{"data": 1}]), 403)
        assert (await reader.admin.list_queues())["queues"]
    async with client(bench, made("admin")) as admin:
        same((await admin.queue("interop-token").delete())["deleted"], True, "deletion")


@check
async def an_encrypted_queue_works_like_any_other(bench):
    name, data = "interop-encrypted", {"secret": "swordfish", "text": "ä😀", "n": 1.5}
    created = await bench.client.queue(name).config({"encryption_enabled": True, "retry_limit": 0}).create()
    same((created["options"]["encryptionEnabled"], created["warnings"]), (True, []), "configuration")
    await bench.client.queue(name).push([{"transactionId": "e", "data": data}])
    [message] = await bench.client.queue(name).wait(False).pop()
    same(message["data"], data, "data")
    await bench.client.ack(message, "dlq")
    [letter] = (await bench.client.queue(name).dlq().get())["messages"]
    same((letter["data"], letter["producerSub"]), (data, "the read-write client"), "dead letter")
    [(stored, encrypted)] = bench.rows("select payload, is_encrypted from queen.log_dlq where transaction_id = 'e'")
    assert encrypted and "swordfish" not in stored and set(json.loads(stored)) == {"encrypted", "iv", "authTag"}, stored
