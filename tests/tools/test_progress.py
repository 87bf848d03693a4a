"""Progress and log messages of a tool, as clients of each era hear them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import mcp_types as mcp
import pytest
from tools_support import McpStage, PlayedEpisode

from turnstile_server.tools.progress import MESSAGE_CHARS
from turnstile_server.tools.protocol import NO_PROGRESS, EpisodeTools, Progress, ToolResult, ToolSpec

pytestmark = pytest.mark.anyio
ERAS = pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])


class Telling:
    """A tool that tells how it gets on."""

    spec = ToolSpec("tell", "Tells.", {"type": "object"})

    async def call(self, episode: EpisodeTools, arguments: Mapping[str, Any], progress: Progress) -> ToolResult:
        for done in (0, 50, 50, 20, 100):
            await progress.report(done, 100, "x" * (MESSAGE_CHARS + 5))
        await progress.log("debug", "detail")
        await progress.log("info", {"step": 1}, "teller")
        await progress.log("error", "trouble")
        return ToolResult("wanted" if progress.wanted else "not wanted")


@pytest.fixture
def episode(stage: McpStage) -> PlayedEpisode:
    begun = stage.episodes.begin("e1", None)
    begun.own_tools = (Telling(),)
    return begun


@ERAS
async def test_progress_only_grows_and_its_message_is_bounded(
    stage: McpStage, episode: PlayedEpisode, mode: str
) -> None:
    heard: list[tuple[float, float | None, str | None]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, total, message))

    async with stage.client(episode, mode=mode) as client:
        result = await client.call_tool("tell", {}, progress_callback=hear)
        assert result.content[0].text == "wanted"  # type: ignore[union-attr]
        assert [(progress, total) for progress, total, _ in heard] == [(0, 100), (50, 100), (100, 100)]
        assert {message for _, _, message in heard} == {"x" * MESSAGE_CHARS}
        silent = await client.call_tool("tell", {})
        assert silent.content[0].text == "not wanted"  # type: ignore[union-attr]
        assert len(heard) == 3


@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
@pytest.mark.parametrize(
    ("level", "expected"),
    [(None, ["info", "error"]), ("debug", ["debug", "info", "error"]), ("error", ["error"]), ("alert", [])],
)
async def test_a_session_hears_log_messages_of_its_level(
    stage: McpStage,
    episode: PlayedEpisode,
    level: Literal["debug", "error", "alert"] | None,
    expected: list[str],
) -> None:
    heard: list[mcp.LoggingMessageNotificationParams] = []

    async def hear(params: mcp.LoggingMessageNotificationParams) -> None:
        heard.append(params)

    async with stage.client(episode, logging_callback=hear) as client:
        if level is not None:
            await client.set_logging_level(level)
        await client.call_tool("tell", {})
    assert [params.level for params in heard] == expected
    for params in heard:
        if params.level == "info":
            assert (params.data, params.logger) == ({"step": 1}, "teller")


async def test_without_a_caller_nothing_is_told() -> None:
    assert not NO_PROGRESS.wanted
    await NO_PROGRESS.report(1)
    await NO_PROGRESS.log("info", "nobody hears")
