"""Holds a running server against the published Python client."""

import asyncio
import os
import sys

import calls
import harness
from queen import Queen

# Before the checks take anything of the client by name.
CALLS = calls.Calls({"open": calls.BROKER, "streams": calls.STREAMS}.get(sys.argv[1], ()))

if sys.argv[1] == "tokens":
    import tokens

    TOKEN = tokens.made("read-write")
elif sys.argv[1] == "streams":
    import streams  # noqa: F401

    TOKEN = None
else:
    import admin  # noqa: F401
    import behaviour  # noqa: F401
    import builders  # noqa: F401
    import ephemeral  # noqa: F401
    import later  # noqa: F401
    import retention  # noqa: F401
    import volume  # noqa: F401

    TOKEN = None


async def main():
    server_url, database_url = os.environ["INTEROP_SERVER_URL"], os.environ["INTEROP_DATABASE_URL"]
    async with Queen(server_url, bearer_token=TOKEN) as client:
        subscribe_to_all = os.environ["INTEROP_SUBSCRIPTION_MODE"] == "all"
        return await harness.run(harness.Bench(client, server_url, database_url, subscribe_to_all))


passed, failed = asyncio.run(main())
missed = CALLS.missed()
print(f"{passed} passed, {failed} failed")
if missed:
    print("no check calls " + ", ".join(missed))
sys.exit(1 if failed or missed or not passed else 0)
