"""Taking up what the journal holds. Episodes that ran when the server died have failed; their turns are kept."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from pydantic import ValidationError

from turnstile.models import Episode, EpisodeStatus, ErrorInfo, Fault
from turnstile_server.episodes.store import Stored, rebuild, stored_of
from turnstile_server.errors import JournalUnavailable
from turnstile_server.journal.protocol import Journal

_LOG = logging.getLogger(__name__)

_RESTARTED = ErrorInfo(
    type="server_restarted",
    message="the server stopped while the episode ran; its turns are kept, submit it again",
    fault=Fault.INFRASTRUCTURE,
)


async def restored(journal: Journal) -> AsyncIterator[Stored]:
    """Every episode of the journal that can be read, oldest first, all of them ended; a changed one is stored
    before it is given, if the disk takes it."""
    async for record in journal.episodes():
        try:
            stored = stored_of(record)
        except (ValidationError, KeyError, TypeError) as error:
            _LOG.error("episode %s was written by another version and is left out: %s", record.episode_id, error)
            continue
        if not stored.episode.status.ended:
            forest = rebuild(await journal.read(stored.episode.episode_id))
            stored = replace(stored, episode=forest.counted(_failed(stored.episode)))
            try:
                await journal.append(stored.record())
            except JournalUnavailable as error:  # what there is can still be read; the next start tries again
                _LOG.error("the end of episode %s could not be stored: %s", record.episode_id, error.message)
        yield stored


def _failed(episode: Episode) -> Episode:
    ended_s = max(0.0, time.time() - episode.timings.created_at)
    timings = episode.timings.model_copy(update={"ended_s": ended_s})
    return episode.model_copy(update={"status": EpisodeStatus.FAILED, "error": _RESTARTED, "timings": timings})
