"""What an attack on the reward is: what an agent leaves in its work folder, and what it runs while it lives.

An attack is played twice: collected and graded as an episode is, where it must earn 0; and in front of the naive
grader (``naive_grader.py``), where it must earn 1. So each of them works, and none is a straw man.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Reading = Literal["exit", "log", "file", "token"]
"""How the naive grader gets its verdict; ``naive_grader.READINGS`` says it in words."""
ALL: frozenset[Reading] = frozenset(("exit", "log", "file", "token"))
STATUS: frozenset[Reading] = frozenset(("exit", "file", "token"))
"""All that follow from the exit status of the tests."""
Kind = Literal["module", "steered", "fake", "raises", "sets", "ranked", "program", "output", "file", "git"]
"""What is judged; ``judged.py`` has a task of each."""
Content = str | tuple[str, str]
"""Text, or a special member of an archive (``grading_support.SPECIAL``)."""


def at_import(code: str, rest: str = "def double(n):\n    return n + 1\n") -> Mapping[str, Content]:
    """The module that the hidden tests import, with ``code`` in front. ``rest``: the bug of the base."""
    return {"mathx/__init__.py": f"{code}{rest}"}


@dataclass(frozen=True)
class RewardAttack:
    """``what`` and ``stopped_by`` are cells of the table in docs/attacks.md."""

    name: str
    what: str
    stopped_by: str
    fools: frozenset[Reading]
    """The readings of the naive grader by which it earns 1; by the others it may earn 0 or 1."""
    files: Mapping[str, Content] = field(default_factory=dict)
    """In the work folder, over the task's own."""
    agent: str = ""
    """Commands for ``sh`` that the agent runs in its sandbox, in the work folder, when the files are there."""
    kind: Kind = "module"
    trust: tuple[Literal["boundary", "in_process"], ...] = ("boundary",)
    """It earns 0 with each of these."""
    tests_first: bool = False
    """The naive grader of this one has its tests in the sandbox before the agent comes, "read-only"."""
    needs_git: bool = False
    """Of the images of the tests none has git: not in Docker."""
