#!/usr/bin/env bash
# `pip install ARGUMENTS…` into the virtual environment DIR:
#
#     scripts/pip_install.sh DIR ARGUMENTS…
#
# With uv, where .venv has it (`make install` puts it there first), it takes a fifth of pip's time; else with DIR's pip.
# Both take the index, and the folders of wheels, that pip is configured with.
set -euo pipefail

directory=${1:?usage: pip_install.sh DIR ARGUMENTS…}
shift
venv=$(dirname "$0")/../.venv

if [ -x "$venv/bin/uv" ]; then
  index=$("$venv/bin/pip" config get global.index-url 2> /dev/null || true)
  index=${PIP_INDEX_URL:-$index}
  links=()
  for place in ${PIP_FIND_LINKS:-}; do links+=(--find-links "$place"); done
  exec "$venv/bin/uv" pip install --quiet --no-config --python "$directory/bin/python" \
    ${index:+--default-index "$index"} "${links[@]}" "$@"
fi
exec "$directory/bin/pip" install --quiet --disable-pip-version-check "$@"
