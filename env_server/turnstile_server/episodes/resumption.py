"""Which episodes go on after a restart (``episodes.resume_external``), and from where.

An external agent may outlive the server: its key is derived from a secret on disk, its turns and its answer are in
the journal. So its episode goes on where nothing of it died with the server: it ran, it was not being graded, and
it has no sandbox, no environment and no tools of its own. What must hold: an episode that is taken up has the
tree, the budgets and the answer that it had, and tokens of the same vocabulary and template come after them; one
whose agent never comes back ends as ``server_restarted``, and not as overdue, whose work would be graded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from turnstile.models import EpisodeRequest, EpisodeStatus, SpanKind
from turnstile_server.agents.registry import EXTERNAL
from turnstile_server.backends import Backends
from turnstile_server.engines.protocol import Engine
from turnstile_server.episodes.plan import Plan, check_engine, plan_episode
from turnstile_server.episodes.store import Forest, Stored
from turnstile_server.errors import ServerRestarted, TurnstileError
from turnstile_server.journal.protocol import Record, RecordType
from turnstile_server.journal.records import answer_of
from turnstile_server.journal.segments import encode
from turnstile_server.settings import Settings
from turnstile_server.tools.toolbox import SUBMIT

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumedEpisode:
    """An episode that goes on. ``record_bytes``: of its turns in the journal; ``answer``: submitted last."""

    stored: Stored
    plan: Plan
    forest: Forest
    record_bytes: int
    answer: str | None


class Resumption:
    """Finds them while the journal is read; ``found`` has them in the order of their creation. ``template_hash``:
    the renderer's."""

    def __init__(self, backends: Backends, settings: Settings, engine: Engine, template_hash: str) -> None:
        self.found: list[ResumedEpisode] = []
        self._backends = backends
        self._settings = settings
        self._engine = engine
        self._template_hash = template_hash

    def takes(self, stored: Stored, records: Sequence[Record], forest: Forest) -> bool:
        """True: it goes on, and is in ``found``. ``records``: all that the journal has of it."""
        episode = stored.episode
        if not self._settings.episodes.resume_external or episode.agent != EXTERNAL:
            return False
        try:
            self.found.append(self._resumed(stored, records, forest))
        except (TurnstileError, ValidationError) as error:
            _LOG.warning("episode %s does not go on after the restart: %s", episode.episode_id, error)
            return False
        return True

    def _resumed(self, stored: Stored, records: Sequence[Record], forest: Forest) -> ResumedEpisode:
        """Raises TurnstileError, pydantic.ValidationError: it does not go on, and why."""
        episode = stored.episode
        request = EpisodeRequest(
            task=episode.task,
            agent=EXTERNAL,
            sampling=episode.sampling,
            adapter=episode.adapter,
            limits=episode.limits,
            snapshots=episode.snapshots,
            replay=episode.replay,
        )
        plan = plan_episode(request, self._backends, self._settings)
        engine = self._settings.engine.kind
        check_engine(request, self._settings.sampling, engine, self._engine.capabilities)
        if episode.status is not EpisodeStatus.RUNNING:
            raise ServerRestarted("it was not running")
        if not plan.outlives_server:
            raise ServerRestarted("what its task needs (a sandbox, a world, tools) died with the server")
        if any(node.turn.template_hash != self._template_hash for node in forest.tree):
            raise ServerRestarted("its turns are of another tokenizer or chat template than the model's now")
        answer = answer_of(records)
        if answer is None and any(_submits(record) for record in records):
            raise ServerRestarted("its agent had submitted an answer, which an older version did not store")
        size = sum(encode(record).size for record in records if record.type is RecordType.TURN)
        return ResumedEpisode(stored, plan, forest, size, answer)


def _submits(record: Record) -> bool:
    meta = record.meta
    return record.type is RecordType.SPAN and (meta.get("kind"), meta.get("name")) == (SpanKind.TOOL.value, SUBMIT)
