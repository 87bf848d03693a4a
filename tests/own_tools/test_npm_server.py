"""An MCP server that others wrote, in another language, mounted: the official "everything" server of npm.

It is installed by scripts/install_mcp_clients.sh DIR; TURNSTILE_MCP_CLIENTS is that DIR.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from own_tools_support import OwnServer

pytestmark = [pytest.mark.anyio, pytest.mark.agents]


class News:
    """Implements Progress."""

    def __init__(self) -> None:
        self.reports: list[tuple[Any, ...]] = []

    async def report(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        self.reports.append((progress, total, message))


async def test_the_everything_server_is_mounted_with_content_structure_and_progress() -> None:
    program = Path(os.environ["TURNSTILE_MCP_CLIENTS"]) / "bin" / "mcp-server-everything"
    spec = {
        "name": "everything",
        "command": str(program),
        "args": ["stdio"],
        "where": "host",
        "allow": ["*"],
        "prefix": "all_",
    }
    async with OwnServer({"t": {"servers": [spec]}}).episode() as episode:
        tools = {tool.name: tool for tool in episode.toolbox.tools_of(episode.episode)}
        assert {"all_echo", "all_get-sum", "all_get-structured-content"} <= set(tools)
        assert tools["all_get-structured-content"].output_schema is not None
        assert (await episode("all_echo", message="hello")).text == "Echo: hello"
        assert "7" in (await episode("all_get-sum", a=3, b=4)).text
        assert "wrong arguments" in await episode.error("all_get-sum", a="three", b=4)
        picture = await episode("all_get-tiny-image")
        assert "[image: image/png, " in picture.text
        assert "image" in [block.type for block in picture.content]
        weather = await episode("all_get-structured-content", location="Chicago")
        assert weather.structured is not None
        assert set(weather.structured) == {"temperature", "conditions", "humidity"}
        news = News()
        long = await episode("all_trigger-long-running-operation", {"duration": 1, "steps": 4}, news)
        assert not long.is_error
        assert [report[:2] for report in news.reports] == [(1, 4), (2, 4), (3, 4), (4, 4)]
