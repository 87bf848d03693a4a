"""``turnstile tasks`` on worlds: what a proof finds, and what is listed and shown."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from local import ROOT
from turnstile.cli.app import app

HEAD = "import random\nfrom turnstile_server.worlds import World, WorldTask, tool\n"
WORLD = """
class A(World):
    '''Do it.'''
    def reset(self, seed):
        self.done = False
    @tool
    def act(self) -> str:
        '''Acts.'''
        self.done = True
        return 'done'
    def grade(self): return self.done
    def solve(self): self.act()
"""


def tasks(*arguments: str) -> Result:
    """In a thread of its own: fixtures of other suites may keep a loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(CliRunner().invoke, app, ["tasks", *arguments], env={"COLUMNS": "200"}).result()


def validated(folder: Path, body: str) -> Result:
    (folder / "game.py").write_text(HEAD + body)
    return tasks("validate", str(folder / "game.py"), "--sandbox", "none")


def test_a_sound_world_is_proven_without_a_sandbox(tmp_path: Path) -> None:
    result = validated(tmp_path, WORLD)
    assert result.exit_code == 0, result.output
    assert "1 of 1 tasks are sound." in result.output


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("return self.done", "return 1", "doing nothing scores 1, too"),
        ("return self.done", "return 0.5", "the known solution scores 0.5"),
        ("return self.done", "return self.done and random.random()", "the known solution scores 0."),
        ("return self.done", "return 1 / 0", "grade raised ZeroDivisionError: division by zero (line"),
        ("return self.done", "return None", "grade returned None"),
        ("return self.done", "return {'a': self.done, 'b': 0.5}", "world: b is 0.5"),
        ("self.act()", "raise KeyError('x')", "solve raised KeyError"),
        ("self.act()", "return 3", "solve returned a int"),
        ("    def solve(self): self.act()\n", "", "its world has no `solve`"),
        ("self.done = False", "raise KeyError('x')", "reset raised KeyError: 'x' (line 7)"),
        ("return self.done", "return self.done or random.random() / 2", "doing nothing scores"),
    ],
)
def test_what_is_wrong_with_a_world_is_found(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in WORLD
    result = validated(tmp_path, WORLD.replace(old, new))
    assert result.exit_code == 1, result.output
    assert said in result.output


def test_a_world_without_a_grade_is_reset_and_has_nothing_to_prove(tmp_path: Path) -> None:
    assert "not graded" in validated(tmp_path, WORLD.replace("    def grade(self): return self.done\n", "")).output


def test_a_world_that_cannot_be_loaded_ends_the_command_with_its_line(tmp_path: Path) -> None:
    result = validated(tmp_path, WORLD.replace("'''Acts.'''", "pass"))
    assert result.exit_code == 2
    assert "game.py:4: A: tool act: it has no docstring" in result.output


def test_the_examples_are_sound() -> None:
    examples = ROOT / "examples"
    sources = [examples / "shop" / "shop.py", *sorted((examples / "worlds").glob("*.py"))]
    result = tasks("validate", *map(str, sources), "--sandbox", "none")
    assert result.exit_code == 0, result.output
    assert "15 of 15 tasks are sound." in result.output


def test_the_parameters_of_a_world_are_shown_with_the_solution_only() -> None:
    source = str(ROOT / "examples" / "shop" / "shop.py")
    listed = tasks("list", source).output
    assert "shop-exchange-2" in listed
    assert "world" in listed
    assert "errand" not in tasks("show", "shop-buy-0", source).output.replace("Run an errand", "")
    shown = tasks("show", "shop-buy-0", source, "--solution").output
    assert "class: shop.py:Shop" in shown
    assert "errand: buy" in shown
