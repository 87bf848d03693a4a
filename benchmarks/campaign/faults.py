"""The faults, each with the proof that it took effect. A fault that changed nothing does not count.

Every fault ends by itself and takes back what it did: a stopped process goes on, a full disk is freed. A fault
that is cancelled does so too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import resource
import signal
import time
from email.utils import parsedate_to_datetime
from functools import partial

import httpx

from campaign import journal_damage, proc
from campaign.arena import Arena
from campaign.crew import SOCKETS
from campaign.hits import (
    HOLD_S,
    MEMORY_SPARE,
    NOTHING,
    STOP_S,
    Fault,
    Outcome,
    frozen,
    limited,
    log_size,
    told_of_memory,
)
from campaign.programs import KEY, MODEL
from campaign.wire import KINDS, Kind, Way
from campaign.worker_faults import worker_faults

WIRE_PATIENCE_S = 5.0
HUNG_S = 20.0
METRICS_S = 4.0
TARGET_S = 5.0
"""So long a fault waits for a process that it can hit."""


async def _kill(arena: Arena, chance: random.Random, *, who: str) -> Outcome:
    program = arena.server if who == "server" else arena.engine
    pid, busy = program.pid, len(arena.trainer.running)
    if pid is None or not program.ready:
        return NOTHING
    program.expected_death = "kill -9"
    starts = program.starts
    proc.send_signal(pid, signal.SIGKILL)
    async with asyncio.timeout(150):
        while program.starts == starts or not program.ready:
            await asyncio.sleep(0.02)
    return Outcome(True, f"pid {pid} was killed with {busy} episodes open; it started again")


async def _stop(arena: Arena, chance: random.Random, *, who: str) -> Outcome:
    program = arena.server if who == "server" else arena.engine
    return NOTHING if program.pid is None else await frozen([program.pid], chance, who)


async def _agent(arena: Arena, chance: random.Random, *, what: str) -> Outcome:
    """An agent outside."""
    agents = arena.trainer.agents
    if not agents:
        return NOTHING
    agent = chance.choice(agents)
    if what == "stop":
        return await frozen([agent.pid], chance, "agent")
    agent.kill()
    return Outcome(True, f"agent {agent.pid} was killed")


async def _inside(arena: Arena, chance: random.Random, *, whom: str, what: str) -> Outcome:
    """A process in a sandbox: ``helper``, ``player`` or ``sandbox``, which is its first process."""
    if arena.docker is not None and whom == "sandbox":
        containers = await arena.docker.containers()
        if not containers:
            return NOTHING
        container = chance.choice(containers)
        if what == "kill":
            done = await arena.docker.act(container, "kill")
            return Outcome(done, f"container {container[:12]} was killed")
        done = await arena.docker.act(container, "pause")
        try:
            await asyncio.sleep(chance.uniform(*STOP_S))
        finally:
            await arena.docker.act(container, "unpause")
        return Outcome(done, f"container {container[:12]} was paused")
    until = time.monotonic() + TARGET_S
    while not (pids := await _processes_inside(arena, whom)):
        if time.monotonic() > until:
            return NOTHING
        await asyncio.sleep(0.1)
    pid = chance.choice(pids)
    if what == "stop":
        return await frozen([pid], chance, whom)
    proc.send_signal(pid, signal.SIGKILL)
    await asyncio.sleep(0.2)
    return Outcome(proc.state(pid) in ("", "Z", "X"), f"{whom} {pid} was killed")


async def _processes_inside(arena: Arena, whom: str) -> list[int]:
    if arena.docker is None:
        pid = arena.server.pid
        found = [] if pid is None else [(each.pid, each.command) for each in proc.descendants(pid)]
    else:
        lists = [await arena.docker.pids(container) for container in await arena.docker.containers()]
        found = [each for each_list in lists for each in each_list]
    if whom == "sandbox":
        return [pid for pid, command in found if command.partition(" ")[0].endswith("bwrap")]
    word = {"helper": "/turnstile/helper", "player": "player.py"}[whom]
    return [pid for pid, command in found if word in command and not command.partition(" ")[0].endswith("bwrap")]


async def _wire(arena: Arena, chance: random.Random, *, name: str, kind: Kind, way: Way) -> Outcome:
    done = await arena.wires[name].spoil(kind, way, WIRE_PATIENCE_S)
    return Outcome(done, f"bytes on the {name} wire, {way}: {kind}")


async def _refuse(arena: Arena, chance: random.Random, *, name: str) -> Outcome:
    wire = arena.wires[name]
    before, wire.refusing = wire.refused, True
    try:
        cut = wire.cut_all()
        await asyncio.sleep(chance.uniform(*HOLD_S))
    finally:
        wire.refusing = False
    refused = wire.refused - before
    return Outcome(cut + refused > 0, f"{cut} connections of {name} were cut, {refused} refused")


async def _sandbox_socket(arena: Arena, chance: random.Random, *, kind: str) -> Outcome:
    """The server's own end of a helper's connection, or of an agent's inside."""
    owners = arena.crew.players()
    if not owners:
        return NOTHING
    pid = chance.choice(owners)
    try:
        links = proc.unix_links(pid, without=SOCKETS)
        if not links:
            return NOTHING
        if kind in ("twice", "torn"):
            arena.changed_inside.append(time.monotonic())
        done = proc.spoil_socket(pid, chance.choice(links), kind, chance)
        return Outcome(done, f"one of {len(links)} sockets of sandboxes: {kind}")
    except OSError as error:
        return Outcome(False, str(error))


