"""A program in a trainer's own Python, which has the client and the tests' modules but no server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SLOW_S = 300


def answer_of(trainer: str, program: str, folder: Path, **arguments: str) -> dict[str, Any]:
    """The last line that ``tests/trainers/PROGRAM.py`` writes: JSON. Its ``arguments`` come as one JSON object on
    stdin; ``TURNSTILE_TRAINER_PYTHON`` is the Python (scripts/ci_trainers.sh)."""
    python = os.environ[f"TURNSTILE_{trainer.upper()}_PYTHON"]
    [info] = Path(str(distribution("turnstile-rl").locate_file(""))).glob("turnstile_rl-*.dist-info")
    places = folder / "places"
    places.mkdir(exist_ok=True)
    link = places / info.name
    if not link.exists():
        link.symlink_to(info)
    path = os.pathsep.join([str(ROOT / "client"), str(ROOT / "tests"), str(places)])
    environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [python, str(ROOT / "tests" / "trainers" / f"{program}.py")],
        input=json.dumps(arguments),
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SLOW_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    sys.stderr.write(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
