"""Work that is made to break the server that records it: file names and texts that are not UTF-8."""

from __future__ import annotations

from pathlib import Path

import pytest
from light import SOLVE
from test_whole_episodes import played, server

pytestmark = pytest.mark.anyio


@pytest.mark.slow
async def test_file_names_that_are_no_text_are_recorded_readably(tiny_model: Path, tmp_path: Path) -> None:
    name = "open(b'caf\\xe9.txt', 'w').write('x')"
    async with server(tiny_model, tmp_path) as stage:
        shown = await played(stage, env={"WORK": f"{name}; {SOLVE}"})
        assert (shown["status"], shown["reward"]) == ("completed", 1.0), shown
        assert any("caf" in path for path in shown["grading"]["diff"]["added"])


@pytest.mark.slow
async def test_failures_that_are_no_text_are_recorded_readably(tiny_model: Path, tmp_path: Path) -> None:
    module = (
        "open('answer.py', 'w').write('class A:\\n def __eq__(s, o): return False\\n"
        " def __repr__(s): return chr(0xdcff) + chr(0xd800)\\nANSWER = A()')"
    )
    async with server(tiny_model, tmp_path) as stage:
        shown = await played(stage, env={"WORK": module})
        assert (shown["status"], shown["reward"]) == ("completed", 0.0), shown
        assert shown["grading"]["tests"]["failed"]
        after = await played(stage, env={"WORK": SOLVE})
        assert after["reward"] == 1.0
