"""Episodes for people to look at: their tokens with text, their turns without, their breaks with messages.

Everything is cut out of the token tree in a worker thread; nothing of it is stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread
import numpy as np

from turnstile.models import (
    BreakReport,
    RootOutline,
    TokenMatch,
    TokenMatches,
    TokenWindow,
    TurnOutline,
    TurnOutlines,
)
from turnstile.models.turn import TurnFacts
from turnstile_server.capture import Node, Turns
from turnstile_server.capture.break_report import break_entry, broken_turns
from turnstile_server.capture.provenance import origins
from turnstile_server.capture.token_path import TokenPath, Training, path_ids
from turnstile_server.episodes.reader import EpisodeReader
from turnstile_server.episodes.store import unchanging
from turnstile_server.errors import InvalidRequest, NotFound
from turnstile_server.rendering.token_text import TokenText, shown

if TYPE_CHECKING:
    from turnstile_server.rendering.detokenizer import TokenBytes  # it imports transformers

T = TypeVar("T")


class Inspector:
    """Implements the control API's InspectionService. ``table`` None: no tokenizer is known. ``workers`` bounds
    its threads."""

    def __init__(self, episodes: EpisodeReader, table: TokenBytes | None, workers: anyio.CapacityLimiter) -> None:
        self._episodes = episodes
        self._text = TokenText(table)
        self._workers = workers

    async def window(self, turn_id: str, start: int, count: int, episode_id: str | None = None) -> TokenWindow:
        episode_id, tree = await self._holder(turn_id, episode_id)
        return await self._in_thread(lambda: self._window(episode_id, tree, turn_id, start, count))

    async def find(
        self, turn_id: str, wanted: str | int, after: int, limit: int, episode_id: str | None = None
    ) -> TokenMatches:
        if wanted == "":
            raise InvalidRequest("text: write what to find")
        episode_id, tree = await self._holder(turn_id, episode_id)
        return await self._in_thread(lambda: self._find(episode_id, tree[turn_id], wanted, after, limit))

    async def outlines(self, episode_id: str) -> TurnOutlines:
        tree = await self._tree(episode_id)
        return await self._in_thread(lambda: _outlines(tree))

    async def breaks(self, episode_id: str, offset: int, limit: int) -> BreakReport:
        tree = await self._tree(episode_id)

        def report() -> BreakReport:
            broken = broken_turns(tree)
            entries = tuple(break_entry(tree, node) for node in broken[offset : offset + limit])
            return BreakReport(episode_id=episode_id, total=len(broken), offset=offset, breaks=entries)

        return await self._in_thread(report)

    async def _holder(self, turn_id: str, episode_id: str | None) -> tuple[str, Turns]:
        """The episode of a turn, and its tree. Raises NotFound."""
        if episode_id is None:
            episode_id = await self._episodes.turn_finder.episode_of(turn_id)
        tree = await self._tree(episode_id)
        if turn_id not in tree:
            raise NotFound(f"episode {episode_id} has no turn {turn_id[:100]}")
        return episode_id, tree

    async def _tree(self, episode_id: str) -> Turns:
        return unchanging(*await self._episodes.exported(episode_id))

    async def _in_thread(self, make: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(make, limiter=self._workers)

    def _window(self, episode_id: str, tree: Turns, turn_id: str, start: int, count: int) -> TokenWindow:
        path = TokenPath(tree[turn_id], Training.of(tree))
        found = path.window(start, count)
        pieces = self._text.bytes_of(found.ids)
        return TokenWindow(
            episode_id=episode_id,
            turn_id=turn_id,
            sample_id=path.sample_id,
            total=path.total,
            start=start,
            ids=tuple(found.ids.tolist()),
            text=tuple(map(shown, pieces)),
            bytes=tuple(piece.hex() for piece in pieces),
            special=tuple(self._text.special(found.ids)),
            tokenizer=self._text.known,
            loss_mask=tuple(found.loss_mask.tolist()),
            logprobs=tuple(None if math.isnan(value) else value for value in found.logprobs.tolist()),
            weight_version=tuple(None if index < 0 else index for index in found.versions.tolist()),
            weight_version_names=path.version_names,
            turn=tuple(found.turns.tolist()),
            turns=path.turns,
        )

    def _find(self, episode_id: str, end: Node, wanted: str | int, after: int, limit: int) -> TokenMatches:
        ids = path_ids(end)
        runs: Iterator[tuple[int, int]]
        if isinstance(wanted, int):
            places = np.flatnonzero(ids == wanted)
            runs = ((place, place + 1) for place in places[places > after].tolist())
        else:
            runs = self._text.find(ids, wanted, after)
        matches: list[TokenMatch] = []
        for first, last in runs:
            if len(matches) == limit:
                return _matches(episode_id, end, matches, more=True)
            matches.append(TokenMatch(start=first, end=last))
        return _matches(episode_id, end, matches, more=False)


def _matches(episode_id: str, end: Node, matches: list[TokenMatch], *, more: bool) -> TokenMatches:
    return TokenMatches(
        episode_id=episode_id,
        turn_id=end.turn_id,
        total=end.token_count,
        matches=tuple(matches),
        more=more,
    )


def _outlines(tree: Turns) -> TurnOutlines:
    reasons = Training.of(tree).reasons
    own = {root.turn_id for root in tree.roots if not root.inherited}
    return TurnOutlines(
        turns=tuple(_outline(node, reasons.get(node.turn_id)) for node in tree if not node.inherited),
        roots=tuple(
            RootOutline(turn_id=turn_id, kind=origin.kind, caused_by=origin.cause)
            for turn_id, origin in origins(tree.roots, tree).items()
            if turn_id in own
        ),
    )


def _outline(node: Node, untrained_reason: str | None) -> TurnOutline:
    turn = node.turn
    facts = {name: getattr(turn, name) for name in TurnFacts.model_fields}
    return TurnOutline(
        **facts,
        context_tokens=len(turn.context_ids),
        completion_tokens=len(turn.completion_ids),
        mean_logprob=None if turn.sampling.given or turn.upstream is not None else float(turn.logprobs.mean()),
        start=node.prompt_count,
        untrained_reason=untrained_reason,
    )
