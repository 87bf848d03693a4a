"""The arguments of each tool as pydantic models: the check and the JSON Schema come from one definition."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from turnstile_server.tools.protocol import WrongArguments


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain a NUL character")
    return text


_Path = Annotated[str, AfterValidator(_no_nul)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]
_PATH = "Path of the file; relative paths start in the working directory."


class Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BashArguments(Arguments):
    command: Annotated[str, AfterValidator(_no_nul)] = Field(min_length=1, description="The command to run.")
    timeout_s: _Seconds | None = Field(None, description="Seconds after which the command is killed.")


class ReadFileArguments(Arguments):
    path: _Path = Field(min_length=1, description=_PATH)
    offset: _Count | None = Field(
        None, description="Number of the first line to read (the first line of a file is 1)."
    )
    limit: _Count | None = Field(None, description="How many lines to read.")


class WriteFileArguments(Arguments):
    path: _Path = Field(min_length=1, description=_PATH)
    content: str = Field(description="The whole text of the file.")


class EditFileArguments(Arguments):
    path: _Path = Field(min_length=1, description=_PATH)
    old: str = Field(min_length=1, description="The text to replace, exactly as it is in the file.")
    new: str = Field(description="The text to put there.")
    replace_all: bool | None = Field(
        None, description="Replace every occurrence; without it, `old` must occur exactly once."
    )


class SubmitArguments(Arguments):
    answer: str = Field(description="Your final answer.")


ArgumentsT = TypeVar("ArgumentsT", bound=Arguments)


def parsed(tool: str, model: type[ArgumentsT], arguments: Mapping[str, Any]) -> ArgumentsT:
    """The checked arguments.

    Raises WrongArguments, which names every wrong argument and those that the tool takes.
    """
    try:
        return model.model_validate(dict(arguments))
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].removeprefix('Value error, ')}"
            for fault in error.errors(include_url=False)
        )
        takes = ", ".join(
            name if field.is_required() else f"{name} (optional)" for name, field in model.model_fields.items()
        )
        raise WrongArguments(f"wrong arguments for {tool}: {faults}. It takes {takes}.") from error


def schema(model: type[Arguments]) -> dict[str, Any]:
    """JSON Schema of the arguments, without pydantic's titles and null defaults (a smaller prompt)."""
    made = model.model_json_schema()
    properties = {name: _plain(about) for name, about in made["properties"].items()}
    required = made.get("required", [])
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def json_size(value: Mapping[str, Any]) -> int:
    """Bytes of it as JSON; 0 for what has none in any form that is sent."""
    try:
        return len(orjson.dumps(value, default=str))
    except (orjson.JSONEncodeError, UnicodeEncodeError):  # a number longer than this library writes
        try:
            return len(json.dumps(value, default=str))
        except (RecursionError, ValueError, TypeError):
            return 0


def _plain(about: dict[str, Any]) -> dict[str, Any]:
    """An optional argument without its null type and default: models know optional arguments in that form."""
    value = about["anyOf"][0] if "anyOf" in about else {}
    return {**value, **{key: item for key, item in about.items() if key not in ("title", "default", "anyOf")}}
