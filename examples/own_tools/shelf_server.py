"""An MCP server of one's own, for docs/own-tools.md: a shelf of books. It speaks MCP over stdin and stdout.

Nothing in it knows of Turnstile: any MCP server can be mounted.
"""

from __future__ import annotations

import sys
from typing import TypedDict

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp_types import ToolAnnotations

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360f8cf50"
    "0f0003860180"
    "5a347d6b0000000049454e44ae426082"
)


class Shelf(TypedDict):
    """What is on the shelf."""

    books: list[str]


server = MCPServer("shelf", instructions="A shelf of books.")
books: list[str] = []


@server.tool(annotations=ToolAnnotations(title="Put a book on the shelf", destructive_hint=False))
async def add(title: str, context: Context) -> Shelf:
    """Puts a book on the shelf."""
    await context.report_progress(1, 2, f"looking at {title}")
    books.append(title)
    await context.report_progress(2, 2, "done")
    return {"books": books}


@server.tool()
def burn(title: str) -> str:
    """Takes a book away for good."""
    books.remove(title)
    return f"{title} is gone"


@server.tool()
def cover() -> Image:
    """Shows the cover of the first book."""
    return Image(data=PIXEL, format="png")


if __name__ == "__main__":
    print("the shelf is open", file=sys.stderr)
    server.run("stdio")
