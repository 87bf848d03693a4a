#!/usr/bin/env bash
# Installs the MCP clients that the MCP endpoint is tested with, the official conformance suite, and an MCP server
# that is mounted behind the endpoint, at pinned versions, into DIR:
#
#     scripts/install_mcp_clients.sh DIR     then DIR/bin/mcp-inspector, claude, conformance, mcp-server-everything
#
# Node.js comes along, for npm picks older versions of both under an older one; only npm must be there. It does
# nothing when DIR already holds these versions, so DIR may be kept between runs.
set -euo pipefail

directory=${1:?usage: install_mcp_clients.sh DIR}
readonly NODE=node@24.21.0
readonly CLIENTS=(
  @modelcontextprotocol/inspector@2.12.0
  @anthropic-ai/claude-code@2.1.329
  @modelcontextprotocol/conformance@0.1.16
  @modelcontextprotocol/server-everything@2026.8.31
)
pins=$(printf '%s\n' "$NODE" "${CLIENTS[@]}")

if [ "$(cat "$directory/installed" 2> /dev/null)" = "$pins" ]; then
  exit 0
fi
rm -rf "$directory"
mkdir -p "$directory/bin"
directory=$(cd "$directory" && pwd)
# Not --silent, which hides errors, too. More tries than npm's two: CI runs this beside four other installations.
quiet=(--loglevel=error --no-audit --no-fund --no-update-notifier --fetch-retries=5)
npm install "${quiet[@]}" --prefix "$directory/node" "$NODE"
node=$directory/node/node_modules/node/bin
PATH=$node:$PATH npm install "${quiet[@]}" --prefix "$directory/clients" "${CLIENTS[@]}"
for client in mcp-inspector claude conformance mcp-server-everything; do
  printf '#!/bin/sh\nPATH=%s:$PATH exec %s "$@"\n' "$node" "$directory/clients/node_modules/.bin/$client" \
    > "$directory/bin/$client"
  chmod +x "$directory/bin/$client"
done
# Written last: an interrupted installation is done again from the start.
printf '%s\n' "$pins" > "$directory/installed"
