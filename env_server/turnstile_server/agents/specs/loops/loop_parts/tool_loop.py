"""The reference agent: a model, the tools of one MCP server, and a loop, on the standard library alone.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… TOOL_URL=… python3 tool_loop.py INSTRUCTION_FILE [--stream]

It offers the model the tools and runs what the model calls (``conversation.py``). A failed model call is tried
again as the `openai` package does it (``sdk_retries.py``). It prints one line of JSON per turn, and its exit code
says how it ended (``ending.py``); 1 is a crash, 2 a wrong command line.

Python 3.9 or later.
"""

from __future__ import annotations

import argparse
import os

from .chat import Message, Model
from .conversation import converse
from .ending import exit_code_of
from .http_connection import Connection
from .mcp_tools import Tools
from .sdk_retries import SdkRetries

ABOUT = {"name": "tool-loop", "version": "2.0"}
SYSTEM = (
    "You solve the user's task with the tools you are given. When you are done, answer without calling a tool."
)
MODEL_SILENCE_S = 600.0
"""Then a call is tried again, as the `openai` package does."""
TOOLS_SILENCE_S = 60.0
"""A command may be silent for long; the MCP endpoint sends pings meanwhile."""


def as_history(message: Message) -> Message:
    """A reply as the next calls repeat it: what the API promises, and the reasoning."""
    reply: Message = {"role": "assistant", "content": message.get("content")}
    if message.get("reasoning_content"):
        reply["reasoning_content"] = message["reasoning_content"]
    calls = [call for call in message.get("tool_calls") or () if call.get("type") == "function"]
    if calls:
        functions = [{name: call["function"][name] for name in ("name", "arguments")} for call in calls]
        reply["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": function}
            for call, function in zip(calls, functions)  # noqa: B905 - Python 3.9; they are of one length
        ]
    return reply


def play(options: argparse.Namespace) -> None:
    """Returns when the model is done. Raises Ended otherwise."""
    key, headers = os.environ["OPENAI_API_KEY"], {"user-agent": "/".join(ABOUT.values())}
    url = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1").rstrip("/")
    api = Connection(f"{url}/chat/completions", key, MODEL_SILENCE_S)
    model = Model(api, options.model, SdkRetries(options.retries), as_history, headers, stream=options.stream)
    # The tools' key is the model's.
    tools = Tools(Connection(os.environ["TOOL_URL"], key, TOOLS_SILENCE_S), ABOUT)
    try:
        with open(options.instruction, encoding="utf-8") as file:
            task = file.read()
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
        converse(model, tools, messages, options.max_turns)
    finally:
        tools.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="The reference agent: a loop over tools.")
    parser.add_argument("instruction", help="file with the task, in the user's words")
    parser.add_argument("--model", default=os.environ.get("OPENAI_MODEL", "policy"))
    parser.add_argument("--stream", action="store_true", help="use streamed model calls")
    parser.add_argument("--max-turns", type=int, default=50)
    parser.add_argument("--retries", type=int, default=2, help="of a failed model call")
    options = parser.parse_args()
    return exit_code_of(lambda: play(options))
