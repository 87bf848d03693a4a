"""Prints the versions in uv.lock as a constraints file for pip: the lock stays the one place with pins.

    python scripts/constraints.py > constraints.txt && pip install -c constraints.txt -e '.[dev]'
    python scripts/constraints.py torch     # only these packages

Standard library only: it runs before anything is installed. A package that the lock has in several versions
is printed once for each, with the marker that chooses it. Local version labels are no part of the lock, so
`torch==2.13.0` also accepts a CPU build that an index or a folder of wheels offers as `2.13.0+cpu`.
The lock names no registry (see scripts/lock.py): pip takes its index from the machine's configuration.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parent.parent / "uv.lock"


def constraints(lock: dict[str, Any]) -> list[str]:
    """One ``name==version[ ; marker]`` for each package of ``lock`` that comes from an index."""
    lines = []
    for package in lock["package"]:
        if "registry" not in package["source"]:
            continue  # this project itself
        line = f"{package['name']}=={package['version']}"
        markers = package.get("resolution-markers", [])
        if markers:
            line += " ; " + " or ".join(f"({marker})" for marker in markers)
        lines.append(line)
    return lines


if __name__ == "__main__":
    lines = constraints(tomllib.loads(LOCK.read_text()))
    wanted = sys.argv[1:]
    print("\n".join(line for line in lines if not wanted or line.split("==")[0] in wanted))
