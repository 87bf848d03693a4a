"""The table of docs/exporters.md: what of the recorded run each trainer's own code was compared with.

A trainer's test says its line once its comparison held. TURNSTILE_WRITE_DOCS=1 writes it.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exporters.md"
TABLE = re.compile(
    r"(?<=<!-- compared: tests/trainers writes from here -->\n\n)(.*?)(?=\n<!-- to here -->)", re.DOTALL
)


def say(trainer: str, types: str, step: str, rows: int, tokens: int) -> None:
    """The line of ``trainer``: whose types hold the rows, what of a step was run, rows and trained tokens that
    were found equal bit by bit. Raises AssertionError where the page says otherwise."""
    line = f"| {trainer} | {types} | {step} | {rows} | {tokens:,} |"
    if os.environ.get("TURNSTILE_WRITE_DOCS"):
        with PAGE.open("r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            page = file.read()
            match = TABLE.search(page)
            assert match is not None
            head, rule, *lines = match[1].strip().splitlines()
            lines = [each for each in lines if not each.startswith(f"| {trainer} |")]
            written = "\n".join([head, rule, *sorted([*lines, line], key=str.lower)]) + "\n"
            file.seek(0)
            file.write(page[: match.start()] + written + page[match.end() :])
            file.truncate()
    assert f"\n{line}\n" in PAGE.read_text("utf-8"), f"{line}: run this test with TURNSTILE_WRITE_DOCS=1"
