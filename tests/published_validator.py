"""``openenv validate`` of the newest ``openenv``, in the environment that TURNSTILE_OPENENV_PYTHON names."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
VALIDATE_S = 900
PYTHON = os.environ.get("TURNSTILE_OPENENV_PYTHON", "")

needs_openenv = pytest.mark.skipif(not PYTHON, reason="set TURNSTILE_OPENENV_PYTHON (scripts/ci_installs.sh)")


def validated(target: str | Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and the report. BuildKit comes with the distribution's client."""
    environment = {**os.environ, "DOCKER_BUILDKIT": "1", "PATH": f"/usr/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(Path(PYTHON).with_name("openenv")), "validate", str(target), "--json", *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=VALIDATE_S,
        check=False,
    )
    assert done.stdout.strip(), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, report
