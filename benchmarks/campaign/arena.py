"""One backend under fire: a server, its engine, the proxies between all parties, the players, the checks.

Owns everything it starts. The trainer, the agents outside and the server's own calls go through proxies; the
checks go past them. An episode is checked when it has ended, and every stored one again at the end.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from campaign import leftovers
from campaign.checker import Counts, Export, Finding, Verdict, check_episode, fingerprint
from campaign.clock import Clock
from campaign.crew import Crew
from campaign.docker_engine import DockerEngine
from campaign.proc import mount_memory, unmount
from campaign.programs import KEY, ServerSettings, engine_program, free_port, server_program
from campaign.trainer import ENDED, LONGEST_S, Played, Trainer
from campaign.truth import Acknowledged, AgentLog, EngineLog, read_agent_log
from campaign.wire import Wire, to_tcp, to_unix

DISK_BYTES = 1 << 30
CALM_S = 45.0
"""So long after the last episode everything must be given back."""
FETCH_S = 180.0
"""So long an answer is waited for while faults go on: a server is killed every half minute, and each start, and
each fault that holds it, counts. Sixty seconds were too short on a machine that others kept busy."""
INSIDE, OUTSIDE = 3, 4
"""Episodes at once with an agent in a sandbox, and outside."""


class Arena:
    """``mounts``: the data directory may be a file system of its own, so that it can be full."""

    def __init__(
        self,
        backend: str,
        folder: Path,
        seed: int,
        *,
        workers: int = 1,
        mounts: bool,
        docker_host: str | None = None,
        docker_image: str | None = None,
    ) -> None:
        self.backend = backend
        self.folder = folder
        self.chance = random.Random(f"{seed} {backend}")
        self.mounts = mounts
        self.wires = {name: Wire(name, to_tcp(0), self.chance) for name in ("control", "agent", "engine")}
        self.counts = Counts()
        self.findings: list[Finding] = []
        self.played: dict[str, Played] = {}
        self.agent_logs = Counter[str]()
        self.damage: list[Any] = []
        """Callables that damage files just before the next start of the server."""
        self.changed_inside: list[float] = []
        """When bytes on a sandbox's own socket were changed."""
        self._engine_log = EngineLog(folder / "truth.jsonl")
        self._checked = Counter[str]()
        engine_port = free_port()
        self.engine = engine_program(folder, engine_port, folder / "truth.jsonl", seed)
        self._engine_port = engine_port
        self.settings = ServerSettings(
            backend=backend,
            workers=workers,
            folder=folder,
            control_port=free_port(),
            agent_port=free_port(),
            engine_urls=(),
            public_url="",
            docker_host=None,
            docker_image=docker_image,
            clock=Clock(folder),
            transport=lambda: self.chance.choice(("bind", "stream")),
        )
        self.crew = Crew(workers, lambda: self.server.pid)
        self.docker = None if docker_host is None else DockerEngine(docker_host, self.settings.data)

    async def start(self) -> None:
        for name in ("data", "tmp", "logs"):
            (self.folder / name).mkdir()
        if self.mounts:
            mount_memory(self.settings.data, DISK_BYTES)
        targets = {
            "control": self.settings.control_port,
            "agent": self.settings.agent_port,
            "engine": self._engine_port,
        }
        ports = {}
        for name, port in targets.items():
            self.wires[name] = Wire(name, to_tcp(port), self.chance)
            ports[name] = await self.wires[name].listen_tcp()
        docker_host = None
        if self.docker is not None:
            self.wires["docker"] = Wire("docker", to_unix(self.docker.socket), self.chance)
            await self.wires["docker"].listen_unix(str(self.folder / "d.sock"))
            docker_host = f"unix://{self.folder}/d.sock"
        self.settings = replace(
            self.settings,
            engine_urls=(f"http://127.0.0.1:{ports['engine']}",),
            public_url=f"http://127.0.0.1:{ports['agent']}",
            docker_host=docker_host,
        )
        self.server = server_program(self.settings)
        self.server.before_start = self._damage_files
        self.server.excuse = self._no_start
        control = f"http://127.0.0.1:{ports['control']}"
        self.trainer = Trainer(control, self.folder / "logs", self.chance, self._over, self.up)
        try:
            await self.engine.start()
            await self.server.start()
        except BaseException:
            await self.clear()
            raise
        self.trainer.start(INSIDE, OUTSIDE)

    def _damage_files(self) -> None:
        damage, self.damage = self.damage, []
        for each in damage:
            each()

    def _no_start(self, started: float) -> str | None:
        """A server that reads nonsense from its engine, or cannot reach Docker, refuses to start, as it should."""
        docker = self.wires.get("docker")
        if docker is not None and (docker.refusing or max(docker.refused_at, docker.spoiled_at) >= started):
            return "Docker's wire was spoiled or closed"
        return "the engine's wire was spoiled" if self.wires["engine"].spoiled_at >= started else None

    async def up(self) -> None:
        """Returns when the server is ready."""
        await self.server.wait_ready()

    async def get(self, path: str, patience_s: float = FETCH_S) -> httpx.Response:
        """Past the proxies, asked for again while the server cannot answer. Raises TimeoutError."""
        async with asyncio.timeout(patience_s):
            while True:
                await self.up()
                try:
                    async with httpx.AsyncClient(timeout=10) as client:
                        headers = {"authorization": f"Bearer {KEY}", "accept": "application/json"}
                        answer = await client.get(self.settings.control_url + path, headers=headers)
                except httpx.HTTPError:
                    await asyncio.sleep(0.1)
                    continue
                if answer.status_code < 500:
                    return answer
                await asyncio.sleep(0.2)

    async def metrics(self, patience_s: float = FETCH_S) -> dict[str, float]:
        """Sums over labels, by name. Raises TimeoutError."""
        totals: dict[str, float] = {}
        for line in (await self.get("/metrics", patience_s)).text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    # The checks

    async def _over(self, played: Played) -> None:
        if played.created:
            self.played[played.episode_id] = played
            await self.check(played)

    async def check(self, played: Played) -> None:
        """Holds the episode's export against what its agent and the engine wrote down."""
        try:
            export = await self._export(played)
        except TimeoutError:
            self.find("left behind", played.episode_id, f"its export was not given within {FETCH_S:g} s")
            return
        if isinstance(export, httpx.Response):
            if not played.damaged:
                answered = f"{export.request.url.path} answered {export.status_code}: {export.text[:200]}"
                self.find("lost", played.episode_id, f"the trainer was told that it exists; {answered}")
            return
        log = self._log_of(played, export)
        self._engine_log.read_on()
        acknowledged = self._acknowledged(played, log)
        found = check_episode(export, self._engine_log, acknowledged, self.counts, played.damaged)
        for marks in log.twice:
            if len(set(marks)) > 1 and acknowledged == log.got:
                self.find("doubled", played.episode_id, f"one idempotency key was answered with {marks}")
        for tool in log.bad_tools:
            self.find("wrong", played.episode_id, f"a tool's result: {tool}")
        status = (export.episode["status"], export.episode["reward"])
        if played.ended is not None and status != played.ended and not played.damaged:
            self.find("wrong", played.episode_id, f"the trainer was told {played.ended}; now it is {status}")
        now = fingerprint(export)
        if played.ended is not None and played.fingerprint not in (None, now) and not played.damaged:
            self.find("wrong", played.episode_id, "its turns changed after it had ended")
        if played.ended is not None:
            played.fingerprint = now
        self.findings += [each for each in found if each not in self.findings]
        if not self._checked[played.episode_id]:
            self.agent_logs.update(f"agent.{kind}" for kind in log.misdeeds)
            self.agent_logs.update({"agent.twice": len(log.twice), "tool calls": log.tools})
        self._checked[played.episode_id] += 1

    async def _export(self, played: Played) -> Export | httpx.Response:
        """The answer where it is a refusal."""
        path = f"/episodes/{played.episode_id}"
        episode = await self.get(path)
        # The trainer may have been refused for a request that was changed on its way; the episode runs on.
        while episode.status_code == 200 and episode.json()["status"] not in ENDED:
            if time.monotonic() - played.started > LONGEST_S:
                self.find("left behind", played.episode_id, "it did not end: it holds its place")
                break
            episode = await self.get(f"{path}?wait=1")
        if episode.status_code == 404:
            return episode
        turns = await self.get(path + "/turns")
        samples = await self.get(path + "/samples?include_untrained=true")
        for answer in (turns, samples):
            if answer.status_code != 200:
                return answer
        return Export(episode.json(), turns.json()["turns"], samples.json())

    def _log_of(self, played: Played, export: Export) -> AgentLog:
        if played.inside:
            return read_agent_log((export.episode.get("agent_output") or "").splitlines(), "output")
        lines = played.log.read_text(errors="replace").splitlines() if played.log.exists() else []
        return read_agent_log(lines, "log")

    def _acknowledged(self, played: Played, log: AgentLog) -> list[Acknowledged]:
        """What the agent got whole. What came over a connection whose bytes were changed proves nothing."""
        if not played.inside:
            changed = {port for port, at in self.wires["agent"].changed if at >= played.started}
            return [reply for reply in log.got if reply.port not in changed]
        docker = self.wires.get("docker")
        times = [*self.changed_inside, *(at for _, at in (docker.changed if docker is not None else ()))]
        if any(played.started <= at <= played.over for at in times):
            return []
        replies = {(reply.mark, reply.sha): reply for reply in self._engine_log.acknowledged(played.episode_id)}
        return list((replies | {(reply.mark, reply.sha): reply for reply in log.got}).values())

    def find(self, verdict: Verdict, where: str, what: str) -> None:
        finding = Finding(verdict, where, what)
        if finding not in self.findings:
            self.findings.append(finding)

    # Calm, and the end

    async def calm(self) -> None:
        """Lets every episode end, then looks for what was not given back, and whether a new one is served."""
        await self.trainer.calm()
        await self.up()
        pid = self.server.pid
        started = time.monotonic()
        while left := await leftovers.while_serving(self):
            if time.monotonic() - started > CALM_S or self.server.pid != pid:
                break
            await asyncio.sleep(0.5)
        if self.server.pid == pid and pid is not None:
            for what in left:
                self.find("left behind", f"{self.backend} (it serves, no episode runs)", what)
        self.trainer.go_on()

    async def clear(self) -> None:
        """Ends what still runs, of a campaign that was cut off, and removes what stays by design."""
        for program in (self.server, self.engine):
            program.abandon()
        await self.trainer.stop()
        for wire in self.wires.values():
            await wire.close()
        if self.docker is not None:
            await self.docker.clear()
        if self.mounts:
            unmount(self.settings.data)

    async def finish(self) -> None:
        """Ends everything in good order, with each stored episode checked once more after a last restart."""
        await self.trainer.calm()
        self.settings.clock.jump(0)
        await self.trainer.stop()
        for episode_id in self.trainer.stuck:
            self.find("left behind", episode_id, "it did not end: it holds its place")
        self.server.expected_death = "restart before the last check"
        if self.server.pid is not None:
            leftovers.kill(self.server.pid)
        await asyncio.sleep(0.2)
        await self.up()
        for played in list(self.played.values()):
            await self.check(played)
        code = await self.server.stop()
        if code != 0:
            self.find("left behind", "server", f"SIGTERM ended it with {code}: {self.server.last_lines(3)}")
        for name, program in (("server", self.server), ("engine", self.engine)):
            for why in program.unexpected:
                self.find("left behind", name, why)
        for why in self.crew.unexpected_deaths(self.server.log):
            self.find("left behind", "server", why)
        await self.engine.stop()
        for wire in self.wires.values():
            await wire.close()
        for what in await leftovers.after_the_end(self):
            self.find("left behind", self.backend, what)
