"""Options of graders that run code in a process of its own: ``function``, ``rubric``, ``json_schema``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from pydantic import ConfigDict, Field, field_validator

from turnstile_server.grading.digest import contents_of_code
from turnstile_server.settings import GradingSettings
from turnstile_server.tasks.inner_path import InnerPath
from turnstile_server.tasks.part import GraderOptions


class CodeOptions(GraderOptions):
    """Code of the server's machine."""

    parts: ClassVar[bool] = True
    target: str = Field(
        min_length=1,
        description="A name of the settings' `grading.functions`, or `module:name` or `file.py:name`, which is "
        "relative to the task file. Inline tasks take only the first.",
    )
    files: tuple[InnerPath, ...] = Field((), max_length=100, description="Files of the work folder that it gets.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Further keyword arguments.")
    timeout_s: float = Field(60.0, gt=0, le=3600, description="Time for one call.")

    @property
    def reads_work(self) -> bool:
        return bool(self.files)

    @property
    def host_code(self) -> str | None:
        return self.target if ":" in self.target else None

    def problem(self, settings: GradingSettings) -> str | None:
        if settings.python is not None and not settings.python.is_file():
            return f"the setting grading.python names {settings.python}, which is no file"
        if self.host_code is not None or self.target in settings.functions:
            return None
        have = ", ".join(settings.functions) or "none"
        return (
            f"target: there is no {self.target!r} in the settings (grading.functions); there are: {have}. Code of "
            "a task file is `module:name` or `file.py:name`"
        )

    def judged_by(self, settings: GradingSettings) -> bytes:
        target = self.host_code or settings.functions.get(self.target, "")
        return target.encode() + contents_of_code(target.rpartition(":")[0])

    def below(self, folder: Path) -> Self:
        place, _, name = self.target.rpartition(":")
        return self.model_copy(update={"target": f"{folder / place}:{name}"}) if place.endswith(".py") else self


class FunctionOptions(CodeOptions):
    """A Python function."""

    grader: Literal["function"]


class RubricOptions(CodeOptions):
    """An OpenEnv rubric, or what makes one."""

    grader: Literal["rubric"]
    timeout_s: float = Field(120.0, gt=0, le=3600, description="Time for one call, OpenEnv's import included.")

    def problem(self, settings: GradingSettings) -> str | None:
        if settings.python is None and find_spec("openenv") is None:
            return (
                "a rubric needs the package `openenv`, which this server's Python does not have, and cannot have "
                "beside `mcp` 2: install it into a virtual environment of its own, and name its Python in the "
                "setting grading.python (TURNSTILE_GRADING__PYTHON)"
            )
        return super().problem(settings)


class SchemaOptions(GraderOptions):
    """JSON that fits a schema."""

    model_config = ConfigDict(populate_by_name=True)

    grader: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="JSON schema, draft 2020-12.")
    file: InnerPath | None = Field(None, description="A file of the work folder; none: the answer.")

    @field_validator("schema_")
    @classmethod
    def _usable(cls, schema: dict[str, Any]) -> dict[str, Any]:
        try:
            Draft202012Validator.check_schema(schema)
            outside = [reference for reference in _references(schema) if not reference.startswith("#")]
        except SchemaError as error:
            raise ValueError(f"not a JSON schema: {error.json_path}: {error.message[:300]}") from None
        except RecursionError:
            raise ValueError("a JSON schema that is nested too deep to be read") from None
        for reference in outside:
            raise ValueError(f"$ref {reference!r:.200} leads out of the schema; write `#/$defs/…`")
        return schema

    @property
    def reads_work(self) -> bool:
        return self.file is not None


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in ("$ref", "$dynamicRef") and isinstance(inner, str):
                yield inner
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)
