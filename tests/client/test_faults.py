"""What pydantic finds wrong is told in words: no names of classes, no `Value error`, no counts of errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from typer.testing import CliRunner

from turnstile.cli.app import app
from turnstile.models.faults import fault_text


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    number: int = 1


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    inner: Inner = Inner()
    names: tuple[str, ...] = ()
    even: int = 0

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"inner": 3}, "it must be a mapping of fields"),
        ({"inner": {"other": 3}}, "there is no such field"),
        ({"names": 3}, "it must be a list"),
        ({"even": 3}, "must be even"),
        ({"even": "x"}, "Input should be a valid integer, unable to parse string as an integer"),
    ],
)
def test_a_fault_is_said_in_the_words_of_its_writer(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(given)
    assert [fault_text(item) for item in caught.value.errors()] == [said]


RAW = ("Value error", "validation error", "instance of", "Extra inputs", "Field required", "errors.pydantic")


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ('{"id": 3}', ["episodes", "regrade", "ep-1", "--task-file"], "id: Input should be a valid string"),
        ("[1]", ["episodes", "regrade", "ep-1", "--task-file"], "a task: "),
        ("{", ["episodes", "regrade", "ep-1", "--task-file"], "is not JSON"),
        ("gate = 3\n", ["serve", "--config"], "setting gate = 3: it must be a mapping of fields"),
        ('[workers]\ncount = "x"\n', ["serve", "--config"], "setting workers.count = 'x': it must be a number"),
        ("id: x\ntests: {files: 3}\n", ["tasks", "list"], "tests.files: it must be a mapping of fields"),
        ("id: x\ninstructions: y\n", ["tasks", "list"], "instruction: it is missing"),
        ("- 1\n", ["openenv", "certify", "--manifest"], "no `validation:` block"),
        ("validation: {reward: 3}\n", ["openenv", "certify", "--manifest"], "validation.reward: it must be a"),
    ],
)
def test_no_command_shows_raw_words(tmp_path: Path, text: str, words: list[str], said: str) -> None:
    file = tmp_path / "given.yaml"
    file.write_text(text)
    done = CliRunner().invoke(app, [*words, str(file)], env={"TURNSTILE_CONTROL_KEY": "k" * 20})
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert [raw for raw in RAW if raw in done.output] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("TURNSTILE_TASKS__SOURCES", "3"), ("TURNSTILE_GATE", "3"), ("TURNSTILE_JOURNAL__MODE", "x")],
)
def test_wrong_settings_are_told_alike_by_every_command(name: str, value: str) -> None:
    told = {
        command: CliRunner().invoke(app, command.split(), env={name: value}).output
        for command in ("tasks list", "serve", "openenv certify", "tasks build")
    }
    assert len(set(told.values())) == 1, told
    assert [raw for raw in RAW if raw in told["serve"]] == []
