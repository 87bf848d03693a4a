"""Results as files and as a section of docs/performance.md, and the machine that they are of."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

BEGIN = "<!-- benchmarks/gate.py writes from here -->"
END = "<!-- to here -->"


def machine() -> str:
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    memory = next(
        (int(line.split()[1]) >> 20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0
    )
    return (
        f"{os.cpu_count()} cores of {model}, {memory} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def write_results(folder: Path, name: str, facts: dict[str, Any], text: str) -> None:
    """``name``.json with the facts and ``name``.md with the text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    (folder / f"{name}.md").write_text(text)


def write_docs(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Replaces what lies between the two markers, of any benchmark; the words around them stay."""
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page.name} lacks the markers {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
