"""Python functions on the host: what a model sees of them, their context, their state, their threads."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from own_tools_support import OwnServer, functions, tool_file
from subprocess_sandbox import SubprocessSandbox

from waiting import wait_until

pytestmark = pytest.mark.anyio

NOTES = Path(__file__).parents[2] / "examples" / "own_tools" / "notes.py"


async def test_a_model_sees_the_docstring_the_parameters_and_nothing_of_the_context() -> None:
    async with OwnServer(functions=functions(NOTES, "remember", "recall")).episode() as episode:
        assert episode.names == ["submit", "remember", "recall"]
        remember, recall = episode.toolbox.tools_of(episode.episode)[1:]
    assert remember.description == "Writes a note, or replaces it."
    assert remember.input_schema == {
        "type": "object",
        "properties": {
            "key": {"type": "string", "description": "Name of the note."},
            "text": {"type": "string", "description": "What to remember."},
        },
        "required": ["key", "text"],
        "additionalProperties": False,
    }
    assert remember.output_schema is not None
    assert set(remember.output_schema["properties"]) == {"key", "text", "notes"}
    assert recall.output_schema is None
    assert recall.annotations is not None
    assert recall.annotations.read_only_hint is True


async def test_a_result_is_structured_where_the_annotation_says_so_and_text_everywhere() -> None:
    async with OwnServer(functions=functions(NOTES, "remember", "recall")).episode() as episode:
        kept = await episode("remember", key="a", text="hello")
        assert kept.structured == {"key": "a", "text": "hello", "notes": 1}
        assert '"text": "hello"' in kept.text
        read = await episode("recall", key="a")
    assert (read.text, read.structured, read.is_error) == ("hello", None, False)


async def test_a_tool_that_raises_gives_an_error_result_that_says_what() -> None:
    async with OwnServer(functions=functions(NOTES, "recall")).episode() as episode:
        assert await episode.error("recall", key="b") == (
            """recall failed: KeyError: "there is no note 'b'; there are none\""""
        )


async def test_episodes_have_states_of_their_own_and_each_is_closed_at_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    path = tool_file(
        tmp_path,
        f"""
        import pathlib
        def note(text):
            with open({str(log)!r}, "a") as file: print(text, file=file)

        @tool(where="host")
        def begin(context: ToolContext) -> int:
            "Counts."
            if "count" not in vars(context.state):
                context.state.count = 0
                name = context.episode_id
                context.state.at_end(lambda: note(f"{{name}} first {{context.state.count}}"))
                async def second(text): note(f"{{name}} {{text}}")
                context.state.at_end(lambda: second("second"))
                def third(): raise OSError("cannot be closed")
                context.state.at_end(third)
            context.state.count += 1
            return context.state.count
        """,
    )
    server = OwnServer(functions=functions(path, "begin"))
    async with server.episode("e1") as first, server.episode("e2") as second:
        assert [(await first("begin")).structured for _ in range(3)] == [{"result": count} for count in (1, 2, 3)]
        assert (await second("begin")).structured == {"result": 1}
        assert not log.exists()
    assert log.read_text().splitlines() == ["e2 second", "e2 first 1", "e1 second", "e1 first 3"]


@pytest.mark.parametrize("close", ["anyio.sleep_forever", "threading.Event().wait"])
async def test_a_state_that_never_closes_keeps_no_episode_from_ending(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, close: str
) -> None:
    path = tool_file(
        tmp_path,
        f"""
        import anyio, threading
        @tool(where="host")
        def begin(context: ToolContext) -> str:
            "Begins."
            context.state.at_end({close})
            return "begun"
        """,
    )
    server = OwnServer(functions=functions(path, "begin"), own_close_timeout_s=0.1)
    with anyio.fail_after(20):
        async with server.episode("e1") as episode:
            await episode("begin")
    assert "the state of own tools could not be closed" in caplog.text


async def test_a_result_that_breaks_the_annotation_is_an_error(tmp_path: Path) -> None:
    path = tool_file(
        tmp_path,
        """
        from dataclasses import dataclass
        @dataclass
        class Price:
            cents: int
        @tool(where="host")
        def price(wrong: bool = False) -> Price:
            "A price."
            return {"cents": "many"} if wrong else Price(3)
        """,
    )
    async with OwnServer(functions=functions(path, "price")).episode() as episode:
        assert (await episode("price")).structured == {"cents": 3}
        assert "price returned what its annotation does not allow: cents" in await episode.error(
            "price", wrong=True
        )


