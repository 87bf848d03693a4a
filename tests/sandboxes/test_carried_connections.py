"""Connections that a helper carries, against helpers and listeners that do not play along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from turnstile_server.errors import SandboxFailed
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.carried import CarriedConnections
from turnstile_server.sandboxes.helper.turnstile_helper import frames
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.anyio

WINDOW = frames.CARRY_WINDOW
MOST = 4


class Rig:
    """A helper played by the test, and a listener that keeps its connections."""

    def __init__(self, folder: Path) -> None:
        self.gate = folder / "gate.sock"
        self.sent: list[tuple[Mapping[str, Any], bytes]] = []
        self.helper_gone = False
        self.accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    def send(self, header: Mapping[str, Any], payload: bytes) -> None:
        if self.helper_gone:
            raise SandboxFailed("the helper is gone")
        self.sent.append((header, payload))

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.accepted.put((reader, writer))

    def said(self, number: int, do: str) -> list[tuple[Mapping[str, Any], bytes]]:
        return [(header, data) for header, data in self.sent if (header["conn"], header["do"]) == (number, do)]

    async def wait_for(self, number: int, do: str, times: int = 1) -> None:
        await wait_until(lambda: len(self.said(number, do)) >= times)

    async def wait_for_bytes(self, number: int, size: int) -> None:
        """Returns when so many bytes were sent, and no more follow."""
        await wait_until(lambda: self.bytes_sent(number) == size)
        await loop_turns()
        assert self.bytes_sent(number) == size

    def bytes_sent(self, number: int) -> int:
        return sum(len(data) for _, data in self.said(number, "data"))


async def loop_turns() -> None:
    """What has come to the sockets of this process is taken meanwhile."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def rig(run_dir: Path) -> AsyncIterator[Rig]:
    made = Rig(run_dir)
    server = await asyncio.start_unix_server(made.accept, made.gate)
    yield made
    while not made.accepted.empty():
        made.accepted.get_nowait()[1].close()
    server.close()


@pytest.fixture
async def carried(rig: Rig, tasks: BackgroundTasks) -> AsyncIterator[CarriedConnections]:
    made = CarriedConnections(rig.gate, MOST, rig.send, "one", tasks)
    yield made
    async with asyncio.timeout(PATIENCE_S):
        await made.close()


async def test_bytes_go_both_ways_and_an_end_on_both_sides_is_the_end(
    carried: CarriedConnections, rig: Rig
) -> None:
    carried.take({"conn": 1, "do": "open"}, b"")
    carried.take({"conn": 1, "do": "data"}, b"question")
    carried.take({"conn": 1, "do": "end"}, b"")
    reader, writer = await rig.accepted.get()
    assert await reader.read() == b"question"
    writer.write(b"answer")
    writer.close()
    await rig.wait_for(1, "end")
    assert b"".join(data for _, data in rig.said(1, "data")) == b"answer"
    # It is over: as many as there may be can be opened beside it.
    for number in range(2, 2 + MOST):
        carried.take({"conn": number, "do": "open"}, b"")


async def test_what_a_client_does_not_take_stays_in_its_window_and_others_go_on(
    carried: CarriedConnections, rig: Rig
) -> None:
    carried.take({"conn": 1, "do": "open"}, b"")
    _, slow = await rig.accepted.get()
    slow.write(bytes(4 * WINDOW))
    carried.take({"conn": 2, "do": "open"}, b"")
    _, quick = await rig.accepted.get()
    quick.write(b"quick")
    await rig.wait_for(2, "data")
    await rig.wait_for_bytes(1, WINDOW)
    carried.take({"conn": 1, "do": "took", "n": 1000}, b"")
    await rig.wait_for_bytes(1, WINDOW + 1000)
    for writer in (slow, quick):
        writer.close()


async def test_more_than_a_window_breaks_the_protocol_and_what_is_passed_on_makes_room(
    carried: CarriedConnections, rig: Rig
) -> None:
    carried.take({"conn": 1, "do": "open"}, b"")
    reader, writer = await rig.accepted.get()
    for _ in range(8):
        carried.take({"conn": 1, "do": "data"}, bytes(WINDOW // 4))
        await reader.readexactly(WINDOW // 4)
    await rig.wait_for(1, "took", 8)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    for _ in range(4):
        carried.take({"conn": 1, "do": "data"}, bytes(WINDOW // 4))
    with pytest.raises(frames.FrameError, match="window"):
        carried.take({"conn": 1, "do": "data"}, b"x")
    writer.close()


@pytest.mark.parametrize(
    "broken",
    [
        {"conn": 3, "do": "open"},
        {"conn": 0, "do": "data"},
        {"conn": "1", "do": "data"},
        {"conn": True, "do": "data"},
        {"conn": 1, "do": "took", "n": 1},
        {"conn": 1, "do": "took", "n": -1},
        {"conn": 1, "do": "took", "n": "x"},
        {"conn": 1, "do": "nothing"},
    ],
    ids=str,
)
async def test_frames_that_break_the_protocol_are_refused(
    carried: CarriedConnections, rig: Rig, broken: dict[str, object]
) -> None:
    carried.take({"conn": 1, "do": "open"}, b"")
    with pytest.raises(frames.FrameError):
        carried.take(broken, b"")


async def test_more_connections_than_may_be_break_the_protocol(carried: CarriedConnections, rig: Rig) -> None:
    for number in range(1, 1 + MOST):
        carried.take({"conn": number, "do": "open"}, b"")
    with pytest.raises(frames.FrameError, match="more than 4"):
        carried.take({"conn": 1 + MOST, "do": "open"}, b"")


async def test_opening_and_cutting_without_end_leaves_no_connection_and_no_task(
    carried: CarriedConnections, rig: Rig
) -> None:
    for number in range(1, 300):
        carried.take({"conn": number, "do": "open"}, b"")
        carried.take({"conn": number, "do": "cut"}, b"")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    while not rig.accepted.empty():
        reader, writer = rig.accepted.get_nowait()
        assert await reader.read() == b""
        writer.close()
    assert rig.sent == []


async def test_an_answer_before_the_request_was_read_arrives_and_the_rest_is_dropped(
    carried: CarriedConnections, rig: Rig
) -> None:
    carried.take({"conn": 1, "do": "open"}, b"")
    _, writer = await rig.accepted.get()
    writer.write(b"early")
    writer.close()
    await rig.wait_for(1, "end")
    assert [data for _, data in rig.said(1, "data")] == [b"early"]
    for _ in range(16):  # four windows
        carried.take({"conn": 1, "do": "data"}, bytes(WINDOW // 4))
    assert sum(header["n"] for header, _ in rig.said(1, "took")) == 4 * WINDOW


async def test_a_listener_that_is_gone_cuts_the_client_and_nobody_else(
    carried: CarriedConnections, rig: Rig
) -> None:
    rig.gate.unlink()
    carried.take({"conn": 1, "do": "open"}, b"")
    await rig.wait_for(1, "cut")
    carried.take({"conn": 1, "do": "data"}, b"late")


async def test_when_the_helper_is_gone_the_listener_sees_its_callers_leave(
    carried: CarriedConnections, rig: Rig
) -> None:
    carried.take({"conn": 1, "do": "open"}, b"")
    reader, writer = await rig.accepted.get()
    rig.helper_gone = True
    writer.write(b"for nobody")
    await loop_turns()
    await carried.close()
    assert await reader.read() == b""
    writer.close()
