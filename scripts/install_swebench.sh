#!/usr/bin/env bash
# Installs SWE-bench's own package, at the versions of swebench.txt, into its own virtual environment DIR:
#
#     scripts/install_swebench.sh DIR     then TURNSTILE_GRADING__SWEBENCH_PYTHON=DIR/bin/python turnstile serve …
#
# Its own, because its requirements (some 500 MB) are not ours. It does nothing when DIR already holds these versions,
# so DIR may be kept between runs. PYTHON names the interpreter (default python3; 3.10 or newer).
set -euo pipefail

directory=${1:?usage: install_swebench.sh DIR}
pins=$(dirname "$0")/swebench.txt

if cmp -s "$pins" "$directory/installed"; then
  exit 0
fi
rm -rf "$directory"
"${PYTHON:-python3}" -m venv "$directory"
"$directory/bin/pip" install --quiet --disable-pip-version-check --requirement "$pins"
# Written last: an interrupted installation is done again from the start.
cp "$pins" "$directory/installed"
