#!/usr/bin/env bash
# Brings what is missing on the machine: PostgreSQL's server programs and a C compiler; with --tests also what
# the tests need. Does nothing, and needs no rights, where all of it is there.
set -euo pipefail
cd "$(dirname "$0")/.."

postgres_major_min=15
nextest_version=0.9.143
want_tests=false
[ "${1:-}" = "--tests" ] && want_tests=true

say() { printf 'setup: %s\n' "$*" >&2; }
has() { command -v "$1" >/dev/null 2>&1; }

has_postgres() {
  local postgres major
  for postgres in /usr/lib/postgresql/*/bin/postgres ${EBBTIDE_POSTGRES_BIN_DIR:+"$EBBTIDE_POSTGRES_BIN_DIR/postgres"} "$(command -v postgres || true)"; do
    [ -x "$postgres" ] && [ -x "$(dirname "$postgres")/initdb" ] || continue
    major=$("$postgres" --version | sed 's/^[^0-9]*\([0-9]*\).*/\1/')
    [ "${major:-0}" -ge "$postgres_major_min" ] && return 0
  done
  return 1
}

# A server that names a database needs no PostgreSQL of its own; the tests always do.
names_a_database() {
  [ -n "${EBBTIDE_DATABASE_URL:-}${PG_HOST:-}${PG_PORT:-}${PG_DATABASE:-}${PG_DB:-}" ]
}

packages=()
no_cluster=false
if { $want_tests || ! names_a_database; } && ! has_postgres; then
  packages+=(postgresql)
  no_cluster=true
fi
has cc || packages+=(build-essential)
has setpriv || packages+=(util-linux)
if $want_tests && ! has openssl; then
  packages+=(openssl)
fi
if $want_tests && ! python3 -c 'import ensurepip, venv' >/dev/null 2>&1; then
  packages+=(python3-venv)
fi

install_packages() {
  local root=() conf=/etc/postgresql-common/createcluster.conf
  local install="apt-get update && apt-get install -y --no-install-recommends ${packages[*]}"
  if $no_cluster; then
    # Without this file the package starts a cluster of its own at once.
    install="mkdir -p ${conf%/*} && echo 'create_main_cluster = false' > $conf && $install"
  fi
  if ! has apt-get; then
    say "missing: ${packages[*]}; this is not a Debian system, install them with its package manager"
    exit 1
  fi
  if [ "$(id -u)" -ne 0 ]; then
    if ! has sudo || { ! sudo -n true 2>/dev/null && [ ! -t 0 ]; }; then
      say "missing: ${packages[*]}; as root, run this and try again:"
      printf "  sh -c '%s'\n" "${install//\'/\'\\\'\'}" >&2
      exit 1
    fi
    root=(sudo)
  fi
  say "installing ${packages[*]} with: $install"
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive sh -ec "
    if $no_cluster && [ ! -e $conf ]; then
      mkdir -p ${conf%/*}
      echo 'create_main_cluster = false' > $conf
    fi
    apt-get update -q
    apt-get install -y -q --no-install-recommends -o Dpkg::Options::=--force-confold ${packages[*]}
  " >&2
}

[ ${#packages[@]} -eq 0 ] || install_packages
if $no_cluster && ! has_postgres; then
  say "the distribution's PostgreSQL is older than $postgres_major_min; install a newer one, or name a database with EBBTIDE_DATABASE_URL"
  exit 1
fi

if ! has cargo; then
  say "no Rust toolchain: install it from https://rustup.rs, or put cargo's folder on the PATH"
  exit 1
fi
$want_tests || exit 0

for component in fmt clippy; do
  if ! cargo "$component" --version >/dev/null 2>&1; then
    name=${component/fmt/rustfmt}
    if has rustup; then
      say "adding the Rust component $name"
      rustup component add "$name" >&2
    else
      say "cargo $component is missing: install the Rust component $name"
      exit 1
    fi
  fi
done

if ! cargo nextest --version >/dev/null 2>&1; then
  say "building cargo-nextest $nextest_version, once; this takes some minutes"
  # The older harness runs the same tests, so a machine that cannot fetch this one can go on.
  cargo install cargo-nextest --locked --version "$nextest_version" >&2 || say "cargo-nextest could not be installed"
fi
