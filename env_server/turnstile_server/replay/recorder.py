"""Records the states of episodes' work folders, one episode's one after another.

What must hold: a state is taken while no tool call runs; one that cannot be taken fails nothing, and stands among
the states with its reason; one episode has a bounded share of the server's memory and disk.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import anyio

from turnstile.models import ReplayFile, ReplayMoment
from turnstile_server.errors import TurnstileError
from turnstile_server.replay.capture import REASONS, Capture, CaptureBounds, take_changes
from turnstile_server.replay.manifest import StateRecord
from turnstile_server.replay.store import KeepRoom, ReplayStore
from turnstile_server.sandboxes.protocol import Sandbox
from turnstile_server.settings import Bounds, EpisodeSettings

_LOG = logging.getLogger(__name__)
_LISTS = 8
"""Divisor of an episode's room: the lists of paths get an eighth."""
NO_PYTHON = "the sandbox's image has no Python that could look at its files"
_NOTHING = Capture((), (), 0, late=False)


@dataclass(frozen=True)
class ReplayBounds(Bounds):
    """Bounds of the record of work folders that are constants."""

    replay_files: int = 5_000
    """Contents recorded of one episode; half of them before its first turn."""
    replay_wait_s: float = 10.0
    """How long a model call waits for the state after the turn before it; then that state is missed."""
    replays_at_once: int = 4
    """States taken at once, each in memory as a whole; further ones wait."""


class Replays:
    """The parts that all recorders share. ``paused(episode_id)``: the episode's tool calls wait while the block
    runs; raises Conflict where one runs already."""

    def __init__(
        self,
        store: ReplayStore,
        paused: Callable[[str], AbstractContextManager[None]],
        settings: EpisodeSettings,
    ) -> None:
        self.store = store
        self.paused = paused
        self.settings = settings
        self.at_once = anyio.CapacityLimiter(settings.bounds_of(ReplayBounds).replays_at_once)

    def of(self, episode_id: str) -> EpisodeReplay:
        """The recorder of one episode."""
        return EpisodeReplay(episode_id, self)


class EpisodeReplay:
    """The states of one episode. Made by ``Replays.of``."""

    def __init__(self, episode_id: str, shared: Replays) -> None:
        self._episode_id = episode_id
        self._shared = shared
        self._files: dict[str, ReplayFile] = {}
        self._marks: dict[str, str] = {}
        self._contents_left = shared.settings.bounds_of(ReplayBounds).replay_files
        self._bytes_left = shared.settings.replay_bytes
        self._last: tuple[ReplayMoment, str | None] | None = None
        self._missing: str | None = None
        """The turn that was missed last: an agent that gives its call up and repeats it does not wait again."""
        self._hopeless: str | None = None
        """Reason why no further state can be taken."""

    async def record(self, sandbox: Sandbox, moment: ReplayMoment, turn_id: str | None, at_s: float) -> bool:
        """Takes the state after the turn and keeps it; whether it did. Raises only a cancellation. A state that is
        repeated (of the same turn, with nothing changed) is not kept."""
        if moment == "turn" and self._missing == turn_id:
            return False
        try:
            return await self._record(sandbox, StateRecord(moment, turn_id, at_s))
        except Exception:  # noqa: BLE001 - the boundary: a fault in here fails no call of the agent
            _LOG.exception("a work folder could not be recorded", extra={"episode_id": self._episode_id})
            return False

    async def _record(self, sandbox: Sandbox, record: StateRecord) -> bool:
        wait_s = self._shared.settings.bounds_of(ReplayBounds).replay_wait_s
        deadline = time.monotonic() + wait_s
        try:
            capture = await self._taken(sandbox, record.moment)
        except TimeoutError:
            return await self._missed(record, f"it took longer than {wait_s:g} s")
        except TurnstileError as error:
            return await self._missed(record, error.message)
        if capture is None:
            self._hopeless = self._hopeless or NO_PYTHON
            return await self._missed(record, self._hopeless)
        return await self._keep(record, capture, deadline)

    async def _taken(self, sandbox: Sandbox, moment: ReplayMoment) -> Capture | None:
        """None: it is hopeless. Raises TimeoutError, Conflict, SandboxFailed."""
        if self._hopeless is not None:
            return None
        settings, shared = self._shared.settings, self._shared
        wait_s = settings.bounds_of(ReplayBounds).replay_wait_s
        share = 2 if moment == "begin" else 1
        lists = settings.replay_bytes // _LISTS
        bounds = CaptureBounds(
            files=self._contents_left // share,
            bytes=max(0, self._bytes_left - lists) // share,
            file_bytes=settings.replay_file_bytes,
            list_bytes=min(lists, self._bytes_left),
            paths=settings.replay_paths,
            seconds=wait_s / 2,  # so that what it has read by then can be kept
        )
        with anyio.fail_after(wait_s):
            async with shared.at_once:
                with shared.paused(self._episode_id) if moment == "turn" else nullcontext():
                    return await take_changes(sandbox, self._marks, settings.replay_skip, bounds)

    async def _keep(self, record: StateRecord, capture: Capture, deadline: float) -> bool:
        place = (record.moment, record.turn_id)
        always = place != self._last or capture.late
        store, room = self._shared.store, KeepRoom(self._bytes_left, deadline)
        try:
            kept = await store.keep(self._episode_id, record, capture, self._files, room, always=always)
        except OSError as error:
            self._hopeless = f"the states before could not be written: {error.strerror}"
            _LOG.error("a state of episode %s could not be written: %s", self._episode_id, error)
            return False
        self._last, self._missing = place, None
        if kept is None:
            return True
        self._contents_left -= kept.contents
        self._bytes_left -= kept.bytes
        if not kept.taken:
            return False
        self._files.update((one.path, one) for one in kept.record.set)
        self._marks.update((one.path, one.mark) for one in capture.changed)
        for one in kept.record.set:
            if one.left_out == REASONS["time"]:
                self._marks[one.path] = ""  # so that it is told again
        for path in capture.gone:
            self._files.pop(path, None)
            self._marks.pop(path, None)
        return True

    async def _missed(self, record: StateRecord, why: str) -> bool:
        _LOG.warning("a state of episode %s (turn %s) is missed: %s", self._episode_id, record.turn_id, why)
        self._missing = record.turn_id
        missed = StateRecord(record.moment, record.turn_id, record.at_s, missed=why)
        await self._keep(missed, _NOTHING, math.inf)
        self._missing = record.turn_id
        return False
