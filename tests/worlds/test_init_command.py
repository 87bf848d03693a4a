"""``turnstile init``: a folder that works as it is; what is refused before anything is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from local import ROOT, TURNSTILE
from turnstile.cli.app import app
from turnstile_server.commands.init import FILES, write_scaffold


def turnstile(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TURNSTILE, *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def init(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["init", *arguments])


@pytest.mark.slow
def test_a_new_folder_proves_its_tasks_and_passes_its_own_tests(tmp_path: Path) -> None:
    made = turnstile(tmp_path, "init", "lamp-game")
    assert made.returncode == 0, made.stderr
    folder = tmp_path / "lamp-game"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "test_lamp_game.py", "world.py"]
    assert "class LampGame(World):" in (folder / "world.py").read_text()
    assert "@" + "ID@" not in "".join(path.read_text() for path in folder.iterdir())

    proven = turnstile(folder, "tasks", "validate", "world.py")
    assert proven.returncode == 0, proven.stderr
    assert "2 of 2 tasks are sound." in proven.stdout
    listed = turnstile(folder, "tasks", "list", "world.py:LampGame")
    assert "lamp-game-4" in listed.stdout

    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert tests.returncode == 0, tests.stdout
    assert "2 passed" in tests.stdout
    world = (folder / "world.py").read_text().splitlines()
    assert len(world) <= 50


@pytest.mark.thorough
@pytest.mark.slow
def test_the_first_commands_of_its_readme_are_those_that_work(tmp_path: Path) -> None:
    turnstile(tmp_path, "init", "lamps")
    readme = (tmp_path / "lamps" / "README.md").read_text()
    commands = readme.split("```")[1].strip().splitlines()
    assert commands == [
        "turnstile tasks validate world.py",
        "pytest",
        "turnstile run --tasks world.py --model tiny",
    ]
    ran = turnstile(
        tmp_path / "lamps",
        *("run", "--tasks", "world.py:Lamps", "--model", "tiny"),
        *("--agent", "plain-loop", "--sandbox", "local", "--max-turns", "2"),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "lamps-4" in ran.stdout


@pytest.mark.parametrize("there", ["folder", "file", "link"])
def test_nothing_that_is_there_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "game"
    if there == "folder":
        place.mkdir()
    elif there == "file":
        place.write_text("mine")
    else:
        place.symlink_to(tmp_path / "gone")
    before = sorted(tmp_path.rglob("*"))
    refused = init("game")
    assert refused.exit_code == 1
    assert "there is already something at game; nothing was written" in refused.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["", "a b", "../x", "/tmp/x", "9x", "-x", "a--b", "none", "true", "world", "é", "a" * 51]
)
def test_a_name_that_cannot_be_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    refused = init("--", name)
    assert refused.exit_code == 2
    assert f"{name!r} cannot be a name" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/proc")
    refused = init("game")
    assert refused.exit_code == 2
    assert "game cannot be written" in refused.stderr


def test_a_folder_is_made_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "last.txt", "there-is-no-such-template")
    with pytest.raises(FileNotFoundError):
        write_scaffold(tmp_path / "game", "game", "Game")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.thorough
def test_what_it_makes_passes_mypy_strict(tmp_path: Path) -> None:
    write_scaffold(tmp_path / "lamp-game", "lamp-game", "LampGame")
    files = [str(path) for path in sorted((tmp_path / "lamp-game").glob("*.py"))]
    # With the project's own settings (strict) and cache, so that not every dependency is read again.
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *files], cwd=ROOT, capture_output=True, text=True, timeout=230, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_it_is_in_the_list_of_commands(tmp_path: Path) -> None:
    assert "Make a folder with a task of your own as a Python class" in turnstile(tmp_path, "--help").stdout
