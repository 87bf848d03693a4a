"""Plays an errand in memory: the tools' exact answers without a sandbox, for training and quick evaluation.

Invariant: a tool answers here what the MCP endpoint answers in a sandbox, character for character (a test compares
them). Only the calls that the policy was taught are played, and a misspelt name of a file. Any other call fails
with another text than the endpoint's, and is counted in ``World.refused``.
"""

from __future__ import annotations

import json
import re

from turnstile.models import Tool, ToolCall
from turnstile_server.sandboxes.protocol import WORKDIR
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.functions import numbered
from turnstile_server.tools.toolbox import Toolbox


def offered_tools() -> tuple[Tool, ...]:
    """The five tools of the MCP endpoint, as an agent offers them to the model."""
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


_FILE_NAME = re.compile(r"\w+\.txt", re.ASCII)


class World:
    """The files of one episode, which tool calls read and write."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = dict(files)
        self.refused = 0
        """Calls that were not played; the text of their results is not the endpoint's."""

    def call(self, call: ToolCall) -> str:
        try:
            arguments = json.loads(call.arguments)
        except ValueError as error:
            self.refused += 1
            return f"Error: the arguments are not JSON: {error}"
        match call.name, arguments:
            case "read_file", {"path": str(path), **rest} if not rest and path in self.files:
                lines = self.files[path].splitlines()
                return numbered(lines, 1, ToolSettings().max_file_chars)[0] if lines else f"[{path} is empty]"
            case "read_file", {"path": str(path), **rest} if not rest and _FILE_NAME.fullmatch(path):
                return f"Error: {WORKDIR}/{path}: no such file or directory"
            case "write_file", {"path": str(path), "content": str(content), **rest} if not rest and path:
                self.files[path] = content
                return f"Wrote {len(content.encode())} bytes to {path}."
            case _:
                self.refused += 1
                return f"Error: {call.name} cannot do that"
