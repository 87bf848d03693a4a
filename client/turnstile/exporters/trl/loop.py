"""The loop of the worker's process: it plays groups of the task list, over and over, and sends their rows.

What must hold: running rollouts and rows that the trainer has not taken are never more than ``max_inflight``
together, whole groups at a time, so a trained row is at most about ``max_inflight / rows per step`` weight updates
old. A group is sent when its last rollout has ended. However the loop ends, the episodes that run are cancelled.

It knows neither processes nor TRL: an ``Outlet`` takes the rows and reports how many wait.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import anyio

from turnstile.client import AsyncClient
from turnstile.errors import TurnstileError
from turnstile.exporters.trl.rows import GroupRows, Row, rows_of_group
from turnstile.exporters.trl.servers import TurnstileServers
from turnstile.exporters.trl.taken import SentRollouts
from turnstile.groups import Scale
from turnstile.models import Limits, Sampling, TaskRef
from turnstile.rollout import Rollout, TaskLike

_log = logging.getLogger(__name__)

_LOOK_S = 0.05
"""Seconds between two looks at how many rows wait. They are taken in another process, which sends no notice."""

Metrics = dict[str, float | tuple[float, float]]


class NothingToTrain(Exception):
    """Too many groups in a row gave nothing to train. The trainer would wait without end."""


class Outlet(Protocol):
    """The receiver of the loop's results. Called from one task only."""

    async def send(self, rows: tuple[Row, ...], metrics: Metrics) -> None: ...

    def rows_waiting(self) -> int:
        """Rows sent that the trainer has not taken."""
        ...

    def model_version(self) -> int:
        """The trainer's newest version."""
        ...


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """The worker's options, checked. All of them are pickled for the worker's process."""

    servers: TurnstileServers
    tasks: tuple[TaskLike, ...]
    agent: str | Callable[[Any], Awaitable[object]]
    n: int
    max_inflight: int
    scale: Scale
    skip_flat: bool
    max_barren: int
    shuffle_seed: int | None
    retries: int
    sampling: Sampling | Mapping[str, Any] | None
    limits: Limits | Mapping[str, Any] | None
    env: Mapping[str, str] | None
    metadata: Mapping[str, Any] | None


class RolloutLoop:
    def __init__(self, options: LoopOptions, outlet: Outlet) -> None:
        self._options = options
        self._outlet = outlet
        self._numbers: dict[str, int] = {}
        self._ended: defaultdict[str, list[Rollout]] = defaultdict(list)
        self._started = 0
        self._inflight = 0
        self._barren = 0
        self._client: AsyncClient | None = None
        self._sent = SentRollouts()

    async def run(self) -> None:
        """Runs until it is cancelled. Raises NothingToTrain, and the client's errors that no repetition mends."""
        options = self._options
        async with options.servers.async_client() as client:
            self._client = client
            rollouts = client.rollouts(
                self._tasks(),
                agent=options.agent,
                n=options.n,
                max_concurrent=options.max_inflight,
                retries=options.retries,
                group_id=self._group_id,
                sampling=options.sampling,
                limits=options.limits,
                env=options.env,
                metadata=options.metadata,
            )
            try:
                async for rollout in rollouts:
                    group = self._ended[rollout.group_id]
                    group.append(rollout)
                    if len(group) == options.n:
                        await self._give(self._ended.pop(rollout.group_id))
            finally:
                await rollouts.aclose()

    async def _tasks(self) -> AsyncIterator[TaskLike]:
        order = list(self._options.tasks)
        shuffled = random.Random(self._options.shuffle_seed) if self._options.shuffle_seed is not None else None
        while True:
            if shuffled is not None:
                shuffled.shuffle(order)
            for task in order:
                while not self._has_room():  # noqa: ASYNC110 - rows are taken in another process
                    await anyio.sleep(_LOOK_S)
                self._inflight += self._options.n
                yield task

    def _has_room(self) -> bool:
        return self._inflight + self._outlet.rows_waiting() + self._options.n <= self._options.max_inflight

    def _group_id(self, _: TaskRef) -> str:
        name = f"{self._options.servers.run}-g{self._started}"
        self._numbers[name] = self._started
        self._started += 1
        return name

    async def _give(self, group: list[Rollout]) -> None:
        """Sends the rows of an ended group, which makes room for another."""
        number = self._numbers.pop(group[0].group_id)
        found = rows_of_group(group, number, self._options.servers.model_version, self._options.scale)
        skipped = found.flat and self._options.skip_flat
        rows = () if skipped else found.rows
        self._barren = 0 if rows else self._barren + 1
        of_episode = Counter(row.episode_id for row in rows)
        for rollout in group:
            self._sent.sent(rollout, 0 if rollout.episode is None else of_episode[rollout.episode.episode_id])
        await self._outlet.send(rows, self._metrics(found, rows, skipped))
        self._inflight -= self._options.n
        if self._barren >= self._options.max_barren:
            raise NothingToTrain(_why_barren(group, found, self._barren))

    async def tell_trained(self, rows: int, version: int) -> None:
        """Tells the servers which step took which rollouts. ``rows``: that the trainer had taken in all when its
        weights ``version`` were replaced. A failure is logged: the rollouts are trained whether or not a server
        knows."""
        taken = self._sent.take(rows)
        if self._client is None or not (taken.used or taken.left_out):
            return
        name = self._options.servers.weight_name(version)
        try:
            await self._client.trained(version, taken.used, left_out=taken.left_out, version=name)
        except TurnstileError as error:
            _log.warning("the servers could not be told which rollouts step %d trained: %s", version, error)

    def _metrics(self, found: GroupRows, rows: tuple[Row, ...], skipped: bool) -> Metrics:
        behind = [self._outlet.model_version() - row.model_version for row in rows]
        return {
            **found.metrics,
            "rollout/inflight": float(self._inflight),
            "turnstile/flat_groups_total": float(found.flat),
            "turnstile/skipped_groups_total": float(skipped),
            "turnstile/versions_behind": (float(sum(behind)), float(len(behind))),
        }


def _why_barren(group: list[Rollout], found: GroupRows, number: int) -> str:
    """The error message of NothingToTrain, with a reason taken from the last group."""
    errors = [rollout.error for rollout in group if rollout.error is not None]
    if errors:
        why = f"of its rollouts {len(errors)} failed, the first with {errors[0].type}: {errors[0].message}"
    elif all(rollout.reward is None for rollout in group):
        why = "its rollouts were not graded; do the tasks have tests or an answer?"
    elif found.metrics["turnstile/foreign_rows_total"]:
        why = "its tokens were sampled by weights that this run did not send"
    elif found.flat:
        why = f"all its rewards are {group[0].reward}"
    else:
        why = "none of its tokens is trainable"
    return f"{number} groups in a row gave nothing to train. Of the last one ({group[0].group_id}): {why}"
