"""Sends a running server what its own OpenAPI document allows and forbids, and holds each answer against the document."""

import json
import os
import subprocess
import sys

# Cases of each operation beside the boundary values, which are sent once each.
EXAMPLES_MAX = 10
# Hangs are failures: no request may take longer than the first, nor all of them longer than the second.
REQUEST_SECONDS_MAX = 20
RUN_SECONDS_MAX = 240
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
]
# Operations of which no case can be expected to succeed, and why.
NEVER_SUCCEED = {}


def run(url, reached):
    program = os.path.join(os.path.dirname(sys.executable), "st")
    # The same cases each time, or those of a seed; a failure is then one of the code that is tested.
    seed = os.environ.get("INTEROP_FUZZ_SEED")
    cases = ["--seed", seed] if seed else ["--generation-deterministic"]
    here = os.path.dirname(os.path.abspath(__file__))
    settings = {
        "SCHEMATHESIS_HOOKS": "fuzz_world",
        "PYTHONPATH": here,
        "FUZZ_SERVER_URL": url,
        "FUZZ_REACHED": reached,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [program, "run", f"{url}/openapi.json", "--phases", "coverage,fuzzing", "--checks", ",".join(CHECKS)]
    command += ["--max-examples", str(EXAMPLES_MAX), "--request-timeout", str(REQUEST_SECONDS_MAX), "--workers", "1"]
    command += ["--no-color", "--warnings", "off", *cases]
    with open(f"{reached}.log", "w+") as log:
        done = subprocess.run(
            command, env=os.environ | settings, cwd=os.path.dirname(reached), stdout=log, stderr=log,
            timeout=RUN_SECONDS_MAX, check=False,
        )  # fmt: skip
        log.seek(0)
        lines = [line.rstrip("\n")[:400] for line in log]
    print("\n".join(lines if done.returncode else lines[-12:]))
    return done.returncode


def unreached(reached):
    """The operations that never succeeded: what they do was not tested."""
    with open(reached) as file:
        statuses = json.load(file)
    failures = []
    for operation, seen in sorted(statuses.items()):
        if not any(status.startswith("2") for status in seen) and operation not in NEVER_SUCCEED:
            failures.append(f"{operation} never succeeded: {seen}")
    return failures


reached_path = os.path.join(os.environ["INTEROP_WORK"], "reached.json")
code = run(os.environ["INTEROP_SERVER_URL"], reached_path)
failures = unreached(reached_path)
print("\n".join(failures))
sys.exit(code or bool(failures))
