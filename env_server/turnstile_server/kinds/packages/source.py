"""Tasks of verifiers tasksets and Inspect tasks: ``verifiers:NAME?option=value``, ``inspect:file.py:function``.

The package itself lists them, in its own Python, once when the server starts. The list is kept in a file without a
name, of which one task is read at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from turnstile.models.faults import fault_text
from turnstile_server.errors import TaskFailed
from turnstile_server.integrations.package_process import PackageBroken, listed, python_of
from turnstile_server.kinds.packages.options import (
    PACKAGES,
    PackageSourceOptions,
    is_package_source,
    parse_package_source,
)
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.protocol import Recognition, StoredTask, TaskProblem
from turnstile_server.tasks.selection import labels_of

_LOG = logging.getLogger(__name__)
_MAX_ID = 64
_TAIL = 8


class PackageTasks:
    """A ``TaskSource``."""

    recognition = Recognition.SCHEME

    def recognises(self, source: str) -> bool:
        return is_package_source(source)

    def host_paths(self, source: str) -> Sequence[Path]:
        file = source.partition(":")[2].partition("?")[0].partition(".py")
        return (Path(f"{file[0]}.py"),) if file[1] else ()

    def load(self, source: str, settings: TaskSettings) -> Iterator[StoredTask | TaskProblem]:
        try:
            options = parse_package_source(source)
        except ValueError as error:
            yield from (TaskProblem(source, None, None, line) for line in str(error).splitlines())
            return
        python = python_of(PACKAGES[options.kind], settings.package_pythons, settings.package_environment)
        spool = tempfile.TemporaryFile()  # noqa: SIM115 - the reader of the tasks owns it
        try:
            listed(python, options.name, options.config, spool, timeout_s=settings.package_list_timeout_s)
        except PackageBroken as error:
            spool.close()
            yield TaskProblem(source, None, None, str(error))
            return
        yield from _found(source, options, ListedTasks(spool, options), settings.max_row_bytes)


class ListedTasks:
    """A ``TaskReader`` of what a package listed. Owns the file, which is gone with it."""

    def __init__(self, file: IO[bytes], options: PackageSourceOptions) -> None:
        self._file = file
        self._options = options
        self._sizes: dict[int, int] = {}

    def lines(self, max_bytes: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each task, or what is wrong with it (``problem``), with its position."""
        self._file.seek(0)
        position = number = 0
        while line := self._file.readline(max_bytes + 1):
            number += 1
            if len(line) > max_bytes:
                yield position, {"problem": f"task {number} has more than {max_bytes} bytes (tasks.max_row_bytes)"}
                while line and not line.endswith(b"\n"):
                    line = self._file.readline(max_bytes)
                position = self._file.tell()
                continue
            self._sizes[position] = len(line)
            yield position, json.loads(line)
            position += len(line)

    def read(self, position: int) -> Task:
        """See ``TaskReader``."""
        line = os.pread(self._file.fileno(), self._sizes[position], position)
        try:
            return task_of(json.loads(line)["task"], self._options)
        except (ValueError, KeyError) as error:
            raise TaskFailed(f"A listed task of {self._options.name} cannot be read again: {error}") from None


def _found(
    source: str, options: PackageSourceOptions, reader: ListedTasks, max_bytes: int
) -> Iterator[StoredTask | TaskProblem]:
    taken = 0
    for position, said in reader.lines(max_bytes):
        if "note" in said:
            _LOG.warning("%s: %s", source, said["note"])
            continue
        if options.limit is not None and taken >= options.limit:
            return
        taken += 1
        if "problem" in said:
            yield TaskProblem(source, None, None, str(said["problem"]))
            continue
        needed = said["task"].get("needs_image")
        if needed is not None and options.image is None:
            yield TaskProblem(source, None, None, f"task {said['task']['id']}: {needed}")
            continue
        try:
            task = task_of(said["task"], options)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                field = ".".join(str(part) for part in item["loc"] if part != "[key]")
                message = fault_text(item)
                yield TaskProblem(source, None, field, f"task {said['task'].get('id')}: {message}")
            continue
        kept = {sys.intern(name): sys.intern(value) for name, value in labels_of(task).items()}
        yield StoredTask(task.id, kept, reader, position, source)
    if not taken:
        yield TaskProblem(source, None, None, "it has no tasks")


def task_of(listed_task: dict[str, Any], options: PackageSourceOptions) -> Task:
    """Raises ValidationError."""
    given = dict(listed_task)
    module, _, function = options.name.partition(":")
    needs_work = bool(given["needs_work"])
    files = given.get("files") or {}
    total = sum(max(weight, 0.0) for weight in given["rewards"].values())
    reward: dict[str, Any] = {"combine": "mean"}
    if options.kind == "verifiers":  # whose components have their weights already
        reward = {"combine": "sum", "bounds": options.bounds or (0.0, max(1.0, total))}
    elif options.bounds is not None:
        reward["bounds"] = options.bounds
    sandbox = {name: given[name] for name in ("memory_mb", "cpus") if given.get(name) is not None}
    values: dict[str, Any] = {
        "id": _id(function or Path(module).stem, given["id"]),
        "instruction": given["instruction"],
        "image": options.image or given.get("image"),
        "setup": [given["setup"]] if given.get("setup") else [],
        "grading": {
            options.kind: {
                "grader": options.kind,
                "name": options.name,
                "config": options.config,
                "index": given["index"],
                "digest": given["digest"],
                "needs_work": needs_work,
            }
        },
        "reward": reward,
        "sandbox": sandbox,
        "metadata": {"source": f"{options.kind}:{options.name}"},
    }
    if options.workdir or given.get("workdir"):
        values["workdir"] = options.workdir or given["workdir"]
    if needs_work or files:
        values["base"] = {"inline": files}
    if given.get("timeout_s") is not None:
        values["limits"] = {"wall_s": given["timeout_s"]}
    return Task.model_validate(values)


def _id(stem: str, own: object) -> str:
    """A task's id: the source's name and its own, as far as an id may say them."""
    whole = f"{stem}-{own}"
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", whole)
    if plain == whole and len(plain) <= _MAX_ID:
        return plain
    tail = hashlib.sha256(whole.encode()).hexdigest()[:_TAIL]
    return f"{plain[: _MAX_ID - _TAIL - 1]}-{tail}"
