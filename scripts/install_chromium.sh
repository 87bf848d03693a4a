#!/usr/bin/env bash
# Makes Chromium available: the tests of the viewer (tests/ui) drive it.
#
#     scripts/install_chromium.sh     does nothing where `chromium` is; as root on Debian or Ubuntu installs the package
set -euo pipefail

if command -v chromium > /dev/null; then exit 0; fi
if [ "$(id -u)" -eq 0 ] && command -v apt-get > /dev/null; then
  echo "installing chromium" >&2
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq > /dev/null
  apt-get install -y -qq --no-install-recommends chromium > /dev/null
  exit 0
fi
echo "chromium is missing; on Debian: apt install chromium" >&2
exit 1
