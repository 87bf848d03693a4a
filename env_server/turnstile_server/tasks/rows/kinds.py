"""The data sets that are known, as a table: how a row of each is recognised, and what it leaves unsaid.

A new one is a line in ``KINDS``. What a row's own columns say wins over the table, the user's mapping over both.
Names of published images and of their work folders are the data sets' own; none of them was at hand to try.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

PYTEST = "pytest --no-header -rA --tb=no -p no:cacheprovider {files}"

INSTRUCTION = (
    "Resolve the issue below in the repository in the current folder. Hidden tests check the result; do not edit "
    "tests.\n\n{problem_statement}"
)

HIDDEN_COLUMNS: Final = frozenset(
    (
        *("patch", "test_patch", "golden_patch", "gold_patch", "fix_patch", "model_patch", "instance_dict"),
        *("eval_script", "fail_to_pass", "pass_to_pass", "expected_output_json", "execution_result_content"),
        *("parsed_commit_content", "modified_files", "fixed_tests", "f2p_tests", "p2p_tests", "test_script"),
        *("regression_script", "answer", "solution", "gold", "tests"),
    )
)
"""Columns, in lower case, that hold the answer or the tests: neither instruction nor metadata takes them."""

SHOWN_COLUMNS: Final = (
    *("repo", "version", "base_commit", "difficulty", "created_at", "language", "split", "dataset_name"),
    *("repo_language", "issue_categories"),
)
"""Columns that become metadata: no other column is shown to anybody."""


@dataclass(frozen=True, slots=True)
class RowKind:
    """One data set."""

    name: str
    marks: frozenset[str] = frozenset()
    """Columns that its rows have; of several kinds the first in ``KINDS`` is it."""
    without: frozenset[str] = frozenset()
    """Columns that they do not have."""
    image: str | None = None
    """Template; None: a column says it."""
    workdir: str = "/testbed"
    test_cmd: str | None = None
    """None: rows without a script cannot be judged unless the user says how."""
    log_parser: str | None = None
    makes_bug: bool = False
    """``patch`` makes the bug in an image that has none: it is applied at the start; the solution undoes it."""
    wrapped: str | None = None
    """Dotted path of the object that holds the row itself (as an object or as JSON in text)."""
    refused: str | None = None
    """Why its rows cannot be judged here."""


KINDS: Final[tuple[RowKind, ...]] = (
    RowKind(
        "nemotron-scripts",
        frozenset({"test_script", "regression_script"}),
        refused="its tests are scripts for Singularity images (.sif), judged by exit status",
    ),
    RowKind(
        "nemo-gym",
        frozenset({"responses_create_params"}),
        wrapped="responses_create_params.metadata.instance_dict",
    ),
    RowKind(
        "multi-swe-bench",
        frozenset({"org", "number", "fix_patch"}),
        refused="its log parsers are those of the package multi-swe-bench, one per repository",
    ),
    RowKind(
        "r2e-gym",
        frozenset({"docker_image", "expected_output_json"}),
    ),
    RowKind("swe-bench-5", frozenset({"instance_id", "eval_script", "log_parser"})),
    RowKind(
        "swe-bench-pro",
        frozenset({"instance_id", "selected_test_files_to_run", "dockerhub_tag"}),
        image="jefzda/sweap-images:{dockerhub_tag}",
        workdir="/app",
    ),
    RowKind("swe-rebench", frozenset({"instance_id", "install_config"})),
    RowKind(
        "swe-smith",
        frozenset({"instance_id", "image_name", "patch"}),
        without=frozenset({"test_patch", "base_commit"}),
        test_cmd=PYTEST,
        log_parser="parse_log_pytest",
        makes_bug=True,
    ),
    RowKind(
        "swe-gym",
        frozenset({"instance_id", "base_commit", "test_patch"}),
        without=frozenset({"environment_setup_commit"}),
        image="xingyaoww/sweb.eval.x86_64.{instance_id:_s_}:latest",
        test_cmd=PYTEST,
        log_parser="parse_log_pytest",
    ),
    RowKind(
        "swe-bench",
        frozenset({"instance_id", "base_commit", "test_patch"}),
        image="swebench/sweb.eval.x86_64.{instance_id:_1776_}:latest",
    ),
    RowKind("task", frozenset({"instruction"})),
)

BY_NAME: Final = {kind.name: kind for kind in KINDS}


def kind_of(row: Mapping[str, Any]) -> RowKind | None:
    """The kind whose columns the row has."""
    columns = row.keys()
    return next((kind for kind in KINDS if kind.marks <= columns and not kind.without & columns), None)
