"""Lint and tests side by side: one core lints, the other tests, and then both test.

    python scripts/check.py                 `make check`: the quick tests of what is changed against HEAD, or of
                                            the last commit where nothing is
    python scripts/check.py --base main     the quick tests of all that has come since main
    python scripts/check.py --seconds 60    more time for quick tests (default 30 s on two cores)
    python scripts/check.py --all           `make test`: every test of the default suite

Lint is `make lint`: seconds where mypy's cache is warm, a minute where it is not. It is run beside the tests and
printed only when it fails. Quick tests are those of the modules that import what changed, the nearest first
(scripts/affected_tests.py), as many modules as the time is worth. Of these, tests run that took under a second
when they last ran here, the quickest first, until the time is used up (the plug-in `tests/quick.py`); what is
not played is counted, never silently dropped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from affected_tests import distances
from figures import module_seconds
from suites import SUITES
from test_sources import ROOT

NO_TESTS = 5
"""pytest's exit status where every test was deselected: none was quick enough."""
CORES = 2
MODULE_S = 0.7
"""What collecting a module costs, in seconds."""
ALWAYS = "tests/structure"
"""Rules that any change can break."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Format, lint, types and tests, side by side.")
    parser.add_argument("--base", help="compare with this revision (default: HEAD, or its parent)")
    parser.add_argument("--seconds", type=float, default=30.0, help="time for quick tests, on two cores")
    parser.add_argument("--all", action="store_true", help="the whole default suite")
    options = parser.parse_args()
    started = time.monotonic()
    if options.all:
        tests = suite()
    else:
        changed = changes(options.base)
        selected, left = selection(changed, CORES * options.seconds)
        print(f"check: {len(changed)} changed files; tests: {' '.join(selected) or 'none'}", flush=True)
        if left:
            print(f"check: {left} modules that import them from farther away are left to `make test`", flush=True)
        quick = ["-q", "--no-header", "--durations-min=5", f"--quick={options.seconds:g}"]
        tests = suite("-n2", "--dist=load", *quick, *selected) if selected else ["true"]
    failed = run_both(["make", "--no-print-directory", "lint"], tests)
    verdict = f"FAILED: {' and '.join(failed)}" if failed else "ok"
    print(f"check: {verdict} in {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


def run_both(lint: list[str], tests: list[str]) -> list[str]:
    """Runs both at once. The tests print as they go, lint only when it fails. Gives the names of what failed."""
    failed = []
    with tempfile.TemporaryFile("w+") as printed:
        linting = subprocess.Popen(lint, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed)
        try:
            if subprocess.run(tests, cwd=ROOT, check=False).returncode not in {0, NO_TESTS}:
                failed.append("tests")
            if linting.wait():
                printed.seek(0)
                print(f"--- make lint\n{printed.read()}", flush=True)
                failed.append("lint")
        finally:
            linting.kill()
            linting.wait()
    return failed


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


def selection(changed: list[str], seconds: float) -> tuple[list[str], int]:
    """Test modules that the changed paths concern, nearest first, for ``seconds``; and how many are left."""
    if not changed:
        return [], 0
    known = module_seconds()
    near = distances(changed)
    played = [module for module in SUITES["test"].modules(everything=False) if module in near]
    played.sort(key=lambda module: (near[module], known.get(name(module), 0.0)))
    chosen = []
    for module in played:
        seconds -= MODULE_S + min(known.get(name(module), 0.0), seconds / 4)
        if seconds < 0:
            break
        chosen.append(name(module))
    rules = [] if any(module.startswith(ALWAYS) for module in chosen) else [ALWAYS]
    return [*rules, *chosen], len(played) - len(chosen)


def name(module: Path) -> str:
    return module.relative_to(ROOT).as_posix()


def suite(*options: str) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / "suites.py"), "test", *options]


if __name__ == "__main__":
    sys.exit(main())
