#!/usr/bin/env bash
# Prints a Python of this machine that is 3.12 or newer, which Harbor needs: `PYTHON=$(scripts/newer_python.sh)`.
# Of a `python3.12` on the PATH, or of pyenv's versions; what is only pyenv's name for one is none.
set -euo pipefail

for python in python3.12 python3.13 python3.14 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
  if "$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null; then
    command -v "$python"
    exit 0
  fi
done
echo "there is no Python 3.12 or newer with venv here: Harbor needs one (pyenv install 3.12)" >&2
exit 1
