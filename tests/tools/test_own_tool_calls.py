"""What holds for every own tool, wherever it comes from: bounds, time, faults, and its end with the episode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from tools_support import PlayedEpisode

from bounded import bounded
from turnstile_server.episodes.own_tools import EpisodeOwnTools
from turnstile_server.errors import Gone, TaskFailed
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.protocol import EpisodeTools, Progress, ServedTool, ToolResult, ToolSpec
from turnstile_server.tools.toolbox import Toolbox
from waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

WORD = {
    "type": "object",
    "properties": {"word": {"type": "string"}},
    "required": ["word"],
    "additionalProperties": False,
}


class Echo:
    """A tool that does with its word what a test says."""

    def __init__(
        self, does: Callable[[str], Awaitable[ToolResult]], timeout_s: float | None = None, name: str = "echo"
    ) -> None:
        self.spec = ToolSpec(name, "Says a word.", WORD, timeout_s=timeout_s)
        self._does = does

    async def call(self, episode: EpisodeTools, arguments: Mapping[str, Any], progress: Progress) -> ToolResult:
        return await self._does(arguments["word"])


async def say(word: str) -> ToolResult:
    return ToolResult(word)


async def called(tool: ServedTool, settings: ToolSettings | None = None, **arguments: Any) -> ToolResult:
    episode = PlayedEpisode("e1", None, own_tools=(tool,))
    return await Toolbox(settings or ToolSettings()).call(episode, "echo", arguments)


async def test_an_own_tool_stands_beside_the_built_in_ones_and_is_called_by_its_name() -> None:
    episode = PlayedEpisode("e1", None, own_tools=(Echo(say),))
    toolbox = Toolbox(ToolSettings())
    assert [tool.name for tool in toolbox.tools_of(episode)] == ["submit", "echo"]
    assert await toolbox.call(episode, "echo", {"word": "hello"}) == ToolResult("hello")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "'word' is a required property"),
        ({"word": 3}, "word: 3 is not of type 'string'"),
        ({"word": "a", "more": 1}, "'more' was unexpected"),
    ],
)
async def test_arguments_that_do_not_fit_the_schema_never_reach_the_tool(
    arguments: dict[str, Any], said: str
) -> None:
    async def never(word: str) -> ToolResult:
        raise AssertionError("the tool was called")

    result = await called(Echo(never), **arguments)
    assert result.is_error
    assert result.text.startswith("wrong arguments for echo")
    assert said in result.text
    assert result.text.endswith("It takes word.")


async def test_numbers_of_any_size_pass_and_bound_nothing_else() -> None:
    async def structured(word: str) -> ToolResult:
        return ToolResult(word, structured={"n": 10**40})

    assert (await called(Echo(structured), word="a")).structured == {"n": 10**40}
    assert "12345678901234567890123 is not of type" in (await called(Echo(say), word=12345678901234567890123)).text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"word": {"$ref": "http://127.0.0.1:9/schema"}}},
        {"type": "object", "properties": {"word": {"$ref": "#/$defs/none"}}},
        {"type": "object", "properties": {"word": {"pattern": "("}}},
        {"type": "object", "properties": {"word": {"type": "no such type"}}},
        {"$ref": "#"},
    ],
)
async def test_a_schema_that_is_none_is_an_error_of_the_tool_and_nothing_is_fetched(
    schema: dict[str, Any],
) -> None:
    tool = Echo(say)
    tool.spec = ToolSpec("echo", "Says a word.", schema)
    result = await called(tool, word="a")
    assert result.is_error
    assert result.text.startswith("echo failed: ")


async def test_arguments_above_their_bound_never_reach_the_tool() -> None:
    result = await called(Echo(say), bounded(ToolSettings, own_max_arguments_bytes=1024), word="x" * 2000)
    assert result.is_error
    assert "the most is 1024" in result.text


async def test_what_a_tool_raises_is_a_result_and_does_not_leave_the_call() -> None:
    async def fail(word: str) -> ToolResult:
        raise ZeroDivisionError(word * 1000)

    result = await called(Echo(fail), word="boom")
    assert result.is_error
    assert result.text.startswith("echo failed: ZeroDivisionError: boomboom")
    assert len(result.text) < 600


async def test_a_tool_that_never_returns_is_stopped_in_its_own_time_or_the_servers() -> None:
    async def hang(word: str) -> ToolResult:
        await anyio.sleep_forever()
        raise AssertionError

    with anyio.fail_after(PATIENCE_S):
        own = await called(Echo(hang, timeout_s=0.05), word="a")
        servers = await called(Echo(hang), ToolSettings(own_timeout_s=0.07), word="a")
    assert (own.is_error, own.text) == (True, "echo took longer than its limit of 0.05 s")
    assert (servers.is_error, servers.text) == (True, "echo took longer than its limit of 0.07 s")


async def test_long_text_is_cut_and_a_structured_result_above_its_bound_is_an_error() -> None:
    async def long(word: str) -> ToolResult:
        return ToolResult(word * 1000)

    async def large(word: str) -> ToolResult:
        return ToolResult(word, structured={"word": word * 2000})

    cut = await called(Echo(long), ToolSettings(own_max_text_chars=256), word="a")
    assert not cut.is_error
    assert "744 bytes left out" in cut.text
    refused = await called(Echo(large), ToolSettings(own_max_result_bytes=1024), word="a")
    assert (refused.is_error, refused.structured) == (True, None)
    assert "the most is 1024" in refused.text


class Source:
    """Implements OwnTools; notes what happens to it."""

    place = "a test"

    def __init__(self, tool: ServedTool, log: list[str], fails: str = "") -> None:
        self._tool = tool
        self._log = log
        self._fails = fails

    @asynccontextmanager
    async def open(self, episode: EpisodeTools) -> AsyncIterator[Sequence[ServedTool]]:
        if self._fails == "open":
            raise TaskFailed("it cannot be opened")
        self._log.append("opened")
        try:
            async with anyio.create_task_group():  # left in another task, anyio refuses this
                if self._fails == "hang":
                    await anyio.sleep_forever()
                yield (self._tool,)
        finally:
            self._log.append("released")
        if self._fails == "close":
            raise OSError("it cannot be closed")


async def test_the_end_of_the_episode_stops_running_calls_and_then_releases_what_they_used() -> None:
    log: list[str] = []

    async def work(word: str) -> ToolResult:
        try:
            await anyio.sleep_forever()
        finally:
            log.append("stopped")
        raise AssertionError

    own, episode = EpisodeOwnTools([Source(Echo(work), log)]), PlayedEpisode("e1", None)
    async with anyio.create_task_group() as tasks:
        await own.open(episode, tasks)
        episode.own_tools = own.tools
        ended = anyio.Event()

        async def call() -> None:
            with pytest.raises(Gone):
                await Toolbox(ToolSettings()).call(episode, "echo", {"word": "a"})
            ended.set()

        tasks.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        await own.stop_calls()
        assert log == ["opened", "stopped"]
        await ended.wait()
        await own.close()
        await own.close()
    assert log == ["opened", "stopped", "released"]
    assert own.tools == ()


async def test_a_source_that_cannot_be_opened_releases_those_before_it() -> None:
    log: list[str] = []
    own = EpisodeOwnTools([Source(Echo(say), log), Source(Echo(say, name="second"), log, fails="open")])
    async with anyio.create_task_group() as tasks:
        with pytest.raises(TaskFailed):
            await own.open(PlayedEpisode("e1", None), tasks)
        await own.close()
    assert log == ["opened", "released"]


async def test_a_preparation_that_is_cancelled_releases_what_was_opened() -> None:
    log: list[str] = []
    own = EpisodeOwnTools([Source(Echo(say), log), Source(Echo(say, name="second"), log, fails="hang")])
    async with anyio.create_task_group() as tasks:
        with anyio.move_on_after(0.05):
            await own.open(PlayedEpisode("e1", None), tasks)
        await own.close()
    assert log == ["opened", "opened", "released", "released"]


async def test_a_source_that_cannot_be_released_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []
    own = EpisodeOwnTools([Source(Echo(say), log), Source(Echo(say, name="second"), log, fails="close")])
    async with anyio.create_task_group() as tasks:
        await own.open(PlayedEpisode("e1", None), tasks)
        await own.close()
    assert log == ["opened", "opened", "released", "released"]
    assert "own tools could not be released" in caplog.text


async def test_two_sources_with_tools_of_one_name_fail_and_are_released() -> None:
    log: list[str] = []
    own = EpisodeOwnTools([Source(Echo(say), log), Source(Echo(say), log)])
    async with anyio.create_task_group() as tasks:
        with pytest.raises(TaskFailed, match="two tools are named 'echo': one of a test, one of a test"):
            await own.open(PlayedEpisode("e1", None), tasks)
        await own.close()
    assert log == ["opened", "opened", "released", "released"]
