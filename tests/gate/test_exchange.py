"""An exchange notices a caller that goes, on our own connections and behind a server that is not ours."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from bounded import bounded
from turnstile_server.http.connections import ConnectionLimits, Connections, Seat, extensions_of
from turnstile_server.http.exchange import AgentExchange, CallerGone
from turnstile_server.http.intake import Intake
from turnstile_server.settings import GateSettings
from waiting import PATIENCE_S

pytestmark = pytest.mark.anyio


class Caller:
    """The other side of the ASGI calls."""

    def __init__(self) -> None:
        self.left = anyio.Event()
        self.got: list[Any] = []

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.got.append(message)


def exchange(caller: Caller, seat: Seat | None) -> AgentExchange:
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
    if seat is not None:
        scope["extensions"] = extensions_of(seat)
    settings = GateSettings()
    return AgentExchange(scope, caller.receive, caller.send, settings, "gate", Intake("gate", settings))


def new_seat() -> Seat:
    seat = Connections("test", ConnectionLimits()).take()
    assert seat is not None
    return seat


@pytest.mark.parametrize("ours", [True, False])
async def test_a_caller_that_goes_interrupts_its_reply(ours: bool) -> None:
    caller, seat = Caller(), new_seat() if ours else None
    served = exchange(caller, seat)

    async def go() -> None:
        await anyio.wait_all_tasks_blocked()
        if seat is None:
            caller.left.set()
        else:
            seat.left()

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(go)
            with anyio.CancelScope() as responding, served.watching(responding):
                await anyio.sleep_forever()
    assert responding.cancelled_caught
    assert served.gone
    with pytest.raises(CallerGone):
        await served.respond(200, b"{}")
    assert caller.got == []


async def test_a_caller_that_had_gone_before_is_noticed_at_once() -> None:
    caller, seat = Caller(), new_seat()
    served = exchange(caller, seat)
    seat.left()
    with anyio.fail_after(PATIENCE_S), anyio.CancelScope() as responding, served.watching(responding):
        await anyio.sleep_forever()
    assert served.gone


@pytest.mark.parametrize("ours", [True, False])
async def test_a_connection_that_closes_after_the_response_is_no_caller_that_went(ours: bool) -> None:
    caller, seat = Caller(), new_seat() if ours else None
    served = exchange(caller, seat)
    with anyio.CancelScope() as responding, served.watching(responding):
        await served.respond(200, b"{}")
        caller.left.set()
        if seat is not None:
            seat.left()
        await anyio.wait_all_tasks_blocked()
    assert (served.gone, responding.cancel_called, len(caller.got)) == (False, False, 2)


async def test_after_the_reply_the_seat_tells_nobody() -> None:
    caller, seat = Caller(), new_seat()
    served = exchange(caller, seat)
    with anyio.CancelScope() as responding, served.watching(responding):
        await anyio.lowlevel.checkpoint()
    seat.left()
    assert not served.gone


async def test_a_send_that_would_wait_for_its_client_is_bounded() -> None:
    caller, seat = Caller(), new_seat()
    settings = bounded(GateSettings, send_timeout_s=0.01)
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    scope["extensions"] = extensions_of(seat)

    async def stuck(message: Any) -> None:
        await anyio.sleep_forever()

    served = AgentExchange(scope, caller.receive, stuck, settings, "gate", Intake("gate", settings))
    seat.blocked = True
    with anyio.fail_after(PATIENCE_S), pytest.raises(CallerGone):
        await served.start(200, [])
    assert served.gone
