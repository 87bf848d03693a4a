"""Python functions in the sandbox: only their text goes in, only JSON comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_tools_support import OwnServer, functions, tool_file
from subprocess_sandbox import SubprocessSandbox

from turnstile_server.errors import StartupError

pytestmark = pytest.mark.anyio

NOTES = Path(__file__).parents[2] / "examples" / "own_tools" / "notes.py"

TOOLS = """
from typing import Any
SECRET = "of the server"

@tool(where="sandbox", timeout_s=1)
def act(what: str) -> dict[str, Any]:
    "Does something."
    import os, sys, time
    if what == "where":
        return {"cwd": os.getcwd(), "argv": sys.argv, "turnstile": "turnstile_server" in sys.modules}
    if what == "print":
        print("to stdout"); print("to stderr", file=sys.stderr); os.system("echo from a child")
        return {"printed": True}
    if what == "raise":
        print("before")
        raise LookupError("no such thing")
    if what == "exit":
        os._exit(7)
    if what == "sleep":
        time.sleep(60)
    if what == "large":
        return {"x": "a" * 100_000}
    if what == "garbage":
        os.write(3, b"{") or os._exit(0)
    if what == "object":
        return {"x": object()}
    return what

@tool(where="sandbox")
async def slowly(number: int) -> int:
    "Is async."
    import asyncio
    await asyncio.sleep(0)
    return number + 1
"""


async def test_a_sandbox_function_runs_in_the_work_folder_and_sees_nothing_of_the_server(
    sandbox: SubprocessSandbox,
) -> None:
    (Path(sandbox.workdir) / "letter.txt").write_text("the cat and the dog saw the moon")
    async with OwnServer(functions=functions(NOTES, "count_words")).episode(sandbox=sandbox) as episode:
        result = await episode("count_words", path="letter.txt", at_least=2)
    assert result.structured == {"the": 3}


@pytest.mark.slow
async def test_what_comes_out_of_the_sandbox(tmp_path: Path, sandbox: SubprocessSandbox) -> None:
    server = OwnServer(functions=functions(tool_file(tmp_path, TOOLS), "act", "slowly"), own_max_result_bytes=4096)
    async with server.episode(sandbox=sandbox) as episode:
        where = (await episode("act", what="where")).structured
        assert where == {"cwd": sandbox.workdir, "argv": ["-c"], "turnstile": False}
        assert (await episode("act", what="print")).structured == {"printed": True}
        assert (await episode("slowly", number=2)).structured == {"result": 3}
        raised = await episode.error("act", what="raise")
        assert raised == "act failed: LookupError: no such thing\nIt printed:\nbefore"
        assert await episode.error("act", what="exit") == "act ended without a result (exit code 7)"
        assert await episode.error("act", what="sleep") == "act took longer than its limit of 1 s"
        assert await episode.error("act", what="large") == "act returned more than 4096 bytes"
        assert "without a result" in await episode.error("act", what="garbage")
        assert "a sandbox tool returned a object, which is not JSON" in await episode.error("act", what="object")
        assert "act returned what its annotation does not allow" in await episode.error("act", what="text")


async def test_a_result_of_too_many_values_is_refused_before_it_is_read(
    tmp_path: Path, sandbox: SubprocessSandbox
) -> None:
    """Reading 2.7 million of them stops the event loop for a second, and the agent's commands can write them."""
    head = "from typing import Any\n@tool(where='sandbox')\ndef act(count: int) -> dict[str, Any]:\n 'A.'\n"
    text = head + " return {'x': [0] * count}"
    server = OwnServer(functions=functions(tool_file(tmp_path, text), "act"), own_max_result_values=1000)
    async with server.episode(sandbox=sandbox) as episode:
        assert (await episode("act", count=900)).structured == {"x": [0] * 900}
        assert await episode.error("act", count=1000) == "act returned more than 1000 JSON values"


async def test_an_image_without_python_is_told_in_the_result(
    tmp_path: Path, sandbox: SubprocessSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = OwnServer(functions=functions(tool_file(tmp_path, TOOLS), "act"))
    async with server.episode(sandbox=sandbox) as episode:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert await episode.error("act", what="x") == "act cannot run: the sandbox's image has no python3"


async def test_without_a_sandbox_the_servers_sandbox_functions_are_not_there() -> None:
    server = OwnServer(functions=functions(NOTES, "count_words", "recall"))
    async with server.episode() as episode:
        assert episode.names == ["submit", "recall"]


def test_a_task_with_a_sandbox_function_needs_a_sandbox() -> None:
    tasks = {
        "in": {"functions": functions(NOTES, "count_words")},
        "out": {"functions": functions(NOTES, "recall")},
    }
    catalog = OwnServer(tasks).catalog
    assert (catalog.needs_sandbox("in"), catalog.needs_sandbox("out")) == (True, False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def act() -> str:\n 'A.'\n return SECRET", "it uses SECRET from outside"),
        ("def act(a: int = len(SECRET)) -> str:\n 'A.'\n return str(a)", "it uses SECRET from outside"),
        ("def act() -> str:\n 'A.'\n def inner(): return SECRET\n return inner()", "it uses SECRET from outside"),
        ("def act(context: ToolContext) -> str:\n 'A.'\n return ''", "it takes a ToolContext"),
        ("act = lambda: 'x'", "no docstring"),
    ],
)
def test_a_function_whose_text_cannot_stand_alone_is_refused_at_start(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tool_file(tmp_path, f"SECRET = 'x'\n{text}\n")
    with pytest.raises(StartupError, match=said):
        OwnServer(functions=functions(path, "act", where="sandbox"))
