"""Rows of the data sets, made up, in the columns that the real ones have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TEST_PATCH = (
    "diff --git a/tests/test_a.py b/tests/test_a.py\n--- a/tests/test_a.py\n+++ b/tests/test_a.py\n@@ -1 +1,2 @@\n"
    " import a\n+assert a.hidden_check()\n"
)
PATCH = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1,2 @@\n x = 1\n+the_golden_line = 2\n"
SCRIPT = "#!/bin/bash\ncd /testbed\n: '>>>>> Start Test Output'\npytest -rA\n: '>>>>> End Test Output'\n"
F2P, P2P = ["tests/test_a.py::test_new"], ["tests/test_a.py::test_old"]


def classic(number: int = 1, **changes: Any) -> dict[str, Any]:
    """A row of SWE-bench as before version 5."""
    return {
        "instance_id": f"quill__ink-{number}",
        "repo": "quill/ink" if number % 2 else "quill/paper",
        "base_commit": "0" * 40,
        "patch": PATCH,
        "test_patch": TEST_PATCH,
        "problem_statement": f"Issue {number}: it is broken.",
        "hints_text": "the_golden_line is missing",
        "created_at": "2026-01-01",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps(F2P),
        "PASS_TO_PASS": json.dumps(P2P),
        "environment_setup_commit": "0" * 40,
        **changes,
    }


def five(number: int = 1, **changes: Any) -> dict[str, Any]:
    """A row of swebench 5."""
    own = {"image": "ink:1", "eval_script": SCRIPT, "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail"}
    return {**classic(number), **own, **changes}


def without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def written(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """A SOURCE."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"rows:{path}"
