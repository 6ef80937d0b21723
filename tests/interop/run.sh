#!/usr/bin/env bash
# Holds a server that it starts itself, on its embedded PostgreSQL, against the published Python client.
#
#   tests/interop/run.sh [path of the ebbtide binary [open | streams | tokens | fuzz]]
#
# With TEST_DATABASE_URL set and INTEROP_EXTERNAL=1, the server uses that database instead.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
ebbtide=${1:-$root/target/debug/ebbtide}
only=${2:-}
venv=${INTEROP_VENV:-$root/target/interop-venv}
start_seconds_max=60
stop_seconds_max=30

[ -x "$ebbtide" ] || { echo "interop: $ebbtide is missing; build it with: cargo build -p ebbtide" >&2; exit 2; }

if ! cmp -s "$here/requirements.txt" "$venv/requirements.txt"; then
  echo "interop: installing the published client into $venv"
  rm -rf "$venv"
  python3 -m venv "$venv" || { echo "interop: python3 has no venv; apt-get install python3-venv" >&2; exit 2; }
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$here/requirements.txt"
  cp "$here/requirements.txt" "$venv/requirements.txt"
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/ebbtide-interop.XXXXXX")
chmod 755 "$work" # PostgreSQL runs as another user and has to reach its folder
server=
finish() {
  local code=$?
  trap - EXIT INT TERM
  if [ -n "$server" ] && kill -0 "$server" 2>/dev/null && ! stop; then code=1; fi
  if [ "$code" -ne 0 ]; then
    echo "interop: the last lines of the server's log:" >&2
    tail -n 40 "$work/server.log" >&2 || true
    # Again and last, where a log that is cut off still has it.
    grep -hE '^(FAIL|[A-Za-z]*Error|no check calls| *- |[A-Z]+ /.* never succeeded)' "$work/said" | tail -n 20 >&2 || true
  fi
  rm -rf "$work"
  exit "$code"
}
trap finish EXIT
trap 'exit 130' INT TERM

# anew NAME: the next servers have a database of their own. One that runs elsewhere is as it is.
anew() {
  database=(--data-dir "$work/$1")
  address="host=$work/$1/run port=5432 user=postgres dbname=postgres"
  if [ "${INTEROP_EXTERNAL:-0}" = 1 ]; then
    database=(--database-url "$TEST_DATABASE_URL")
    address=$TEST_DATABASE_URL
  fi
}

# start [SETTING=value ...]: a server with these settings, whose address becomes $url.
start() {
  : >"$work/ready"
  # Settings of whoever runs this must not reach the server under test.
  env -i PATH="$PATH" HOME="${HOME:-/}" RUST_LOG=info RETENTION_INTERVAL=1000 "$@" \
    "$ebbtide" serve --port 0 "${database[@]}" >"$work/ready" 2>>"$work/server.log" &
  server=$!
  for ((i = 0; i < start_seconds_max * 10; i++)); do
    grep -q 'ready: http' "$work/ready" && break
    kill -0 "$server" 2>/dev/null || { echo "interop: the server ended at once" >&2; exit 1; }
    sleep 0.1
  done
  url=$(sed -n 's/.* ready: \(http[^,]*\),.*/\1/p' "$work/ready")
  [ -n "$url" ] || { echo "interop: the server was not ready within $start_seconds_max s" >&2; exit 1; }
  echo "interop: $(cat "$work/ready")"
}

stop() {
  kill -TERM "$server"
  for ((i = 0; i < stop_seconds_max * 10; i++)); do kill -0 "$server" 2>/dev/null || break; sleep 0.1; done
  if kill -0 "$server" 2>/dev/null; then
    echo "interop: the server did not stop within $stop_seconds_max s" >&2
    kill -KILL "$server"
    return 1
  fi
  server=
}

# checks NAME [MODE]: the checks of main.py that go by this name, on a server with this default subscription mode.
checks() {
  PYTHONDONTWRITEBYTECODE=1 INTEROP_SERVER_URL=$url INTEROP_DATABASE_URL=$address INTEROP_EBBTIDE=$ebbtide \
    INTEROP_SECRET=$secret INTEROP_SUBSCRIPTION_MODE=${2:-new} timeout --kill-after=5 300 "$venv/bin/python" "$here/main.py" "$1" |
    tee -a "$work/said"
}

# fuzz: what the document allows and forbids, against the server.
fuzz() {
  PYTHONDONTWRITEBYTECODE=1 INTEROP_SERVER_URL=$url INTEROP_WORK=$work \
    timeout --kill-after=5 300 "$venv/bin/python" "$here/fuzz.py" | tee -a "$work/said"
}

# part NAME: whether this run is to hold that part.
part() { [ -z "$only" ] || [ "$only" = "$1" ]; }

secret=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
anew data
if part open; then
  start
  checks open new
  stop
fi
if part open && [ "${INTEROP_EXTERNAL:-0}" = 0 ]; then
  anew all
  start DEFAULT_SUBSCRIPTION_MODE=all
  checks open all
  stop
fi
if part streams; then
  start
  checks streams new
  stop
  start DEFAULT_SUBSCRIPTION_MODE=all
  checks streams all
  stop
fi
if part tokens; then
  start JWT_ENABLED=true JWT_SECRET="$secret" QUEEN_ENCRYPTION_KEY="$secret"
  checks tokens
  stop
fi
if part fuzz; then
  start QUEEN_ENCRYPTION_KEY="$secret"
  fuzz
  stop
fi
