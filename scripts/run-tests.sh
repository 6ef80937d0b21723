#!/usr/bin/env bash
# Every test there is, on the PostgreSQL that TEST_DATABASE_URL names.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${TEST_DATABASE_URL:?scripts/with-postgres.sh sets it}"

if cargo nextest --version >/dev/null 2>&1; then
  cargo nextest run --workspace --all-features --locked
else
  echo "run-tests: no cargo-nextest, so cargo test runs the tests" >&2
  cargo test --workspace --all-features --locked --lib --bins --tests --no-fail-fast
fi
cargo test --workspace --all-features --locked --doc
if [ -x tests/interop/run.sh ]; then tests/interop/run.sh; fi
