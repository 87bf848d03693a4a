#!/usr/bin/env bash
# Sandboxes in gVisor, tested: an engine of its own, beside any other, that has the runtime `runsc`.
#
#     scripts/ci_runsc.sh test [PYTEST ARGUMENTS…]    starts it, runs the tests marked `runsc`, stops it
#     eval "$(scripts/ci_runsc.sh up)"                the engine alone: DOCKER_HOST, TURNSTILE_TEST_RUNSC,
#                                                     TURNSTILE_TEST_IMAGE
#     scripts/ci_runsc.sh down
#
# Where runsc cannot be installed (Debian's package, as root or by sudo), or runs no container here, `test` says
# "skipped", with the reason, and exits 0; `up` exits 3. TURNSTILE_REQUIRE_RUNSC=1 makes that a failure.
#
# runsc runs with --platform=ptrace, which needs no virtualization, and --network=none: sandboxes have no network,
# and Debian's runsc takes the name spaces of newer kernels for the machine's own.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly ROOT=${TURNSTILE_CI_RUNSC:-/dev/shm/turnstile-ci-gvisor}
readonly IMAGE=turnstile-test:python
readonly NAME=runsc
reason=

say() { printf 'ci_runsc: %s\n' "$*" >&2; }

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi
}

own_engine() {
  # No usual socket, no engine of the caller's: one of this script's own.
  env -u DOCKER_HOST TURNSTILE_USUAL_DOCKER="$ROOT/none" TURNSTILE_CI_DOCKER="$ROOT" \
    TURNSTILE_CI_DOCKER_APART=1 TURNSTILE_CI_DOCKER_FLAGS="--bridge=none --iptables=false --add-runtime=$NAME=$ROOT/$NAME" \
    scripts/ci_docker.sh "$1"
}

# up: prints what to export. Sets `reason` and returns 1 where it is not possible.
up() {
  local log host
  log=$(mktemp)
  if ! command -v runsc > /dev/null; then
    say "installing runsc"
    if ! { as_root apt-get update -qq &&
      as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends runsc; } \
      > "$log" 2>&1; then
      reason="runsc cannot be installed: $(tail -n 1 "$log")"
      rm -f "$log"
      return 1
    fi
  fi
  mkdir -p "$ROOT"
  printf '#!/bin/sh\nexec %s --platform=ptrace --network=none "$@"\n' "$(command -v runsc)" > "$ROOT/$NAME"
  chmod 755 "$ROOT/$NAME"
  if ! own_engine up > "$log"; then
    reason="no engine with runsc starts"
    rm -f "$log"
    return 1
  fi
  host=unix://$ROOT/docker.sock
  # Another engine may have the image already.
  docker image save "$IMAGE" 2> /dev/null | docker --host "$host" image load > /dev/null 2>&1 || true
  if ! { DOCKER_HOST=$host scripts/sandbox_image.sh "$IMAGE" &&
    docker --host "$host" run --rm --runtime "$NAME" --network none "$IMAGE" uname -v; } > "$log" 2>&1; then
    reason="runsc runs no container here: $(grep -v -e '--help' -e '^$' "$log" | tail -n 1)"
    rm -f "$log"
    down
    return 1
  fi
  rm -f "$log"
  printf 'export DOCKER_HOST=%q TURNSTILE_TEST_RUNSC=%q TURNSTILE_TEST_IMAGE=%q\n' "$host" "$NAME" "$IMAGE"
}

down() {
  own_engine down
  rm -rf "$ROOT"
}

# The last line looks like pytest's, so that a summary of CI shows it.
skipped() {
  printf '=== runsc SKIPPED: %s in %d.0s ===\n' "$reason" "$SECONDS"
  if [ -n "${TURNSTILE_REQUIRE_RUNSC:-}" ]; then exit 3; fi
}

tests() {
  local environment
  environment=$(mktemp)
  if ! up > "$environment"; then
    rm -f "$environment"
    skipped
    return
  fi
  trap down EXIT
  # shellcheck disable=SC1090
  . "$environment"
  rm -f "$environment"
  # Of the contract what a kernel of its own could break: time-outs, what is left behind, what is killed.
  local contract=tests/sandboxes/test_sandbox_contract.py
  if [ $# -eq 0 ]; then
    set -- tests/episodes/test_gvisor_episodes.py tests/sandboxes/test_docker_runtime.py \
      tests/sandboxes/test_sandbox_attacks.py \
      "$contract::test_after_its_time_a_command_is_killed_with_all_it_started" \
      "$contract::test_the_bounds_on_memory_processes_and_disk_hold" \
      "$contract::test_a_killed_helper_fails_its_commands_and_leaves_nothing_after_destroy" \
      "$contract::test_input_reaches_the_command_whole"
  fi
  .venv/bin/pytest -m runsc "$@"
}

case "${1:-}" in
  up)
    if ! up; then
      say "$reason"
      exit 3
    fi
    ;;
  down) down ;;
  test)
    shift
    tests "$@"
    ;;
  *)
    echo "usage: ${0##*/} test|up|down" >&2
    exit 2
    ;;
esac
