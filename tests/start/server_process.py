"""Real ``turnstile serve`` processes, with fewer rights or another file system where a test asks for it.

Tests run as root in CI. Root may write everywhere, so a server that must not is started without capabilities
(``setpriv``); file systems are mounted in a name space of the server's own (``unshare``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TIMEOUT_S = 100
LOGGED = (" INFO ", " WARNING ", " ERROR ")

AS_A_USER = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
"""Runs a command with the rights of its uid, and root with no more than its uid's."""


def mounted(folder: Path, options: str) -> tuple[str, ...]:
    """Runs a command that sees a file system in memory at ``folder``, mounted with ``options``."""
    script = 'mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"'
    return ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", options, str(folder))


def environment(**extra: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNSTILE_")}
    return {**inherited, **extra}


def serve_command(*arguments: str | Path) -> list[str]:
    ports = ("--control-port", "0", "--agent-port", "0")
    return [sys.executable, "-m", "turnstile", "serve", *ports, *map(str, arguments)]


def bounded_command(bounds: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A server with other bounds, by section and name; all its settings are in the environment."""
    return [sys.executable, str(Path(__file__).with_name("serve_bounded.py")), json.dumps(bounds)]


def refusal(*arguments: str | Path, under: tuple[str, ...] = (), **extra: str) -> str:
    """The one line in which ``turnstile serve`` says why it does not start; it exits with code 2."""
    done = subprocess.run(
        [*under, *serve_command(*arguments)],
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    [line] = [line for line in done.stderr.splitlines() if not any(level in line for level in LOGGED)]
    assert line.startswith("turnstile: "), line
    return line
