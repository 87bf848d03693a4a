"""Requests to an SGLang server beside calls: pauses, which weights it serves, how busy it is, sleep.

Owns the pause of one server and what is known of its weights. What must hold: weights change only while the server
is paused; after each change the server's own word for its weights is read back and compared; where the weights may
be a mixture, the server itself calls them ``unknown``, so that no token is recorded under a name that is not true.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import anyio
import orjson

from turnstile.models import PauseMode
from turnstile_server.engines.http_client import EngineHttp
from turnstile_server.engines.protocol import EngineLoad, EngineState
from turnstile_server.engines.replies import error_for_status
from turnstile_server.engines.server_replies import get_object
from turnstile_server.engines.sglang.calls import LiveCalls, PrefixKeys
from turnstile_server.engines.weight_spans import UNKNOWN_WEIGHTS
from turnstile_server.errors import EngineProtocolError, EngineRefused, TurnstileError
from turnstile_server.settings import EngineSettings

RETRACTED_METRIC: Final = b"sglang:num_retracted_requests_total"
"""In ``/metrics``, where the server has ``--enable-metrics``: calls put back for want of cache, since its
start."""


class SGLangControl:
    """The control endpoints of one server. Its lock is held by the caller of ``pause``, ``resume`` and
    ``sleep``."""

    def __init__(self, http: EngineHttp, settings: EngineSettings, calls: LiveCalls) -> None:
        self.lock = anyio.Lock()
        self.version: str | None = None
        """The weights the server is known to have; None after an update that may have failed half-way."""
        self.paused = False
        """True if our caller asked for a pause that lasts."""
        self.mode: PauseMode = "retract"
        """The mode of the last pause: what it did with calls in flight."""
        self.asleep = False
        self.prefix_keys = PrefixKeys()
        self.keeps_old_cache = False
        """Calls may have run on an older cache since the cache was last empty."""
        self._http = http
        self._settings = settings
        self._calls = calls

    @property
    def prefix_key(self) -> str:
        """That of calls sent now."""
        return self.prefix_keys.of(self.version)

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float | None = None) -> None:
        """Raises the errors of a request, and the typed error of an answer that is not 200."""
        limit_s = self._settings.control_timeout_s if timeout_s is None else timeout_s
        status, answer = await self._http.request("POST", path, orjson.dumps(body), timeout_s=limit_s)
        if status != 200:
            raise error_for_status(status, answer)

    async def get(self, path: str) -> dict[str, Any]:
        return await get_object(self._http, path, self._settings.control_timeout_s)

    async def state(self) -> EngineState:
        try:
            version = await self.served_version()
        except TurnstileError as error:
            return EngineState(ok=False, weight_version=None, paused=None, detail=error.message)
        self.version = version
        self._calls.served(version)
        detail = (
            "" if version else "its weights are unknown: an update did not come to its end; load weights again"
        )
        return EngineState(ok=True, weight_version=version, paused=self.paused, detail=detail)

    async def served_version(self) -> str | None:
        """The server's name for its weights; None where it says that they are unknown."""
        version = (await self.get("/model_info")).get("weight_version")
        return None if version in (None, UNKNOWN_WEIGHTS) else str(version)

    async def confirm(self, version: str) -> None:
        """Reads back which weights are served. Raises EngineProtocolError, and forgets what was known, where they
        are not ``version``."""
        self.version = None
        served = await self.served_version()
        if served != version:
            raise EngineProtocolError(
                f"The engine took the weights {version!r} and now says that it serves {served!r}. What it serves "
                "is not known: load weights again.",
                detail={"engine_weight_version": served},
            )
        self.version = version
        self._calls.served(version)

    async def name_weights(self, version: str) -> None:
        """Makes the server call its weights ``version``, from the next token on."""
        await self.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def pause(self, mode: PauseMode) -> None:
        if not self._http.hold.held:
            self._http.hold.hold()
            self._calls.pauses += 1
        self.mode = mode
        try:
            await self.post("/pause_generation", {"mode": mode})
        except TurnstileError:
            self.release_hold()
            raise
        if self.keeps_old_cache and mode == "retract":
            # The calls are computed again from here; without their old prefix they are exact.
            await self.drop_cache()

    async def drop_cache(self) -> None:
        """Empties the prefix cache. Raises EngineRefused while calls run."""
        await self.post("/flush_cache", {})
        self.keeps_old_cache = False

    async def resume(self) -> None:
        """Deferred aborts are to be sent by the caller afterwards (``LiveCalls.take_deferred_aborts``)."""
        if self.asleep:
            raise EngineRefused("The engine is asleep: wake it (POST /engine/wake) and load weights first.")
        await self.post("/continue_generation", {})
        self.paused = False
        self.release_hold()

    def release_hold(self) -> None:
        if self._http.hold.held and not self.paused:
            self._http.hold.release()

    async def load(self, *, metrics: bool) -> EngineLoad | None:
        """From ``/v1/loads``, which needs no flag; ``metrics``: and from ``/metrics``."""
        said = await self.get("/v1/loads")
        listed = said.get("loads")
        if not isinstance(listed, list) or not all(isinstance(rank, dict) for rank in listed):
            raise EngineProtocolError("/v1/loads has no list of loads.")
        used = [rank["token_usage"] for rank in listed if isinstance(rank.get("token_usage"), int | float)]
        return EngineLoad(
            running=sum(_count(rank, "num_running_reqs") for rank in listed),
            waiting=sum(_count(rank, "num_waiting_reqs") for rank in listed),
            kv_used=min(1.0, max(used)) if used else None,
            retracted=await self._retracted() if metrics else None,
            age_s=_age_s(said.get("timestamp"), [rank.get("timestamp") for rank in listed]),
        )

    async def _retracted(self) -> int | None:
        limit_s = self._settings.control_timeout_s
        status, body = await self._http.request("GET", "/metrics", timeout_s=limit_s)
        if status != 200:
            return None
        found = [line.rsplit(b" ", 1)[-1] for line in body.splitlines() if line.startswith(RETRACTED_METRIC)]
        try:
            return int(sum(map(float, found)))
        except ValueError as error:
            raise EngineProtocolError(f"/metrics has no number for {RETRACTED_METRIC.decode()}.") from error

    async def sleep(self) -> None:
        """Frees weights and cache. The pause that this needs lasts until weights were loaded after ``wake``."""
        await self.post("/release_memory_occupation", {}, self._settings.weights_timeout_s)
        self.asleep, self.version = True, None

    async def wake(self) -> None:
        await self.post("/resume_memory_occupation", {}, self._settings.weights_timeout_s)
        await self.name_weights(UNKNOWN_WEIGHTS)
        self.asleep, self.version = False, None


def _count(rank: Mapping[str, Any], name: str) -> int:
    value = rank.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise EngineProtocolError(f"/v1/loads says {name} is {value!r}.")
    return value


def _age_s(told_at: Any, written_at: list[Any]) -> float | None:
    """Age of the oldest rank's load, in seconds: the server gives what its schedulers wrote last, also where one
    of them stands still. Both times are of the server's clock; None where it does not say them."""
    if not isinstance(told_at, str) or not all(isinstance(at, int | float) and at > 0 for at in written_at):
        return None
    try:
        now = datetime.fromisoformat(told_at).timestamp()
    except ValueError:
        return None
    return max(0.0, *(now - at for at in written_at)) if written_at else None
