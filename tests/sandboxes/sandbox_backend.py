"""What the contract of sandboxes needs to know of a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.protocol import SandboxProvider
from turnstile_server.settings import SandboxSettings


@dataclass(frozen=True)
class Backend:
    """``own_uids``: each user has a uid of its own. ``kill_helper``: from outside, by SIGKILL.
    ``traces``: what of a sandbox is on the host, in words; empty when it is gone. ``own_kernel``: sandboxes do not
    share the host's; what fills one may end the sandbox."""

    name: str
    make: Callable[[SandboxSettings, Path], SandboxProvider]
    own_uids: bool
    kill_helper: Callable[[HelperSandbox, Path], None]
    traces: Callable[[str, Path], list[str]]
    own_kernel: bool = False
