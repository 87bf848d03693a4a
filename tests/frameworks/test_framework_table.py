"""The modes of agent frameworks that are served: each plays a conversation, and docs/frameworks.md has what came.

The frameworks are real, in a Python of their own (``TURNSTILE_FRAMEWORKS_PYTHON``, made from
scripts/frameworks.txt); ``framework_clients.py`` has the smallest client of each. A policy answers what a model
could. ``make frameworks`` writes the page anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from framework_clients import FRAMEWORKS, Answer

from local import ROOT
from turnstile.models import EpisodeRequest, Limits, TaskRef, Turn
from turnstile_server.demo import TINY
from turnstile_server.settings import Settings
from turnstile_server.testing.policy import PolicyInput, Step, ToolUse
from turnstile_server.testing.server import PlayedEpisode, ScriptedServer, scripted_server
from turnstile_server.testing.shell_policy import fitting

PYTHON = os.environ.get("TURNSTILE_FRAMEWORKS_PYTHON")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.agents,
    pytest.mark.thorough,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="set TURNSTILE_FRAMEWORKS_PYTHON (scripts/ci_installs.sh)"),
]

CLIENTS = Path(__file__).with_name("framework_clients.py")
PAGE = ROOT / "docs" / "frameworks.md"
BEGIN, END = "<!-- {}: written by tests/frameworks/test_framework_table.py -->", "<!-- {}: end -->"
MODES = {
    "chat": "plain chat",
    "stream": "streamed",
    "tools": "tools, the model chooses",
    "parallel": "parallel calls",
    "required": "a call required",
    "named": "a named call",
    "schema": "answer by schema",
    "schema by tool": "answer by a tool",
}
"""Headings of the modes of ``framework_clients.py``."""
FORMATS = ("required", "named", "schema", "schema by tool")
"""Modes in which a client may ask for more than a model's free choice."""
REASON_CHARS = 160
AT_ONCE = 3
TOLD = "21 degrees in Paris"
"""What the weather tool says. Some frameworks show a model its calls as text, so they cannot be counted."""


@dataclass(frozen=True)
class Cell:
    """What a mode of a framework came to. ``what``: `served`, `free`, `constrained`, `refused` or `fails`."""

    what: str
    reason: str = ""


@dataclass
class Row:
    """A framework's version and its cells by mode, on each server."""

    version: str
    scripted: dict[str, Cell] = field(default_factory=dict)
    embedded: dict[str, Cell] = field(default_factory=dict)


@dataclass
class Player:
    """Answers as a model that does its task would: calls the weather tool, then ends as the framework has it."""

    modes: dict[str, str] = field(default_factory=dict)
    """By episode id."""

    def __call__(self, call: PolicyInput) -> Step:
        mode = self.modes[call.episode_id]
        if "weather" in call.tools and TOLD not in call.prompt:
            cities = ("Paris", "Rome") if mode == "parallel" else ("Paris",)
            return Step(calls=tuple(ToolUse(tool="weather", arguments={"city": city}) for city in cities))
        for name, tool in call.tools.items():
            if name != "weather":  # the tool by which a framework has its answer
                return Step(tool=name, arguments=filled(tool))
        return Step(text=said(mode, call.prompt))


def said(mode: str, prompt: str) -> str:
    """A text that a framework reads as the answer to its question."""
    answer = Answer(city="Paris", degrees=21).model_dump()
    if "[[ ## next_tool_name ## ]]" in prompt:  # DSPy's own words for a call
        name, arguments = ("weather", {"city": "Paris"}) if TOLD not in prompt else ("finish", {})
        fields = {"next_thought": "I look.", "next_tool_name": name, "next_tool_args": json.dumps(arguments)}
        return (
            "".join(f"[[ ## {key} ## ]]\n{value}\n\n" for key, value in fields.items()) + "[[ ## completed ## ]]"
        )
    if "[[ ## answer ## ]]" in prompt:
        return "[[ ## reasoning ## ]]\nIt said so.\n\n[[ ## answer ## ]]\n21\n\n[[ ## completed ## ]]"
    if mode == "schema" and "final_answer(" in prompt:  # smolagents' agent that writes code
        return json.dumps({"thought": "I answer.", "code": "final_answer(21)"})
    if mode == "schema" and "`answer`" in prompt:  # DSPy's adapter
        return json.dumps({"answer": answer})
    if mode.startswith("schema"):
        return json.dumps(answer)
    return "Thought: I now know the final answer\nFinal Answer: It is 21 degrees."


