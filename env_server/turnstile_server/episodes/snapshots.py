"""Takes snapshots of running episodes' sandboxes, by request and after each turn.

What must hold: a snapshot is taken while no tool call runs, and tool calls wait until it is whole and stored; one
that is taken after a turn never fails the call that waits for it; a bounded number is in memory at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

import anyio

from turnstile.models import SnapshotInfo, SnapshotMode, new_id
from turnstile_server.episodes.bounds import EpisodeBounds
from turnstile_server.episodes.fork_point import running_processes, take_files
from turnstile_server.episodes.snapshot_store import SnapshotStore
from turnstile_server.errors import TurnstileError
from turnstile_server.observability.metrics import Metrics
from turnstile_server.sandboxes.protocol import Sandbox
from turnstile_server.settings import Settings
from turnstile_server.tools.toolbox import Toolbox

_LOG = logging.getLogger(__name__)


class Snapshots:
    """Fills ``store``."""

    def __init__(self, store: SnapshotStore, toolbox: Toolbox, settings: Settings, metrics: Metrics) -> None:
        self.store = store
        self._toolbox = toolbox
        self._metrics = metrics
        self._max_bytes = settings.sandboxes.max_archive_bytes
        self._wait_s = settings.episodes.bounds_of(EpisodeBounds).snapshot_wait_s
        self._at_once = anyio.CapacityLimiter(settings.episodes.bounds_of(EpisodeBounds).snapshots_at_once)
        self._missing: WeakKeyDictionary[Sandbox, str] = WeakKeyDictionary()
        """The turn that was missed last: an agent that gives its call up and repeats it does not wait again."""

    async def take(
        self,
        episode_id: str,
        sandbox: Sandbox,
        turn_of: Callable[[], str | None],
        taken: SnapshotMode = "on_request",
    ) -> SnapshotInfo:
        """``turn_of``: the turn that it is of, asked when no tool call can begin any more.

        Raises Conflict while a tool call runs and where the episode has no room, what ``turn_of`` raises,
        FileProblem for a folder that is too large, SandboxFailed, SandboxUnavailable.
        """
        async with self._at_once:
            with self._toolbox.paused(episode_id):
                turn_id = turn_of()
                info = SnapshotInfo(
                    snapshot_id=new_id("snapshot"),
                    episode_id=episode_id,
                    turn_id=turn_id,
                    at=time.time(),
                    bytes=0,
                    processes=await running_processes(sandbox),
                    taken=taken,
                )
                tars = await take_files(sandbox, self._max_bytes)
                await self.store.make_room(episode_id, turn_id)
                return await self.store.keep(info, tars)

    async def after_turn(self, episode_id: str, sandbox: Sandbox, turn_id: str, settle_s: float) -> bool:
        """Takes one after ``settle_s``, or logs and counts why there is none; whether it did. Raises only a
        cancellation."""
        if self._missing.get(sandbox) == turn_id:
            return False
        self._missing[sandbox] = turn_id
        await anyio.sleep(settle_s)
        try:
            with anyio.fail_after(self._wait_s):
                await self.take(episode_id, sandbox, lambda: turn_id, "every_turn")
        except TimeoutError:
            self._missed(
                episode_id,
                turn_id,
                f"it took longer than {self._wait_s:g} s",
            )
        except TurnstileError as error:
            self._missed(episode_id, turn_id, error.message)
        except Exception as error:  # noqa: BLE001 - the boundary: a fault in here fails no call of the agent
            _LOG.exception("a snapshot failed", extra={"episode_id": episode_id})
            self._missed(episode_id, turn_id, repr(error))
        else:
            del self._missing[sandbox]
            self._metrics.turn_snapshot("kept")
            return True
        return False

    def _missed(self, episode_id: str, turn_id: str, why: str) -> None:
        self._metrics.turn_snapshot("missed")
        _LOG.warning("turn %s of episode %s has no snapshot: %s", turn_id, episode_id, why)
