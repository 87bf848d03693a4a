"""A mounted MCP server with the one fixture of MCP's conformance suite that needs a JSON Schema of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import mcp_types as mcp
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}}
    },
    "properties": {"name": {"type": "string"}, "address": {"$ref": "#/$defs/address"}},
    "additionalProperties": False,
}
TOOL = mcp.Tool(
    name="json_schema_2020_12_tool", description="Tool with JSON Schema 2020-12 features", input_schema=SCHEMA
)


async def list_tools(context: ServerRequestContext[Any, Any], params: Any) -> mcp.ListToolsResult:
    return mcp.ListToolsResult(tools=[TOOL])


async def call_tool(
    context: ServerRequestContext[Any, Any], params: mcp.CallToolRequestParams
) -> mcp.CallToolResult:
    return mcp.CallToolResult(content=[mcp.TextContent(text="called")])


async def main() -> None:
    server: Server[Any] = Server("conformance", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
