"""Turnstile's thin client: token-exact episodes of real agents, for training loops.

The names below are loaded when they are first used, so that ``import turnstile`` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnstile._lazy_names import lazy_names

if TYPE_CHECKING:
    from turnstile._retry import ClientSettings
    from turnstile.client import AsyncClient, AsyncEpisodeHandle, AsyncNewEpisodeHandle
    from turnstile.errors import (
        AuthError,
        Conflict,
        EngineError,
        Gone,
        InvalidRequest,
        NotFound,
        ProtocolError,
        ServerBusy,
        ServerError,
        ServerUnavailable,
        SetupFault,
        SourceUnavailable,
        Timeout,
        TurnstileError,
    )
    from turnstile.groups import advantages, by_group, has_signal
    from turnstile.rollout import Rollout, RolloutProgress
    from turnstile.servers import DnsServers, FileServers, ServerSource
    from turnstile.sync import Client, EpisodeHandle, NewEpisodeHandle
    from turnstile.task_stream import TaskStreamState

_HOMES = {
    "turnstile._retry": ("ClientSettings",),
    "turnstile.client": ("AsyncClient", "AsyncEpisodeHandle", "AsyncNewEpisodeHandle"),
    "turnstile.groups": ("advantages", "by_group", "has_signal"),
    "turnstile.rollout": ("Rollout", "RolloutProgress"),
    "turnstile.servers": ("FileServers", "DnsServers", "ServerSource"),
    "turnstile.sync": ("Client", "EpisodeHandle", "NewEpisodeHandle"),
    "turnstile.task_stream": ("TaskStreamState",),
    "turnstile.errors": (
        "AuthError",
        "Conflict",
        "EngineError",
        "Gone",
        "InvalidRequest",
        "NotFound",
        "ProtocolError",
        "ServerBusy",
        "ServerError",
        "ServerUnavailable",
        "SetupFault",
        "SourceUnavailable",
        "Timeout",
        "TurnstileError",
    ),
}

__all__ = [
    "AsyncClient",
    "AsyncEpisodeHandle",
    "AsyncNewEpisodeHandle",
    "AuthError",
    "Client",
    "ClientSettings",
    "Conflict",
    "DnsServers",
    "EngineError",
    "EpisodeHandle",
    "FileServers",
    "Gone",
    "InvalidRequest",
    "NewEpisodeHandle",
    "NotFound",
    "ProtocolError",
    "Rollout",
    "RolloutProgress",
    "ServerBusy",
    "ServerError",
    "ServerSource",
    "ServerUnavailable",
    "SetupFault",
    "SourceUnavailable",
    "TaskStreamState",
    "Timeout",
    "TurnstileError",
    "advantages",
    "by_group",
    "has_signal",
]


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