async def _answers_not(arena: Arena, seconds: float) -> bool:
    """Whether a new connection was left without an answer at least once in that time."""
    unanswered = False
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            async with httpx.AsyncClient(timeout=0.5) as client:
                await client.get(arena.settings.control_url + "/health")
        except httpx.HTTPError:
            unanswered = True
        await asyncio.sleep(0.1)
    return unanswered


async def _answers_not_at_all(arena: Arena) -> bool:
    """Whether the server, which nothing hinders any more, is silent for HUNG_S."""
    until = time.monotonic() + HUNG_S
    while time.monotonic() < until:
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=2.0) as client:
                await client.get(arena.settings.control_url + "/health")
                return False
        await asyncio.sleep(0.1)
    return True


async def _descriptors(arena: Arena, chance: random.Random) -> Outcome:
    found = arena.crew.all()
    if not found or not arena.server.ready:
        return NOTHING
    pid = chance.choice(found)
    try:
        open_now = proc.descriptors(pid)
        async with limited(pid, resource.RLIMIT_NOFILE, open_now):
            unanswered = await _answers_not(arena, chance.uniform(*HOLD_S))
            reached = proc.descriptors(pid) >= open_now
    except (OSError, ValueError):
        return NOTHING
    return Outcome(
        unanswered or reached, f"no more than {open_now} descriptors; new connections unanswered: {unanswered}"
    )


async def _memory(arena: Arena, chance: random.Random) -> Outcome:
    pid = arena.server.pid
    if pid is None or not arena.server.ready or arena.server.expected_death is not None:  # another fault kills it
        return NOTHING
    starts, logged = arena.server.starts, log_size(arena)
    arena.server.expected_death = "no memory"
    try:
        size = proc.status_field(pid, "VmSize") * 1024
        async with limited(pid, resource.RLIMIT_AS, size + MEMORY_SPARE):
            unanswered = await _answers_not(arena, chance.uniform(*HOLD_S))
    except (OSError, ValueError):  # it has died meanwhile
        return NOTHING
    await asyncio.sleep(0.3)
    if arena.server.pid == pid and await _answers_not_at_all(arena):
        arena.find("left behind", "server", f"it was silent for {HUNG_S:g} s after memory had come back")
        proc.send_signal(pid, signal.SIGKILL)
        return Outcome(True, f"no more than {size >> 20} MiB: it hung and was killed")
    died = arena.server.starts != starts or arena.server.pid != pid
    if not died and arena.server.expected_death == "no memory":  # another fault may be killing it
        arena.server.expected_death = None
    told = told_of_memory(arena, logged)
    proof = f"no more than {size >> 20} MiB: died {died}, said so {told}, unanswered {unanswered}"
    return Outcome(died or told or unanswered, proof)


async def _disk(arena: Arena, chance: random.Random) -> Outcome:
    ballast = arena.settings.data / "ballast"
    before, starts = await _refused_records(arena), arena.server.starts
    try:
        # Another fault may have filled it before: then not even the file can be made.
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        free = os.statvfs(arena.settings.data).f_bavail
        await asyncio.sleep(chance.uniform(*HOLD_S))
        refused = await _refused_records(arena)
    finally:
        ballast.unlink(missing_ok=True)
    restarted = arena.server.starts != starts
    refused -= 0 if restarted else before
    proof = f"{free} blocks were free; {refused:g} records refused; it died meanwhile: {restarted}"
    return Outcome(free == 0 and (refused > 0 or restarted), proof)


