"""A campaign fails unless it tried something and found nothing, and its last lines say which."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from campaign import __main__ as command
from campaign import arena
from campaign.checker import Counts, Finding
from campaign.programs import Program, ServerSettings, server_program
from campaign.report import BackendReport, Report
from waiting import wait_until, wait_until_sync

LOST = Finding("lost", "e1", "the reply of turn_7 is not in the export")
FOUND = "NOT SOUND: 1 lost, 0 doubled, 0 wrong, 0 left behind"
NOTHING = "NOT SOUND: 0 lost, 0 doubled, 0 wrong, 0 left behind"
SOUND = "sound: 0 lost, 0 doubled, 0 wrong, 0 left behind"


def backend_report(
    backend: str, *, findings: tuple[Finding, ...] = (), replies: int = 9, effective: int = 4, workers: int = 1
) -> BackendReport:
    return BackendReport(
        backend,
        workers,
        drawn=Counter({"server.kill": 5}),
        effective=Counter({"server.kill": effective}),
        counts=Counts(acknowledged=replies),
        findings=list(findings),
        first_fault={str(finding): 3 for finding in findings},
    )


@pytest.mark.parametrize(
    ("local", "last", "before", "code"),
    [
        (backend_report("local"), SOUND, "", 0),
        (
            backend_report("local", findings=(LOST,)),
            FOUND,
            "  again: python benchmarks/campaign --seed 6 --backends",
            1,
        ),
        (backend_report("local", replies=0), NOTHING, "local: no agent got a reply, so nothing was tried", 1),
        (backend_report("local", effective=0), NOTHING, "local: no fault took effect, so nothing was tried", 1),
        (backend_report("local:2", workers=2), NOTHING, "local:2: no worker was killed, so nothing was tried", 1),
    ],
    ids=["sound", "lost", "no replies", "no faults", "no worker killed"],
)
def test_the_last_lines_say_what_was_found_and_the_exit_code_says_whether(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    local: BackendReport,
    last: str,
    before: str,
    code: int,
) -> None:
    async def play(options: object, folder: Path, mounts: bool) -> Report:
        return Report(6, 0.1, [local, backend_report("docker")])

    monkeypatch.setattr(command, "play", play)
    monkeypatch.setattr(command, "own_mounts", lambda: None)
    monkeypatch.setattr(sys, "argv", ["campaign", "--seed", "6"])
    assert command.main() == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == last
    assert lines[-2].startswith(before)
    if local.findings:
        assert lines[-3] == f"local: {LOST}"
        assert lines[-2].endswith("--faults 3")


@pytest.mark.parametrize(
    ("text", "found"),
    [("local", ("local", 1)), ("local:2", ("local", 2)), ("docker", ("docker", 1)), ("docker:9", ("docker", 9))],
)
def test_a_backend_says_how_many_workers_there_are(text: str, found: tuple[str, int]) -> None:
    assert command.kind_of(command.known_backend(text)) == found


@pytest.mark.parametrize("text", ["local:0", "local:10", "local:", "docker:0", "podman:2", "podman"])
def test_another_backend_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        command.known_backend(text)


@pytest.mark.thorough
def test_where_the_first_server_does_not_start_it_says_so_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With the campaign's engine, and in the server's place a process that never answers."""

    def never_ready(settings: ServerSettings) -> Program:
        program = server_program(settings)

        async def not_in_time() -> None:
            await wait_until(lambda: program.pid is not None)
            raise TimeoutError

        program.command = lambda: ["sleep", "600", str(tmp_path)]
        monkeypatch.setattr(program, "wait_ready", not_in_time)
        return program

    def no_mounts() -> None:
        raise OSError

    monkeypatch.setattr(arena, "server_program", never_ready)
    monkeypatch.setattr(command, "own_mounts", no_mounts)
    monkeypatch.setattr(sys, "argv", ["campaign"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert command.main() == 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("NOT PLAYED: local: the first server was not ready in time; its log ends: ")
    wait_until_sync(lambda: not having(str(tmp_path)), "its processes end")


def having(word: str) -> list[str]:
    """Command lines of processes with ``word`` (a zombie has none)."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(process.read_bytes().decode())
    return [line for line in found if word in line]
