"""The examples of docs/client.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from control_support import Door

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "client.md"


def examples(section: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("number", [0, 1])
def test_an_example_of_rollouts_runs(
    launching_door: Door, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    code = examples("Rollouts")[number]
    exec(compile(code, str(PAGE), "exec"), {"URL": launching_door.url, "KEY": launching_door.key})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) in (2, 4)
    assert all(int(line.rpartition("tokens to train ")[2]) > 0 for line in lines), lines
