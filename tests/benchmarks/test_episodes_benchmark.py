"""The benchmark of whole episodes plays them to their end, and knows what it has measured. No time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from episodes import tables
from episodes_parts.cpu import ROLES, role_of
from episodes_parts.stage import PHASES, phases_of

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "episodes.py"


def test_processes_are_told_apart_by_their_command_lines() -> None:
    told = {
        b"/usr/bin/bwrap\0--unshare-ipc\0--\0/usr/bin/python3\0/turnstile/helper": "bubblewrap",
        b"/usr/bin/python3\0-I\0-S\0-B\0/turnstile/helper\0": "helper",
        b"python3\0-IBS\0/opt/turnstile/agents/tool-loop-1/files/tool_loop.py\0": "agent",
        b"python3\0-I\0/tmp/turnstile-grading/programs/inside/start.py\0run_tests\0": "grader",
        b"bash\0-c\0cat answer.py\0": "tools",
    }
    assert {command: role_of(command) for command in told} == told


def test_phases_are_the_spans_at_the_top_and_the_wait_before_the_first_attempt() -> None:
    def span(name: str, kind: str, parent: str | None, start: float, end: float) -> dict[str, object]:
        times = {"start_s": start, "end_s": end}
        return {"span_id": f"{kind} {name}", "parent_id": parent, "kind": kind, "name": name, **times}

    spans = [
        span("", "setup", None, 1.0, 3.0),
        span("create", "sandbox", "setup ", 1.0, 2.0),
        span("", "grading", None, 5.0, 9.0),
        span("tests", "grader", "grading ", 5.5, 9.0),
        span("attempt 1", "grader", "grader tests", 7.5, 9.0),
    ]
    assert phases_of(spans) == {"setup": 2.0, "grading": 4.0, "waited for a grader": 2.0}


def test_an_earlier_run_stands_beside_this_one() -> None:
    cost = {"cpu_s": dict.fromkeys((*ROLES, "all"), 0.5)}
    row = {"at_once": 8, "per_s": 1.0, "cpu_s": 0.5, "phases": dict.fromkeys(PHASES, 0.25)}
    moments = [{"what": what, "at_s": 1.0, "memory_mb": 99.5} for what in ("all open", "open and idle", "later")]
    before = {"cost": cost, "at_once": []}
    text = "\n".join(tables(before, {"cost": cost, "at_once": [row], "open": moments}))
    assert text.count("| before | 0.500 |") == 1
    assert "| 8 | now | 1.00 | 0.50 | 0.25 |" in text
    assert "| open and idle | 1 | 100 |" in text


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="a control group needs root")
def test_a_short_run_plays_episodes_to_their_end(tmp_path: Path) -> None:
    options = ["--episodes", "1", "--at-once", "2", "--each", "1", "--open", "3", "--idle-s", "6"]
    places = ["--installs", str(tmp_path / "installs"), "--out", str(tmp_path / "figures.json")]
    done = subprocess.run(
        [sys.executable, BENCHMARK, *options, *places], capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    roles = figures["cost"]["cpu_s"]
    assert all(roles[role] > 0 for role in ("server", "helper", "agent", "grader"))
    assert [moment["what"] for moment in figures["open"]][:2] == ["before", "all open"]
    assert "| 2 | now |" in done.stdout
