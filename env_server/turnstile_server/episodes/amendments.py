"""Changes to the record of an ended episode: durable, then visible.

What must hold: two changes of one record never lose each other; no record is written for an episode that is
deleted at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio

from turnstile.models import Episode
from turnstile_server.episodes.archive import Archive
from turnstile_server.episodes.store import DamagedRecord, stored_of
from turnstile_server.errors import Conflict, NotFound
from turnstile_server.journal.protocol import Journal
from turnstile_server.journal.records import span_record


class Amendments:
    """``published`` is given each record as it is changed."""

    def __init__(self, journal: Journal, archive: Archive, published: Callable[[Episode], None]) -> None:
        self._journal = journal
        self._archive = archive
        self._published = published

    async def add_spans(self, episode_id: str, spans: Sequence[Mapping[str, Any]]) -> None:
        """Records spans, as JSON, of what was done to the episode after its end; of a deleted one none."""
        async with self._archive.changing:
            if episode_id in self._archive:
                for meta in spans:
                    self._journal.append_soon(span_record(episode_id, meta))

    async def amend(self, episode_id: str, change: Callable[[Episode], Episode]) -> Episode:
        """The record after ``change``, which is given it as it is now, and may give it back as it is. A caller
        that goes away does not undo it.

        Raises NotFound; Conflict for a record that cannot be read, or has not ended; JournalUnavailable; and what
        ``change`` raises.
        """
        with anyio.CancelScope(shield=True):
            async with self._archive.changing:
                record = await self._journal.state(episode_id) if episode_id in self._archive else None
                if record is None:
                    raise NotFound(f"there is no episode {episode_id}")
                try:
                    if record.damage is not None:
                        raise DamagedRecord(record.damage)
                    stored = stored_of(record)
                except (ValueError, KeyError, TypeError) as error:
                    raise Conflict(f"the record of episode {episode_id} cannot be read: {error}") from error
                if not stored.episode.status.ended:
                    raise Conflict(f"episode {episode_id} has not ended")
                changed = change(stored.episode)
                if changed is stored.episode:
                    return changed
                await self._journal.append(replace(stored, episode=changed).record())
                self._archive.add_ended(changed)
        self._published(changed)
        return changed
