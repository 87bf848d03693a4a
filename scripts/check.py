"""The inner loop: format, lint, types, import rules and the quick tests of what changed. `make check`.

    python scripts/check.py                 what is changed against HEAD; the last commit where nothing is
    python scripts/check.py --base main     all that has come since main
    python scripts/check.py --seconds 60    more time for tests (default 30 s on two cores)

Types take a second where mypy's cache is warm, and a minute where it is not. Tests are those of the changed
packages: a test module that changed, and the test folders of changed product packages (TESTS_OF). Of these, tests
run that took under a second when they last ran here, the quickest first, until the time is used up (the plug-in
`tests/quick.py`); the others are counted, never silently dropped. `make test` runs everything.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SERVER = "env_server/turnstile_server/"
CLIENT = "client/turnstile/"
TESTS_OF = {
    f"{SERVER}agents/": ("agents",),
    f"{SERVER}capture/": ("capture", "gate"),
    f"{SERVER}commands/": ("control", "tasks"),
    f"{SERVER}control/openenv/": ("openenv",),
    f"{SERVER}control/": ("control",),
    f"{SERVER}engines/": ("engines",),
    f"{SERVER}episodes/": ("episodes", "control"),
    f"{SERVER}gate/": ("gate", "traffic"),
    f"{SERVER}grading/": ("grading",),
    f"{SERVER}http/": ("gate",),
    f"{SERVER}journal/": ("journal",),
    f"{SERVER}rendering/": ("rendering", "gate"),
    f"{SERVER}sandboxes/": ("sandboxes", "tools"),
    f"{SERVER}tasks/": ("tasks", "grading"),
    f"{SERVER}testing/": ("agents", "examples"),
    f"{SERVER}tools/": ("tools",),
    SERVER: ("control", "episodes"),
    f"{CLIENT}exporters/": ("client", "exporters"),
    f"{CLIENT}gym/": ("training",),
    f"{CLIENT}models/": ("client", "control"),
    CLIENT: ("client",),
    "examples/": ("examples",),
    "benchmarks/": ("benchmarks",),
    "scripts/": ("scripts",),
    "docs/": ("structure",),
}
"""Folders below tests/ by product folder; the first that fits counts, so longer paths stand first."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Format, lint, types and the quick tests of what changed.")
    parser.add_argument("--base", help="compare with this revision (default: HEAD, or its parent)")
    parser.add_argument("--seconds", type=float, default=30.0, help="time for tests, on two cores")
    options = parser.parse_args()
    started = time.monotonic()
    changed = changes(options.base)
    selected = selection(changed)
    print(f"check: {len(changed)} changed files; tests: {' '.join(selected) or 'none'}")
    steps = [
        [str(BIN / "ruff"), "format", "--check", "--quiet", "."],
        [str(BIN / "ruff"), "check", "--quiet", "."],
        [str(BIN / "mypy"), "--no-error-summary"],
        [str(BIN / "lint-imports"), "--no-timing"],
    ]
    # The checks take one core, the tests the other until the checks are through.
    tests = subprocess.Popen(pytest_command(selected, options.seconds), cwd=ROOT) if selected else None
    failed = [" ".join(step[:2]) for step in steps if not passes(step)]
    if tests is not None and tests.wait() not in {0, 5}:  # 5: no test was quick enough
        failed.append("tests")
    verdict = f"FAILED: {', '.join(failed)}" if failed else "ok"
    print(f"check: {verdict} in {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


def changes(base: str | None) -> list[str]:
    """Paths that differ from ``base``, untracked ones included."""
    untracked = git("ls-files", "--others", "--exclude-standard")
    if base is not None:
        return sorted({*git("diff", "--name-only", base), *untracked})
    found = {*git("diff", "--name-only", "HEAD"), *untracked}
    return sorted(found or git("diff", "--name-only", "HEAD~1", "HEAD"))


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def selection(changed: list[str]) -> list[str]:
    """Test folders and modules that belong to the changed paths."""
    wanted: set[str] = {"tests/structure"} if changed else set()
    for path in changed:
        if path.startswith("tests/"):
            wanted |= tests_beside(path)
        else:
            wanted |= {f"tests/{name}" for name in folders_of(path)}
    folders = {path for path in wanted if not path.endswith(".py")}
    modules = {path for path in wanted - folders if not path.startswith(tuple(f"{folder}/" for folder in folders))}
    return sorted(path for path in folders | modules if (ROOT / path).exists())


def tests_beside(path: str) -> set[str]:
    """A test module itself; for what tests share (fixtures, support, recordings) the tests of its folder."""
    if Path(path).name.startswith("test_"):
        return {path}
    folder = path.split("/")[1]
    return {f"tests/{folder}"} if (ROOT / "tests" / folder).is_dir() else set()


def folders_of(path: str) -> tuple[str, ...]:
    return next((folders for prefix, folders in TESTS_OF.items() if path.startswith(prefix)), ())


def passes(step: list[str]) -> bool:
    done = subprocess.run(step, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        print(f"--- {' '.join(Path(word).name for word in step)}\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def pytest_command(selected: list[str], seconds: float) -> list[str]:
    marks = "not sglang and not agents and not slow and not docker"
    quiet = ["-q", "--no-header", "--durations=0", "--durations-min=5"]
    return [str(BIN / "pytest"), "-n", "2", *quiet, "-m", marks, f"--quick={seconds:g}", *selected]


if __name__ == "__main__":
    sys.exit(main())
