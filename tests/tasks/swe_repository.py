"""A small repository with a pytest suite, and the rows of it that data sets of SWE-bench's family would have."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BUG = "def slug(text):\n    return text.lower().replace(' ', '')\n"
FIX = "def slug(text):\n    return text.strip().lower().replace(' ', '-')\n"
OLD_TESTS = "from ink import slug\n\n\ndef test_lower():\n    assert slug('Ink') == 'ink'\n"
NEW_TESTS = (
    f"import pytest\n{OLD_TESTS}\n\n@pytest.mark.parametrize('text', ['a b', 'a-b'])\n"
    "def test_hyphen(text):\n    assert slug(text) == 'a-b'\n"
)
FILES = {
    "ink.py": BUG,
    "tests/test_ink.py": OLD_TESTS,
    "tests/test_gone.py": "def test_gone():\n    assert True\n",
    "tests/cases/broken.py": "def broken(:\n",
    "tests/conftest.py": "import sys\n\nsys.path.insert(0, '.')\ncollect_ignore = ['cases']\n",
}
CHANGED = {
    "tests/test_ink.py": NEW_TESTS,
    "tests/test_gone.py": None,
    "tests/cases/broken.py": "def broken(:\n    pass\n",
    "tests/data/dump.sql": "SELECT 1;\n",
    "tests/data/usage.rst": ">>> 1\n2\n",
    "tests/data/blob.zip": "PK\x03\x04\x00\xff",
}
"""What the test patch does: a suite that stops at any of these files but the first has no result."""
_WHO = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "Quill"), ("EMAIL", "quill@example.org"), ("DATE", "2026-01-05T12:00:00+00:00"))
}
COMMIT = " ".join(f"{name}='{value}'" for name, value in _WHO.items())
SETUP = ("git init -q -b main . && git add -A", f"{COMMIT} git commit -qm begin")
"""Makes the base, with its own hash, of the files."""


@dataclass
class Repository:
    """It stands at the base."""

    folder: Path
    base: str
    row: dict[str, Any] = field(default_factory=dict)


def make_repository(folder: Path) -> Repository:
    """The repository, and the columns that every row of it has."""
    git = _Git(folder)
    git.write(FILES)
    git("init", "-q", "-b", "main", ".")
    git("add", "-A")
    git("commit", "-qm", "begin")
    base = git("rev-parse", "HEAD").strip()
    patch = git.diff({"ink.py": FIX})
    test_patch = git.diff(CHANGED)
    row = {
        "instance_id": "quill__ink-1",
        "repo": "quill/ink",
        "version": "1.0",
        "base_commit": base,
        "problem_statement": "Slugs of two words have no hyphen.",
        "patch": patch,
        "test_patch": test_patch,
        # As the package's parser has it: up to the first blank.
        "FAIL_TO_PASS": ["tests/test_ink.py::test_hyphen[a"],
        "PASS_TO_PASS": ["tests/test_ink.py::test_lower", "tests/test_ink.py::test_hyphen[a-b]"],
        "image": "quill/ink:1",
    }
    return Repository(folder, base, row)


class _Git:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, *arguments: str) -> str:
        env = {**os.environ, **_WHO, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        done = subprocess.run(
            ("git", *arguments), cwd=self._folder, env=env, check=True, capture_output=True, text=True
        )
        return done.stdout

    def write(self, files: Mapping[str, str | None]) -> None:
        for path, text in files.items():
            file = self._folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                file.unlink()
            else:
                file.write_bytes(text.encode("latin-1"))

    def diff(self, files: Mapping[str, str | None]) -> str:
        """The patch that makes these files; the folder stays as it was."""
        self.write(files)
        self("add", "-A")
        found = self("diff", "--cached", "--binary")
        self("reset", "-q", "--hard")
        return found
