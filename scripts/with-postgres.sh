#!/usr/bin/env bash
# Runs a command with a scratch PostgreSQL, named by TEST_DATABASE_URL, which is gone when the command ends.
# Nothing in it is durable. Usage: scripts/with-postgres.sh COMMAND [ARGUMENT]...
set -euo pipefail

if [ $# -eq 0 ]; then
  echo "usage: $0 COMMAND [ARGUMENT]..." >&2
  exit 2
fi

postgres=$(ls -d /usr/lib/postgresql/*/bin/postgres 2>/dev/null | sort -V | tail -1 || true)
bin=${EBBTIDE_POSTGRES_BIN_DIR:-$(dirname "${postgres:-$(command -v postgres || true)}")}
if [ ! -x "$bin/initdb" ]; then
  echo "$0: no PostgreSQL server programs; scripts/setup.sh installs them" >&2
  exit 1
fi

# In memory, where there is room for the databases of a whole run.
base=${TMPDIR:-/tmp}
shm_free_kb=$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $4 }')
if [ -w /dev/shm ] && [ "${shm_free_kb:-0}" -ge 3000000 ]; then base=/dev/shm; fi
dir=$(mktemp -d "$base/ebbtide-test.XXXXXX")

# PostgreSQL refuses to run as root.
as=()
if [ "$(id -u)" -eq 0 ]; then
  user=postgres
  id "$user" >/dev/null 2>&1 || user=nobody
  chown "$user:" "$dir"
  as=("--reuid=$user" "--regid=$(id -gn "$user")" --init-groups)
fi
unprivileged() { (cd / && exec setpriv "${as[@]}" --pdeathsig=INT -- env -i PATH=/usr/bin:/bin LC_ALL=C "$@"); }

server=''
child=''
clean_up() {
  status=$?
  trap - EXIT
  # Immediate: nothing in it is worth a checkpoint.
  if [ -n "$server" ] && kill -QUIT "$server" 2>/dev/null; then wait "$server" 2>/dev/null || true; fi
  rm -rf "$dir"
  exit "$status"
}
trap clean_up EXIT
stop() { if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null || true; else exit 143; fi; }
trap stop INT TERM HUP

unprivileged "$bin/initdb" -D "$dir/data" -U postgres -A trust -E UTF8 --locale=C --no-sync --no-instructions >"$dir/initdb.log" 2>&1 ||
  { cat "$dir/initdb.log" >&2; exit 1; }

# The port is chosen below the range from which the system gives out ports for outgoing connections.
for _ in 1 2 3 4 5 6 7 8 9 10; do
  port=$((20000 + RANDOM % 12000))
  if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then continue; fi
  # `exec` in the subshell makes this shell the parent whose end PostgreSQL is told of.
  (cd / && exec setpriv "${as[@]}" --pdeathsig=INT -- env -i PATH=/usr/bin:/bin LC_ALL=C \
    "$bin/postgres" -D "$dir/data" -p "$port" -c listen_addresses=127.0.0.1 -c "unix_socket_directories=$dir" \
    -c fsync=off -c full_page_writes=off -c synchronous_commit=off -c max_connections=300 \
    -c deadlock_timeout=100ms -c shared_buffers=256MB -c max_wal_size=2GB -c timezone=UTC) >"$dir/postgres.log" 2>&1 &
  server=$!
  for _ in $(seq 600); do
    if "$bin/pg_isready" -q -h 127.0.0.1 -p "$port" -t 1; then break 2; fi
    kill -0 "$server" 2>/dev/null || break
    sleep 0.05
  done
  kill -QUIT "$server" 2>/dev/null && wait "$server" 2>/dev/null || true
  server=''
done
if [ -z "$server" ]; then
  cat "$dir/postgres.log" >&2
  echo "$0: the scratch PostgreSQL did not start" >&2
  exit 1
fi

export TEST_DATABASE_URL="postgres://postgres@127.0.0.1:$port/postgres"
# In the background, because a shell that waits for a child in the foreground handles no signal.
"$@" <&0 &
child=$!
status=0
while true; do
  wait "$child" && status=0 || status=$?
  kill -0 "$child" 2>/dev/null || break
done
child=''
exit "$status"
