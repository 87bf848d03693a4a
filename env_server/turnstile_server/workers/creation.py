"""New episodes: which worker gets one, and what is learned of it from the answer.

A creation goes where its idempotency key was seen before, else to the worker that has its id (which says that it
is taken), else to that of its group, else to the least busy one. What must hold: two creations with one key, one
id or one group never go to two workers, at the same time neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from turnstile_server.errors import Conflict
from turnstile_server.workers.crew import Crew
from turnstile_server.workers.forward import ForwardedResponse
from turnstile_server.workers.link import WorkerLink


@dataclass(frozen=True, slots=True)
class WantedEpisode:
    """The fields of a creation that decide its worker. An unreadable body has none; the worker refuses it."""

    episode_ids: tuple[str, ...] = ()
    group_id: str | None = None
    key: str | None = None
    lease_id: str | None = None

    @classmethod
    def of(cls, body: bytes) -> WantedEpisode:
        try:
            return cls.of_fields(orjson.loads(body))
        except orjson.JSONDecodeError:
            return cls()

    @classmethod
    def of_fields(cls, fields: Any) -> WantedEpisode:
        if not isinstance(fields, dict):
            return cls()
        lease = fields.get("lease")
        several = fields.get("episode_ids")
        ids = [fields.get("episode_id"), *(several if isinstance(several, list) else ())]
        return cls(
            tuple(each for each in ids if isinstance(each, str)),
            _text(fields.get("group_id")),
            _text(fields.get("idempotency_key")),
            _text(lease.get("lease_id")) if isinstance(lease, dict) else None,
        )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


class Creations:
    """``trust_forwarded``: the setting ``control.trust_forwarded``."""

    def __init__(self, crew: Crew, *, trust_forwarded: bool) -> None:
        self._crew = crew
        self.trust_forwarded = trust_forwarded

    def response(
        self,
        body: bytes,
        wanted: WantedEpisode,
        ids_of: Callable[[Any], Iterable[str]],
        at: WorkerLink | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Passes a creation on. ``at``: to this worker, if nothing speaks against it (Conflict). ``ids_of``: the
        new episodes that the JSON of an answer names."""
        return _Creating(self, body, wanted, ids_of, at, headers or {})

    async def place(
        self, wanted: WantedEpisode, promises: AsyncExitStack, at: WorkerLink | None = None, *, once: bool = True
    ) -> WorkerLink:
        """The worker for a new episode. Until ``promises`` is closed nobody else with the same names is sent
        elsewhere. ``once``: it is made by then. Raises Conflict where ``at`` is not the worker that has one of the
        ids."""
        for each in wanted.episode_ids:
            await self._crew.owner(each)  # the table has it afterwards
        # No step from here on waits: two equal creations cannot both find that nobody has their names.
        number = self._known(wanted)
        if at is not None:
            taken = [each for each in wanted.episode_ids if self._crew.owners.of(each) not in (None, at.number)]
            if taken:
                raise Conflict(f"episode_id {taken[0]} is taken")
            number = at.number
        if number is None:
            number = self._crew.placement.choose()
        if once:
            promises.enter_context(self._crew.placement.placing(number))
        else:
            self._crew.placement.placed(number)
        promises.enter_context(self._crew.owners.promised(number, wanted.episode_ids, wanted.group_id, wanted.key))
        return self._crew.link(number)

    def _known(self, wanted: WantedEpisode) -> int | None:
        """The worker that one of the names belongs to."""
        owners = self._crew.owners
        if wanted.key is not None and (found := owners.of_key(wanted.key)) is not None:
            return self._living(found)
        for each in wanted.episode_ids:
            if (found := owners.of(each)) is not None:
                return found
        if wanted.lease_id is not None and (found := owners.of_lease(wanted.lease_id)) is not None:
            return self._living(found)
        if wanted.group_id is not None and (found := owners.of_group(wanted.group_id)) is not None:
            return self._living(found)
        return None

    def _living(self, number: int) -> int | None:
        """A worker that there is no more gets no new episodes: a group goes on at another one."""
        return number if any(link.number == number for link in self._crew.workers) else None

    def learn(self, number: int, wanted: WantedEpisode, ids: Iterable[str]) -> None:
        for each in ids:
            self._crew.owners.learn(number, each, wanted.group_id, wanted.key)


class _Creating(Response):
    """The answer of the worker that a creation goes to."""

    def __init__(
        self,
        creations: Creations,
        body: bytes,
        wanted: WantedEpisode,
        ids_of: Callable[[Any], Iterable[str]],
        at: WorkerLink | None,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._creations = creations
        self._given = body
        self._wanted = wanted
        self._ids_of = ids_of
        self._at = at
        self._sent = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as promises:
            link = await self._creations.place(self._wanted, promises, self._at)

            def told(status: int, _headers: Mapping[str, str], answer: bytes) -> None:
                if status < 300:
                    self._creations.learn(link.number, self._wanted, self._ids_of(orjson.loads(answer)))

            await ForwardedResponse(
                link,
                trust_forwarded=self._creations.trust_forwarded,
                body=self._given,
                told=told,
                headers=self._sent,
            )(scope, receive, send)
