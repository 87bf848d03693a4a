#!/usr/bin/env bash
# Installs TRL, openenv and what Turnstile's client needs, at the versions of openenv.txt, into a virtual environment
# DIR of their own, for a machine without a GPU:
#
#     scripts/install_openenv.sh DIR     then TURNSTILE_OPENENV_PYTHON=DIR/bin/python pytest -m agents -k openenv
#
# Its own, because openenv asks for an older MCP than Turnstile's server. It does nothing when DIR already holds these
# versions, so DIR may be kept between runs. PYTHON names the interpreter (default python3; 3.11), TORCH_INDEX an index
# to take torch from.
set -euo pipefail

readonly TORCH=torch==2.13.0
directory=${1:?usage: install_openenv.sh DIR}
pins=$(dirname "$0")/openenv.txt

if cmp -s "$pins" "$directory/installed"; then
  exit 0
fi
rm -rf "$directory"
"${PYTHON:-python3}" -m venv "$directory"
"$directory/bin/pip" install --quiet --disable-pip-version-check ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
"$(dirname "$0")/install_exactly.sh" "$directory" "$pins"
# Written last: an interrupted installation is done again from the start.
cp "$pins" "$directory/installed"
