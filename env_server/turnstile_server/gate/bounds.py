"""Constants of this package: bounds that nobody has asked to change. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile_server.settings import Bounds


@dataclass(frozen=True)
class GateBounds(Bounds):
    """Bounds of the model API."""

    warm_s: float = 30.0
    """An episode without a call for this long drops what it keeps to make the next call cheaper: the parsed
    history, the tokens of its path in one piece. Its turns are then packed, and unpacked for whoever reads
    them."""
    trim_s: float = 10.0
    """When turns of resting episodes were packed, memory that is free goes back to the system, at most once in so
    many seconds and while no call is in flight. With glibc; other C libraries do so themselves or not at all."""
    status_hold_s: float = 15.0
    """The HTTP status of a streamed call is withheld until the engine's first chunk, but no longer than this."""
    keepalive_s: float = 10.0
    """A stream sends a keep-alive after this long without data."""
    abort_grace_s: float = 5.0
    """Time for the engine to confirm an abort and return the tokens so far; then the call is cut off."""
    max_value_bytes: int | None = None
    """A model call with a larger tool, or larger arguments of one call, is refused as longer than the context;
    none: 4 for each token of the context, and at least 1048576."""
    max_messages: int = 10_000
    """Messages of a model call; more are refused as longer than the context."""
    inline_body_bytes: int = 1 << 20
    """Bodies of which more bytes are new are parsed in a worker thread, others on the event loop."""
    render_threads: int = 2
    """Worker threads that render long prompts; as many calls at once count the tokens of one."""
    huge_prompt_chars: int = 1_000_000
    """Prompts of more characters than this are rendered by `huge_prompt_threads`, so that they do not keep the
    threads of other prompts."""
    huge_prompt_threads: int = 1
    """Worker threads that read and render huge prompts."""
    inline_render_chars: int = 20_000
    """Prompts of more characters than this are rendered in a worker thread, shorter ones on the event loop."""
