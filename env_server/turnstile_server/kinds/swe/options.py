"""The tests of a SWE-bench task as its row gives them: script, log parser and the outcomes that must be had."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from turnstile_server.integrations.package_process import PackageProgram, python_of
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.part import GraderOptions

START_MARKER = ">>>>> Start Test Output"
END_MARKER = ">>>>> End Test Output"

SWEBENCH = PackageProgram(
    "swebench", "swebench==5.0.2", Path(__file__).parent / "programs" / "swebench_program.py"
)


class SweTests(GraderOptions):
    """Tests by the rules of the ``swebench`` package. Reward component ``swe``: 1 when the work resolves the
    instance in full, else 0. The work runs in the process that reports, so it is judged ``in_process``."""

    in_field = True
    runs_tests = True
    in_process = True

    instance_id: str = Field(min_length=1, description="Id of the row.")
    repo: str = Field("", description="As in the row; some log parsers ask for it.")
    version: str = Field("", description="As in the row; some log parsers ask for it.")
    eval_script: str = Field(
        description="Bash script that puts the tests in place and runs them, with swebench's two markers."
    )
    log_parser: str = Field(min_length=1, description="Name of a log parser of swebench, as `parse_log_pytest`.")
    eval_type: Literal["pass_and_fail", "fail_only"] = Field(
        "pass_and_fail", description="`fail_only`: a test that the log does not name has passed."
    )
    fail_to_pass: tuple[str, ...] = Field(min_length=1, description="Tests that the solution makes pass.")
    pass_to_pass: tuple[str, ...] = Field((), description="Tests that pass before, and must after.")
    timeout_s: float = Field(480.0, gt=0, description="Time for the script; then the work scores 0.")

    @classmethod
    def start_warning(cls, settings: TaskSettings) -> str | None:
        if SWEBENCH.kind in settings.package_pythons:
            return None
        install = python_of(SWEBENCH, settings.package_pythons, ()).install
        return (
            "tasks of SWE-bench rows will have no reward, unless this Python has the package swebench: " + install
        )

    @property
    def time_s(self) -> float:
        return self.timeout_s

    @field_validator("eval_script")
    @classmethod
    def _marked(cls, script: str) -> str:
        for marker in (START_MARKER, END_MARKER):
            if marker not in script:
                raise ValueError(f"the script has no line with {marker!r}, so its log cannot be read")
        return script
