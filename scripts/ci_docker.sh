#!/usr/bin/env bash
# A Docker engine for the tests, on a machine that may have none:
#
#     eval "$(scripts/ci_docker.sh up)"    DOCKER_HOST is an engine that answers; CI_DOCKER_STARTED=1: started by this
#     scripts/ci_docker.sh down            stops the engine if this script started it, with its containers
#
# `up` takes the first engine that answers: DOCKER_HOST's, the usual socket's, its own from an earlier `up`. If none
# does, it installs Debian's docker.io (as root, or by sudo) and starts an engine beside any other, with its files in
# TURNSTILE_CI_DOCKER (default /tmp/turnstile-ci-docker; short, a Unix socket lies there); the usual socket is
# /var/run/docker.sock, or TURNSTILE_USUAL_DOCKER. TURNSTILE_CI_DOCKER_FLAGS: further flags of that engine;
# TURNSTILE_CI_DOCKER_APART=1: in a network of its own. It needs no service manager. Daemons keep none of the caller's files. Both commands may be repeated. Exit status 3: an engine
# cannot be installed or started here.
set -euo pipefail

readonly ROOT=${TURNSTILE_CI_DOCKER:-/tmp/turnstile-ci-docker}
readonly OWN=unix://$ROOT/docker.sock
readonly USUAL=unix://${TURNSTILE_USUAL_DOCKER:-/var/run/docker.sock}
read -r -a FLAGS <<< "${TURNSTILE_CI_DOCKER_FLAGS:-}"
# An engine without a bridge removes docker0, which is that of any other engine of the same network.
readonly -a APART=(${TURNSTILE_CI_DOCKER_APART:+unshare --net})
readonly START_S=60
readonly STOP_S=20

say() { printf 'ci_docker: %s\n' "$*" >&2; }

fail() {
  say "$*"
  exit 3
}

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi
}

# Asks without a client, which need not be installed. Only sockets and plain tcp are asked.
answers() {
  python3 - "$1" << 'PYTHON' 2> /dev/null
import http.client, socket, sys, urllib.parse

address = urllib.parse.urlsplit(sys.argv[1])
connection = http.client.HTTPConnection(address.hostname or "engine", address.port or 2375, timeout=5)
if address.scheme == "unix":
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(5)
    connection.sock.connect(address.path)
connection.request("GET", "/_ping")
sys.exit(connection.getresponse().status != 200)
PYTHON
}

# running PIDFILE NAME: its process is that program and lives. A dead engine's containerd can stay as a zombie, and
# its number can be another program's by now; both still answer kill -0.
running() {
  local pid
  pid=$(cat "$1" 2> /dev/null) || return 1
  [ "$(cat "/proc/$pid/comm" 2> /dev/null)" = "$2" ] && ! grep -q '^State:[[:space:]]*Z' "/proc/$pid/status"
}

# Daemons that are started here outlive the caller, and would keep every file that it has open: a lock held through
# a file descriptor would stay held after the caller's end. Bash keeps this script itself on descriptor 255 and
# closes that one in its children.
close_inherited_files() {
  local fd
  for fd in /proc/"$BASHPID"/fd/*; do
    fd=${fd##*/}
    if [ "$fd" -gt 2 ] && [ "$fd" -ne 255 ]; then eval "exec $fd>&-"; fi
  done
}

use() {
  say "using $1"
  printf 'export DOCKER_HOST=%q\n' "$1"
}

install_engine() {
  command -v apt-get > /dev/null || fail "there is no Docker engine here, and no apt-get to install one"
  local packages=(docker.io iptables ca-certificates) log
  say "installing ${packages[*]}"
  log=$(mktemp)
  {
    as_root apt-get update -qq
    # Later Debian releases have the client in a package of its own.
    if apt-cache show docker-cli > /dev/null 2>&1; then packages+=(docker-cli); fi
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"
  } > "$log" 2>&1 || {
    tail -n 20 "$log" >&2
    rm -f "$log"
    fail "the installation failed"
  }
  rm -f "$log"
}

# Without a service manager nobody may have mounted the control groups that limits need.
mount_cgroups() {
  if grep -qE ' cgroup2? ' /proc/mounts; then return; fi
  mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup
  local controller
  for controller in $(awk 'NR > 1 && $4 == 1 {print $1}' /proc/cgroups); do
    mkdir -p "/sys/fs/cgroup/$controller"
    mount -t cgroup -o "$controller" cgroup "/sys/fs/cgroup/$controller" || rmdir "/sys/fs/cgroup/$controller"
  done
}

start_engine() {
  [ "$(id -u)" -eq 0 ] || fail "starting an engine takes root"
  mount_cgroups
  mkdir -p "$ROOT/data" "$ROOT/exec"
  # What a killed engine left would keep the next from starting.
  running "$ROOT/pid" dockerd || rm -f "$ROOT/pid" "$ROOT/docker.sock"
  running "$ROOT/exec/containerd/containerd.pid" containerd || rm -f "$ROOT/exec/containerd/containerd.pid"
  # setsid: neither the end of the shell nor its Ctrl-C reaches the engine.
  setsid nohup "${APART[@]}" dockerd --data-root "$ROOT/data" --exec-root "$ROOT/exec" --pidfile "$ROOT/pid" \
    --host "$OWN" --group "$(id -gn)" "${FLAGS[@]}" > "$ROOT/log" 2>&1 < /dev/null &
  local engine=$! started=$SECONDS
  until answers "$OWN"; do
    if ! kill -0 "$engine" 2> /dev/null || [ $((SECONDS - started)) -gt "$START_S" ]; then
      tail -n 20 "$ROOT/log" >&2
      kill "$engine" 2> /dev/null || true
      fail "the engine did not start (see above)"
    fi
    sleep 0.2
  done
}

up() {
  local host
  close_inherited_files
  for host in ${DOCKER_HOST:-} "$USUAL" "$OWN"; do
    if answers "$host"; then
      use "$host"
      return
    fi
  done
  if ! command -v dockerd > /dev/null; then
    install_engine
    # With a service manager the package starts its own.
    if answers "$USUAL"; then
      use "$USUAL"
      return
    fi
  fi
  start_engine
  use "$OWN"
  echo "CI_DOCKER_STARTED=1"
}

down() {
  local engine started=$SECONDS mount containers
  if ! running "$ROOT/pid" dockerd; then
    say "nothing of ours runs"
    return
  fi
  engine=$(cat "$ROOT/pid")
  containers=$(docker --host "$OWN" ps --all --quiet 2> /dev/null || true)
  if [ -n "$containers" ]; then
    # shellcheck disable=SC2086
    docker --host "$OWN" rm --force --volumes $containers > /dev/null 2>&1 || true
  fi
  kill "$engine"
  while running "$ROOT/pid" dockerd; do
    if [ $((SECONDS - started)) -gt "$STOP_S" ]; then
      kill -KILL "$engine"
      break
    fi
    sleep 0.1
  done
  # Mounts that a killed engine left.
  { grep -F " $ROOT/" /proc/mounts || true; } | awk '{print $2}' | sort -r | while read -r mount; do
    umount "$mount" 2> /dev/null || true
  done
  rm -f "$ROOT/pid" "$ROOT/docker.sock"
  say "stopped"
}

case "${1:-}" in
  up) up ;;
  down) down ;;
  *)
    echo "usage: ${0##*/} up|down" >&2
    exit 2
    ;;
esac
