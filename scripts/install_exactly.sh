#!/usr/bin/env bash
# Installs the packages of PINS and nothing besides (they name all that they need) into the virtual environment DIR:
#
#     scripts/install_exactly.sh DIR PINS
set -euo pipefail

directory=${1:?usage: install_exactly.sh DIR PINS}
pins=${2:?usage: install_exactly.sh DIR PINS}

exec "$(dirname "$0")/pip_install.sh" "$directory" --no-deps --requirement "$pins"
