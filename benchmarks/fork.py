"""Measures a snapshot and a fork, beside a fresh episode of the same task.

    python benchmarks/fork.py [--sandbox local|docker] [--rounds N] [--sandbox-image TAG]

A private server with the model `tiny`, an external agent that does nothing: what is measured is the server and its
sandboxes. Prints a line for each size of the work folder: medians in seconds, from the request to the answer of a
snapshot, and to the status `running` of a fork and of a fresh episode; then the fork as a ratio to the fresh one.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import anyio

from turnstile import AsyncClient
from turnstile._private_server import private_server
from turnstile.client import AsyncNewEpisodeHandle

SIZES = {"empty": (0, 0), "100 files of 10 KB": (100, 10_000), "10 files of 500 KB": (10, 500_000)}


def task_of(files: int, size: int) -> dict[str, Any]:
    inline = {f"file{number}.txt": secrets.token_hex(size // 2) for number in range(files)}
    return {"instruction": "Wait.", "base": {"inline": {"readme.txt": "", **inline}}}


async def timed(work: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    started = time.perf_counter()
    found = await work()
    return time.perf_counter() - started, found


async def measure(client: AsyncClient, task: dict[str, Any], rounds: int) -> tuple[float, float, float]:
    """Median seconds of a fresh episode, a snapshot and a fork, which take turns."""

    async def fresh() -> AsyncNewEpisodeHandle:
        episode = await client.create_episode(task)
        await episode.ready()
        return episode

    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(rounds):
        seconds, episode = await timed(fresh)
        times[0].append(seconds)
        seconds, snapshot = await timed(episode.snapshot)
        times[1].append(seconds)

        async def fork(
            episode: AsyncNewEpisodeHandle = episode, snapshot_id: str = snapshot.snapshot_id
        ) -> AsyncNewEpisodeHandle:
            [child] = await episode.fork(snapshot_id=snapshot_id)
            await child.ready()
            return child

        seconds, child = await timed(fork)
        times[2].append(seconds)
        for each in (child, episode):
            await each.cancel()
    return median(times[0]), median(times[1]), median(times[2])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sandbox", choices=("local", "docker"), default="local")
    parser.add_argument("--sandbox-image")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    flags = ["--model", "tiny", "--sandbox", asked.sandbox]
    flags += ["--sandbox-image", asked.sandbox_image] if asked.sandbox_image else []
    with tempfile.TemporaryDirectory(prefix="turnstile-fork-") as folder:
        data_dir, log = Path(folder, "data"), Path(folder, "server.log")
        async with (
            private_server(flags, data_dir, log) as server,
            AsyncClient(server.url, key=server.key) as client,
        ):
            for name, (files, size) in SIZES.items():
                fresh, snapshot, fork = await measure(client, task_of(files, size), asked.rounds)
                sys.stdout.write(
                    f"{name:20} fresh {fresh:.3f} s  snapshot {snapshot:.3f} s  fork {fork:.3f} s  "
                    f"fork/fresh {fork / fresh:.2f}\n"
                )


if __name__ == "__main__":
    anyio.run(main)
