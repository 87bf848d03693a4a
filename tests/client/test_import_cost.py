"""The thin client is thin: what an import takes and loads, seen in a fresh process.

Its time depends on the machine; scripts/client_budget.py compares it with that of what the client stands on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

MAX_MEGABYTES = 60

PROBE = """
import json, re, sys
{statement}
print(json.dumps({{
    "megabytes": int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024,
    "modules": sorted({{name.split(".")[0] for name in sys.modules}} | set(sys.modules) & {{"turnstile.cli"}}),
}}))
"""


def cost_of(statement: str) -> dict[str, Any]:
    """As of a second process: the first one compiles what is imported, which takes a megabyte more."""
    command = [sys.executable, "-c", PROBE.format(statement=statement)]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=kept)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "statement",
    [
        "import turnstile",
        "from turnstile import AsyncClient, Client",
        "from turnstile.models.samples_encoding import decode_samples",
    ],
)
def test_an_import_stays_under_60_megabytes(statement: str) -> None:
    assert cost_of(statement)["megabytes"] < MAX_MEGABYTES


@pytest.mark.slow
def test_the_client_loads_no_part_of_the_server_and_no_command_line() -> None:
    modules = set(
        cost_of("from turnstile import AsyncClient, Client; AsyncClient('http://h'); Client('http://h')")[
            "modules"
        ]
    )
    heavy = {
        "typer",
        "fastapi",
        "starlette",
        "uvicorn",
        "transformers",
        "tokenizers",
        "torch",
        "pydantic_settings",
    }
    assert modules.isdisjoint(
        {*heavy, "starlette", "turnstile_server", "turnstile.cli", "prometheus_client", "aiohttp"}
    )
