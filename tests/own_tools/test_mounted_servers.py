"""Mounted MCP servers: what passes through, and what becomes of one that dies, hangs, floods or renames its
tools."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from own_tools_support import OwnServer
from tools_support import alive

from turnstile_server.errors import StartupError, TaskFailed, ToolsUnavailable
from turnstile_server.tools.protocol import ToolResult
from waiting import wait_until, wait_until_sync

pytestmark = pytest.mark.anyio

HERE = Path(__file__).parent
SHELF = HERE.parents[1] / "examples" / "own_tools" / "shelf_server.py"


def rogue(mode: str = "fine", file: Path | None = None, **more: Any) -> dict[str, Any]:
    args = ["-I", "-S", str(HERE / "rogue_server.py"), mode, *([str(file)] if file else [])]
    return {"name": "rogue", "command": sys.executable, "args": args, "where": "host", "allow": ["*"], **more}


def shelf(**more: Any) -> dict[str, Any]:
    return {
        "name": "shelf",
        "command": sys.executable,
        "args": [str(SHELF)],
        "where": "host",
        "allow": ["*"],
        **more,
    }


def mounting(*servers: dict[str, Any], **settings: Any) -> OwnServer:
    """A server whose task ``t`` mounts these."""
    return OwnServer({"t": {"servers": servers}}, **{"mount_grace_s": 0.3, **settings})


class News:
    """Implements Progress."""

    def __init__(self) -> None:
        self.reports: list[tuple[Any, ...]] = []

    async def report(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        self.reports.append((progress, total, message))


async def test_tools_with_their_schemas_hints_content_and_progress_pass_through() -> None:
    async with mounting(shelf(allow=["add", "burn", "cover"], prefix="shelf_")).episode() as episode:
        assert episode.names == ["submit", "shelf_add", "shelf_burn", "shelf_cover"]
        add = episode.toolbox.tools_of(episode.episode)[1]
        assert add.description == "Puts a book on the shelf."
        assert add.input_schema["required"] == ["title"]
        assert add.output_schema is not None
        assert list(add.output_schema["properties"]) == ["books"]
        assert add.annotations is not None
        assert (add.annotations.title, add.annotations.destructive_hint) == ("Put a book on the shelf", False)
        news = News()
        added = await episode("shelf_add", {"title": "Emma"}, news)
        assert added.structured == {"books": ["Emma"]}
        assert json.loads(added.text) == {"books": ["Emma"]}
        assert news.reports == [(1, 2, "looking at Emma"), (2, 2, "done")]
        cover = await episode("shelf_cover")
        assert [block.type for block in cover.content] == ["image"]
        assert cover.text.startswith("[image: image/png, ")
        assert "is gone" in (await episode("shelf_burn", title="Emma")).text
        failed = await episode("shelf_burn", title="Emma")
        assert failed.is_error
        assert "burn" in failed.text


@pytest.mark.slow
async def test_only_allowed_tools_are_there() -> None:
    async with mounting(shelf(allow=["burn"])).episode() as episode:
        assert episode.names == ["submit", "burn"]
        assert "there is no tool 'add'" in await episode.error("add", title="x")


async def test_its_environment_is_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSED", "on")
    monkeypatch.setenv("SECRET", "kept")
    async with mounting(rogue(env=["MODE=a=b", "PASSED"])).episode() as episode:
        seen = json.loads((await episode("env")).text)
    assert {name: seen[name] for name in seen if name not in ("PATH", "LC_CTYPE")} == {
        "MODE": "a=b",
        "PASSED": "on",
    }


async def test_each_episode_has_a_server_of_its_own_and_the_end_ends_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    server = mounting(rogue("parent", pids))
    async with server.episode("e1") as first, server.episode("e2") as second:
        one, two = (await first("pid")).text, (await second("pid")).text
        assert one != two
        started = [int(line) for line in pids.read_text().split()]
        assert len(started) == 4
        assert all(alive(pid) for pid in started)
    await wait_until(lambda: not any(alive(pid) for pid in started))


@pytest.mark.slow
async def test_a_server_that_ignores_its_end_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    began = time.monotonic()
    async with mounting(rogue("stubborn", pids)).episode() as episode:
        assert (await episode("echo", text="hello")).text == "hello"
    assert time.monotonic() - began < 5
    assert not alive(int(pids.read_text()))


@pytest.mark.slow
def test_a_killed_turnstile_leaves_no_server_behind(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = f"""
import sys, anyio
sys.path[:0] = {[str(HERE), str(HERE.parent / "tools"), str(HERE.parent)]!r}
from own_tools_support import OwnServer
async def main():
    server = OwnServer({{"t": {{"servers": [{rogue("stubborn", pids)!r}]}}}})
    async with server.episode() as episode:
        print((await episode("echo", text="hello")).text, flush=True)
        await anyio.sleep(600)
