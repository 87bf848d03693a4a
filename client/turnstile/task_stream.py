"""The tasks of a server as a stream: filtered, in shards, shuffled by a seed, and resumed where it was left.

    stream = client.task_stream(where=["repo=django/*"], shard=(1, 4), shuffle=7, epochs=None)
    async for rollout in client.rollouts(stream, agent="mini-swe-agent", n=8):
        ...
        saved = stream.state().model_dump_json()     # with the trainer's checkpoint
    client.task_stream(state=TaskStreamState.model_validate_json(saved), epochs=None)

The order follows from seed, epoch and ids: it is the same on every server that serves the same tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from turnstile import errors
from turnstile.models import TaskInfo, TaskPage
from turnstile.models.base import Model


class TaskQuery(Model):
    """Which tasks, and in which order."""

    where: tuple[str, ...] = ()
    """``name=pattern`` or ``name!=pattern``, all of which must hold: id, difficulty, image, tags, graded_by,
    and metadata."""
    shard: str | None = None
    """``1/4``: every fourth task, from the first on."""
    shuffle: int | None = None
    """A seed; None keeps the server's order."""


class TaskStreamState(TaskQuery):
    """The position of a stream: JSON for a checkpoint."""

    epoch: int = 0
    taken: int = 0
    """Tasks of this epoch that were given out."""
    digest: str | None = None
    """Digest of the set of tasks; None: none was given out yet."""


@dataclass(frozen=True, slots=True)
class TaskPageRequest:
    """One page of ``GET /tasks``."""

    query: TaskQuery
    epoch: int = 0
    cursor: str | None = None

    def params(self) -> dict[str, Any]:
        query = self.query
        return {
            "cursor": self.cursor,
            "where": list(query.where) or None,
            "shard": query.shard,
            "shuffle": query.shuffle,
            "epoch": self.epoch or None,
        }


class SelectionArguments(TypedDict, total=False):
    """Which tasks, as arguments of a client."""

    where: Sequence[str] | str
    """One or several of ``repo=django/*``, ``difficulty!=hard``."""
    shard: tuple[int, int] | str | None
    """Which of how many, from 1: ``(1, 4)`` or ``"1/4"``."""
    shuffle: int | None
    """A seed."""


def task_query(**selection: Unpack[SelectionArguments]) -> TaskQuery:
    """Raises InvalidRequest."""
    where, shard = selection.get("where", ()), selection.get("shard")
    if isinstance(shard, tuple):
        which, count = shard
        if not 1 <= which <= count:
            raise errors.InvalidRequest(f"shard {shard} is not (which, count), which counts from 1")
        shard = f"{which}/{count}"
    return TaskQuery(
        where=(where,) if isinstance(where, str) else tuple(where), shard=shard, shuffle=selection.get("shuffle")
    )


class _Position:
    """The part that both streams share: what they do between two pages."""

    def __init__(self, epochs: int | None, state: TaskStreamState | None, selection: SelectionArguments) -> None:
        query = task_query(**selection)
        if state is None:
            state = TaskStreamState(**query.model_dump())
        elif query != TaskQuery():
            raise errors.InvalidRequest("a state says which tasks and in which order; give no selection beside it")
        self._query = TaskQuery(where=state.where, shard=state.shard, shuffle=state.shuffle)
        self._epoch, self._taken, self._digest = state.epoch, state.taken, state.digest
        self._epochs = epochs
        self._waiting: deque[TaskInfo] = deque()
        self._done = False
        """The latest page was the epoch's last."""

    @property
    def state(self) -> TaskStreamState:
        query = self._query
        return TaskStreamState(
            where=query.where,
            shard=query.shard,
            shuffle=query.shuffle,
            epoch=self._epoch,
            taken=self._taken,
            digest=self._digest,
        )

    def next(self) -> TaskInfo | TaskPageRequest | None:
        """A task, or the page that is needed first; None at the end."""
        if not self._waiting and self._done:
            self._epoch, self._taken, self._done = self._epoch + 1, 0, False
        if self._epochs is not None and self._epoch >= self._epochs:
            return None
        if not self._waiting:
            return TaskPageRequest(self._query, self._epoch, str(self._taken) if self._taken else None)
        self._taken += 1
        return self._waiting.popleft()

    def add(self, page: TaskPage) -> None:
        """Raises Conflict where the tasks are not those of before, InvalidRequest where there are none."""
        if self._digest is not None and page.digest != self._digest:
            raise errors.Conflict(
                "the server's tasks are not those that this stream began with, so its place in them means "
                "nothing; start the server with the same tasks, or begin a new stream"
            )
        if not page.total:
            raise errors.InvalidRequest(f"no task of the server is asked for by {self._query.model_dump()}")
        self._digest = page.digest
        self._waiting.extend(page.tasks)
        self._done = page.cursor is None


class AsyncTaskStream:
    """An async iterator of tasks. ``state`` counts a task as soon as it was given out, not when it was played."""

    def __init__(
        self,
        fetch: Callable[[TaskPageRequest], Awaitable[TaskPage]],
        epochs: int | None,
        state: TaskStreamState | None,
        selection: SelectionArguments,
    ) -> None:
        """Raises InvalidRequest for a selection beside a state, which has its own."""
        self._fetch = fetch
        self._position = _Position(epochs, state, selection)

    def state(self) -> TaskStreamState:
        return self._position.state

    def __aiter__(self) -> AsyncIterator[TaskInfo]:
        return self

    async def __anext__(self) -> TaskInfo:
        while not isinstance(found := self._position.next(), TaskInfo):
            if found is None:
                raise StopAsyncIteration
            self._position.add(await self._fetch(found))
        return found


class TaskStream:
    """The same for blocking callers."""

    def __init__(
        self,
        fetch: Callable[[TaskPageRequest], TaskPage],
        epochs: int | None,
        state: TaskStreamState | None,
        selection: SelectionArguments,
    ) -> None:
        """Raises InvalidRequest for a selection beside a state, which has its own."""
        self._fetch = fetch
        self._position = _Position(epochs, state, selection)

    def state(self) -> TaskStreamState:
        return self._position.state

    def __iter__(self) -> Iterator[TaskInfo]:
        return self

    def __next__(self) -> TaskInfo:
        while not isinstance(found := self._position.next(), TaskInfo):
            if found is None:
                raise StopIteration
            self._position.add(self._fetch(found))
        return found
