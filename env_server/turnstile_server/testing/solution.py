"""A task's known solution as shell commands: what a model with nothing but a shell would run to solve it. Pure."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator

from turnstile_server.errors import TaskFailed
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.archive import FilesProblem, read_files
from turnstile_server.tasks.model import Task

CHARACTERS_PER_COMMAND = 6000
"""A longer file is written by several commands, so that no completion comes near a limit."""


def solution_files(task: Task, settings: TaskSettings) -> dict[str, bytes]:
    """Raises TaskFailed for a task without a known solution."""
    if task.gold is None:
        raise TaskFailed(f"the task {task.id} has no known solution (gold)")
    try:
        return {} if task.gold.files is None else read_files(task.gold.files, settings)
    except FilesProblem as error:
        raise TaskFailed(f"the known solution of {task.id} cannot be read: {error}") from error


def solution_commands(task: Task, settings: TaskSettings) -> list[str]:
    """Commands for `/bin/sh` in the work folder. Raises TaskFailed where there is no
    known solution, or where it is an answer, which no shell can give."""
    if task.answer is not None:
        raise TaskFailed(f"the task {task.id} wants an answer through the tool `submit`; a shell cannot give it")
    commands = [
        command for path, data in solution_files(task, settings).items() for command in write_commands(path, data)
    ]
    return [*commands, *delete_commands(task)]


def delete_commands(task: Task) -> list[str]:
    paths = task.gold.delete if task.gold is not None else ()
    return [f"rm -rf -- {shlex.join(paths)}"] if paths else []


def write_commands(path: str, data: bytes) -> Iterator[str]:
    """Write a file, as text where a here-document gives back exactly that, and where nothing in it looks like a
    command: some agents refuse a command with a substitution in it by sight, also where a shell would see none."""
    target = shlex.quote(path)
    folder = path.rpartition("/")[0]
    prepare = f"mkdir -p {shlex.quote(folder)} && " if folder else ""
    text = text_of(data)
    if text is None or not text.endswith("\n") or any(mark in text for mark in ("\r", "`", "$(")):
        encoded = base64.b64encode(data).decode()
        size = CHARACTERS_PER_COMMAND
        cuts = [encoded[i : i + size] for i in range(0, len(encoded), size)] or [""]
        pieces = [f"base64 -d {{arrow}} {target} <<'END'\n{piece}\nEND" for piece in cuts]
    else:
        end = "END"
        while end in text:
            end += "_"
        pieces = [f"cat {{arrow}} {target} <<'{end}'\n{piece}{end}" for piece in _pieces(text)]
    for index, piece in enumerate(pieces):
        arrow = ">>" if index else ">"
        yield (prepare if index == 0 else "") + piece.replace("{arrow}", arrow, 1)


def text_of(data: bytes) -> str | None:
    """None where the bytes are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _pieces(text: str) -> list[str]:
    """Whole lines, together at most a command's characters where no single line is longer."""
    pieces = [""]
    for line in [f"{one}\n" for one in text.split("\n")[:-1]]:
        if pieces[-1] and len(pieces[-1]) + len(line) > CHARACTERS_PER_COMMAND:
            pieces.append("")
        pieces[-1] += line
    return pieces
