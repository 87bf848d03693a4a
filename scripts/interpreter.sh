#!/bin/sh
# Prints the interpreter to make .venv with, and says on standard error which and why:
#
#     scripts/interpreter.sh            the best that PATH and /usr/bin have
#     scripts/interpreter.sh PYTHON     this one, if it can be used
#
# One that was compiled with what profiles of it said (`--enable-optimizations`, or the system's own, which always is)
# takes about two thirds of the time of one that was not, as those that pyenv compiles by default. Of the optimised
# ones the newest is taken, of others only where there is no optimised one.
set -eu

# Prints what it is where it can be used: its version, and whether it is optimised.
look='import sys, sysconfig
if not (3, 11) <= sys.version_info < (3, 15):
    sys.exit("no Python 3.11 to 3.14")
try:
    import ensurepip, venv
except ImportError:
    sys.exit("it has no venv; on Debian and Ubuntu: apt install python3-venv")
arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
optimised = "--enable-optimizations" in arguments or sys.base_prefix == "/usr"
print("optimised" if optimised else "compiled without profiles", "%d.%d.%d" % sys.version_info[:3])'

if [ $# -gt 0 ]; then
  python=$(command -v "$1") || { echo "make: there is no $1 here" >&2; exit 1; }
  kind=$("$python" -c "$look" 2>&1) || { echo "make: $python cannot be used: $kind" >&2; exit 1; }
  echo "make: using $python ($kind), as asked" >&2
  echo "$python"
  exit
fi

other= other_kind= unusable=
for version in 14 13 12 11 ''; do
  IFS=:
  for folder in $PATH /usr/bin; do
    python=$folder/python3${version:+.$version}
    [ -x "$python" ] || continue
    if ! kind=$("$python" -c "$look" 2>&1); then
      unusable="$unusable
make: $python: $(echo "$kind" | tail -n 1)"
      continue
    fi
    case $kind in
      optimised*)
        echo "make: using $python ($kind)" >&2
        echo "$python"
        exit
        ;;
    esac
    if [ -z "$other" ]; then other=$python other_kind=$kind; fi
  done
done
if [ -n "$other" ]; then
  echo "make: using $other ($other_kind: an optimised one would take two thirds of the time)" >&2
  echo "$other"
  exit
fi
echo "make: no Python 3.11 to 3.14 with venv found; name one: make PYTHON=…$unusable" >&2
exit 1
