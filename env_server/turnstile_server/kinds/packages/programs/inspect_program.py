"""Samples of an Inspect task (inspect-ai 0.3), and their scores. Runs in the Python that has inspect-ai.

``list NAME JSON`` writes each sample of the task that the function NAME (``file.py:function``,
``package.module:function``) returns, called with the JSON's arguments; ``serve`` scores: a request has ``name``,
``config``, ``digest`` (or ``index``) of the sample, ``answer``, ``sandbox`` and ``workdir``. The task's own
solvers format the prompt, its own scorers run; their ``sandbox()`` is the server's.
"""

from __future__ import annotations

import base64
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

sys.path.insert(0, os.path.abspath(f"{__file__}/../../../../integrations/programs"))
sys.path.insert(0, os.path.abspath(f"{__file__}/.."))

import anyio
from inspect_ai import Task
from inspect_ai._util.registry import registry_info
from inspect_ai.dataset import Sample
from inspect_ai.model._model import init_model_roles
from inspect_ai.scorer import Score, Target, value_to_float
from inspect_ai.util import ExecResult, SandboxEnvironment
from inspect_ai.util._sandbox.context import (
    sandbox_default_context_var,
    sandbox_environments_context_var,
)
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._store import init_subtask_store
from inspect_chain import answered, prompt_of, refusals
from program_lines import Asked, Line, Overran, digest_of, list_tasks, load_module, serve, steady

ELSEWHERE = ("data:", "http://", "https://")
START = os.getcwd()


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
        self._places: dict[str, dict[str, int]] = {}
        """Index of each sample, by its digest, of a task that was asked for by digest."""

    def open(self, name: str, config: dict[str, Any]) -> Task:
        """The current folder becomes that of the task's file, from which Inspect reads templates and files."""
        key = _key(name, config)
        module, _, function = name.rpartition(":")
        os.chdir(os.path.dirname(os.path.abspath(module)) if module.endswith(".py") else START)
        if key not in self._known:
            made = getattr(load_module(module), function)(**config)
            if not isinstance(made, Task):
                raise TypeError(f"{name} gives {type(made).__name__}, not an Inspect Task")
            self._known[key] = made
        return self._known[key]

    def forget(self) -> None:
        """The next ``open`` makes the task anew."""
        self._known.clear()

    def index(self, request: dict[str, Any]) -> int:
        """Index of the sample that is asked for. Raises LookupError."""
        name, config, digest = request["name"], request["config"], request["digest"]
        task = self.open(name, config)
        if digest is None:
            return int(request["index"])
        places = self._places.get(_key(name, config))
        if places is None:
            places = {sample_digest(sample): index for index, sample in enumerate(task.dataset)}
            self._places[_key(name, config)] = places
        if digest not in places:
            raise LookupError(
                "the task has no such sample any more: its data, or what draws them, is not what was listed"
            )
        return places[digest]


def _key(name: str, config: dict[str, Any]) -> str:
    return json.dumps([name, config], sort_keys=True)


def scorers_of(task: Task) -> list[Any]:
    return list(task.scorer) if isinstance(task.scorer, (list, tuple)) else [task.scorer] if task.scorer else []


def sample_digest(sample: Sample) -> str:
    """Of all that the sample says. Its messages have ids that Inspect draws anew in each process."""
    said = sample.model_dump()
    if not isinstance(said["input"], str):
        for message in said["input"]:
            message.pop("id", None)
    return digest_of(said)


def files_of(sample: Sample) -> dict[str, str]:
    """Texts by path. Raises ValueError for a file that is no text of at most a few MB."""
    found = {}
    for path, contents in (sample.files or {}).items():
        place, colon, rest = path.partition(":")
        if colon and place != "default":
            raise ValueError(f"its file {path!r} is for another sandbox than the first")
        found[rest if colon else path] = _text(f"file {path!r}", contents)
    return found


