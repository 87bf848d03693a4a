"""A toy engine in a folder of its own, and what is left of its processes."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bounded import bounded
from turnstile_server.settings import EngineSettings, LaunchSettings
from waiting import wait_until_sync

TOY = Path(__file__).resolve().parent / "toy_engine"
WAIT_S = 60.0


@dataclass(frozen=True)
class Toy:
    """The toy engine's folder: ``behave`` before it starts, and what it did."""

    folder: Path

    def behave(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def forget(self, name: str) -> None:
        (self.folder / name).unlink()

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    @property
    def starts(self) -> list[int]:
        return [int(line) for line in self.lines("starts")]

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(TOY), "TOY_DIR": str(self.folder)}

    def launch(self, **changes: Any) -> LaunchSettings:
        given = {
            "python": sys.executable,
            "backoff_start_s": 0.0,
            "stop_grace_s": 5.0,
            "environment": self.environment(),
        }
        return bounded(LaunchSettings, enabled=True, **(given | changes))

    def left(self) -> list[int]:
        """Processes that run and have this folder in their environment, wherever they are in the tree."""
        mark = f"TOY_DIR={self.folder}".encode()
        return [pid for pid in _processes() if mark in _environment(pid) and _runs(pid)]

    def programs(self) -> list[str]:
        return [Path(f"/proc/{pid}/cmdline").read_text() for pid in self.left()]

    def wait_gone(self) -> None:
        wait_until_sync(lambda: not self.left(), "".join(self.programs()))


def engine_settings(**changes: Any) -> EngineSettings:
    return bounded(EngineSettings, kind="sglang", **({"start_timeout_s": 60.0} | changes))


def below(root: int) -> list[int]:
    """All descendants of a process."""
    found = [
        int(child)
        for task in Path(f"/proc/{root}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [*found, *[pid for child in found for pid in below(child)]]


def left_of(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False
