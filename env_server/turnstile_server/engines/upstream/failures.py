"""What a hosted model's server refuses or breaks, as our errors: one meaning for each status, in both formats.

Only refusals of this very request are the caller's; a refused key, a spent quota or a server that is down are no
fault of the agent's, and never its reward.
"""

from __future__ import annotations

import re
from typing import Final

from turnstile_server.errors import (
    ContextOverflow,
    EngineTimeout,
    EngineUnavailable,
    ModelCannotServe,
    TurnstileError,
)

_TOO_LONG: Final = re.compile(
    r"context_length_exceeded|maximum context length|prompt is too long|context window|input is too long"
    r"|longer than the model's context|exceeds? the (?:model's )?(?:maximum )?context",
    re.IGNORECASE,
)
"""How OpenAI, Anthropic, vLLM and SGLang say that a prompt leaves no room; only OpenAI has a code for it."""

_MOST_CHARS = 1_000
_GATEWAYS: Final = (502, 503, 504)
"""What proxies answer for a server that they cannot reach. One that is only busy may say 503 too."""


class UpstreamDown(EngineUnavailable):
    """Nobody is there: no connection could be made, or a proxy could make none. Told like its base."""


def refused(status: int, said: str, retry_after_s: float | None = None) -> TurnstileError:
    """The error of an answer with ``status``; ``said``: the server's message."""
    said = said[:_MOST_CHARS]
    if status in (401, 402, 403):
        return EngineUnavailable(f"the upstream refuses this server's key ({status}): {said} (engine.api_key)")
    if status in _GATEWAYS:
        return UpstreamDown(f"the upstream is not there ({status}): {said}", retry_after_s=retry_after_s or 1.0)
    if status in (408, 409, 429) or status >= 500:
        return EngineUnavailable(
            f"the upstream cannot answer now ({status}): {said}", retry_after_s=retry_after_s or 1.0
        )
    if status in (400, 413, 422) and _TOO_LONG.search(said):
        return ContextOverflow(f"the upstream refuses the prompt as too long: {said}: shorten the history")
    return ModelCannotServe(f"the upstream refuses the request ({status}): {said}")


def unreachable(error: Exception) -> TurnstileError:
    """The error of a connection that could not be made, or broke."""
    cause = error.__cause__ or error
    said = str(cause) or type(cause).__name__
    return UpstreamDown(f"the upstream cannot be reached: {said[:_MOST_CHARS]}", retry_after_s=1.0)


def too_slow(within_s: float, setting: str) -> TurnstileError:
    return EngineTimeout(f"the upstream said nothing for {within_s:.0f} s ({setting})")
