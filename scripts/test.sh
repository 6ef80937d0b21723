#!/usr/bin/env bash
# What a change has to pass: format, lints, documentation, and every test on a scratch PostgreSQL.
set -euo pipefail
cd "$(dirname "$0")/.."

# Settings of a server that runs on this machine are not for the tests.
while IFS='=' read -r name _; do
  case $name in PG_* | QUEEN_* | RETENTION_* | METRICS_* | PARTITION_CLEANUP_DAYS | EBBTIDE_DATABASE_URL | EBBTIDE_DIRECT_DATABASE_URL | EBBTIDE_DATA_DIR | PORT | RUST_LOG | LOG_LEVEL) unset "$name" ;; esac
done < <(env)

step() { printf '\n== %s\n' "$*" >&2; "$@"; }
step scripts/setup.sh --tests
step cargo fmt --all --check
step cargo clippy --workspace --all-targets --all-features --locked -- -D warnings
RUSTDOCFLAGS='-D warnings' step cargo doc --workspace --all-features --no-deps --locked
step scripts/with-postgres.sh scripts/run-tests.sh