def setup_of(sample: Sample) -> str | None:
    """Its set-up script as a command of ``sh``, which runs it as Inspect does: by the program that its first line
    names. Raises ValueError."""
    if sample.setup is None:
        return None
    script = _text("set-up script", sample.setup)
    first = script.partition("\n")[0]
    if not first.startswith("#!"):
        return script
    # As Linux reads the line: a program, and all that follows as one argument.
    program = shlex.join(first[2:].strip().split(maxsplit=1))
    if not program:
        raise ValueError("the first line of its set-up script names no program")
    run = f'{program} "$file"; status=$?; rm -f "$file"; exit $status'
    return f'file=$(mktemp) && printf %s {shlex.quote(script)} > "$file" || exit; {run}'


def _text(what: str, contents: str) -> str:
    """The contents, or those of the file that they name."""
    if contents.startswith(ELSEWHERE):
        raise ValueError(f"its {what} is a {contents.partition(':')[0]} URL")
    if 0 < len(contents) < 4096 and "\n" not in contents:
        if os.path.isdir(contents):
            raise ValueError(f"its {what} is a folder ({contents}): name its files")
        if os.path.isfile(contents):
            try:
                with open(contents, encoding="utf-8") as file:
                    return file.read()
            except UnicodeDecodeError:
                raise ValueError(f"its {what} is no text in UTF-8 ({contents})") from None
    return contents


def needed_image(task: Task, sample: Sample) -> str | None:
    """The configuration that the sandbox has in Inspect, where only an image can take its place."""
    specs = [spec for spec in (sample.sandbox, task.sandbox) if spec is not None]
    found = next((str(spec.config) for spec in specs if spec.config is not None), None)
    if found is None and specs:  # Inspect takes a compose file, or Dockerfile, that lies beside the task
        names = registry_find_sandboxenv(specs[-1].type).config_files()
        found = next((name for name in names if os.path.isfile(name)), None)
    return found and f"its sandbox has a configuration ({found}): name an image (`?image=`)"


async def described(task: Task, sample: Sample, index: int) -> dict[str, Any]:
    """Description of a sample for the server: a task, or a problem."""
    whose = f"sample {sample.id if sample.id is not None else index}"
    try:
        files = files_of(sample)
        return {
            "task": {
                "index": index,
                "digest": sample_digest(sample),
                "id": None if sample.id is None else str(sample.id),
                "instruction": await prompt_of(task, sample, index + 1),
                "files": files,
                "setup": setup_of(sample),
                "timeout_s": task.time_limit,
                "needs_image": needed_image(task, sample),
                "needs_work": bool(sample.sandbox or task.sandbox or files),
                "rewards": {name_of(scorer): 1.0 for scorer in scorers_of(task)},
            }
        }
    except (ValueError, OSError) as error:
        return {"problem": f"{whose}: {error}"}


async def all_described(task: Task) -> list[dict[str, Any]]:
    wrong = refusals(task)
    if not scorers_of(task):
        wrong.append("it has no scorer")
    if wrong:
        return [{"problem": text} for text in wrong]
    return [await described(task, sample, index) for index, sample in enumerate(task.dataset)]


def name_of(scorer: Any) -> str:
    return str(registry_info(scorer).name.rpartition("/")[2])


async def scored(line: Line, tasks: Tasks, request: dict[str, Any]) -> dict[str, Any]:
    task = tasks.open(request["name"], request["config"])
    index = tasks.index(request)
    sample = task.dataset[index]
    if request["sandbox"]:
        sandbox_environments_context_var.set({"default": ServerSandbox(line, request["workdir"])})
        sandbox_default_context_var.set("default")
    init_model_roles(task.model_roles or {})  # of judges
    state = await answered(task, sample, index + 1, request["answer"] or "")
    init_subtask_store(state.store)
    components: dict[str, float] = {}
    evidence: dict[str, Any] = {}
    for scorer in scorers_of(task):
        name = name_of(scorer)
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
            tasks.forget()
            yield from anyio.run(all_described, tasks.open(name, config))

        return list_tasks(line, lambda: steady(found))

    async def score(request: dict[str, Any]) -> dict[str, Any]:
        return await scored(line, tasks, request)

    return serve(line, version("inspect-ai"), score, anyio.run)


if __name__ == "__main__":
    sys.exit(main())
