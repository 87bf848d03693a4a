"""Which episodes go on after a restart (``episodes.resume_external``), and from where.

An external agent may outlive the server: its key is derived from a secret on disk, and its turns are in the
journal. So its episode goes on where nothing of it died with the server: it ran, and it has no sandbox, no
environment, no tools of its own, and no answer, which is in no record. What must hold: an episode that is taken up
has the tree and the budgets that it had; one whose agent never comes back ends as ``server_restarted``, and not as
overdue, whose work would be graded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from turnstile.models import EpisodeRequest, EpisodeStatus, SpanKind
from turnstile_server.agents.registry import EXTERNAL
from turnstile_server.backends import Backends
from turnstile_server.episodes.plan import Plan, plan_episode
from turnstile_server.episodes.store import Forest, Stored
from turnstile_server.errors import TurnstileError
from turnstile_server.journal.protocol import Record, RecordType
from turnstile_server.journal.segments import encode
from turnstile_server.settings import Settings
from turnstile_server.tools.toolbox import SUBMIT

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumedEpisode:
    """An episode that goes on. ``record_bytes``: of its turns in the journal."""

    stored: Stored
    plan: Plan
    forest: Forest
    record_bytes: int


class Resumption:
    """Finds them while the journal is read; ``found`` has them in the order of their creation."""

    def __init__(self, backends: Backends, settings: Settings) -> None:
        self.found: list[ResumedEpisode] = []
        self._backends = backends
        self._settings = settings

    def takes(self, stored: Stored, records: Sequence[Record], forest: Forest) -> bool:
        """True: it goes on, and is in ``found``. ``records``: all that the journal has of it."""
        episode = stored.episode
        if not self._settings.episodes.resume_external or episode.agent != EXTERNAL:
            return False
        plan = self._plan(stored)
        why = None
        if plan is None or episode.status is not EpisodeStatus.RUNNING:
            why = "it was not running"
        elif plan.prepared or plan.task.steps:
            why = "what its task needs (a sandbox, a world, tools) died with the server"
        elif any(record.type is RecordType.SPAN and _submits(record) for record in records):
            why = "its agent had submitted an answer, which is lost"
        if why is not None or plan is None:
            _LOG.info("episode %s does not go on after the restart: %s", episode.episode_id, why)
            return False
        size = sum(encode(record).size for record in records if record.type is RecordType.TURN)
        self.found.append(ResumedEpisode(stored, plan, forest, size))
        return True

    def _plan(self, stored: Stored) -> Plan | None:
        episode = stored.episode
        request = EpisodeRequest(
            task=episode.task,
            agent=EXTERNAL,
            limits=episode.limits,
            snapshots=episode.snapshots,
            replay=episode.replay,
        )
        try:
            return plan_episode(request, self._backends, self._settings)
        except TurnstileError as error:  # of a task that is gone, or is another one now
            _LOG.warning("episode %s cannot be planned again: %s", episode.episode_id, error.message)
            return None


def _submits(record: Record) -> bool:
    return record.meta.get("kind") == SpanKind.TOOL.value and record.meta.get("name") == SUBMIT
