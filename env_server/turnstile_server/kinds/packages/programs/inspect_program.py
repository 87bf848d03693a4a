"""Samples of an Inspect task (inspect-ai 0.3), and their scores. Runs in the Python that has inspect-ai.

``list NAME JSON`` writes each sample of the task that the function NAME (``file.py:function``,
``package.module:function``) returns, called with the JSON's arguments; ``serve`` scores: a request has ``name``,
``config``, ``index``, ``answer``, ``sandbox`` and ``workdir``. The task's own scorers run; their ``sandbox()`` is
the server's.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

sys.path.insert(0, os.path.abspath(f"{__file__}/../../../../integrations/programs"))

import anyio
from inspect_ai import Task
from inspect_ai._util.registry import registry_info
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, ModelName, ModelOutput
from inspect_ai.scorer import Score, Target, value_to_float
from inspect_ai.solver import TaskState
from inspect_ai.util import ExecResult, SandboxEnvironment
from inspect_ai.util._sandbox.context import (
    sandbox_default_context_var,
    sandbox_environments_context_var,
)
from program_lines import Asked, Line, Overran, list_tasks, load_module, serve

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MODEL = "turnstile/agent"


class ServerSandbox(SandboxEnvironment):
    """The sandbox in which the server has the work."""

    def __init__(self, line: Line, workdir: str) -> None:
        super().__init__()
        self._line = line
        self._workdir = workdir

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,  # noqa: ASYNC109 - Inspect's name
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        data = input.encode() if isinstance(input, str) else input or b""
        said = self._line.ask(
            "exec",
            argv=cmd,
            env=env or {},
            cwd=os.path.join(self._workdir, cwd or "."),
            stdin=base64.b64encode(data).decode(),
            timeout_s=timeout,
        )
        if said["timed_out"]:
            raise Overran(f"{cmd[0]} ran longer than {timeout} s")
        return ExecResult(said["exit_code"] == 0, said["exit_code"], said["stdout"], said["stderr"])

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        self._line.ask("write", path=os.path.join(self._workdir, file), data=base64.b64encode(data).decode())

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        said = self._line.ask("read", path=os.path.join(self._workdir, file))
        data = base64.b64decode(said["data"])
        try:
            return data.decode() if text else data
        except UnicodeDecodeError as error:
            raise error from Asked(f"{file} is no text in UTF-8")

    @classmethod
    async def sample_cleanup(cls, *given: Any, **named: Any) -> None:
        """The server cleans up."""


class Tasks:
    """Those that were asked for."""

    def __init__(self) -> None:
        self._known: dict[str, Task] = {}

    def open(self, name: str, config: dict[str, Any]) -> Task:
        key = json.dumps([name, config], sort_keys=True)
        if key not in self._known:
            module, _, function = name.rpartition(":")
            made = getattr(load_module(module), function)(**config)
            if not isinstance(made, Task):
                raise TypeError(f"{name} gives {type(made).__name__}, not an Inspect Task")
            self._known[key] = made
        return self._known[key]


def scorers_of(task: Task) -> list[Any]:
    return list(task.scorer) if isinstance(task.scorer, (list, tuple)) else [task.scorer] if task.scorer else []


def text_of(sample: Sample) -> str:
    """The prompt: system text and user messages, then the choices by their letters."""
    if isinstance(sample.input, str):
        text = sample.input
    else:
        text = "\n\n".join(message.text for message in sample.input if message.text)
    if not sample.choices:
        return text
    listed = "\n".join(f"{LETTERS[index]}) {choice}" for index, choice in enumerate(sample.choices))
    return f"{text}\n\n{listed}\n\nAnswer with the letter of the right choice (several: `A,C`)."


def files_of(sample: Sample) -> dict[str, str]:
    """Texts by path. Raises ValueError for a file that is no text of at most a few MB."""
    found = {}
    for path, contents in (sample.files or {}).items():
        if contents.startswith("data:"):
            raise ValueError(f"its file {path!r} is a data URL")
        text = contents
        if len(contents) < 4096 and "\n" not in contents and os.path.isfile(contents):
            with open(contents, encoding="utf-8") as file:
                text = file.read()
        found[path.removeprefix("default:")] = text
    return found


def described(task: Task, sample: Sample, index: int) -> dict[str, Any]:
    """Description of a sample for the server: a task, or a problem."""
    whose = f"sample {sample.id or index}"
    sandbox = sample.sandbox or task.sandbox
    if sandbox is not None and sandbox.config is not None:
        return {
            "problem": f"{whose}: its sandbox has a configuration ({sandbox.config}): name an image (`?image=`)"
        }
    if not scorers_of(task):
        return {"problem": f"{whose}: the task has no scorer"}
    setup = sample.setup
    if setup is not None and os.path.isfile(setup):
        with open(setup, encoding="utf-8") as file:
            setup = file.read()
    try:
        files = files_of(sample)
    except (ValueError, OSError) as error:
        return {"problem": f"{whose}: {error}"}
    return {
        "task": {
            "index": index,
            "id": None if sample.id is None else str(sample.id),
            "instruction": text_of(sample),
            "files": files,
            "setup": setup,
            "needs_work": sandbox is not None or bool(files),
            "rewards": {registry_info(scorer).name.rpartition("/")[2]: 1.0 for scorer in scorers_of(task)},
        }
    }


async def scored(line: Line, tasks: Tasks, request: dict[str, Any]) -> dict[str, Any]:
    task = tasks.open(request["name"], request["config"])
    sample = task.dataset[request["index"]]
    answer = request["answer"] or ""
    messages = [ChatMessageUser(content=sample.input)] if isinstance(sample.input, str) else list(sample.input)
    state = TaskState(
        model=ModelName(MODEL),
        sample_id=sample.id if sample.id is not None else request["index"] + 1,
        epoch=1,
        input=sample.input,
        messages=[*messages, ChatMessageAssistant(content=answer)],
        target=Target(sample.target),
        choices=sample.choices,
        output=ModelOutput.from_content(MODEL, answer),
        completed=True,
        metadata=sample.metadata,
    )
    if sample.choices:
        chosen = set(re.findall(r"\b([A-Z])\b", answer.rpartition(":")[2] or answer))
        for position in range(len(sample.choices)):
            state.choices.mark_choice(position, LETTERS[position] in chosen)
    if request["sandbox"]:
        sandbox_environments_context_var.set({"default": ServerSandbox(line, request["workdir"])})
        sandbox_default_context_var.set("default")
    components: dict[str, float] = {}
    evidence: dict[str, Any] = {}
    for scorer in scorers_of(task):
        name = registry_info(scorer).name.rpartition("/")[2]
        score = await scorer(state, Target(sample.target))
        if score is None:
            raise ValueError(f"the scorer {name} gave no score")
        components.update(numbers(name, score))
        evidence[name] = {"value": score.value, "answer": score.answer, "explanation": score.explanation}
    return {"components": components, "evidence": evidence}


def numbers(name: str, score: Score) -> dict[str, float]:
    """Raises ValueError for a score that is no finite number: Inspect's NaN is a sample that was not scored."""
    to_float = value_to_float()
    given = score.value.items() if isinstance(score.value, dict) else [("", score.value)]
    found = {f"{name}.{part}" if part else name: float(to_float(value)) for part, value in given}
    for part, value in found.items():
        if not math.isfinite(value):
            raise ValueError(f"{part} is not scored: {score.explanation or 'no reason given'}")
    return found


def main() -> int:
    line = Line()
    tasks = Tasks()
    if sys.argv[1] == "list":
        name, config = sys.argv[2], json.loads(sys.argv[3])

        def found() -> Iterator[dict[str, Any]]:
            task = tasks.open(name, config)
            for index, sample in enumerate(task.dataset):
                yield described(task, sample, index)

        return list_tasks(line, found)

    async def score(request: dict[str, Any]) -> dict[str, Any]:
        return await scored(line, tasks, request)

    return serve(line, version("inspect-ai"), score, anyio.run)


if __name__ == "__main__":
    sys.exit(main())
