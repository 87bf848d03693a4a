"""A script from tasks' own known solutions: what a model that solves them would say, turn by turn.

One play per task for agents with the tool door's tools (`tool-loop`), one for agents with a shell alone
(`mini-swe-agent`); the tools that an agent offers say which is followed.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterable, Iterator

from scripted.script import Play, Script, ScriptError, Step
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.archive import read_files
from turnstile_server.tasks.model import Task

CHARACTERS_PER_STEP = 6000
"""A longer file is written in several turns, so that no completion comes near a limit."""

SUBMIT_COMMAND = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How mini-swe-agent is told that the work is done; it must be the whole command."""


def gold_script(tasks: Iterable[Task]) -> Script:
    """Plays for every task. A task that wants an answer has none for agents without ``submit``.

    Raises ScriptError for a task without a known solution.
    """
    plays: list[Play] = []
    for task in tasks:
        instruction = task.instruction.strip()
        plays.append(Play(instruction=instruction, steps=tuple(_tool_loop(task))))
        if task.answer is None:
            plays.append(Play(instruction=instruction, steps=tuple(_shell(task))))
    return Script(tuple(plays))


def _tool_loop(task: Task) -> Iterator[Step]:
    for path, data in _files(task).items():
        text = _text(data)
        if text is not None and len(text) <= CHARACTERS_PER_STEP:
            arguments = {"path": path, "content": text}
            yield Step(text=f"I write {path}.", tool="write_file", arguments=arguments)
        else:
            yield from _write(path, data)
    yield from _delete(task)
    answer = None if task.gold is None else task.gold.answer
    yield Step(text="That is it.", tool="submit", arguments={"answer": "done" if answer is None else answer})


def _shell(task: Task) -> Iterator[Step]:
    for path, data in _files(task).items():
        yield from _write(path, data)
    yield from _delete(task)
    yield _bash(SUBMIT_COMMAND, "That is it.")


def _files(task: Task) -> dict[str, bytes]:
    if task.gold is None:
        raise ScriptError(f"the task {task.id} has no known solution (gold)")
    return {} if task.gold.files is None else read_files(task.gold.files, TaskSettings())


def _delete(task: Task) -> Iterator[Step]:
    if task.gold is not None and task.gold.delete:
        yield _bash(f"rm -rf -- {shlex.join(task.gold.delete)}", "These are not needed.")


def _write(path: str, data: bytes) -> Iterator[Step]:
    """Shell commands that write a file, as text where a here-document gives back exactly that."""
    target = shlex.quote(path)
    folder = path.rpartition("/")[0]
    prepare = f"mkdir -p {shlex.quote(folder)} && " if folder else ""
    text = _text(data)
    if text is None or not text.endswith("\n") or "\r" in text:
        encoded = base64.b64encode(data).decode()
        cuts = [encoded[i : i + CHARACTERS_PER_STEP] for i in range(0, len(encoded), CHARACTERS_PER_STEP)] or [""]
        pieces = [f"base64 -d {{arrow}} {target} <<'END'\n{piece}\nEND" for piece in cuts]
    else:
        end = "END"
        while end in text:
            end += "_"
        pieces = [f"cat {{arrow}} {target} <<'{end}'\n{piece}{end}" for piece in _pieces(text)]
    for index, piece in enumerate(pieces):
        arrow = ">>" if index else ">"
        command = (prepare if index == 0 else "") + piece.replace("{arrow}", arrow, 1)
        yield _bash(command, f"I write {path}." if index == 0 else "The rest of it.")


def _pieces(text: str) -> list[str]:
    """Whole lines, together at most a step's characters where no single line is longer."""
    pieces = [""]
    for line in [f"{one}\n" for one in text.split("\n")[:-1]]:
        if pieces[-1] and len(pieces[-1]) + len(line) > CHARACTERS_PER_STEP:
            pieces.append("")
        pieces[-1] += line
    return pieces


def _bash(command: str, text: str) -> Step:
    return Step(text=text, tool="bash", arguments={"command": command})


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
