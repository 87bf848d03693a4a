#!/usr/bin/env bash
# Makes bubblewrap available: local sandboxes, which the demo and the tests use, are made with it.
#
#     scripts/bubblewrap.sh     does nothing where `bwrap` works; as root on Debian or Ubuntu installs the package
set -euo pipefail

works() { command -v bwrap > /dev/null && bwrap --ro-bind / / --unshare-pid true 2> /dev/null; }

if works; then exit 0; fi
if ! command -v bwrap > /dev/null && [ "$(id -u)" -eq 0 ] && command -v apt-get > /dev/null; then
  echo "installing bubblewrap" >&2
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq > /dev/null
  apt-get install -y -qq --no-install-recommends bubblewrap > /dev/null
  if works; then exit 0; fi
fi
if command -v bwrap > /dev/null; then
  echo "bwrap is installed, but cannot make a sandbox here; are unprivileged user namespaces restricted?" >&2
  bwrap --ro-bind / / --unshare-pid true >&2 || true
else
  echo "bubblewrap is missing; on Debian and Ubuntu: apt install bubblewrap" >&2
fi
exit 1
