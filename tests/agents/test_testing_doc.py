"""What docs/testing.md shows: the table that the real agents are held to, and a program that runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from local import ROOT

DOC = (ROOT / "docs" / "testing.md").read_text()
EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("expected.yaml").read_text())


def row(name: str, expected: dict[str, Any]) -> str:
    """An agent's line of the table."""

    def counts(key: str) -> str:
        return ", ".join(f"`{kind}` {count}" for kind, count in expected.get(key, {}).items()) or "none"

    cells = [
        name,
        expected["dialect"],
        f"`{expected['tool']}`",
        "yes" if expected.get("tool_door") else "no",
        str(expected["turns"]),
        counts("breaks"),
        counts("cosmetic"),
        ", ".join(expected.get("names", ())) or "none",
    ]
    return f"| {' | '.join(cells)} |"


def test_the_table_is_the_one_that_the_agents_are_held_to() -> None:
    rows = [line for line in DOC.splitlines() if line.startswith(tuple(f"| {name} |" for name in EXPECTED))]
    assert rows == [row(name, expected) for name, expected in sorted(EXPECTED.items())]
    unsaid = {"untrained", "refused", "contacts"}  # the text above the table says that there is none
    assert not [name for name, expected in EXPECTED.items() if unsaid & expected.keys()]


@pytest.mark.slow
def test_its_program_runs() -> None:
    program = DOC.partition("```python\n")[2].partition("```")[0]
    env = {**os.environ, "TURNSTILE_SANDBOXES__KIND": "local"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "completed 1 True {}\n"), done.stderr
