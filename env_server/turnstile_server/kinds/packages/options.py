"""The text of a source whose tasks come from a package, ``verifiers:NAME?option=value``, and the options of the
grader that has the package score their works."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal
from urllib.parse import parse_qsl

from pydantic import Field

from turnstile_server.grading.digest import contents_of_code
from turnstile_server.integrations.package_process import PackageProgram
from turnstile_server.settings import GradingSettings
from turnstile_server.tasks.part import GraderOptions
from turnstile_server.tasks.reward import parse_bounds

_PROGRAMS = Path(__file__).parent / "programs"

PACKAGES: Final = {
    program.kind: program
    for program in (
        PackageProgram("inspect", "inspect-ai==0.3.285", _PROGRAMS / "inspect_program.py"),
        PackageProgram("verifiers", "verifiers==0.4.0", _PROGRAMS / "verifiers_program.py"),
    )
}
"""The packages whose tasks are a source, and our programs that run in their Pythons."""

_OWN = ("image", "workdir", "bounds", "limit")


class PackageOptions(GraderOptions):
    """The package that the task comes from scores the work."""

    grader: Literal["verifiers", "inspect"]
    name: str = Field(description="The taskset or task, as in the source.")
    config: dict[str, Any] = Field(default_factory=dict, description="What it is made with.")
    index: int = Field(ge=0, description="Which of its tasks, where it has no digest.")
    digest: str | None = Field(
        None, description="Digest of the task's content, by which the package finds it again in whatever order."
    )
    needs_work: bool = Field(False, description="Its scoring looks at the work, in a sandbox.")
    parts: ClassVar[bool] = True

    @property
    def reads_work(self) -> bool:
        return self.needs_work

    @property
    def host_code(self) -> str | None:
        return f"{self.grader} {self.name}"

    def judged_by(self, settings: GradingSettings) -> bytes:
        return contents_of_code(self.name.rpartition(":")[0] or self.name)


@dataclass(frozen=True, slots=True)
class PackageSourceOptions:
    """A SOURCE, read: ``verifiers:NAME?option=value``. Options that are not ours are the package's own."""

    kind: str
    name: str
    image: str | None = None
    workdir: str | None = None
    bounds: tuple[float, float] | None = None
    limit: int | None = None
    config: dict[str, Any] = field(default_factory=dict)


def is_package_source(source: str) -> bool:
    return source.partition(":")[0] in PACKAGES and ":" in source


def parse_package_source(source: str) -> PackageSourceOptions:
    """Raises ValueError: everything that is wrong, one thing per line."""
    kind, _, rest = source.partition(":")
    name, _, query = rest.partition("?")
    wrong: list[str] = []
    given: dict[str, str] = {}
    config: dict[str, Any] = {}
    for option, value in parse_qsl(query, keep_blank_values=True):
        if option in given or option in config:
            wrong.append(f"{option}: given twice")
        elif option in _OWN:
            given[option] = value
        else:
            config[option] = _json_or_text(value)
    if not name:
        wrong.append(f"name what of it: {kind}:NAME")
    limit = given.get("limit")
    if limit is not None and not (limit.isascii() and limit.isdigit() and int(limit) > 0):
        wrong.append(f"limit: {limit!r} is not a number from 1")
    bounds = None
    if "bounds" in given:
        try:
            bounds = parse_bounds(given["bounds"])
        except ValueError as error:
            wrong.append(f"bounds: {error}")
    if wrong:
        raise ValueError("\n".join(wrong))
    count = None if limit is None else int(limit)
    module, colon, function = name.partition(":")
    if module.endswith(".py"):  # whoever scores it later may stand elsewhere
        name = f"{Path(module).absolute()}{colon}{function}"
    return PackageSourceOptions(kind, name, given.get("image"), given.get("workdir"), bounds, count, config)


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
