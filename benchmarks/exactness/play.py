"""Plays one scenario in one dialect through one gateway, and counts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from exactness.agent import Agent, CallFailed, Notes
from exactness.count import Call, Counts, count
from exactness.dialects import Dialect
from exactness.gateway import HOST, Gateway, free_port
from exactness.scenarios import SYSTEM, Scenario

START_S: Final = 60.0
COLLECT_WAIT_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Outcome:
    """``failed``: what the agent was told where it gave up. ``asked``: requests that reached the engine."""

    gateway: str
    dialect: str
    scenario: str
    counts: Counts
    asked: int
    wasted: int
    """Tokens that the engine sampled for replies that no agent went on with."""
    failed: str | None
    first_byte_s: float | None
    whole_s: float | None
    cpu_ms: float | None
    """Of the gateway's processes, per call; None where it was restarted."""


class EngineProcess:
    """The stand-in engine, in a process of its own."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._port = free_port()
        self.url = f"http://{HOST}:{self._port}"
        self._model = model
        self._log = folder / "engine.log"

    def _spawn(self) -> None:
        command = [sys.executable, "-m", "exactness.engine", str(self._model), str(self._port)]
        with self._log.open("wb") as out:
            self._popen = subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=out, stderr=out)

    async def __aenter__(self) -> EngineProcess:
        self._spawn()
        deadline = time.monotonic() + START_S
        async with httpx.AsyncClient() as http:
            while True:
                with suppress(httpx.TransportError):
                    await http.get(f"{self.url}/health")
                    return self
                if self._popen.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the stand-in engine does not start:\n{self._log.read_text()[-2000:]}")
                await asyncio.sleep(0.1)

    async def __aexit__(self, *_: object) -> None:
        self._popen.terminate()
        self._popen.wait()


async def play(engine_url: str, gateway: Gateway, scenario: Scenario, dialect: Dialect) -> Outcome:
    """Begins a run of the engine's plan, plays an episode and counts what is collected of it."""
    notes, failed, restarted = Notes(), None, False

    async def restart() -> None:
        nonlocal restarted
        restarted = True
        await gateway.process.kill_and_restart()

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_keepalive_connections=0)) as http:
        (await http.post(f"{engine_url}/bench/plan", json=scenario.plan.to_json())).raise_for_status()
        episode, endpoint = await gateway.open_episode()
        agent = Agent(http, endpoint, dialect, notes, SYSTEM)
        before = gateway.process.cpu_s()
        try:
            await scenario.play(agent, restart)
        except CallFailed as error:
            failed = str(error)
        except httpx.TransportError as error:
            failed = type(error).__name__
        except (KeyError, IndexError, TypeError, ValueError) as error:
            failed = f"a reply that cannot be read: {type(error).__name__} {error}"
        cpu_ms = None if restarted else 1e3 * (gateway.process.cpu_s() - before) / max(1, notes.calls)
        await asyncio.sleep(COLLECT_WAIT_S)
        rows = await gateway.collect(episode)
        engine_calls: list[dict[str, Any]] = (await http.get(f"{engine_url}/bench/calls")).json()
    calls = [Call.from_json(each) for each in engine_calls]
    wasted = sum(len(call.ids) for call in calls if call.name not in notes.given)
    counts = count(rows, calls, notes.given)
    times = notes.first_byte_s, notes.whole_s
    return Outcome(gateway.name, dialect.name, scenario.name, counts, len(calls), wasted, failed, *times, cpu_ms)
