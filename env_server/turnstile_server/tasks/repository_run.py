"""Options of a repository's own test-suite (``tests.runner: repository``), and the files that belong to it."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

NODE_ID = re.compile(r"[^:\s/][^:]*\.py(::\S.*)+")
TEST_FOLDERS = frozenset(("tests", "test", "testing"))
CONFIGURATION = (
    "pyproject.toml",
    "setup.cfg",
    "pytest.toml",
    ".pytest.toml",
    "*.egg-info",
    "*.dist-info",
    "*.egg-link",
)
"""Files and folders that act on a run of pytest, beside those that every diff leaves out (``inside/workdiff.py``):
configuration, and what names plug-ins."""
OWN_OPTIONS = (
    "-c",
    "--config-file",
    "--rootdir",
    "-p",
    "-o",
    "--override-ini",
    "--confcutdir",
    "--noconftest",
    "-n",
)


class RepositoryRun(BaseModel):
    """The part of hidden tests that ``runner: repository`` alone has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str = Field("python3", min_length=1, description="The interpreter of the suite; it must have pytest.")
    keep: tuple[str, ...] = Field((), description="Ids that must not fail (`PASS_TO_PASS`).")
    cut_ids: bool = Field(False, description="An id that is cut in its parameter stands for all that begin so.")
    processes: Literal["one", "file"] = Field("one", description="One process for all files, or one for each.")
    options: tuple[str, ...] = Field((), description="Options of pytest, after those of the repository.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of the suite.")

    @field_validator("options")
    @classmethod
    def _none_of_ours(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            word = option.split("=")[0]
            if word in OWN_OPTIONS or not option.startswith("-"):
                raise ValueError(
                    f"`options` has {option!r}: paths, {', '.join(OWN_OPTIONS)} are the runner's own or the "
                    "repository's; write a value behind `=`"
                )
        return options

    @model_validator(mode="after")
    def _are_ids(self) -> Self:
        check_ids(self.keep, "repository.keep")
        return self


def check_ids(ids: tuple[str, ...], field: str) -> None:
    """Raises ValueError."""
    if len(set(ids)) != len(ids):
        raise ValueError(f"`{field}` names an id twice")
    for test in ids:
        if not NODE_ID.fullmatch(test):
            raise ValueError(f"`{field}`: {test!r} does not look like `tests/test_a.py::test_b[1]`")
        if ".." in file_of(test).split("/"):
            raise ValueError(f"`{field}`: {test!r} leads out of the work folder")


def file_of(test: str) -> str:
    return test.split("::", maxsplit=1)[0]


def owned_by_tests(paths: Iterable[str]) -> tuple[str, ...]:
    """Files and folders that belong to the suite, from the files of its tests: for each the nearest folder above
    it that is named like one of tests, else the file alone."""
    found: dict[str, None] = {}
    for path in paths:
        above = (str(parent) for parent in PurePosixPath(path).parents)
        found[next((each for each in above if each.rpartition("/")[2] in TEST_FOLDERS), path)] = None
    return tuple(found)


def protected_globs(owned: Iterable[str]) -> tuple[str, ...]:
    """Globs of the files of a work that are not taken over: the suite, and what acts on its run, in any folder."""
    return (*(glob.escape(path) for path in owned), *CONFIGURATION, *(f"*/{name}" for name in CONFIGURATION))
