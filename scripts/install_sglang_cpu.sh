#!/usr/bin/env bash
# Installs SGLang, at the versions of sglang-cpu.txt, into its own virtual environment DIR, for a machine without a GPU:
#
#     scripts/install_sglang_cpu.sh DIR     then TURNSTILE_SGLANG_PYTHON=DIR/bin/python pytest -m sglang
#
# Its own, because its requirements are not ours; without most of what SGLang requires, because that is CUDA
# (tests/sglang_cpu stands in for the little of it that is imported). It does nothing when DIR already holds these
# versions, so DIR may be kept between runs. PYTHON names the interpreter (default python3; 3.11),
# TORCH_INDEX an index to take torch from, as in the Makefile.
set -euo pipefail

readonly TORCH=torch==2.13.0
directory=${1:?usage: install_sglang_cpu.sh DIR}
pins=$(dirname "$0")/sglang-cpu.txt

if cmp -s "$pins" "$directory/installed"; then
  exit 0
fi
rm -rf "$directory"
"${PYTHON:-python3}" -m venv "$directory"
"$directory/bin/pip" install --quiet --disable-pip-version-check ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
"$(dirname "$0")/install_exactly.sh" "$directory" "$pins"
# Written last: an interrupted installation is done again from the start.
cp "$pins" "$directory/installed"
