"""An MCP server over stdin and stdout that misbehaves as it is told. Run as a program; imports nothing but Python.

    python rogue_server.py MODE [FILE]

Modes: ``fine``, ``dies`` (at start), ``silent`` (never answers), ``reserved`` (has a tool named reset), ``empty``,
``many`` (200 tools), ``stubborn`` (ignores the end of its input and SIGTERM), ``parent`` (leaves a child behind).
FILE: its process id, and its child's, are added to it, a line each.
"""

from __future__ import annotations

# ruff: noqa: T201 - a program
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

MODE = sys.argv[1]
TOOLS = [
    "echo",
    "die",
    "hang",
    "deaf",
    "notify",
    "garbage",
    "answers",
    "giant",
    "giant_id_first",
    "rename",
    "pid",
    "wrong",
    "env",
]
names = {"reserved": ["reset"], "empty": [], "many": [f"t{n}" for n in range(200)]}.get(MODE, TOOLS)


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def answer(request: dict[str, Any], result: dict[str, Any]) -> None:
    send({"jsonrpc": "2.0", "id": request["id"], "result": result})


def text(request: dict[str, Any], said: str) -> None:
    answer(request, {"content": [{"type": "text", "text": said}]})


def tool(name: str) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": name,
        "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}},
    }
    if name == "wrong":
        made["outputSchema"] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    return made


def note(pid: int) -> None:
    if len(sys.argv) > 2:
        with open(sys.argv[2], "a", encoding="utf-8") as file:
            file.write(f"{pid}\n")


def call(request: dict[str, Any]) -> None:
    name, arguments = request["params"]["name"], request["params"].get("arguments") or {}
    match name:
        case "echo":
            text(request, arguments.get("text", ""))
        case "die":
            print("about to die", file=sys.stderr, flush=True)
            os._exit(7)
        case "hang":
            return
        case "deaf":  # reads no more
            time.sleep(600)
        case "notify":
            while True:
                send(
                    {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x"}}
                )
        case "answers":  # to questions that nobody asked
            while True:
                send({"jsonrpc": "2.0", "id": 10**6, "result": {"x": "y" * 1000}})
        case "garbage":
            while True:
                sys.stdout.write("this is no message " * 1000 + "\n")
        case "giant":  # the id last, as TypeScript's SDK writes it
            send(
                {
                    "result": {"content": [{"type": "text", "text": "x" * 3_000_000}]},
                    "jsonrpc": "2.0",
                    "id": request["id"],
                }
            )
        case "giant_id_first":
            text(request, "x" * 3_000_000)
        case "rename":
            names.remove("echo")
            names.append("echo2")
            send({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
            text(request, "renamed")
        case "pid":
            text(request, str(os.getpid()))
        case "wrong":
            answer(request, {"content": [], "structuredContent": {"n": "many"}})
        case "env":
            text(request, json.dumps(dict(os.environ)))
        case _:
            send({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32602, "message": f"no tool {name}"}})


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        match request.get("method"):
            case "initialize":
                answer(
                    request,
                    {
                        "protocolVersion": request["params"]["protocolVersion"],
                        "capabilities": {"tools": {"listChanged": True}},
                        "serverInfo": {"name": "rogue", "version": "1"},
                    },
                )
            case "tools/list":
                answer(request, {"tools": [tool(name) for name in names]})
            case "tools/call":
                call(request)


note(os.getpid())
if MODE == "dies":
    for number in range(30):
        print(f"complaint {number}", file=sys.stderr)
    sys.exit(3)
if MODE == "silent":
    print("I say nothing", file=sys.stderr, flush=True)
    time.sleep(600)
if MODE == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if MODE == "parent":
    note(subprocess.Popen(["sleep", "600"]).pid)
serve()
if MODE == "stubborn":
    time.sleep(600)
