"""Constants of this package: bounds that nobody has asked to change. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile_server.settings import Bounds


@dataclass(frozen=True)
class EngineBounds(Bounds):
    """Bounds of the calls to an engine."""

    probe_timeout_s: float = 10.0
    """Time for one answer while the engine is waited for at start: one that accepts and is silent is asked again,
    and reported."""
    last_abort_s: float = 5.0
    """`sglang`, `vllm`: time to abort a call that has ended here without a finish; its caller waits that long at
    most."""
    connect_attempts: int = 3
    """Attempts to open a connection. A request that was sent is never repeated."""
    prompt_json_bytes: int = 64 << 20
    """`sglang`, `vllm`, `embedded`: memory for the latest prompts as they were sent, so that the next call of a
    conversation writes only its new tokens; 0: none."""
    prompt_json_rest_s: float = 30.0
    """An episode that makes no call for so long keeps none of that memory."""
    max_answered: int = 8192
    """`trainer`: completed calls that are remembered, so that a repeated completion gets the same answer."""
