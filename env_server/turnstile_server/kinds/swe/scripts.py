"""The script that judges a row which brings none: as ``swebench`` made them before its rows had their own.

It puts the test files back to the base, applies the test patch, and runs the test command between two markers,
from which ``swebench`` reads the log.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from turnstile_server.kinds.swe.options import END_MARKER, START_MARKER
from turnstile_server.kinds.swe.patch_files import patched_files

_DELIMITER = "EOF_114329324912"
_CONDA = "/opt/miniconda3/bin/activate"
_CODE = frozenset(
    (
        *(".py", ".js", ".jsx", ".mjs", ".cjs", ".ts", ".tsx", ".mts", ".cts", ".vue", ".svelte", ".coffee"),
        *(".go", ".rs", ".java", ".kt", ".kts", ".scala", ".groovy", ".clj", ".rb", ".php", ".phpt", ".cs", ".fs"),
        *(".c", ".cc", ".cpp", ".cxx", ".m", ".mm", ".swift", ".dart", ".ex", ".exs", ".erl", ".hs", ".ml", ".jl"),
        *(".lua", ".nim", ".zig", ".pl", ".t", ".r", ".sh", ".bats", ".feature"),
    )
)
"""Suffixes of files in which a runner may look for tests. Any other file of a test patch is data."""
_NO_TESTS = ("conftest.py", "__init__.py")


def files_of_tests(tests: Sequence[str]) -> list[str]:
    """Files of the tests, each once, from ids like ``tests/test_x.py::test_y``."""
    return list(dict.fromkeys(test.partition("::")[0] for test in tests if "::" in test))


def files_to_run(test_patch: str, tests: Sequence[str]) -> list[str]:
    """The files that ``{files}`` stands for: those of the tests that are judged, where their ids name files of the
    patch. Else those of the patch that are there after it and may hold tests: a runner stops at a file that is
    none, or is not there, and no test has a result."""
    judged = files_of_tests(tests)
    there = [file.new for file in patched_files(test_patch) if file.new is not None]
    if not set(there).isdisjoint(judged):
        return judged
    paths = [PurePosixPath(path) for path in dict.fromkeys(there)]
    code = [str(path) for path in paths if path.suffix.lower() in _CODE and path.name not in _NO_TESTS]
    return code or judged


def command_of(value: Any) -> str:
    """A row's test command: text, or a list of commands (or one as JSON in text), which run one after another.
    Raises ValueError."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = None  # a command of the shell, which may begin with a bracket
        value = found if isinstance(found, list) else value
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
        raise ValueError("it is neither a command nor a list of commands")
    if any(line.startswith("-") for line in lines):
        raise ValueError("a list has a whole command in each item: this one has the words of one command")
    return "\n".join(line.strip("\n") for line in lines if line.strip())


def script_of(test_cmd: str, workdir: str, base: str, test_patch: str, tests: Sequence[str]) -> str:
    """``tests``: ids of those that are judged. The command runs as it is written, with the test files in the place
    of ``{files}``."""
    patched = patched_files(test_patch)
    back = [file.old for file in patched if file.old is not None]
    back = back or ([] if test_patch.strip() else files_of_tests(tests))
    added = [file.new for file in patched if file.new is not None and file.new not in back]
    put_back = f"git checkout {shlex.quote(base)} -- {shlex.join(back)}" if back else ":"
    lines = [
        "#!/bin/bash",
        "set -uxo pipefail",
        f"if [ -f {_CONDA} ]; then source {_CONDA}; conda activate testbed; fi",
        f"cd {shlex.quote(workdir)}",
        f"git config --global --add safe.directory {shlex.quote(workdir)}",
        put_back,
    ]
    if added:
        lines.append(f"rm -rf -- {shlex.join(added)}")
    if test_patch.strip():
        lines += [f"git apply -v - <<'{_DELIMITER}'", test_patch.rstrip("\n"), _DELIMITER]
    command = test_cmd.replace("{files}", shlex.join(files_to_run(test_patch, tests)))
    lines += [f": '{START_MARKER}'", command, f": '{END_MARKER}'", put_back]
    return "\n".join(lines) + "\n"
