"""Checks that the thin client stays thin: it costs little beside what it stands on, and under 60 MB.

    python scripts/client_budget.py

Installs this project without extras (at the versions of uv.lock) into a new virtual environment, so that an
import of anything that the base install lacks fails here. Measured in fresh interpreters: the time to import
both clients as a multiple of the time to import asyncio, httpx, NumPy and pydantic with one empty model, and the
peak memory of the whole process. Times are the processor's, which do not grow with what else runs. Both are taken
in turns and the multiple is the median of the pairs': a machine is not equally fast all the time, and one that was
fast for a single run of either would decide the ratio of their best.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MAX_RATIO = 1.6
MAX_MEGABYTES = 60.0
RUNS = 15

BELOW = (
    "import asyncio, httpx, numpy; from pydantic import BaseModel, StringConstraints, TypeAdapter; "
    "type('Model', (BaseModel,), {})"
)
"""What no such client can do without. ``import pydantic`` alone loads next to nothing: its names come late, and
the last of it with the first model."""
CLIENT = "from turnstile import AsyncClient, Client"

# VmHWM rather than ru_maxrss, which a new process inherits from the one that started it.
MEASURE = """
import time; started = time.process_time()
{statement}
seconds = time.process_time() - started
import json, sys
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({{
    "seconds": seconds,
    "megabytes": int(peak.split()[1]) / 1000,
    "server": sorted(sys.modules.keys() & {{"fastapi", "aiohttp", "torch", "transformers", "turnstile_server"}}),
}}))
"""


def measured(python: str, statement: str) -> dict[str, Any]:
    command = [python, "-c", MEASURE.format(statement=statement)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        pins = Path(folder, "constraints.txt")
        constraints = subprocess.run(
            [python, ROOT / "scripts" / "constraints.py"], check=True, capture_output=True
        )
        pins.write_bytes(constraints.stdout)
        subprocess.run([ROOT / "scripts" / "pip_install.sh", folder, "-c", pins, ROOT], check=True)
        runs = [(measured(python, BELOW), measured(python, CLIENT)) for _ in range(RUNS)]
    clients = [client for _, client in runs]
    seconds = statistics.median(client["seconds"] for client in clients)
    megabytes = min(client["megabytes"] for client in clients)
    ratio = statistics.median(client["seconds"] / below["seconds"] for below, client in runs)
    print(f"{CLIENT}: {seconds:.3f} s, {ratio:.2f} times `{BELOW}` (under {MAX_RATIO:g});", end=" ")
    print(f"{megabytes:.1f} MB (under {MAX_MEGABYTES:g})")
    if clients[0]["server"]:
        print(f"the thin client imports {', '.join(clients[0]['server'])}")
        return 1
    return 0 if ratio < MAX_RATIO and megabytes < MAX_MEGABYTES else 1


if __name__ == "__main__":
    sys.exit(main())
