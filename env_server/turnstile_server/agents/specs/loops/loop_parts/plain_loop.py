"""A tool-calling agent that adds no text of its own: Chat Completions and MCP over plain HTTP, and a loop.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… TOOL_URL=… python3 plain_loop.py INSTRUCTION_FILE [--max-turns N]

It sends the task as the user's only message: no system prompt, no clock. Then it offers the model the tools of one
MCP server and runs what the model calls (``conversation.py``). It prints one line of JSON per turn.

Exit codes: 0 the model was done, 3 the model API refused a call for good, 4 the model API failed, 5 turns,
context or budget are used up, 6 the MCP endpoint failed; 1 a crash, 2 a wrong command line.

Python 3.9 or later.
"""

from __future__ import annotations

import argparse
import os

from .chat import Message, Model, PlainRetries
from .conversation import converse
from .ending import exit_code_of
from .http_connection import Connection
from .mcp_tools import Tools

ABOUT = {"name": "plain-loop", "version": "1.1"}
MODEL_SILENCE_S = 3600.0
"""Seconds that a model call may take; the model API has the real limits."""
TOOLS_SILENCE_S = 60.0
"""The MCP endpoint sends pings while a command runs, so silence means that the server is gone."""


def without_nulls(message: Message) -> Message:
    return {name: value for name, value in message.items() if value is not None}


def play(options: argparse.Namespace) -> None:
    """Returns when the model is done. Raises Ended otherwise."""
    key = os.environ["OPENAI_API_KEY"]
    api = Connection(os.environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions", key, MODEL_SILENCE_S)
    model = Model(api, options.model, PlainRetries(options.retries), without_nulls, {})
    tools = Tools(Connection(os.environ["TOOL_URL"], key, TOOLS_SILENCE_S), ABOUT)
    try:
        with open(options.instruction, encoding="utf-8") as file:
            converse(model, tools, [{"role": "user", "content": file.read()}], options.max_turns)
    finally:
        tools.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="A tool-calling agent in plain Python.")
    parser.add_argument("instruction", help="file with the task, in the user's words")
    parser.add_argument("--model", default=os.environ.get("OPENAI_MODEL", "policy"))
    parser.add_argument("--max-turns", type=int, default=50)
    parser.add_argument("--retries", type=int, default=2, help="of a failed model call")
    options = parser.parse_args()
    return exit_code_of(lambda: play(options))
