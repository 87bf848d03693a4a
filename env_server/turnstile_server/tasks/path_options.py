"""The options of a source that is a path: ``PATH?where=difficulty=easy&limit=20&reward_key=score&bounds=-1,3``.

A path with a question mark in its own name, which is there, has no options.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl

from turnstile_server.tasks.model import Task
from turnstile_server.tasks.protocol import FoundTask, TaskProblem
from turnstile_server.tasks.reward import RewardRules, parse_bounds
from turnstile_server.tasks.selection import Condition, labels_of

_NAMES = ("where", "limit", "reward_key", "bounds", "gold_reward")


def path_of(source: str) -> Path:
    """The path of a source."""
    return Path(_split(source)[0])


def _split(source: str) -> tuple[str, str]:
    path, mark, query = source.partition("?")
    if not mark or os.path.exists(source):
        return source, ""
    return path, query


@dataclass(frozen=True, slots=True)
class PathOptions:
    """One source, read."""

    path: Path
    where: tuple[Condition, ...] = ()
    limit: int | None = None
    reward_key: str | None = None
    """Key of ``reward.json`` for scripts that judge."""
    bounds: tuple[float, float] | None = None
    gold_reward: float | None = None
    """What a known solution must score."""

    @classmethod
    def parse(cls, source: str) -> PathOptions:
        """Raises ValueError: everything that is wrong, one thing per line."""
        path, query = _split(source)
        found = cls(Path(path))
        wrong: list[str] = []
        given: set[str] = set()
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name not in _NAMES:
                wrong.append(f"{name}: there is no such option; there are {', '.join(_NAMES)}")
            elif name in given and name != "where":
                wrong.append(f"{name}: given twice")
            else:
                given.add(name)
                try:
                    found = found._with(name, value)
                except ValueError as error:
                    wrong.append(f"{name}: {error}")
        if query and not given and not wrong:
            wrong.append(f"{query!r} is no option, like limit=20")
        if wrong:
            raise ValueError("\n".join(wrong))
        return found

    def _with(self, name: str, value: str) -> PathOptions:
        if name == "where":
            return replace(self, where=(*self.where, Condition.parse(value)))
        if name == "bounds":
            return replace(self, bounds=parse_bounds(value))
        if name == "limit":
            if not (value.isascii() and value.isdigit() and int(value) > 0):
                raise ValueError(f"{value!r} is not a number from 1")
            return replace(self, limit=int(value))
        if name == "reward_key":
            if not value:
                raise ValueError("it is the name of a key of reward.json")
            return replace(self, reward_key=value)
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{value!r} is not a number")
        return replace(self, gold_reward=number)

    def chosen(self, source: str, found: Iterable[FoundTask | TaskProblem]) -> Iterator[FoundTask | TaskProblem]:
        """The tasks that are chosen, judged as the options say, and every problem up to the last of them."""
        taken = 0
        broken = False
        for each in found:
            if isinstance(each, TaskProblem):
                broken = True
                yield each
                continue
            labels = labels_of(each.task)
            if not all(condition.holds(labels) for condition in self.where):
                continue
            taken += 1
            yield self._judged(each)
            if taken == self.limit:
                return
        if self.where and not taken and not broken:
            yield TaskProblem(source, None, None, "no task meets `where`")

    def _judged(self, found: FoundTask) -> FoundTask | TaskProblem:
        task = found.task
        try:
            if self.reward_key is not None:
                task = _with_key(task, self.reward_key)
            if self.bounds is not None:
                rules = RewardRules.model_validate(
                    {**task.reward.model_dump(by_alias=True), "bounds": self.bounds}
                )
                task = task.model_copy(update={"reward": rules})
            if self.gold_reward is not None and task.gold is not None:
                gold = task.gold.model_copy(update={"reward": self.gold_reward})
                task = task.model_copy(update={"gold": gold})
        except ValueError as error:
            return TaskProblem(found.file, found.line, None, str(error))
        return replace(found, task=task)


def _with_key(task: Task, key: str) -> Task:
    if task.script is None:
        raise ValueError("reward_key: no script judges this task, so nothing writes a reward.json")
    script = task.script.model_copy(update={"reward_key": key})
    steps = tuple(
        step.model_copy(update={"script": step.script.model_copy(update={"reward_key": key})})
        for step in task.steps
    )
    return task.model_copy(update={"grading": {**task.grading, "script": script}, "steps": steps})


def problems_of(source: str, error: ValueError) -> Iterator[TaskProblem]:
    """A problem for each line of ``error``."""
    yield from (TaskProblem(source, None, None, line) for line in str(error).splitlines())