async def test_images_pass_as_content_and_are_named_in_the_text(tmp_path: Path) -> None:
    path = tool_file(
        tmp_path,
        """
        from mcp.server.mcpserver import Image
        @tool(where="host")
        def picture() -> Image:
            "A picture."
            return Image(data=b"123456", format="png")
        """,
    )
    async with OwnServer(functions=functions(path, "picture")).episode() as episode:
        result = await episode("picture")
    assert result.text == "[image: image/png, 6 bytes]"
    assert [block.type for block in result.content] == ["image"]


class News:
    """Implements Progress."""

    wanted = True

    def __init__(self) -> None:
        self.reports: list[tuple[Any, ...]] = []
        self.logs: list[tuple[Any, ...]] = []

    async def report(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        self.reports.append((progress, total, message))

    async def log(self, level: str, data: Any, logger: str | None = None) -> None:
        self.logs.append((level, data, logger))


@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_progress_reaches_the_client_and_only_the_latest_is_kept(tmp_path: Path, kind: str) -> None:
    path = tool_file(
        tmp_path,
        f"""
        @tool(where="host")
        {kind} work(context: ToolContext) -> str:
            "Works."
            for step in range(10_000):
                context.progress(step, 10_000, "working")
            return "done"
        """,
    )
    news = News()
    async with OwnServer(functions=functions(path, "work")).episode() as episode:
        assert (await episode("work", progress=news)).text == "done"
    assert news.reports[-1] == (9999, 10_000, "working")
    assert [report[0] for report in news.reports] == sorted(report[0] for report in news.reports)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_log_messages_reach_the_client_in_order_and_a_flood_costs_no_memory(
    tmp_path: Path, kind: str
) -> None:
    path = tool_file(
        tmp_path,
        f"""
        @tool(where="host")
        {kind} work(context: ToolContext, wrong: str = "") -> str:
            "Works."
            if wrong == "level":
                context.log("loud", "?")
            if wrong == "data":
                context.log("info", object())
            for step in range(10_000):
                context.log("info", {{"step": step}}, "worker")
            return "done"
        """,
    )
    news = News()
    async with OwnServer(functions=functions(path, "work")).episode() as episode:
        assert (await episode("work", progress=news)).text == "done"
        assert "there is no log level 'loud'" in await episode.error("work", wrong="level")
        assert "TypeError" in await episode.error("work", wrong="data")
    steps = [data["step"] for _, data, _ in news.logs]
    assert steps == sorted(steps)
    assert news.logs[-1] == ("info", {"step": 9999}, "worker")


@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_a_tool_reaches_the_sandbox_of_its_own_episode(
    tmp_path: Path, sandbox: SubprocessSandbox, kind: str
) -> None:
    if kind == "def":
        body = 'said = context.wait_for(lambda: context.sandbox.run("cat; pwd", stdin=data))'
        write = 'context.wait_for(lambda: context.sandbox.write("made", b"yes"))'
    else:
        body = 'said = await context.sandbox.run("cat; pwd", stdin=data)'
        write = 'await context.sandbox.write("made", b"yes")'
    path = tool_file(
        tmp_path,
        f"""
        @tool(where="host")
        {kind} look(context: ToolContext) -> str:
            "Looks."
            data = b"in "
            if context.sandbox is None:
                return "no sandbox"
            {write}
            {body}
            return said.stdout
        """,
    )
    server = OwnServer(functions=functions(path, "look"))
    async with server.episode(sandbox=sandbox) as episode:
        assert (await episode("look")).text == f"in {sandbox.workdir}\n"
        assert (Path(sandbox.workdir) / "made").read_bytes() == b"yes"
    async with server.episode() as episode:
        assert (await episode("look")).text == "no sandbox"


HANG = """
import threading, time
released = threading.Event()

@tool(where="host")
def hang(seconds: float = 60) -> str:
    "Hangs."
    released.wait(seconds)
    return "late"

@tool(where="host", timeout_s=0.1)
def hang_briefly(context: ToolContext) -> str:
    "Hangs longer than it may."
    released.wait(60)
    context.state.late = context.sandbox
    return "late"

@tool(where="host")
def quick() -> str:
    "Answers."
    return "quick"
"""


def hanging(tmp_path: Path, **settings: Any) -> tuple[OwnServer, Path]:
    path = tool_file(tmp_path, HANG)
    return OwnServer(functions=functions(path, "hang", "hang_briefly", "quick"), **settings), path


def released(server_path: Path) -> None:
    """Lets the functions of a tool file that hang return."""
    (module,) = (one for one in sys.modules.values() if getattr(one, "__file__", None) == str(server_path))
    module.released.set()


async def test_a_tool_that_never_returns_is_given_up_and_takes_no_place_from_others(tmp_path: Path) -> None:
    server, path = hanging(tmp_path, own_threads=2, own_timeout_s=5, own_stuck_per_episode=3)
    try:
        async with server.episode("e1") as stuck, server.episode("e2") as other:
            for _ in range(3):
                assert await stuck.error("hang_briefly") == "hang_briefly took longer than its limit of 0.1 s"
            with pytest.raises(Exception, match="3 calls of this episode never returned"):
                await stuck("quick")
            assert (await other("quick")).text == "quick"
            assert server.catalog.stuck_threads == 3
    finally:
        released(path)
    await wait_until(lambda: not server.catalog.stuck_threads)


async def test_the_state_is_closed_although_too_many_threads_are_stuck(tmp_path: Path) -> None:
    path = tool_file(
        tmp_path,
        HANG
        + f"""
@tool(where="host")
async def begin(context: ToolContext) -> str:
    "Begins."
    context.state.at_end(lambda: open({str(tmp_path / "closed")!r}, "w").close())
    return "begun"
""",
    )
    server = OwnServer(functions=functions(path, "begin", "hang_briefly"), own_stuck_per_episode=1)
    try:
        async with server.episode() as episode:
            await episode("begin")
            await episode.error("hang_briefly")
        assert (tmp_path / "closed").exists()
    finally:
        released(path)


async def test_stuck_calls_of_all_episodes_together_are_bounded(tmp_path: Path) -> None:
    server, path = hanging(tmp_path, own_stuck_threads=2)
    try:
        for number in range(2):
            async with server.episode(f"e{number}") as episode:
                await episode.error("hang_briefly")
        async with server.episode("e3") as episode:
            with pytest.raises(
                Exception, match=r"2 calls of own tools never returned, the most that this server lets run on"
            ):
                await episode("quick")
    finally:
        released(path)


async def test_the_end_of_an_episode_does_not_wait_for_a_call_that_hangs(tmp_path: Path) -> None:
    server, path = hanging(tmp_path)
    try:
        async with server.episode() as episode, anyio.create_task_group() as tasks:

            async def call() -> None:
                with pytest.raises(Exception, match="the episode has ended"):
                    await episode("hang")

            tasks.start_soon(call)
            await anyio.sleep(0.1)
            await episode.own.stop_calls()
        assert server.catalog.stuck_threads == 1, "the call still hangs"
    finally:
        released(path)


async def test_a_context_is_of_no_use_after_its_call(tmp_path: Path) -> None:
    path = tool_file(
        tmp_path,
        """
        kept = []
        @tool(where="host")
        def keep(context: ToolContext) -> str:
            "Keeps its context."
            kept.append(context)
            return "kept"
        @tool(where="host")
        def use() -> str:
            "Uses it."
            kept[0].wait_for(lambda: None)
            return "used"
        """,
    )
    async with OwnServer(functions=functions(path, "keep", "use")).episode() as episode:
        await episode("keep")
        with pytest.raises(Exception, match="this call of the tool is over"):
            await episode("use")


@pytest.mark.slow
def test_a_call_that_hangs_does_not_keep_the_process_from_exiting(tmp_path: Path) -> None:
    program = f"""
import sys, anyio
sys.path[:0] = {[str(Path(__file__).parents[1] / name) for name in ("own_tools", "tools", "")]!r}
from own_tools_support import OwnServer, functions
async def main():
    server = OwnServer(functions=functions({str(tool_file(tmp_path, HANG))!r}, "hang_briefly"))
    async with server.episode() as episode:
        print(await episode.error("hang_briefly"), flush=True)
anyio.run(main)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "took longer than its limit" in done.stdout
    assert time.monotonic() - began < 30, "the function hangs for 60 s"


async def test_system_exit_in_a_tool_ends_nothing_else(tmp_path: Path) -> None:
    path = tool_file(
        tmp_path,
        """
        @tool(where="host")
        def leave() -> str:
            "Leaves."
            raise SystemExit(3)
        """,
    )
    before = threading.active_count()
    async with OwnServer(functions=functions(path, "leave")).episode() as episode:
        assert await episode.error("leave") == "leave failed: RuntimeError: SystemExit: 3"
    assert threading.active_count() <= before + 1
