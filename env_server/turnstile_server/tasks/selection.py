"""Which tasks of a catalog, and in which order: filtered, shuffled by a seed, cut into shards.

The order of a seed depends on the seed, the epoch and the ids alone: not on the order of the sources, Python's
version or the server. Shards of one order have no task in common and leave none out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Self

from turnstile_server.errors import InvalidRequest
from turnstile_server.tasks.model import Task

MAX_LABEL = 200
"""Characters of a value that tasks are chosen by; longer ones are no labels."""
LISTS = ("tags", "graded_by")
"""Labels that are several values with commas between them: one that fits is enough."""
_SHARD = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")
_WHERE = re.compile(r"([A-Za-z_][\w.-]*)(!?=)(.*)", re.DOTALL)


def labels_of(task: Task) -> dict[str, str]:
    """Short values of a task by name: ``id``, ``difficulty``, ``image``, ``tags``, ``graded_by`` and scalars of
    its metadata."""
    own = {"id": task.id, "difficulty": task.difficulty, "image": task.image}
    own |= {"tags": ",".join(task.tags), "graded_by": ",".join(task.graders)}
    return labels({**task.metadata, **{name: value for name, value in own.items() if value}})


def labels(values: Mapping[str, object]) -> dict[str, str]:
    """The values that are short scalars, as text."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, bool):
            found[name] = "true" if value else "false"
        elif isinstance(value, str | int | float) and len(text := str(value)) <= MAX_LABEL:
            found[name] = text
    return found


@dataclass(frozen=True, slots=True)
class Condition:
    """``name=pattern`` or ``name!=pattern``; ``*`` and ``?`` in a pattern stand for any text and any letter."""

    name: str
    pattern: str
    negated: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        match = _WHERE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not `name=pattern` or `name!=pattern`")
        return cls(match[1], match[3], match[2] == "!=")

    def holds(self, found: Mapping[str, str]) -> bool:
        value = found.get(self.name, "")
        parts = (value, *value.split(",")) if self.name in LISTS else (value,)
        return any(fnmatchcase(part, self.pattern) for part in parts) is not self.negated


@dataclass(frozen=True, slots=True)
class TaskSelection:
    """The tasks that a request selects: conditions, a shard, and the order."""

    where: tuple[Condition, ...] = ()
    shard: tuple[int, int] | None = None
    """Which of how many, from 1."""
    shuffle: int | None = None
    epoch: int = 0

    @classmethod
    def parse(cls, where: Iterable[str], shard: str | None, shuffle: int | None, epoch: int) -> Self:
        """Raises InvalidRequest."""
        try:
            conditions = tuple(map(Condition.parse, where))
        except ValueError as error:
            raise InvalidRequest(f"where: {error}") from None
        return cls(conditions, None if shard is None else parse_shard(shard), shuffle, epoch)

    def filtered(self, tasks: Iterable[tuple[str, Mapping[str, str]]]) -> list[str]:
        """The ids of the tasks that meet every condition. Raises InvalidRequest for a name that no task has."""
        if not self.where:
            return [task_id for task_id, _ in tasks]
        known: set[str] = set()
        found = []
        for task_id, own in tasks:
            known.update(own)
            if all(condition.holds(own) for condition in self.where):
                found.append(task_id)
        for condition in self.where:
            if known and condition.name not in known:
                names = ", ".join(sorted(known))
                raise InvalidRequest(f"where: no task has {condition.name!r}; there are {names}")
        return found

    def ordered(self, ids: Sequence[str]) -> Sequence[str]:
        """The shard's ids in the order of the seed and the epoch."""
        if self.shuffle is not None:
            head = f"{self.shuffle}:{self.epoch}:"
            ids = sorted(ids, key=lambda task_id: sha256((head + task_id).encode()).digest())
        if self.shard is None:
            return ids
        which, count = self.shard
        return ids[which - 1 :: count]


def parse_shard(text: str) -> tuple[int, int]:
    """``1/4`` as which of how many. Raises InvalidRequest."""
    match = _SHARD.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]):
        raise InvalidRequest(f"shard: {text!r} is not WHICH/COUNT, like 1/4, which counts from 1")
    return int(match[1]), int(match[2])


def digest_of(ids: Iterable[str]) -> str:
    """Tells one set of tasks from another, in whatever order."""
    made = sha256()
    for task_id in sorted(ids):
        made.update(task_id.encode() + b"\n")
    return made.hexdigest()[:16]