async def _refused_records(arena: Arena) -> float:
    try:
        return (await arena.metrics(METRICS_S)).get("turnstile_journal_refused_records_total", 0.0)
    except TimeoutError:  # it starts, or another fault holds it
        return 0.0


async def _clock(arena: Arena, chance: random.Random) -> Outcome:
    jump = chance.choice((-1, 1)) * int(10 ** chance.uniform(1.5, 8.4))
    arena.settings.clock.jump(jump)
    for _ in range(30):
        await asyncio.sleep(0.1)
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=2) as client:
                answer = await client.get(arena.settings.control_url + "/health")
            if "date" not in answer.headers:
                continue
            apart = parsedate_to_datetime(answer.headers["date"]).timestamp() - time.time()
            if abs(apart - jump) < 10:
                return Outcome(True, f"the server's clock is {apart:+.0f} s from ours")
    return Outcome(False, f"no jump of {jump} s was seen")


async def _weights(arena: Arena, chance: random.Random) -> Outcome:
    version = f"w{chance.randrange(1 << 40):x}"
    try:
        async with httpx.AsyncClient(timeout=15) as client:
            answer = await client.post(
                arena.settings.control_url + "/engine/weights",
                json={"path": str(MODEL), "version": version},
                headers={"authorization": f"Bearer {KEY}"},
            )
    except httpx.HTTPError as error:
        return Outcome(False, repr(error))
    return Outcome(answer.status_code < 300, f"weights {version} in mid-flight")


async def _journal(arena: Arena, chance: random.Random, *, what: str) -> Outcome:
    """Damages files of the journal while the server is down after a kill -9."""
    done: list[str] = []

    def damage() -> None:
        try:
            journals = [path for path in arena.settings.journals if path.is_dir()] or [arena.settings.data]
            hit = journal_damage.KINDS[what](chance.choice(journals), chance)
        except OSError as error:
            if error.errno != errno.ENOSPC:  # another fault has filled the disk: there is no room for damage
                raise
            return
        if hit is not None:
            done.append(hit.proof)
            for episode_id in hit.episodes:
                for known in (arena.played, arena.trainer.running):
                    if episode_id in known:
                        known[episode_id].damaged = True

    arena.damage.append(damage)
    killed = await _kill(arena, chance, who="server")
    if not killed.effect:
        arena.damage.clear()
        return killed
    return Outcome(bool(done), f"{what}: {'; '.join(done) or 'there was nothing to damage'}")


def catalogue(arena: Arena) -> list[Fault]:
    """The faults that are possible in this arena."""
    found = [
        Fault("server.kill", 5, partial(_kill, who="server")),
        Fault("server.stop", 4, partial(_stop, who="server")),
        Fault("engine.kill", 4, partial(_kill, who="engine")),
        Fault("engine.stop", 4, partial(_stop, who="engine")),
        Fault("agent.kill", 4, partial(_agent, what="kill")),
        Fault("agent.stop", 3, partial(_agent, what="stop")),
        Fault("descriptors.none", 3, _descriptors),
        Fault("memory.none", 2, _memory),
        Fault("weights", 2, _weights),
    ]
    if arena.crew.several:
        found += worker_faults()
    for whom in ("helper", "player", "sandbox"):
        found += [Fault(f"{whom}.{what}", 3, partial(_inside, whom=whom, what=what)) for what in ("kill", "stop")]
    for name in arena.wires:
        found += [
            Fault(f"{name}.{kind}.{way}", 1.2, partial(_wire, name=name, kind=kind, way=way))
            for kind in KINDS
            for way in ("up", "down")
        ]
        found.append(Fault(f"{name}.refuse", 1, partial(_refuse, name=name)))
    found += [
        Fault(f"sandbox socket.{kind}", 1.5, partial(_sandbox_socket, kind=kind))
        for kind in ("cut", "torn", "twice")
    ]
    if arena.mounts:
        found.append(Fault("disk.full", 4, _disk))
    if arena.settings.clock.works:
        found.append(Fault("clock.jump", 4, _clock))
    found += [Fault(f"journal.{what}", 0.8, partial(_journal, what=what)) for what in journal_damage.KINDS]
    return found
