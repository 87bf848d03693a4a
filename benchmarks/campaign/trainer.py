"""The training side: keeps episodes running through the proxied control API, and remembers what it was told.

Owns the slots, one task each, and the processes of agents outside. A slot creates an episode (with an idempotency
key, tried again until it is answered), lets it be played, waits for its end and hands it to be checked. What it
was told is a promise: an episode that was created exists, one that has ended stays as it ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from campaign.programs import HERE, KEY, inherited

PLAYER = HERE / "specs" / "agent" / "player.py"
DIALECTS = ("chat", "anthropic", "responses", "gemini")
ENDED = ("completed", "failed", "cancelled", "timed_out", "truncated")
EPISODE_S = 60.0
"""``limits.wall_s`` of every episode."""
LONGEST_S = 180.0
"""An episode that has not ended after this, in a server that answers, holds its place for ever."""
CALL_S = 15.0
Json = dict[str, Any]


@dataclass(eq=False)
class Played:
    """One episode as the trainer and its agent know it."""

    episode_id: str
    inside: bool
    plan: Json
    log: Path
    started: float = field(default_factory=time.monotonic)
    created: bool = False
    """The trainer has the 201."""
    ended: tuple[str, float | None] | None = None
    """Status and reward, as the trainer was told."""
    agent: subprocess.Popen[bytes] | None = None
    fingerprint: str | None = None
    """Of the export at its first check."""
    damaged: bool = False
    """Some of its records were damaged on purpose."""
    over: float = float("inf")
    """Monotonic time at which it was over for the trainer."""


class Trainer:
    """``over``: called with each episode that has ended or was given up."""

    def __init__(
        self,
        url: str,
        folder: Path,
        chance: random.Random,
        over: Callable[[Played], Awaitable[None]],
        up: Callable[[], Awaitable[None]],
    ) -> None:
        self._url = url
        self._folder = folder
        self._random = chance
        self._over = over
        self._up = up
        self._pause = asyncio.Event()
        self._slots: list[asyncio.Task[None]] = []
        self._names = iter(range(1, 10_000_000))
        self.running: dict[str, Played] = {}
        self.stuck: list[str] = []
        self.created = 0

    @property
    def agents(self) -> list[subprocess.Popen[bytes]]:
        """Agents outside that still run."""
        found = [played.agent for played in self.running.values() if played.agent is not None]
        return [agent for agent in found if agent.poll() is None]

    def start(self, inside: int, outside: int) -> None:
        self._pause.set()
        for index in range(inside + outside):
            self._slots.append(asyncio.create_task(self._slot(index < inside)))

    async def calm(self) -> None:
        """Returns when no episode runs; none is begun until ``go_on``."""
        self._pause.clear()
        while self.running:
            await asyncio.sleep(0.1)

    def go_on(self) -> None:
        self._pause.set()

    async def stop(self) -> None:
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        for agent in self.agents:
            agent.kill()

    async def _slot(self, inside: bool) -> None:
        while True:
            await self._pause.wait()
            played = self._new(inside)
            self.running[played.episode_id] = played
            try:
                await self._play(played)
            finally:
                if played.agent is not None and played.agent.poll() is None:
                    played.agent.send_signal(signal.SIGCONT)
                    played.agent.kill()
                    await asyncio.to_thread(played.agent.wait)
                self.running.pop(played.episode_id, None)
                played.over = time.monotonic()
            await self._over(played)

    def _new(self, inside: bool) -> Played:
        number = next(self._names)
        plan = {
            "seed": self._random.randrange(1 << 30),
            "dialect": self._random.choice(DIALECTS),
            "steps": self._random.randint(4, 24) if inside else self._random.randint(2, 12),
            "misdeeds": self._random.choice((0.0, 0.1, 0.4)),
            "pause_s": self._random.choice((0.05, 0.3)),
        }
        return Played(f"c{number}", inside, plan, self._folder / f"c{number}.log")

    async def _play(self, played: Played) -> None:
        created = await self._create(played)
        if created is None:
            return
        self.created += 1
        played.created = True
        if not played.inside and created.get("episode_key"):
            await self._play_outside(played, created)
            await self._call(played, "POST", f"/episodes/{played.episode_id}/finish")
        elif not played.inside:
            await self._call(played, "POST", f"/episodes/{played.episode_id}/cancel")
        elif self._random.random() < 0.08:
            await asyncio.sleep(self._random.random() * 3)
            await self._call(played, "POST", f"/episodes/{played.episode_id}/cancel")
        while played.ended is None and not self._too_long(played):
            answer = await self._call(played, "GET", f"/episodes/{played.episode_id}?wait=5")
            if answer is None and time.monotonic() - played.started < LONGEST_S:
                return  # There is no such episode: the check says whether its records were damaged on purpose.
            if answer is not None and answer.get("status") in ENDED:
                played.ended = (answer["status"], answer["reward"])

    def _too_long(self, played: Played) -> bool:
        if time.monotonic() - played.started < LONGEST_S:
            return False
        self.stuck.append(played.episode_id)
        return True

    async def _create(self, played: Played) -> Json | None:
        body = {
            "task": {"instruction": json.dumps(played.plan)},
            "agent": "campaign-agent" if played.inside else "external",
            "episode_id": played.episode_id,
            "idempotency_key": f"key-{played.episode_id}",
            "limits": {"wall_s": EPISODE_S},
        }
        return await self._call(played, "POST", "/episodes", body)

    async def _play_outside(self, played: Played, created: Json) -> None:
        plan = self._folder / f"{played.episode_id}.plan"
        plan.write_text(json.dumps(played.plan))
        env = {**inherited(), "MODEL_URL": created["model_url"], "EPISODE_KEY": created["episode_key"]}
        command = [sys.executable, "-SBs", str(PLAYER), str(plan), str(played.log)]
        played.agent = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        until = time.monotonic() + EPISODE_S + 20
        while played.agent.poll() is None and time.monotonic() < until:
            await asyncio.sleep(0.05)
        os.unlink(plan)

    async def _call(self, played: Played, method: str, path: str, body: Json | None = None) -> Json | None:
        """The answer, asked for again until there is one; None for a refusal that stands, or after too long."""
        while time.monotonic() - played.started < LONGEST_S:
            try:
                async with httpx.AsyncClient(timeout=CALL_S) as client:
                    headers = {"authorization": f"Bearer {KEY}"}
                    answer = await client.request(method, self._url + path, json=body, headers=headers)
                value = answer.json()
            except (httpx.HTTPError, ValueError):
                await asyncio.sleep(0.1)
                await self._up()
                continue
            if answer.status_code < 300 and isinstance(value, dict):
                return value
            if answer.status_code in (408, 429) or answer.status_code >= 500:
                await asyncio.sleep(0.2)
                continue
            return None
        return None
