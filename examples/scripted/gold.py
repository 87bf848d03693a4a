"""A script from the known solutions of tasks: the replies of a model that solves them, turn by turn.

Each task has a play for agents with the MCP endpoint's tools (`tool-loop`) and one for agents with only a shell
(`mini-swe-agent`). The tools that an agent offers decide which play is followed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from scripted.script import Play, Script, ScriptError, Step
from turnstile_server.errors import TaskFailed
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.model import Task
from turnstile_server.testing.shell_policy import (
    CHARACTERS_PER_COMMAND,
    SUBMIT_COMMAND,
    change_commands,
    script_commands,
    solution_files,
    text_of,
    write_commands,
)

__all__ = ["SUBMIT_COMMAND", "gold_script"]


def gold_script(tasks: Iterable[Task]) -> Script:
    """Plays for every task, and for each step of one that has steps. A task that wants an answer has no play for
    agents without ``submit``.

    Raises ScriptError for a task without a known solution.
    """
    plays: list[Play] = []
    for task in (step for one in tasks for step in _asked(one)):
        try:
            files = solution_files(task, TaskSettings())
            program = script_commands(task, TaskSettings())
        except TaskFailed as error:
            raise ScriptError(error.message) from error
        instruction = task.instruction.strip()
        plays.append(Play(instruction=instruction, steps=tuple(_tool_loop(task, files, program))))
        if task.answer is None:
            plays.append(Play(instruction=instruction, steps=tuple(_shell(task, files, program))))
    return Script(tuple(plays))


def _asked(task: Task) -> Iterable[Task]:
    """What an agent is asked one after the other."""
    return map(task.at_step, range(len(task.steps))) if task.steps else (task,)


def _tool_loop(task: Task, files: dict[str, bytes], program: Sequence[str]) -> Iterator[Step]:
    for path, data in files.items():
        text = text_of(data)
        if text is not None and len(text) <= CHARACTERS_PER_COMMAND:
            arguments = {"path": path, "content": text}
            yield Step(text=f"I write {path}.", tool="write_file", arguments=arguments)
        else:
            yield from _write(path, data)
    yield from _change(task)
    yield from _run(program)
    answer = None if task.gold is None else task.gold.answer
    yield Step(text="That is it.", tool="submit", arguments={"answer": "done" if answer is None else answer})


def _shell(task: Task, files: dict[str, bytes], program: Sequence[str]) -> Iterator[Step]:
    for path, data in files.items():
        yield from _write(path, data)
    yield from _change(task)
    yield from _run(program)
    yield _bash(SUBMIT_COMMAND, "That is it.")


def _change(task: Task) -> Iterator[Step]:
    for command in change_commands(task):
        yield _bash(command, "This has to change.")


def _run(program: Sequence[str]) -> Iterator[Step]:
    for command in program:
        yield _bash(command, "The solution is a program.")


def _write(path: str, data: bytes) -> Iterator[Step]:
    for index, command in enumerate(write_commands(path, data)):
        yield _bash(command, f"I write {path}." if index == 0 else "The rest of it.")


def _bash(command: str, text: str) -> Step:
    return Step(text=text, tool="bash", arguments={"command": command})
