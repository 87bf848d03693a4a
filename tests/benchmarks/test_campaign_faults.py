"""The campaign's faults do what they say, and what is left behind is seen."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from campaign import journal_damage, leftovers, proc
from campaign.clock import Clock
from campaign.wire import KINDS, Kind, Wire, to_tcp
from turnstile_server.journal import FileJournal

SAID = bytes(range(256)) * 4


@asynccontextmanager
async def echo_behind(wire_kind: list[Wire]) -> AsyncIterator[int]:
    """A server that repeats what it hears, behind a proxy; the proxy's port."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    wire = Wire("echo", to_tcp(server.sockets[0].getsockname()[1]), random.Random(5))
    wire_kind.append(wire)
    try:
        yield await wire.listen_tcp()
    finally:
        await wire.close()
        server.close()


async def repeated(port: int) -> bytes:
    """What comes back of ``SAID``; all that came, where the connection was cut."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = b""
    try:
        writer.write(SAID)
        writer.write_eof()
        while data := await reader.read(1 << 16):
            heard += data
    except OSError:
        pass
    finally:
        writer.close()
    return heard


@pytest.mark.parametrize("kind", KINDS)
def test_a_spoiled_wire_changes_what_is_heard_and_says_so(kind: Kind) -> None:
    async def main() -> None:
        wires: list[Wire] = []
        async with echo_behind(wires) as port:
            assert await repeated(port) == SAID
            spoil = asyncio.create_task(wires[0].spoil(kind, "down", 5, skip=0))
            await asyncio.sleep(0)
            heard = await repeated(port)
            assert await spoil
            if kind in ("stall", "trickle"):
                assert heard == SAID
            elif kind == "twice":
                assert len(heard) > len(SAID)
                assert len(wires[0].changed) == 1
            else:
                assert len(heard) < len(SAID) or kind == "half_close"
            assert await repeated(port) == SAID

    asyncio.run(main())


def test_a_spoil_without_bytes_took_no_effect_and_spoils_nothing_later() -> None:
    async def main() -> None:
        wires: list[Wire] = []
        async with echo_behind(wires) as port:
            assert not await wires[0].spoil("cut", "down", 0.05, skip=0)
            assert await repeated(port) == SAID

    asyncio.run(main())


def test_a_socket_of_another_process_can_be_cut() -> None:
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(["sleep", "60"], pass_fds=[theirs.fileno()])
    try:
        descriptor = theirs.fileno()
        theirs.close()
        try:
            assert proc.spoil_socket(child.pid, descriptor, "cut", random.Random(1))
        except PermissionError:
            pytest.skip("this machine lets nobody take another process's descriptors")
        ours.settimeout(5)
        assert ours.recv(1) == b""
    finally:
        child.kill()
        child.wait()
        ours.close()


def test_a_process_that_is_left_in_a_folder_is_seen(tmp_path: Path) -> None:
    by_command = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path)])
    by_folder = subprocess.Popen(["sleep", "60"], cwd=tmp_path)
    try:
        found = {pid for pid, _ in leftovers.of_folder(tmp_path)}
        assert {by_command.pid, by_folder.pid} <= found
    finally:
        for process in (by_command, by_folder):
            process.kill()
            process.wait()
    assert {by_command.pid, by_folder.pid}.isdisjoint(pid for pid, _ in leftovers.of_folder(tmp_path))


@pytest.mark.slow
def test_the_clock_of_one_process_jumps_and_its_waits_stay(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    if not clock.works:
        pytest.skip("there is no C compiler here")
    clock.jump(-86400)
    script = (
        "import time, datetime, sys\n"
        "before, started = time.time(), time.monotonic()\n"
        "time.sleep(0.05)\n"
        "print(before, datetime.datetime.now().timestamp(), time.monotonic() - started)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=clock.env, capture_output=True, text=True, check=True
    )
    told, dated, slept = map(float, done.stdout.split())
    now = float(subprocess.run(["date", "+%s"], capture_output=True, text=True, check=True).stdout)
    assert abs(now - 86400 - told) < 60
    assert abs(now - 86400 - dated) < 60
    assert 0.05 <= slept < 30


async def journal_with_records(folder: Path) -> None:
    from journal_support import small, turn  # the journal's own test support: here it only fills one

    journal = await FileJournal.open(folder, small(segment_bytes=65536))
    for number in range(40):
        await journal.append(turn(f"e{number % 2}", number, items=1000))
    await journal.close()


@pytest.mark.parametrize("kind", journal_damage.KINDS)
def test_damage_hits_the_journal_and_names_whose_records_it_hit(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "journal"))
    asyncio.run(journal_with_records(tmp_path))
    segments = sorted(tmp_path.glob("segment-*.tsj"))
    found = [record.episode_id for segment in segments for record in journal_damage.records(segment)]
    assert found == ["e0", "e1"] * 20
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    hit = journal_damage.KINDS[kind](tmp_path, random.Random(3))
    assert hit is not None
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} != before
    assert bool(hit.episodes) == (kind == "flipped")
    assert set(hit.episodes) <= {"e0", "e1"}


def test_what_a_process_holds_open_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, (tmp_path / "held").open("w") as held:
        port = server.getsockname()[1]
        with socket.create_connection(server.getsockname()), server.accept()[0], socket.socketpair()[0]:
            found = proc.open_files(os.getpid())
    assert (found[held.name], found[f"tcp at {port}"]) == (1, 2)
    assert found[f"tcp to {port}"] == 1
    assert found["unix"] >= 1
