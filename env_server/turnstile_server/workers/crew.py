"""All workers of a server, and what the process in front knows of them: who is there, how busy, who has what.

What must hold: where an episode is asked for that the table does not have, the workers are asked, so that the
table may be incomplete and is never wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from turnstile_server.errors import TurnstileError
from turnstile_server.settings import WorkerSettings
from turnstile_server.workers.bounds import WorkerBounds
from turnstile_server.workers.link import WorkerLink, WorkerRestarting
from turnstile_server.workers.ownership import Ownership
from turnstile_server.workers.placement import LeastBusy

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Crew:
    """``links``: to every worker, by number; the one that shows archives comes last and takes no episodes."""

    def __init__(self, links: Sequence[WorkerLink], settings: WorkerSettings) -> None:
        self.links = tuple(links)
        self.workers = tuple(link for link in links if not link.child.is_archive)
        """Those that play episodes."""
        self.owners = Ownership()
        self.placement = LeastBusy([link.number for link in self.workers])
        self._bounds = settings.bounds_of(WorkerBounds)
        self._by_number = {link.number: link for link in links}

    def link(self, number: int) -> WorkerLink:
        return self._by_number[number]

    @property
    def first(self) -> WorkerLink:
        """Speaks for all where they are alike."""
        return self.workers[0]

    @property
    def some(self) -> WorkerLink:
        """A worker that is there, for what any of them can do."""
        return next((link for link in self.workers if link.child.up.is_set()), self.first)

    async def learn_all(self) -> None:
        """Takes up what all workers have. They serve."""
        for link in self.links:
            found = await link.json("/register/episodes")
            self.owners.learn_all(link.number, found["episodes"])
            await self._ask(link)

    async def relearn(self, link: WorkerLink) -> None:
        """The worker was started again."""
        found = await link.json("/register/episodes")
        self.owners.learn_all(link.number, found["episodes"])

    async def owner(self, episode_id: str) -> WorkerLink | None:
        """The worker that has the episode; None where none has. Raises WorkerRestarting where one that may have it
        cannot be asked."""
        number = self.owners.of(episode_id)
        if number is not None:
            return self._by_number[number]
        return await self._holder(episode_id)

    async def _holder(self, episode_id: str) -> WorkerLink | None:
        found: list[WorkerLink] = []
        unasked: list[WorkerRestarting] = []

        async def ask(link: WorkerLink) -> None:
            try:
                status, _ = await link.fetched("GET", f"/register/episodes/{episode_id}")
            except WorkerRestarting as error:
                unasked.append(error)
            else:
                if status == 204:
                    found.append(link)

        async with anyio.create_task_group() as tasks:
            for link in self.links:
                tasks.start_soon(ask, link)
        if found:
            self.owners.learn(found[0].number, episode_id)
            return found[0]
        if unasked:
            raise unasked[0]
        return None

    async def each(self, links: Sequence[WorkerLink], ask: Callable[[WorkerLink], Awaitable[T]]) -> list[T]:
        """The answers of ``links``, asked at once, in their order. Raises the first error of theirs."""
        answers: dict[int, T] = {}
        errors: list[TurnstileError] = []

        async def one(link: WorkerLink) -> None:
            try:
                answers[link.number] = await ask(link)
            except TurnstileError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for link in links:
                tasks.start_soon(one, link)
        if errors:
            raise errors[0]
        return [answers[link.number] for link in links]

    # How busy they are

    async def watch(self) -> None:
        """Asks the workers for their load, until cancelled."""
        while True:
            await anyio.sleep(self._bounds.poll_s)
            async with anyio.create_task_group() as tasks:
                for link in self.workers:
                    tasks.start_soon(self._ask, link)

    async def _ask(self, link: WorkerLink) -> None:
        if link.child.is_archive:
            return
        if not link.child.up.is_set():
            self.placement.silent(link.number)
            return
        asked = self.placement.loads[link.number].placed
        state = None
        with anyio.move_on_after(self._bounds.poll_timeout_s):
            try:
                state = await link.json("/register/state")
            except TurnstileError as error:
                _LOG.debug("worker %d: %s", link.number, error.message)
        if state is None:
            self.placement.silent(link.number)
        else:
            self.placement.told(link.number, state["open"], state["refusal"], held=state["held"], asked=asked)