def filled(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for all that a tool's schema requires."""
    parameters = tool.get("parameters") or {}
    properties = parameters.get("properties") or {}
    return {name: fitting(name, properties.get(name)) for name in parameters.get("required") or properties}


@contextmanager
def client_of(framework: str) -> Iterator[tuple[dict[str, Any], Callable[..., dict[str, Any]]]]:
    """The program of a framework: what it says first, and a function that has it play a mode."""
    assert PYTHON is not None
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "TURNSTILE_"))}
    process = subprocess.Popen(
        [PYTHON, "-W", "ignore", str(CLIENTS), framework],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if os.environ.get("QUIET", "1") == "1" else None,
        text=True,
        env={**env, "OPENAI_API_KEY": "none"},
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def answer() -> dict[str, Any]:
        line = process.stdout.readline() if process.stdout is not None else ""
        assert line, f"{framework} ended with {process.wait(10)}"
        said: dict[str, Any] = json.loads(line)
        return said

    def play(**asked: str) -> dict[str, Any]:
        assert process.stdin is not None
        print(json.dumps(asked), file=process.stdin, flush=True)
        return answer()

    try:
        yield answer(), play
    finally:
        process.kill()
        process.communicate()


@dataclass
class Stand:
    """The two servers of the table: with an engine that a policy answers for, and the embedded one."""

    scripted: ScriptedServer
    embedded: ScriptedServer
    player: Player

    async def row(self, framework: str) -> Row:
        with client_of(framework) as (said, play):
            row = Row(said["version"])
            for mode in (mode for mode in MODES if mode in said["modes"]):
                row.scripted[mode] = await self._cell(self.scripted, play, mode)
                if mode in FORMATS:
                    row.embedded[mode] = await self._cell(self.embedded, play, mode)
            return row

    async def _cell(self, server: ScriptedServer, play: Callable[..., dict[str, Any]], mode: str) -> Cell:
        limits = Limits(max_turns=6, max_completion_tokens=400)
        request = EpisodeRequest(task=TaskRef(instruction="Answer."), agent="external", limits=limits)
        created = await server.create(request)
        self.player.modes[created.episode_id] = mode
        asked = {"mode": mode, "url": f"{created.model_url}/v1", "key": created.episode_key or ""}
        answer = await anyio.to_thread.run_sync(lambda: play(**asked))
        (await server.control.post(f"/episodes/{created.episode_id}/finish")).raise_for_status()
        episode = await server.wait_for_end(created.episode_id)
        records = await server.records_of(episode, 0.0)
        return judged(records, answer["refusals"], answer["error"], able=server is self.scripted)


@asynccontextmanager
async def stand() -> AsyncIterator[Stand]:
    player = Player()
    scripted = Settings(sandboxes={"kind": "none"})
    embedded = Settings(model=TINY, engine={"kind": "embedded"}, sandboxes={"kind": "none"})
    async with scripted_server(scripted, player) as first, scripted_server(embedded, None) as second:
        yield Stand(first, second, player)


async def play_frameworks() -> dict[str, Row]:
    """Each framework's row. Some at once: most of the time is their import."""
    rows: dict[str, Row] = {}
    places = anyio.Semaphore(AT_ONCE)

    async def one(framework: str) -> None:
        async with places:
            rows[framework] = await at.row(framework)

    async with stand() as at, anyio.create_task_group() as tasks:
        for framework in FRAMEWORKS:
            tasks.start_soon(one, framework)
    return {framework: rows[framework] for framework in FRAMEWORKS}


def judged(played: PlayedEpisode, refusals: Sequence[str], error: str | None, *, able: bool) -> Cell:
    """The cell of a mode, by the turns' own marks and by what the server refused.

    ``able``: the model does what it is asked. The embedded engine's knows its own tasks alone: a client that gives
    up at its words says nothing about the server.
    """
    if refusals and (error is not None or not played.turns):
        return Cell("refused", noted(refusals[0]))
    if able and error is not None:
        return Cell("fails", noted(error))
    if any(turn.sampling.constrained for turn in played.turns):
        return Cell("constrained")
    if any(asks(turn) for turn in played.turns):
        return Cell("free")
    return Cell("served")


def asks(turn: Turn) -> bool:
    """True if the call asked for more than the model's free choice, which the turn has as it was asked."""
    asked: Mapping[str, Any] = turn.asked_sampling
    text = asked.get("text") or {}  # of Responses
    kind = (asked.get("response_format") or text.get("format") or {}).get("type", "text")
    return asked.get("tool_choice") not in (None, "auto", "none") or kind != "text"


def noted(words: str) -> str:
    """The first line, as a note of the page."""
    line = re.sub(r"[|`]", "'", words.split("\n", maxsplit=1)[0])
    return line if len(line) <= REASON_CHARS else f"{line[:REASON_CHARS]} …"


def table(rows: Mapping[str, Mapping[str, Cell]], modes: tuple[str, ...], notes: dict[str, int]) -> str:
    """The rows, with reasons as numbers of ``notes``."""
    lines = ["| | " + " | ".join(MODES[mode] for mode in modes) + " |", "|---|" + "---|" * len(modes)]
    for framework, found in rows.items():
        cells = [numbered(found.get(mode), notes) for mode in modes]
        lines.append(f"| {framework} | {' | '.join(cells)} |")
    return "\n".join(lines)


def numbered(cell: Cell | None, notes: dict[str, int]) -> str:
    if cell is None:
        return ""
    if not cell.reason:
        return cell.what
    return f"{cell.what} ({notes.setdefault(cell.reason, len(notes) + 1)})"


async def test_the_page_has_what_every_mode_of_every_framework_comes_to() -> None:
    rows = await play_frameworks()
    notes: dict[str, int] = {}
    asking = {name: row.embedded for name, row in rows.items() if row.embedded}
    parts = {
        "policy": table({name: row.scripted for name, row in rows.items()}, tuple(MODES), notes),
        "embedded": table(asking, FORMATS, notes),
    }
    parts["notes"] = "\n".join(f"{number}. {reason}" for reason, number in notes.items())
    written = PAGE.read_text("utf-8")
    page = written
    for name, text in parts.items():
        page = with_part(page, name, text)
    if os.environ.get("RECORD"):
        versions = ", ".join(f"{name} {row.version}" for name, row in rows.items())
        PAGE.write_text(with_part(page, "versions", f"{versions}."), "utf-8")
        return
    assert page == written, "docs/frameworks.md is stale: `make frameworks` writes it"


def with_part(page: str, part: str, text: str) -> str:
    """``page`` with ``text`` between the marks of ``part``."""
    before, begin, rest = page.partition(BEGIN.format(part))
    _, end, after = rest.partition(END.format(part))
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
