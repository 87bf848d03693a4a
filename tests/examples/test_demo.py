"""`turnstile demo` as a process, as a newcomer runs it; `.ci/run` runs it whole."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest
import typer
from interruption import leaves_nothing_when_interrupted

from local import ROOT, TURNSTILE
from turnstile_server.commands import demo

pytestmark = pytest.mark.timeout(400)

DEMO = (TURNSTILE, "demo")


def run_demo(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DEMO, *options],
        env={**os.environ, "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )


@pytest.mark.thorough
@pytest.mark.slow
def test_it_plays_errands_shows_an_episode_and_audits_all() -> None:
    done = run_demo("--sandbox", "local", "--errands", "2", "--rollouts", "3", "--least", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Write the code of") >= 2, done.stdout
    assert "of 6 episodes, by the policy's own sampling" in done.stdout
    audited = re.search(r"Audit: (\d+) of (\d+) turns", done.stdout)
    assert audited is not None
    assert audited[1] == audited[2] != "0"
    assert "Passed" in done.stdout


@pytest.mark.thorough
@pytest.mark.slow
def test_too_few_solved_is_a_failure_and_said() -> None:
    done = run_demo("--sandbox", "local", "--errands", "1", "--rollouts", "1", "--least", "1.5")
    assert done.returncode == 1
    assert "of 1 episodes were solved" in done.stdout


@pytest.mark.slow
def test_what_cannot_work_ends_it_with_a_clear_line() -> None:
    done = run_demo("--model", "no-such-folder")
    assert done.returncode == 1
    assert "Failed:" in done.stdout
    assert "no-such-folder" in done.stdout
    assert "Traceback" not in done.stderr


def test_without_pytorch_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra `server` alone has no engine that samples."""
    monkeypatch.setattr(demo, "find_spec", lambda _: None)
    with pytest.raises(typer.Exit) as ended:
        demo.demo()
    assert ended.value.exit_code == 2
    assert "pip install 'turnstile-rl[embedded]'" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "by", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.thorough), signal.SIGTERM, signal.SIGKILL]
)
def test_a_demo_that_is_interrupted_or_killed_leaves_nothing_running(by: signal.Signals) -> None:
    leaves_nothing_when_interrupted([*DEMO, "--sandbox", "local"], ROOT, by=by)
