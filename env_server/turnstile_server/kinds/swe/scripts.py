"""The script that judges a row which brings none: as ``swebench`` made them before its rows had their own.

It puts the test files back to the base, applies the test patch, and runs the test command between two markers,
from which ``swebench`` reads the log.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from turnstile_server.kinds.swe.options import END_MARKER, START_MARKER

_DELIMITER = "EOF_114329324912"
_CONDA = "/opt/miniconda3/bin/activate"
_CHANGED = re.compile(r"^--- a/(.+?)\t?$", re.MULTILINE)
_ADDED = re.compile(r"^--- /dev/null\n\+\+\+ b/(.+?)\t?$", re.MULTILINE)
_NO_TESTS = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")


def files_of_tests(tests: Sequence[str]) -> list[str]:
    """Files of the tests, each once, from ids like ``tests/test_x.py::test_y``."""
    return list(dict.fromkeys(test.partition("::")[0] for test in tests if "::" in test))


def script_of(test_cmd: str, workdir: str, base: str, test_patch: str, files: Sequence[str]) -> str:
    """``files``: those that the tests are in, where there is no test patch that says it. ``{files}`` of the
    command are the test files."""
    changed, added = _CHANGED.findall(test_patch), _ADDED.findall(test_patch)
    back = changed or ([] if test_patch.strip() else list(files))
    run = [name for name in (*changed, *added) if not name.endswith(_NO_TESTS)] or list(files)
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
    lines += [f": '{START_MARKER}'", test_cmd.replace("{files}", shlex.join(run)), f": '{END_MARKER}'", put_back]
    return "\n".join(lines) + "\n"
