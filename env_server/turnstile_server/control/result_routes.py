"""The routes that read one episode: its record, its turns, its samples, its token tree, what it reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import anyio
from fastapi import APIRouter, Query, Request
from starlette.background import BackgroundTask
from starlette.responses import Response

from turnstile.models import Episode, NetworkReport, TurnList, TurnOutlines, explained
from turnstile.models.samples_encoding import MEDIA_TYPE as SAFETENSORS
from turnstile.models.samples_encoding import forest_parts, sample_parts
from turnstile_server.control.body import JSON, while_connected
from turnstile_server.control.protocol import EpisodeReading, InspectionService
from turnstile_server.control.results import forest_json, outlines_json, parts_response, samples_json, turns_json
from turnstile_server.journal.export import segment_of

SEGMENT = "application/vnd.turnstile.journal"
"""Media type of a segment of a journal."""


def build_result_router(
    episodes: EpisodeReading,
    inspector: InspectionService,
    max_wait_s: float,
    workers: anyio.CapacityLimiter,
    closing: anyio.Event,
    fetched: Callable[[str], None] | None,
) -> APIRouter:
    """All routes of this module. ``workers`` bounds the threads that encode answers. ``closing`` ends waits.
    ``fetched`` is told of episodes that a trainer was sent whole."""
    router = APIRouter()

    @router.get("/episodes/{episode_id}", response_model=Episode)
    async def get(
        request: Request, episode_id: str, wait: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0
    ) -> Response:
        changed = None
        if wait > 0:
            wait_s = min(wait, max_wait_s)
            changed = await while_connected(request, lambda: episodes.get(episode_id, wait_s), closing)
        found = changed if changed is not None else await episodes.get(episode_id)
        return Response(explained(found).model_dump_json(), media_type=JSON)

    async def noting(episode_id: str) -> BackgroundTask | None:
        """Notes, once the response was sent, that a trainer has the whole of an ended episode: the bounds of the
        disk may delete it then. None for an episode that goes on, and where nobody asks."""
        if fetched is None or not (await episodes.get(episode_id)).status.ended:
            return None

        async def note() -> None:
            fetched(episode_id)

        return BackgroundTask(note)

    @router.get("/episodes/{episode_id}/turns", response_model=TurnList | TurnOutlines)
    async def turns(episode_id: str, arrays: bool = True) -> Response:
        """``arrays=false``: counts of tokens in place of tokens, for people to look at; it counts as no fetch."""
        if not arrays:
            outlines = await inspector.outlines(episode_id)
            return await parts_response(outlines_json(outlines), JSON, None, workers)
        sent = await noting(episode_id)
        found = await episodes.turns(episode_id)
        return await parts_response(turns_json(found), JSON, sent, workers)

    @router.get("/episodes/{episode_id}/samples")
    async def samples(request: Request, episode_id: str, include_untrained: bool = False) -> Response:
        sent = await noting(episode_id)
        found = await episodes.samples(episode_id, include_untrained=include_untrained)
        if _wants_json(request.headers.get("accept", "")):
            return await parts_response(samples_json(found), JSON, sent, workers)
        return await parts_response(sample_parts(found), SAFETENSORS, sent, workers)

    @router.get("/episodes/{episode_id}/tree")
    async def tree(request: Request, episode_id: str, include_untrained: bool = False) -> Response:
        sent = await noting(episode_id)
        found = await episodes.tree(episode_id, include_untrained=include_untrained)
        if _wants_json(request.headers.get("accept", "")):
            return await parts_response(forest_json(found), JSON, sent, workers)
        return await parts_response(forest_parts(found), SAFETENSORS, sent, workers)

    @router.get("/episodes/{episode_id}/journal")
    async def journal(episode_id: str) -> Response:
        """All that is recorded of an ended episode, as a segment of a journal (``docs/journal.md``)."""
        sent = await noting(episode_id)
        found = await episodes.records(episode_id)
        return await parts_response(segment_of(found), SEGMENT, sent, workers)

    @router.get("/episodes/{episode_id}/network", response_model=NetworkReport)
    async def network(episode_id: str) -> Response:
        found = await episodes.network(episode_id)
        return Response(found.model_dump_json(), media_type=JSON)

    return router


def _wants_json(accept: str) -> bool:
    """True if an Accept header names JSON and not safetensors. Wildcards get the default, safetensors."""
    named = {part.split(";")[0].strip().lower() for part in accept.split(",")}
    return JSON in named and SAFETENSORS not in named
