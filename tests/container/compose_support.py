"""Runs the project's compose.yaml in a folder of its own, under names of its own.

Docker Compose 2 is `docker compose` where that works, else the program of scripts/install_compose.sh, kept in the
cache folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEY = "k" * 24
UP_S = 300
VOLUMES = ("turnstile-data", "turnstile-tiny-data", "turnstile-restored")
"""Names that the page and the file use, and that this machine may have of its own."""


@cache
def program() -> tuple[str, ...]:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        subprocess.run(["docker", "compose", "version"], capture_output=True, check=True)
        return ("docker", "compose")
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "turnstile" / "compose"
    subprocess.run([ROOT / "scripts" / "install_compose.sh", cache_folder], check=True, timeout=300)
    return (str(cache_folder / "docker-compose"),)


def compose(
    folder: Path, *arguments: str, ok: bool = True, timeout_s: float = 100, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``docker compose ARGUMENTS`` in ``folder``. It must succeed if ``ok``."""
    done = subprocess.run(
        [*program(), *arguments],
        cwd=folder,
        env=clean(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if ok and done.returncode != 0:
        profile = arguments[: arguments.index("up")] if "up" in arguments else ()
        log = compose(folder, *profile, "logs", "--tail", "30", ok=False, **environment)
        raise AssertionError(f"{done.stdout}{done.stderr}{log.stdout}{log.stderr}"[-12000:])
    return done


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``environment`` instead of any setting of Turnstile or Compose."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TURNSTILE_", "COMPOSE_"))}
    return {**kept, **environment}


@contextlib.contextmanager
def project(folder: Path) -> Iterator[Path]:
    """A copy of compose.yaml and what it names, with names of its own; its containers and volumes do not stay."""
    name = f"turnstile-test-{secrets.token_hex(4)}"
    (folder / "server").mkdir()
    shutil.copy(ROOT / "server" / "seccomp.json", folder / "server")
    (folder / "compose.yaml").write_text(own_names((ROOT / "compose.yaml").read_text(), name))
    try:
        yield folder
    finally:
        down = ("--profile", "*", "down", "--volumes", "--timeout", "5", "--remove-orphans")
        compose(folder, *down, TURNSTILE_CONTROL_KEY=KEY)


def own_names(text: str, name: str) -> str:
    """``text`` of the file or the page with names that nothing else on this machine has."""
    text = text.replace("name: turnstile\n", f"name: {name}\n")
    for volume in VOLUMES:
        text = text.replace(volume, f"{name}-{volume.removeprefix('turnstile-')}")
    return text
