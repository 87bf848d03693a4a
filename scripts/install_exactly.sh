#!/usr/bin/env bash
# Installs the packages of PINS and nothing besides (they name all that they need) into the virtual environment DIR:
#
#     scripts/install_exactly.sh DIR PINS
#
# With uv, where .venv has it (`make install`), it takes a fifth of pip's time; else with DIR's pip. Both take the index
# that pip is configured with.
set -euo pipefail

directory=${1:?usage: install_exactly.sh DIR PINS}
pins=${2:?usage: install_exactly.sh DIR PINS}
uv=$(dirname "$0")/../.venv/bin/uv

if [ -x "$uv" ]; then
  index=$("$directory/bin/pip" config get global.index-url 2> /dev/null || true)
  "$uv" pip install --quiet --no-config --python "$directory/bin/python" ${index:+--default-index "$index"} \
    --no-deps --requirements "$pins"
else
  "$directory/bin/pip" install --quiet --disable-pip-version-check --no-deps --requirement "$pins"
fi
