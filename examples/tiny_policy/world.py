"""An errand played in memory: the tools' own words without a sandbox, for demonstrations and quick evaluation.

Holds: what a tool answers here is, character for character, what the tool door answers in a sandbox (a test
compares the two). Only what the policy was taught is played; any other call is answered as the tool door answers
a call that failed, without its exact words.
"""

from __future__ import annotations

import json

from turnstile.models import Tool, ToolCall
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.functions import numbered
from turnstile_server.tools.toolbox import Toolbox


def offered_tools() -> tuple[Tool, ...]:
    """The tool door's five, as an agent offers them to the model."""
    return tuple(
        Tool(
            tool.name,
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                },
            },
        )
        for tool in Toolbox(ToolSettings()).all_tools
    )


class World:
    """The files of one episode. ``call`` is one tool call, ``files`` what is there now."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = dict(files)

    def call(self, call: ToolCall) -> str:
        try:
            arguments = json.loads(call.arguments)
        except ValueError as error:
            return f"Error: the arguments are not JSON: {error}"
        match call.name, arguments:
            case "read_file", {"path": str(path), **rest} if not rest and path in self.files:
                lines = self.files[path].splitlines()
                return numbered(lines, 1, ToolSettings().max_file_chars)[0] if lines else f"[{path} is empty]"
            case "write_file", {"path": str(path), "content": str(content), **rest} if not rest and path:
                self.files[path] = content
                return f"Wrote {len(content.encode())} bytes to {path}."
            case _:
                return f"Error: {call.name} cannot do that"