anyio.run(main)
"""
    running = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    try:
        assert running.stdout.readline() == "hello\n"
        (pid,) = map(int, pids.read_text().split())
        assert alive(pid)
    finally:
        running.kill()
        running.wait()
        running.stdout.close()
    wait_until_sync(lambda: not alive(pid))


async def test_a_server_that_dies_in_a_call_gives_an_error_and_its_last_words() -> None:
    async with mounting(rogue()).episode() as episode:
        died = await episode.error("die")
        assert died.startswith("task t: MCP server rogue failed during the call: it ended with exit code 7")
        assert "about to die" in died
        again = await episode.error("echo", text="hello")
        assert again.startswith("task t: MCP server rogue is not running: it ended with exit code 7")
        assert "echo" in episode.names, "the list of tools is stable"


async def test_one_that_is_to_be_restarted_comes_back() -> None:
    async with mounting(rogue(restart=True), mount_restart_s=0.05).episode() as episode:
        first = (await episode("pid")).text
        await episode.error("die")

        async def came_back() -> str:
            result = await episode("pid")
            assert not result.is_error or "is being started again" in result.text
            return "" if result.is_error else result.text

        assert await wait_until(came_back) != first


async def test_a_call_that_hangs_is_stopped_in_its_time_and_the_next_is_answered() -> None:
    async with mounting(rogue(timeout_s=0.2)).episode() as episode:
        assert await episode.error("hang") == "hang took longer than its limit of 0.2 s"
        assert (await episode("echo", text="hello")).text == "hello"


@pytest.mark.slow
async def test_a_server_that_reads_no_more_holds_up_nothing() -> None:
    with anyio.fail_after(10):
        async with mounting(rogue(timeout_s=0.3)).episode() as episode:
            for name in ("deaf", "echo", "echo"):
                text = "x" * 500_000  # more than a pipe holds
                assert await episode.error(name, text=text) == f"{name} took longer than its limit of 0.3 s"
        async with mounting(rogue(), mount_send_s=0.3).episode() as episode, anyio.create_task_group() as tasks:
            tasks.start_soon(episode, "deaf")
            await anyio.sleep(0.1)
            cut = await episode.error("echo", text="x" * 500_000)
            assert "it took no input for 0.3 s" in cut


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ("notify", "it sent more than 50 notifications in 10 s"),
        ("answers", "it sent more than 1000000 bytes in 10 s that are no messages, or too large ones"),
        ("garbage", "it sent more than 1000000 bytes in 10 s that are no messages, or too large ones"),
    ],
)
async def test_a_server_that_floods_is_cut_off(tmp_path: Path, tool: str, said: str) -> None:
    pids = tmp_path / "pids"
    limits = {"mount_max_notifications": 50, "mount_max_garbage_bytes": 1_000_000}
    with anyio.fail_after(20):
        async with mounting(rogue("fine", pids), **limits).episode() as episode:
            assert said in await episode.error(tool)
            assert said in await episode.error("echo", text="x")
            await wait_until(lambda: not alive(int(pids.read_text())))


@pytest.mark.parametrize("tool", ["giant", "giant_id_first"])
async def test_a_giant_result_is_an_error_and_the_server_lives_on(tool: str) -> None:
    async with mounting(rogue(), own_max_result_bytes=100_000).episode() as episode:
        assert "the result has more than 100000 bytes (tools.own_max_result_bytes)" in await episode.error(tool)
        assert (await episode("echo", text="hello")).text == "hello"


async def test_renamed_tools_fail_clearly_and_the_list_stays(caplog: pytest.LogCaptureFixture) -> None:
    async with mounting(rogue()).episode() as episode:
        before = episode.names
        assert (await episode("rename")).text == "renamed"
        gone = await episode.error("echo", text="x")
        assert gone.startswith("the tool 'echo' is gone: task t: MCP server rogue has answers, deaf, die, echo2, ")
        assert episode.names == before
        assert "there is no tool 'echo2'" in await episode.error("echo2")
        assert (await episode("pid")).text.isdigit()
    assert "has no tools echo any more" in caplog.text


async def test_a_result_that_breaks_its_schema_is_an_error() -> None:
    async with mounting(rogue()).episode() as episode:
        assert "gave an answer that cannot be used" in await episode.error("wrong")


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (rogue("dies"), "it ended with exit code 3; the last of its standard error:\ncomplaint 18\n"),
        (rogue("silent", start_timeout_s=0.5), "it did not name its tools within 0.5 s; the last of its standard"),
        (rogue("empty"), "it has no tools"),
        (rogue("many"), "it names more than 128 tools"),
        (rogue(allow=["echo", "missing"]), "it has no tool 'missing' (allow); it has answers, deaf, die, echo, "),
        (rogue(command="no-such-program"), "there is no program no-such-program"),
        (
            {"name": "far", "url": "http://127.0.0.1:9/mcp", "allow": ["*"]},
            "MCP server far cannot be used: Connect",
        ),
    ],
)
async def test_a_server_that_cannot_start_fails_its_task_or_the_start_of_the_server(
    server: dict[str, Any], said: str
) -> None:
    with pytest.raises(TaskFailed) as of_task:
        async with mounting(server).episode():
            pass
    assert said in of_task.value.message
    with pytest.raises(StartupError) as at_start:
        async with OwnServer(servers=[server], mount_grace_s=0.3).catalog:
            pass
    assert said in at_start.value.message
    assert at_start.value.message.startswith("the settings: MCP server")


@pytest.mark.slow
async def test_a_server_without_a_time_of_its_own_has_that_of_the_settings_to_start() -> None:
    server = OwnServer(servers=[rogue("silent")], mount_start_timeout_s=0.5, mount_grace_s=0.3)
    with pytest.raises(StartupError, match=r"did not name its tools within 0\.5 s"):
        async with server.catalog:
            pass


async def test_a_server_of_the_settings_that_cannot_start_later_is_infrastructures_fault(tmp_path: Path) -> None:
    script = tmp_path / "rogue_server.py"
    script.write_text((HERE / "rogue_server.py").read_text())
    server = OwnServer(servers=[{**rogue(), "args": ["-I", "-S", str(script), "fine"]}], mount_grace_s=0.3)
    async with server.catalog:
        script.write_text("raise SystemExit('broken by an update')")
        with pytest.raises(ToolsUnavailable, match="broken by an update") as raised:
            async with server.episode():
                pass
    assert raised.value.fault == "infrastructure"


async def test_names_of_mounted_tools_are_checked_with_their_prefix() -> None:
    with pytest.raises(StartupError, match="'reset' is a simulation control"):
        async with OwnServer(servers=[rogue("reserved")], mount_grace_s=0.3).catalog:
            pass
    with pytest.raises(StartupError, match="'RESET' is a simulation control"):
        OwnServer(servers=[rogue(allow=["SET"], prefix="RE")])
    with pytest.raises(TaskFailed, match="task t: MCP server rogue: 'reset' is a simulation control"):
        async with mounting(rogue("reserved")).episode():
            pass
    async with mounting(rogue("reserved", prefix="world_")).episode() as episode:
        assert episode.names == ["submit", "world_reset"]
    with pytest.raises(StartupError, match="two tools are named 'echo': one of the settings: MCP server rogue"):
        OwnServer({"t": {"servers": [rogue(allow=["echo"])]}}, servers=[rogue(allow=["echo"])])
    with pytest.raises(TaskFailed, match="two tools are named 'echo'"):
        async with mounting(rogue(), rogue(name="other")).episode():
            pass


async def test_a_shared_server_is_one_for_all_and_survives_its_own_death(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    server = OwnServer(servers=[rogue("fine", pids, scope="shared")], mount_grace_s=0.3, mount_restart_s=0.05)
    async with server.catalog:
        async with server.episode("e1") as first, server.episode("e2") as second:
            one, two = (await first("pid")).text, (await second("pid")).text
            assert one == two
            await first.error("die")
        async with server.episode("e3") as third:  # waits until it is back
            three = await third("pid")
            assert not three.is_error, three.text
            assert three.text != one
    await wait_until(lambda: not any(alive(int(pid)) for pid in pids.read_text().split()))


@pytest.mark.slow
async def test_a_shared_server_that_may_not_be_restarted_fails_later_episodes() -> None:
    server = OwnServer(servers=[rogue(scope="shared", restart=False, start_timeout_s=2)], mount_grace_s=0.3)
    async with server.catalog:
        async with server.episode("e1") as first:
            await first.error("die")
        with pytest.raises(ToolsUnavailable, match="is not running, and did not come back within 2 s"):
            async with server.episode("e2"):
                pass


async def test_a_variable_that_is_not_set_is_told_at_start() -> None:
    with pytest.raises(StartupError, match="MCP server rogue cannot be mounted: the environment variable NOPE is"):
        OwnServer(servers=[rogue(env=["NOPE"])])
    far = {"name": "far", "url": "http://127.0.0.1:9/mcp", "allow": ["*"], "headers": {"Authorization": "NOPE"}}
    with pytest.raises(StartupError, match="MCP server far cannot be mounted: the environment variable NOPE is"):
        OwnServer(servers=[far])
    with pytest.raises(StartupError, match="its timeout_s is 700, above this server's ceiling of 600"):
        OwnServer(servers=[rogue(timeout_s=700)])


async def test_calls_at_once_are_answered_each_with_its_own() -> None:
    async with mounting(rogue()).episode() as episode:
        results: dict[str, ToolResult] = {}

        async def call(text: str) -> None:
            results[text] = await episode("echo", text=text)

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(call, str(number))
    assert {text: result.text for text, result in results.items()} == {str(n): str(n) for n in range(8)}
