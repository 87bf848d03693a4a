"""The fixture tools that MCP's conformance suite calls, as a user's own Python functions."""

from __future__ import annotations

import asyncio
import base64
import io
import wave
import zlib

import mcp_types as mcp
from mcp.server.mcpserver import Audio, Image

from turnstile_server.own_tools import ToolContext, tool


def _chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def _png() -> bytes:
    """One red pixel."""
    header = bytes([0, 0, 0, 1, 0, 0, 0, 1, 8, 2, 0, 0, 0])
    pixel = zlib.compress(b"\x00\xff\x00\x00")
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", pixel) + _chunk(b"IEND", b"")


def _wav() -> bytes:
    """One silent sample."""
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(1)
        file.setframerate(8000)
        file.writeframes(b"\x80")
    return data.getvalue()


def _resource(uri: str, kind: str, text: str) -> mcp.EmbeddedResource:
    contents = mcp.TextResourceContents(uri=uri, mime_type=kind, text=text)
    return mcp.EmbeddedResource(type="resource", resource=contents)


@tool(where="host")
def test_simple_text() -> str:
    """Gives text."""
    return "This is a simple text response for testing."


@tool(where="host")
def test_image_content() -> Image:
    """Gives an image."""
    return Image(data=_png(), format="png")


@tool(where="host")
def test_audio_content() -> Audio:
    """Gives audio."""
    return Audio(data=_wav(), format="wav")


@tool(where="host")
def test_embedded_resource() -> mcp.EmbeddedResource:
    """Gives a resource."""
    return _resource("test://embedded-resource", "text/plain", "This is an embedded resource content.")


@tool(where="host")
def test_multiple_content_types() -> list[mcp.ContentBlock]:
    """Gives text, an image and a resource."""
    image = mcp.ImageContent(data=base64.b64encode(_png()).decode(), mime_type="image/png")
    resource = _resource("test://mixed-content-resource", "application/json", '{"test": "data", "value": 123}')
    return [mcp.TextContent(text="Multiple content types test:"), image, resource]


@tool(where="host")
async def test_tool_with_logging(context: ToolContext) -> str:
    """Sends log messages."""
    for message in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        context.log("info", message)
        await asyncio.sleep(0.05)
    return "Logged."


@tool(where="host")
def test_error_handling() -> str:
    """Fails."""
    raise RuntimeError("This tool intentionally returns an error for testing")


@tool(where="host")
async def test_tool_with_progress(context: ToolContext) -> str:
    """Reports progress."""
    for done in (0, 50, 100):
        context.progress(done, 100)
        await asyncio.sleep(0.05)
    return "Progressed."


@tool(where="host")
async def test_reconnection() -> str:
    """Runs longer than the server keeps a response open (tools.stream_max_s of the test)."""
    await asyncio.sleep(1.3)
    return "Reconnected."
