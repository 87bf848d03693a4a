"""What faults of processes have in common: the outcome with its proof, and the hits on a process by its id."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from campaign import proc
from campaign.arena import Arena

STOP_S = (0.2, 3.0)
HOLD_S = (0.5, 2.5)
MEMORY_SPARE = 1 << 20
MEMORY_WORDS = ("MemoryError", "allocate", "Cannot allocate")


@dataclass(frozen=True)
class Outcome:
    effect: bool
    proof: str


@dataclass(frozen=True)
class Fault:
    """``weight``: how often it is drawn, relative to the others."""

    name: str
    weight: float
    run: Callable[[Arena, random.Random], Awaitable[Outcome]]


NOTHING = Outcome(False, "there was nothing to hit")


async def frozen(pids: list[int], chance: random.Random, who: str) -> Outcome:
    seconds = chance.uniform(*STOP_S)
    stopped = [pid for pid in pids if proc.send_signal(pid, signal.SIGSTOP)]
    try:
        await asyncio.sleep(0.05)
        proven = [pid for pid in stopped if proc.state(pid) == "T"]
        await asyncio.sleep(seconds)
    finally:
        for pid in stopped:
            proc.send_signal(pid, signal.SIGCONT)
    return Outcome(bool(proven), f"{who} {proven} did not run for {seconds:.1f} s")


@contextlib.asynccontextmanager
async def limited(pid: int, which: int, soft: int) -> AsyncIterator[None]:
    before = proc.set_soft_limit(pid, which, soft)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ProcessLookupError):
            proc.set_soft_limit(pid, which, before)


def told_of_memory(arena: Arena, logged: int) -> bool:
    return any(word in log_since(arena, logged) for word in MEMORY_WORDS)


def log_size(arena: Arena) -> int:
    return arena.server.log.stat().st_size


def log_since(arena: Arena, size: int) -> str:
    with arena.server.log.open("rb") as file:
        file.seek(size)
        return file.read(1 << 20).decode("utf-8", "replace")
