"""`make demo` itself: the script as a process, as a newcomer runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from local import ROOT, descendants, running

pytestmark = pytest.mark.timeout(400)

DEMO = ROOT / "examples" / "demo.py"


def run_demo(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, DEMO, *options],
        env={**os.environ, "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )


def test_it_plays_tasks_and_rewards_the_known_solution() -> None:
    done = run_demo("--sandbox", "local", "--tasks", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if " model " in line or " scripted " in line]
    assert len(rows) == 3, done.stdout
    assert rows[-1][:2] == ["fix-calculator", "scripted"]
    assert rows[-1][4] == "1", done.stdout  # the reward
    assert "Passed" in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "no-such-folder"), "no-such-folder"),
        (("--sandbox", "local", "--tasks", "1", "--gold", "no-such-task"), "fix-calculator"),
    ],
)
def test_what_cannot_work_ends_it_with_a_clear_line(options: tuple[str, ...], said: str) -> None:
    done = run_demo(*options)
    assert done.returncode == 1
    assert "Failed:" in done.stdout
    assert said in done.stdout
    assert "Traceback" not in done.stderr


def test_an_interrupted_demo_leaves_nothing_running() -> None:
    process = subprocess.Popen([sys.executable, DEMO, "--sandbox", "local"], stdout=subprocess.DEVNULL)
    family: set[tuple[int, str]] = set()
    try:
        deadline = time.monotonic() + 90
        while len(family) < 5 and time.monotonic() < deadline:  # server, engine, a sandbox and who is in it
            time.sleep(0.1)
            family = descendants(process.pid)
        assert len(family) >= 5
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 10
    while family & running() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not family & running()
