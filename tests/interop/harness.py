"""Runs checks one after another, waits for facts, and looks into the database."""

import asyncio
import contextlib
import io
import json
import time
import traceback

import psycopg

CHECKS = []

# No check may hang the run: the longest one moves ten thousand messages three times.
CHECK_SECONDS_MAX = 90


def check(function):
    """Registers a coroutine function `f(bench)` as a check; its docstring is what it shows."""
    CHECKS.append(function)
    return function


class Bench:
    """What a check works with: the published client, its server's address and its database."""

    def __init__(self, client, server_url, database_url, subscribe_to_all):
        self.client = client
        self.server_url = server_url
        self.database_url = database_url
        # Whether a group that does not say starts at the oldest message.
        self.subscribe_to_all = subscribe_to_all
        self.db = psycopg.connect(database_url, autocommit=True)
        # Facts that one check leaves for a later one.
        self.left = {}

    def rows(self, query, *arguments):
        return self.db.execute(query, arguments).fetchall()

    def value(self, query, *arguments):
        return self.rows(query, *arguments)[0][0]


async def until(fact, look, seconds=20):
    """Polls `look` until it returns something true, and returns that."""
    deadline = time.monotonic() + seconds
    while True:
        seen = look()
        if asyncio.iscoroutine(seen):
            seen = await seen
        if seen:
            return seen
        assert time.monotonic() < deadline, f"not seen within {seconds} s: {fact}"
        await asyncio.sleep(0.05)


def same(got, expected, what):
    """Equal values, spelled out on failure without flooding the screen."""
    if got != expected:
        raise AssertionError(f"{what}: got {str(got)[:400]}, expected {str(expected)[:400]}")


def text(value):
    """One spelling of a JSON value that keeps the order of keys."""
    return json.dumps(value, ensure_ascii=False)


async def gathered(coroutines, at_once=16):
    """Runs coroutines, at most `at_once` of them at a time, and returns their results in order."""
    gate = asyncio.Semaphore(at_once)

    async def one(coroutine):
        async with gate:
            return await coroutine

    return await asyncio.gather(*(one(coroutine) for coroutine in coroutines))


async def run(bench):
    """Runs every registered check; returns how many passed and how many failed."""
    passed = failed = 0
    for function in CHECKS:
        name = function.__name__.replace("_", " ")
        started = time.monotonic()
        said = io.StringIO()
        try:
            # The client prints as it goes; only a failure makes that interesting.
            with contextlib.redirect_stdout(said):
                await asyncio.wait_for(function(bench), CHECK_SECONDS_MAX)
            passed += 1
            print(f"ok    {name} ({time.monotonic() - started:.1f} s)", flush=True)
        except Exception:
            failed += 1
            print(f"FAIL  {name} ({time.monotonic() - started:.1f} s)")
            print(traceback.format_exc())
            print(said.getvalue()[-2000:], flush=True)
    return passed, failed
