"""Writes uv.lock without the address of any package registry, or checks that it still fits pyproject.toml.

    python scripts/lock.py              resolve again, keeping every version that still fits
    python scripts/lock.py --upgrade    resolve again, newest versions (any option of `uv lock` works)
    python scripts/lock.py --check      exit 1 when uv.lock does not fit pyproject.toml; needs no network

uv writes the index and the address of every file into its lock. This project is installed from whatever index
a machine is configured with, so the index is replaced by a placeholder that can never resolve (RFC 2606) and
the addresses by file names; versions, hashes and markers stay. uv accepts such a lock for `uv lock --check`
(with the placeholder as its index), `uv tree --frozen` and `uv export --frozen`; a plain `uv sync` resolves
once more against its own index, preferring these versions, and then writes addresses into uv.lock: do not
commit that. `scripts/constraints.py` gives the versions to pip, which is what the Makefile installs with.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACEHOLDER = "https://registry.invalid/simple"
READ_BY_UV = ("pyproject.toml", "README.md", "LICENSE")


def without_addresses(lock: str) -> str:
    """``lock`` with the placeholder for every index and the bare file name for every address.

    Raises ValueError when an address is left (a form of uv's that this does not know).
    """
    lock = re.sub(r'registry = "https?://[^"]*"', f'registry = "{PLACEHOLDER}"', lock)
    lock = re.sub(r'url = "https?://[^"]*/([^"/]+)"', r'filename = "\1"', lock)
    left = set(re.findall(r'\w+://[^" ]*', lock)) - {PLACEHOLDER}
    if left:
        raise ValueError(f"uv.lock still has {len(left)} addresses, e.g. {min(left)}")
    return lock


def uv(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    beside = Path(sys.executable).with_name("uv")
    program = str(beside) if beside.exists() else shutil.which("uv")
    if program is None:
        sys.exit("lock.py: uv is not installed (it is in the dev extra: `make .venv`)")
    return subprocess.run([program, *arguments], cwd=cwd, check=False, capture_output="--check" in arguments)


def check() -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy_inputs(Path(folder))
        done = uv("lock", "--check", "--offline", "--default-index", PLACEHOLDER, cwd=Path(folder))
    if done.returncode:
        print(
            "uv.lock does not fit pyproject.toml: run `python scripts/lock.py` and commit uv.lock",
            file=sys.stderr,
        )
    return 1 if done.returncode else 0


def copy_inputs(folder: Path) -> None:
    """Only what uv reads: it never sees, and never half-writes, the lock of the checkout."""
    for name in (*READ_BY_UV, "uv.lock"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)


def write(options: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy_inputs(Path(folder))
        code = uv("lock", *options, cwd=Path(folder)).returncode
        if code == 0:
            (ROOT / "uv.lock").write_text(without_addresses((Path(folder) / "uv.lock").read_text()))
    return code


if __name__ == "__main__":
    sys.exit(check() if sys.argv[1:] == ["--check"] else write(sys.argv[1:]))
