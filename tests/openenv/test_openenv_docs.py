"""The examples of docs/openenv.md run as they stand there, each against a server that can play shipped tasks."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx
import pytest
from openenv_support import REPLY_S, base_url

from control_support import Door, OpenDoor
from training_support import trainer_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "openenv.md"
LINES = 12


def examples(section: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


async def run_code(code: str, **names: str) -> None:
    """Run an example; one with ``await`` on this loop, another in a thread, as its reader would."""
    compiled = compile(code, PAGE.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    scope: dict[str, Any] = dict(names)
    if compiled.co_flags & inspect.CO_COROUTINE:
        await eval(compiled, scope)
    else:
        await anyio.to_thread.run_sync(lambda: exec(compiled, scope))


@pytest.fixture(scope="module")
def playing(open_door: OpenDoor) -> Iterator[Door]:
    assert shutil.which("bwrap"), "install bubblewrap: the suites' sandboxes are made with it"
    with open_door(sandboxes={"kind": "local"}) as door:
        httpx.get(f"{base_url(door)}/schema", timeout=REPLY_S).raise_for_status()
        yield door


ROWS = [
    ("`GenericEnvClient`", 0, ["done True"]),
    ("`GenericEnvClient`", 1, ["done True"]),
    ("`MCPToolClient`", 0, ["'bash'", "reward 0.0"]),
    ("`MCPToolClient`", 1, ["'bash'"]),
    ("MCP", 0, ["'bash'", " 0\n"]),
    ("HTTP", 0, ["running", "done True"]),
    ("Turnstile's own clients", 0, ["/e/", "reward 0.0 0 samples"]),
]


@pytest.mark.parametrize(("section", "number", "said"), ROWS)
async def test_an_example_runs_as_printed(
    playing: Door, capsys: pytest.CaptureFixture[str], section: str, number: int, said: list[str]
) -> None:
    await run_code(examples(section)[number], URL=playing.url, KEY=playing.key)
    printed = capsys.readouterr().out
    for part in said:
        assert part in printed, printed
    async with httpx.AsyncClient(base_url=base_url(playing), timeout=REPLY_S) as http:
        [newest] = (await http.get("/episodes", params={"limit": 1})).json()["episodes"]
        ended = (await http.get(f"/episodes/{newest['episode_id']}", params={"wait": 30})).json()
    assert ended["status"] == "completed"


async def test_the_gymnasium_example_runs_as_printed(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [_, code] = examples("Turnstile's own clients")
    with trainer_server(tiny_model, tmp_path, sandboxes={"kind": "local"}) as server:
        await run_code(code, URL=server.url, KEY=server.key)
    assert "reward 0.0 done True completed" in capsys.readouterr().out


def test_every_example_is_run_and_short() -> None:
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    run_here = {examples(section)[number] for section, number, _ in ROWS} | {
        examples("Turnstile's own clients")[1]
    }
    # tests/container/test_from_docker_image.py runs this one.
    assert [code for code in found if code not in run_here and "from_docker_image" not in code] == []
    assert max(len([line for line in code.splitlines() if line.strip()]) for code in found) <= LINES
