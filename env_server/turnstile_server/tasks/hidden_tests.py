"""The field ``tests`` of a task: tests that the agent never sees, and how they are run."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from turnstile_server.tasks.files import FilesOptions
from turnstile_server.tasks.inner_path import inner_path
from turnstile_server.tasks.repository_run import RepositoryRun, check_ids

UNITTEST_ID = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){2,}")
PYTEST_ID = re.compile(r"[^:\s][^:]*\.py(::[^:\s].*)+")


INTERPRETERS = re.compile(r"(python|perl|ruby|node|php|lua)[\d.]*|sh|bash|dash|zsh|busybox")
BUILDERS = frozenset(("make", "npm", "npx", "pytest", "tox", "cargo", "go", "mvn", "gradle"))


def starts_the_work(command: tuple[str, ...]) -> str | None:
    """The part of a command by which it visibly runs code of the work folder; None where it does not, or where
    that cannot be seen."""
    program, *rest = command
    if "{tests}" in program:
        return None
    if "/" in program and not program.startswith("/"):
        return program
    name = PurePosixPath(program).name
    if name in BUILDERS:
        return program
    if not INTERPRETERS.fullmatch(name):
        return None
    for position, word in enumerate(rest):
        if word == "-m":
            return " ".join(rest[position : position + 2])
        if re.fullmatch(r"-\w*[ce]", word):
            return None
        if not word.startswith("-"):
            return None if word.startswith(("{tests}", "/")) else word
    return None


ANSWER = "{answer}"
"""Stands for the submitted answer, as a whole argument of a command."""


def _check_answer(command: tuple[str, ...]) -> None:
    """Raises ValueError where an agent could have its answer run: as a part of a shell's line, or, before anything
    of the tests is named, as a program, a script or an option of one."""
    behind_tests = False
    for part in command:
        if ANSWER in part and not (part == ANSWER and behind_tests):
            raise ValueError(
                f"`{ANSWER}` is an argument of its own, behind a program of the tests (is {part!r}): elsewhere an "
                'agent could have it run. Write ["sh", "{tests}/check.sh", "{answer}"], and "$1" in the script'
            )
        behind_tests |= "{tests}" in part


class HiddenTests(FilesOptions):
    """Tests that the agent never sees. Reward component ``tests``: 1 when every expected id passes, else 0."""

    in_field = True
    once = True
    runs_tests = True

    grader: Literal["tests"] = "tests"
    runner: Literal["unittest", "pytest", "command", "repository"] = Field(
        "unittest",
        description="`unittest` and `pytest` report by id; `command` passes by exit status 0 of `command`; "
        "`repository` runs files of the work folder with the repository's own pytest.",
    )
    expected: tuple[str, ...] = Field(
        (), description="Ids that must pass: `module.Class.test` (unittest), `file.py::Class::test` (pytest)."
    )
    command: tuple[str, ...] = Field(
        (),
        description="`command`: argv, run in the work folder; `{tests}` is theirs, and an argument `{answer}` is "
        "what the agent submitted.",
    )
    timeout_s: float = Field(60.0, gt=0, description="Time for all of them; then they failed.")
    import_paths: tuple[str, ...] = Field(
        (".",), description="Folders of the work that its modules are imported from, after all others."
    )
    trust: Literal["boundary", "in_process"] = Field(
        "boundary",
        description="`boundary`: the work runs apart from what judges it; `in_process`: tests import and run it.",
    )
    in_place: bool = Field(
        False,
        description="Tests are about what a call does to its arguments although it gives a value, as `pop(xs)` "
        "does. Else tests must pass with the arguments as they were, too.",
    )
    protected: tuple[str, ...] = Field(
        (), description="Paths (globs) of the work folder whose changes are left out of the diff."
    )
    repository: RepositoryRun = Field(RepositoryRun(), description="More of `runner: repository`.")

    @property
    def in_process(self) -> bool:  # type: ignore[override]  # a fixed value in most graders
        """See ``GraderOptions``: as ``trust`` says."""
        return self.trust == "in_process"

    @property
    def reads_answer(self) -> bool:
        """See ``GraderOptions``: a command that is given it."""
        return ANSWER in self.command

    @model_validator(mode="before")
    @classmethod
    def _trusts_the_work(cls, fields: object) -> object:
        """A repository's suite runs the work in its own process: there is no other way."""
        if isinstance(fields, dict) and fields.get("runner") == "repository":
            return {"trust": "in_process", **fields}
        return fields

    @field_validator("import_paths")
    @classmethod
    def _inside(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(path if path == "." else inner_path(path) for path in paths)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.runner == "command":
            if not self.command:
                raise ValueError("runner: command needs `command`")
            if self.expected:
                raise ValueError("runner: command passes by exit status; it has no `expected`")
            _check_answer(self.command)
            if self.trust == "boundary" and (part := starts_the_work(self.command)) is not None:
                raise ValueError(
                    f"`command` runs {part!r} of the work itself, as the user that judges: start a program of the "
                    "hidden tests (`{tests}/…`) that runs the work by `$AS_WORK` or `turnstile_tests.run`, or say "
                    "`trust: in_process`"
                )
            return self
        if self.command:
            raise ValueError(f"runner: {self.runner} has no `command`")
        if not self.expected:
            raise ValueError(f"runner: {self.runner} needs `expected`, the ids that must pass")
        if self.runner == "repository":
            return self  # the next check's
        if len(set(self.expected)) != len(self.expected):
            raise ValueError("`expected` names an id twice")
        shape = UNITTEST_ID if self.runner == "unittest" else PYTEST_ID
        for test in self.expected:
            if not shape.fullmatch(test):
                example = "`module.Class.test`" if self.runner == "unittest" else "`file.py::Class::test`"
                raise ValueError(f"expected id {test!r} does not look like {example}")
        return self

    @model_validator(mode="after")
    def _complete_repository(self) -> Self:
        if self.runner == "repository":
            if self.trust != "in_process":
                raise ValueError("runner: repository runs the work in the suite's process: `trust: in_process`")
            check_ids(self.expected, "expected")
            if both := set(self.expected) & set(self.repository.keep):
                raise ValueError(f"{min(both)!r} is in `expected` and in `repository.keep`")
        elif self.repository != RepositoryRun():
            raise ValueError("`repository` is for runner: repository")
        return self
