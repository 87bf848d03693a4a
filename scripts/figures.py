"""What the suites cost: recorded by `.ci/run`, read by the tests and shown in CONTRIBUTING.md.

    python scripts/figures.py --take MODE FILE   takes a run's figures (`.ci/run` does it with RECORD=1)
    python scripts/figures.py --write            writes the table into CONTRIBUTING.md

`.ci/figures.json` holds for `.ci/run` (``ci``) and for `make everything` (``everything``) each suite's last
recorded seconds, its tests and its day, and the seconds of each test module in the last recorded `make test`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / ".ci" / "figures.json"
PAGE = ROOT / "CONTRIBUTING.md"
MODES = {"ci": "`.ci/run`", "everything": "`make everything`"}
BEGIN, END = "<!-- figures: written by scripts/figures.py -->", "<!-- end of figures -->"
WATCHED: Final = {
    "browser": (
        "client/turnstile/models",
        "client/turnstile/report",
        "env_server/turnstile_server/control",
        "env_server/turnstile_server/viewer",
        "tests/ui",
        "ui",
    ),
    "cheats": (
        "env_server/turnstile_server/grading",
        "env_server/turnstile_server/kinds",
        "env_server/turnstile_server/sandboxes",
        "env_server/turnstile_server/tasks",
        "examples",
        "tests/grading",
    ),
    "runsc": ("env_server/turnstile_server/sandboxes",),
    "cluster": (
        "client/turnstile/cli",
        "client/turnstile/ray",
        "deploy",
        "env_server/turnstile_server/sandboxes",
        "env_server/turnstile_server/workers",
        "tests/cluster",
    ),
    "engines": (
        "client/turnstile/models",
        "env_server/turnstile_server/capture",
        "env_server/turnstile_server/engines",
        "env_server/turnstile_server/gate",
        "env_server/turnstile_server/rendering",
        "tests/engines",
        "tests/gate",
    ),
    "trainers": ("client/turnstile/exporters", "client/turnstile/models", "tests/exporters", "tests/trainers"),
}
"""Suites that `.ci/run` plays only where these folders are others than in their last recorded run."""
COUNT = re.compile(r"(\d+) passed")


@cache
def figures() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FIGURES.read_text())
    return found


def module_seconds() -> dict[str, float]:
    """Seconds of each test module in `make test`, by its path from the root."""
    seconds: dict[str, float] = figures()["modules"]
    return seconds


def trees_of(folders: Sequence[str]) -> str:
    """git's names for what the folders hold at HEAD."""
    done = subprocess.run(
        ["git", "rev-parse", *(f"HEAD:{folder}" for folder in folders)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return " ".join(done.stdout.split())


def unchanged(suite: str) -> bool:
    """Whether what ``suite`` watches is what its last recorded run played."""
    played = {mode: figures()[mode].get(suite, {}).get("watched") for mode in MODES}
    return trees_of(WATCHED[suite]) in played.values()


def take(mode: str, folder: Path, *, some: bool) -> None:
    """Takes a run's figures from ``folder``: `suites` has a line `NAME<tab>SECONDS<tab>CLOSING LINE` for each
    suite that passed; `modules.test` a line `MODULE<tab>SECONDS` for each test of `make test`.
    ``some``: of `MODE`'s suites only some were played; the others keep their figures."""
    found = figures()
    if not some:
        found[mode] = {name: entry for name, entry in found[mode].items() if name in WATCHED}
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    for line in (folder / "suites").read_text().splitlines():
        name, seconds, closing = line.split("\t")
        count = COUNT.search(closing)
        entry: dict[str, Any] = {"seconds": int(seconds), "tests": int(count[1]) if count else None, "day": day}
        if name in WATCHED:
            entry["watched"] = trees_of(WATCHED[name])
        found[mode][name] = entry
    if mode == "ci" and (folder / "modules.test").exists():
        found["machine"] = f"{os.cpu_count()} cores, {processor()}, Python {platform.python_version()}"
        seconds_of: defaultdict[str, float] = defaultdict(float)
        for line in (folder / "modules.test").read_text().splitlines():
            module, spent = line.split("\t")
            seconds_of[module] += float(spent)
        found["modules"] = {
            module: round(spent, 1) for module, spent in sorted(seconds_of.items()) if spent >= 0.1
        }
    FIGURES.write_text(json.dumps(found, indent=1) + "\n")
    figures.cache_clear()


def processor() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def table() -> str:
    """The figures as Markdown."""
    names = dict.fromkeys([*figures()["ci"], *figures()["everything"]])
    lines = [
        f"Seconds and tests of each suite in its last recorded run ({figures()['machine']}):",
        "",
        "| suite | `.ci/run` | tests | day | `make everything` | tests | day |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        cells = [cell for mode in MODES for cell in row(figures()[mode].get(name))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    sums = [str(sum(entry["seconds"] for entry in figures()[mode].values())) for mode in MODES]
    tests = [str(sum(entry["tests"] or 0 for entry in figures()[mode].values())) for mode in MODES]
    lines.append(f"| all | {sums[0]} | {tests[0]} | | {sums[1]} | {tests[1]} | |")
    return "\n".join(lines)


def row(entry: dict[str, Any] | None) -> tuple[str, str, str]:
    if entry is None:
        return "", "", ""
    return str(entry["seconds"]), "" if entry["tests"] is None else str(entry["tests"]), entry["day"]


def page() -> str:
    """CONTRIBUTING.md with the table of now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="What the suites cost.")
    parser.add_argument("--take", nargs=2, metavar=("MODE", "FOLDER"), help="take figures")
    parser.add_argument("--some", action="store_true", help="not all suites were played")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--unchanged", metavar="SUITE", help="exit status 0 where what it watches is unchanged")
    options = parser.parse_args()
    if options.take:
        take(options.take[0], Path(options.take[1]), some=options.some)
    if options.write:
        PAGE.write_text(page())
    if options.unchanged:
        return 0 if unchanged(options.unchanged) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
