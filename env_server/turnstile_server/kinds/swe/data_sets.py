"""The data sets of SWE-bench's family, as a table: how a row of each is recognised, and what it leaves unsaid.

A new one is a line in ``DATA_SETS``. A row's own columns win over the table, the user's mapping over both.
Names of published images and of their work folders are the data sets' own; none of them was at hand to try.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PYTEST = "pytest --no-header -rA --tb=no -p no:cacheprovider {files}"


@dataclass(frozen=True, slots=True)
class SweDataSet:
    """One data set."""

    name: str
    marks: frozenset[str] = frozenset()
    """Columns that its rows have; of several the first in ``DATA_SETS`` is it."""
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


DATA_SETS: Final[tuple[SweDataSet, ...]] = (
    SweDataSet("swe-bench-5", frozenset({"instance_id", "eval_script", "log_parser"})),
    SweDataSet(
        "swe-bench-pro",
        frozenset({"instance_id", "selected_test_files_to_run", "dockerhub_tag"}),
        image="jefzda/sweap-images:{dockerhub_tag}",
        workdir="/app",
    ),
    SweDataSet("swe-rebench", frozenset({"instance_id", "install_config"})),
    SweDataSet(
        "swe-bench-live",
        frozenset({"instance_id", "base_commit", "test_cmds"}),
        image="starryzhang/sweb.eval.x86_64.{instance_id:_1776_}:latest",
    ),
    SweDataSet(
        "swe-smith",
        frozenset({"instance_id", "image_name", "patch"}),
        without=frozenset({"test_patch", "base_commit"}),
        test_cmd=PYTEST,
        log_parser="parse_log_pytest",
        makes_bug=True,
    ),
    SweDataSet(
        "swe-gym",
        frozenset({"instance_id", "base_commit", "test_patch"}),
        without=frozenset({"environment_setup_commit"}),
        image="xingyaoww/sweb.eval.x86_64.{instance_id:_s_}:latest",
        test_cmd=PYTEST,
        log_parser="parse_log_pytest",
    ),
    SweDataSet(
        "swe-bench",
        frozenset({"instance_id", "base_commit", "test_patch"}),
        image="swebench/sweb.eval.x86_64.{instance_id:_1776_}:latest",
    ),
)
