"""What runs mini-swe-agent's commands as another user, beside mini-swe-agent's own way to run them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from turnstile_server.agents.specs.mini_swe_agent import command_runner
from waiting import wait_until_sync

UNIQUE = f"1000.{os.getpid()}"
"""Seconds that no other test's process sleeps."""
COMMANDS = {
    "output and exit code": "echo out; echo err >&2; exit 3",
    "nothing": "true",
    "no such program": "no-such-program-at-all",
    "no shell syntax": "if",
    "bytes that are no text": r"printf 'a\377b'",
    "an end by a signal": "kill -9 $$",
    "its own environment": "echo $EXTRA $PAGER",
    "a process in the background": f"sleep {UNIQUE} > /dev/null 2>&1 & echo started",
    "standard input": "cat; echo end",
}
_STOCK = """
import json, sys
from minisweagent.environments.local import LocalEnvironment
environment = LocalEnvironment(cwd=sys.argv[1], env={"EXTRA": "1", "PAGER": "cat"}, timeout=2)
for command in json.loads(sys.argv[2]):
    print(json.dumps(environment.execute({"command": command})))
"""


@pytest.fixture
def background() -> Any:
    """Ends what a command left running in the background: of these tests alone, by its argument."""
    yield None
    subprocess.run(["pkill", "-f", f"^sleep {UNIQUE}$"], check=False)


def run_command(command: str, cwd: Path, timeout_s: float = 5) -> dict[str, Any]:
    return command_runner.run(command, str(cwd), {"EXTRA": "1", "PAGER": "cat"}, timeout_s)


@pytest.mark.agents
def test_commands_end_as_in_mini_swe_agents_own_environment(tmp_path: Path, background: None) -> None:
    late = "echo before; sleep 100"
    commands = [*COMMANDS.values(), late]
    python = os.environ["TURNSTILE_MINI_SWE_PYTHON"]
    env = {**os.environ, "MSWEA_SILENT_STARTUP": "1", "HOME": str(tmp_path)}
    stock = subprocess.run(
        [python, "-c", _STOCK, str(tmp_path), json.dumps(commands)],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    told = [json.loads(line) for line in stock.stdout.splitlines() if line.startswith("{")]
    assert len(told) == len(commands)
    for command, theirs in zip(commands, told, strict=True):
        ours = run_command(command, tmp_path, timeout_s=2)
        assert (ours["output"], ours["returncode"]) == (theirs["output"], theirs["returncode"]), command
        assert ours.get("error", "") in theirs["exception_info"]
        assert ("error" in ours) == bool(theirs["exception_info"]), command


def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    done = run_command(f"(while :; do date +%N > {mark}; sleep 0.05; done) & echo before; sleep 100", tmp_path, 1)
    assert (done["output"], done["returncode"], done["error_type"]) == ("before\n", -1, "TimeoutExpired")
    assert mark.exists()  # it was killed perhaps between opening and writing it
    wait_until_sync(lambda: not running_with(str(mark)), "its children end")


def running_with(word: str) -> list[Path]:
    """The processes whose command line has ``word``; a zombie has none."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word in (process / "cmdline").read_bytes().decode(errors="replace"):
                found.append(process)
    return found


@pytest.mark.slow
def test_a_process_that_left_the_group_and_holds_the_output_ends_no_later(tmp_path: Path) -> None:
    done = run_command("setsid sh -c 'echo $$ > pid; exec sleep 300' & sleep 300", tmp_path, 1)
    assert done["error_type"] == "TimeoutExpired"
    os.kill(int((tmp_path / "pid").read_text()), 9)


def test_of_output_without_end_its_beginning_and_its_end_are_kept(tmp_path: Path) -> None:
    size = 3 * command_runner.MAX_OUTPUT
    done = run_command(f"echo first; head -c {size} /dev/zero | tr '\\0' x; echo; echo last", tmp_path, 60)
    assert done["returncode"] == 0
    assert len(done["output"]) == command_runner.MAX_OUTPUT
    assert done["output"].startswith("first\nxxx")
    assert done["output"].endswith("xxx\nlast\n")


def test_a_folder_that_is_gone_is_an_error_of_the_command(tmp_path: Path) -> None:
    done = run_command("true", tmp_path / "gone")
    assert (done["returncode"], done["error_type"]) == (-1, "FileNotFoundError")


def test_it_takes_a_request_a_line_and_ends_with_its_input(tmp_path: Path) -> None:
    request = {"id": 7, "command": "echo hi; read x; echo $x", "cwd": str(tmp_path), "env": {}, "timeout_s": 5}
    lines = json.dumps(request) + "\n"
    program = [sys.executable, "-I", command_runner.__file__]
    done = subprocess.run(program, input=lines * 2, capture_output=True, text=True, check=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(result["id"], result["output"]) for result in results] == [(7, "hi\n\n")] * 2
