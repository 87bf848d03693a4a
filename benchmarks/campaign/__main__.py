"""Plays faults against a whole server and holds its export against what really happened.

    python benchmarks/campaign [--minutes M] [--seed N] [--backends local[:N] docker[:N]] [--faults K] [--out DIR]

The faults, the agents' plans and what is damaged follow from the seed; their exact moments do not. ``--faults``
stops after so many, to play the beginning of a campaign again. Prints a report, and writes it (``campaign.json``)
with all logs into the folder of ``--out``. Exit code: 0 sound; 1 something was lost, doubled, wrong or left
behind; 2 it could not be played here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a folder, its parent is not on the path

from campaign.arena import Arena
from campaign.crew import KILL_WORKER
from campaign.faults import catalogue
from campaign.hits import Fault, Outcome
from campaign.proc import own_mounts
from campaign.report import BackendReport, Report

AT_ONCE = 3
"""Faults at once per backend."""
PAUSE_S = (0.0, 1.0)
WHILE_STARTING = 0.1
"""Share of the faults that do not wait until the server serves."""
CALM_EVERY_S = 75.0
LONGEST_FAULT_S = 200.0


class CannotPlayError(Exception):
    """Nothing can be learned of the server here: why."""


class Campaign:
    """One backend's faults. ``until``: monotonic time at which no more are drawn."""

    def __init__(self, arena: Arena, report: BackendReport, until: float, most: int | None) -> None:
        self._arena = arena
        self._report = report
        self._until = until
        self._most = most
        self._log = (arena.folder / "faults.jsonl").open("a")
        self._calm = asyncio.Lock()

    async def run(self) -> None:
        arena, report = self._arena, self._report
        try:
            await arena.start()
        except TimeoutError:
            told = f"the first server was not ready in time; its log ends: {arena.server.last_lines(5)}"
            raise CannotPlayError(f"{report.backend}: {told}") from None
        faults = catalogue(arena)
        report.not_possible = [
            what
            for what, possible in (
                ("disk.full", arena.mounts),
                ("clock.jump", arena.settings.clock.works),
            )
            if not possible
        ]
        try:
            await asyncio.gather(*(self._drive(faults) for _ in range(AT_ONCE)), self._calm_down())
            await arena.finish()
        finally:
            await arena.clear()
        report.counts, report.findings = arena.counts, arena.findings
        report.played, report.episodes = arena.agent_logs, len(arena.played)
        report.starts = {"server": arena.server.starts, "engine": arena.engine.starts}

    def _over(self) -> bool:
        return time.monotonic() > self._until or (
            self._most is not None and self._report.drawn.total() >= self._most
        )

    async def _drive(self, faults: list[Fault]) -> None:
        chance = self._arena.chance
        while not self._over():
            fault = chance.choices(faults, [each.weight for each in faults])[0]
            if self._report.workers > 1 and not self._report.drawn:
                fault = next(each for each in faults if each.name == KILL_WORKER)  # the one that must not miss
            self._report.drawn[fault.name] += 1
            async with self._calm:
                pass  # faults wait for the calm, not for each other
            if chance.random() > WHILE_STARTING:
                await self._arena.up()
            await self._play(fault, random.Random(chance.random()))
            await asyncio.sleep(chance.uniform(*PAUSE_S))

    async def _play(self, fault: Fault, chance: random.Random) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(LONGEST_FAULT_S):
                outcome = await fault.run(self._arena, chance)
        except TimeoutError:
            log = self._arena.server.last_lines(3)
            self._arena.find("left behind", "server", f"{fault.name}: the server did not come back: {log}")
            outcome = Outcome(True, "the server did not come back")
        self._report.effective[fault.name] += outcome.effect
        line = {
            "number": self._report.drawn.total(),
            "fault": fault.name,
            "at": round(started, 3),
            "seconds": round(time.monotonic() - started, 3),
            "effect": outcome.effect,
            "proof": outcome.proof,
        }
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()
        for finding in self._arena.findings:
            self._report.first_fault.setdefault(str(finding), self._report.drawn.total())

    async def _calm_down(self) -> None:
        last = time.monotonic()
        while not self._over():
            await asyncio.sleep(0.5)
            if time.monotonic() - last > CALM_EVERY_S:
                async with self._calm:
                    await self._arena.calm()
                last = time.monotonic()


async def play(options: argparse.Namespace, folder: Path, mounts: bool) -> Report:
    started = time.monotonic()
    until = started + options.minutes * 60
    report = Report(
        options.seed, options.minutes, [BackendReport(name, kind_of(name)[1]) for name in options.backends]
    )
    campaigns = []
    for each, (backend, workers) in zip(report.backends, map(kind_of, options.backends), strict=True):
        below = folder / (backend[0] if workers == 1 else f"{backend[0]}{workers}")
        below.mkdir()
        arena = Arena(
            backend,
            below,
            options.seed,
            workers=workers,
            mounts=mounts,
            docker_host=options.docker_host if backend == "docker" else None,
            docker_image=options.image,
        )
        campaigns.append(Campaign(arena, each, until, options.faults))
    async with asyncio.TaskGroup() as group:
        for campaign in campaigns:
            group.create_task(campaign.run())
    report.seconds = time.monotonic() - started
    return report


def known_backend(text: str) -> str:
    """``local`` or ``docker``, or either ``:N`` with N workers. Raises ArgumentTypeError."""
    if re.fullmatch(r"(local|docker)(:[1-9])?", text) is None:
        raise argparse.ArgumentTypeError(
            f"{text} is neither local nor docker, nor one of them with :N (N workers, up to 9)"
        )
    return text


def kind_of(backend: str) -> tuple[str, int]:
    """The kind of sandboxes, and the number of workers."""
    kind, _, workers = backend.partition(":")
    return kind, int(workers or 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaign", description="Faults against a whole server, and a checker.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backends", nargs="+", type=known_backend, default=["local"])
    parser.add_argument("--faults", type=int, help="stop after so many faults per backend")
    parser.add_argument("--docker-host", default=os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"))
    parser.add_argument("--image", default=os.environ.get("TURNSTILE_TEST_IMAGE", "turnstile-test:python"))
    parser.add_argument("--out", type=Path, help="where logs and the report are kept")
    options = parser.parse_args()
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each write to a connection that was cut
    try:
        own_mounts()
        mounts = True
    except OSError:
        mounts = False
    folder = Path(tempfile.mkdtemp(prefix="tc-"))
    try:
        failed: tuple[BaseException, ...] = ()
        try:
            report = asyncio.run(play(options, folder, mounts))
        except* CannotPlayError as errors:
            failed = errors.exceptions
        for error in failed:
            print(f"NOT PLAYED: {error}", flush=True)
        if failed:
            return 2
        command = f"python benchmarks/campaign --seed {options.seed} --backends {' '.join(options.backends)}"
        print(report.as_text(command), flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "campaign.json").write_text(json.dumps(report.as_json(), indent=1) + "\n")
        return 0 if report.sound else 1
    finally:
        if options.out is not None:
            keep_logs(folder, options.out)
        shutil.rmtree(folder, ignore_errors=True)


def keep_logs(folder: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for log in [*folder.glob("*/*.log"), *folder.glob("*/*.jsonl")]:
        shutil.copy(log, out / f"{log.parent.name}-{log.name}")


if __name__ == "__main__":
    sys.exit(main())
