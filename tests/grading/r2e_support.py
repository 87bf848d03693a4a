"""A row of R2E-Gym and its image, authored: a small repository, in the layout of the published ones.

``/testbed`` has the repository at the commit before the solution, whose history goes on to it, a script and a
``.venv`` that leads to an interpreter in root's closed home; ``/r2e_tests`` has the hidden tests.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from local import ROOT

sys.path.insert(0, str(ROOT / "examples" / "swe"))
import make

IMAGE = "turnstile-test:r2e-inkwell"
BROKEN = "def wrap(text, width):\n    return [text]\n"
SOLVED = (
    "from inkwell.width import cut_at\n\n\ndef wrap(text, width):\n"
    "    lines = [''] if text else []\n    for word in text.split():\n"
    "        lines[-1:] = cut_at(lines[-1], word, width)\n    return lines"
)
WIDTH = (
    "def cut_at(line, word, width):\n    longer = f'{line} {word}'.strip()\n"
    "    return [longer] if len(longer) <= width or not line else [line, word]\n"
)
HIDDEN = """import unittest

from inkwell.wrap import wrap


class TestWrap(unittest.TestCase):
    def test_short_text_stays(self):
        self.assertEqual(wrap("quill", 10), ["quill"])

    def test_long_text_is_cut(self):
        self.assertEqual(wrap("a hidden sentence", 8), ["a hidden", "sentence"])

    def test_of_another_platform(self):
        self.fail("fails - always")


def test_nothing():
    assert wrap("", 5) == []
"""
EXPECTED = {
    "TestWrap.test_short_text_stays": "PASSED",
    "TestWrap.test_long_text_is_cut": "PASSED",
    "TestWrap.test_of_another_platform - AssertionError: fails - always": "FAILED",
    "test_nothing": "PASSED",
}
BASE = {
    "inkwell/__init__.py": "",
    "inkwell/wrap.py": BROKEN,
    "inkwell/hyphens.py": "SOFT = '\\xad'\n",
    "tests/test_wrap.py": "from inkwell.wrap import wrap\n\n\ndef test_one():\n    assert wrap('a', 1) == ['a']\n",
    ".gitignore": ".venv\nrun_tests.sh\n__pycache__\n",
}
FIX = {"inkwell/wrap.py": SOLVED, "inkwell/width.py": WIDTH}
IN_TESTS = {
    "tests/test_wrap.py": f"{BASE['tests/test_wrap.py']}\n\ndef test_two():\n    assert wrap('', 1) == []\n"
}
RUN = "PYTHONWARNINGS='ignore::UserWarning' .venv/bin/python -W ignore -m pytest -rA r2e_tests"
_PYTHON = "/root/.local/share/uv/python/cpython-3/bin"
_DOCKERFILE = f"""FROM {make.BASE_IMAGE}
COPY testbed /testbed
COPY r2e_tests /r2e_tests
RUN mkdir -p {_PYTHON} && cp "$(readlink -f /usr/bin/python3)" {_PYTHON}/python3 && chmod 0700 /root \\
 && {_PYTHON}/python3 -m venv --system-site-packages --without-pip /testbed/.venv \\
 && head -c 3000000 /dev/urandom > /testbed/.venv/package.bin
WORKDIR /testbed
"""


def author(folder: Path) -> dict[str, Any]:
    """Authors the repository in ``folder``; its row."""
    git = make._Git(folder)
    git("init", "--quiet", "--initial-branch=main")
    base = git.commit("Wrap lines", BASE)
    (folder / "inkwell/hyphens.py").unlink()
    fixed = git.commit("Cut long lines", {**FIX, **IN_TESTS})
    git("tag", "v-next")
    changes = git("diff", base, fixed)
    git("reset", "--quiet", "--hard", base)
    (folder / "run_tests.sh").write_text(f"{RUN}\n")
    (folder / "execution_result.json").write_text(json.dumps(EXPECTED))
    (folder / "inkwell/__pycache__").mkdir()
    (folder / "inkwell/__pycache__/test_1.cpython-311-pytest-8.pyc").write_bytes(b"\0" + HIDDEN.encode())
    commit = {
        "file_diffs": [
            _file_diff(each) for each in re.split(r"^(?=diff --git )", changes, flags=re.MULTILINE)[1:]
        ],
        "old_commit_hash": base,
        "new_commit_hash": fixed,
        "commit_message": "Cut long lines",
        "commit_date": "2026-01-05T12:00:00+00:00",
    }
    return {
        "repo_name": "inkwell",
        "docker_image": IMAGE,
        "commit_hash": fixed,
        "parsed_commit_content": json.dumps(commit),
        "execution_result_content": json.dumps({"test_file_codes": [HIDDEN], "test_file_names": ["test_1.py"]}),
        "modified_files": [*FIX, "inkwell/hyphens.py"],
        "relevant_files": [*FIX],
        "modified_entity_summaries": [{"name": "wrap"}],
        "problem_statement": "[ISSUE]\n\n**Title:** Long lines stay whole\n\n`wrap` cuts nothing.\n[/ISSUE]",
        "prompt": f"Write an issue for this commit:\n{changes}\nand these tests:\n{HIDDEN}",
        "expected_output_json": json.dumps(EXPECTED),
    }


def build(folder: Path) -> None:
    """The image of the repository in ``folder``."""
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        for name, text in (
            ("Dockerfile", _DOCKERFILE),
            ("r2e_tests/__init__.py", ""),
            ("r2e_tests/test_1.py", HIDDEN),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
        archive.add(folder, "testbed", filter=_of_root)
    command = ("docker", "build", "--quiet", "--tag", IMAGE, "-")
    subprocess.run(command, input=context.getvalue(), check=True, stdout=subprocess.DEVNULL)


def _of_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = "root"
    return info


def _file_diff(text: str) -> dict[str, Any]:
    """One file of a diff of git, as R2E-Gym parses it."""
    head, *hunks = re.split(r"^@@ ", text, flags=re.MULTILINE)
    first, *lines = head.splitlines()
    path = first.rpartition(" b/")[2]
    named = dict(line.split(" ", 1) for line in lines if line.startswith(("--- ", "+++ ")))
    misc = next((line for line in lines if line.startswith(("new file", "deleted file"))), None)
    return {
        "old_file_content": "",
        "new_file_content": "",
        "header": {"file": {"path": path}, "misc_line": misc},
        "index_line": {"old_commit_hash": "0000000", "new_commit_hash": "1111111", "mode": ""},
        "is_binary_file": False,
        "binary_line": None,
        "minus_file": {"path": named["---"]} if named else None,
        "plus_file": {"path": named["+++"]} if named else None,
        "hunks": [_hunk(each) for each in hunks],
    }


def _hunk(text: str) -> dict[str, Any]:
    said, *lines = text.splitlines()
    ranges, _, section = said.partition(" @@")
    old, new = (each[1:].split(",") for each in ranges.split(" "))
    kinds = {" ": "context", "+": "added", "-": "deleted", "\\": "note"}
    return {
        "descriptor": {"old_range": _range(old), "new_range": _range(new), "section": section.strip()},
        "line_group": {
            "all_lines": [
                {"type": kinds[line[0]], "content": line[1:].strip() if line[0] == "\\" else line[1:]}
                for line in lines
            ]
        },
    }


def _range(parts: list[str]) -> dict[str, Any]:
    return {"start": int(parts[0]), "length": int(parts[1]) if len(parts) > 1 else None}
