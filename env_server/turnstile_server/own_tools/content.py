"""MCP results as this server's: structured content and content blocks are kept, and there is always a text."""

from __future__ import annotations

import mcp_types as mcp

from turnstile_server.tools.protocol import ToolResult


def as_result(converted: mcp.CallToolResult) -> ToolResult:
    """``content`` is kept where it is more than one plain text."""
    blocks = tuple(converted.content)
    plain = len(blocks) == 1 and isinstance(blocks[0], mcp.TextContent) and blocks[0].annotations is None
    return ToolResult(
        "\n".join(text_of(block) for block in blocks),
        bool(converted.is_error),
        converted.structured_content,
        () if plain or not blocks else blocks,
    )


def text_of(block: mcp.ContentBlock) -> str:
    """A content block where only text can be shown."""
    if isinstance(block, mcp.TextContent):
        return block.text
    if isinstance(block, mcp.ImageContent | mcp.AudioContent):
        return f"[{block.type}: {block.mime_type}, {len(block.data) * 3 // 4} bytes]"
    if isinstance(block, mcp.EmbeddedResource):
        inner = block.resource
        return inner.text if isinstance(inner, mcp.TextResourceContents) else f"[resource: {inner.uri}]"
    return f"[resource: {block.uri}]"
