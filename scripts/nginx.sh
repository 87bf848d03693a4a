#!/usr/bin/env bash
# Makes nginx available: a test plays through it with the configuration of examples/nginx.conf.
#
#     scripts/nginx.sh     does nothing where `nginx` is; as root on Debian or Ubuntu installs the package
set -euo pipefail

if command -v nginx > /dev/null; then exit 0; fi
if [ "$(id -u)" -eq 0 ] && command -v apt-get > /dev/null; then
  echo "installing nginx" >&2
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq > /dev/null
  # No service is to be started.
  if [ ! -e /usr/sbin/policy-rc.d ]; then
    printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
    chmod 755 /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  apt-get install -y -qq --no-install-recommends nginx-light > /dev/null
  exit 0
fi
echo "nginx is missing; on Debian and Ubuntu: apt install nginx-light" >&2
exit 1
