"""Lint and tests side by side: one core lints, the other tests, and then both test.

    python scripts/check.py                 `make check`: the quick tests of what is changed against HEAD, or of
                                            the last commit where nothing is
    python scripts/check.py --base main     the quick tests of all that has come since main
    python scripts/check.py --seconds 60    more time for quick tests (default 30 s on two cores)
    python scripts/check.py --all           `make test`: every test of the default suite

Lint is `make lint`: seconds where mypy's cache is warm, a minute where it is not. It is run beside the tests and
printed only when it fails. Quick tests are those of the changed packages: a test module that changed, and the test
folders of changed product packages (TESTS_OF). Of these, tests run that took under a second when they last ran
here, the quickest first, until the time is used up (the plug-in `tests/quick.py`); the others are counted as
deselected, never silently dropped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SERVER = "env_server/turnstile_server/"
CLIENT = "client/turnstile/"
NO_TESTS = 5
"""pytest's exit status where every test was deselected: none was quick enough."""
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
    "scripts/seccomp": ("container",),
    "scripts/": ("scripts",),
    "server/": ("container",),
    "docs/": ("structure",),
}
"""Folders below tests/ by product folder; the first that fits counts, so longer paths stand first."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Format, lint, types and tests, side by side.")
    parser.add_argument("--base", help="compare with this revision (default: HEAD, or its parent)")
    parser.add_argument("--seconds", type=float, default=30.0, help="time for quick tests, on two cores")
    parser.add_argument("--all", action="store_true", help="the whole default suite")
    options = parser.parse_args()
    started = time.monotonic()
    if options.all:
        tests = pytest_command("-n", "4", "--dist", "loadfile")
    else:
        changed = changes(options.base)
        selected = selection(changed)
        print(f"check: {len(changed)} changed files; tests: {' '.join(selected) or 'none'}", flush=True)
        quick = ["-q", "--no-header", "--durations-min=5", f"--quick={options.seconds:g}"]
        tests = pytest_command("-n", "2", *quick, *selected) if selected else ["true"]
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


def pytest_command(*options: str) -> list[str]:
    return [
        str(BIN / "pytest"),
        "-m",
        "not sglang and not vllm and not agents and not slow and not docker and not browser",
        *options,
    ]


if __name__ == "__main__":
    sys.exit(main())
