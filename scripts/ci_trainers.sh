#!/usr/bin/env bash
# Exporters against the trainers' own types and code: installs each trainer whose tests need its package, at pinned
# versions, into a Python of its own, and plays the suite `trainers`.
#
#     scripts/ci_trainers.sh CACHE [PYTEST OPTION…]
#
# CACHE/NAME is kept between runs. Needs .venv.
set -euo pipefail
cache=${1:?usage: ci_trainers.sh CACHE [PYTEST OPTION…]}
shift
cd "$(dirname "$0")/.."

# trainer NAME PYTHON: scripts/trainers/NAME.txt into CACHE/NAME, and TURNSTILE_NAME_PYTHON for the tests.
trainer() {
  local name=$1
  if ! command -v "$2" > /dev/null; then
    echo "the tests of $name need $2, which is not on the PATH: install it, or leave out the suite \`trainers\`" >&2
    exit 1
  fi
  PYTHON=$2 scripts/install_pinned.sh "scripts/trainers/$name.txt" "$cache/$name"
  export "TURNSTILE_${name^^}_PYTHON=$cache/$name/bin/python"
}

# despite NAME MODULES PACKAGE==VERSION…: into CACHE/NAME, unless it has MODULES, packages that ask for 3.12, for which
# the public index has torch with CUDA only. pip, because uv cannot be told to take them.
despite() {
  local python=$cache/$1/bin/python modules=$2
  shift 2
  "$python" -c "import $modules" 2> /dev/null ||
    "$python" -m pip install --quiet --no-deps --ignore-requires-python "$@"
}

trainer verl python3.11  # AReaL and Agent Lightning, too
despite verl agentlightning agentlightning==1.0.2
trainer skyrl python3.11
# tests/trainers/skyrl_program.py says what of it works on 3.11.
despite skyrl skyrl,skyrl_gym skyrl==0.4.0 skyrl-gym==0.4.0

exec .venv/bin/python scripts/suites.py trainers "$@"
