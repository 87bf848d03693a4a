"""Checks that the thin client stays thin: installed alone, imported in under 0.5 s and 60 MB.

    python scripts/client_budget.py

Installs this project without extras (at the versions of uv.lock) into a new virtual environment, so that an
import of anything that the base install lacks fails here. Measured in fresh interpreters, the best of five:
the time to import both clients and the peak memory of the whole process. The time is the processor's, which on
an idle machine is the time that passes and on a busy one does not grow with what else runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_SECONDS = 0.5
MAX_MEGABYTES = 60.0
RUNS = 5

# VmHWM rather than ru_maxrss, which a new process inherits from the one that started it.
MEASURE = """
import time; started = time.process_time()
from turnstile import AsyncClient, Client
seconds = time.process_time() - started
import json, sys
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({
    "seconds": seconds,
    "megabytes": int(peak.split()[1]) / 1000,
    "server": sorted(sys.modules.keys() & {"fastapi", "aiohttp", "torch", "transformers", "turnstile_server"}),
}))
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        pins = Path(folder, "constraints.txt")
        constraints = subprocess.run(
            [python, ROOT / "scripts" / "constraints.py"], check=True, capture_output=True
        )
        pins.write_bytes(constraints.stdout)
        subprocess.run([python, "-m", "pip", "install", "-q", "-c", pins, ROOT], check=True)
        runs = [
            json.loads(subprocess.run([python, "-c", MEASURE], check=True, capture_output=True).stdout)
            for _ in range(RUNS)
        ]
    seconds = min(run["seconds"] for run in runs)
    megabytes = min(run["megabytes"] for run in runs)
    print(f"import turnstile: {seconds:.3f} s (under {MAX_SECONDS}), {megabytes:.1f} MB (under {MAX_MEGABYTES:g})")
    if runs[0]["server"]:
        print(f"the thin client imports {', '.join(runs[0]['server'])}")
        return 1
    return 0 if seconds < MAX_SECONDS and megabytes < MAX_MEGABYTES else 1


if __name__ == "__main__":
    sys.exit(main())
