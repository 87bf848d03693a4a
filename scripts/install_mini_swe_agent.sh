#!/usr/bin/env bash
# Installs mini-swe-agent, at the versions of mini-swe-agent.txt, into its own virtual environment DIR:
#
#     scripts/install_mini_swe_agent.sh DIR     then DIR/bin/mini
#
# Its own, because its requirements are not ours. It does nothing when DIR already holds these versions, so DIR may
# be kept between runs. PYTHON names the interpreter (default python3; 3.11 or newer).
set -euo pipefail

directory=${1:?usage: install_mini_swe_agent.sh DIR}
pins=$(dirname "$0")/mini-swe-agent.txt

if cmp -s "$pins" "$directory/installed"; then
  exit 0
fi
rm -rf "$directory"
"${PYTHON:-python3}" -m venv "$directory"
"$directory/bin/pip" install --quiet --disable-pip-version-check --requirement "$pins"
# Written last: an interrupted installation is done again from the start.
cp "$pins" "$directory/installed"
