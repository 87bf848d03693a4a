#!/usr/bin/env bash
# Unpacks the package of miles, whose types the slime and miles exporter is tested with, into DIR:
#
#     scripts/install_miles.sh DIR     then TURNSTILE_MILES=DIR .venv/bin/pytest -m agents tests/client
#
# Without what it requires (Ray, Megatron, …) and in no environment: only one of its modules is loaded. It does
# nothing when DIR already holds this version. PYTHON names the interpreter whose pip downloads it (default python3).
set -euo pipefail

directory=${1:?usage: install_miles.sh DIR}
readonly PIN='miles-rl==0.0.2 --hash=sha256:452c5c0d8b7fc3729f225e63194f16fa7bbe587b6936386c6501793fce7cf820'

if [ "$(cat "$directory/installed" 2> /dev/null)" = "$PIN" ]; then
  exit 0
fi
rm -rf "$directory"
mkdir -p "$directory"
printf '%s\n' "$PIN" > "$directory/pin.txt"
"${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
  --only-binary :all: --target "$directory" --requirement "$directory/pin.txt"
# Written last: an interrupted installation is done again from the start.
printf '%s\n' "$PIN" > "$directory/installed"
