"""What a model call costs on its way to the engine and back: the fleet, the engine's client, HTTP.

    python benchmarks/engine_calls.py [--lengths N …] [--calls N] [--slices N]

The mock engine of the gate's benchmark runs as a process of its own and answers at once with 40 tokens. Each call
has the same history and 250 new ids, as a turn of an agent has. Printed for each length, streamed and not: the
process's CPU time of a call in microseconds (the quietest quarter of slices), and its Python calls (cProfile).

Needs Linux. The numbers hold for one run on one machine; compare two states of the code in turns.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import uvloop

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

from gate_parts.servers import free_port  # noqa: E402
from local import tiny_model  # noqa: E402
from turnstile.models import Int32Array, new_id  # noqa: E402
from turnstile_server.engines.fleet.fleet import Fleet  # noqa: E402
from turnstile_server.engines.protocol import CallOrigin, EngineSampling  # noqa: E402
from turnstile_server.engines.sglang.engine import SGLangEngine  # noqa: E402
from turnstile_server.engines.versions import WeightVersions  # noqa: E402
from turnstile_server.settings import EngineSettings, FleetSettings  # noqa: E402

NEW = 250
SAMPLING = EngineSampling(max_new_tokens=64)


@asynccontextmanager
async def fleet_on_mock(model: Path) -> AsyncIterator[Fleet]:
    port = free_port()
    with subprocess.Popen(  # noqa: ASYNC220 - before anything runs
        [sys.executable, "-m", "gate_parts.engine", str(model), str(port)], cwd=HERE
    ) as mock:
        settings = EngineSettings(kind="sglang")
        engine = SGLangEngine(f"http://127.0.0.1:{port}", settings, vocab_size=4160)
        fleet = Fleet([(None, engine)], settings, FleetSettings(), WeightVersions())
        try:
            await fleet.start()
            yield fleet
        finally:
            await fleet.close()
            mock.terminate()


class Calls:
    """Calls with ``length`` ids of history."""

    def __init__(self, fleet: Fleet, length: int) -> None:
        self._fleet = fleet
        self._random = np.random.default_rng(length)
        self._history = self._random.integers(0, 4096, length, dtype=np.int32)
        self._origin = CallOrigin(new_id("ep"))

    def prompt(self) -> Int32Array:
        return np.concatenate([self._history, self._random.integers(0, 4096, NEW, dtype=np.int32)])

    async def run(self, prompts: list[Int32Array], *, stream: bool) -> None:
        for ids in prompts:
            count = 0
            async for chunk in self._fleet.generate(
                ids, SAMPLING, rid=new_id("call"), origin=self._origin, stream=stream
            ):
                count += len(chunk.ids)
            assert count == 40, count


async def measured(lengths: list[int], calls: int, slices: int) -> None:
    async with fleet_on_mock(tiny_model()) as fleet:
        print("tokens   streamed   CPU µs/call   best   Python calls")
        for length in lengths:
            for stream in (False, True):
                ways = Calls(fleet, length)
                await ways.run([ways.prompt() for _ in range(5)], stream=stream)
                spent = []
                for _ in range(slices):
                    prompts = [ways.prompt() for _ in range(calls)]
                    began = time.process_time()
                    await ways.run(prompts, stream=stream)
                    spent.append((time.process_time() - began) / calls * 1e6)
                prompts = [ways.prompt() for _ in range(calls)]
                profile = cProfile.Profile()
                with profile:
                    await ways.run(prompts, stream=stream)
                counted = sum(row[1] for row in pstats.Stats(profile).stats.values()) / calls  # type: ignore[attr-defined]
                print(
                    f"{length:>6}   {'yes' if stream else 'no':>8}   {np.quantile(spent, 0.25):>11.0f}   "
                    f"{min(spent):>4.0f}   {counted:>12.0f}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_000, 8_000, 128_000])
    parser.add_argument("--calls", type=int, default=40, help="of one slice")
    parser.add_argument("--slices", type=int, default=12)
    options = parser.parse_args()
    uvloop.run(measured(options.lengths, options.calls, options.slices))


if __name__ == "__main__":
    main()
