"""Read-only operations of a client on its servers: recorded episodes, many or one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from turnstile import _look_requests as looks
from turnstile import _requests as requests
from turnstile import errors
from turnstile._placement import ServerPool
from turnstile._requests import ApiCall
from turnstile._retry import ClientSettings
from turnstile._server_fleet import ServerFleet
from turnstile._transport import Transport
from turnstile.conditions import EpisodeConditions
from turnstile.models import (
    BreakReport,
    Episode,
    EpisodePage,
    EpisodeSummary,
    EpisodeSummaryPage,
    GroupReport,
    NetworkReport,
    ReplayListing,
    ReplayReport,
    SpanReport,
    StatsKey,
    StatsReport,
    TokenMatches,
    TokenWindow,
    TurnOutlines,
    WorkDiff,
    statistics_by,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ListingPosition:
    """The position at which a listing of episodes goes on. ``left``: the servers that it has not come through, the
    one that gave the cursor first; None: it has not begun."""

    left: tuple[str, ...] | None = None
    cursor: str | None = None


class LookOperations:
    """Over one pool of servers, and one set of connections for all of them."""

    fleet: ServerFleet

    def __init__(self, pool: ServerPool, transport: Transport, settings: ClientSettings) -> None:
        self._pool = pool
        self._transport = transport
        self._settings = settings

    async def turn_outlines(self, episode_id: str) -> TurnOutlines:
        return await self._on_episode(episode_id, looks.turn_outlines(episode_id))

    async def breaks(self, episode_id: str, offset: int, limit: int | None) -> BreakReport:
        return await self._on_episode(episode_id, looks.breaks(episode_id, offset, limit))

    async def tokens(self, episode_id: str, turn_id: str, start: int, count: int | None) -> TokenWindow:
        return await self._on_episode(episode_id, looks.tokens(episode_id, turn_id, start, count))

    async def find_tokens(
        self, episode_id: str, turn_id: str, text: str | None, token_id: int | None, after: int, limit: int | None
    ) -> TokenMatches:
        call = looks.find_tokens(episode_id, turn_id, text, token_id, after, limit)
        return await self._on_episode(episode_id, call)

    async def work(self, episode_id: str) -> WorkDiff:
        return await self._on_episode(episode_id, looks.work(episode_id, self._settings.slow_s))

    async def network(self, episode_id: str) -> NetworkReport:
        return await self._on_episode(episode_id, requests.network(episode_id))

    async def spans(self, episode_id: str) -> SpanReport:
        return await self._on_episode(episode_id, looks.spans(episode_id))

    async def replay(self, episode_id: str) -> ReplayReport:
        return await self._on_episode(episode_id, looks.replay(episode_id))

    async def replay_files(self, episode_id: str, state: int) -> ReplayListing:
        return await self._on_episode(episode_id, looks.replay_files(episode_id, state))

    async def replay_content(self, episode_id: str, digest: str) -> bytes:
        return await self._on_episode(episode_id, looks.replay_content(episode_id, digest))

    async def page(
        self, at: ListingPosition, conditions: EpisodeConditions, limit: int | None
    ) -> tuple[EpisodePage, ListingPosition | None]:
        """One page of one server, and where the next one is: the servers come one after the other."""
        left = await self._left(at)
        server = left[0]
        page = await self._transport.send(server, looks.page(conditions, at.cursor, limit))
        for episode in page.episodes:
            self._pool.placed(episode.episode_id, server, is_open=not episode.status.ended)
        return page, _following(left, page.cursor)

    async def summary_page(
        self, at: ListingPosition, conditions: EpisodeConditions, limit: int | None
    ) -> tuple[EpisodeSummaryPage, ListingPosition | None]:
        """As ``page``, with a light row of each."""
        left = await self._left(at)
        server = left[0]
        page = await self._transport.send(server, looks.summary_page(conditions, at.cursor, limit))
        for row in page.summaries:
            self._pool.placed(row.episode_id, server, is_open=not row.status.ended)
        return page, _following(left, page.cursor)

    async def _left(self, at: ListingPosition) -> tuple[str, ...]:
        if at.left is not None:
            return at.left
        await self._known()
        return self._pool.urls

    async def _known(self) -> None:
        """Returns once the servers are known: a source was asked for them. Raises SourceUnavailable."""
        if not self._pool.servers:
            await self.fleet.ready()

    async def stats(
        self, conditions: EpisodeConditions, by: Sequence[StatsKey], bucket_s: float | None, solved_at: float
    ) -> StatsReport:
        """Over the episodes of all servers. One server computes them itself; of several the rows are fetched,
        because chances of success (pass@k) do not add up."""
        await self._known()
        if len(self._pool.urls) == 1:
            call = looks.stats(conditions, by, bucket_s, solved_at)
            return await self._transport.send(self._pool.urls[0], call)
        rows: list[EpisodeSummary] = []
        at: ListingPosition | None = ListingPosition()
        while at is not None:
            page, at = await self.summary_page(at, conditions, None)
            rows += page.summaries
        return statistics_by(rows, by, bucket_s=bucket_s, solved_at=solved_at)

    async def group(self, group_id: str) -> dict[str, GroupReport]:
        """By URL, of the servers that have episodes of the group. Raises NotFound where none has."""
        found: dict[str, GroupReport] = {}
        missing: errors.NotFound | None = None
        await self._known()
        for url in self._pool.urls:
            try:
                found[url] = await self._transport.send(url, looks.group(group_id))
            except errors.NotFound as error:
                missing = error
        if missing is not None and not found:
            raise missing
        return found

    async def _on_episode(self, episode_id: str, call: ApiCall[T]) -> T:
        server = self._pool.location(episode_id) or await self._find(episode_id)
        result = await self._transport.send(server, call)
        if isinstance(result, Episode):
            self._pool.placed(episode_id, server, is_open=not result.status.ended)
        return result

    async def _find(self, episode_id: str) -> str:
        """The server that has the episode, found by asking every one."""
        silent: list[errors.TurnstileError] = []
        await self._known()
        for server in self._pool.urls:
            try:
                found = await self._transport.send(server, requests.get_episode(episode_id), retry_unsent=False)
            except errors.NotFound:
                continue
            except errors.ServerUnavailable as error:
                silent.append(error)
                continue
            self._pool.placed(episode_id, server, is_open=not found.status.ended)
            return server
        if silent:
            raise errors.ServerUnavailable(
                f"{episode_id} is on no server that answers, and {len(silent)} did not: {silent[0].message}",
                server=silent[0].server,
            )
        raise errors.NotFound(f"{episode_id} is on none of {len(self._pool.urls)} servers", type="not_found")


def _following(left: tuple[str, ...], cursor: str | None) -> ListingPosition | None:
    if cursor is not None:
        return ListingPosition(left, cursor)
    return ListingPosition(left[1:]) if left[1:] else None
