#!/usr/bin/env bash
# Installs packages whose requirements are not ours, at the versions of PINS, into a virtual environment of their own:
#
#     scripts/install_pinned.sh scripts/task-packages.txt DIR     then DIR/bin/python
#
# It does nothing when DIR already holds these versions, so DIR may be kept between runs. PYTHON names the interpreter
# (default python3; 3.11 or newer).
set -euo pipefail

pins=${1:?usage: install_pinned.sh PINS DIR}
directory=${2:?usage: install_pinned.sh PINS DIR}

if cmp -s "$pins" "$directory/installed"; then
  exit 0
fi
rm -rf "$directory"
"${PYTHON:-python3}" -m venv "$directory"
"$(dirname "$0")/install_exactly.sh" "$directory" "$pins"
# Written last: an interrupted installation is done again from the start.
cp "$pins" "$directory/installed"
