"""`.ci/run` fails with any of its suites and shows how each closed: its functions, on suites of a line each."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

RUN = (Path(__file__).resolve().parents[2] / ".ci" / "run").read_text()
FUNCTIONS, _, REST = RUN.partition("\nmissing=()\n")
SUMMARY = REST[REST.index("printf '\\n=== summary") :]


@pytest.fixture
def ci(tmp_path: Path) -> Path:
    folder = tmp_path / ".ci"
    folder.mkdir()
    return folder / "run"


def run(ci: Path, *suites: str, wanted: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    ci.write_text("\n".join([FUNCTIONS, *suites, SUMMARY]))
    return subprocess.run(["bash", ci, *wanted], capture_output=True, text=True, check=False, timeout=60)


def test_only_the_suites_that_are_named_are_played_with_every_step(ci: Path) -> None:
    suites = ("step install true", "suite first true", "suite second true", "suite third true")
    played = [
        line.split()[0]
        for line in run(ci, *suites, wanted=("third", "first")).stdout.splitlines()
        if " ok" in line
    ]
    assert played == ["install", "first", "third"]
    played = [line.split()[0] for line in run(ci, *suites).stdout.splitlines() if " ok" in line]
    assert played == ["install", "first", "second", "third"]


def test_a_campaign_that_found_something_fails_the_run_and_its_closing_line_is_shown(ci: Path) -> None:
    report = r"local: 3 faults took effect\nlocal: lost e1\n  again: it\nNOT SOUND: 1 lost, 0 doubled"
    done = run(ci, "suite first true", f"suite campaign sh -c 'printf \"{report}\\n\"; exit 1'", "suite last true")
    assert done.returncode == 1
    summary = done.stdout.partition("=== summary")[2].splitlines()
    assert [line.split()[0] for line in summary[1:4]] == ["first", "campaign", "last"]
    assert "FAILED (1)" in summary[2]
    assert summary[2].endswith("NOT SOUND: 1 lost, 0 doubled")
    assert summary[4:] == [
        "",
        "=== campaign failed (1)",
        "local: 3 faults took effect",
        "local: lost e1",
        "  again: it",
        "NOT SOUND: 1 lost, 0 doubled",
    ]


def test_sound_suites_pass_with_the_last_line_of_pytest_or_of_the_campaign(ci: Path) -> None:
    done = run(
        ci,
        "suite campaign echo 'sound: 0 lost, 0 doubled, 0 wrong, 0 left behind'",
        "suite test echo '==== 7 passed, 2 skipped in 61.20s (0:01:01) ===='",
    )
    assert done.returncode == 0, done.stdout
    assert "ok           sound: 0 lost" in done.stdout
    assert "ok           ==== 7 passed" in done.stdout


def test_a_suite_that_leaves_a_process_fails_and_the_process_is_killed(ci: Path, tmp_path: Path) -> None:
    left = tmp_path / "pid"
    done = run(ci, f"suite quick sh -c 'sleep 60 > {tmp_path}/out 2>&1 & echo $! > {left}'")
    assert done.returncode == 1
    pid = left.read_text().strip()
    assert f"left running: {pid}" in done.stdout
    process = Path("/proc", pid, "cmdline")
    assert not process.exists() or process.read_bytes() == b"", "it runs (a zombie has no command line)"
