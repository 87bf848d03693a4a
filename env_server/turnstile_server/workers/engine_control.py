"""A trainer's control of the engines that all workers share: pauses, new weights, their state.

The first worker speaks to the engines; the others hold their calls meanwhile, and then look what the engines serve
(a version that they did not load is a new one to them: ``fleet/roster.py``). What must hold: no worker gives a
call to an engine whose weights are being changed by another one; a pause of the trainer's outlives an update;
whatever holds the other workers lets them go again, also when it fails or the trainer is silent.

What the workers' own records of an engine cannot share (its sleep, its adapters, which engines there are) is
refused. An engine without a fleet (the training loop samples) is each worker's own: everything goes to all of
them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import anyio
import orjson
from starlette.responses import Response

from turnstile.models import EngineInfo, PauseMode, WorkerInfo
from turnstile_server.control.body import JSON
from turnstile_server.errors import TurnstileError
from turnstile_server.workers.crew import Crew
from turnstile_server.workers.link import WorkerLink, WorkerRestarting, relayed

_LOG = logging.getLogger(__name__)
OWN_ENGINES: Final = frozenset({"trainer"})
"""Kinds of engines of which each worker has its own."""
_Step = Callable[[WorkerLink], Awaitable[object]]
_PIECES = ("/engine/weights/begin", "/engine/weights/bucket", "/engine/weights/end", "/engine/weights/cancel")


class NotShared(TurnstileError):
    """Something that several worker processes cannot do to the engines that they share."""

    status = 409
    type = "not_shared"


class CrewEngines:
    """``kind``: the setting ``engine.kind``."""

    def __init__(self, crew: Crew, kind: str) -> None:
        self._crew = crew
        self._own = kind in OWN_ENGINES
        self._turn = anyio.Lock()
        """One thing at a time."""
        self._paused: PauseMode | None = None
        """The mode of the trainer's pause of the engines; None: the trainer has not paused them."""
        self._in_pieces = False
        """Weights come in pieces, and the other workers wait for their end."""

    @property
    def _others(self) -> Sequence[WorkerLink]:
        return self._crew.workers[1:]

    def refused(self, method: str, template: str) -> NotShared:
        return NotShared(
            f"{method} {template} is for a server of one process: the workers of this one share the engines, and "
            "each has records of its own of them. Do it to the engines themselves, or serve with --workers 1"
        )

    async def info(self) -> Response:
        """The engines' state: as the first worker has it, with the calls of all."""
        answers = await self._crew.each(self._crew.workers, self._state)
        return _json(self._joined(answers))

    async def do(self, method: str, template: str, target: str, body: bytes) -> Response:
        """Raises what the first worker raises; the others are as before then."""
        async with self._turn:
            if self._own:
                answers = await self._crew.each(
                    self._crew.workers, lambda link: self._done(link, method, target, body)
                )
                return _json(self._joined(answers))
            match template:
                case "/engine/pause":
                    return await self._pause(method, target, body)
                case "/engine/resume":
                    return await self._resume(method, target, body)
                case "/engine/weights":
                    return await self._update(method, target, body)
                case _ if template in _PIECES:
                    return await self._piece(method, template, target, body)
        return _json(await self._done(self._crew.first, method, target, body))  # groups: the engines are in them

    async def restarted(self, link: WorkerLink) -> None:
        """A worker that was started again holds its calls as the others do. Raises WorkerRestarting."""
        if link is self._crew.first and self._in_pieces:  # its update went with it
            self._in_pieces = False
            await self._let_go()
        if self._paused is not None or self._in_pieces:
            await self._done(
                link, "POST", "/engine/pause", json.dumps({"mode": self._paused or "retract"}).encode()
            )

    async def watch(self) -> None:
        """Lets the other workers go when the first one has given an update in pieces up, until cancelled."""
        while True:
            await anyio.sleep(1.0)
            if self._in_pieces and not self._crew.placement.loads[self._crew.first.number].held:
                async with self._turn:
                    await self._end_given_up()

    async def _end_given_up(self) -> None:
        try:
            if self._in_pieces and not (await self._crew.first.json("/register/state"))["held"]:
                _LOG.warning("an update of the weights was given up: the workers go on")
                self._in_pieces = False
                await self._let_go()
        except TurnstileError as error:
            _LOG.warning("the workers wait for the end of an update: %s", error.message)

    async def _pause(self, method: str, target: str, body: bytes) -> Response:
        try:
            answers = await self._crew.each(
                self._crew.workers, lambda link: self._done(link, method, target, body)
            )
        except BaseException:
            if self._paused is None:  # none or all
                with anyio.CancelScope(shield=True):
                    await self._living(self._resumed, self._crew.workers)
            raise
        self._paused = _mode(body, "retract")
        return _json(self._joined(answers))

    async def _resume(self, method: str, target: str, body: bytes) -> Response:
        answers = await self._crew.each(self._crew.workers, lambda link: self._done(link, method, target, body))
        self._paused = None
        return _json(self._joined(answers))

    async def _update(self, method: str, target: str, body: bytes) -> Response:
        try:
            await self._hold(_mode(body, "retract"))
            await self._done(self._crew.first, method, target, body)
        finally:
            with anyio.CancelScope(shield=True):
                await self._let_go()
        return await self.info()

    async def _piece(self, method: str, template: str, target: str, body: bytes) -> Response:
        if template == "/engine/weights/begin" and not self._in_pieces:
            try:
                await self._hold(_mode(body, "retract"))
                answer = await self._done(self._crew.first, method, target, body)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._let_go()
                raise
            self._in_pieces = True
            return _json(answer)
        answer = await self._done(self._crew.first, method, target, body)
        if template in ("/engine/weights/end", "/engine/weights/cancel"):
            self._in_pieces = False
            await self._let_go()
        return _json(answer)

    async def _hold(self, mode: PauseMode) -> None:
        """The other workers give no calls to the engines. No-op where the trainer has paused them."""
        if self._paused is None:
            pause = json.dumps({"mode": mode}).encode()
            await self._living(lambda link: self._done(link, "POST", "/engine/pause", pause))

    async def _let_go(self) -> None:
        """They look what the engines serve, and go on."""
        await self._living(self._state)
        if self._paused is None:
            await self._living(self._resumed)

    async def _resumed(self, link: WorkerLink) -> None:
        await self._done(link, "POST", "/engine/resume", b"")

    async def _living(self, step: _Step, links: Sequence[WorkerLink] | None = None) -> None:
        """Does ``step`` with ``links`` (None: the other workers) that are there. One that is not looks at the
        engines when it comes."""

        async def one(link: WorkerLink) -> None:
            try:
                if link.child.up.is_set():
                    await step(link)
            except WorkerRestarting as error:
                _LOG.warning("%s", error.message)

        await self._crew.each(self._others if links is None else links, one)

    async def _state(self, link: WorkerLink) -> EngineInfo:
        return await self._done(link, "GET", "/engine", None)

    async def _done(self, link: WorkerLink, method: str, target: str, body: bytes | None) -> EngineInfo:
        status, answer = await link.fetched(method, target, body)
        if status != 200:
            raise relayed(status, answer)
        return EngineInfo.model_validate_json(answer)

    def _joined(self, answers: Sequence[EngineInfo]) -> EngineInfo:
        counts = {name: sum(vars(each)[name] for each in answers) for name in ("running_calls", "waiting_calls")}
        return answers[0].model_copy(update={**counts, "workers": _joined_engines(answers)})


def _joined_engines(answers: Sequence[EngineInfo]) -> tuple[WorkerInfo, ...]:
    """The engines as the first worker has them, with the calls and the places of all."""
    joined = []
    for engine in answers[0].workers:
        same = [each for answer in answers for each in answer.workers if each.worker_id == engine.worker_id]
        limits = [each.limit for each in same if each.limit is not None]
        update = {"running": sum(each.running for each in same), "limit": sum(limits) if limits else None}
        joined.append(engine.model_copy(update=update))
    return tuple(joined)


def _mode(body: bytes, default: PauseMode) -> PauseMode:
    """The mode of a pause or an update. A body that cannot be read is refused by the worker."""
    try:
        found = orjson.loads(body)["mode"] if body else default
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return default
    return found if found in ("abort", "retract", "in_place") else default


def _json(info: EngineInfo) -> Response:
    return Response(info.model_dump_json(), 200, media_type=JSON)
