"""Each command that shows what tasks, agents, specs and sandboxes say is harmless to a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from client.test_hostile_text import ALL, HOSTILE, harmless
from turnstile.cli import agents as agents_command
from turnstile.cli.app import app
from turnstile.models.episode import AgentInfo, AgentList
from turnstile_server.commands import demo as demo_command
from turnstile_server.commands import doctor as doctor_command
from turnstile_server.commands import validate_tasks as validate_command
from turnstile_server.demo.checks import DemoError
from turnstile_server.demo.play import transcript
from turnstile_server.errors import StartupError, TaskFailed
from turnstile_server.grading.validation import Proof, ProofVerdict
from turnstile_server.testing.doctor import DoctorReport, Finding
from turnstile_server.testing.machine import MachineReport

WHOLE = ALL.replace(HOSTILE["half"], "")
"""What a file can hold: no half of a surrogate pair."""
LINKED = WHOLE + "[link=http://evil]x[/link][/]"


def ran(*words: str) -> Result:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "4000"})
    assert harmless(result.output), ascii(result.output)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def tasks_file(folder: Path, **fields: Any) -> str:
    task = {"id": "t1", "instruction": LINKED, "tags": [LINKED], "answer": {"value": LINKED}, **fields}
    (folder / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    return str(folder / "tasks.jsonl")


def test_tasks_are_listed_and_shown_harmlessly(tmp_path: Path) -> None:
    source = tasks_file(tmp_path)
    listed = ran("tasks", "list", source)
    assert (listed.exit_code, "\\x1b]52" in listed.output, "[link=" in listed.output) == (0, True, True)
    shown = ran("tasks", "show", "t1", source, "--solution")
    assert (shown.exit_code, "http://evil" in shown.output) == (0, True)


@pytest.mark.parametrize("fields", [{"id": LINKED}, {LINKED: LINKED}, {"difficulty": LINKED}, {"image": LINKED}])
def test_what_is_wrong_in_a_task_file_is_told_harmlessly(tmp_path: Path, fields: dict[str, Any]) -> None:
    ran("tasks", "list", tasks_file(tmp_path, **fields))
    ran("tasks", "show", LINKED, tasks_file(tmp_path, **fields))


def test_what_is_wrong_in_tasks_is_told_harmlessly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def proved(*_: Any) -> list[Proof]:
        problems = (ALL, f"{ALL}\n{ALL}")
        return [Proof(WHOLE, ProofVerdict.WRONG, problems, 1.0, trust="in_process", leak_note=ALL)]

    monkeypatch.setattr(validate_command, "_prove_all", proved)
    result = ran("tasks", "validate", tasks_file(tmp_path))
    assert (result.exit_code, "\\x1b]52" in result.output) == (1, True)


@pytest.mark.parametrize("as_json", [False, True])
def test_agents_of_a_server_are_listed_harmlessly(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    class Servers:
        def agents(self) -> dict[str, AgentList]:
            agent = AgentInfo(name=WHOLE, version=WHOLE, summary=WHOLE, installed=True, uses_tools=True)
            return {ALL: AgentList(agents=(agent,)), "other": AgentList(agents=(agent,))}

    @contextmanager
    def connected(*_: Any) -> Iterator[Servers]:
        yield Servers()

    monkeypatch.setattr(agents_command, "connect", connected)
    result = ran("agents", "list", *(["--json"] if as_json else []))
    assert (result.exit_code, "]52;c" in result.output) == (0, True)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("words", [("agents", "doctor", "x"), ("doctor",)], ids=["agent", "machine"])
def test_the_doctors_report_harmlessly(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], as_json: bool
) -> None:
    found = (Finding(name=ALL, passed=False, text=f"{ALL}\n{ALL}"), Finding(name="x", passed=None, text=ALL))

    async def agent(*_: Any, **__: Any) -> DoctorReport:
        return DoctorReport(agent=ALL, version=ALL, passed=False, findings=found, output=f"{ALL}\n{ALL}")

    async def machine(*_: Any) -> MachineReport:
        return MachineReport(passed=False, findings=found)

    monkeypatch.setattr(doctor_command, "check_agent", agent)
    monkeypatch.setattr(doctor_command, "check_machine", machine)
    result = ran(*words, *(["--json"] if as_json else []))
    assert (result.exit_code, "]52;c" in result.output) == (1, True)


@pytest.mark.parametrize("words", [("agents", "doctor", "x"), ("doctor",)], ids=["agent", "machine"])
def test_what_stops_a_doctor_is_told_harmlessly(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    async def refused(*_: Any, **__: Any) -> DoctorReport:
        raise StartupError(ALL) if words == ("doctor",) else TaskFailed(ALL)

    monkeypatch.setattr(doctor_command, "check_agent", refused)
    monkeypatch.setattr(doctor_command, "check_machine", refused)
    assert ran(*words).exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--engine", LINKED),
        ("serve", "--config", f"/{LINKED}".replace("\0", "")),  # no command line holds a NUL
        ("init", LINKED),
        ("agents", "install", LINKED),
        ("agents", "doctor", LINKED, "--env", LINKED),
        ("episodes", "show", LINKED, "--url", "http://127.0.0.1:9", "--key", "k" * 24),
        (LINKED,),
    ],
    ids=range(7),
)
def test_what_is_wrong_in_a_command_line_is_told_harmlessly(words: tuple[str, ...]) -> None:
    assert ran(*words).exit_code != 0


def test_a_setting_that_is_wrong_is_told_harmlessly(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f"[gate]\npublic_url = {json.dumps(LINKED)}\n{json.dumps(LINKED)} = 1\n")
    assert ran("serve", "--config", str(config)).exit_code == 2


def test_the_demo_shows_what_a_model_wrote_harmlessly(monkeypatch: pytest.MonkeyPatch) -> None:
    class Says:
        def decode(self, *_: Any, **__: Any) -> str:
            return LINKED

    class Row:
        input_ids, loss_mask = (1, 2), np.array([0, 1])

    monkeypatch.setattr(demo_command, "_run", lambda *_: [DemoError(ALL), DemoError(LINKED)])
    result = ran("demo")
    assert (result.exit_code, "\\x1b]52" in result.output) == (1, True)
    written = StringIO()
    Console(file=written, width=200).print(transcript(Row(), Says()))  # type: ignore[arg-type]
    assert harmless(written.getvalue())
    assert "[link=" in written.getvalue()
