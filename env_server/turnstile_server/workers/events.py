"""``GET /events`` over all workers: their changes of status, in the order in which they come here.

One reader for each worker, which comes back with the latest event that it has. What must hold: a reader of the
joined stream is sent each change once, or told that some are lost. A worker that was started again has lost some:
its episodes that ran have failed, which nobody announced; so readers are told to list the episodes again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping

import aiohttp
import anyio
from pydantic import ValidationError

from turnstile.models import Episode, Notice
from turnstile_server.control.protocol import EpisodeEvent
from turnstile_server.episodes.broadcast import Broadcast
from turnstile_server.errors import TurnstileError
from turnstile_server.workers.link import WorkerLink
from turnstile_server.workers.ownership import Ownership

_LOG = logging.getLogger(__name__)
_PAUSE_S = 0.2
_LAPSED = "lease_lapsed"


class ServerSentEvent:
    """One event of a stream: ``name`` and ``data`` are empty for a place alone."""

    __slots__ = ("data", "event_id", "name")

    def __init__(self) -> None:
        self.event_id: str | None = None
        self.name = ""
        self.data = b""


async def read_events(lines: AsyncIterator[bytes]) -> AsyncIterator[ServerSentEvent]:
    """The events of a stream of server-sent events, line by line; comments are left out."""
    event = ServerSentEvent()
    async for raw in lines:
        line = raw.rstrip(b"\r\n")
        if not line:
            if event.event_id is not None or event.data:
                yield event
            event = ServerSentEvent()
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match field:
            case b"id":
                event.event_id = value.decode("latin-1")
            case b"event":
                event.name = value.decode("latin-1")
            case b"data":
                event.data = event.data + b"\n" + value if event.data else value


class JoinedEvents:
    """``broadcast``: where the joined stream is read. ``owners`` learns from the events who has what."""

    def __init__(self, broadcast: Broadcast, owners: Ownership) -> None:
        self._broadcast = broadcast
        self._owners = owners

    @property
    def subscribe(self) -> Callable[[str | None], AsyncIterator[EpisodeEvent]]:
        return self._broadcast.subscribe

    def wrong_keys(self, message: str, counts: Mapping[str, int]) -> None:
        """Those that came to the process in front."""
        self._broadcast.notify(Notice(type="wrong_keys", message=message, at=time.time(), counts=dict(counts)))

    async def follow(self, link: WorkerLink, begun: anyio.Event) -> None:
        """Passes a worker's events on, until cancelled. ``begun`` is set when none can be missed any more."""
        latest: str | None = None
        while True:
            try:
                async for event in self._events(link, latest):
                    latest = event.event_id or latest
                    self._take(link, event)
                    begun.set()
            except TurnstileError as error:
                _LOG.debug("the events of worker %d: %s", link.number, error.message)
            except aiohttp.ClientError as error:
                _LOG.debug("the events of worker %d: %r", link.number, error)
            if link.child.given_up is not None:
                return
            await anyio.sleep(_PAUSE_S)

    async def _events(self, link: WorkerLink, latest: str | None) -> AsyncIterator[ServerSentEvent]:
        headers = {**link.authorization, "host": "localhost"}
        if latest is not None:
            headers["last-event-id"] = latest
        async with link.request("GET", "/events", headers) as answer:
            if answer.status != 200:
                _LOG.error("worker %d refuses its events: %d", link.number, answer.status)
                return
            async for event in read_events(_lines(answer)):
                yield event

    def _take(self, link: WorkerLink, event: ServerSentEvent) -> None:
        if event.name == "reset":
            self._broadcast.lose(f"worker {link.number} was started again, or had more events than are kept")
        elif event.name == "notice":
            try:
                self._broadcast.notify(Notice.model_validate_json(event.data))
            except ValidationError as error:
                _LOG.error("a notice of worker %d cannot be read: %s", link.number, error)
        elif event.name == "episode":
            try:
                episode = Episode.model_validate_json(event.data)
            except ValidationError as error:
                _LOG.error("an event of worker %d cannot be read: %s", link.number, error)
                return
            self._owners.learn(link.number, episode.episode_id, episode.group_id)
            if (
                episode.error is not None
                and episode.error.type == _LAPSED
                and isinstance(episode.error.detail, dict)
            ):
                self._owners.lapsed(str(episode.error.detail.get("lease_id")), link.number)
            self._broadcast.publish(episode)


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length: a record may be longer than aiohttp's buffer."""
    rest = b""
    async for piece in answer.content.iter_any():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
