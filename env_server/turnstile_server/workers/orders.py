"""The orders of the process in front to a process that it starts: sent once, on the child's stdin.

It is pickled, because settings have values that no JSON of theirs shows (keys). Only the parent can write there.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from turnstile_server.settings import Settings


@dataclass(frozen=True, slots=True)
class WorkerOrders:
    """``control``, ``agent``: descriptors of listening sockets, which the child inherits. ``archives``: the data
    directories that it only shows; none: it is a whole server."""

    settings: dict[str, Any]
    label: str
    control: int
    agent: int | None
    agent_url: str
    key: str | None
    archives: tuple[Path, ...] = ()

    def encoded(self) -> bytes:
        return pickle.dumps(self)

    def all_settings(self) -> Settings:
        """As they are: neither read from an environment nor checked again."""
        return Settings.model_construct(**self.settings)


def settings_fields(settings: Settings) -> dict[str, Any]:
    """All fields, as they are. (Settings that were read from a file are of a class that cannot be pickled.)"""
    return {name: vars(settings)[name] for name in Settings.model_fields}


def read_orders(stream: IO[bytes]) -> WorkerOrders:
    """From the child's stdin, to its end. Raises EOFError where the parent died before it wrote them."""
    found = pickle.loads(stream.read())
    assert isinstance(found, WorkerOrders)
    return found
