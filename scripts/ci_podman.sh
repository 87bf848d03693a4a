#!/usr/bin/env bash
# A Podman engine for the tests, beside any other engine:
#
#     eval "$(scripts/ci_podman.sh up)"    TURNSTILE_TEST_PODMAN is the address of one that answers
#     scripts/ci_podman.sh down            stops it and removes what it has
#
# `up` installs Debian's podman and crun (as root) and starts Podman's service with its files in TURNSTILE_CI_PODMAN
# (default /tmp/turnstile-ci-podman; short, a Unix socket lies there). It needs no service manager. The test image
# (TURNSTILE_TEST_IMAGE) is copied from the Docker engine of DOCKER_HOST. Both commands may be repeated. Exit status 3:
# it cannot be installed or started here.
#
# Three things are set for machines where root is not all-powerful, such as a container or a small virtual machine:
# control groups by Podman itself, where nothing like systemd runs; no hierarchy of version 2 beside those of version 1
# (crun refuses the mixture); and crun without bounds that only a process with CAP_SYS_RESOURCE may raise.
set -euo pipefail

readonly ROOT=${TURNSTILE_CI_PODMAN:-/tmp/turnstile-ci-podman}
readonly SOCKET=$ROOT/podman.sock
readonly START_S=30

say() { printf 'ci_podman: %s\n' "$*" >&2; }

fail() {
  say "$*"
  exit 3
}

answers() {
  python3 - "$SOCKET" << 'PYTHON' 2> /dev/null
import http.client, socket, sys

connection = http.client.HTTPConnection("podman", timeout=5)
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.settimeout(5)
connection.sock.connect(sys.argv[1])
connection.request("GET", "/_ping")
sys.exit(connection.getresponse().status != 200)
PYTHON
}

install_podman() {
  command -v apt-get > /dev/null || fail "there is no podman here, and no apt-get to install it"
  say "installing podman crun"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends podman crun; } \
    > "$ROOT/log" 2>&1 || {
    tail -n 20 "$ROOT/log" >&2
    fail "the installation failed"
  }
}

write_configuration() {
  cat > "$ROOT/storage.conf" << CONF
[storage]
driver = "overlay"
graphroot = "$ROOT/graph"
runroot = "$ROOT/run"
CONF
  cat > "$ROOT/containers.conf" << CONF
[containers]
default_ulimits = []
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "bounded"
tmp_dir = "$ROOT/tmp"
[engine.runtimes]
bounded = ["$ROOT/crun"]
CONF
  cat > "$ROOT/crun" << CRUN
#!/bin/sh
exec python3 "$ROOT/crun.py" "\$@"
CRUN
  cat > "$ROOT/crun.py" << 'CRUN'
import json, os, resource, sys

words = sys.argv[1:]
if "create" in words and "--bundle" in words:
    path = os.path.join(words[words.index("--bundle") + 1], "config.json")
    with open(path) as file:
        config = json.load(file)
    for each in config["process"].get("rlimits", ()):
        most = resource.getrlimit(getattr(resource, each["type"]))[1]
        if most != resource.RLIM_INFINITY:
            each["hard"] = min(each["hard"], most)
            each["soft"] = min(each["soft"], most)
    with open(path, "w") as file:
        json.dump(config, file)
os.execvp("crun", ["crun", *words])
CRUN
  chmod 755 "$ROOT/crun"
}

up() {
  [ "$(id -u)" -eq 0 ] || fail "starting Podman takes root"
  mkdir -p "$ROOT"
  if ! answers; then
    command -v podman > /dev/null && command -v crun > /dev/null || install_podman
    write_configuration
    rm -f "$SOCKET"
    local started=$SECONDS
    CONTAINERS_CONF=$ROOT/containers.conf CONTAINERS_STORAGE_CONF=$ROOT/storage.conf setsid nohup unshare --mount sh -c '
      umount /sys/fs/cgroup/unified 2> /dev/null
      exec podman system service --time=0 "unix://$0"' "$SOCKET" > "$ROOT/log" 2>&1 < /dev/null &
    echo $! > "$ROOT/pid"
    until answers; do
      if [ $((SECONDS - started)) -gt "$START_S" ]; then
        tail -n 20 "$ROOT/log" >&2
        fail "Podman's service did not start (see above)"
      fi
      sleep 0.2
    done
  fi
  if [ -n "${TURNSTILE_TEST_IMAGE:-}" ] && [ ! -e "$ROOT/image" ]; then
    docker image save "$TURNSTILE_TEST_IMAGE" | docker --host "unix://$SOCKET" image load > /dev/null
    touch "$ROOT/image"
  fi
  printf 'export TURNSTILE_TEST_PODMAN=%q\n' "unix://$SOCKET"
}

down() {
  local pid mount
  pid=$(cat "$ROOT/pid" 2> /dev/null || true)
  if [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2> /dev/null)" = podman ]; then kill "$pid"; fi
  { grep -F " $ROOT/" /proc/mounts || true; } | awk '{print $2}' | sort -r | while read -r mount; do umount "$mount"; done
  rm -rf "$ROOT"
}

case "${1:-}" in
  up) up ;;
  down) down ;;
  *)
    echo "usage: ${0##*/} up|down" >&2
    exit 2
    ;;
esac
