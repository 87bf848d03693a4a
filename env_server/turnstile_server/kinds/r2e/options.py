"""The tests of an R2E-Gym task: a script and hidden tests that its image holds, and the outcomes that must be had.

The layout of the images is that of R2E-Gym's runtime (github.com/R2E-Gym/R2E-Gym, ``agenthub/runtime/docker.py``).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from turnstile_server.tasks.part import GraderOptions, ImageTests

HIDDEN_TESTS = "/r2e_tests"
"""The image's folder of hidden tests. Nothing of an agent's sandbox shows it."""
LINK = "r2e_tests"
"""Path below the work folder at which the script looks for them."""
SCRIPT = "run_tests.sh"
OF_THE_IMAGE = (
    *(SCRIPT, LINK, ".pytest_cache", "expected_test_output.json", "execution_result.json"),
    *("syn_issue.json", "parsed_commit.json", "modified_files.json", "modified_entities.json"),
)
"""Files in the work folder of images that tell the tests or the answer. Removed before an agent is there."""
CLEAR = """
rm -rf -- "$@"
find . -path ./.venv -prune -o '(' -name __pycache__ -o -name '*.pyc' ')' -prune -exec rm -rf {} +
"""
"""Run there with these names. Compiled modules, which runs of the solution may have left, go too."""
ENVIRONMENT = ".venv"
"""The image's Python and its packages, in the work folder: no part of a work, and large."""

Outcome = Literal["PASSED", "FAILED", "ERROR"]


class R2eTests(GraderOptions):
    """Tests by the rules of R2E-Gym. Reward component ``r2e``: 1 when the tests that ran are exactly the expected
    ones, each with its expected outcome, else 0. The work runs in the process that reports, so it is judged
    ``in_process``."""

    in_field = True
    runs_tests = True
    in_process = True
    image_tests = ImageTests(
        folders=(HIDDEN_TESTS,),
        removal=("/bin/sh", "-c", CLEAR, "sh", *OF_THE_IMAGE),
        not_work=(ENVIRONMENT,),
        passable=("/root",),  # where uv puts the interpreters that `.venv` leads to
    )

    expected: dict[str, Outcome] = Field(
        min_length=1, description="Outcome by test, as `Class.test`: `PASSED`, `FAILED` or `ERROR`."
    )
    timeout_s: float = Field(300.0, gt=0, description="Time for the script; then the work scores 0.")

    @property
    def time_s(self) -> float:
        return self.timeout_s
