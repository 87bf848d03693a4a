"""Pausing a vLLM server and changing its weights.

What must hold: weights change only while the server is paused; the order is check, pause, load, name, read the
name back, resume. A load that failed half-way, and a name that could not be set after a good load, leave weights
that nobody can name: the server then stays paused, and says so, until an update succeeds.

What the pauses are on vLLM: ``abort`` is its own. ``retract`` is ``keep``, which drops all of the attention cache
and computes it anew after the pause. ``in_place`` is ``keep`` with ``clear_cache=false``. An update in a pause
that was ``in_place`` keeps the caches, any other one drops them.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Final

import anyio
import orjson

from turnstile.models import PauseMode
from turnstile_server.engines.http_client import EngineHttp
from turnstile_server.engines.protocol import EngineState
from turnstile_server.engines.replies import error_for_status, same_folder
from turnstile_server.engines.server_replies import get_object
from turnstile_server.engines.vllm.calls import VllmCalls
from turnstile_server.engines.vllm.start import VllmFacts
from turnstile_server.engines.vllm.workers import WITHOUT_EXTENSION, WeightsUnknown, WorkerCalls
from turnstile_server.engines.weight_spans import UNKNOWN_WEIGHTS
from turnstile_server.engines.weights import TensorBucket, WeightBucket
from turnstile_server.errors import Conflict, EngineRefused, TurnstileError
from turnstile_server.settings import EngineSettings

log = logging.getLogger(__name__)

PAUSES: Final[Mapping[PauseMode, str]] = {
    "abort": "/pause?mode=abort",
    "retract": "/pause?mode=keep",
    "in_place": "/pause?mode=keep&clear_cache=false",
}


class VllmWeights:
    """The weights and pauses of one server, and what its calls must know of them.

    ``version``: the weights it has for certain; None while they change, and when they are unknown or in doubt.
    ``changes``: how often they changed. ``keeps_cache``: it is paused, and an update now would keep the caches.
    """

    def __init__(self, http: EngineHttp, settings: EngineSettings, calls: VllmCalls) -> None:
        self.version: str | None = None
        self.changes = 0
        self.keeps_cache = False
        self._http = http
        self._settings = settings
        self._calls = calls
        self._workers = WorkerCalls(http, settings)
        self._extended = False
        self._control = anyio.Lock()
        self._paused = False
        self._by_trainer = False
        """An update past us is under way."""
        self._unknown: str | None = None
        self._last: str | None = None
        """The version that was last certain."""
        self._source_of: dict[str, str] = {}
        """The source of every version that was served since start: a folder, or an update by value."""

    def attached(self, facts: VllmFacts) -> None:
        """Called once the server was read."""
        self.version = self._last = facts.weight_version
        self._extended = facts.extended
        self._source_of = {facts.weight_version: facts.folder or ""}
        if facts.paused:
            log.warning("the engine at %s is paused; its calls wait until it is resumed", self._http.url)
            self._paused = True
            self._http.hold.hold()

    async def state(self) -> EngineState:
        """Never raises."""
        changes = self.changes
        try:
            version = (await self._get("/weight_info")).get("weight_version")
            paused = (await self._get("/is_paused")).get("is_paused")
        except TurnstileError as error:
            return EngineState(ok=False, weight_version=None, paused=None, detail=error.message)
        if self._unknown is not None:
            return EngineState(ok=False, weight_version=None, paused=paused is True, detail=self._unknown)
        if not isinstance(version, str):
            return EngineState(ok=False, weight_version=None, paused=None, detail="The engine names no weights.")
        if version != self.version and changes == self.changes and not self._control.locked():
            if version == self._last:
                self.version = version
            else:
                self._changed_by_others(version)
        return EngineState(ok=True, weight_version=version, paused=paused is True)

    def _changed_by_others(self, version: str) -> None:
        log.warning("the engine serves the weights %r, which were not loaded by this server", version)
        self.changes += 1
        self._calls.weights_changing()
        self._calls.weights_changed(version, kept_cache=False)
        self.version = self._last = version

    def doubt(self) -> None:
        """The server may have been started anew, or got weights from others: until ``state`` has asked it, no
        token is said to be of certain weights before its call has ended."""
        if not self._control.locked():
            self.version = None

    async def pause(self, mode: PauseMode) -> None:
        async with self._control:
            await self._pause(mode)
            self._paused = True

    async def resume(self) -> None:
        """Raises WeightsUnknown where calls would run on weights that have no name."""
        async with self._control:
            if self._unknown is not None:
                raise WeightsUnknown(f"The engine stays paused: {self._unknown}")
            await self._resume()

    async def update_from_folder(self, path: str, version: str, mode: PauseMode) -> None:
        """See ``Engine.update_weights``."""
        async with self._control:
            self._check_update(version, path)
            await self._workers.check("turnstile_check_folder", {"path": path})
            await self._replace(version, path, "turnstile_load_folder", {"path": path}, mode)

    async def begin_tensors(self) -> None:
        async with self._control:
            await self._workers.check("turnstile_begin", {})

    async def add_tensors(self, bucket: WeightBucket) -> None:
        if (
            not isinstance(bucket, TensorBucket)
            or bucket.load_format != "safetensors"
            or len(bucket.serialized) != 1
        ):
            raise EngineRefused(
                "vLLM takes tensors as one base64 text of a safetensors file (load_format safetensors), whole and "
                "not cut for tensor-parallel ranks. SGLang's serialized tensors are pickles of handles to memory, "
                "which another program cannot open."
            )
        async with self._control:
            await self._workers.check("turnstile_add", {"tensors": bucket.serialized[0]})

    async def begin_by_trainer(self) -> None:
        """The trainer changes the weights past us from here on, and may resume the server before it is done."""
        async with self._control:
            await self._post("/update_weight_version", {"new_version": UNKNOWN_WEIGHTS})
            self.version = None
            self.changes += 1
            self._calls.weights_changing()
            self._by_trainer = True
            self._unknown = "The trainer's own update of the weights has not ended."

    async def _end_by_trainer(self, version: str) -> None:
        self._by_trainer = False
        said = (await self._get("/weight_info")).get("weight_version")
        if said not in (UNKNOWN_WEIGHTS, version) or version == UNKNOWN_WEIGHTS:
            self._unknown = f"The trainer named the weights {said!r}, and the update is of {version!r}."
            raise WeightsUnknown(f"{self._unknown} Give both the same name, then load weights again.")
        await self._pause("retract")  # also drops what was cached if the trainer had resumed it
        await self._name(version)
        self._calls.weights_changed(version, kept_cache=False)
        self._unknown = None
        self.version = self._last = version
        self._source_of[version] = f"the trainer {uuid.uuid4().hex}"

    async def end_pieces(self, version: str) -> None:
        async with self._control:
            if self._by_trainer:
                await self._end_by_trainer(version)
                return
            source = f"tensors {uuid.uuid4().hex}"
            self._check_update(version, source)
            await self._workers.check("turnstile_check_added", {})
            await self._replace(version, source, "turnstile_load_added", {})

    def _check_update(self, version: str, source: str) -> None:
        if not self._extended:
            raise EngineRefused(WITHOUT_EXTENSION)
        if not version:
            raise EngineRefused("A weight version needs a name.")
        known = self._source_of.get(version)
        if known is not None and not same_folder(known, source):
            raise Conflict(f"the weight version {version!r} names other weights already; give each its own name")

    async def _replace(
        self, version: str, source: str, method: str, arguments: Mapping[str, str], mode: PauseMode = "retract"
    ) -> None:
        try:
            if not (self._paused and self.keeps_cache):
                await self._pause(mode)
            # A caller that leaves meanwhile would leave weights of which nobody knows what they are.
            with anyio.CancelScope(shield=True):
                await self._load(version, source, method, arguments)
        finally:
            if not self._paused and self._unknown is None and self._http.hold.held:
                with anyio.CancelScope(shield=True):
                    await self._resume()

    async def _load(self, version: str, source: str, method: str, arguments: Mapping[str, str]) -> None:
        previous, self.version = self.version, None
        self.changes += 1
        self._calls.weights_changing()
        try:
            await self._workers.load(method, arguments)
            await self._name(version)
        except EngineRefused:
            self.version = previous
            raise
        except WeightsUnknown as error:
            self._unknown = error.message
            raise
        except BaseException:
            self._unknown = "An update of the weights was cut off half-way; load them again."
            raise
        # The same weights again in the caches that they filled: nothing has become old.
        if not (self.keeps_cache and version == previous):
            self._calls.weights_changed(version, kept_cache=self.keeps_cache)
        self._unknown = None
        self.version = self._last = version
        self._source_of[version] = source

    async def _name(self, version: str) -> None:
        """vLLM stamps what it samples with the name that was set last, whatever is loaded."""
        try:
            await self._post("/update_weight_version", {"new_version": version})
            said = (await self._get("/weight_info")).get("weight_version")
        except TurnstileError as error:
            said = error.message
        if said != version:
            raise WeightsUnknown(
                f"The engine loaded the weights {version!r} but does not name them so ({said}); it stays paused. "
                "Load them again."
            )

    async def _pause(self, mode: PauseMode) -> None:
        held = self._http.hold.held
        keeps = mode == "in_place" and (not held or self.keeps_cache)
        self._http.hold.hold()
        self.keeps_cache = keeps
        if keeps:
            self._calls.paused_in_place()
        try:
            await self._post(PAUSES[mode], None)
        except TurnstileError:
            if not held:  # a pause that was not answered may have come all the same
                await self._resume_anyway()
            raise

    async def _resume_anyway(self) -> None:
        try:
            await self._post("/resume", None)
        except TurnstileError as error:
            log.warning("the engine could not be resumed after a pause that failed: %s", error.message)
        self._released()

    async def _resume(self) -> None:
        await self._post("/resume", None)
        self._paused = False
        self._released()

    def _released(self) -> None:
        self.keeps_cache = False
        self._calls.resumed()
        self._http.hold.release()

    async def sleep(self) -> None:
        """Waits for the calls that run; the weights go to the host's memory, the cache is dropped."""
        async with self._control:
            self._http.hold.hold()
            await self._post("/sleep?level=1&mode=wait", None, self._settings.weights_timeout_s)

    async def wake(self) -> None:
        async with self._control:
            await self._post("/wake_up", None, self._settings.weights_timeout_s)
            if self._paused or self._unknown is not None:  # waking resumes vLLM
                await self._post(PAUSES["retract"], None)
            else:
                self._released()

    async def _get(self, path: str) -> Mapping[str, object]:
        return await get_object(self._http, path, self._settings.control_timeout_s)

    async def _post(self, path: str, body: Mapping[str, str] | None, timeout_s: float | None = None) -> None:
        data = None if body is None else orjson.dumps(dict(body))
        limit_s = self._settings.control_timeout_s if timeout_s is None else timeout_s
        status, answer = await self._http.request("POST", path, data, timeout_s=limit_s)
        if status != 200:
            raise error_for_status(status, answer)
