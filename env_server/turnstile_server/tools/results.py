"""The structured results of the built-in tools, as pydantic models: the values and their JSON Schema are one.

They stand beside the text that models have always got, which does not change with them.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Result(BaseModel):
    model_config = ConfigDict(frozen=True)


class BashResult(Result):
    """Also of a command that was killed at its time, though that result is an error."""

    exit_code: int = Field(description="128 and the signal's number after a signal; 137 after a time-out.")
    stdout: str = Field(
        description="Standard output. Standard error is in it, in the order it came, unless the server keeps them "
        "apart (tools.separate_stderr): one pipe keeps the order, and cannot tell the two."
    )
    stderr: str = Field(
        description="Standard error where the server keeps it apart; else only what bash said before it joined "
        "the two, which is that it cannot read the command."
    )
    truncated: bool = Field(description="The middle of the output was left out; a line in it says how much.")
    timed_out: bool = Field(description="The command was killed at its time.")
    duration_s: float = Field(description="Seconds that the command ran.")


class ReadFileResult(Result):
    path: str
    content: str = Field(description="The lines that are shown, without their numbers.")
    first_line: int = Field(description="Number of the first line in content; 0 for an empty file.")
    last_line: int = Field(description="Number of the last line in content; 0 for an empty file.")
    total_lines: int = Field(description="Lines of the file.")
    truncated: bool = Field(
        description="A single line was too long and is cut, or lines follow that were asked for."
    )


class WriteFileResult(Result):
    path: str
    size_bytes: int = Field(description="Size of the file.")


class EditFileResult(Result):
    path: str
    replacements: int = Field(description="How many occurrences were replaced.")


class SubmitResult(Result):
    received: bool = Field(description="True: the answer is kept. It says nothing of its worth.")


class TalkResult(SubmitResult):
    """The result of ``submit`` where a simulated user answers."""

    user: str | None = Field(description="What the user replies; null: the conversation is over.")


def output_schema(model: type[Result]) -> dict[str, Any]:
    """JSON Schema of the result, without pydantic's titles."""
    made = model.model_json_schema(mode="serialization")
    properties = {
        name: {key: value for key, value in about.items() if key != "title"}
        for name, about in made["properties"].items()
    }
    return {"type": "object", "properties": properties, "required": made["required"]}
