"""How the helper kills, on processes of this machine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turnstile_server.sandboxes.helper.turnstile_helper import processes

FORKER = """
import os, subprocess, time
if os.fork() == 0:
    os.setpgid(0, 0)  # in the session still, out of its first group
    for _ in range(400):
        subprocess.Popen(["sleep", "600"], process_group=0)
time.sleep(600)
"""


def test_processes_that_are_made_while_their_session_is_killed_are_killed_too() -> None:
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", FORKER], start_new_session=True) as leader:
            while len(alive_in(leader.pid)) < 20:
                time.sleep(0.001)
            processes.kill_session(leader.pid)
            assert alive_in(leader.pid) == []


@pytest.mark.slow
def test_a_session_that_does_not_go_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as leader:
        with monkeypatch.context() as stuck:
            stuck.setattr(processes, "kill_group", lambda group: None)
            stuck.setattr(processes, "_kill", lambda pid: None)
            processes.kill_session(leader.pid)
        assert alive_in(leader.pid)
        processes.kill_session(leader.pid)
        assert alive_in(leader.pid) == []


def alive_in(session: int) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, sid = stat.read_bytes().rpartition(b")")[2].split()[:4]
            if int(sid) == session and state not in b"ZX":
                found.append(stat.parent.name)
    return found
