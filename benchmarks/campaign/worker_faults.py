"""Faults of one worker process of a server that has several: it is killed, stopped, or left without memory."""

from __future__ import annotations

import asyncio
import random
import resource
import signal

import httpx

from campaign import proc
from campaign.arena import Arena
from campaign.crew import KILL_WORKER
from campaign.hits import HOLD_S, MEMORY_SPARE, NOTHING, Fault, Outcome, frozen, limited, log_size, told_of_memory


def worker_faults() -> list[Fault]:
    return [
        Fault(KILL_WORKER, 12, _kill_worker),
        Fault("worker.stop", 5, _stop_worker),
        Fault("worker.memory.none", 2, _memory_of_worker),
    ]


async def _kill_worker(arena: Arena, chance: random.Random) -> Outcome:
    """The process in front must start another one, and say of it that it serves."""
    server, workers = arena.server.pid, arena.crew.workers()
    if server is None or not arena.server.ready or not workers:
        return NOTHING
    pid, busy = chance.choice(workers), len(arena.trainer.running)
    if not proc.send_signal(pid, signal.SIGKILL):
        return NOTHING
    arena.crew.killed += 1
    async with asyncio.timeout(150):
        # Another fault may have killed the whole server meanwhile.
        while arena.server.pid == server and not await _all_serve(arena, pid):
            await asyncio.sleep(0.1)
    if proc.about(pid) is not None:
        return Outcome(False, f"worker {pid} is still there")
    if arena.server.pid != server:
        return Outcome(True, f"worker {pid} was killed, and then the server")
    return Outcome(True, f"worker {pid} was killed with {busy} episodes open; another one serves in its place")


async def _all_serve(arena: Arena, without: int) -> bool:
    """Whether there are all workers, and the process in front misses none."""
    workers = arena.crew.workers()
    if without in workers or len(workers) != arena.crew.count:
        return False
    try:
        async with httpx.AsyncClient(timeout=2.0) as client:
            answer = await client.get(arena.settings.control_url + "/ready")
            return answer.status_code == 200 and "workers" not in answer.json()
    except (httpx.HTTPError, ValueError):
        return False


async def _stop_worker(arena: Arena, chance: random.Random) -> Outcome:
    workers = arena.crew.workers()
    return await frozen([chance.choice(workers)], chance, "worker") if workers else NOTHING


async def _memory_of_worker(arena: Arena, chance: random.Random) -> Outcome:
    """It may end; then another one is started."""
    workers = arena.crew.workers()
    if not workers or not arena.server.ready:
        return NOTHING
    pid, logged = chance.choice(workers), log_size(arena)
    arena.crew.starved += 1
    try:
        size = proc.status_field(pid, "VmSize") * 1024
        async with limited(pid, resource.RLIMIT_AS, size + MEMORY_SPARE):
            await asyncio.sleep(chance.uniform(*HOLD_S))
    except (OSError, ValueError):  # it has died meanwhile
        return NOTHING
    await asyncio.sleep(0.3)
    died, told = proc.about(pid) is None, told_of_memory(arena, logged)
    return Outcome(died or told, f"worker {pid} had no more than {size >> 20} MiB: died {died}, said so {told}")
