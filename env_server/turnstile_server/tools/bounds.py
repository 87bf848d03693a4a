"""Constants of this package: bounds that nobody has asked to change. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile_server.settings import Bounds


@dataclass(frozen=True)
class McpBounds(Bounds):
    """Bounds of the MCP endpoint and of calls through it."""

    progress_s: float = 1.0
    """`bash` tells a client that asks for progress its latest line of output, once in so many seconds."""
    max_body_values: int = 10_000
    """JSON values in the body of an MCP request; more are 400. They are read on the event loop."""
    own_max_arguments_bytes: int = 1 << 20
    """Largest arguments (as JSON) that an own tool is called with."""
    max_sessions_per_episode: int = 64
    """MCP sessions per episode; more are refused."""
    session_idle_s: float = 1800.0
    """A session without a request for this long is closed."""
    resume_s: float = 10.0
    """A call whose client lost its connection goes on for this long, so that the client may come back for the
    result; then it is stopped. 0: it is stopped at once."""
    retry_s: float = 1.0
    """Time that clients are told to wait before they come back."""
    keep_events_s: float = 60.0
    """Time after a call's end for which its result can be fetched again."""
    max_events: int = 256
    """Events kept per MCP session; beyond it progress is dropped first, then old results."""
    max_event_bytes: int = 1 << 20
    """Bytes of the events kept per MCP session."""
    max_requests_per_episode: int = 128
    """MCP requests in flight per episode, open streams included; more are 429."""
