"""A fleet under fire: rollouts over several servers and engines, each of which is killed once.

    cd benchmarks && python -m campaign.fleet [--rollouts 500] [--servers 3] [--engines 2] [--seed N] [--out DIR]

One client plays all rollouts by a file of addresses, as a trainer does. Every server and every engine gets one
``kill -9``, each when a random share of the rollouts has been given, and is started again at once. In the end:

- every rollout was given once, and none was given up;
- no generation is trained by two of the rollouts that were given;
- the export of every episode of every server, those of lost attempts among them, is what the engines and the
  agents wrote down (``checker.py``);
- nothing is left.

Prints a report; the last line is that of a campaign. Exit code: 0 sound; 1 not; 2 it could not be played here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from campaign import leftovers
from campaign.checker import Counts, Export, Finding, Verdict, check_episode
from campaign.clock import Clock
from campaign.programs import KEY, Program, ServerSettings, engine_program, free_port, server_program
from campaign.report import VERDICTS
from campaign.trainer import DIALECTS, ENDED
from campaign.truth import EngineLog, read_agent_log
from turnstile import AsyncClient, ClientSettings, FileServers
from turnstile.rollout import Rollout

AT_ONCE = 24
PER_GROUP = 4
WALL_S = 90.0
RETRIES = 10
KILLED_BETWEEN = (0.05, 0.85)
"""Shares of the rollouts that have been given when a part is killed."""
LONGEST_S = 3600.0


@dataclass(eq=False)
class Kill:
    """``at``: rollouts that have been given by then."""

    program: Program
    at: int
    done: bool = False


@dataclass
class Soak:
    """What came of it. ``given``: the rollouts by group and index, as they were given."""

    given: Counter[tuple[str, int]] = field(default_factory=Counter)
    trained: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    counts: Counts = field(default_factory=Counts)
    findings: list[Finding] = field(default_factory=list)

    def find(self, verdict: Verdict, where: str, what: str) -> None:
        self.findings.append(Finding(verdict, where, what))


class FleetUnderFire:
    """Owns the processes of the fleet and its folder."""

    def __init__(self, folder: Path, seed: int, servers: int, engines: int) -> None:
        self._folder = folder
        self._chance = random.Random(seed)
        ports = [free_port() for _ in range(engines)]
        logs = [folder / f"truth-{number}.jsonl" for number in range(engines)]
        self._log = EngineLog(*logs)
        self._engines = [
            engine_program(folder, port, log, seed + 1_000_000 * number, f"engine-{number}")
            for number, (port, log) in enumerate(zip(ports, logs, strict=True))
        ]
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        self._settings = [self._server_settings(folder / f"s{number}", urls) for number in range(servers)]
        self._servers = [server_program(settings) for settings in self._settings]
        self.parts = [*self._engines, *self._servers]

    @staticmethod
    def _server_settings(folder: Path, engine_urls: tuple[str, ...]) -> ServerSettings:
        agent_port = free_port()
        for name in ("data", "tmp"):
            (folder / name).mkdir(parents=True)
        return ServerSettings(
            backend="local",
            workers=1,
            folder=folder,
            control_port=free_port(),
            agent_port=agent_port,
            engine_urls=engine_urls,
            public_url=f"http://127.0.0.1:{agent_port}",
            docker_host=None,
            docker_image=None,
            clock=Clock(folder),
            transport=lambda: "bind",
        )

    async def start(self) -> None:
        for part in self.parts:
            await part.start()
        lines = [settings.control_url for settings in self._settings]
        (self._folder / "servers").write_text("\n".join(lines) + "\n")

    async def play(self, wanted: int, soak: Soak) -> None:
        """All rollouts, while every part is killed once."""
        kills = [Kill(part, int(wanted * self._chance.uniform(*KILLED_BETWEEN))) for part in self.parts]
        tasks = [{"instruction": json.dumps(self._plan())} for _ in range(wanted // PER_GROUP)]
        source = FileServers(self._folder / "servers")
        async with AsyncClient(source, key=KEY, settings=ClientSettings(backoff_max_s=2.0)) as client:
            rollouts = client.rollouts(
                tasks,
                agent="campaign-agent",
                n=PER_GROUP,
                max_concurrent=AT_ONCE,
                retries=RETRIES,
                limits={"wall_s": WALL_S},
            )
            async for rollout in rollouts:
                self._take(rollout, soak)
                for kill in kills:
                    if not kill.done and soak.given.total() >= kill.at:
                        await self._kill(kill)
        for kill in kills:
            if not kill.done:
                soak.find("left behind", kill.program.name, "it was never killed: nothing was tried")
        if len(soak.given) != len(tasks) * PER_GROUP:
            soak.find("lost", "rollouts", f"{len(soak.given)} of {len(tasks) * PER_GROUP} were given")
        for (group, index), times in soak.given.items():
            if times > 1:
                soak.find("doubled", f"{group}/{index}", f"the rollout was given {times} times")

    def _plan(self) -> dict[str, Any]:
        return {
            "seed": self._chance.randrange(1 << 30),
            "dialect": self._chance.choice(DIALECTS),
            "steps": self._chance.randint(3, 8),
            "misdeeds": self._chance.choice((0.0, 0.1)),
            "pause_s": 0.05,
        }

    @staticmethod
    async def _kill(kill: Kill) -> None:
        await kill.program.wait_ready()
        pid = kill.program.pid
        if pid is not None:
            kill.program.expected_death = "killed once"
            leftovers.kill(pid)
            kill.done = True

    def _take(self, rollout: Rollout, soak: Soak) -> None:
        soak.given[rollout.group_id, rollout.index] += 1
        soak.repeated += rollout.attempts - 1
        if rollout.failed:
            soak.find("lost", rollout.rollout_id, f"it was given up: {rollout.error}")
        if rollout.samples is None:
            return
        self._log.read_on()
        for sample in rollout.samples.samples:
            for span in sample.turn_spans:
                logprobs = sample.logprobs[span.start : span.end].tolist()
                sampled = self._log.of(logprobs, sample.episode_id) if span.trained else None
                if sampled is not None:
                    soak.trained[sampled.mark] += 1

    async def check(self, soak: Soak) -> None:
        """Holds every stored episode of every server against the logs."""
        for mark, times in soak.trained.items():
            if times > 1:
                soak.find("doubled", f"[n:{mark}]", f"{times} rows of the rollouts train it")
        self._log.read_on()
        headers = {"authorization": f"Bearer {KEY}", "accept": "application/json"}
        for server, settings in zip(self._servers, self._settings, strict=True):
            await server.wait_ready()
            async with httpx.AsyncClient(base_url=settings.control_url, headers=headers, timeout=60) as api:
                for episode_id in await self._episodes(api):
                    await self._check(api, episode_id, soak)

    @staticmethod
    async def _episodes(api: httpx.AsyncClient) -> list[str]:
        found: list[str] = []
        cursor: str | None = None
        while True:
            page = (await api.get("/episodes", params={"cursor": cursor} if cursor else {})).json()
            found += [episode["episode_id"] for episode in page["episodes"]]
            cursor = page.get("cursor")
            if cursor is None:
                return found

    async def _check(self, api: httpx.AsyncClient, episode_id: str, soak: Soak) -> None:
        path = f"/episodes/{episode_id}"
        answers = [await api.get(path + end) for end in ("?wait=60", "/turns", "/samples?include_untrained=true")]
        for answer in answers:
            if answer.status_code != 200:
                soak.find("lost", episode_id, f"{answer.request.url.path} answered {answer.text[:200]}")
                return
        episode, turns, samples = (answer.json() for answer in answers)
        if episode["status"] not in ENDED:
            soak.find("left behind", episode_id, "it did not end: it holds its place")
        log = read_agent_log((episode.get("agent_output") or "").splitlines(), "output")
        got = {(reply.mark, reply.sha): reply for reply in [*self._log.acknowledged(episode_id), *log.got]}
        soak.findings += check_episode(
            Export(episode, turns["turns"], samples), self._log, list(got.values()), soak.counts
        )

    async def finish(self, soak: Soak) -> None:
        """Ends everything in good order, and looks for what is left."""
        for part in [*self._servers, *self._engines]:
            code = await part.stop()
            if code != 0 and part in self._servers:
                soak.find("left behind", part.name, f"SIGTERM ended it with {code}: {part.last_lines(3)}")
            for why in part.unexpected:
                soak.find("left behind", part.name, why)
        for pid, command in leftovers.of_folder(self._folder):
            soak.find("left behind", "process", f"{pid}: {command}")
        for settings in self._settings:
            for path in settings.run_dir.rglob(leftovers.SANDBOXES):
                soak.find("left behind", settings.folder.name, f"folder {path.name} in run_dir")

    def abandon(self) -> None:
        for part in self.parts:
            part.abandon()


async def play(options: argparse.Namespace, folder: Path, soak: Soak) -> None:
    """Raises TimeoutError where the fleet does not start, or the rollouts do not end."""
    fleet = FleetUnderFire(folder, options.seed, options.servers, options.engines)
    try:
        await fleet.start()
        async with asyncio.timeout(LONGEST_S):
            await fleet.play(options.rollouts, soak)
        await fleet.check(soak)
        await fleet.finish(soak)
    finally:
        fleet.abandon()


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaign.fleet", description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=500)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where the logs are kept")
    options = parser.parse_args()
    folder, soak, started = Path(tempfile.mkdtemp(prefix="tf-")), Soak(), time.monotonic()
    try:
        try:
            asyncio.run(play(options, folder, soak))
        except TimeoutError as error:
            print(f"NOT PLAYED: {error or 'the fleet was not ready, or did not end, in time'}", flush=True)
            return 2
        for finding in soak.findings:
            print(finding)
        counts = soak.counts
        print(
            f"fleet: {options.servers} servers, {options.engines} engines, each killed once; {len(soak.given)} "
            f"rollouts, {soak.repeated} further attempts; {counts.episodes} episodes, {counts.acknowledged} "
            f"replies that agents got, {counts.turns} turns, {counts.tokens} tokens held against each other; "
            f"{time.monotonic() - started:.0f} s"
        )
        found = Counter[str](finding.verdict for finding in soak.findings)
        sound = not soak.findings and counts.acknowledged > 0
        numbers = ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS)
        print(f"{'sound' if sound else 'NOT SOUND'}: {numbers}", flush=True)
        return 0 if sound else 1
    finally:
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            for log in [*folder.rglob("*.log"), *folder.glob("*.jsonl")]:
                shutil.copy(log, options.out / f"{log.parent.name}-{log.name}")
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
