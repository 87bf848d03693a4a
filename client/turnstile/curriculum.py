"""An endless order of tasks that follows what the policy earns: those that it sometimes solves come most often.

    curriculum = Curriculum(client.tasks(), seed=1)
    for rollout in client.rollouts(curriculum, agent="tool-loop", n=8):
        curriculum.note(rollout)

A task is drawn in proportion to the variance of its latest rewards, which of rewards 0 and 1 is p(1 − p): the size
of the signal that a group of it gives (Foster et al. 2025, arXiv 2502.12272, "learnability"). A task whose latest
rewards are equal is solved, hopeless or flat: it is left out, and asked for again now and then.
"""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from turnstile import errors
from turnstile.models import TaskInfo, TaskRef
from turnstile.models.base import Model
from turnstile.rollout import Rollout, TaskLike, task_ref

_YOUNG = 1 / 12
"""The weight of a task with too few rewards to be judged: the variance of a number that may be any from 0 to 1."""


class CurriculumState(Model):
    """The position of a curriculum: JSON for a checkpoint. ``rewards``: the latest of each task, oldest first."""

    drawn: int = 0
    rewards: dict[str, tuple[float, ...]] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Standing:
    """How many tasks are at which point. ``unseen``: none of their rollouts has a reward yet. ``learning``: their
    rewards differ, or are too few. ``solved``, ``hopeless``, ``flat``: the latest are equal, at 1 or more, at 0 or
    less, between."""

    unseen: int
    learning: int
    solved: int
    hopeless: int
    flat: int


class Curriculum(Iterator[TaskRef]):
    """``tasks``: with ids. ``seed``, ``state``: the same ones give the same order, for the same rewards.
    ``window``: a task's latest rewards that count; ``least``: as many are needed before it is left out.
    ``explore``: the share of draws that take a task which nobody played, as long as there is one, in the order of
    ``tasks``, or of ``difficulties`` (``("easy", "medium", "hard")``; tasks of others come last). ``revisit``: the
    share of the other draws that take one which is left out.

    Every method may be called from any thread.
    """

    def __init__(
        self,
        tasks: Iterable[TaskLike],
        *,
        seed: int = 0,
        window: int = 16,
        least: int = 8,
        explore: float = 0.5,
        revisit: float = 0.05,
        difficulties: Sequence[str] = (),
        state: CurriculumState | None = None,
    ) -> None:
        """Raises InvalidRequest for no tasks, tasks without an id, and numbers that mean nothing."""
        if not 2 <= least <= window:
            raise errors.InvalidRequest(f"least is {least} and window {window}: 2 <= least <= window")
        if not (0 <= explore <= 1 and 0 <= revisit <= 1):
            raise errors.InvalidRequest(f"explore is {explore} and revisit {revisit}: both are shares, 0 to 1")
        listed = list(tasks)
        rank = {name: place for place, name in enumerate(difficulties)}
        if rank:
            listed.sort(key=lambda task: rank.get(_difficulty(task) or "", len(rank)))
        self._tasks: dict[str, TaskRef] = {}
        for ref in map(task_ref, listed):
            if ref.id is None:
                raise errors.InvalidRequest("a curriculum knows tasks by their ids, and a task has none")
            self._tasks[ref.id] = ref
        if not self._tasks:
            raise errors.InvalidRequest("a curriculum needs a task")
        self._seed, self._window, self._least = seed, window, least
        self._explore, self._revisit = explore, revisit
        state = state or CurriculumState()
        self._drawn = state.drawn
        self._rewards = {name: list(rewards) for name, rewards in state.rewards.items() if name in self._tasks}
        self._unplayed = [name for name in self._tasks if name not in self._rewards]
        self._lock = threading.Lock()

    def state(self) -> CurriculumState:
        """Tasks that are being played count as unseen."""
        with self._lock:
            rewards = {name: tuple(found) for name, found in self._rewards.items()}
            return CurriculumState(drawn=self._drawn, rewards=rewards)

    def note(self, rollout: Rollout) -> None:
        """Counts the rollout's reward. One without a reward, or of another task, counts as nothing."""
        if rollout.reward is None or rollout.task.id not in self._tasks:
            return
        with self._lock:
            latest = self._rewards.setdefault(rollout.task.id, [])
            latest.append(rollout.reward)
            del latest[: -self._window]

    def standing(self) -> Standing:
        with self._lock:
            ends = [self._end(rewards) for rewards in self._rewards.values()]
        counts = {name: ends.count(name) for name in ("learning", "solved", "hopeless", "flat")}
        return Standing(unseen=len(self._tasks) - len(ends), **counts)

    def __iter__(self) -> Curriculum:
        return self

    def __next__(self) -> TaskRef:
        with self._lock:
            chance = random.Random(f"{self._seed}:{self._drawn}")
            self._drawn += 1
            return self._tasks[self._draw(chance)]

    def _draw(self, chance: random.Random) -> str:
        weights = {name: self._weight(rewards) for name, rewards in self._rewards.items()}
        learning = [name for name, weight in weights.items() if weight > 0]
        if self._unplayed and (not learning or chance.random() < self._explore):
            return self._unplayed.pop(0)
        left_out = [name for name, weight in weights.items() if weight == 0]
        if left_out and (not learning or chance.random() < self._revisit):
            return chance.choice(left_out)
        if not learning:  # all are being played for the first time
            return chance.choice(list(self._tasks))
        return chance.choices(learning, [weights[name] for name in learning])[0]

    def _weight(self, rewards: Sequence[float]) -> float:
        return _YOUNG if len(rewards) < self._least else statistics.pvariance(rewards)

    def _end(self, rewards: Sequence[float]) -> str:
        if self._weight(rewards) > 0:
            return "learning"
        if rewards[0] >= 1:
            return "solved"
        return "hopeless" if rewards[0] <= 0 else "flat"


def _difficulty(task: TaskLike) -> str | None:
    if isinstance(task, TaskInfo):
        return task.difficulty
    return task.get("difficulty") if isinstance(task, Mapping) else None
