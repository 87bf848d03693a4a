"""Tools and their results as OpenEnv and MCP write them.

OpenEnv's ``Tool`` has ``input_schema``; MCP has ``inputSchema`` and more fields
(https://modelcontextprotocol.io/specification/2025-06-18/server/tools). OpenEnv's tool client reads both.
"""

from __future__ import annotations

from typing import Any

from turnstile_server.control.openenv.openenv_wire import OpenEnvTool
from turnstile_server.tools.protocol import ToolResult, ToolSpec


def openenv_tool(spec: ToolSpec) -> OpenEnvTool:
    return OpenEnvTool(name=spec.name, description=spec.description, input_schema=spec.input_schema)


def mcp_tool(spec: ToolSpec) -> dict[str, Any]:
    return spec.as_mcp().model_dump(mode="json", by_alias=True, exclude_none=True)


def mcp_result(result: ToolResult) -> dict[str, Any]:
    """The tool's result as MCP has it, and as ``data``, which OpenEnv's tool client returns, its plain text."""
    told = result.as_mcp().model_dump(mode="json", by_alias=True, exclude_none=True)
    return told | {"data": result.text}


def chat_function(spec: ToolSpec) -> dict[str, Any]:
    """The tool as Chat Completions takes it."""
    function = {"name": spec.name, "description": spec.description, "parameters": spec.input_schema}
    return {"type": "function", "function": function}


def observed(result: ToolResult) -> dict[str, Any]:
    """The fields of an observation that tell what the tool gave."""
    fields: dict[str, Any] = {"result": result.text, "is_error": result.is_error}
    if result.structured is not None:
        fields["structured"] = dict(result.structured)
    return fields
