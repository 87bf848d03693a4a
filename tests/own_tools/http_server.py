"""An MCP server over streamable HTTP, by the SDK: ``python http_server.py PORT sse|json|stateless``."""

from __future__ import annotations

import os
import sys

import anyio
import uvicorn
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("web")


@server.tool()
async def echo(text: str, context: Context) -> str:
    """Says it again."""
    await context.report_progress(1, 1, "said")
    return text


@server.tool()
async def header(name: str, context: Context) -> str:
    """A header of the request."""
    request = context.request_context.request
    return str(request.headers.get(name)) if request is not None else ""


@server.tool()
async def giant() -> str:
    """Too much."""
    return "x" * 3_000_000


@server.tool()
async def hang() -> str:
    """Does not answer."""
    await anyio.sleep(600)
    return ""


@server.tool()
async def flood(context: Context) -> str:
    """Notifies without end."""
    for number in range(100_000):
        await context.report_progress(number, None, "more")
    return ""


@server.tool()
async def die() -> str:
    """Ends the server."""
    os._exit(7)


if __name__ == "__main__":
    port, kind = int(sys.argv[1]), sys.argv[2]
    app = server.streamable_http_app(json_response=kind == "json", stateless_http=kind == "stateless")
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")
