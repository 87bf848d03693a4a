"""docs/tasks.md names every field of a task, and its examples are tasks."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml
from pydantic import BaseModel

from turnstile_server.settings.own_tools import OwnToolSpecs
from turnstile_server.tasks.answer import Answer
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.grader_options import GRADERS, options_in_field
from turnstile_server.tasks.hidden_tests import HiddenTests
from turnstile_server.tasks.model import Gold, SandboxWish, Task
from turnstile_server.tasks.network import NetworkWish
from turnstile_server.tasks.registry import load_tasks
from turnstile_server.tasks.script import ScriptTests

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "tasks.md").read_text()
PARTS: dict[str, type[BaseModel]] = {
    "tests": HiddenTests,
    "script": ScriptTests,
    "answer": Answer,
    "gold": Gold,
    "network": NetworkWish,
    "tools": OwnToolSpecs,
}


def test_every_field_is_in_the_table_and_no_other() -> None:
    rows = re.findall(r"^\| ((?:`[\w.]+`(?:, )?)+) \|", DOC.split("## Fields")[1].split("## How")[0], re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    wanted = set(Task.model_fields)
    wanted |= {plugin.name for plugin in GRADERS.declared() if options_in_field(plugin.name) is not None}
    wanted -= PARTS.keys()
    wanted |= {
        f"{part}.{name}" for part, model in PARTS.items() for name in model.model_fields if name != "grader"
    }
    assert told == wanted
    for name in (*Files.model_fields, *SandboxWish.model_fields):
        assert f"`{name}`" in DOC


def test_the_examples_are_tasks() -> None:
    examples = re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        assert Task.model_validate(yaml.safe_load(example)).graded


def test_the_check_of_an_answer_does_not_count_what_the_agent_could_change(tmp_path: Path) -> None:
    (example,) = [one for one in re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL) if "{answer}" in one]
    task = Task.model_validate(yaml.safe_load(example))
    assert task.tests is not None
    assert task.gold is not None
    (check,) = task.tests.files.inline.values()
    (tmp_path / "a.log").write_text("error\n")
    passed = [
        answer
        for answer in ("", "0", "1", "2", "3")
        if subprocess.run(["sh", "-c", check, "count.sh", answer], cwd=tmp_path, check=False).returncode == 0
    ]
    assert passed == [task.gold.answer]


def test_the_tasks_that_commands_of_the_docs_name_ship() -> None:
    words = {"all", *load_tasks([]).ids}
    named = re.compile(r"turnstile (?:mcp|run) [^`\n]*--tasks? ([a-z][a-z-]+)(?![\w./*-])")
    found = {
        (page.name, name)
        for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        for name in named.findall(page.read_text())
    }
    assert ("tools.md", "count-errors") in found
    assert {(page, name) for page, name in found if name not in words} == set()
